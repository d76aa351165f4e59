"""What the readers of foreign formats share: files, tensors taken one by one, and questions about the base model."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from treedec.heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, CheckpointError
from treedec.models import Fingerprint

# What transformers calls the weights of a model, in the order in which it looks for them.
_GENERAL = (WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` says; nothing where there is none.

    Raises:
        CheckpointError: it is no JSON object.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object; copy the checkpoint again")
    return config


def general_weights(folder: Path) -> list[Path]:
    """The files that hold what transformers would load as the weights of the folder; none if it has no weights.

    Raises:
        CheckpointError: the index of a model in several files is damaged.
    """
    path = next((folder / name for name in _GENERAL if (folder / name).is_file()), None)
    if path is None:
        return []
    if path.suffix != ".json":
        return [path]
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(files)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of weights ({error!r}); copy the checkpoint again") from error


def tensor_names(path: Path) -> set[str]:
    """Names of the tensors in a file, without reading them where its format allows.

    Raises:
        CheckpointError: the file is damaged, or a pickle that holds more than tensors.
    """
    if path.suffix == ".safetensors":
        with _safetensors(path) as file:
            return set(file.keys())
    return set(_unpickled(path))


def load_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors in a file whose names begin with `prefix`, by what follows it; on the CPU, in the dtypes of the file.

    Raises:
        CheckpointError: the file is damaged, or a pickle that holds more than tensors.
    """
    if path.suffix == ".safetensors":
        with _safetensors(path) as file:
            names = [name for name in list(file.keys()) if name.startswith(prefix)]
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return {key.removeprefix(prefix): value for key, value in _unpickled(path).items() if key.startswith(prefix)}


def _safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error}); copy the checkpoint again") from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        # Never the whole of pickle: a checkpoint from elsewhere could run whatever it likes.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, so it is not opened: that would let it run code of its own; have it "
            "converted to safetensors by somebody you trust"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read ({reason}); copy the checkpoint again") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} is not a mapping of names to tensors; export the heads' state_dict")
    return state


class Tensors:
    """The tensors of a file. A reader takes those it knows, with the shapes they must have; the rest is unknown."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path):
        self.path = path
        self._tensors, self._taken = tensors, set[str]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, int]:
        """Rows and columns of a matrix.

        Raises:
            CheckpointError: there is no such tensor, or it is no matrix.
        """
        if key not in self:
            raise CheckpointError(f"{self.path}: tensor {key!r} is missing; copy the checkpoint again")
        shape = self._tensors[key].shape
        if len(shape) != 2:
            raise CheckpointError(f"{self.path}: tensor {key!r} has shape {list(shape)}, but should be a matrix")
        return shape[0], shape[1]

    def peek(self, key: str) -> Tensor:
        """A tensor that is there, for a reader that does its own checks."""
        return self._tensors[key]

    def take(self, key: str, *shape: int) -> Tensor:
        """A weight of that shape.

        Raises:
            CheckpointError: there is no such tensor, it has another shape (names both), or it holds no floats.
        """
        weight = self._take(key, shape)
        if not weight.is_floating_point():
            raise CheckpointError(f"{self.path}: tensor {key!r} is {weight.dtype}, but should hold weights")
        return weight

    def take_ids(self, key: str, size: int) -> Tensor:
        """`[size]` int64: a tensor of ids, of their offsets, or of marks.

        Raises:
            CheckpointError: there is no such tensor, it has another shape (names both), or it holds floats.
        """
        ids = self._take(key, (size,))
        if ids.is_floating_point():
            raise CheckpointError(f"{self.path}: tensor {key!r} is {ids.dtype}, but should hold ids")
        return ids.long()

    def _take(self, key: str, shape: tuple[int, ...]) -> Tensor:
        if key not in self:
            raise CheckpointError(
                f"{self.path}: tensor {key!r} of shape {list(shape)} is missing; copy the checkpoint again"
            )
        if self._tensors[key].shape != shape:
            raise CheckpointError(
                f"{self.path}: tensor {key!r} has shape {list(self._tensors[key].shape)}, but the rest of the "
                f"checkpoint asks for {list(shape)}"
            )
        self._taken.add(key)
        return self._tensors[key]

    def finish(self) -> None:
        """Raise CheckpointError if a tensor has not been taken."""
        for key in self:
            if key not in self._taken:
                raise CheckpointError(
                    f"{self.path}: unknown tensor {key!r} of shape {list(self._tensors[key].shape)}; expected are "
                    f"{', '.join(sorted(self._taken))}"
                )


class Base:
    """The model that the heads draft for, as far as a format leaves something to it.

    Args:
        model: that model, or None if it is not at hand.

    Attributes:
        guess: answer with a stand-in where it is not known: for those who look at a checkpoint without using it.
        asked: what has been answered so.
        config: of the model, where it is at hand.
    """

    def __init__(self, model: PreTrainedModel | None, guess: bool = False):
        self.guess = guess
        self._target = None if model is None else Fingerprint.of(model)
        self.config = None if model is None else model.config.get_text_config()
        self.asked: set[str] = set()

    def vocab_size(self, path: Path) -> int:
        return self._fact("vocab_size", path, stand_in=1)

    def layers(self, path: Path) -> int:
        return self._fact("layers", path, stand_in=8)

    def _fact(self, name: str, path: Path, stand_in: int) -> int:
        if self._target is not None:
            return int(getattr(self._target, name))
        if not self.guess:
            raise CheckpointError(f"{path} leaves the target's {name} open; say which target it is for (--target)")
        self.asked.add(name)
        return stand_in


@dataclass(frozen=True)
class Source:
    """What a reader reads.

    Attributes:
        config: contents of `config.json`.
        tensors: by the names of the format, on the CPU.
        base: the model that the heads draft for.
    """

    config: Mapping[str, Any]
    tensors: Tensors
    base: Base

    def renamed(self, rename: Callable[[str], str]) -> Source:
        """The same with other names of tensors.

        Raises:
            CheckpointError: two tensors would have the same name.
        """
        tensors: dict[str, Tensor] = {}
        for key in self.tensors:
            if rename(key) in tensors:
                raise CheckpointError(f"{self.tensors.path}: tensor {rename(key)!r} is there under two names")
            tensors[rename(key)] = self.tensors.peek(key)
        return Source(self.config, Tensors(tensors, self.tensors.path), self.base)


def ascending(ids: Tensor, vocab_size: int, key: str, path: Path) -> tuple[Tensor, Tensor]:
    """`[Vd]` int64 ids of the target in the order of a checkpoint, to treedec's ascending ones and where each one was.

    Raises:
        CheckpointError: an id is repeated, or no id of the target; names `key` and `path`.
    """
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise CheckpointError(
            f"{path}: {key!r} leads to the id {wrong}, but the target's vocabulary ends at {vocab_size - 1}"
        )
    found, order = ids.sort(stable=True)
    if bool((found[1:] == found[:-1]).any()):
        twice = int(found[1:][found[1:] == found[:-1]][0])
        raise CheckpointError(f"{path}: {key!r} leads to the id {twice} more than once")
    return found, order


def base_name(config: Mapping[str, Any]) -> str | None:
    """The base model that a configuration in the style of transformers names."""
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) else None
