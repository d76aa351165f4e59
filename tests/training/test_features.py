"""Features are the target's own states: the same bits computed and stored, whatever has befallen the store."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit import VOCAB, fresh_model, tiny_model
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from treedec.limits import UnsupportedModel
from treedec.target import Target
from treedec.training.contracts import Corpus, Packs
from treedec.training.features import OnlineFeatures, StoredFeatures, compute

QUIET = Console(quiet=True)
# A response from the very first token; two that touch; one cut by the end; one of a single token; none at all.
LENGTHS = (20, 7, 20, 30, 3, 12)
RESPONSES = ((0, 4, 9), (0, 9, 12), (1, 0, 7), (3, 3, 5), (3, 10, 11), (3, 20, 30), (4, 2, 3), (5, 1, 12))
# Of unequal lengths within a pack, which are not in order; conversation 2 is idle.
PACKS = Packs(members=((3,), (0, 5, 1), (4,), (5, 3)), train=3, idle=1)
HIDDEN = 32
POSITIONS = (30, 39, 3, 42)


def corpus(seed=0, responses=RESPONSES):
    tokens = np.random.default_rng(seed).integers(VOCAB, size=sum(LENGTHS)).astype(np.int32)
    return Corpus(tokens, np.concatenate([[0], np.cumsum(LENGTHS)]), np.array(responses))


def text_of(text, index):
    return text.tokens[sum(LENGTHS[:index]) :][: LENGTHS[index]].tolist()


def capture(folder, layers=(1, 0), model=None, text=None, packs=PACKS, **options):
    """Every pack has a shard of its own, unless `shard_bytes` says otherwise."""
    options = {"shard_bytes": 1, "console": QUIET} | options
    return StoredFeatures.capture(Target(model or tiny_model()), text or corpus(), packs, layers, folder, **options)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shard(number):
    return f"shard-{number:05d}.safetensors"


@pytest.fixture
def passes(monkeypatch):
    """The shape of the ids of every pass, and the number of the pass that fails, with what."""
    original, log = Target.features, SimpleNamespace(shapes=[], fail_at=None, error=KeyboardInterrupt)

    def features(self, input_ids, attention_mask=None, **options):
        if len(log.shapes) == log.fail_at:
            raise log.error
        log.shapes.append(tuple(input_ids.shape))
        return original(self, input_ids, attention_mask, **options)

    monkeypatch.setattr(Target, "features", features)
    return log


def assert_same(batch, other):
    for field in dataclasses.fields(batch):
        ours, theirs = getattr(batch, field.name), getattr(other, field.name)
        assert (ours is None and theirs is None) or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), field


# --- the states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [1, 80 * 3 * HIDDEN * 4, 1 << 28])
@pytest.mark.parametrize("layers", [(), (1,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_stored_and_recomputed_states_are_the_same_bits(tmp_path, dtype, layers, shard_bytes):
    model = tiny_model(dtype=dtype)
    stored = capture(tmp_path, layers, model, shard_bytes=shard_bytes)
    online = OnlineFeatures(Target(model), corpus(), PACKS, layers)
    for pack, members in enumerate(PACKS.members):
        ours, theirs = stored.batch(pack), online.batch(pack)
        assert_same(ours, theirs)
        assert ours.hidden.dtype == dtype and ours.lengths.tolist() == [LENGTHS[member] for member in members]
        assert (ours.features is None) == (not layers)
        for row, member in enumerate(members):
            for states in (ours.hidden, ours.features) if layers else (ours.hidden,):
                assert states[row, : LENGTHS[member]].ne(0).any(-1).all() and not states[row, LENGTHS[member] :].any()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "cohere2", "qwen3_moe"])
def test_states_are_those_of_each_conversation_alone(architecture):
    model = tiny_model(architecture)
    text, seen = corpus(), set()
    for pack, members in enumerate(PACKS.members):
        batch = compute(Target(model), text, PACKS, (1, 0), pack)
        longest = max(LENGTHS[member] for member in members)
        assert batch.hidden.shape == (len(members), longest, HIDDEN) and batch.features.shape[-1] == 2 * HIDDEN
        for row, member in enumerate(members):
            ids = text_of(text, member)
            assert batch.input_ids[row].tolist() == ids + [0] * (batch.input_ids.shape[1] - len(ids))
            with torch.no_grad():
                alone = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
            # In these models the last of the hidden states is what the head reads.
            expected = [alone.hidden_states[layer][0] for layer in (-1, 1, 0)]
            torch.testing.assert_close(batch.hidden[row, : len(ids)], expected[0], atol=1e-10, rtol=0)
            torch.testing.assert_close(batch.features[row, : len(ids)], torch.cat(expected[1:], -1), atol=1e-10, rtol=0)
            seen.add(member)
    assert seen == {0, 1, 3, 4, 5}


def test_a_pack_is_one_pass(tmp_path, passes):
    expected = [(1, 30), (3, 20), (1, 3), (2, 30)]
    online = OnlineFeatures(Target(tiny_model()), corpus(), PACKS, (1,))
    for pack in range(4):
        online.batch(pack)
    assert passes.shapes == expected
    passes.shapes.clear()
    stored = capture(tmp_path)
    assert passes.shapes == [(1, 1), *expected], "one token tells how large the states are"
    for pack in range(4):
        stored.batch(pack)
    assert len(passes.shapes) == 5


@pytest.mark.parametrize("make", ["online", "stored"])
def test_runs_and_what_is_supervised(tmp_path, make):
    source = capture(tmp_path) if make == "stored" else OnlineFeatures(Target(tiny_model()), corpus(), PACKS, ())
    batch = source.batch(1)  # conversations 0, 5 and 1
    # Runs have the numbers of their responses: of [4, 9) the positions 3 .. 7, of [9, 12) 8 .. 10, of [0, 7) 0 .. 5.
    runs = [
        [-1] * 3 + [0] * 5 + [1] * 3 + [-1] * 9,
        [7] * 11 + [-1] * 9,
        [2] * 6 + [-1] * 14,
    ]
    assert batch.runs.tolist() == runs
    expected = {
        0: [{3, 4, 5, 6, 7, 8, 9, 10}, set(range(11)), set(range(6))],
        1: [{3, 4, 5, 6, 8, 9}, set(range(10)), set(range(5))],
        4: [{3}, set(range(7)), {0, 1}],
        19: [set(), set(), set()],
        25: [set(), set(), set()],
    }
    for ahead, places in expected.items():
        assert [set(row.nonzero()[:, 0].tolist()) for row in batch.supervised(ahead)] == places
    # A response of one token has one position, which has no later one in its run.
    assert source.batch(2).runs.tolist() == [[-1, 6, -1]] and not source.batch(2).supervised(1).any()


def test_states_of_another_dtype_are_taken_in_the_models(tmp_path, monkeypatch):
    model = tiny_model(dtype=torch.bfloat16)
    before = capture(tmp_path / "a", (1,), model)
    original = Target.features

    def wider(self, input_ids, **options):
        return tuple(states.double() for states in original(self, input_ids, **options))

    monkeypatch.setattr(Target, "features", wider)
    capture(tmp_path / "b", (1,), model)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    batch = OnlineFeatures(Target(model), corpus(), PACKS, (1,)).batch(1)
    assert batch.hidden.dtype == batch.features.dtype == torch.bfloat16
    assert torch.equal(batch.hidden, before.batch(1).hidden) and torch.equal(batch.features, before.batch(1).features)


def test_whatever_the_model_makes_of_padding_is_zero(monkeypatch):
    original = Target.features

    def hostile(self, input_ids, **options):
        hidden, features = original(self, input_ids, **options)
        hidden[1, 12:] = features[1, 12:] = torch.nan
        return hidden, features

    monkeypatch.setattr(Target, "features", hostile)
    batch = compute(Target(tiny_model()), corpus(), PACKS, (1,), 1)
    assert batch.hidden.isfinite().all() and batch.features.isfinite().all()


def test_a_model_with_several_states_per_token(tmp_path):
    model = tiny_model("gemma3n_text")
    with pytest.raises(UnsupportedModel, match="several of per token"):
        capture(tmp_path / "layers", (1,), model)
    assert not (tmp_path / "layers").exists()
    with pytest.raises(UnsupportedModel, match="several of per token"):
        OnlineFeatures(Target(model), corpus(), PACKS, (1,)).batch(0)
    assert capture(tmp_path / "none", (), model).batch(0).hidden.shape == (1, 30, HIDDEN)


def test_a_target_in_training_mode_is_refused(tmp_path):
    model = fresh_model()
    online = OnlineFeatures(Target(model), corpus(), PACKS, ())
    model.train()
    for act in (
        lambda: capture(tmp_path / "features", model=model),
        lambda: OnlineFeatures(Target(model), corpus(), PACKS, ()),
        lambda: online.batch(0),
    ):
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            act()
    assert not (tmp_path / "features").exists()


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "shards"),
    [(1, (0, 1, 2, 3)), (42, (0, 1, 1, 2)), (71, (0, 0, 1, 1)), (72, (0, 0, 0, 1)), (114, (0, 0, 0, 0))],
)
def test_shards_hold_whole_packs_in_order(tmp_path, positions, shards):
    stored = capture(tmp_path, (1, 2), shard_bytes=positions * 3 * HIDDEN * 8)
    assert stored.shards == shards
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["shards"] == list(shards)
    assert index["totals"] == {"shards": shards[-1] + 1, "positions": 114, "bytes": 114 * 3 * HIDDEN * 8}
    assert set(files(tmp_path)) == {"index.json", *(shard(number) for number in shards)}
    for number in set(shards):
        held = [pack for pack, holder in enumerate(shards) if holder == number]
        with safe_open(tmp_path / shard(number), "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        hidden = {f"{pack}.hidden": (POSITIONS[pack], HIDDEN) for pack in held}
        assert shapes == hidden | {f"{pack}.features": (POSITIONS[pack], 2 * HIDDEN) for pack in held}


def test_complete_features_are_opened_and_nothing_is_written(tmp_path, passes):
    before = capture(tmp_path, shard_bytes=30_000).batch(1)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    passes.shapes.clear()
    opened = capture(
        tmp_path, shard_bytes=1, overwrite=True
    )  # another division into shards is no reason to divide anew
    assert passes.shapes == [] and {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    assert torch.equal(opened.batch(1).hidden, before.hidden) and torch.equal(opened.batch(1).features, before.features)


@pytest.mark.parametrize("scratch", [None, "index.json.tmp", f"{shard(2)}.tmp"])
@pytest.mark.parametrize("shards", [-1, 0, 1, 3, 4])
def test_a_killed_capture_goes_on(tmp_path, passes, shards, scratch):
    """What a kill leaves: no index (-1), or the index and some shards, and the beginning of what was being written."""
    capture(tmp_path / "whole")
    expected = files(tmp_path / "whole")
    folder = tmp_path / "cut"
    folder.mkdir()
    for name in ["index.json", *(shard(number) for number in range(4))][: shards + 1]:
        (folder / name).write_bytes(expected[name])
    if scratch:
        (folder / scratch).write_bytes(expected[scratch.removesuffix(".tmp")][:100])
    passes.shapes.clear()
    capture(folder)
    present = {path.name for path in folder.iterdir()}
    if shards == 4:
        present.discard(scratch)  # nothing is written into complete features, so nothing is removed either
    assert present == set(expected) and all((folder / name).read_bytes() == expected[name] for name in expected)
    assert len(passes.shapes) == (5 if shards == -1 else 4 - shards)


DAMAGE = {
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte long": lambda path: path.write_bytes(path.read_bytes() + b"?"),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "in the header": lambda path: os.truncate(path, 50),
    "in the length of the header": lambda path: os.truncate(path, 5),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_shard_is_no_shard(tmp_path, passes, damage, indexed):
    capture(tmp_path)
    expected = files(tmp_path)
    DAMAGE[damage](tmp_path / shard(1))
    if not indexed:
        (tmp_path / "index.json").unlink()
    passes.shapes.clear()
    capture(tmp_path)
    assert passes.shapes == [*([] if indexed else [(1, 1)]), (3, 20)] and files(tmp_path) == expected


def test_an_index_that_is_gone_is_written_anew(tmp_path, passes):
    capture(tmp_path)
    expected = files(tmp_path)
    (tmp_path / "index.json").unlink()
    passes.shapes.clear()
    capture(tmp_path)
    assert files(tmp_path) == expected and passes.shapes == [(1, 1)]


def test_a_shard_of_another_division_is_computed_anew(tmp_path, passes):
    capture(tmp_path / "whole", shard_bytes=1 << 28)
    capture(tmp_path / "other")
    (tmp_path / "other" / "index.json").unlink()
    capture(tmp_path / "other", shard_bytes=1 << 28)
    assert files(tmp_path / "other") == files(tmp_path / "whole")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("out of memory")])
@pytest.mark.parametrize("packs", range(4))
def test_an_interrupted_capture_goes_on(tmp_path, passes, packs, error):
    size = 72 * 3 * HIDDEN * 8  # the first three packs, then the last
    capture(tmp_path / "whole", shard_bytes=size)
    passes.shapes.clear()
    passes.fail_at, passes.error = 1 + packs, error
    with pytest.raises(error if isinstance(error, type) else type(error)):
        capture(tmp_path / "cut", shard_bytes=size)
    assert set(files(tmp_path / "cut")) == {"index.json", *([shard(0)] if packs == 3 else [])}
    passes.shapes.clear()
    passes.fail_at = None
    capture(tmp_path / "cut", shard_bytes=size)
    assert len(passes.shapes) == (1 if packs == 3 else 4)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_between_writing_and_naming_leaves_no_scratch(tmp_path, monkeypatch, step):
    calls = []

    def fails(original):
        def call(*arguments, **options):
            calls.append(1)
            if len(calls) == 3:  # after the index and the first shard
                raise OSError(5, "Input/output error")
            return original(*arguments, **options)

        return call

    owner = os if step == "fsync" else type(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, fails(getattr(owner, step)))
        with pytest.raises(OSError, match=r"shard-00001.*Input/output error.*call again to go on"):
            capture(tmp_path / "cut")
    assert set(files(tmp_path / "cut")) == {"index.json", shard(0)}
    capture(tmp_path / "cut")
    capture(tmp_path / "whole")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_full_disk_keeps_complete_shards(tmp_path, passes):
    """A limit on the size of files does what a full disk does; only the last shard is larger than it."""
    capture(tmp_path / "whole")
    expected = files(tmp_path / "whole")
    sizes = sorted(len(content) for content in expected.values())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 1, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*shard-00003.*call again to go on.*features=\"online\""):
            capture(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path / "full") == {name: expected[name] for name in expected if name != shard(3)}
    passes.shapes.clear()
    capture(tmp_path / "full")
    assert passes.shapes == [(2, 30)] and files(tmp_path / "full") == expected


# --- whose they are ---------------------------------------------------------------------------------------------------


def other_weights():
    model = fresh_model()
    model.model.layers[0].mlp.up_proj.weight[3, 4] += 1e-12
    return model


ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
OTHERS = {
    "corpus": ({"text": corpus(seed=1)}, ["corpus"]),
    "responses": ({"text": corpus(responses=RESPONSES[:-1])}, ["corpus"]),
    "packs": ({"packs": Packs((*PACKS.members[:2], (4, 1), PACKS.members[3]), 3, 1)}, ["packs"]),
    "order": ({"packs": Packs((*PACKS.members[:3], (3, 5)), 3, 1)}, ["packs"]),
    "layers": ({"layers": (1, 2)}, ["layers ([1, 0], not [1, 2])"]),
    "another model": ({"model": tiny_model(seed=1)}, ["target", "weights"]),
    "a weight": ({"model": other_weights()}, ["weights"]),
    "dtype": ({"model": tiny_model(dtype=torch.float32)}, ["dtype (torch.float64, not torch.float32)", "weights"]),
    "rope": ({"model": fresh_model(rope_parameters=ROPE)}, ["rope"]),
}


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_features_of_something_else_are_refused_or_replaced(tmp_path, name, indexed):
    change, differing = OTHERS[name]
    folder = tmp_path / "features"
    capture(folder)
    if not indexed:
        (folder / "index.json").unlink()
    (folder / shard(1)).unlink()
    before = files(folder)
    with pytest.raises(ValueError, match="holds features of something else") as raised:
        capture(folder, **change)
    said = str(raised.value).split("something else: ")[1].split("; give what")[0]
    rest = said.replace("target, ", "", 1) if name == "dtype" else said  # its sample of weights is rounded
    assert rest == ", ".join(differing), said
    assert files(folder) == before, "a refusal changes nothing"
    capture(folder, overwrite=True, **change)
    capture(tmp_path / "fresh", **change)
    assert files(folder) == files(tmp_path / "fresh")


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
def test_features_with_more_layers_will_do(tmp_path, layers, complete):
    capture(tmp_path)  # layers 1 and 0
    if not complete:
        (tmp_path / shard(1)).unlink()
    before = files(tmp_path)
    features = capture(tmp_path, layers=layers)
    assert complete is (files(tmp_path) == before)
    online = OnlineFeatures(Target(tiny_model()), corpus(), PACKS, layers)
    for pack in range(len(PACKS)):
        assert_same(features.batch(pack), online.batch(pack))


def test_how_packs_are_divided_for_training_is_none_of_it(tmp_path, passes):
    capture(tmp_path)
    passes.shapes.clear()
    assert capture(tmp_path, packs=dataclasses.replace(PACKS, train=1)).packs.train == 1
    assert passes.shapes == []


def test_another_version_is_refused(tmp_path):
    capture(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"version": 0}))
    with pytest.raises(ValueError, match=r"something else: version \(0, not 1\)"):
        capture(tmp_path)


def test_overwriting_leaves_the_files_of_others_alone(tmp_path):
    capture(tmp_path)
    foreign = ["notes.txt", "index.json.bak", "shard-1.safetensors", "model.safetensors", "shard-00000.safetensors.old"]
    for name in foreign:
        (tmp_path / name).write_text(name)
    (tmp_path / "shard-00009.safetensors.tmp").mkdir()
    (tmp_path / "shard-00007.safetensors.tmp").write_text("left by a kill")
    capture(tmp_path, (2,), overwrite=True, shard_bytes=1 << 28)
    assert {path.name for path in tmp_path.iterdir()} == {
        *foreign,
        "index.json",
        shard(0),
        "shard-00009.safetensors.tmp",
    }
    assert all((tmp_path / name).read_text() == name for name in foreign)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", ["index.json", "no json", shard(0)])
def test_files_of_others_with_names_of_ours_are_refused(tmp_path, name, overwrite):
    if name == shard(0):
        save_file({"weight": torch.ones(3)}, tmp_path / name, {"format": "pt"})
    else:
        (tmp_path / "index.json").write_text('["of a database"]' if name == "index.json" else "# mine")
    before = files(tmp_path)
    with pytest.raises(ValueError, match="was not written by treedec"):
        capture(tmp_path, overwrite=overwrite)
    assert files(tmp_path) == before


# --- how large they are -----------------------------------------------------------------------------------------------

BYTES = 114 * 3 * HIDDEN * 8


def test_more_than_allowed_is_refused_before_it_is_computed(tmp_path, passes):
    with pytest.raises(ValueError, match=rf'need {BYTES:,} bytes, and {BYTES - 1:,} are allowed.*features="online"'):
        capture(tmp_path / "features", max_bytes=BYTES - 1)
    assert passes.shapes == [(1, 1)] and not (tmp_path / "features").exists()
    capture(tmp_path / "features", max_bytes=BYTES)
    assert sum((tmp_path / "features" / shard(n)).stat().st_size for n in range(4)) >= BYTES
    capture(tmp_path / "features", max_bytes=1)  # what is there already is opened


def test_more_than_the_disk_has_room_for_is_refused(tmp_path, passes, monkeypatch):
    free = [BYTES - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]) if path.is_dir() else None)
    folder = tmp_path / "new" / "features"
    with pytest.raises(ValueError, match=rf"need {BYTES:,} bytes, and .* has room for {BYTES - 1:,}: .*fewer layers"):
        capture(folder)
    assert passes.shapes == [(1, 1)] and not folder.parent.exists()
    free[0] = BYTES
    capture(folder)
    # Of what is there already, room is needed for no more than the rest of it, whether it is kept or replaced.
    (folder / shard(3)).unlink()
    kept = sum(path.stat().st_size for path in folder.iterdir())
    free[0] = BYTES - kept - 1
    for options in ({}, {"model": tiny_model(seed=1), "overwrite": True}):
        with pytest.raises(ValueError, match=f"has room for {BYTES - 1:,}"):
            capture(folder, **options)
    assert set(files(folder)) == {"index.json", shard(0), shard(1), shard(2)}
    free[0] += 1
    capture(folder)
    free[0] = 0
    capture(folder)
