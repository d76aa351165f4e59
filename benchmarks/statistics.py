"""Figures of a run and how sure they are: pooled counts, ratios of speeds, bootstrap intervals over prompts.

Every figure is one sum over another, over all rows at once: a mean of ratios would give a prompt of three tokens the
weight of one of a thousand.

**What an interval says.** Prompts are drawn with replacement from those of the run, all rounds of a prompt together
and the same prompts for both sides of a ratio; the interval is where 95 % of the ratios of such resampled runs lie
(percentile bootstrap, Efron & Tibshirani 1993, chapter 13; for few prompts with the quantiles moved outwards, as
Hesterberg 2014, arXiv:1411.5279, advises). It covers the ratio that endlessly many prompts of this kind would have, and
holds the noise of the clock as well, for each prompt brings its own. It needs prompts: simulated, it holds the truth in
95 % of runs from 16 prompts on, in 94 % for 8, in 88 % for 4; of fewer than `FEWEST` none is told.

**What it says of a second run.** Two runs differ by the noise of both, and so by √2 of the spread of one: a second
ratio leaves the interval of the first more often than once in 20, up to once in 6. `Estimate.repeat` is wider by √2 on
a logarithmic scale; a run repeated with *other* prompts of the kind stays inside it 95 % of the time. With the *same*
prompts, their choice moves nothing, only the noise of the clock does, and a repeated run stays inside more often still.
This holds for each ratio on its own: of 40 ratios, two may stray, and together, for a baseline that is off is off for
all. What shifts all prompts of a run alike (another machine, another build, a neighbour's load) no resampling can see;
methods taken in turn, prompt by prompt, share most of it, and a ratio of two methods of one run is free of that part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch

from treedec.benchmarks.results import Result, Row

RESAMPLES = 2_000
CONFIDENCE = 0.95
FEWEST = 8  # prompts, or batches of these, that an interval needs

# How many units in the last place (ulps) two logits may differ by and still count as tied. A tree pass and a sequential
# pass round differently. In half precision, sums are accumulated in float32 and rounded once, so that a logit is off by
# an ulp or two, and the difference of two logits by up to 4; the 710 first differences of the demo target in bfloat16
# (`benchmarks/results/spec_bench_bf16_greedy.json`) were all within 3. In float32, the sums themselves round at each
# of their terms, and errors are larger by about the root of their number.
_TIED_ULPS = {"bfloat16": 4, "float16": 4, "float32": 64, "float64": 64}


@dataclass(frozen=True)
class Figures:
    """What one condition did on some prompts. Seconds and tokens are sums over its rows.

    Attributes:
        prompts: how many, each counted once.
        new_tokens: all generated tokens.
        decoded_tokens: those after the prefill, which yields at least the first token of every prompt of a row.
        prefill_seconds, decode_seconds: up to the first token, and from there to the end.
        draft_seconds, target_seconds: parts of `decode_seconds`; None unless every row knows them.
        passes: row passes of the target after the prefill; None unless every row knows them.
        nodes: of the trees of these passes, the roots included; None unless every row knows them.
        accepted_lengths: tokens committed per row pass → how often; None unless every row knows them.
        acceptance_by_place: (depth, rank), both from 1 → (reached, accepted); None where no row knows it.
        compared: rows that were compared with `hf`.
        matched: of these, how many had the same tokens.
        parted: rows that had others, and whose logit gap at the first difference is known.
        tied: of these, how many parted at a near-tie.
    """

    prompts: int
    new_tokens: int
    decoded_tokens: int
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float | None
    target_seconds: float | None
    passes: int | None
    nodes: int | None
    accepted_lengths: dict[int, int] | None
    acceptance_by_place: dict[tuple[int, int], tuple[int, int]] | None
    compared: int
    matched: int
    parted: int
    tied: int

    @property
    def mean_accepted_length(self) -> float | None:
        """τ, tokens per row pass after the prefill; None where unknown or without such a pass."""
        if not self.accepted_lengths:
            return None
        committed = sum(length * times for length, times in self.accepted_lengths.items())
        return committed / sum(self.accepted_lengths.values())

    @property
    def exact_match(self) -> float | None:
        """Share of rows with the tokens of `hf`; None if none was compared."""
        return self.matched / self.compared if self.compared else None

    @property
    def near_ties(self) -> float | None:
        """Share of first differences that are near-ties; None if there are none."""
        return self.tied / self.parted if self.parted else None

    @property
    def rest_seconds(self) -> float | None:
        """Decoding seconds that neither the drafter nor the target took; None where these are unknown."""
        if self.draft_seconds is None or self.target_seconds is None:
            return None
        return self.decode_seconds - self.draft_seconds - self.target_seconds


@dataclass(frozen=True)
class Estimate:
    """A pooled figure with its interval.

    Attributes:
        value: over all prompts; NaN where nothing was decoded.
        low, high: ends of the 95 % interval; 0 and infinity where fewer than `FEWEST` prompts leave it unknown.
    """

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval to speak of."""
        return math.isfinite(self.value) and math.isfinite(self.high)

    @property
    def repeat(self) -> tuple[float, float]:
        """Where the figure of a repeated run is expected 95 % of the time: the interval, wider by √2 on a log scale."""
        if not self.known or self.low <= 0:
            return 0.0, math.inf
        wider = math.sqrt(2)
        return self.value * (self.low / self.value) ** wider, self.value * (self.high / self.value) ** wider

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


