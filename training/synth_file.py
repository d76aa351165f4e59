"""Conversations on disk: JSON lines, read with checks, and appended in whole batches.

A file that grows tells what it was made with and where in its batches every line belongs, so that a run that was
killed goes on where it was, and one with other settings does not mix its lines with these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from treedec.training.data import checked_tokens, is_list_of_ints


@dataclass(frozen=True)
class Written:
    """What a file of conversations holds in the end, and what was left out of it.

    Attributes:
        tokens: in the file.
        conversations: in the file.
        duplicates: conversations that were left out because another one asks the same.
        too_long: prompts that were left out because they leave no room for an answer.
        broken: prompts that were left out because they could not be read.
    """

    tokens: int
    conversations: int
    duplicates: int = 0
    too_long: int = 0
    broken: int = 0


class BatchFile:
    """A JSONL file of conversations that grows by whole batches.

    Each line begins with `origin`, what the file is made with, and `batch`: the batch, the place of the line in it and
    how many lines it has. What a kill left of an unfinished batch is cut off when the file is opened.

    Args:
        path: the file, or where it will be.
        origin: 16 hexadecimal digits.
        seen: called with every conversation that the file holds already.

    Raises:
        ValueError: there is anything but batches of this origin; the file is as it was.

    Attributes:
        batches: the next batch to write: one more than the last that has a line in the file.
        conversations: in the file.
        tokens: in the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        origin: str,
        seen: Callable[[Mapping[str, Any]], object] = lambda sample: None,
    ):
        self.path, self.origin = Path(path), origin
        self.batches = self.conversations = self.tokens = 0
        if self.path.exists():
            self._continue(seen)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, index: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write batch `index`, which may be empty."""
        self.batches = index + 1
        if not samples:
            return
        lines = [
            json.dumps({"origin": self.origin, "batch": [index, place, len(samples)], **sample}, ensure_ascii=False)
            for place, sample in enumerate(samples)
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.conversations += len(samples)
        self.tokens += sum(len(sample["input_ids"]) for sample in samples)

    def _continue(self, seen: Callable[[Mapping[str, Any]], object]) -> None:
        """Read the file, and cut off the beginning of another batch."""
        ours = f'{{"origin": "{self.origin}", '.encode()
        offset = end_of_batch = 0
        before: list[int] = []
        unfinished: list[Mapping[str, Any]] = []
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                place = f"{self.path}, line {number}"
                if not line.endswith(b"\n"):
                    if line[: len(ours)] != ours[: len(line)]:
                        raise ValueError(
                            f"{place}: not the beginning of a conversation; remove it, or give another file"
                        )
                    break
                sample = self._own(line, place, before)
                before, offset = sample["batch"], offset + len(line)
                unfinished.append(sample)
                if before[1] + 1 == before[2]:
                    self.batches, end_of_batch = before[0] + 1, offset
                    self.conversations += len(unfinished)
                    self.tokens += sum(len(sample["input_ids"]) for sample in unfinished)
                    for finished in unfinished:
                        seen(finished)
                    unfinished = []
        if end_of_batch < self.path.stat().st_size:
            with self.path.open("r+b") as file:
                file.truncate(end_of_batch)

    def _own(self, line: bytes, place: str, before: Sequence[int]) -> dict[str, Any]:
        """A line of this file, whose `batch` follows that of the line before."""
        try:
            sample = _parse(line, place)
        except ValueError as error:
            raise ValueError(f"{error}; the file is left as it is: give another one") from error
        if (found := sample.get("origin")) != self.origin:
            raise ValueError(
                f"{place}: written with other settings, another target or by something else (its 'origin' is "
                f"{found!r}, not {self.origin!r}); give what the file was begun with, or another file"
            )
        batch: Any = sample.get("batch")
        follows = is_list_of_ints(batch) and len(batch) == 3
        if follows and before and before[1] + 1 < before[2]:
            follows = batch == [before[0], before[1] + 1, before[2]]
        elif follows:
            follows = batch[0] > (before[0] if before else -1) and batch[1] == 0 < batch[2]
        if not follows:
            raise ValueError(
                f"{place}: its 'batch' is {batch!r}, which does not follow the line before: lines were removed or "
                "added; the file is left as it is: give another one"
            )
        return sample


def _parse(line: bytes, place: str) -> dict[str, Any]:
    """One line of a data file, checked; `place` says where it is."""
    try:
        sample: dict[str, Any] = json.loads(line)
        checked_tokens(sample["input_ids"], sample["responses"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{place}: not a conversation with input_ids and responses ({error})") from error
    return sample


def progress_bar(console: Console | None) -> Progress:
    """How far a file is; None for standard error."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
    )
