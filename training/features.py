"""The target's hidden states at every supervised position, computed once and kept on disk.

The target is frozen, so what heads read from it is the same in every epoch. A response `[start, end)` needs the states
of tokens `start - 1` to `end - 2`: the last prompt token is the first that heads draft from, and nothing inside the
response follows its last token. These runs of consecutive states are laid end to end in one file, in the model's dtype,
and mapped into memory for training.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

from treedec.models import Fingerprint
from treedec.target import Target
from treedec.training.synth import read_samples

_HIDDEN_FILE, _IDENTITY_FILE = "hidden.bin", "features.json"
_VERSION = 1


@dataclass(frozen=True)
class Features:
    """What heads are trained on.

    Attributes:
        hidden: `[N, H]` LM-head inputs in the model's dtype, mapped from disk.
        following: `[N]` int32, the token that comes after each of them in the data.
        runs: `[R, 3]` int64: conversation, first row and number of rows of each run of consecutive positions, in the
            order of the data.
        lengths: `[S]` int64 tokens of each conversation, those without a run included.
        identity: what the states were computed from: data file, target, dtype.
    """

    hidden: Tensor
    following: Tensor
    runs: Tensor
    lengths: Tensor
    identity: dict[str, object]

    def batch(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Some runs laid end to end.

        Args:
            runs: `[n]` indices into `self.runs`.

        Returns:
            hidden `[T, H]`, a copy; and starts `[T]` int64, the index within the batch at which each row's run begins.
        """
        picked = self.runs[runs]
        first, counts = picked[:, 1], picked[:, 2]
        hidden = torch.cat([self.hidden[a : a + n] for a, n in zip(first.tolist(), counts.tolist(), strict=True)])
        return hidden, torch.repeat_interleave(counts.cumsum(0) - counts, counts)


@dataclass(frozen=True)
class Split:
    """The data, divided by conversation.

    Attributes:
        train, heldout: `[n]` int64 indices into `Features.runs`.
        skipped: conversations that supervise nothing: no response, or fewer than `heads + 1` tokens.
    """

    train: Tensor
    heldout: Tensor
    skipped: int


