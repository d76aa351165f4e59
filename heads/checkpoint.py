"""Heads on disk: a folder with `config.json` and `model.safetensors`.

`config.json` names the method, the shape, the target the heads were trained for and how they were trained; the weights
are the state of the module under its own names. Nothing is taken on trust when loading: a key that is unknown, absent
or of another shape is an error, and so is another target, because heads on the wrong target draft noise without ever
failing.

What a folder says (`Stored`) and the module made from it for one target (`build_heads`) are two steps, so that
`treedec.heads.formats` can read the formats of others into the first and go on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from treedec.drafter import Drafter
from treedec.heads.eagle import EagleConfig, EagleDrafter, EagleHead
from treedec.heads.hydra import HydraConfig, HydraDrafter, HydraHeads
from treedec.heads.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from treedec.heads.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentHead
from treedec.models import Fingerprint

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_FORMAT, _VERSION = "treedec", 1
_OURS = (CONFIG_FILE, WEIGHTS_FILE)
_IDS = "draft_ids"


class CheckpointError(ValueError):
    """The folder holds no heads that fit this model; the message names the file, what is wrong and what to do."""


@dataclass(frozen=True)
class Method:
    """How one method goes from a checkpoint to a drafter.

    Attributes:
        config: a frozen dataclass with at least `hidden_size`, `vocab_size` and `draft_vocab_size`.
        heads: the module, made as `heads(config, draft_ids)`, with those ids as its buffer `draft_ids`.
        drafter: what drafts with it, made as `drafter(heads, model, growth)`.
        sequential: what may follow a node depends on the path to it, so that trees grow by `DynamicTree`; the
            candidates of other methods depend on the depth alone.
    """

    config: type[Any]
    heads: type[Any]
    drafter: Callable[[Any, PreTrainedModel, Any], Drafter]
    sequential: bool


# A new method is one line here.
METHODS: Mapping[str, Method] = {
    "medusa": Method(MedusaConfig, MedusaHeads, MedusaDrafter, sequential=False),
    "hydra": Method(HydraConfig, HydraHeads, HydraDrafter, sequential=True),
    "recurrent": Method(RecurrentConfig, RecurrentHead, RecurrentDrafter, sequential=True),
    "eagle": Method(EagleConfig, EagleHead, EagleDrafter, sequential=True),
}


@dataclass(frozen=True)
class Stored:
    """Heads as a checkpoint holds them, whatever its format, before they meet a target.

    Attributes:
        method: a key of `METHODS`.
        config: of that method's class.
        tensors: the state of that method's module under its own names, in the dtypes of the file, on the CPU.
        source: the file that the tensors come from, for messages.
        target: of the model the heads were trained for, where the format says.
        base: name of that model, where the format says.
        training: how the heads were trained, where the format says.
        lm_head: `[Vd, H]` rows of that model's LM head, where the format carries a copy.
    """

    method: str
    config: Any
    tensors: Mapping[str, Tensor]
    source: Path
    target: Fingerprint | None = None
    base: str | None = None
    training: Mapping[str, object] = field(default_factory=dict)
    lm_head: Tensor | None = None


def save_heads(
    folder: str | os.PathLike[str],
    heads: nn.Module,
    target: Fingerprint,
    training: Mapping[str, object],
    dtype: torch.dtype = torch.float16,
    overwrite: bool = False,
    parts: Mapping[str, Callable[[Path], None]] | None = None,
) -> None:
    """Write heads as a checkpoint folder; it appears complete or not at all.

    Whatever else lies in a folder that is replaced, a README say, stays in it.

    Args:
        folder: the folder to make.
        heads: heads of a method in `METHODS`.
        target: the model they were trained for.
        training: anything JSON can hold about how they were trained.
        dtype: of the stored weights.
        overwrite: replace a heads checkpoint that is already there.
        parts: what else belongs to the checkpoint: names of files or folders in it, and what writes each to its path.

    Raises:
        FileExistsError: `folder` exists and `overwrite` is False, or it is something else than a heads checkpoint.
        ValueError: the heads are of no known method, or hold values that are not finite in `dtype`.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} already exists; give another folder, or overwrite=True to replace it")
    check_replaceable(folder)
    method = _method_of(heads)
    tensors = {key: _stored(key, value, dtype) for key, value in heads.state_dict().items()}
    write_folder(folder, _described(method, heads.config, target, None, training), tensors, parts)


