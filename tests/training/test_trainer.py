"""Training as a whole: heads learn their offsets, runs resume exactly (A23), the target stays what it was (A21)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from treedec.heads.checkpoint import load_heads
from treedec.target import Target
from treedec.training import trainer
from treedec.training.features import capture_features, draft_vocabulary
from treedec.training.losses import DraftHead, HeadLosses, draft_logits
from treedec.training.trainer import (
    TrainConfig,
    TrainingDiverged,
    TrainingInterrupted,
    learning_rate,
    train,
)

QUIET = Console(quiet=True)
VOCAB, HIDDEN = 97, 32
SMALL = TrainConfig(
    heads=3, draft_vocab_size=60, epochs=2, batch_positions=64, holdout=0.2, log_every=2, checkpoint_every=3
)


def tiny_model(vocab=VOCAB, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=None,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def counting_model(vocab=23):
    """A target that continues `x` with `x + 1`: one-hot embeddings pass untouched to a shifted LM head."""
    model = tiny_model(vocab)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, HIDDEN))
        model.lm_head.weight.copy_(torch.eye(vocab, HIDDEN).roll(1, 0))
    return model


def write(path, samples):
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    return path


def random_samples(count=20, seed=0, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(vocab, (24,), generator=generator).tolist(), "responses": [[4, 12], [15, 24]]}
        for _ in range(count)
    ]


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data.jsonl", random_samples())


def state_of(out):
    return torch.load(out / "state.pt", weights_only=True)


def assert_same(a, b, path="state"):
    """Bitwise equality of nested checkpoints."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def at_training_step(monkeypatch, step, act):
    """Call `act(losses)`, which returns losses, in the middle of a training step (not of an evaluation)."""
    original, seen = trainer.medusa_loss, []

    def wrapped(states, *arguments):
        losses = original(states, *arguments)
        if states.requires_grad:
            seen.append(1)
            if len(seen) == step:
                return act(losses)
        return losses

    monkeypatch.setattr(trainer, "medusa_loss", wrapped)


def ctrl_c(losses):
    os.kill(os.getpid(), signal.SIGINT)
    return losses


def test_each_head_learns_its_own_offset(tmp_path):
    model = counting_model()
    samples = [
        {"input_ids": [(start + i) % 23 for i in range(30)], "responses": [[5, 18], [20, 30]]}
        for start in range(0, 46, 1)
    ]
    config = replace(SMALL, draft_vocab_size=23, epochs=12, batch_positions=256, learning_rate=0.05)
    metrics = train(model, None, write(tmp_path / "data.jsonl", samples), tmp_path / "out", config, console=QUIET)
    assert metrics["top1"] == [1.0, 1.0, 1.0]
    heads = load_heads(tmp_path / "out" / "heads", model)
    hidden = Target(model).features(torch.arange(23)[None])[0]
    scores = draft_logits(heads(hidden), DraftHead.of(model, heads.draft_ids))
    for k in range(3):
        assert heads.draft_ids[scores[k].argmax(-1)].tolist() == [(x + 2 + k) % 23 for x in range(23)]
    history = json.loads((tmp_path / "out" / "metrics.json").read_text())["history"]
    assert history[0]["accuracy"][0] < 0.9 < history[-1]["accuracy"][0] and history[-1]["loss"] < history[0]["loss"] / 3


