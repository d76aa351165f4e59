"""Captured features are the target's own states, at the supervised positions and nowhere else."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from treedec.target import Target
from treedec.training.features import capture_features

QUIET = Console(quiet=True)


def tiny_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=4)).to(dtype).eval()


def sample(length, responses, seed=0):
    generator = torch.Generator().manual_seed(seed + 1000 * length)
    return {"input_ids": torch.randint(97, (length,), generator=generator).tolist(), "responses": responses}


# Unequal lengths; a response from the very first token; one cut by the end; one too short to teach; nothing at all.
SAMPLES = [
    sample(20, [[4, 9], [12, 20]]),
    sample(7, [[0, 7]]),
    sample(20, [], 1),
    sample(30, [[3, 5], [10, 11], [20, 23]]),
    sample(3, [[2, 3]]),
    sample(0, []),
    sample(12, [[1, 12]]),
]
# Conversation, first and last state: of tokens start - 1 to end - 2, where that makes two or more.
EXPECTED_RUNS = [(0, 3, 7), (0, 11, 18), (1, 0, 5), (3, 2, 3), (3, 19, 21), (6, 0, 10)]


def write(path, samples):
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    return path


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data.jsonl", SAMPLES)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_the_targets_and_only_the_supervised_ones(tmp_path, data, rows, dtype):
    model = tiny_model(dtype=dtype)
    features = capture_features(model, data, tmp_path / "features", rows=rows, console=QUIET)
    assert features.hidden.dtype == dtype and features.lengths.tolist() == [len(s["input_ids"]) for s in SAMPLES]
    assert len(features.hidden) == sum(last - first + 1 for _, first, last in EXPECTED_RUNS)
    assert features.runs[:, 0].tolist() == [conversation for conversation, _, _ in EXPECTED_RUNS]
    for (conversation, first, last), (_, row, count) in zip(EXPECTED_RUNS, features.runs.tolist(), strict=True):
        ids = SAMPLES[conversation]["input_ids"]
        with torch.no_grad():
            alone = model.model(torch.tensor([ids])).last_hidden_state[0]
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
        torch.testing.assert_close(features.hidden[row : row + count], alone[first : last + 1], **tolerance)
        assert features.following[row : row + count].tolist() == ids[first + 1 : last + 2]


def test_stored_bits_are_the_bits_of_the_pass(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    one = sample(20, [[1, 20]])
    features = capture_features(model, write(tmp_path / "d", [one]), tmp_path / "features", console=QUIET)
    assert torch.equal(features.hidden, Target(model).features(torch.tensor([one["input_ids"]]))[0, :19])


def test_a_batch_lays_runs_end_to_end(tmp_path, data):
    features = capture_features(tiny_model(), data, tmp_path / "features", rows=2, console=QUIET)
    picked = torch.tensor([4, 0, 2])
    hidden, starts = features.batch(picked)
    assert starts.tolist() == [0] * 3 + [3] * 5 + [8] * 6
    places = [(row, row + count) for _, row, count in features.runs[picked].tolist()]
    assert torch.equal(hidden, torch.cat([features.hidden[first:last] for first, last in places]))


@pytest.mark.parametrize(
    ("rows", "tokens", "passes"),
    [
        (16, 8192, [(4, 30)]),
        (3, 8192, [(3, 20), (1, 30)]),
        (16, 40, [(2, 12), (1, 20), (1, 30)]),
        (16, 1, [(1, n) for n in (7, 12, 20, 30)]),
    ],
)
def test_a_pass_holds_few_conversations_and_few_tokens(tmp_path, data, monkeypatch, rows, tokens, passes):
    """The four conversations with runs have 7, 12, 20 and 30 tokens: `(conversations, padded length)` of each pass."""
    original, shapes = Target.features, []
    monkeypatch.setattr(
        Target, "features", lambda target, ids: shapes.append(tuple(ids.shape)) or original(target, ids)
    )
    features = capture_features(tiny_model(), data, tmp_path / "a", rows=rows, tokens=tokens, console=QUIET)
    assert shapes == passes
    alone = capture_features(tiny_model(), data, tmp_path / "b", rows=1, console=QUIET)
    torch.testing.assert_close(features.hidden, alone.hidden, rtol=1e-5, atol=1e-5)


def test_states_of_another_dtype_are_stored_in_the_models(tmp_path, data, monkeypatch):
    expected = capture_features(tiny_model(), data, tmp_path / "a", console=QUIET).hidden
    original = Target.features
    monkeypatch.setattr(Target, "features", lambda target, ids: original(target, ids).double())
    assert torch.equal(capture_features(tiny_model(), data, tmp_path / "b", console=QUIET).hidden, expected)


@pytest.mark.parametrize("torn", [0, 5])
def test_an_interrupted_capture_goes_on(tmp_path, data, monkeypatch, torn):
    model = tiny_model()
    whole = capture_features(model, data, tmp_path / "whole", rows=1, console=QUIET)
    original, calls = Target.features, []

    def counted(self, ids):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, ids)

    monkeypatch.setattr(Target, "features", counted)
    with pytest.raises(KeyboardInterrupt):
        capture_features(model, data, tmp_path / "cut", rows=1, console=QUIET)
    with (tmp_path / "cut" / "hidden.bin").open("ab") as file:
        file.write(b"?" * torn)  # a batch that was being written when the machine died
    resumed = capture_features(model, data, tmp_path / "cut", rows=1, console=QUIET)
    assert len(calls) == 3 + 2, "four conversations have runs; the two that were done are not computed again"
    assert torch.equal(resumed.hidden, whole.hidden) and torch.equal(resumed.runs, whole.runs)
    capture_features(model, data, tmp_path / "cut", rows=1, console=QUIET)
    assert len(calls) == 5, "complete features are opened, not computed"


def test_features_of_something_else_are_refused_or_replaced(tmp_path, data):
    model, folder = tiny_model(), tmp_path / "features"
    before = capture_features(model, data, folder, console=QUIET).hidden.clone()
    with pytest.raises(ValueError, match="their target differs"):
        capture_features(tiny_model(seed=1), data, folder, console=QUIET)
    with pytest.raises(ValueError, match="their dtype differs"):
        capture_features(tiny_model(dtype=torch.bfloat16), data, folder, console=QUIET)
    changed = [*SAMPLES[:-1], sample(12, [[1, 12]], seed=5)]  # the same size, other tokens
    other = write(tmp_path / "other.jsonl", changed)
    with pytest.raises(ValueError, match="their data_sha256 differs"):
        capture_features(model, other, folder, console=QUIET)
    assert torch.equal(capture_features(model, data, folder, console=QUIET).hidden, before), "a refusal changes nothing"
    replaced = capture_features(model, other, folder, overwrite=True, console=QUIET)
    fresh = capture_features(model, other, tmp_path / "fresh", console=QUIET)
    assert torch.equal(replaced.hidden, fresh.hidden) and not torch.equal(fresh.hidden, before)


def test_states_of_unknown_origin_are_refused(tmp_path, data):
    folder = tmp_path / "features"
    capture_features(tiny_model(), data, folder, console=QUIET)
    (folder / "features.json").unlink()
    with pytest.raises(ValueError, match="features of something else"):
        capture_features(tiny_model(), data, folder, console=QUIET)


BAD_DATA = {
    "no response": ([sample(9, []), sample(8, [])], "supervises nothing: none of its 2 conversations"),
    "only short ones": ([sample(9, [[3, 4]])], "supervises nothing"),
    "empty file": ([], "supervises nothing"),
    "outside": ([sample(9, [[3, 10]])], r"line 1: the response \[3, 10\) does not lie within its 9 tokens"),
    "backwards": ([sample(9, [[1, 5]]), sample(9, [[6, 3]])], r"line 2: the response \[6, 3\)"),
    "foreign token": ([{"input_ids": [1, 2, 97, 3], "responses": [[0, 4]]}], r"line 1: token ids must be in \[0, 97\)"),
    "too long": ([sample(65, [[1, 60]])], "65 tokens are beyond the model's context of 64"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_used_is_explained(tmp_path, name):
    samples, message = BAD_DATA[name]
    with pytest.raises(ValueError, match=message):
        capture_features(tiny_model(), write(tmp_path / "bad.jsonl", samples), tmp_path / "features", console=QUIET)
    assert not (tmp_path / "features").exists()


def test_a_target_in_training_mode_is_refused(tmp_path, data):
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        capture_features(tiny_model().train(), data, tmp_path / "features", console=QUIET)