@dataclass(frozen=True)
class _Layout:
    """Where everything goes: a pure function of the data file, so that an interrupted capture can go on.

    Attributes:
        tokens: `[sum L]` int32 all conversations end to end; conversation `i` is `tokens[offsets[i]:offsets[i + 1]]`.
        offsets: `[S + 1]` int64.
        order: `[S]` int64 conversations by length, so that batches need little padding; rows are written in this order.
        runs: as in `Features`.
        begins: `[R]` int64, the token of its conversation at which each run begins.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    order: np.ndarray
    runs: np.ndarray
    begins: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.runs[:, 2].sum())

    def following(self) -> np.ndarray:
        """`[N]` int32: for each row the token after it."""
        following = np.empty(self.rows, dtype=np.int32)
        for (conversation, first, count), begin in zip(self.runs.tolist(), self.begins.tolist(), strict=True):
            place = self.offsets[conversation] + begin + 1
            following[first : first + count] = self.tokens[place : place + count]
        return following


def capture_features(
    model: PreTrainedModel,
    data: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    rows: int = 16,
    tokens: int = 8192,
    overwrite: bool = False,
    console: Console | None = None,
) -> Features:
    """Compute, or finish computing, or open the features of a data file.

    Args:
        model: the target.
        data: JSONL as `read_samples` reads it.
        folder: where the features are kept; complete ones are opened, and a capture that was interrupted goes on.
        rows: most conversations per forward pass.
        tokens: most tokens per forward pass, padding included; a longer conversation has a pass of its own.
        overwrite: discard features of something else instead of refusing.
        console: where progress is shown; None for standard error.

    Raises:
        ValueError: the model is in training mode, the data is malformed or supervises nothing, a token is out of range,
            or the folder holds the features of other data or another target (the message names what differs).
    """
    data, folder = Path(data), Path(folder)
    if model.training:
        raise ValueError("the target is in training mode, where dropout would blur its states; call model.eval() first")
    target = Target(model)
    layout = _lay_out(data, target.vocab_size, target.context_length)
    identity = _identity(model, data, layout.rows)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, identity, overwrite)
    path = folder / _HIDDEN_FILE
    _capture(target, layout, path, list(_batches(layout, rows, tokens)), console)
    shape = (layout.rows, target.hidden_size)
    hidden = torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=model.dtype).view(shape)
    return Features(
        hidden,
        torch.from_numpy(layout.following()),
        torch.from_numpy(layout.runs),
        torch.from_numpy(np.diff(layout.offsets)),
        identity,
    )


def split_conversations(features: Features, heads: int, holdout: float) -> Split:
    """Hold out the last conversations, a fraction `holdout`; leave aside those with fewer than `heads + 1` tokens.

    Raises:
        ValueError: fewer than two conversations supervise anything.
    """
    conversation = features.runs[:, 0]
    usable = features.lengths[conversation] >= heads + 1
    present = conversation[usable].unique()
    if len(present) < 2:
        raise ValueError(
            f"{len(present)} of {len(features.lengths)} conversations can be trained on, and one must be held out: "
            "more data is needed"
        )
    kept = min(max(1, round(holdout * len(present))), len(present) - 1)
    boundary = present[-kept]
    runs = torch.arange(len(conversation))
    return Split(
        runs[usable & (conversation < boundary)],
        runs[usable & (conversation >= boundary)],
        len(features.lengths) - len(present),
    )


def draft_vocabulary(tokens: Tensor, vocab_size: int, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The tokens worth drafting: `always`, then the most frequent, ties and the rest by ascending id.

    Args:
        tokens: `[T]` int64 response tokens of the training split.
        vocab_size, size: of the target's vocabulary and of the draft vocabulary.
        always: ids that are always in it.

    Returns:
        `[size]` int64, ascending.

    Raises:
        ValueError: `always` does not fit.
    """
    if len(always) > size:
        raise ValueError(
            f"draft_vocab_size {size} has no room for the {len(always)} tokens that end a text; use a larger one"
        )
    counts = torch.bincount(tokens, minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def _lay_out(data: Path, vocab_size: int, context_length: int | None) -> _Layout:
    """Read the data file and decide which row of the features holds what."""
    tokens, offsets, spans = [], [0], []
    for number, sample in enumerate(read_samples(data), 1):
        ids = sample["input_ids"]
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"{data}, line {number}: token ids must be in [0, {vocab_size}); was the file made with another "
                "tokenizer?"
            )
        if context_length is not None and len(ids) > context_length:
            raise ValueError(
                f"{data}, line {number}: {len(ids)} tokens are beyond the model's context of {context_length}; cut "
                "the conversation"
            )
        for start, end in sample["responses"]:
            begin = max(start - 1, 0)
            # One state alone supervises nothing: a head needs a later state of the same response to imitate.
            if end - 1 - begin >= 2:
                spans.append((number - 1, begin, end - 1 - begin))
        tokens.append(np.array(ids, dtype=np.int32))
        offsets.append(offsets[-1] + len(ids))
    if not spans:
        raise ValueError(
            f"{data} supervises nothing: none of its {len(tokens)} conversations has a response of three tokens or "
            "more; check its 'responses'"
        )
    lengths = np.diff(offsets)
    order = np.argsort(lengths, kind="stable")
    conversation, begins, counts = np.array(spans, dtype=np.int64).T
    written = np.argsort(np.argsort(order)[conversation], kind="stable")
    first = np.empty_like(counts)
    first[written] = np.cumsum(counts[written]) - counts[written]
    return _Layout(
        np.concatenate(tokens),
        np.array(offsets, dtype=np.int64),
        order,
        np.stack([conversation, first, counts], 1),
        begins,
    )


def _identity(model: PreTrainedModel, data: Path, rows: int) -> dict[str, object]:
    digest = hashlib.sha256()
    with data.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return {
        "version": _VERSION,
        "data_sha256": digest.hexdigest(),
        "data_bytes": data.stat().st_size,
        "dtype": str(model.dtype),
        "target": Fingerprint.of(model).to_dict(),
        "rows": rows,
    }


