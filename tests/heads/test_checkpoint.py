"""Heads on disk: A20 (heads that load with random weights, or onto the wrong target)."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from treedec.heads import load_drafter
from treedec.heads.checkpoint import METHODS, CheckpointError, is_heads_folder, load_heads, save_heads
from treedec.heads.eagle import EagleConfig, EagleHead
from treedec.heads.hydra import HydraConfig, HydraHeads
from treedec.heads.medusa import MedusaConfig, MedusaHeads
from treedec.heads.recurrent import RecurrentConfig, RecurrentHead
from treedec.models import Fingerprint

VOCAB, HIDDEN, HEADS, DRAFT = 97, 32, 3, 40


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}, num_attention_heads=4)).eval()


def random_heads(seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT].sort().values
    heads = MedusaHeads(MedusaConfig(HIDDEN, VOCAB, HEADS, 1, DRAFT), ids)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def folder(tmp_path, model):
    save_heads(tmp_path / "heads", random_heads(), Fingerprint.of(model), {"steps": 7})
    return tmp_path / "heads"


def edit_config(folder, change):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a20_save_and_load_are_bit_identical(tmp_path, dtype):
    model = tiny_model().to(dtype)
    heads = random_heads().to(dtype)
    save_heads(tmp_path / "a", heads, Fingerprint.of(model), {}, dtype=dtype)
    loaded = load_heads(tmp_path / "a", model)
    assert loaded.config == heads.config
    for key, value in heads.state_dict().items():
        assert loaded.state_dict()[key].dtype == value.dtype
        assert torch.equal(loaded.state_dict()[key], value), key


EAGLE_LAYER = {
    "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "target_hidden_size": HIDDEN,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
SHAPES = {
    "medusa": (MedusaHeads, MedusaConfig(HIDDEN, VOCAB, HEADS, 2, DRAFT)),
    "medusa with LM heads": (MedusaHeads, MedusaConfig(HIDDEN, VOCAB, HEADS, 1, DRAFT, own_lm_heads=True)),
    "hydra": (HydraHeads, HydraConfig(HIDDEN, VOCAB, HEADS, 2, DRAFT, own_lm_heads=True)),
    "recurrent": (RecurrentHead, RecurrentConfig(HIDDEN, VOCAB, 24, 40, DRAFT, features=(0, 1))),
    "eagle": (EagleHead, EagleConfig(**EAGLE_LAYER, version=1, fc_bias=True, own_embeddings=True)),
    "eagle3": (EagleHead, EagleConfig(**EAGLE_LAYER, features=(0, 1, 2), own_lm_head=True, fc_norm=True)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a20_every_method_comes_back_bit_identical_and_drafts(tmp_path, model, name):
    """Also the configuration: JSON makes lists of its tuples."""
    kind, config = SHAPES[name]
    heads = kind(config, random_heads().draft_ids)
    save_heads(tmp_path / "a", heads, Fingerprint.of(model), {}, dtype=torch.float32)
    loaded = load_heads(tmp_path / "a", model)
    assert type(loaded) is kind and loaded.config == config and not loaded.training
    expected = heads.state_dict()
    assert set(loaded.state_dict()) == set(expected)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in expected.items())
    assert load_drafter(tmp_path / "a", model).name == name.split()[0]


@pytest.mark.parametrize("name", SHAPES)
def test_a20_no_weight_of_any_method_may_be_absent(tmp_path, model, name):
    kind, config = SHAPES[name]
    save_heads(tmp_path / "a", kind(config), Fingerprint.of(model), {}, dtype=torch.float32)
    weights = tmp_path / "a" / "model.safetensors"
    whole = load_file(weights)
    for key in whole:
        save_file({other: value for other, value in whole.items() if other != key}, weights)
        with pytest.raises(CheckpointError, match=f"'{re.escape(key)}'.*is missing"):
            load_heads(tmp_path / "a", model)


def test_every_method_is_tested():
    assert {kind for kind, _ in SHAPES.values()} == {method.heads for method in METHODS.values()}


def test_heads_without_a_fingerprint_are_checked_by_shape(folder):
    edit_config(folder, lambda config: config.update(target=None))
    assert load_heads(folder, tiny_model(seed=9))
    with pytest.raises(CheckpointError, match="vocab_size 97 but the target has 99"):
        load_heads(folder, tiny_model(vocab_size=99))


def test_checkpoints_from_before_heads_had_lm_heads_of_their_own_load(folder, model):
    edit_config(folder, lambda config: config["shape"].pop("own_lm_heads"))
    assert load_heads(folder, model).config == random_heads().config


def test_what_the_files_say(folder, model):
    config = json.loads((folder / "config.json").read_text())
    assert (config["format"], config["version"], config["method"]) == ("treedec", 1, "medusa")
    assert MedusaConfig(**config["shape"]) == random_heads().config
    assert Fingerprint.from_dict(config["target"]) == Fingerprint.of(model)
    assert config["training"] == {"steps": 7}
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {"weight", "bias", "draft_ids"}
    assert tensors["weight"].dtype == torch.float16 and not tensors["draft_ids"].is_floating_point()


def test_heads_take_the_dtype_of_the_model(folder):
    heads = load_heads(folder, tiny_model().to(torch.bfloat16))  # the same target in another dtype is the same target
    assert heads.weight.dtype == torch.bfloat16 and heads.draft_ids.dtype == torch.int64


def test_an_existing_folder_is_refused_and_replaced_on_request(folder, model):
    other = random_heads(seed=5)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_heads(folder, other, Fingerprint.of(model), {})
    save_heads(folder, other, Fingerprint.of(model), {}, dtype=torch.float32, overwrite=True)
    assert torch.equal(load_heads(folder, model).weight, other.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["heads"], "scratch folders must not stay"


def test_a_folder_of_something_else_is_never_replaced(tmp_path, model):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a heads checkpoint"):
        save_heads(tmp_path, random_heads(), Fingerprint.of(model), {}, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_never_replaced_by_heads(tmp_path, model):
    """Models, too, are folders with a config.json and a model.safetensors."""
    model.save_pretrained(tmp_path / "model")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="not a heads checkpoint"):
        save_heads(tmp_path / "model", random_heads(), Fingerprint.of(model), {}, overwrite=True)
    assert contents(tmp_path) == before


def test_what_else_lies_in_a_replaced_folder_is_kept(folder, model):
    (folder / "README.md").write_text("which data, which machine")
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")
    other = random_heads(seed=5)
    save_heads(folder, other, Fingerprint.of(model), {"steps": 8}, dtype=torch.float32, overwrite=True)
    assert torch.equal(load_heads(folder, model).weight, other.weight)
    assert json.loads((folder / "config.json").read_text())["training"] == {"steps": 8}
    assert set(contents(folder)) == {"config.json", "model.safetensors", "README.md", "notes/config.json"}
    assert (folder / "README.md").read_text() == "which data, which machine"


def test_an_empty_folder_is_filled_on_request(tmp_path, model):
    save_heads(tmp_path, random_heads(), Fingerprint.of(model), {}, overwrite=True)
    assert is_heads_folder(tmp_path)


def test_a_failed_save_leaves_the_old_heads(folder, model, monkeypatch):
    before = load_heads(folder, model).weight

    def full_disk(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("treedec.heads.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_heads(folder, random_heads(seed=5), Fingerprint.of(model), {}, overwrite=True)
    assert torch.equal(load_heads(folder, model).weight, before)
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


def test_weights_that_overflow_are_not_saved(tmp_path, model):
    heads = random_heads()
    with torch.no_grad():
        heads.weight[0, 0, 0, 0] = 1e6
    with pytest.raises(ValueError, match=r"'weight'.*float16"):
        save_heads(tmp_path / "a", heads, Fingerprint.of(model), {})
    assert not (tmp_path / "a").exists()


def test_heads_of_no_known_method_are_not_saved(tmp_path, model):
    class Mine(MedusaHeads):
        pass

    with pytest.raises(ValueError, match="Mine is of no known method"):
        save_heads(tmp_path / "a", Mine(random_heads().config), Fingerprint.of(model), {})


def _rename(tensors):
    tensors["weights"] = tensors.pop("weight")


def _narrow(tensors):
    tensors["weight"] = tensors["weight"][:, :, :, :-1].contiguous()


def _fewer_ids(tensors):
    tensors["draft_ids"] = tensors["draft_ids"][:-1].contiguous()


def _unsorted_ids(tensors):
    tensors["draft_ids"] = tensors["draft_ids"].flip(0).contiguous()


BROKEN_TENSORS = {
    "dropped": (lambda tensors: tensors.pop("bias"), rf"'bias' of shape \[{HEADS}, 1, {HIDDEN}\] is missing"),
    "renamed": (_rename, r"unknown tensor 'weights' of shape"),
    "extra": (lambda tensors: tensors.update(lm_head=torch.zeros(2, 2)), r"unknown tensor 'lm_head' of shape \[2, 2\]"),
    "narrow": (_narrow, rf"'weight' has shape \[{HEADS}, 1, 32, 31\].*\[{HEADS}, 1, 32, 32\]"),
    "fewer ids": (_fewer_ids, rf"'draft_ids' has shape \[{DRAFT - 1}\].*\[{DRAFT}\]"),
    "unsorted ids": (_unsorted_ids, "ascending"),
    "float ids": (lambda t: t.update(draft_ids=t["draft_ids"].float()), "'draft_ids' is torch.float32"),
    "integer weights": (lambda t: t.update(bias=t["bias"].int()), "'bias' is torch.int32"),
    "nan": (lambda tensors: tensors["bias"][0].fill_(torch.nan), "'bias' holds values that are not finite"),
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_a20_tensors_that_do_not_fit_are_named(folder, model, name):
    change, message = BROKEN_TENSORS[name]
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_heads(folder, model)
    assert str(folder / "model.safetensors") in str(caught.value)


BROKEN_CONFIGS = {
    "foreign": (lambda config: config.clear(), "does not describe treedec heads"),
    "newer": (lambda config: config.update(version=2), "version 2"),
    "method": (lambda config: config.update(method="hydra9"), "unknown method 'hydra9'.*medusa"),
    "no method": (lambda config: config.pop("method"), "unknown method None"),
    "list method": (lambda config: config.update(method=["medusa"]), "unknown method"),
    "no shape": (lambda config: config.pop("shape"), "'shape'"),
    "odd shape": (lambda config: config["shape"].update(layers=3), "'shape'.*layers"),
    "zero heads": (lambda config: config["shape"].update(heads=0), "heads must be at least 1"),
    "half a head": (lambda config: config["shape"].update(heads=1.5), "copy or train the heads again"),
    "half a token": (lambda config: config["shape"].update(draft_vocab_size=1.5), "copy or train the heads again"),
    "no memory has it": (lambda config: config["shape"].update(blocks=10**12), "copy or train the heads again"),
    "wordy own_lm_heads": (lambda config: config["shape"].update(own_lm_heads="no"), "own_lm_heads must be true or"),
    "wordy heads": (lambda config: config["shape"].update(heads="3"), "'shape'"),
    "no target": (lambda config: config.pop("target"), "'target'"),
    "short sample": (lambda config: config["target"].update(sample=[1.0, 2.0]), "'target'"),
    "wrong size": (lambda config: config["shape"].update(hidden_size=31), "hidden_size 31 but the target has 32"),
    "more heads": (lambda config: config["shape"].update(heads=4), rf"\[{HEADS}, 1, 32, 32\].*\[4, 1, 32, 32\]"),
}


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_configs_that_do_not_fit_are_explained(folder, model, name):
    change, message = BROKEN_CONFIGS[name]
    edit_config(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_heads(folder, model)
    assert str(folder) in str(caught.value)


WRONG_TARGETS = {
    "another seed": ({"seed": 9}, "the weights of its LM head differ"),
    "wider": ({"hidden_size": 64}, "hidden_size is 64, not 32"),
    "more tokens": ({"vocab_size": 99}, "vocab_size is 99, not 97"),
    "deeper": ({"num_hidden_layers": 3}, "layers is 3, not 2"),
}


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_a20_heads_do_not_load_onto_another_target(folder, name):
    changes, message = WRONG_TARGETS[name]
    with pytest.raises(CheckpointError, match=message):
        load_heads(folder, tiny_model(**changes))


def test_a_folder_is_recognised_by_what_it_says(folder, model, tmp_path):
    assert is_heads_folder(folder)
    model.save_pretrained(tmp_path / "model")
    assert not is_heads_folder(tmp_path / "model")
    assert not is_heads_folder(tmp_path / "nowhere")
    (folder / "config.json").write_text("[")
    assert not is_heads_folder(folder)


def test_damaged_and_absent_files(folder, model):
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(weights))} cannot be read as safetensors"):
        load_heads(folder, model)
    weights.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_heads(folder, model)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(weights))):
        load_heads(folder, model)
    weights.write_bytes(whole)
    for text in (b'{"format": ', b"\xff\xfe", b"[]"):
        config.write_bytes(text)
        with pytest.raises(CheckpointError, match=re.escape(str(config))):
            load_heads(folder, model)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_heads(folder.parent / "nowhere", model)


def _halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _drop_a_tensor(path):
    tensors = load_file(path)
    tensors.pop("model.norm.weight")
    save_file(tensors, path, metadata={"format": "pt"})


BROKEN_MODELS = {
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "half the weights": lambda folder: _halve(folder / "model.safetensors"),
    "a weight too few": lambda folder: _drop_a_tensor(folder / "model.safetensors"),
    "half a config": lambda folder: _halve(folder / "config.json"),
    "no kind of model": lambda folder: (folder / "config.json").write_text("{}"),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_a_draft_model_that_cannot_be_loaded_is_explained_in_a_sentence(tmp_path, model, name):
    model.save_pretrained(tmp_path / "draft")
    assert load_drafter(tmp_path / "draft", model).name == "draft-model"
    BROKEN_MODELS[name](tmp_path / "draft")
    with pytest.raises(ValueError, match="draft model") as caught:
        load_drafter(tmp_path / "draft", model)
    assert str(caught.value).startswith(str(tmp_path / "draft")) and "\n" not in str(caught.value)


def test_a_folder_without_heads_or_a_model_is_not_found(tmp_path, model):
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(tmp_path))} holds neither"):
        load_drafter(tmp_path, model)


def test_the_folder_of_a_run_leads_to_its_heads(folder, model):
    """`--drafter run` instead of `--drafter run/heads`."""
    with pytest.raises(FileNotFoundError, match=rf"did you mean {re.escape(str(folder))}\?"):
        load_drafter(folder.parent, model)
    assert load_drafter(folder, model).name == "medusa"