def encode_heads(stored: Stored) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The contents of the two files for heads read elsewhere: `config.json`, and the tensors as they are.

    Heads whose target nobody has shown have no fingerprint, so that only their shape can protect them from a wrong one.
    """
    tensors = dict(stored.tensors)
    tensors[_IDS] = tensors[_IDS].to(torch.int32)
    return _described(stored.method, stored.config, stored.target, stored.base, stored.training), tensors


def _described(
    method: str, config: Any, target: Fingerprint | None, base: str | None, training: Mapping[str, object]
) -> dict[str, Any]:
    described = {
        "format": _FORMAT,
        "version": _VERSION,
        "method": method,
        "shape": asdict(config),
        "target": None if target is None else target.to_dict(),
        "training": dict(training),
    }
    return described if base is None else described | {"base": base}


def write_folder(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Callable[[Path], None]] | None = None,
) -> None:
    """Write `config.json`, `model.safetensors` and `parts` (see `save_heads`), in place of those that are there."""
    parts = parts or {}
    with replacing(folder, (*_OURS, *parts)) as fresh:
        (fresh / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({key: value.contiguous() for key, value in tensors.items()}, fresh / WEIGHTS_FILE, {"format": "pt"})
        for name, write in parts.items():
            write(fresh / name)


@contextmanager
def replacing(folder: Path, ours: tuple[str, ...]) -> Iterator[Path]:
    """A scratch folder that becomes `folder` when the block ends: complete, or, if it raises, not at all.

    Args:
        folder: may exist; what lies in it is then in the scratch folder already, without what `ours` names.
        ours: names, or patterns of them as of `fnmatch`, of what is written anew.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "new"
        if folder.exists():
            left_out = shutil.ignore_patterns(*ours)
            shutil.copytree(
                folder,
                fresh,
                symlinks=True,
                ignore=lambda place, names: left_out(place, names) if Path(place) == folder else (),
            )
        else:
            fresh.mkdir()
        yield fresh
        if not folder.exists():
            fresh.rename(folder)
            return
        old = Path(scratch) / "old"
        folder.rename(old)  # no system call replaces a folder that is not empty
        try:
            fresh.rename(folder)
        except OSError:
            old.rename(folder)
            raise


def load_heads(folder: str | os.PathLike[str], model: PreTrainedModel) -> Any:
    """Load heads for a target, in its dtype and on its device, ready for inference.

    Args:
        folder: what `save_heads` wrote.
        model: the target the heads were trained for, in any dtype.

    Raises:
        FileNotFoundError: no such folder, or one of its two files is not there.
        CheckpointError: the files are damaged, of an unknown method or version, or belong to another target; unknown,
            missing or misshapen tensors are named with the file and both shapes.
    """
    return build_heads(read_heads(folder), model)


def read_heads(folder: str | os.PathLike[str]) -> Stored:
    """What `save_heads` wrote, for no target yet.

    Raises:
        FileNotFoundError: no such folder, or one of its two files is not there.
        CheckpointError: the files are damaged, or of an unknown method or version.
    """
    folder = Path(folder)
    for path in (folder, folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        if not path.exists():
            raise FileNotFoundError(
                f"no heads checkpoint in {folder}: {path} does not exist; give a folder written by treedec's training"
            )
    data = _read_config(folder / CONFIG_FILE)
    method = METHODS[data["method"]]
    try:
        # JSON knows no tuples, and the frozen configurations hold nothing else that is a sequence.
        config = method.config(**{k: tuple(v) if isinstance(v, list) else v for k, v in data["shape"].items()})
        target = None if data["target"] is None else Fingerprint.from_dict(data["target"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} has an incomplete or invalid 'shape' or 'target' ({error}); copy or train the "
            "heads again"
        ) from error
    weights = folder / WEIGHTS_FILE
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{weights} cannot be read as safetensors ({error}); copy or train the heads again"
        ) from error
    return Stored(data["method"], config, tensors, weights, target, data.get("base"), data.get("training", {}))


def build_heads(stored: Stored, model: PreTrainedModel) -> Any:
    """The module for heads that were read, in the dtype and on the device of their target, ready for inference.

    Raises:
        CheckpointError: the heads belong to another target, or a tensor is unknown, missing, misshapen or not finite.
    """
    check_target(stored, model)
    heads = empty_heads(stored)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.fill_(torch.nan)  # a weight that is never loaded must not pass for one
    heads.to(dtype=model.dtype)
    heads.load_state_dict(stored.tensors)
    for key, value in heads.state_dict().items():
        if not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{stored.source}: {key!r} holds values that are not finite in {model.dtype}; copy or train the heads "
                "again"
            )
    return heads.to(model.device).eval()