def near_tie(dtype: str, logits: float = 16.0) -> float:
    """The largest logit gap that counts as a near-tie: a few ulps of a logit between `logits` and twice that.

    Args:
        dtype: such as "bfloat16".
        logits: the power of two below the target's largest logits; 16 is usual. There a near-tie is 4 · 2⁻³ = 0.5 in
            bfloat16, 2⁻⁴ in float16 and some 1e-4 in float32.

    Raises:
        ValueError: another dtype than these and float64.
    """
    if dtype not in _TIED_ULPS:
        raise ValueError(f"no near-tie is defined for dtype {dtype!r}; known are {', '.join(_TIED_ULPS)}")
    return _TIED_ULPS[dtype] * logits * torch.finfo(getattr(torch, dtype)).eps


def pooled(rows: Sequence[Row], tie: float) -> Figures:
    """The figures of rows of one condition.

    Args:
        rows: of one condition, all rounds.
        tie: the largest logit gap that counts as a near-tie, as `near_tie` gives it.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to pool")
    compared = [row for row in rows if row.matches is not None]
    gaps = [row.logit_gap for row in compared if not row.matches and row.logit_gap is not None]
    return Figures(
        prompts=len({name for row in rows for name in row.prompts}),
        new_tokens=sum(row.new_tokens for row in rows),
        decoded_tokens=sum(row.decoded_tokens for row in rows),
        prefill_seconds=math.fsum(row.prefill_seconds for row in rows),
        decode_seconds=math.fsum(row.decode_seconds for row in rows),
        draft_seconds=_sum_if_known(row.draft_seconds for row in rows),
        target_seconds=_sum_if_known(row.target_seconds for row in rows),
        passes=None if (passes := _sum_if_known(row.passes for row in rows)) is None else int(passes),
        nodes=None if (nodes := _sum_if_known(row.nodes for row in rows)) is None else int(nodes),
        accepted_lengths=_lengths(rows),
        acceptance_by_place=_places(rows),
        compared=len(compared),
        matched=sum(bool(row.matches) for row in compared),
        parted=len(gaps),
        tied=sum(gap <= tie for gap in gaps),
    )


def speed(rows: Sequence[Row], prefill: bool = False, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Tokens per second of one condition, with its interval.

    Args:
        rows: of one condition.
        prefill: count the prefill, its tokens and its seconds, as well; else decoding alone.
        resamples, seed: of the bootstrap.

    Raises:
        ValueError: no rows.
    """
    units, count = _units(rows)
    return _estimate(_sums(rows, units, count, prefill), resamples, seed)


