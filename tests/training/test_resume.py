"""Runs resume exactly (A23), and their folder is protected."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from training_runs import QUIET, assert_same, config_of, contents, corpus_of, random_samples, state_of, tiny_model

from treedec.heads.checkpoint import load_heads
from treedec.training import runs
from treedec.training.evaluation import Evaluator
from treedec.training.learners.base import HeadLearner
from treedec.training.learners.heads import MedusaLearner
from treedec.training.loop import Run
from treedec.training.runs import TrainingDiverged, TrainingInterrupted
from treedec.training.trainer import train

DATA, OTHER = corpus_of(random_samples()), corpus_of(random_samples(seed=1))
SMALL = config_of()
STEPS = 10


def at_training_step(monkeypatch, step, act):
    """Call `act(losses)`, which returns losses, in the middle of a training step (not of an evaluation)."""
    original, seen = HeadLearner.losses, []

    def wrapped(learner, *arguments):
        losses = original(learner, *arguments)
        if learner.training:
            seen.append(1)
            if len(seen) == step:
                return act(losses)
        return losses

    monkeypatch.setattr(HeadLearner, "losses", wrapped)


def ctrl_c(losses):
    os.kill(os.getpid(), signal.SIGINT)
    return losses


def the_rest(out):
    """All files of a run but the checkpoint, of which the same contents may be different bytes."""
    return {name: content for name, content in contents(out).items() if name != "state.pt"}


def run(out, config=SMALL, corpus=DATA, model=None, tokenizer=None, **arguments):
    return train(model or tiny_model(), tokenizer, corpus, out, config, console=QUIET, **arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run(folder / "out")
    return folder / "out"


@pytest.mark.parametrize("method", ["medusa", "eagle"])
@pytest.mark.parametrize("stop", [1, 5, 7])
def test_resuming_after_ctrl_c_is_not_to_have_stopped(tmp_path, monkeypatch, stop, method):
    """EAGLE also draws random numbers in every step."""
    config = config_of(method=method)
    straight = run(tmp_path / "straight", config)
    whole = state_of(tmp_path / "straight")
    assert whole["step"] == STEPS and stop not in (3, 6, 9), "stop elsewhere than at a checkpoint"
    with monkeypatch.context() as patch:
        at_training_step(patch, stop, ctrl_c)
        with pytest.raises(TrainingInterrupted, match=f"after step {stop} of 10.*state.pt"):
            run(tmp_path / "cut", config)
    assert state_of(tmp_path / "cut")["step"] == stop
    assert run(tmp_path / "cut", config) == straight
    assert_same(state_of(tmp_path / "cut"), whole)
    assert the_rest(tmp_path / "cut") == the_rest(tmp_path / "straight")


def test_resuming_after_a_crash_goes_back_to_the_last_checkpoint(tmp_path, monkeypatch, finished):
    def crash(losses):
        raise RuntimeError("the machine is gone")

    with monkeypatch.context() as patch:
        at_training_step(patch, 5, crash)
        with pytest.raises(RuntimeError, match="gone"):
            run(tmp_path / "cut")
    assert state_of(tmp_path / "cut")["step"] == 3
    run(tmp_path / "cut")
    assert_same(state_of(tmp_path / "cut"), state_of(finished))


def test_a_crash_before_the_first_checkpoint_can_be_resumed(tmp_path, monkeypatch, finished):
    with monkeypatch.context() as patch:
        at_training_step(patch, 1, lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "cut")
    assert state_of(tmp_path / "cut")["step"] == 0
    run(tmp_path / "cut")
    assert_same(state_of(tmp_path / "cut"), state_of(finished))


def test_a_crash_between_heads_and_checkpoint_measures_again(tmp_path, monkeypatch, finished):
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_evaluated", lambda self, measured, was=Run._evaluated: (was(self, measured), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "cut")
    assert (tmp_path / "cut" / "heads").is_dir() and state_of(tmp_path / "cut")["evaluations"] == []
    run(tmp_path / "cut")
    assert_same(state_of(tmp_path / "cut"), state_of(finished))
    assert the_rest(tmp_path / "cut") == the_rest(finished)


def test_ctrl_c_during_an_evaluation_repeats_the_evaluation(tmp_path, monkeypatch, finished):
    with monkeypatch.context() as patch:
        patch.setattr(MedusaLearner, "ranks", lambda *_: ctrl_c(None))
        with pytest.raises(TrainingInterrupted, match="after step 5 of 10"):
            run(tmp_path / "cut")
    assert state_of(tmp_path / "cut")["evaluations"] == []
    run(tmp_path / "cut")
    assert_same(state_of(tmp_path / "cut"), state_of(finished))


def test_ctrl_c_during_capture_says_so_and_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("treedec.training.features.compute", lambda *_: ctrl_c(None))
        with pytest.raises(TrainingInterrupted, match="while capturing features"):
            run(tmp_path / "out")
    assert run(tmp_path / "out")["steps"] == STEPS


def test_what_a_scheduler_sends_stops_a_run_as_ctrl_c_does(tmp_path, monkeypatch, finished):
    def terminated(losses):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "it would end the tests"
        os.kill(os.getpid(), signal.SIGTERM)
        return losses

    with monkeypatch.context() as patch:
        at_training_step(patch, 5, terminated)
        with pytest.raises(TrainingInterrupted, match=r"after step 5 of 10.*state\.pt"):
            run(tmp_path / "cut")
    assert state_of(tmp_path / "cut")["step"] == 5
    run(tmp_path / "cut")
    assert_same(state_of(tmp_path / "cut"), state_of(finished))


def test_signals_work_as_before_afterwards(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tmp_path / "out")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_kill_during_the_first_checkpoint_can_be_resumed(tmp_path):
    """What it was writing lies beside the features."""
    (tmp_path / "features").mkdir()
    (tmp_path / "state.pt.tmp").write_bytes(b"half a checkpoint")
    assert run(tmp_path)["steps"] == STEPS


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    at_training_step(monkeypatch, 5, lambda losses: replace(losses, sums=losses.sums * torch.nan))
    with pytest.raises(TrainingDiverged, match=r"step 5: the loss is nan.*learning_rate below 0\.001.*state\.pt"):
        run(tmp_path / "out")
    state = state_of(tmp_path / "out")
    assert state["step"] == 3 and all(one.isfinite().all() for one in state["weights"].values())


class FullDisk:
    """`torch.save` on a disk that becomes full in the middle of the file, from the `number`-th call on."""

    def __init__(self, number):
        self.number, self.calls = number, 0

    def __call__(self, state, file):
        self.calls += 1
        if self.calls >= self.number:
            file.write(b"half a checkpoint")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return ORIGINAL_SAVE(state, file)


ORIGINAL_SAVE = torch.save


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch, finished):
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", FullDisk(3))  # the first is that of step 0
        with pytest.raises(
            OSError, match=r"state\.pt cannot be written \(No space left.*untouched.*make room"
        ) as caught:
            run(tmp_path / "cut")
    assert caught.value.errno == errno.ENOSPC
    assert state_of(tmp_path / "cut")["step"] == 3 and not list((tmp_path / "cut").glob("*.tmp"))
    run(tmp_path / "cut")
    assert_same(state_of(tmp_path / "cut"), state_of(finished))


def test_a_full_disk_leaves_the_best_heads(tmp_path, monkeypatch, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    config = replace(SMALL, epochs=1)
    run(out, config, overwrite=True)
    before = contents(out / "heads")

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("treedec.heads.checkpoint.save_file", full)
        with pytest.raises(OSError, match=r"heads cannot be written \(.*No space left.*last checkpoint: make room"):
            run(out, SMALL, overwrite=True)
    assert contents(out / "heads") == before and state_of(out)["step"] == 3
    run(out)
    assert_same(state_of(out), state_of(finished))


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    runs.write_file(path, lambda file: file.write(b"old"))
    with pytest.raises(ZeroDivisionError):
        runs.write_file(path, lambda file: (file.write(b"n"), 1 / 0))
    assert path.read_bytes() == b"old"
    runs.write_file(path, lambda file: file.write(b"new"))
    assert contents(tmp_path) == {"file": b"new"}


def test_a_finished_run_is_not_trained_again(tmp_path, finished, monkeypatch):
    out = shutil.copytree(finished, tmp_path / "out")
    at_training_step(monkeypatch, 1, lambda _: pytest.fail("trained again"))
    monkeypatch.setattr(Evaluator, "measure", lambda *_: pytest.fail("measured again"))
    measured = run(out)
    assert measured["step"] in (5, 10) and contents(out) == contents(finished)


CHANGES = {
    "method": "hydra",
    "options": {"heads": 2},
    "labels": "hard",
    "learning_rate": 2e-3,
    "schedule": "linear",
    "seed": 1,
    "pack_tokens": 65,
    "packs_per_step": 2,
    "depth_weights": (1.0, 1.0, 0.5),
    "epochs": 3,
    "max_steps": 8,
    "holdout": 0.3,
    "eval_every": 2,
    "precision": "bf16",
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_config_does_not_resume(tmp_path, finished, field):
    out = shutil.copytree(finished, tmp_path / "out")
    with pytest.raises(ValueError, match=rf"begun with {field}=.*overwrite=True"):
        run(out, replace(SMALL, **{field: CHANGES[field]}))
    assert contents(out) == contents(finished)


def test_how_often_something_is_written_may_change(tmp_path, monkeypatch, finished):
    with monkeypatch.context() as patch:
        at_training_step(patch, 5, ctrl_c)
        with pytest.raises(TrainingInterrupted):
            run(tmp_path / "cut")
    run(tmp_path / "cut", replace(SMALL, checkpoint_every=4, log_every=1, features="online"))
    resumed, straight = state_of(tmp_path / "cut"), state_of(finished)
    for part in ("weights", "optimizer", "step", "evaluations"):
        assert_same(resumed[part], straight[part], part)
    assert [entry["step"] for entry in resumed["history"]] == [2, 4, 6, 7, 8, 9, 10]
    losses = [entry["loss"] for entry in straight["history"]]
    late = [entry["loss"] for entry in resumed["history"]]
    assert [*late[:3], np.mean(late[3:5]), np.mean(late[5:])] == pytest.approx(losses)


def test_other_data_and_another_target_do_not_resume(tmp_path, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    with pytest.raises(ValueError, match=r"state\.pt was trained on something else: its corpus"):
        run(out, corpus=OTHER)
    with pytest.raises(ValueError, match=r"state\.pt was trained on something else: its target"):
        run(out, model=tiny_model(vocab=98))
    with pytest.raises(ValueError, match=r"state\.pt was trained on something else: its dtype"):
        run(out, model=tiny_model().bfloat16())
    tuned = tiny_model()
    with torch.no_grad():
        tuned.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3  # its LM head is the same
    with pytest.raises(ValueError, match=r"state\.pt was trained on something else: its weights"):
        run(out, replace(SMALL, features="online"), model=tuned)
    assert contents(out) == contents(finished)


class Tokenizer:
    """As much of one as training reads."""

    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


def test_a_draft_vocabulary_that_has_changed_does_not_resume(tmp_path):
    config = replace(SMALL, draft_vocab_size=5, epochs=1)
    run(tmp_path / "out", config, tokenizer=Tokenizer(93))
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r"state\.pt.*draft_ids.*overwrite=True"):
        run(tmp_path / "out", config, tokenizer=Tokenizer(94))
    assert contents(tmp_path / "out") == before


def test_heads_that_are_gone_are_missed(tmp_path, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    shutil.rmtree(out / "heads")
    with pytest.raises(FileNotFoundError, match=r"heads is gone.*overwrite=True"):
        run(out)


def test_a_damaged_checkpoint_is_explained(tmp_path, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    whole = (out / "state.pt").read_bytes()
    (out / "state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"state\.pt is not a checkpoint that can be resumed"):
        run(out)
    assert run(out, overwrite=True)["steps"] == STEPS


def test_overwriting_keeps_the_old_run_until_a_new_one_is_possible(tmp_path, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    with pytest.raises(ValueError, match="1 of 1 conversations"):
        run(out, corpus=corpus_of(random_samples(1)), overwrite=True)
    with pytest.raises(ValueError, match="depth_weights has 1 weights"):
        run(out, replace(SMALL, depth_weights=(1.0,)), overwrite=True)
    assert contents(out) == contents(finished)


def test_overwriting_starts_again(tmp_path, finished):
    out = shutil.copytree(finished, tmp_path / "out")
    config = replace(SMALL, options={"heads": 2})
    assert run(out, config, OTHER, overwrite=True) == run(tmp_path / "fresh", config, OTHER)
    assert load_heads(out / "heads", tiny_model()).config.heads == 2
    assert the_rest(out) == the_rest(tmp_path / "fresh")


def test_a_model_where_the_heads_belong_is_refused_before_training(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "out" / "heads")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="not a heads checkpoint"):
        run(tmp_path / "out", overwrite=True)
    assert contents(tmp_path) == before


def test_what_is_not_ours_is_refused(tmp_path, finished):
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a training run"):
        run(strange)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        run(finished, resume=False)
    run(strange, overwrite=True)
    assert (strange / "thesis.txt").read_text() == "years of work" and (strange / "heads").is_dir()
