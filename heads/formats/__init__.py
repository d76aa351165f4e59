"""Checkpoints of others: which format a folder holds, reading it, and writing those that other engines load.

A reader turns a folder into a `Stored`: treedec's own names, shapes and order, whatever the source; a writer goes the
other way. Every tensor is taken by name and shape, so that unknown, missing and misshapen ones are errors that name the
key and the file. Weights are read as safetensors, or as pickles of nothing but tensors.

Formats: `treedec`; `medusa` (FasterDecoding, TGI); `vllm-medusa`; `hydra`; `eagle` (EAGLE-1 and 2 of SafeAILab);
`eagle3` (SafeAILab, sglang); `speculators`. A new one is a reader in `READERS`, a writer in `WRITERS`, or both, and a
way to recognise it in `_found`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from treedec.heads.checkpoint import (
    WEIGHTS_FILE,
    CheckpointError,
    Stored,
    check_target,
    empty_heads,
    encode_heads,
    read_heads,
    write_folder,
)
from treedec.heads.formats.eagle import (
    eagle3_refuses,
    read_eagle,
    read_eagle3,
    read_speculators,
    speculators_refuses,
    write_eagle3,
    write_speculators,
)
from treedec.heads.formats.hydra import read_hydra
from treedec.heads.formats.medusa import read_medusa, read_vllm_medusa, write_vllm_medusa
from treedec.heads.formats.reading import (
    Base,
    Source,
    Tensors,
    base_name,
    general_weights,
    load_tensors,
    read_config,
    tensor_names,
)
from treedec.models import Fingerprint

__all__ = ["READERS", "WRITERS", "Writer", "detect", "inspect", "read", "unwritable", "write"]

_MERGED = "medusa_head."  # before the heads' tensors in a model that was merged with them


def _read_hydra(source: Source) -> Stored:
    tensors = source.tensors
    state = {key: tensors.peek(key) for key in tensors}
    config, state = read_hydra(source.config, state, base=source.base.config)
    return Stored("hydra", config, state, tensors.path, base=base_name(source.config))


#: Readers by format; treedec's own is `read_heads`.
READERS: Mapping[str, Callable[[Source], Stored]] = {
    "medusa": read_medusa,
    "vllm-medusa": read_vllm_medusa,
    "hydra": _read_hydra,
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "speculators": read_speculators,
}


@dataclass(frozen=True)
class Writer:
    """How heads are written in one format, always as `config.json` and `model.safetensors`.

    Attributes:
        encode: from heads and `[Vd, H]` rows of the target's LM head, or None, to the contents of the two files.
        methods: those of `METHODS` that the format has, None for all.
        refuses: why it cannot hold certain heads of these methods, or None.
        needs_lm_head: it stores an LM head, also for heads that share the target's.
    """

    encode: Callable[[Stored, Tensor | None], tuple[dict[str, Any], dict[str, Tensor]]]
    methods: tuple[str, ...] | None = None
    refuses: Callable[[Stored], str | None] = lambda stored: None
    needs_lm_head: bool = True


WRITERS: Mapping[str, Writer] = {
    "treedec": Writer(lambda stored, _: encode_heads(stored), needs_lm_head=False),
    "vllm-medusa": Writer(write_vllm_medusa, ("medusa",)),
    "eagle3": Writer(write_eagle3, ("eagle",), eagle3_refuses),
    "speculators": Writer(write_speculators, ("eagle",), speculators_refuses),
}


def detect(path: str | os.PathLike[str]) -> str | None:
    """The format of the heads in a folder, by its files, configuration keys and tensor names.

    None if there are none, as in the folder of a language model, or if the only weights that could be some are damaged:
    `read` says what is wrong with those.

    Raises:
        CheckpointError: the folder holds heads in more than one format; names both.
    """
    found = _found(Path(path))
    return next(iter(found)) if found else None


def read(path: str | os.PathLike[str], model: PreTrainedModel | None = None) -> Stored:
    """The heads in a folder, in whatever format.

    Args:
        path: the folder.
        model: the target, needed by formats that leave its vocabulary or its layers open.

    Raises:
        FileNotFoundError: no such folder.
        CheckpointError: no heads, heads in two formats, damaged files, tensors that are unknown, missing or misshapen,
            or a target that is needed.
    """
    return _read(Path(path), Base(model))[1]


def inspect(path: str | os.PathLike[str], model: PreTrainedModel | None = None) -> dict[str, Any]:
    """What a folder of heads holds, as JSON can say it.

    Args:
        path: the folder.
        model: the target, for what the format leaves open.

    Returns:
        `format`, `method`, `shape` (of the method's configuration; None for what the format leaves to a target that is
        not given), `draft_vocab_size`, `base` (name of the target), `target` (its architecture, where there is a
        fingerprint), `parameters`, `bytes` (of the weights), and `writes`: per format, why it cannot be written, or
        None.

    Raises:
        FileNotFoundError, CheckpointError: as for `read`.
    """
    base = Base(model, guess=True)
    name, stored = _read(Path(path), base)
    empty_heads(stored)
    # What a reader had to make up must not pass for a fact.
    unknown = {"vocab_size": ("vocab_size", "draft_vocab_size"), "layers": ("features",)}
    shape = asdict(stored.config) | {key: None for asked in base.asked for key in unknown[asked]}
    return {
        "format": name,
        "method": stored.method,
        "shape": shape,
        "draft_vocab_size": shape["draft_vocab_size"],
        "base": stored.base,
        "target": None if stored.target is None else stored.target.architecture,
        "parameters": sum(tensor.numel() for tensor in stored.tensors.values() if tensor.is_floating_point()),
        "bytes": sum(tensor.nbytes for tensor in stored.tensors.values()),
        "writes": {other: unwritable(stored, other) for other in WRITERS},
    }


def unwritable(stored: Stored, name: str) -> str | None:
    """Why a format cannot hold these heads, or None if it can."""
    writer = WRITERS[name]
    if writer.methods is not None and stored.method not in writer.methods:
        return f"that format has no {stored.method} heads"
    return writer.refuses(stored)


def write(
    path: str | os.PathLike[str],
    stored: Stored,
    name: str,
    model: PreTrainedModel | None = None,
    base: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write heads in a format, their weights as they are; the folder appears complete or not at all.

    Args:
        path: the folder to make.
        stored: what `read` returned.
        name: a key of `WRITERS`.
        model: the target. The heads must fit it, and treedec's own format then keeps its fingerprint. It is needed by
            formats that store a copy of its LM head.
        base: its name, for heads that do not know it.
        overwrite: replace heads that are already there.

    Raises:
        FileExistsError: there is something and `overwrite` is False, or it is something else than heads.
        CheckpointError: the format cannot hold these heads, they are not for this model, or a model is needed.
    """
    folder = Path(path)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} already exists; give another folder, or --overwrite to replace it")
    _check_replaceable(folder)
    empty_heads(stored)
    if (reason := unwritable(stored, name)) is not None:
        raise CheckpointError(f"{stored.source.parent} cannot be written as {name}: {reason}")
    if model is not None:
        check_target(stored, model)
        # Where the target came from, if it is not known from the training: speculators finds it by that.
        base = base or stored.base or model.config.name_or_path or None
        stored = replace(stored, target=Fingerprint.of(model))
    stored = replace(stored, base=stored.base or base)
    shares = not getattr(stored.config, "own_lm_heads", getattr(stored.config, "own_lm_head", False))
    lm_head = _lm_head(stored, name, model) if WRITERS[name].needs_lm_head and shares else None
    write_folder(folder, *WRITERS[name].encode(stored, lm_head))


