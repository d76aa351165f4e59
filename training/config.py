"""How heads are trained: the options of a run, from Python or from a YAML file.

A mistake is found before any work begins, and named with the file and the key: a run of many hours must not rest on a
misspelt option that was silently left out.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import yaml

if TYPE_CHECKING:
    from treedec.training.learners import LearnerType

_PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHOICES = {
    "labels": ("soft", "hard"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": ("auto", *_PRECISIONS),
    "features": ("stored", "online"),
}
_AT_LEAST_ONE = (
    "draft_vocab_size",
    "epochs",
    "max_steps",
    "pack_tokens",
    "packs_per_step",
    "max_feature_bytes",
    "eval_every",
    "eval_nodes",
    "checkpoint_every",
    "log_every",
)
# What may differ when a run is resumed: it decides where states come from and when something is written, not what is
# trained. Stored and recomputed states are the same bits (see `contracts`).
_MAY_CHANGE = (
    "features",
    "features_folder",
    "max_feature_bytes",
    "shard_target",
    "checkpoint_every",
    "log_every",
    "tensorboard",
)


@dataclass(frozen=True)
class TrainConfig:
    """How heads are trained.

    Attributes:
        method: a key of `treedec.training.learners.LEARNERS`.
        options: of that method, by name; those left out have the method's defaults.
        initial_heads: folder of heads of this method and these sizes to go on from, instead of random weights: with
            more data, or for a target that was fine-tuned since. Which tokens they draft is chosen anew.
        draft_vocab_size: tokens that can be drafted; a target with fewer has all of them drafted.
        labels: what heads imitate: the target's distributions ("soft") or its first choices ("hard").
        depth_weights: weight of each depth in the loss; None for 1 each.
        epochs: passes over the training split.
        max_steps: end after so many steps, if the epochs have more; None for all.
        pack_tokens: tokens that are computed together, padding included; a longer conversation is computed alone.
        packs_per_step: packs that a step of the optimiser is made of, of all processes together, so that a run means
            the same on any number of them.
        learning_rate: at the end of the warm-up; None for what suits the method.
        schedule: what becomes of it from there: a half cosine or a line to zero, or nothing.
        warmup: fraction of the steps over which the learning rate rises.
        weight_decay: decoupled, on matrices only.
        clip: the largest norm of a gradient.
        precision: of the matrix products in heads, whose weights stay in float32: "bf16", "fp16" (with loss scaling),
            "no" for that of the weights; "auto" is "bf16" for a bfloat16 target, "fp16" for medusa2 on a float16 one,
            else "no".
        features: whether the target's hidden states are computed once and "stored" with the run, or "online" in each
            step, which costs no disk and a pass of the target.
        features_folder: where they are stored; None for `features/` in the folder of the run. Runs on the same data can
            share them, also if they read different layers.
        max_feature_bytes: refuse to store more; None for no limit.
        shard_target: divide the target's layers over the processes instead of holding all of them on each, for targets
            that do not fit one device (`features` must be "online"; not for medusa2, nor for a draft-model that is
            a copy of the target). The model object is sharded in place.
        holdout: fraction of the conversations, the last ones, kept for evaluation.
        seed: of initial weights, of the order of the data and of dropout.
        eval_every: steps between evaluations; None for one after each epoch. There is always one at the end.
        eval_nodes: size of the token tree for which acceptance is simulated, its root included.
        checkpoint_every, log_every: steps between checkpoints, and between entries of the history.
        tensorboard: also log to `logs/` in the folder of the run, if tensorboard is installed.
    """

    method: str = "medusa"
    options: Mapping[str, Any] = field(default_factory=dict)
    initial_heads: str | None = None
    draft_vocab_size: int = 8192
    labels: str = "soft"
    depth_weights: tuple[float, ...] | None = None
    epochs: int = 4
    max_steps: int | None = None
    pack_tokens: int = 2048
    packs_per_step: int = 1
    learning_rate: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: str = "auto"
    features: str = "stored"
    features_folder: str | None = None
    max_feature_bytes: int | None = None
    shard_target: bool = False
    holdout: float = 0.03
    seed: int = 0
    eval_every: int | None = None
    eval_nodes: int = 16
    checkpoint_every: int = 50
    log_every: int = 10
    tensorboard: bool = True

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for one in fields(self):
            object.__setattr__(self, one.name, typed(one.name, getattr(self, one.name), hints[one.name]))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", learner_type(self.method).learning_rate)
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a fraction in [0, 1), not {self.warmup}")
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout must be a fraction in (0, 1), not {self.holdout}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")
        weights = self.depth_weights
        if weights is not None and not (all(0 <= one < math.inf for one in weights) and any(weights)):
            raise ValueError(f"depth_weights must be numbers, none negative and not all zero, not {weights}")
        if self.shard_target and self.features == "stored":
            raise ValueError("shard_target needs features='online': stored features are computed by one process alone")
        options = self.method_options()
        if self.shard_target and learner_type(self.method).copies_layers(options):
            raise ValueError(
                f"shard_target is not for {self.method}, which copies layers of the target: each process must hold it "
                "whole"
            )

    def method_options(self) -> Any:
        """The method's own frozen dataclass, with `options` in it.

        Raises:
            ValueError: an unknown method; an option that it does not have, or that it refuses.
        """
        kind = learner_type(self.method).options
        known_keys(self.options, [one.name for one in fields(kind)], f"{self.method} has no option")
        hints = typing.get_type_hints(kind)
        return kind(**{name: typed(f"options.{name}", value, hints[name]) for name, value in self.options.items()})

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **overrides: Any) -> TrainConfig:
        """The config in a YAML file, which holds a mapping of attributes; those left out have their defaults.

        Args:
            path: the file.
            **overrides: what counts instead of the file's values; of `options`, those that are given.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not such a mapping, or a key or value of it is none of ours; file and key are named.
        """
        try:
            read = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {error}") from error
        given = {} if read is None else read
        if not isinstance(given, dict):
            raise ValueError(f"{path} must hold a mapping of options, such as `method: medusa`, not {given!r}")
        try:
            known_keys(given, [one.name for one in fields(cls)], "unknown key")
            if isinstance(given.get("options"), dict):
                overrides = overrides | {"options": given["options"] | dict(overrides.get("options") or {})}
            return cls(**(given | overrides))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All fields, the method's defaults among them, as JSON, YAML and `torch.load(weights_only=True)` know them."""
        own = {one.name: _plain(getattr(self, one.name)) for one in fields(self)}
        chosen = self.method_options()
        return own | {"options": {one.name: _plain(getattr(chosen, one.name)) for one in fields(chosen)}}

    def fixed(self) -> dict[str, Any]:
        """The fields that a resumed run must have been begun with."""
        return {name: value for name, value in self.to_dict().items() if name not in _MAY_CHANGE}

    def to_yaml(self) -> str:
        """What `from_yaml` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def autocast_dtype(self, target: torch.dtype) -> torch.dtype | None:
        """The dtype of the heads' matrix products for a target in that dtype; None for that of their weights.

        Raises:
            ValueError: gradients would vanish in the target.
        """
        # A float16 target gets none by itself: the gradient of a mean over thousands of rows lies below the smallest
        # numbers of float16, so that it takes loss scaling, and steps that are given up, to train in it. Where
        # gradients pass through such a target, there is no other way.
        if target == torch.float16 and learner_type(self.method).through_target:
            if self.precision not in ("auto", "fp16"):
                raise ValueError(
                    f"precision {self.precision!r} scales no losses, without which the gradients of {self.method} "
                    "vanish in a float16 target: choose 'fp16', or load the target in bfloat16"
                )
            return torch.float16
        if self.precision == "auto":
            return torch.bfloat16 if target == torch.bfloat16 else None
        return _PRECISIONS[self.precision]

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of the `step`-th of `steps` steps, from 0: linear warm-up, then the schedule."""
        peak, warmup = cast(float, self.learning_rate), round(self.warmup * steps)
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(steps - warmup, 1)
        remaining = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
        return peak * remaining[self.schedule]


