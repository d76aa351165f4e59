"""Heads on disk: a folder with `config.json` and `model.safetensors`.

`config.json` names the method, the shape, the target the heads were trained for and how they were trained; the weights
are the state of the module under its own names. Nothing is taken on trust when loading: a key that is unknown, absent
or of another shape is an error, and so is another target, because heads on the wrong target draft noise without ever
failing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from treedec.heads.medusa import MedusaConfig, MedusaHeads
from treedec.models import Fingerprint

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_FORMAT, _VERSION = "treedec", 1
_OURS = (CONFIG_FILE, WEIGHTS_FILE)
_IDS = "draft_ids"


class CheckpointError(ValueError):
    """The folder holds no heads that fit this model; the message names the file, what is wrong and what to do."""


@dataclass(frozen=True)
class Method:
    """How the heads of one method are rebuilt: `heads(config(**shape), draft_ids)`."""

    config: type[MedusaConfig]
    heads: type[MedusaHeads]


# A new method is one line here.
METHODS: Mapping[str, Method] = {"medusa": Method(MedusaConfig, MedusaHeads)}


def save_heads(
    folder: str | os.PathLike[str],
    heads: MedusaHeads,
    target: Fingerprint,
    training: Mapping[str, object],
    dtype: torch.dtype = torch.float16,
    overwrite: bool = False,
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

    Raises:
        FileExistsError: `folder` exists and `overwrite` is False, or it is something else than a heads checkpoint.
        ValueError: the heads are of no known method, or hold values that are not finite in `dtype`.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} already exists; give another folder, or overwrite=True to replace it")
    check_replaceable(folder)
    config = {
        "format": _FORMAT,
        "version": _VERSION,
        "method": _method_of(heads),
        "shape": asdict(heads.config),
        "target": target.to_dict(),
        "training": dict(training),
    }
    tensors = {key: _stored(key, value, dtype) for key, value in heads.state_dict().items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "new"
        if folder.exists():
            shutil.copytree(
                folder, fresh, symlinks=True, ignore=lambda place, _: _OURS if Path(place) == folder else ()
            )
        else:
            fresh.mkdir()
        (fresh / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
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


def load_heads(folder: str | os.PathLike[str], model: PreTrainedModel) -> MedusaHeads:
    """Load heads for a target, in its dtype and on its device, ready for inference.

    Args:
        folder: what `save_heads` wrote.
        model: the target the heads were trained for, in any dtype.

    Raises:
        FileNotFoundError: no such folder, or one of its two files is not there.
        CheckpointError: the files are damaged, of an unknown method or version, or belong to another target; unknown,
            missing or misshapen tensors are named with the file and both shapes.
    """
    folder = Path(folder)
    for path in (folder, folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        if not path.exists():
            raise FileNotFoundError(
                f"no heads checkpoint in {folder}: {path} does not exist; give a folder written by treedec's training"
            )
    method, config = _read_config(folder / CONFIG_FILE, model)
    weights = folder / WEIGHTS_FILE
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{weights} cannot be read as safetensors ({error}); copy or train the heads again"
        ) from error
    _check_tensors(weights, tensors, method.heads(config).state_dict())
    try:
        heads = method.heads(config, tensors[_IDS].long())
    except ValueError as error:
        raise CheckpointError(f"{weights}: {error}; copy or train the heads again") from error
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.fill_(torch.nan)  # a weight that is never loaded must not pass for one
    heads.to(dtype=model.dtype)
    heads.load_state_dict(tensors)
    for key, value in heads.state_dict().items():
        if not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{weights}: {key!r} holds values that are not finite in {model.dtype}; copy or train the heads again"
            )
    return heads.to(model.device).eval()


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


def _method_of(heads: MedusaHeads) -> str:
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


def _read_config(path: Path, model: PreTrainedModel) -> tuple[Method, MedusaConfig]:
    """The method and shape that `config.json` declares, after checking that they are for this model."""
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
    method = METHODS[data["method"]]
    try:
        config = method.config(**data["shape"])
        stored = Fingerprint.from_dict(data["target"])
        present = Fingerprint.of(model)
        reason = stored.mismatch(present)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} has an incomplete or invalid 'shape' or 'target' ({error}); copy or train the heads again"
        ) from error
    if reason is not None:
        raise CheckpointError(
            f"{path.parent} holds heads for another target (a {stored.architecture}): {reason} in the "
            f"{present.architecture} given; "
            "load the target they were trained for, or train heads for this one"
        )
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(present, name):
            raise CheckpointError(
                f"{path}: 'shape' has {name} {getattr(config, name)} but the target has {getattr(present, name)}; "
                "copy or train the heads again"
            )
    return method, config


def _check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Every expected tensor is there, with its shape and kind, and nothing else."""
    for key, tensor in found.items():
        if key not in expected:
            raise CheckpointError(
                f"{path}: unknown tensor {key!r} of shape {list(tensor.shape)}; expected are {', '.join(expected)}"
            )
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