def test_the_first_boundary_is_learnt_and_the_prompt_is_not(tmp_path):
    """Token 0 opens every answer and occurs nowhere else: only the last prompt token can teach what follows it."""
    model = counting_model()
    samples = [
        {"input_ids": [7 + i % 3, 9, 0, 1, 2, 3, 4, 5, 6, 12 + i % 5, 20, 21], "responses": [[2, 9]]} for i in range(24)
    ]
    config = replace(SMALL, draft_vocab_size=23, epochs=60, learning_rate=0.05, batch_positions=512)
    train(model, None, write(tmp_path / "data.jsonl", samples), tmp_path / "out", config, console=QUIET)
    heads = load_heads(tmp_path / "out" / "heads", model)
    vector = Target(model).features(torch.arange(23)[None])[0]
    scores = draft_logits(heads(vector), DraftHead.of(model, heads.draft_ids)).argmax(-1)
    # State 9 (the last of the prompt) is followed by 0, whose own prediction, 1, is what head 0 must say.
    assert scores[:, 9].tolist() == [1, 2, 3]
    weight = heads.weight.detach().abs().sum((1, 2))
    outside = [7, 8, 12, 14, 16, 20, 21]  # columns that only states outside the responses reach
    assert float(weight[:, outside].max()) == 0 < float(weight[:, 9].min())


def test_every_head_is_trained_and_the_target_is_not(tmp_path, data):
    model = tiny_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, None, data, tmp_path / "out", SMALL, console=QUIET)
    heads = state_of(tmp_path / "out")["heads"]
    assert (heads["weight"].flatten(1).abs().sum(1) > 0).all() and (heads["bias"].flatten(1).abs().sum(1) > 0).all()
    assert heads["weight"].dtype == torch.float32
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not model.lm_head._forward_pre_hooks


def test_a_bfloat16_target_gets_float32_masters(tmp_path, data):
    metrics = train(tiny_model().to(torch.bfloat16), None, data, tmp_path / "out", SMALL, console=QUIET)
    state = state_of(tmp_path / "out")
    assert state["heads"]["weight"].dtype == torch.float32
    assert not torch.equal(state["heads"]["weight"], state["heads"]["weight"].bfloat16().float())
    assert metrics["mean_kl"] < 10


@pytest.mark.parametrize(("dtype", "reduced"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)])
def test_only_for_bfloat16_targets_are_the_heads_products_in_16_bits(tmp_path, data, dtype, reduced):
    model = tiny_model().to(dtype)
    features = capture_features(model, data, tmp_path / "features", console=QUIET)
    run = trainer.Run(model, None, features, SMALL, tmp_path / "state.pt")
    with torch.no_grad():
        run.heads.weight.normal_(std=0.3)
        states, exact = run._states(features.hidden), run.heads(features.hidden.float())
    assert states.dtype == torch.float32 and torch.equal(states, exact) is not reduced
    torch.testing.assert_close(states, exact, rtol=5e-2, atol=5e-2)


def test_a_float16_target_can_be_trained_for(tmp_path, data):
    metrics = train(tiny_model().to(torch.float16), None, data, tmp_path / "out", SMALL, console=QUIET)
    weight = state_of(tmp_path / "out")["heads"]["weight"]
    assert weight.isfinite().all() and (weight.flatten(1).abs().sum(1) > 0).all() and metrics["mean_kl"] < 10


def test_what_is_measured(tmp_path, data):
    """Untrained heads repeat the target's next token: agreement and divergence are then known from its states alone."""
    model = tiny_model()
    config = replace(SMALL, learning_rate=1e-30, epochs=1)
    metrics = train(model, None, data, tmp_path / "out", config, console=QUIET)
    heads = load_heads(tmp_path / "out" / "heads", model)
    assert heads.weight.abs().max() < 1e-20
    right, top, kl, count, covered, responses = [0] * 3, [0] * 3, [0.0] * 3, [0] * 3, 0, 0
    for one in random_samples()[-4:]:  # the last fifth
        with torch.no_grad():
            hidden = model.model(torch.tensor([one["input_ids"]])).last_hidden_state[0]
            logits = model.lm_head(hidden)
        drafts = logits[:, heads.draft_ids].log_softmax(-1)
        for start, end in one["responses"]:
            covered += sum(token in heads.draft_ids.tolist() for token in one["input_ids"][start:end])
            responses += end - start
            for k in range(3):
                for label in range(start + 1, end):
                    read = label - 2 - k
                    if read >= start - 1:
                        greedy = int(logits[label - 1].argmax())
                        best = heads.draft_ids[drafts[read].argsort(descending=True)[:5]].tolist()
                        right[k] += best[0] == greedy
                        top[k] += greedy in best
                        kl[k] += float((drafts[label - 1].exp() * (drafts[label - 1] - drafts[read])).sum())
                        count[k] += 1
    assert metrics["counts"] == count
    assert metrics["top1"] == pytest.approx([a / n for a, n in zip(right, count, strict=True)])
    assert metrics["top5"] == pytest.approx([a / n for a, n in zip(top, count, strict=True)]) and sum(top) > 0
    assert metrics["kl"] == pytest.approx([a / n for a, n in zip(kl, count, strict=True)], rel=1e-4)
    assert metrics["coverage"] == pytest.approx(covered / responses) and 0 < metrics["coverage"] < 1
    assert metrics["heldout_positions"] == responses and metrics["positions"] == 16 * 17
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["final"] == metrics


