"""Where a run shows treedec to be slower than something else: what a report says on its first page."""

from __future__ import annotations

from dataclasses import dataclass

from treedec.benchmarks.methods import COMPILED, REFERENCE
from treedec.benchmarks.results import Condition
from treedec.benchmarks.statistics import Estimate, Summary, is_slower


@dataclass(frozen=True)
class Loss:
    """A condition of ours that is slower than another method, its interval below 1.

    Attributes:
        condition, against: indices.
        prefill: whether the prefill counts.
        places: category, or None for all prompts → the ratio there.
    """

    condition: int
    against: int
    prefill: bool
    places: dict[str | None, Estimate]


def losses(summary: Summary) -> list[Loss]:
    """Where ours lose: every condition of ours whose ratio has its interval below 1, over all prompts or in a category.

    Against `hf`, in decoding and with the prefill. Against the fastest other method, with the prefill: some decode
    a part of what others prefill. Others are those that are not treedec's, and `vanilla`, which our trees are to beat;
    `ar` decodes without drafts, and is compared with `hf` only.
    """
    found: dict[tuple[int, int, bool], dict[str | None, Estimate]] = {}
    for index, condition in enumerate(summary.conditions):
        if not is_ours(condition):
            continue
        reference, others = summary.baseline_of(index, REFERENCE), rivals(summary, index)
        for category in (None, *summary.categories):
            pairs = [] if reference is None else [(reference, False), (reference, True)]
            if others:
                best = max(others, key=lambda rival: summary.speed(rival, category, prefill=True).value)
                pairs += [(best, True)] if best != reference else []
            for against, prefill in pairs:
                ratio = summary.ratio(index, against, category, prefill)
                if is_slower(ratio):
                    found.setdefault((index, against, prefill), {})[category] = ratio
    return [Loss(*key, places) for key, places in sorted(found.items())]


def is_ours(condition: Condition) -> bool:
    """Whether treedec decodes: only its own methods have an acceptance rule."""
    return condition.acceptance is not None


def rivals(summary: Summary, index: int) -> list[int]:
    """What a condition is to beat by `losses`: conditions of the same temperature and batch, `hf` among them."""
    own = summary.conditions[index]
    if own.method.removeprefix(COMPILED) == "ar":
        return []
    return [
        other
        for other, condition in enumerate(summary.conditions)
        if (condition.temperature, condition.batch) == (own.temperature, own.batch)
        and (not is_ours(condition) or (_is_vanilla(condition) and not _is_vanilla(own)))
    ]


def _is_vanilla(condition: Condition) -> bool:
    return condition.method.removeprefix(COMPILED).partition("@")[0] == "vanilla"