def speed_ratio(
    rows: Sequence[Row], baseline: Sequence[Row], prefill: bool = False, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """How many times as fast one condition is as another, with its interval: both of the same resampled prompts.

    Where the two decoded prompts in batches of other sizes, prompts that any batch ties together are drawn together.

    Args:
        rows, baseline: of one condition each, over the same prompts.
        prefill, resamples, seed: as for `speed`.

    Raises:
        ValueError: no rows, or other prompts.
    """
    if (names := _names(rows)) != (others := _names(baseline)):
        odd = sorted(names ^ others)
        raise ValueError(
            f"a ratio needs the same prompts on both sides; {odd[0]} and {len(odd) - 1} more are on one only"
        )
    units, count = _units([*rows, *baseline])
    sums = [_sums(side, units, count, prefill) for side in (rows, baseline)]
    return _estimate(np.concatenate(sums, axis=1), resamples, seed)


def is_slower(ratio: Estimate) -> bool:
    """Whether a method is slower than the baseline of its ratio: the whole interval lies below 1."""
    return ratio.high < 1


class Summary:
    """The figures of a run, each computed when it is asked for, and once.

    Args:
        result: the run. Only its complete rows count: see `Result.complete_rows`.
        resamples, seed: of the bootstrap.

    Attributes:
        conditions: of the run; a condition goes by its index here.
        categories: sorted.
        prompts: how many are complete.
        tie: the largest logit gap that counts as a near-tie of this target.
    """

    def __init__(self, result: Result, resamples: int = RESAMPLES, seed: int = 0):
        self.result, self.conditions = result, result.conditions
        self._resamples, self._seed = resamples, seed
        self.tie = near_tie(str(result.target["dtype"]), result.target["logits"])
        self._rows: dict[tuple[int, str | None], list[Row]] = {}
        for row in result.complete_rows():
            for category in (None, row.category):
                self._rows.setdefault((row.condition, category), []).append(row)
        self.categories = tuple(sorted({category for _, category in self._rows if category is not None}))
        self.prompts = len({name for rows in self._rows.values() for row in rows for name in row.prompts})
        self._figures: dict[tuple[int, str | None], Figures] = {}
        self._ratios: dict[tuple[int, int, str | None, bool], Estimate] = {}

    def rows(self, condition: int, category: str | None = None) -> list[Row]:
        """The complete rows of a condition, in one category or in all."""
        return self._rows.get((condition, category), [])

    def figures(self, condition: int, category: str | None = None) -> Figures:
        key = condition, category
        if key not in self._figures:
            self._figures[key] = pooled(self.rows(*key), self.tie)
        return self._figures[key]

    def speed(self, condition: int, category: str | None = None, prefill: bool = False) -> Estimate:
        """See `speed`."""
        return speed(self.rows(condition, category), prefill, self._resamples, self._seed)

    def ratio(self, condition: int, other: int, category: str | None = None, prefill: bool = False) -> Estimate:
        """How many times as fast a condition is as another: see `speed_ratio`."""
        key = condition, other, category, prefill
        if key not in self._ratios:
            sides = self.rows(condition, category), self.rows(other, category)
            self._ratios[key] = speed_ratio(*sides, prefill, self._resamples, self._seed)
        return self._ratios[key]

    def baseline_of(self, condition: int, method: str) -> int | None:
        """What a condition is compared with, or None if the run has no such condition.

        It is `method` at the same temperature and batch, and with the same acceptance rule; where it was run with
        others only, with the first of them.
        """
        own = self.conditions[condition]
        alike = [
            index
            for index, other in enumerate(self.conditions)
            if (other.method, other.temperature, other.batch) == (method, own.temperature, own.batch)
        ]
        same_rule = [index for index in alike if self.conditions[index].acceptance == own.acceptance]
        return next(iter(same_rule or alike), None)


def _sum_if_known(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _lengths(rows: Sequence[Row]) -> dict[int, int] | None:
    total: Counter[int] = Counter()
    for row in rows:
        if row.accepted_lengths is None:
            return None
        total.update(row.accepted_lengths)
    return dict(sorted(total.items()))


def _places(rows: Sequence[Row]) -> dict[tuple[int, int], tuple[int, int]] | None:
    total: dict[tuple[int, int], tuple[int, int]] = {}
    for row in rows:
        for place, (reached, accepted) in (row.acceptance_by_place or {}).items():
            depth, _, rank = place.partition(",")
            before = total.get(key := (int(depth), int(rank)), (0, 0))
            total[key] = before[0] + reached, before[1] + accepted
    return dict(sorted(total.items())) or None


def _names(rows: Sequence[Row]) -> set[str]:
    return {name for row in rows for name in row.prompts}


def _units(rows: Sequence[Row]) -> tuple[dict[str, int], int]:
    """What is drawn: prompt → number of its unit, and how many units. Prompts that share a row share a unit."""
    if not rows:
        raise ValueError("there are no rows to compare")
    unit: dict[str, int] = {}
    members: dict[int, list[str]] = {}
    for row in rows:
        touched = {unit[name] for name in row.prompts if name in unit}
        first = min(touched, default=len(members))
        joined = dict.fromkeys([*row.prompts, *(name for other in touched for name in members[other])])
        for other in touched:
            members[other] = []
        members[first] = list(joined)
        unit.update(dict.fromkeys(joined, first))
    numbers = {old: new for new, old in enumerate(sorted(set(unit.values())))}
    return {name: numbers[old] for name, old in unit.items()}, len(numbers)


def _sums(rows: Sequence[Row], units: dict[str, int], count: int, prefill: bool) -> np.ndarray:
    """`[units, 2]` tokens and seconds."""
    sums = np.zeros((count, 2))
    for row in rows:
        tokens = row.new_tokens if prefill else row.decoded_tokens
        sums[units[row.prompts[0]]] += tokens, row.seconds if prefill else row.decode_seconds
    return sums


def _estimate(sums: np.ndarray, resamples: int, seed: int) -> Estimate:
    """The pooled figure of `[units, 2]` sums (tokens per second) or of `[units, 4]` (a ratio of these)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(_figure(sums.sum(0)))
        if len(sums) < FEWEST or not math.isfinite(value):
            return Estimate(value, 0.0, math.inf)
        drawn = _figure(_draws(len(sums), resamples, seed) @ sums)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [tail := _tail(len(sums)), 1 - tail])
    return Estimate(value, float(low), float(high))


def _figure(sums: np.ndarray) -> np.ndarray:
    rates = sums[..., 0::2] / sums[..., 1::2]
    return rates[..., 0] if rates.shape[-1] == 1 else rates[..., 0] / rates[..., 1]


@lru_cache(maxsize=16)
def _draws(units: int, resamples: int, seed: int) -> np.ndarray:
    """`[resamples, units]` how often each unit is drawn: the same for all conditions, as paired ratios need it."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(units, np.full(units, 1 / units), size=resamples).astype(np.float64)


def _tail(units: int) -> float:
    """Share of the resampled figures to leave out at each end.

    A percentile interval is too narrow by √((n − 1) / n), and by normal quantiles where Student's belong: 0.025 becomes
    0.006 for 8 prompts and 0.023 for 80. Student's quantile is expanded about the normal one (Abramowitz & Stegun 1964,
    26.7.5).
    """
    normal, freedom = NormalDist(), units - 1
    z = normal.inv_cdf((1 + CONFIDENCE) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-t * math.sqrt(units / freedom))
