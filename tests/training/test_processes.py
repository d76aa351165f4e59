"""Real processes: killed ones go on where they were, and several train what one trains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import QUIET, assert_same, config_of, corpus_of, random_samples, state_of, tiny_model

from treedec.training.runs import TrainingInterrupted
from treedec.training.trainer import train

TESTS = Path(__file__).parents[1]


def start(out, processes, **changes):
    """A worker, or several under torchrun."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, str(TESTS / "training_worker.py"), str(out), json.dumps(changes)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    """Its exit code and what it said."""
    said, _ = process.communicate(timeout=240)
    return process.returncode, said


def go(out, processes, **changes):
    code, said = finish(start(out, processes, **changes))
    assert code == 0, said


def straight(out, **changes):
    """The same run in this process, without a stop."""
    dtype = changes.pop("dtype", torch.float32)
    train(tiny_model().to(dtype), None, corpus_of(random_samples()), out, config_of(**changes), console=QUIET)
    return state_of(out)


def test_one_killed_process_goes_on_in_mid_epoch(tmp_path):
    code, _ = finish(start(tmp_path / "cut", 1, method="eagle", kill_after=5, checkpoint_every=3))
    assert code == -signal.SIGKILL and state_of(tmp_path / "cut")["step"] == 3
    go(tmp_path / "cut", 1, method="eagle")
    assert_same(state_of(tmp_path / "cut"), straight(tmp_path / "straight", method="eagle"))


@pytest.mark.slow
def test_two_killed_processes_go_on_as_one_would_have(tmp_path):
    """Two packs a step, so that the sum over processes has two terms: then it is the same bits in any order."""
    changes = {"method": "eagle", "packs_per_step": 2, "epochs": 4, "checkpoint_every": 4, "eval_every": 5}
    code, said = finish(start(tmp_path / "cut", 2, kill_after=6, **changes))
    assert code != 0 and "SIGKILL" in said and state_of(tmp_path / "cut")["step"] == 5
    code, said = finish(start(tmp_path / "cut", 2, interrupt_after=7, **changes))
    assert code != 0 and len(re.findall("interrupted after step 8 of 12", said)) == 2, said
    go(tmp_path / "cut", 2, **changes)
    whole = straight(tmp_path / "straight", **changes)
    state = state_of(tmp_path / "cut")
    assert state["step"] == 12 and whole["evaluations"] == state["evaluations"]
    for part in ("weights", "optimizer", "history"):
        assert_same(state[part], whole[part], part)


@pytest.mark.parametrize("method", ["medusa2", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_two_processes_train_what_one_trains(tmp_path, method):
    """Five packs, four a step: at the end of an epoch, one process has none. Medusa-2 begins with half of its
    parameters unused."""
    changes = {"method": method, "packs_per_step": 4, "epochs": 3}
    go(tmp_path / "two", 2, dtype="float64", **changes)
    one, two = straight(tmp_path / "one", dtype=torch.float64, **changes), state_of(tmp_path / "two")
    assert one["step"] == two["step"] == 6
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, rtol=0, atol=1e-12)
    assert two["evaluations"][-1]["loss"] == pytest.approx(one["evaluations"][-1]["loss"], rel=1e-9)
    assert two["history"][-1]["loss"] == pytest.approx(one["history"][-1]["loss"], rel=1e-9)


@pytest.mark.slow
def test_a_sharded_target_trains_the_same(tmp_path):
    changes = {"method": "eagle3", "packs_per_step": 2, "features": "online", "epochs": 1}
    go(tmp_path / "sharded", 2, shard_target=True, **changes)
    assert_same(state_of(tmp_path / "sharded")["weights"], straight(tmp_path / "whole", **changes)["weights"])


@pytest.mark.slow
def test_packs_must_divide_over_processes(tmp_path):
    code, said = finish(start(tmp_path / "out", 2, packs_per_step=3))
    assert code != 0 and "packs_per_step 3 is not a multiple of the 2 processes that share them" in said
    assert not (tmp_path / "out" / "state.pt").exists()


def test_a_single_process_cannot_shard(tmp_path):
    with pytest.raises(
        ValueError, match="shard_target divides the target over several processes, and this is the only"
    ):
        straight(tmp_path / "out", features="online", shard_target=True)


def test_ctrl_c_on_the_terminal_is_an_interrupt(tmp_path):
    code, said = finish(start(tmp_path / "out", 1, interrupt_after=2))
    assert code == 1 and "interrupted after step 2 of 10" in said and state_of(tmp_path / "out")["step"] == 2
    assert issubclass(TrainingInterrupted, KeyboardInterrupt)
