"""The folder of a training run, and what protects it: from being taken for another, from Ctrl-C or SIGTERM in mid-step,
from a disk that is full.

This file knows nothing of how heads are trained (`trainer`).
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError

from treedec.heads.checkpoint import check_replaceable

STATE_FILE, METRICS_FILE, CONFIG_FILE, DATA_FILE = "state.pt", "metrics.json", "config.yaml", "data.jsonl"
HEADS_FOLDER, FEATURES_FOLDER, LOGS_FOLDER = "heads", "features", "logs"
# What may be there before the first checkpoint is.
_BEFORE_STATE = {FEATURES_FOLDER, LOGS_FOLDER, CONFIG_FILE, DATA_FILE, f"{STATE_FILE}.tmp"}
# How a run is told to stop: by its user, and by what schedules jobs.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped with Ctrl-C or SIGTERM; the message says what was kept and how to go on."""


class TrainingDiverged(RuntimeError):
    """The loss or its gradient is no longer finite; the last checkpoint is from before that."""


def prepare(out: Path, resume: bool, overwrite: bool) -> None:
    """Make `out` ready; nothing in it is changed.

    Raises:
        FileExistsError: see `check_folder`.
    """
    check_folder(out, resume, overwrite)
    out.mkdir(parents=True, exist_ok=True)


def check_folder(out: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that a run must not write to.

    Raises:
        FileExistsError: it holds a run that is neither to be resumed nor overwritten, or something that is no run of
            ours.
    """
    check_replaceable(out / HEADS_FOLDER)  # now, not when the heads are trained
    present = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if STATE_FILE in present and not (resume or overwrite):
        raise FileExistsError(
            f"{out} holds a training run; resume=True (--resume) goes on with it and overwrite=True (--overwrite) "
            "starts again"
        )
    if out.exists() and STATE_FILE not in present and present - _BEFORE_STATE and not overwrite:
        raise FileExistsError(
            f"{out} exists and is not a training run that can be resumed; give another folder, or overwrite=True "
            "(--overwrite)"
        )


def read_state(path: Path, config: Mapping[str, object]) -> dict[str, Any] | None:
    """The checkpoint to resume from, or None where there is none.

    Args:
        path: the checkpoint.
        config: what it must have been begun with; fields of the checkpoint's that are not in it may differ.

    Raises:
        ValueError: it cannot be read, or was begun with something else.
    """
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        written = state["config"]
    except Exception as error:  # torch.load raises whatever the damage leads to
        raise ValueError(
            f"{path} is not a checkpoint that can be resumed ({error}); start again with overwrite=True (--overwrite)"
        ) from error
    for field, value in config.items():
        if written.get(field) != value:
            raise ValueError(
                f"{path} was begun with {field}={written.get(field)!r}, not {value!r}; give the same config to "
                "resume, or overwrite=True (--overwrite) to start again"
            )
    return state


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file as a whole, by what `write` writes: after a crash it is the old one or the new one.

    Raises:
        OSError: it cannot be written, on a full disk for one; the old file is untouched.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    with writing(path):
        try:
            with scratch.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say of what cannot be written where the run stands; for what appears complete or not at all.

    Raises:
        OSError: of the same number, with a message that says so.
    """
    try:
        yield
    except FileExistsError:
        raise
    except (OSError, SafetensorError) as error:
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"{path} cannot be written ({getattr(error, 'strerror', None) or error}); what was there before is "
            "untouched, and so is the last checkpoint: make room and run the same again to go on from it",
        ) from error


class HeldInterrupt:
    """Ctrl-C and SIGTERM, made to wait while `held`: a step that is cut in two would leave weights and optimiser apart.

    SIGTERM, with which schedulers announce that they will kill, becomes a KeyboardInterrupt as Ctrl-C does.

    Signals can be redirected in the main thread only; elsewhere Python never raises KeyboardInterrupt anyway.

    Attributes:
        pending: it came while held, and is raised when it no longer is.
    """

    def __init__(self) -> None:
        self.pending = False
        self._holding = 0
        self._former: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None: it was not set from Python, and cannot be set back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make them wait; what is held within what is held waits for the outermost."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
        if self.pending and not self._holding:
            self.pending = False
            raise KeyboardInterrupt

    def _handle(self, *_: object) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        self.pending = True
