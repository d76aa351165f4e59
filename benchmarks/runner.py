"""The run: prompt by prompt, every condition in turn, so that whatever else the machine does meets all of them alike.

In each round the categories take turns, and every prompt is decoded by all conditions, which take turns in going first.
A prompt that one condition fails on is left out of all. After every prompt what it gave goes to a journal beside the
result, from which an interrupted run goes on.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treedec.benchmarks.counting import BenchmarkDefect, check_counts, counted_tokens, digest
from treedec.benchmarks.methods import REFERENCE, Batch, Decoded, Engine, Method
from treedec.benchmarks.prompts import Prompt
from treedec.benchmarks.results import Condition, Failure, Row, from_json, to_json
from treedec.costs import Clock, measure_costs
from treedec.demo import first_difference
from treedec.stats import DecodingStats
from treedec.target import Target

COST_NODES = (1, 2, 4, 8, 16, 32, 64)
_COST_REPEATS = 21


@dataclass(frozen=True)
class Unit:
    """Prompts that every condition decodes before the next ones: as many as fill a batch of every size."""

    category: str
    prompts: tuple[Prompt, ...]


def units_of(prompts: Sequence[Prompt], batches: Iterable[int]) -> list[Unit]:
    """Prompts grouped for batches of these sizes, which hold one category each.

    The categories take turns, in order of appearance, so that a run that ends early has decoded as much of each.

    Raises:
        ValueError: a category whose prompts do not fill the batches.
    """
    size = math.lcm(*batches)
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    for category, own in categories.items():
        if len(own) % size:
            raise ValueError(
                f"category {category!r} has {len(own)} prompts, which do not fill batches of {size}: give "
                + (f"--limit {len(own) // size * size}" if len(own) > size else "smaller --batch-sizes")
            )
    columns = [
        [Unit(category, tuple(own[start : start + size])) for start in range(0, len(own), size)]
        for category, own in categories.items()
    ]
    return [unit for row in zip_longest(*columns) for unit in row if unit is not None]


@dataclass(frozen=True)
class Measured:
    """What one unit gave in one round."""

    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]


class Run:
    """Conditions and prompts over one engine.

    Args:
        engine: the target and the ways to decode with it.
        conditions: what is compared, with the method of each.
        units: what is decoded.
        rounds: how often.
        seed: that of every decode derives from it: see `seed_of`.

    Raises:
        FileNotFoundError, ValueError: something that a method needs cannot be loaded.
    """

    def __init__(
        self,
        engine: Engine,
        conditions: Sequence[tuple[Condition, Method]],
        units: Sequence[Unit],
        *,
        rounds: int = 1,
        seed: int = 0,
    ):
        self.engine, self.units, self.rounds, self.seed = engine, list(units), rounds, seed
        self.conditions = [condition for condition, _ in conditions]
        self._decoders = [engine.prepare(condition, method) for condition, method in conditions]
        # Counted within each category: were it over all, and the conditions as many as the categories, the same one
        # would go first in all of a category.
        categories = list(dict.fromkeys(unit.category for unit in self.units))
        seen: Counter[str] = Counter()
        self._first: list[int] = []
        for unit in self.units:
            self._first.append(categories.index(unit.category) + seen[unit.category])
            seen[unit.category] += 1

    def warm_up(self) -> None:
        """Decode the first and the last prompts under every condition, untimed.

        Raises:
            ValueError: a condition that fails on both.
            BenchmarkDefect: see `measure`.
        """
        for index, condition in enumerate(self.conditions):
            errors: list[Exception] = []
            for unit in (self.units[0], self.units[-1]):
                try:
                    self._decode(index, unit.prompts[: condition.batch])
                except BenchmarkDefect:
                    raise
                except Exception as error:  # whatever a method raises
                    errors.append(error)
            if len(errors) == 2:
                raise ValueError(f"{condition.label} fails on the first and the last prompts: {_said(errors[0])}")

    def measure(self, done: dict[tuple[int, int], Measured]) -> Iterator[tuple[int, int, Measured]]:
        """Measure what is not `done`; yields round, place of the unit and what it gave, as they come.

        Raises:
            BenchmarkDefect: a method that returns tokens it was not asked for, or counts otherwise than it returns.
        """
        for turn in range(self.rounds):
            for place, unit in enumerate(self.units):
                if (turn, place) in done:
                    continue
                if any(done[before, place].failures for before in range(turn)):
                    measured = Measured((), ())  # these prompts no longer count
                else:
                    measured = self._measure(turn, place, unit)
                done[turn, place] = measured
                yield turn, place, measured

    def _measure(self, turn: int, place: int, unit: Unit) -> Measured:
        count = len(self.conditions)
        rows: dict[tuple[int, int], tuple[Row, list[list[int]]]] = {}  # of condition and first prompt
        failures = []
        for step in range(count):
            # Who goes first has the cache as another prompt left it, so that is everybody's turn once; and nobody
            # always follows the same neighbour, whose threads may still be spinning.
            first = self._first[place] + turn
            index = (first + (step if first // count % 2 == 0 else -step)) % count
            size = self.conditions[index].batch
            for start in range(0, len(unit.prompts), size):
                prompts = unit.prompts[start : start + size]
                try:
                    row, tokens = self._decode(index, prompts, turn)
                except BenchmarkDefect:
                    raise
                except Exception as error:  # whatever a method raises
                    failures.append(Failure(index, tuple(prompt.id for prompt in prompts), _said(error)))
                else:
                    rows[index, start] = replace(row, round=turn, category=unit.category), tokens
        compared = [self._compared(unit, index, start, rows) for index, start in rows]
        return Measured(tuple(compared), tuple(failures))

    def _decode(self, index: int, prompts: Sequence[Prompt], turn: int = 0) -> tuple[Row, list[list[int]]]:
        """A row, which does not know its round yet, and the new tokens of each prompt."""
        condition = self.conditions[index]
        who = f"{condition.label}, prompt {', '.join(prompt.id for prompt in prompts)}"
        batch = self.engine.encode(prompts)
        torch.manual_seed(seed_of(self.seed, turn, prompts[0].id))
        decoded = self._decoders[index](batch)
        tokens = counted_tokens(decoded.rows, self.engine.eos, self.engine.pad, self.engine.max_new_tokens, who)
        if decoded.stats is not None:
            check_counts(tokens, decoded.stats, decoded.first, who)
        return _row(index, prompts, batch, decoded, tokens), tokens

    def _compared(
        self, unit: Unit, index: int, start: int, rows: dict[tuple[int, int], tuple[Row, list[list[int]]]]
    ) -> Row:
        """A row with what the comparison with `hf` says."""
        row, tokens = rows[index, start]
        condition = self.conditions[index]
        reference = Condition(REFERENCE, condition.temperature, None, condition.batch)
        if reference not in self.conditions or (self.conditions.index(reference), start) not in rows:
            return row
        _, expected = rows[self.conditions.index(reference), start]
        row = replace(row, matches=tokens == expected)
        if row.matches or condition.temperature > 0:
            return row
        places = [first_difference(*pair) for pair in zip(expected, tokens, strict=True)]
        gaps = [
            self._gap(prompt, old, new, place)
            for prompt, old, new, place in zip(unit.prompts[start:], expected, tokens, places, strict=False)
            if place is not None
        ]
        known = [gap for gap in gaps if gap is not None]
        return replace(
            row,
            first_difference=min(place for place in places if place is not None),
            logit_gap=max(known) if len(known) == len(gaps) else None,
        )

    @torch.no_grad()
    def _gap(self, prompt: Prompt, expected: list[int], other: list[int], place: int) -> float | None:
        """The target's own logit gap between two outputs where they part, None where one of them ends there."""
        if place >= min(len(expected), len(other)):
            return None
        ids = self.engine.encode([prompt]).ids
        prefix = torch.cat([ids, torch.tensor([expected[:place]], dtype=torch.long, device=ids.device)], dim=1)
        logits = self.engine.model(prefix).logits[0, -1].float()
        return abs(float(logits[expected[place]] - logits[other[place]]))


