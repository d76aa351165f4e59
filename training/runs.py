"""The folder of a training run, and what protects it: from being taken for another, and from Ctrl-C in mid-step.

This file knows nothing of how heads are trained (`trainer`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from treedec.heads.checkpoint import check_replaceable

STATE_FILE, METRICS_FILE, HEADS_FOLDER, FEATURES_FOLDER = "state.pt", "metrics.json", "heads", "features"


def prepare(out: Path, resume: bool, overwrite: bool) -> None:
    """Make `out` ready; nothing in it is changed.

    Raises:
        FileExistsError: it holds a run that is neither to be resumed nor overwritten, or something that is no run of
            ours.
    """
    check_replaceable(out / HEADS_FOLDER)  # now, not when the heads are trained
    present = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if STATE_FILE in present and not (resume or overwrite):
        raise FileExistsError(
            f"{out} holds a training run; resume=True goes on with it and overwrite=True starts again"
        )
    if out.exists() and STATE_FILE not in present and present - {FEATURES_FOLDER} and not overwrite:
        raise FileExistsError(
            f"{out} exists and is not a training run that can be resumed; give another folder, or overwrite=True"
        )
    out.mkdir(parents=True, exist_ok=True)


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
            f"{path} is not a checkpoint that can be resumed ({error}); start again with overwrite=True"
        ) from error
    for field, value in config.items():
        if written.get(field) != value:
            raise ValueError(
                f"{path} was begun with {field}={written.get(field)!r}, not {value!r}; give the same config to "
                "resume, or overwrite=True to start again"
            )
    return state


class HeldInterrupt:
    """Ctrl-C, made to wait while `held`: a step that is cut in two would leave weights and optimiser apart.

    Signals can be redirected in the main thread only; elsewhere Python never raises KeyboardInterrupt anyway.
    """

    def __init__(self) -> None:
        self._holding = self._pending = False
        self._former: Callable[[int, FrameType | None], Any] | int | signal.Handlers | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            self._former = None

    @contextmanager
    def held(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, *_: object) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        self._pending = True