def test_masked_and_short_samples_are_counted_and_change_nothing(tmp_path, data):
    plain = train(tiny_model(), None, data, tmp_path / "plain", SMALL, console=QUIET)
    samples = random_samples()
    masked = {"input_ids": list(range(24)), "responses": []}
    short = {"input_ids": [1, 2, 3], "responses": [[0, 3]]}  # heads + 1 = 4 tokens at least
    mixed = write(tmp_path / "mixed.jsonl", [masked, *samples[:5], short, *samples[5:], masked])
    metrics = train(tiny_model(), None, mixed, tmp_path / "mixed", SMALL, console=QUIET)
    assert plain["skipped_conversations"] == 0 and metrics["skipped_conversations"] == 3
    assert metrics["mean_kl"] == pytest.approx(plain["mean_kl"], rel=1e-5)
    assert metrics["positions"] == plain["positions"] and metrics["counts"] == plain["counts"]


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_resuming_after_ctrl_c_is_not_to_have_stopped(tmp_path, data, monkeypatch, stop):
    straight = train(tiny_model(), None, data, tmp_path / "straight", SMALL, console=QUIET)
    whole = state_of(tmp_path / "straight")
    assert whole["place"]["step"] == 10 and stop not in (3, 6, 9), "stop elsewhere than at a checkpoint"
    with monkeypatch.context() as patch:
        at_training_step(patch, stop, ctrl_c)
        with pytest.raises(TrainingInterrupted, match=f"after step {stop} of 10.*state.pt"):
            train(tiny_model(), None, data, tmp_path / "cut", SMALL, console=QUIET)
    cut = state_of(tmp_path / "cut")
    assert cut["place"]["step"] == stop and not (tmp_path / "cut" / "heads").exists()
    assert not torch.equal(cut["heads"]["weight"], whole["heads"]["weight"])
    resumed = train(tiny_model(), None, data, tmp_path / "cut", SMALL, console=QUIET)
    assert_same(state_of(tmp_path / "cut"), whole)
    assert resumed == straight
    assert (tmp_path / "cut" / "metrics.json").read_text() == (tmp_path / "straight" / "metrics.json").read_text()


def test_resuming_after_a_crash_goes_back_to_the_last_checkpoint(tmp_path, data, monkeypatch):
    train(tiny_model(), None, data, tmp_path / "straight", SMALL, console=QUIET)

    def crash(losses):
        raise RuntimeError("the machine is gone")

    with monkeypatch.context() as patch:
        at_training_step(patch, 5, crash)
        with pytest.raises(RuntimeError, match="gone"):
            train(tiny_model(), None, data, tmp_path / "cut", SMALL, console=QUIET)
    assert state_of(tmp_path / "cut")["place"]["step"] == 3
    train(tiny_model(), None, data, tmp_path / "cut", SMALL, console=QUIET)
    assert_same(state_of(tmp_path / "cut"), state_of(tmp_path / "straight"))


