"""The target's hidden states of every pack: computed whenever they are asked for, or once, and kept on disk.

The target is frozen, so what heads read from it is the same in every epoch. Either way a pack is one forward pass over
the same padded ids (`compute`), so stored and recomputed states are the same bits. Of padding both hold zeros.

Stored states lie in a folder. `shard-00000.safetensors` and so on hold whole packs in ascending order: of each the
tensors `"{pack}.hidden"` `[sum of lengths, H]` and, if layers are read, `"{pack}.features"` `[sum of lengths, F]`,
without padding and in the model's dtype. `index.json` says what they were computed from and which shard holds which
pack. Every shard says the former too, in its metadata, and appears under its name when it is complete and on the disk:
a capture that was killed goes on with the shards that are not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from treedec.models import Fingerprint
from treedec.target import Target
from treedec.training.contracts import Batch, Corpus, Packs

SHARD_BYTES = 1 << 28
_FORMAT, _VERSION = "treedec.features", 1
_INDEX_FILE, _SCRATCH = "index.json", ".tmp"
_SHARD = re.compile(r"shard-\d{5,}\.safetensors")
# The only entry of a shard's metadata, because safetensors writes several in an order that differs from run to run.
_METADATA = "treedec"


def compute(target: Target, corpus: Corpus, packs: Packs, layers: tuple[int, ...], pack: int) -> Batch:
    """The hidden states of one pack, from one forward pass, on the device of the target.

    Args:
        target: what computes them.
        corpus, packs: the text.
        layers: the hidden states to return besides the LM-head input, as in `Drafter.features`; () for none.
        pack: which one.

    Raises:
        ValueError: the target is in training mode.
        UnsupportedModel: `layers` of a model that has several hidden states per token.
    """
    _check_frozen(target)
    input_ids, lengths, runs = _text(corpus, packs.members[pack], target.device)
    hidden, features = target.features(input_ids, layers=layers)
    padding = ~_real(input_ids, lengths)[:, :, None]
    # Some models compute their last states in another dtype than their weights have.
    hidden = hidden.to(target.model.dtype).masked_fill(padding, 0)
    if features is not None:
        features = features.to(target.model.dtype).masked_fill(padding, 0)
    return Batch(input_ids, lengths, runs, hidden, features)


@dataclass(frozen=True)
class OnlineFeatures:
    """Computes every pack when it is asked for: no disk, and one forward pass of the target more in every epoch.

    Args:
        target: what computes them.
        corpus, packs: the text.
        layers: the hidden states in `Batch.features`, as in `Drafter.features`; () for none.

    Raises:
        ValueError: the target is in training mode.
    """

    target: Target
    corpus: Corpus
    packs: Packs
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_frozen(self.target)

    def batch(self, pack: int) -> Batch:
        """One pack, see `compute`."""
        return compute(self.target, self.corpus, self.packs, self.layers, pack)


@dataclass(frozen=True)
class StoredFeatures:
    """Reads packs that were computed before. They stay on the disk; the system caches what it has memory for.

    Made by `capture`.

    Attributes:
        target: what computed them.
        corpus, packs: the text.
        layers: the hidden states in `Batch.features`.
        stored: those in the files, `layers` among them.
        folder: where they are.
        shards: `[P]` number of the shard that holds each pack.
    """

    target: Target
    corpus: Corpus
    packs: Packs
    layers: tuple[int, ...]
    stored: tuple[int, ...]
    folder: Path
    shards: tuple[int, ...]

    @classmethod
    def capture(
        cls,
        target: Target,
        corpus: Corpus,
        packs: Packs,
        layers: tuple[int, ...],
        folder: str | os.PathLike[str],
        *,
        shard_bytes: int = SHARD_BYTES,
        max_bytes: int | None = None,
        overwrite: bool = False,
        console: Console | None = None,
    ) -> StoredFeatures:
        """Compute, or finish computing, or open the features of a corpus.

        Args:
            target, corpus, packs, layers: as of `OnlineFeatures`.
            folder: where they are kept. If all of them are there, nothing is computed and nothing written. Features
                with more layers than are asked for will do.
            shard_bytes: about how large a file is, and how much is computed again if the process is killed.
            max_bytes: most bytes to store; None for as many as the disk has room for.
            overwrite: discard features of something else instead of refusing. No other files are ever removed.
            console: where progress is shown; None for standard error.

        Raises:
            ValueError: the target is in training mode; or the features need more than `max_bytes` or than the disk has
                room for; or the folder holds features of something else (the message names what differs), or files
                with the names of features that are none.
            OSError: a file cannot be written. Complete shards stay, and the next call goes on behind them.
            UnsupportedModel: `layers` of a model that has several hidden states per token.
        """
        _check_frozen(target)
        folder = Path(folder)
        stamp = _stamp(target, corpus, packs, layers)
        stored = _stored_layers(folder, stamp)
        stamp["identity"]["layers"] = list(stored)
        index = _examine(folder, stamp, overwrite)
        indexed = index is not None
        if index is None:
            index = stamp | _plan(target, corpus, packs, stored, shard_bytes)
        features = cls(target, corpus, packs, layers, stored, folder, tuple(index["shards"]))
        missing = [shard for shard in range(index["totals"]["shards"]) if not features._is_complete(shard, stamp)]
        if missing or not indexed:
            _check_room(folder, index["totals"]["bytes"], max_bytes)
            features._clear(missing)
            _write(folder / _INDEX_FILE, lambda path: _dump(index, path))
            features._fill(missing, stamp, console)
        return features

    def batch(self, pack: int) -> Batch:
        """One pack, the same bits as `compute` makes, on the device of the target."""
        input_ids, lengths, runs = _text(self.corpus, self.packs.members[pack], self.target.device)
        real = _real(input_ids, lengths)
        # Opened anew for every pack: that is a small part of a millisecond, and keeps no handles of a thousand shards.
        with safe_open(self._path(self.shards[pack]), framework="pt") as file:
            hidden = _pad(file.get_tensor(f"{pack}.hidden"), real)
            features = _pad(self._chosen(file.get_tensor(f"{pack}.features")), real) if self.layers else None
        return Batch(input_ids, lengths, runs, hidden, features)

    def _chosen(self, rows: Tensor) -> Tensor:
        """`[·, F]` of the layers that are wanted, from those that are stored."""
        if self.layers == self.stored:
            return rows
        parts = rows.chunk(len(self.stored), dim=1)
        return torch.cat([parts[self.stored.index(layer)] for layer in self.layers], dim=1)

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def _packs_of(self, shard: int) -> list[int]:
        return [pack for pack, holder in enumerate(self.shards) if holder == shard]

    def _is_complete(self, shard: int, stamp: dict[str, Any]) -> bool:
        path = self._path(shard)
        if _read_stamp(path) != stamp:
            return False
        kinds = ("hidden", "features") if self.stored else ("hidden",)
        with safe_open(path, framework="pt") as file:
            return set(file.keys()) == {f"{pack}.{kind}" for pack in self._packs_of(shard) for kind in kinds}

    def _clear(self, missing: list[int]) -> None:
        """Remove what an earlier capture left and this one cannot use."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {self._path(shard) for shard in set(self.shards) - set(missing)}
        for path in _ours(self.folder):
            if path not in kept:
                path.unlink()

    def _fill(self, missing: list[int], stamp: dict[str, Any], console: Console | None) -> None:
        """Compute the shards that are missing."""
        positions = [int(self.corpus.lengths[list(members)].sum()) for members in self.packs.members]
        todo = set(missing)
        done = sum(n for n, shard in zip(positions, self.shards, strict=True) if shard not in todo)
        columns = (
            TextColumn("capturing features"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console or Console(stderr=True)) as progress:
            task = progress.add_task("", total=sum(positions), completed=done, speed="")
            for shard in missing:
                tensors: dict[str, Tensor] = {}
                for pack in self._packs_of(shard):
                    tensors |= self._tensors(pack)
                    progress.advance(task, positions[pack])
                    speed = progress.tasks[0].speed
                    progress.update(task, speed=f"{speed:.0f} positions/s" if speed else "")
                _write_shard(self._path(shard), tensors, stamp)

    def _tensors(self, pack: int) -> dict[str, Tensor]:
        """One pack as it is stored."""
        batch = compute(self.target, self.corpus, self.packs, self.stored, pack)
        real = _real(batch.input_ids, batch.lengths)
        tensors = {f"{pack}.hidden": batch.hidden[real].cpu()}
        if batch.features is not None:
            tensors[f"{pack}.features"] = batch.features[real].cpu()
        return tensors


def _check_frozen(target: Target) -> None:
    if target.model.training:
        raise ValueError("the target is in training mode, where dropout would blur its states; call model.eval() first")


def _text(corpus: Corpus, members: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What is known of a pack before anything is computed: `Batch.input_ids`, `.lengths` and `.runs`."""
    lengths = corpus.lengths[list(members)]
    input_ids = np.zeros((len(members), lengths.max()), dtype=np.int64)
    runs = np.full_like(input_ids, -1)
    # Runs are in the order of their conversations, and are numbered by it.
    first = np.searchsorted(corpus.runs[:, 0], members, "left").tolist()
    last = np.searchsorted(corpus.runs[:, 0], members, "right").tolist()
    for row, conversation in enumerate(members):
        input_ids[row, : lengths[row]] = corpus.conversation(conversation)
        for run in range(first[row], last[row]):
            _, begin, end = corpus.runs[run].tolist()
            runs[row, begin:end] = run
    parts = (torch.from_numpy(array).to(device) for array in (input_ids, lengths, runs))
    return next(parts), next(parts), next(parts)


def _real(input_ids: Tensor, lengths: Tensor) -> Tensor:
    """`[B, L]` bool: what is not padding."""
    return torch.arange(input_ids.shape[1], device=lengths.device) < lengths[:, None]


def _pad(rows: Tensor, real: Tensor) -> Tensor:
    """`[sum of lengths, ·]` to `[B, L, ·]` on the device of `real`."""
    padded = torch.zeros(*real.shape, rows.shape[1], dtype=rows.dtype, device=real.device)
    padded[real] = rows.to(real.device)
    return padded


def _stamp(target: Target, corpus: Corpus, packs: Packs, layers: tuple[int, ...]) -> dict[str, Any]:
    """What the features are of, as JSON gives it back."""
    stamp = {
        "format": _FORMAT,
        "version": _VERSION,
        "identity": {
            "corpus": corpus.digest,
            "packs": hashlib.sha256(json.dumps(packs.members).encode()).hexdigest(),
            "layers": layers,
            "dtype": str(target.model.dtype),
            "target": Fingerprint.of(target.model).to_dict(),
            "weights": weights_digest(target.model),
            # The same weights see another text with other rotary frequencies.
            "rope": getattr(target.config, "rope_parameters", None),
        },
    }
    restored: dict[str, Any] = json.loads(json.dumps(stamp))
    return restored


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 of all weights: 1 to 2 GB a second, which is nothing beside the passes it tells apart."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _plan(target: Target, corpus: Corpus, packs: Packs, layers: tuple[int, ...], shard_bytes: int) -> dict[str, Any]:
    """Which shard holds which pack, and how much that is in all."""
    # Only the model knows how wide its states are: those of some layers are wider than the LM-head input.
    probe = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    hidden, features = target.features(probe, layers=layers)
    width = hidden.shape[-1] + (0 if features is None else features.shape[-1])
    row_bytes = width * target.model.dtype.itemsize
    shards: list[int] = []
    positions = filled = 0
    for members in packs.members:
        rows = int(corpus.lengths[list(members)].sum())
        if not shards:
            shards.append(0)
        elif filled + rows * row_bytes > shard_bytes:
            shards.append(shards[-1] + 1)
            filled = 0
        else:
            shards.append(shards[-1])
        positions += rows
        filled += rows * row_bytes
    totals = {"shards": shards[-1] + 1, "positions": positions, "bytes": positions * row_bytes}
    return {"totals": totals, "shards": shards}


def _ours(folder: Path) -> list[Path]:
    """The files of features, with those that were being written."""
    if not folder.is_dir():
        return []
    names = {path: path.name.removesuffix(_SCRATCH) for path in sorted(folder.iterdir()) if path.is_file()}
    return [path for path, name in names.items() if name == _INDEX_FILE or _SHARD.fullmatch(name)]


def _examine(folder: Path, stamp: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The index of the features in a folder, or None where they are to be begun, or go on without one.

    Raises:
        ValueError: there are features of something else, and they are not to be overwritten; or files of others with
            the names of features.
    """
    index = None
    for path in _ours(folder):
        if path.suffix == _SCRATCH:
            continue
        found = _read_index(path) if path.name == _INDEX_FILE else _read_stamp(path)
        if found is None:
            continue  # a torn shard
        if found.get("format") != _FORMAT:
            raise ValueError(f"{path} was not written by treedec, and is not overwritten; give another folder")
        differing = _differences(found, stamp)
        if differing and not overwrite:
            raise ValueError(
                f"{folder} holds features of something else: {', '.join(differing)}; give what they were made of, or "
                "another folder, or overwrite=True (--overwrite) to discard them"
            )
        if path.name == _INDEX_FILE and not differing:
            index = found
    return index


def _stored_layers(folder: Path, stamp: dict[str, Any]) -> tuple[int, ...]:
    """The layers of the features in a folder, if these are of the same and hold all that is wanted; else the latter."""
    wanted = stamp["identity"]["layers"]
    found = _read_index(folder / _INDEX_FILE) if (folder / _INDEX_FILE).is_file() else {}
    held = found.get("identity", {}).get("layers", wanted)
    same = found.get("identity") == stamp["identity"] | {"layers": held}
    return tuple(held if same and set(wanted) <= set(held) else wanted)


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What differs, with its values where these are short."""
    if found.get("version") != wanted["version"]:
        return [f"version ({found.get('version')}, not {wanted['version']})"]
    theirs = found.get("identity", {})
    differing = []
    for field, value in wanted["identity"].items():
        if (other := theirs.get(field)) != value:
            short = len(f"{other}{value}") < 64
            differing.append(f"{field} ({other}, not {value})" if short else field)
    return differing


def _read_index(path: Path) -> dict[str, Any]:
    """What an index says; {} if it is none of ours, which are never torn."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_stamp(path: Path) -> dict[str, Any] | None:
    """What a shard says it is of: None if it is not there or torn, {} if it says nothing."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (FileNotFoundError, SafetensorError):
        return None
    found: dict[str, Any] = json.loads(metadata.get(_METADATA, "{}"))
    return found


def _check_room(folder: Path, needed: int, max_bytes: int | None) -> None:
    """Raises ValueError if the features exceed what they may have, or what the disk has. Files of ours count as room:
    they are either among what is needed, or removed."""
    ways_out = 'compute them in every epoch (features="online", --features online), or fewer tokens or fewer layers'
    if max_bytes is not None and needed > max_bytes:
        raise ValueError(f"the features need {needed:,} bytes, and {max_bytes:,} are allowed: {ways_out}")
    existing = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    room = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in _ours(folder))
    if needed > room:
        raise ValueError(
            f"the features need {needed:,} bytes, and the disk of {folder} has room for {room:,}: {ways_out}"
        )


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """A file that appears complete or not at all."""
    scratch = path.with_name(path.name + _SCRATCH)
    try:
        write(scratch)
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _dump(index: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(index) + "\n", encoding="utf-8")


def _write_shard(path: Path, tensors: dict[str, Tensor], stamp: dict[str, Any]) -> None:
    try:
        _write(path, lambda scratch: save_file(tensors, scratch, {_METADATA: json.dumps(stamp)}))
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise OSError(
            f"cannot write {path} ({error}); the shards before it are kept: make room and call again to go on, or use "
            'features="online" (--features online)'
        ) from error