def empty_heads(stored: Stored) -> Any:
    """The module that the tensors belong in, without them.

    Raises:
        CheckpointError: a tensor is unknown, missing or misshapen, or the draft vocabulary is none.
    """
    method = METHODS[stored.method]
    try:
        drafted = torch.empty(stored.config.draft_vocab_size, dtype=torch.long)
        _check_tensors(stored.source, stored.tensors, {_IDS: drafted})
        heads = method.heads(stored.config, stored.tensors[_IDS].long())
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:  # a shape that makes no sense
        raise CheckpointError(f"{stored.source}: {error}; copy or train the heads again") from error
    expected = heads.state_dict()
    for key, tensor in stored.tensors.items():
        if key not in expected:
            raise CheckpointError(
                f"{stored.source}: unknown tensor {key!r} of shape {list(tensor.shape)}; expected are "
                f"{', '.join(expected)}"
            )
    _check_tensors(stored.source, stored.tensors, expected)
    return heads


def check_target(stored: Stored, model: PreTrainedModel) -> None:
    """Refuse a model that the heads were not trained for, as far as the checkpoint can tell.

    Raises:
        CheckpointError: the fingerprint, the copied LM-head rows or the shape say that it is another model.
    """
    present = Fingerprint.of(model)
    remedy = "load the target they were trained for, or train heads for this one"
    if stored.target is not None:
        try:
            reason = stored.target.mismatch(present)
        except (TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{stored.source.parent / CONFIG_FILE} has an invalid 'target' ({error}); copy or train the heads again"
            ) from error
        if reason is not None:
            raise CheckpointError(
                f"{stored.source.parent} holds heads for another target (a {stored.target.architecture}): {reason} in "
                f"the {present.architecture} given; {remedy}"
            )
    # What a head reads may be narrower or wider than itself.
    wanted = getattr(stored.config, "target_hidden_size", None) or stored.config.hidden_size
    for name, ours in (("hidden_size", wanted), ("vocab_size", stored.config.vocab_size)):
        if ours != getattr(present, name):
            raise CheckpointError(
                f"{stored.source.parent} holds heads of {name} {ours} but the target has {getattr(present, name)}; "
                f"{remedy}"
            )
    if stored.lm_head is not None:
        rows = model.get_output_embeddings().weight.detach().cpu()[stored.tensors[_IDS].long()].float()
        # As loose as `Fingerprint.mismatch`: bfloat16 keeps 8 bits.
        if not torch.allclose(stored.lm_head.float(), rows, rtol=2e-2, atol=1e-4):
            raise CheckpointError(f"{stored.source} holds the LM head of another target; {remedy}")


def is_heads_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder says that it holds treedec heads, not a model, say; loading shows whether they are whole."""
    try:
        data = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("format") == _FORMAT


def check_replaceable(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that `save_heads(overwrite=True)` must not write to: one that exists, is not empty and no heads.

    Raises:
        FileExistsError: something else than a heads checkpoint is there, such as a model.
    """
    folder = Path(folder)
    if folder.exists() and not is_heads_folder(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not a heads checkpoint, so it is not replaced; give another folder")


def _method_of(heads: nn.Module) -> str:
    for name, method in METHODS.items():
        if type(heads) is method.heads:
            return name
    raise ValueError(
        f"{type(heads).__name__} is of no known method ({', '.join(METHODS)}); add it to "
        "treedec.heads.checkpoint.METHODS"
    )


def _stored(key: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is written: ids as int32, weights in `dtype`."""
    if not value.is_floating_point():
        return value.to("cpu", torch.int32).contiguous()
    stored = value.detach().to("cpu", dtype).contiguous()
    if not bool(stored.isfinite().all()):
        raise ValueError(
            f"{key!r} holds values that are not finite in {dtype}, so the heads are not saved; save them in a wider "
            "dtype or train again"
        )
    return stored


def _read_config(path: Path) -> dict[str, Any]:
    """What `config.json` says, if it speaks of heads of a known method."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy or train the heads again") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} does not describe treedec heads (its 'format' is not {_FORMAT!r}); give a folder written by "
            "treedec's training"
        )
    if data.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} has version {data.get('version')!r} and this treedec reads version {_VERSION}; update treedec "
            "or train again"
        )
    if not isinstance(data.get("method"), str) or data["method"] not in METHODS:
        raise CheckpointError(
            f"{path} names the unknown method {data.get('method')!r}; known are {', '.join(METHODS)}; update treedec "
            "or train again"
        )
    return data


def _check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Every expected tensor is there, with its shape and kind."""
    for key, tensor in expected.items():
        shape = list(tensor.shape)
        if key not in found:
            raise CheckpointError(f"{path}: tensor {key!r} of shape {shape} is missing; copy or train the heads again")
        if list(found[key].shape) != shape:
            raise CheckpointError(
                f"{path}: tensor {key!r} has shape {list(found[key].shape)}, but {CONFIG_FILE} asks for {shape}; "
                "copy or train the heads again"
            )
        if found[key].is_floating_point() != tensor.is_floating_point():
            raise CheckpointError(
                f"{path}: tensor {key!r} is {found[key].dtype}, which cannot stand for {tensor.dtype}; copy or train "
                "the heads again"
            )
