"""The options of a run: every mistake is found before work begins, and named."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from treedec.training.config import TrainConfig
from treedec.training.learners import LEARNERS

BAD = [
    {"method": "hydra9"},
    {"draft_vocab_size": 0},
    {"draft_vocab_size": 8192.0},
    {"labels": "medium"},
    {"depth_weights": ()},
    {"depth_weights": (1.0, -1.0)},
    {"depth_weights": (0.0, 0.0)},
    {"depth_weights": (1.0, float("nan"))},
    {"depth_weights": 1.0},
    {"epochs": 0},
    {"epochs": True},
    {"max_steps": 0},
    {"pack_tokens": 0},
    {"packs_per_step": 0},
    {"learning_rate": 0.0},
    {"learning_rate": float("nan")},
    {"learning_rate": float("inf")},
    {"learning_rate": "0.1"},
    {"schedule": "square"},
    {"warmup": 1.0},
    {"warmup": -0.1},
    {"weight_decay": -1.0},
    {"clip": 0.0},
    {"precision": "fp8"},
    {"features": "imagined"},
    {"max_feature_bytes": 0},
    {"shard_target": True},
    {"shard_target": True, "features": "online", "method": "medusa2"},
    {"shard_target": True, "features": "online", "method": "draft-model"},
    {"holdout": 0.0},
    {"holdout": 1.0},
    {"seed": -1},
    {"eval_every": 0},
    {"eval_nodes": 0},
    {"checkpoint_every": 0},
    {"log_every": 0},
    {"tensorboard": "yes"},
    {"options": 3},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_value_names_its_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        TrainConfig(**bad)


def test_integers_are_numbers_and_lists_are_tuples():
    config = TrainConfig(learning_rate=1, depth_weights=[1, 0.5])
    assert (config.learning_rate, config.depth_weights) == (1.0, (1.0, 0.5)) and type(config.learning_rate) is float


@pytest.mark.parametrize("method", LEARNERS)
def test_options_are_those_of_the_method(method):
    assert TrainConfig(method=method).method_options() == LEARNERS[method].options()
    with pytest.raises(ValueError, match=f"{method} has no option 'depht'"):
        TrainConfig(method=method, options={"depht": 3})


def test_an_option_that_is_nearly_one_is_guessed():
    with pytest.raises(ValueError, match=r"medusa has no option 'head'; did you mean 'heads'\?"):
        TrainConfig(options={"head": 3})
    with pytest.raises(ValueError, match=r"options\.heads must be a whole number, not '3'"):
        TrainConfig(options={"heads": "3"})


def test_a_file_says_what_differs_from_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "method: hydra\noptions: {heads: 2}\nlearning_rate: 5e-4\ndepth_weights: [1, 0.8]\nmax_steps: null\n"
    )
    wanted = TrainConfig(method="hydra", options={"heads": 2}, learning_rate=5e-4, depth_weights=(1.0, 0.8))
    assert TrainConfig.from_yaml(path) == wanted
    changed = TrainConfig.from_yaml(path, epochs=9, options={"blocks": 2})
    assert changed == replace(wanted, epochs=9, options={"heads": 2, "blocks": 2})
    path.write_text("# nothing but defaults\n")
    assert TrainConfig.from_yaml(path) == TrainConfig()


BAD_FILES = {
    "lerning_rate: 0.1": r"unknown key 'lerning_rate'; did you mean 'learning_rate'\?",
    "zzz: 1": "unknown key 'zzz'; there are method,",
    "learning_rate: '0.1'": "learning_rate must be a number, not '0.1'",
    "options: {heads: many}": r"options\.heads must be a whole number, not 'many'",
    "options: {hedas: 4}": r"medusa has no option 'hedas'; did you mean 'heads'\?",
    "options: 4": "options must be a mapping, not 4",
    "[1, 2]": "must hold a mapping",
    "epochs: 1\nepochs: 2": "'epochs' is given twice",
    "epochs: [": "is not YAML",
    "epochs: !!python/object:os.system 1": "is not YAML",
    "epochs: 0": "epochs must be at least 1",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_is_named_with_the_key(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=rf"run\.yaml.*{BAD_FILES[text]}"):
        TrainConfig.from_yaml(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.yaml"):
        TrainConfig.from_yaml(tmp_path / "run.yaml")


def test_what_is_stored_holds_every_default_and_reads_back(tmp_path):
    config = TrainConfig(method="recurrent", options={"layers": [0, 1]}, depth_weights=(1.0, 0.5, 0.25, 0.1, 0.1))
    stored = config.to_dict()
    assert stored["options"]["layers"] == [0, 1] and stored["options"]["depths"] == 5 and stored["epochs"] == 4
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = TrainConfig.from_yaml(path)
    assert again.to_dict() == stored and again.method_options() == config.method_options()


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(learning_rate=1.0, warmup=0.1)
    rates = [config.learning_rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1.0
    assert all(b < a for a, b in pairwise(rates[10:])) and 0 < rates[-1] < 1e-3
    assert config.learning_rate_at(0, 1) == 1.0
    linear = replace(config, schedule="linear")
    assert [linear.learning_rate_at(step, 100) for step in (9, 10, 55, 99)] == pytest.approx([1, 1, 0.5, 1 / 90])
    constant = replace(config, schedule="constant")
    assert {constant.learning_rate_at(step, 100) for step in range(9, 100)} == {1.0}


def test_only_for_bfloat16_targets_are_products_in_16_bits_unless_asked():
    config = TrainConfig()
    assert config.autocast_dtype(torch.bfloat16) == torch.bfloat16
    assert config.autocast_dtype(torch.float16) is config.autocast_dtype(torch.float32) is None
    assert replace(config, precision="fp16").autocast_dtype(torch.float32) == torch.float16
    assert replace(config, precision="no").autocast_dtype(torch.bfloat16) is None


def test_only_what_copies_the_target_cannot_be_trained_on_a_sharded_one():
    for method, options in (("eagle3", {}), ("draft-model", {"model": "folder"})):
        assert TrainConfig(method=method, options=options, shard_target=True, features="online").shard_target


def test_gradients_do_not_pass_through_a_float16_target_without_loss_scaling():
    config = TrainConfig(method="medusa2")
    assert config.autocast_dtype(torch.float16) == torch.float16
    assert config.autocast_dtype(torch.bfloat16) == torch.bfloat16 and config.autocast_dtype(torch.float32) is None
    for precision in ("no", "bf16"):
        with pytest.raises(ValueError, match="gradients of medusa2 vanish in a float16 target"):
            replace(config, precision=precision).autocast_dtype(torch.float16)
