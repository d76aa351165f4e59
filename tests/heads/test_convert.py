"""`treedec convert` and `treedec inspect`: what they print, and how they fail."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats import (
    DRAFT_IDS,
    EAGLE3,
    HEADS,
    HIDDEN,
    MEDUSA,
    VOCAB,
    eagle3_tensors,
    medusa_tensors,
    put,
    tiny_model,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from treedec import cli
from treedec.cli.heads import Format
from treedec.heads.checkpoint import save_heads
from treedec.heads.formats import WRITERS, read, write
from treedec.heads.medusa import MedusaConfig, MedusaHeads
from treedec.models import Fingerprint


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    """The model as a folder with a tokenizer, as `--target` takes it."""
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    vocabulary = {chr(33 + token): token for token in range(VOCAB)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges=[]))).save_pretrained(path)
    return path


@pytest.fixture
def medusa(tmp_path):
    return put(tmp_path / "medusa", MEDUSA, medusa_tensors(), "medusa_lm_head.pt")


@pytest.fixture
def run(capfd):
    """Run the command line in this process: `run(*arguments) -> (exit code, stdout, stderr)`."""

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_line_offers_what_can_be_written():
    assert [str(name) for name in Format] == list(WRITERS)


def test_convert_there_and_back(run, tmp_path, medusa):
    code, out, err = run("convert", medusa, tmp_path / "native", "--to", "treedec")
    assert (code, err) == (0, "") and out == f"{tmp_path / 'native'}: medusa heads as treedec\n"
    code, out, _ = run("convert", tmp_path / "native", tmp_path / "vllm", "--to", "vllm-medusa", "--json")
    assert code == 0 and out.count("\n") == 1
    assert json.loads(out) == {
        "out": str(tmp_path / "vllm"),
        "from": "treedec",
        "to": "vllm-medusa",
        "method": "medusa",
    }
    assert run("convert", tmp_path / "vllm", tmp_path / "again", "--to", "treedec")[0] == 0
    assert files(tmp_path / "again") == files(tmp_path / "native")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "medusa", "native", "vllm"], "scratch stays"


def test_convert_to_every_eagle_format_and_back(run, tmp_path, target):
    source = put(tmp_path / "source", EAGLE3, eagle3_tensors())
    assert run("convert", source, tmp_path / "native", "--to", "treedec", "--target", target)[0] == 0
    assert read(tmp_path / "native").base == str(target)
    for name in ("eagle3", "speculators"):
        assert run("convert", tmp_path / "native", tmp_path / name, "--to", name)[0] == 0
        code, _, _ = run("convert", tmp_path / name, tmp_path / f"{name}-native", "--to", "treedec", "--target", target)
        assert code == 0
        assert files(tmp_path / f"{name}-native") == files(tmp_path / "native")


def test_a_target_fills_in_what_is_shared(run, tmp_path, model, target):
    heads = MedusaHeads(MedusaConfig(HIDDEN, VOCAB, HEADS, 1, len(DRAFT_IDS)), torch.tensor(DRAFT_IDS))
    save_heads(tmp_path / "heads", heads, Fingerprint.of(model), {}, dtype=torch.float32)
    command = ("convert", tmp_path / "heads", tmp_path / "vllm", "--to", "vllm-medusa")
    code, out, err = run(*command)
    assert (code, out) == (2, "") and "--target" in err and err.count("\n") == 1
    assert not (tmp_path / "vllm").exists()
    assert run(*command, "--target", target)[0] == 0
    rows = load_file(tmp_path / "vllm" / "model.safetensors")["lm_heads.0.weight"]
    assert torch.equal(rows, model.lm_head.weight[DRAFT_IDS])


def test_what_is_there_is_replaced_on_request_only(run, tmp_path, medusa):
    native = tmp_path / "native"
    assert run("convert", medusa, native, "--to", "treedec")[0] == 0
    (native / "README.md").write_text("whose heads these are")
    before = files(native)
    code, out, err = run("convert", medusa, native, "--to", "vllm-medusa")
    assert (code, out) == (2, "") and "already exists" in err and "--overwrite" in err
    assert files(native) == before
    assert run("convert", native, native, "--to", "vllm-medusa", "--overwrite")[0] == 0
    assert json.loads((native / "config.json").read_text())["model_type"] == "medusa"
    assert (native / "README.md").read_text() == "whose heads these are"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["medusa", "native"]


def test_nothing_but_heads_is_ever_replaced(run, tmp_path, medusa, target):
    """A model has files of the same names; heads in a file of another name would stay beside the new ones."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    for place in (target, tmp_path / "notes", medusa, tmp_path / "notes" / "thesis.txt"):
        before = files(place) if place.is_dir() else place.read_bytes()
        code, out, err = run("convert", medusa, place, "--to", "treedec", "--overwrite")
        assert (code, out) == (2, "") and "no heads that could be replaced" in err
        assert (files(place) if place.is_dir() else place.read_bytes()) == before