def _read(folder: Path, base: Base) -> tuple[str, Stored]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}")
    found = _found(folder)
    if not found:
        read_config(folder)
        for path in general_weights(folder):
            tensor_names(path)  # says what is wrong with the file, if anything is
        raise CheckpointError(f"{folder} holds no heads in a known format ({', '.join(('treedec', *READERS))})")
    name, files = next(iter(found.items()))
    if name == "treedec":
        return name, read_heads(folder)
    if not files:
        raise FileNotFoundError(f"{folder} has a configuration of {name} heads, but no {WEIGHTS_FILE}")
    prefix = _MERGED if name == "medusa" and not files[0].stem.startswith("medusa_lm_head") else ""
    tensors = {key: tensor for path in files for key, tensor in load_tensors(path, prefix).items()}
    try:
        return name, READERS[name](Source(read_config(folder), Tensors(tensors, files[0]), base))
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # a configuration without sense
        raise CheckpointError(f"{files[0]} holds no {name} heads that can be read: {error}") from error


def _found(folder: Path) -> dict[str, list[Path]]:
    """The one format in a folder and the files of its weights; empty if there is none."""
    try:
        config = read_config(folder)
    except CheckpointError:
        config = {}
    found: dict[str, list[Path]] = {}
    for name in ("medusa", "hydra"):
        stem = folder / f"{name}_lm_head"
        files = [path for path in (stem.with_suffix(".safetensors"), stem.with_suffix(".pt")) if path.is_file()]
        if files:
            found[name] = files[:1]
    general: list[Path] = []
    names: set[str] = set()
    try:
        general = general_weights(folder)
        names = {name for path in general for name in tensor_names(path)}
    except CheckpointError:
        pass  # see `detect`
    if config.get("format") == "treedec":
        found["treedec"] = general
    if "speculators_model_type" in config:
        found["speculators"] = general
    named = _by_name(names)
    if named is not None and not {"treedec", "speculators"} & set(found):
        found.setdefault(named, general)
    if len(found) > 1:
        places = [
            f"{name} ({', '.join(path.name for path in files) or 'config.json'})" for name, files in found.items()
        ]
        raise CheckpointError(f"{folder} holds heads in two formats, {' and '.join(places)}; give each its own folder")
    return found


def _by_name(names: Iterable[str]) -> str | None:
    """The format whose tensors have such names."""
    names = set(names)
    if any(name.startswith(_MERGED) for name in names):
        return "medusa"
    if any(re.fullmatch(r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight", name) for name in names):
        return "vllm-medusa"
    if any(name.startswith("midlayer.") for name in names) or names & {"d2t", "layers.0.hidden_norm.weight"}:
        return "eagle3"
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return "eagle3" if names & {"norm.weight", "lm_head.weight"} else "eagle"  # EAGLE-1 has neither
    return None


def _lm_head(stored: Stored, name: str, model: PreTrainedModel | None) -> Tensor:
    """`[Vd, H]` rows of the target's LM head, in the dtype of the heads."""
    if stored.lm_head is not None:
        return stored.lm_head
    if model is None:
        raise CheckpointError(
            f"{stored.source.parent} shares the LM head of its target, and {name} stores a copy; say which target it "
            "is for (--target)"
        )
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise CheckpointError(f"{name} has no place for the bias of the LM head of {type(model).__name__}")
    dtype = next(tensor.dtype for tensor in stored.tensors.values() if tensor.is_floating_point())
    return head.weight.detach()[stored.tensors["draft_ids"].long().to(head.weight.device)].to("cpu", dtype)


def _check_replaceable(folder: Path) -> None:
    """Refuse a folder whose heads are not in the two files that would be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or detect(folder) not in WRITERS or general_weights(folder) != [folder / WEIGHTS_FILE]:
        raise FileExistsError(f"{folder} holds no heads that could be replaced; give another folder")