def test_ctrl_c_during_an_evaluation_repeats_the_evaluation(tmp_path, data, monkeypatch):
    train(tiny_model(), None, data, tmp_path / "straight", SMALL, console=QUIET)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "agreement", lambda *_: ctrl_c(None))
        with pytest.raises(TrainingInterrupted, match="after step 5 of 10"):
            train(tiny_model(), None, data, tmp_path / "cut", SMALL, console=QUIET)
    assert state_of(tmp_path / "cut")["evaluations"] == []
    train(tiny_model(), None, data, tmp_path / "cut", SMALL, console=QUIET)
    assert_same(state_of(tmp_path / "cut"), state_of(tmp_path / "straight"))


def test_ctrl_c_during_capture_says_so_and_goes_on(tmp_path, data, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Target, "features", lambda *_: ctrl_c(None))
        with pytest.raises(TrainingInterrupted, match="while capturing features"):
            train(tiny_model(), None, data, tmp_path / "out", SMALL, console=QUIET)
    assert train(tiny_model(), None, data, tmp_path / "out", SMALL, console=QUIET)["steps"] == 10


def test_ctrl_c_works_as_before_afterwards(tmp_path, data):
    handler = signal.getsignal(signal.SIGINT)
    train(tiny_model(), None, data, tmp_path / "out", SMALL, console=QUIET)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, data, monkeypatch):
    at_training_step(monkeypatch, 5, lambda losses: HeadLosses(losses.kl * torch.nan, losses.hits, losses.counts))
    with pytest.raises(TrainingDiverged, match="step 5: the loss is nan"):
        train(tiny_model(), None, data, tmp_path / "out", SMALL, console=QUIET)
    state = state_of(tmp_path / "out")
    assert state["place"]["step"] == 3 and state["heads"]["weight"].isfinite().all()


def test_a_finished_run_is_not_trained_again(tmp_path, data, monkeypatch):
    metrics = train(tiny_model(), None, data, tmp_path / "out", SMALL, console=QUIET)
    at_training_step(monkeypatch, 1, lambda _: pytest.fail("trained again"))
    assert train(tiny_model(), None, data, tmp_path / "out", SMALL, console=QUIET) == metrics