def seed_of(seed: int, turn: int, prompt: str) -> int:
    """The seed of a decode, the same for all conditions: rounds and prompts that shared one would share their luck."""
    return int.from_bytes(blake2b(json.dumps([seed, turn, prompt]).encode(), digest_size=6).digest(), "big")


def _row(index: int, prompts: Sequence[Prompt], batch: Batch, decoded: Decoded, tokens: list[list[int]]) -> Row:
    # Without drafts the pass over the prompt yields the first token, and every further pass one.
    plain = sum(len(row) - 1 for row in tokens)
    stats = decoded.stats or DecodingStats(row_passes=plain, accepted_lengths={1: plain} if plain else {})
    places = decoded.places
    return Row(
        condition=index,
        round=0,
        prompts=tuple(prompt.id for prompt in prompts),
        category=prompts[0].category,
        prompt_tokens=int(batch.mask.sum()),
        new_tokens=sum(map(len, tokens)),
        prefill_seconds=decoded.prefill_seconds,
        decode_seconds=decoded.decode_seconds,
        draft_seconds=decoded.draft_seconds,
        target_seconds=decoded.target_seconds,
        passes=stats.row_passes,
        nodes=None if decoded.draft_seconds is None else stats.row_passes + stats.drafted_tokens,
        accepted_lengths=dict(sorted(stats.accepted_lengths.items())),
        acceptance_by_place=None if places is None else {f"{d},{r}": places[d, r] for d, r in sorted(places)},
        digest=digest(tokens),
        matches=None,
        first_difference=None,
        logit_gap=None,
    )


