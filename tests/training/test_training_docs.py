"""What docs/training.md and the README say about training is so."""

import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from treedec.cli import app
from treedec.training.config import TrainConfig
from treedec.training.learners import LEARNERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("accelerate launch --num_processes 2 --module ")
    for text in (PAGE, (ROOT / "README.md").read_text(encoding="utf-8"))
    for block in re.findall(r"^```\n(.*?)^```", text.replace("\\\n", " "), re.M | re.S)
    for line in block.splitlines()
    if "treedec synth" in line or "treedec train" in line or "treedec generate" in line
]


def test_the_table_has_every_method_with_its_options_and_their_defaults():
    table = PAGE.partition("| method | what is trained |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (.*) \|$", table, re.M))
    assert set(rows) == set(LEARNERS)
    for method, learner in LEARNERS.items():
        said = dict(re.findall(r"(\w+)(?:=(\S+))?", re.findall(r"`([^`]*)`", rows[method])[0]))
        defaults = {field.name: field.default for field in fields(learner.options)}
        assert set(said) <= set(defaults), method
        for name, value in said.items():
            # What None stands for depends on the target.
            assert value == ("" if defaults[name] is None else str(defaults[name]).lower()), name


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_options_they_are_given(command):
    _, name, *arguments = shlex.split(command)
    (function,) = [one.callback for one in app.registered_commands if one.callback.__name__ == name]
    known = {parameter.replace("_", "-") for parameter in inspect.signature(function).parameters}
    assert {argument[2:] for argument in arguments if argument.startswith("--")} <= known


def test_names_of_settings_exist():
    names = {field.name for field in fields(TrainConfig)}
    assert {"packs_per_step", "shard_target", "features", "eval_nodes"} <= names
    assert all(name in PAGE for name in ("packs_per_step", "shard_target", "eval_nodes"))