CHANGES = {
    "heads": 2,
    "learning_rate": 2e-3,
    "seed": 1,
    "batch_positions": 65,
    "head_weights": (1.0, 1.0, 0.5),
    "epochs": 3,
    "holdout": 0.3,
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_config_does_not_resume(tmp_path, data, finished, field):
    out = shutil.copytree(finished, tmp_path / "out")
    before = (out / "state.pt").read_bytes()
    changed = replace(SMALL, **{field: CHANGES[field]})
    with pytest.raises(ValueError, match=rf"begun with {field}=.*overwrite=True"):
        train(tiny_model(), None, data, out, changed, console=QUIET)
    assert (out / "state.pt").read_bytes() == before


def test_how_often_something_is_written_may_change(tmp_path, data, monkeypatch):
    train(tiny_model(), None, data, tmp_path / "straight", SMALL, console=QUIET)
    with monkeypatch.context() as patch:
        at_training_step(patch, 5, ctrl_c)
        with pytest.raises(TrainingInterrupted):
            train(tiny_model(), None, data, tmp_path / "cut", SMALL, console=QUIET)
    train(tiny_model(), None, data, tmp_path / "cut", replace(SMALL, checkpoint_every=4, log_every=1), console=QUIET)
    resumed, straight = state_of(tmp_path / "cut"), state_of(tmp_path / "straight")
    for part in ("heads", "optimizer", "best", "place", "evaluations"):
        assert_same(resumed[part], straight[part], part)
    assert [entry["step"] for entry in resumed["history"]] == [2, 4, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(tiny_model(), None, write(folder / "data.jsonl", random_samples()), folder / "out", SMALL, console=QUIET)
    return folder / "out"


def test_other_data_and_another_target_do_not_resume(tmp_path, data, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    other = write(tmp_path / "other.jsonl", random_samples(seed=1))
    with pytest.raises(ValueError, match="data_sha256"):
        train(tiny_model(), None, other, out, SMALL, console=QUIET)
    with pytest.raises(ValueError, match="target"):
        train(tiny_model(rms_norm_eps=1e-6, vocab=98), None, data, out, SMALL, console=QUIET)
    shutil.rmtree(out / "features")  # the checkpoint itself must know, too
    with pytest.raises(ValueError, match=r"state\.pt was trained on something else: its data_sha256"):
        train(tiny_model(), None, other, out, SMALL, console=QUIET)


class Tokenizer:
    """As much of one as training reads."""

    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


def test_a_draft_vocabulary_that_has_changed_does_not_resume(tmp_path, data):
    config = replace(SMALL, draft_vocab_size=5, epochs=1)
    train(tiny_model(), Tokenizer(93), data, tmp_path / "out", config, console=QUIET)
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r"state\.pt.*draft_ids.*overwrite=True"):
        train(tiny_model(), Tokenizer(94), data, tmp_path / "out", config, console=QUIET)
    assert contents(tmp_path / "out") == before


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_is_explained(tmp_path, data, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    whole = (out / "state.pt").read_bytes()
    (out / "state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"state\.pt is not a checkpoint that can be resumed"):
        train(tiny_model(), None, data, out, SMALL, console=QUIET)
    assert train(tiny_model(), None, data, out, SMALL, overwrite=True, console=QUIET)["steps"] == 10


BROKEN_DATA = {
    "not JSON": "{",
    "nothing supervised": json.dumps({"input_ids": [1, 2, 3], "responses": []}),
    "one conversation": json.dumps({"input_ids": list(range(20)), "responses": [[2, 20]]}),
}


@pytest.mark.parametrize("name", BROKEN_DATA)
def test_overwriting_keeps_the_old_run_until_a_new_one_is_possible(tmp_path, finished, name):
    out = shutil.copytree(finished, tmp_path / "out")
    before = contents(out)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(BROKEN_DATA[name] + "\n")
    with pytest.raises(ValueError, match=r"not a conversation|supervises nothing|1 of 1 conversations"):
        train(tiny_model(), None, broken, out, SMALL, overwrite=True, console=QUIET)
    after = contents(out)
    for file in ("state.pt", "metrics.json", "heads/config.json", "heads/model.safetensors"):
        assert after[file] == before[file], file


def test_a_model_where_the_heads_belong_is_refused_before_training(tmp_path, data, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "out" / "heads")
    before = contents(tmp_path)
    monkeypatch.setattr(trainer, "capture_features", lambda *_, **__: pytest.fail("work was done in vain"))
    with pytest.raises(FileExistsError, match="not a heads checkpoint"):
        train(tiny_model(), None, data, tmp_path / "out", SMALL, overwrite=True, console=QUIET)
    assert contents(tmp_path) == before


def test_what_is_not_ours_is_refused(tmp_path, data, finished):
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a training run"):
        train(tiny_model(), None, data, strange, SMALL, console=QUIET)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        train(tiny_model(), None, data, finished, SMALL, resume=False, console=QUIET)
    train(tiny_model(), None, data, strange, SMALL, overwrite=True, console=QUIET)
    assert (strange / "thesis.txt").read_text() == "years of work" and (strange / "heads").is_dir()


def test_overwriting_starts_again(tmp_path, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    other = write(tmp_path / "other.jsonl", random_samples(seed=1))
    config = replace(SMALL, heads=2)
    metrics = train(tiny_model(), None, other, out, config, overwrite=True, console=QUIET)
    fresh = train(tiny_model(), None, other, tmp_path / "fresh", config, console=QUIET)
    assert metrics == fresh and load_heads(out / "heads", tiny_model()).config.heads == 2


def test_the_best_heads_are_written(tmp_path, data, monkeypatch):
    scores = iter([0.1, 0.9, 0.5])
    original = trainer.Run.evaluate
    monkeypatch.setattr(trainer.Run, "evaluate", lambda run: {**original(run), "mean_top1": next(scores)})
    config = replace(SMALL, epochs=3)
    metrics = train(tiny_model(), None, data, tmp_path / "out", config, console=QUIET)
    state = state_of(tmp_path / "out")
    assert metrics["mean_top1"] == 0.9 and metrics["step"] == 10
    assert not torch.equal(state["best"]["weight"], state["heads"]["weight"])
    written = load_heads(tmp_path / "out" / "heads", tiny_model()).weight
    assert torch.equal(written, state["best"]["weight"].half().float())


def test_head_weights_scale_the_gradient(tmp_path, data):
    config = replace(SMALL, head_weights=(1.0, 0.0, 1.0), weight_decay=0.0)
    train(tiny_model(), None, data, tmp_path / "out", config, console=QUIET)
    moved = state_of(tmp_path / "out")["heads"]["weight"].flatten(1).abs().sum(1)
    assert float(moved[1]) == 0 < float(moved[[0, 2]].min())


def test_one_conversation_is_not_enough(tmp_path):
    lonely = write(tmp_path / "data.jsonl", random_samples(1))
    with pytest.raises(ValueError, match="1 of 1 conversations"):
        train(tiny_model(), None, lonely, tmp_path / "out", SMALL, console=QUIET)


def test_draft_vocabulary():
    tokens = torch.tensor([5, 5, 5, 9, 9, 2, 7])
    assert draft_vocabulary(tokens, 12, 2).tolist() == [5, 9]
    assert draft_vocabulary(tokens, 12, 3).tolist() == [2, 5, 9], "ties go to the smaller id"
    assert draft_vocabulary(tokens, 12, 6).tolist() == [0, 1, 2, 5, 7, 9], "the rest by ascending id"
    assert draft_vocabulary(tokens, 12, 3, (11, 10)).tolist() == [5, 10, 11], "what ends a text is always in"
    assert draft_vocabulary(tokens, 12, 12).tolist() == list(range(12))
    with pytest.raises(ValueError, match="no room for the 3 tokens"):
        draft_vocabulary(tokens, 12, 2, (1, 2, 3))


def test_eos_can_always_be_drafted(tmp_path, data):
    model = tiny_model()
    model.generation_config.eos_token_id = [95, 96]
    config = replace(SMALL, draft_vocab_size=5, epochs=1)
    train(model, Tokenizer(93), data, tmp_path / "out", config, console=QUIET)
    assert {93, 95, 96} <= set(load_heads(tmp_path / "out" / "heads", model).draft_ids.tolist())


def test_learning_rate_rises_and_falls():
    config = TrainConfig(learning_rate=1.0, warmup=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1.0
    assert all(b < a for a, b in pairwise(rates[10:])) and 0 < rates[-1] < 1e-3
    assert learning_rate(0, 1, config) == 1.0


BAD_CONFIGS = [
    {"method": "hydra9"},
    {"heads": 0},
    {"blocks": 0},
    {"draft_vocab_size": 0},
    {"epochs": 0},
    {"batch_positions": 0},
    {"learning_rate": 0.0},
    {"learning_rate": float("nan")},
    {"learning_rate": float("inf")},
    {"warmup": 1.0},
    {"warmup": -0.1},
    {"weight_decay": -1.0},
    {"clip": 0.0},
    {"holdout": 0.0},
    {"holdout": 1.0},
    {"checkpoint_every": 0},
    {"log_every": 0},
    {"head_weights": (1.0,)},
    {"head_weights": (1.0, 1.0, 1.0, -1.0)},
    {"head_weights": (0.0, 0.0, 0.0, 0.0)},
]


@pytest.mark.parametrize("bad", BAD_CONFIGS, ids=str)
def test_a_bad_config_names_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        TrainConfig(**bad)