def _said(error: Exception) -> str:
    """What an exception says, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def cost_curve(
    target: Target,
    clock: Clock,
    text: Tensor,
    context: int,
    nodes: Sequence[int] = COST_NODES,
    repeats: int = _COST_REPEATS,
) -> dict[str, Any]:
    """What a pass costs by the size of its tree, see `measure_costs`.

    Args:
        target: runs the passes.
        clock: takes the times.
        text: `[1, L]` ids, repeated or cut.
        context: length of the text before the tree, or what the model has positions for.
        nodes: sizes of the trees.
        repeats: passes per size.

    Returns:
        What `Result.costs` holds.
    """
    if target.context_length is not None:
        context = min(context, target.context_length - max(nodes))
    ids = text.repeat(1, -(-max(context, 1) // text.shape[1]))[:, : max(context, 1)]
    curve = measure_costs(target, ids, nodes, repeats, clock)
    return {"nodes": list(curve.nodes), "seconds": list(curve.seconds), "context": context, "compiled": False}


class Journal:
    """What a run has measured so far, a line per unit and round behind one that says which run it is.

    Args:
        path: the file.
        identity: everything that decides the run, as JSON has it.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self._identity = path, json.loads(json.dumps(identity))

    def open(self, overwrite: bool = False) -> dict[tuple[int, int], Measured]:
        """What is in the file, which is made if there is none; by round and unit.

        Args:
            overwrite: begin anew where the file is another run's.

        Raises:
            ValueError: the file is another run's or is broken; the message names the file, and the key or the line.
        """
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        whole = lines[:-1]  # what follows the last line break was being written when the run ended
        if whole:
            try:
                self._check_identity(whole[0])
            except ValueError:
                if not overwrite:
                    raise
                whole = []
        if not whole:
            self._write(json.dumps({"run": self._identity}) + "\n", "w")
            return {}
        done = {}
        for number, line in enumerate(whole[1:], 2):
            try:
                data = json.loads(line)
                rows = from_json(tuple[Row, ...], data["rows"], "rows")
                failures = from_json(tuple[Failure, ...], data["failures"], "failures")
                done[int(data["round"]), int(data["unit"])] = Measured(rows, failures)
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number} is broken ({error!r}): delete the file") from error
        if lines[-1]:
            os.truncate(self.path, sum(len(line) + 1 for line in whole))
        return done

    def append(self, turn: int, place: int, measured: Measured) -> None:
        line = {
            "round": turn,
            "unit": place,
            "rows": [to_json(row) for row in measured.rows],
            "failures": [to_json(failure) for failure in measured.failures],
        }
        self._write(json.dumps(line) + "\n", "a")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _check_identity(self, line: bytes) -> None:
        try:
            known = json.loads(line)["run"]
            keys = [key for key in self._identity if known.get(key) != self._identity[key]]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is no journal of a run: delete it, or give --overwrite") from error
        if keys or known != self._identity:
            key = (keys or sorted(known.keys() - self._identity.keys()))[0]
            raise ValueError(
                f"{self.path} holds a run that is another in {key}: run that again to finish it, or give --overwrite "
                "to begin anew"
            )

    def _write(self, text: str, mode: str) -> None:
        with self.path.open(mode, encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Hex blake2b of 8 bytes over prompts and their order."""
    text = json.dumps([[prompt.id, prompt.category, list(prompt.turns)] for prompt in prompts])
    return blake2b(text.encode(), digest_size=8).hexdigest()