def learner_type(method: str) -> LearnerType:
    """What a method is.

    Raises:
        ValueError: there is none of that name.
    """
    from treedec.training.learners import LEARNERS

    if method not in LEARNERS:
        raise ValueError(f"method must be one of {', '.join(LEARNERS)}, not {method!r}")
    return LEARNERS[method]


def known_keys(given: Mapping[Any, Any], allowed: Iterable[str], complaint: str) -> None:
    """Refuse the first key that is not allowed, with the one that may have been meant.

    Raises:
        ValueError: there is one; the message begins with `complaint`.
    """
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(allowed) or 'none'}"
            raise ValueError(f"{complaint} {key!r}; {hint}")


def typed(name: str, value: Any, hint: Any) -> Any:
    """A value of the type that a dataclass names: integers also pass for numbers, lists for tuples, None where allowed.

    Raises:
        ValueError: it is of another type; the message begins with `name`.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = [one for one in arguments if one is not type(None)]
        return typed(name, value, hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(typed(f"{name}[{place}]", one, arguments[0]) for place, one in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind = {tuple: tuple}.get(origin, Mapping if origin is not None else hint)
    if not isinstance(value, kind) or (hint is int and isinstance(value, bool)):
        what = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
            hint, "a list" if origin is tuple else "a mapping"
        )
        raise ValueError(f"{name} must be {what}, not {value!r}")
    return value


def _plain(value: Any) -> Any:
    """Tuples as lists and mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


class Loader(yaml.SafeLoader):
    """Reads YAML in which `1e-3` is a number, as everywhere but in YAML 1.1, and no key can be given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