def _claim(folder: Path, identity: dict[str, object], overwrite: bool) -> None:
    """Note in the folder what its features are of, or check that it says the same."""
    path, hidden = folder / _IDENTITY_FILE, folder / _HIDDEN_FILE
    wanted = json.loads(json.dumps(identity))
    if path.exists() or hidden.exists():
        found = _read_identity(path)
        differing = [field for field, value in wanted.items() if found.get(field) != value]
        if not differing:
            return
        if not overwrite:
            raise ValueError(
                f"{folder} holds features of something else: their {differing[0]} differs from what was given; "
                "give the data and the target they were made with, or another folder"
            )
        path.unlink(missing_ok=True)
        hidden.unlink(missing_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


def _read_identity(path: Path) -> dict[str, object]:
    """What the features in a folder are of; empty if nothing readable says so, which matches nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _capture(
    target: Target, layout: _Layout, path: Path, batches: list[tuple[list[int], list[int]]], console: Console | None
) -> None:
    """Append to `path` whatever states it still lacks. Whole batches are written, so its length says where to go on."""
    row_bytes = target.hidden_size * torch.empty(0, dtype=target.model.dtype).element_size()
    written = path.stat().st_size // row_bytes if path.exists() else 0
    sizes = [sum(int(layout.runs[run, 2]) for run in runs) for _, runs in batches]
    ends = np.cumsum(sizes)
    done = int(np.searchsorted(ends, written, side="right"))
    columns = (
        TextColumn("capturing features"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with path.open("ab") as file, Progress(*columns, console=console or Console(stderr=True)) as progress:
        file.truncate(int(ends[done - 1]) * row_bytes if done else 0)
        task = progress.add_task("", total=layout.rows, completed=int(ends[done - 1]) if done else 0, speed="")
        for (conversations, runs), size in zip(batches[done:], sizes[done:], strict=True):
            file.write(_states(target, layout, conversations, runs))
            file.flush()
            os.fsync(file.fileno())
            progress.advance(task, size)
            speed = progress.tasks[0].speed
            progress.update(task, speed=f"{speed:.0f} positions/s" if speed else "")


def _batches(layout: _Layout, rows: int, tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Conversations that share a forward pass, with the runs they contain, in the order of the rows in the file.

    At most `rows` of them, and at most `tokens` tokens once they are padded, unless a single one has more.
    """
    runs_of: dict[int, list[int]] = {}
    for run, conversation in enumerate(layout.runs[:, 0].tolist()):
        runs_of.setdefault(conversation, []).append(run)
    lengths = np.diff(layout.offsets).tolist()
    batch: list[int] = []
    for conversation in layout.order.tolist():
        if conversation not in runs_of:
            continue
        # Lengths ascend, so that all are padded to that of the newcomer.
        if batch and (len(batch) == rows or (len(batch) + 1) * lengths[conversation] > tokens):
            yield batch, [run for member in batch for run in runs_of[member]]
            batch = []
        batch.append(conversation)
    yield batch, [run for member in batch for run in runs_of[member]]


def _states(target: Target, layout: _Layout, conversations: list[int], runs: list[int]) -> bytes:
    """The rows of one batch, as they are stored. Padding is on the right, where causal attention never looks."""
    texts = [layout.tokens[layout.offsets[c] : layout.offsets[c + 1]] for c in conversations]
    ids = np.zeros((len(texts), max(len(text) for text in texts)), dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    # Some models compute their last states in another dtype than their weights have.
    hidden = target.features(torch.from_numpy(ids).to(target.device)).to("cpu", target.model.dtype)
    rows = {conversation: row for row, conversation in enumerate(conversations)}
    parts = [
        hidden[rows[conversation], begin : begin + count]
        for (conversation, _, count), begin in zip(
            layout.runs[runs].tolist(), layout.begins[runs].tolist(), strict=True
        )
    ]
    return torch.cat(parts).contiguous().view(torch.uint8).numpy().tobytes()
