"""The result file of `treedec bench`: every row that was measured, and all that decided it.

A file is one JSON object of a versioned schema. What is told of it (tables, ratios, intervals, plots) is computed from
its rows by the modules that read it, so a result can be reported anew without being measured anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA = 4

# Rules that are not worth a word, because they are what one gets without asking.
_DEFAULT_RULES = (None, "greedy", "coupled")


@dataclass(frozen=True)
class Condition:
    """One way of decoding, of which a run compares several.

    Attributes:
        method: its name, such as `hf` or `recurrent@32`.
        temperature: 0 for greedy decoding.
        acceptance: name of the acceptance rule; None for what is not treedec's own.
        batch: prompts that are decoded together.
    """

    method: str
    temperature: float
    acceptance: str | None
    batch: int

    @property
    def label(self) -> str:
        """A short text unique within a run, such as `recurrent@32 T=1 residual b4`; defaults are left out."""
        parts = [self.method]
        if self.temperature:
            parts.append(f"T={self.temperature:g}")
        if self.acceptance not in _DEFAULT_RULES:
            parts.append(str(self.acceptance))
        if self.batch > 1:
            parts.append(f"b{self.batch}")
        return " ".join(parts)


@dataclass(frozen=True)
class Row:
    """One decode: a batch of prompts under one condition in one round.

    Attributes:
        condition: index into `Result.conditions`.
        round: 0, 1, …: how often the prompts had been decoded before.
        prompts: their ids; one unless the condition's batch is larger.
        category: of all of them.
        prompt_tokens: length of the prompts, all together, padding left out.
        new_tokens: by the one counter that all methods share, all prompts together.
        prefill_seconds: from the call until the first token of every prompt is known.
        decode_seconds: from there until all of them are.
        draft_seconds, target_seconds: parts of `decode_seconds` that drafting and the passes of the target took; None
            where the method is not treedec's own.
        passes: passes of the target after the first, summed over the prompts that were unfinished in them.
        nodes: of the trees of these passes, the roots included; None where the method is not treedec's own.
        accepted_lengths: how often such a pass committed 1, 2, … tokens of a prompt; the counts sum to `passes`.
        acceptance_by_place: `"depth,rank"` of a candidate, both from 1, to how often there was one there whose parent
            had been accepted (or was the root), and how often it was accepted too. The rank is among its siblings, in
            the order of the tree.
        digest: hex blake2b of 8 bytes over the new tokens: equal outputs have equal digests.
        matches: whether the tokens are those of `hf` at the same temperature, seed and batch; None without `hf`.
        first_difference: greedy decoding only: the first new token, from 0, that is another one in any of the prompts.
        logit_gap: greedy decoding only: the target's own gap between the two tokens where a prompt's outputs part, the
            largest over the prompts; near 0 at a near-tie.
    """

    condition: int
    round: int
    prompts: tuple[str, ...]
    category: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float | None
    target_seconds: float | None
    passes: int | None
    nodes: int | None
    accepted_lengths: dict[int, int] | None
    acceptance_by_place: dict[str, tuple[int, int]] | None
    digest: str
    matches: bool | None
    first_difference: int | None
    logit_gap: float | None

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def decoded_tokens(self) -> int:
        """New tokens of the passes after the first, which are what `decode_seconds` bought.

        Mostly all but one per prompt; transformers' assisted decoding verifies drafts in its first pass already.
        """
        if self.accepted_lengths is None:
            return self.new_tokens - len(self.prompts)
        return sum(length * times for length, times in self.accepted_lengths.items())


@dataclass(frozen=True)
class Failure:
    """Prompts that a condition could not decode; they count for no condition of the run.

    Attributes:
        condition: index into `Result.conditions`.
        prompts: their ids.
        error: what was raised.
    """

    condition: int
    prompts: tuple[str, ...]
    error: str


@dataclass(frozen=True)
class Expectation:
    """How often an acceptance rule should accept a child of a node: see `treedec.benchmarks.distributions`.

    Attributes:
        method: whose drafter it is about.
        temperature: of the target and the drafter.
        positions: nodes that it is the mean over.
        rule, drafts, acceptance, error: see `treedec.benchmarks.theory.Expected`.
    """

    method: str
    temperature: float
    positions: int
    rule: str
    drafts: int
    acceptance: float
    error: float | None


@dataclass(frozen=True)
class Result:
    """A finished run, or as much of one as there was time for.

    Attributes:
        command: what was typed, with the names of files but not the folders they lie in.
        machine: processor, its instructions, threads, device and system.
        versions: of treedec, torch and transformers, and a digest of the code that decodes and measures.
        target: name, dtype and shape of the model, and `logits`, the power of two below its largest logits.
        settings: seed, lengths, rounds, prompts and whatever else decided the run.
        conditions: all different.
        rows: every decode, in the order in which they were run.
        failures: see `Failure`.
        costs: `{"nodes": […], "seconds": […], "context": int, "compiled": bool}`: median seconds of a pass over a tree
            of so many nodes behind `context` tokens; None where that was not measured.
        expected: see `Expectation`; empty where that was not computed, as for greedy decoding, which has one rule.
    """

    command: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    target: dict[str, Any]
    settings: dict[str, Any]
    conditions: tuple[Condition, ...]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    costs: dict[str, Any] | None
    expected: tuple[Expectation, ...]

    @property
    def unfinished(self) -> bool:
        """Whether the minutes that the run was given ended it before all prompts were decoded in all rounds."""
        rounds = self.settings.get("rounds")
        missing = isinstance(rounds, int) and len({row.round for row in self.rows}) < rounds
        return self.unreached > 0 or (missing and bool(self.rows))

    @property
    def unreached(self) -> int:
        """How many of the prompts that were asked for were not reached."""
        asked = self.settings.get("prompts")
        count = asked.get("count") if isinstance(asked, dict) else None
        return max(0, count - len(self.reached)) if isinstance(count, int) else 0

    @property
    def reached(self) -> frozenset[str]:
        """Ids of the prompts that were decoded, or failed."""
        groups = [row.prompts for row in self.rows] + [failure.prompts for failure in self.failures]
        return frozenset(name for group in groups for name in group)

    def complete_rows(self) -> tuple[Row, ...]:
        """Rows of those prompts only that every condition decoded in every round, so that sums can be compared."""
        prompts = {prompt for row in self.rows for prompt in row.prompts}
        prompts -= {prompt for failure in self.failures for prompt in failure.prompts}
        rounds = {row.round for row in self.rows}
        rows = self.rows
        while True:
            # A batch counts as a whole: without one of its prompts, the others have no row of that size either.
            rows = tuple(row for row in rows if prompts.issuperset(row.prompts))
            decoded = {(row.condition, row.round, prompt) for row in rows for prompt in row.prompts}
            complete = {
                prompt
                for prompt in prompts
                if all((index, turn, prompt) in decoded for index in range(len(self.conditions)) for turn in rounds)
            }
            if complete == prompts:
                return rows
            prompts = complete


def write_result(path: Path, result: Result) -> None:
    """Write a result as JSON, all at once or not at all.

    Raises:
        ValueError: a number that JSON has no word for, such as NaN.
        OSError: the file cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **to_json(result)}, ensure_ascii=False, indent=1, allow_nan=False)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_result(path: Path) -> Result:
    """Read what `write_result` wrote.

    Raises:
        ValueError: not a whole result of this schema; the message names the file and the key.
        OSError: the file cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are such
        raise ValueError(f"{path} is no result of `treedec bench`, or was cut short: {error}") from error
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError(f"{path} is no result of `treedec bench`: it has no key 'schema'")
    if data["schema"] != SCHEMA:
        raise ValueError(f"{path}: schema is {data['schema']!r}, and this version of treedec reads {SCHEMA}: run again")
    try:
        result: Result = from_json(Result, {key: value for key, value in data.items() if key != "schema"})
        _check(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return result


def to_json(value: Result | Row | Failure | Condition) -> dict[str, Any]:
    """A part of a result as JSON has it."""
    return asdict(value)


def from_json(kind: Any, data: object, where: str = "") -> Any:
    """A part of a result from JSON, which is taken at no word.

    Args:
        kind: `Result`, `Row`, `Failure`, `Condition` or `Expectation`, or the type of one of their attributes.
        data: what `json.loads` made of it.
        where: the key it was found under, for messages; empty for the whole.

    Raises:
        ValueError: a key that is missing or unknown, or a value of another type; the message names the key.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # the only unions are with None
        return None if data is None else from_json(arguments[0], data, where)
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast(type, kind), data, where)
    if origin is tuple:
        return _tuple(arguments, data, where)
    if origin is dict:
        return _dict(arguments, data, where)
    # JSON writes 1.0 as it likes, and to Python True is an int.
    accepted = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}[kind]
    if not isinstance(data, accepted) or (kind is not bool and isinstance(data, bool)):
        raise ValueError(f"{where} must be {_NAMES[kind]}, not {_short(data)}")
    return kind(data)


_NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


@cache
def _fields(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _object(kind: type, data: object, where: str) -> Any:
    within = f" in {where}" if where else ""
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the file'} must be an object, not {_short(data)}")
    fields = _fields(kind)
    if missing := [name for name in fields if name not in data]:
        raise ValueError(f"the key {missing[0]!r} is missing{within}")
    if unknown := [name for name in data if name not in fields]:
        raise ValueError(f"unknown key {unknown[0]!r}{within}")
    start = f"{where}." if where else ""
    return kind(**{name: from_json(type_, data[name], start + name) for name, type_ in fields.items()})


def _tuple(arguments: tuple[Any, ...], data: object, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise ValueError(f"{where} must be a list, not {_short(data)}")
    if arguments[-1] is Ellipsis:
        kinds = [arguments[0]] * len(data)
    elif len(data) != len(arguments):
        raise ValueError(f"{where} must have {len(arguments)} entries, not {len(data)}")
    else:
        kinds = list(arguments)
    return tuple(
        from_json(kind, part, f"{where}[{place}]") for place, (kind, part) in enumerate(zip(kinds, data, strict=True))
    )


def _dict(arguments: tuple[Any, ...], data: object, where: str) -> dict[Any, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, not {_short(data)}")
    key_kind, value_kind = arguments
    if value_kind is Any:
        return data
    if key_kind is int and (bad := [key for key in data if not key.isdecimal()]):
        raise ValueError(f"{where} has the key {bad[0]!r}, which is no whole number")
    return {key_kind(key): from_json(value_kind, value, f"{where}.{key}") for key, value in data.items()}


def _check(result: Result) -> None:
    """What types do not say."""
    for name in ("rows", "failures"):
        for place, part in enumerate(getattr(result, name)):
            if not 0 <= part.condition < len(result.conditions):
                raise ValueError(
                    f"{name}[{place}].condition is {part.condition}, of {len(result.conditions)} conditions"
                )
            if not part.prompts:
                raise ValueError(f"{name}[{place}].prompts is empty")
    for place, row in enumerate(result.rows):
        _check_row(row, f"rows[{place}]")
    decoded = Counter((row.condition, row.round, prompt) for row in result.rows for prompt in row.prompts)
    if double := [key for key, times in decoded.items() if times > 1]:
        index, turn, prompt = double[0]
        label = result.conditions[index].label
        raise ValueError(f"rows has prompt {prompt!r} twice in round {turn} of {label!r}: it would count twice")
    if missing := [key for key in ("name", "dtype", "logits") if key not in result.target]:
        raise ValueError(f"the key {missing[0]!r} is missing in target")
    labels = [condition.label for condition in result.conditions]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"conditions has {twice[0]!r} twice")
    if result.costs is not None:
        missing = [key for key in ("nodes", "seconds", "context", "compiled") if key not in result.costs]
        if missing:
            raise ValueError(f"the key {missing[0]!r} is missing in costs")
        if len(result.costs["nodes"]) != len(result.costs["seconds"]):
            raise ValueError("costs.nodes and costs.seconds differ in length")


def _check_row(row: Row, where: str) -> None:
    """That its numbers can be true."""
    for name in ("prefill_seconds", "decode_seconds", "draft_seconds", "target_seconds", "logit_gap"):
        value = getattr(row, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{where}.{name} is {value}")
    if row.accepted_lengths is not None and sum(row.accepted_lengths.values()) != row.passes:
        raise ValueError(f"{where}.accepted_lengths has {sum(row.accepted_lengths.values())} passes, not {row.passes}")
    if row.nodes is not None and row.nodes < (row.passes or 0):
        raise ValueError(f"{where}.nodes is {row.nodes}, and each of its {row.passes} passes had one at least")
    if bad := [place for place in row.acceptance_by_place or () if not re.fullmatch("[1-9][0-9]*,[1-9][0-9]*", place)]:
        raise ValueError(f"{where}.acceptance_by_place has the key {bad[0]!r}, which is no 'depth,rank'")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _short(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "…"