def test_a_failed_conversion_leaves_nothing(run, tmp_path, medusa, monkeypatch):
    def full_disk(*_, **__):
        raise PermissionError("no space left on device")

    monkeypatch.setattr("treedec.heads.checkpoint.save_file", full_disk)
    code, _, err = run("convert", medusa, tmp_path / "new", "--to", "treedec")
    assert code == 2 and "no space" in err
    assert [path.name for path in tmp_path.iterdir()] == ["medusa"]


BAD = [
    (("convert", "/no/such/heads", "NEW", "--to", "treedec"), "/no/such/heads"),
    (("convert", "MEDUSA", "NEW"), "--to"),
    (("convert", "MEDUSA", "NEW", "--to", "gguf"), "--to"),
    (("convert", "MEDUSA", "NEW", "--to", "eagle3"), "cannot be written as eagle3: that format has no medusa heads"),
    (("convert", "MEDUSA", "NEW", "--to", "treedec", "--target", "/no/such/model"), "/no/such/model"),
    (("convert", "TARGET", "NEW", "--to", "treedec"), "holds no heads in a known format"),
    (("inspect", "/no/such/heads"), "/no/such/heads"),
    (("inspect", "TARGET"), "holds no heads in a known format"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path, medusa, target, arguments, said):
    places = {"MEDUSA": medusa, "TARGET": target, "NEW": tmp_path / "new"}
    code, out, err = run(*(places.get(argument, argument) for argument in arguments))
    assert code == 2 and out == ""
    assert err.startswith("treedec: error: ") and err.count("\n") == 1 and said in err
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_one_line_and_exit_code_2(run, tmp_path, medusa):
    write(tmp_path / "a", read(medusa), "treedec")
    weights = tmp_path / "a" / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("bias")
    save_file(tensors, weights)
    for command in (["inspect", tmp_path / "a"], ["convert", tmp_path / "a", tmp_path / "b", "--to", "vllm-medusa"]):
        code, out, err = run(*command)
        assert (code, out) == (2, "") and "'bias'" in err and str(weights) in err and err.count("\n") == 1
    weights.write_bytes(weights.read_bytes()[:100])
    code, out, err = run("inspect", tmp_path / "a")
    assert (code, out) == (2, "") and str(weights) in err and err.count("\n") == 1


def test_inspect_json(run, medusa):
    code, out, err = run("inspect", medusa, "--json")
    assert (code, err) == (0, "") and out.count("\n") == 1
    size = HEADS * (HIDDEN * HIDDEN + HIDDEN + VOCAB * HIDDEN)
    assert json.loads(out) == {
        "format": "medusa",
        "method": "medusa",
        "shape": {
            "hidden_size": HIDDEN, "vocab_size": VOCAB, "heads": HEADS, "blocks": 1, "draft_vocab_size": VOCAB,
            "own_lm_heads": True,
        },
        "draft_vocab_size": VOCAB,
        "base": "lmsys/vicuna-7b-v1.3",
        "target": None,
        "parameters": size,
        "bytes": 4 * size + 8 * VOCAB,
        "writes": {
            "treedec": None,
            "vllm-medusa": None,
            "eagle3": "that format has no medusa heads",
            "speculators": "that format has no medusa heads",
        },
    }  # fmt: skip


def test_inspect_does_not_make_up_what_is_left_to_the_target(run, tmp_path, target):
    headless = put(tmp_path / "a", MEDUSA, medusa_tensors(lm_head=False), "medusa_lm_head.pt")
    facts = json.loads(run("inspect", headless, "--json")[1])
    assert facts["shape"]["vocab_size"] is None and facts["draft_vocab_size"] is None
    facts = json.loads(run("inspect", headless, "--json", "--target", target)[1])
    assert facts["draft_vocab_size"] == VOCAB
    eagle = put(tmp_path / "b", EAGLE3, eagle3_tensors())
    facts = json.loads(run("inspect", eagle, "--json")[1])
    assert facts["shape"]["features"] is None and facts["draft_vocab_size"] == len(DRAFT_IDS)
    assert facts["writes"] == {
        "treedec": None, "vllm-medusa": "that format has no eagle heads", "eagle3": None, "speculators": None
    }  # fmt: skip
    code, out, _ = run("inspect", eagle)
    assert code == 0 and "features the target's" in " ".join(out.split()) and "no: that format" in out


def test_inspect_names_the_target(run, tmp_path, medusa, model):
    write(tmp_path / "native", read(medusa), "treedec", model)
    code, out, _ = run("inspect", tmp_path / "native")
    assert code == 0 and "lmsys/vicuna-7b-v1.3 (LlamaForCausalLM)" in out
