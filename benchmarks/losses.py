"""Where a run shows treedec to be slower than something else: what a report says on its first page.

Speeds are compared in decoding and with the prefill. transformers' assisted decoding and prompt look-up verify drafts
in their prefill already, so with these only the second comparison is fair.
"""

from __future__ import annotations

from dataclasses import dataclass

from treedec.benchmarks.methods import COMPILED, REFERENCE
from treedec.benchmarks.results import Condition
from treedec.benchmarks.statistics import Estimate, Summary, is_slower

_DRAFT_IN_PREFILL = ("hf-assisted", "hf-prompt-lookup")


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

    Against `hf` and against the fastest of its `rivals`, in decoding and with the prefill.
    """
    found: dict[tuple[int, int, bool], dict[str | None, Estimate]] = {}
    for index, condition in enumerate(summary.conditions):
        if not is_ours(condition):
            continue
        reference = summary.baseline_of(index, REFERENCE)
        for category in (None, *summary.categories):
            pairs = [] if reference is None else [(reference, False), (reference, True)]
            for prefill in (False, True):
                best = fastest_rival(summary, index, prefill, category)
                pairs += [] if best in (None, reference) else [(best, prefill)]
            for against, prefill in pairs:
                ratio = summary.ratio(index, against, category, prefill)
                if is_slower(ratio):
                    found.setdefault((index, against, prefill), {})[category] = ratio
    return [Loss(*key, places) for key, places in sorted(found.items())]


def is_ours(condition: Condition) -> bool:
    """Whether treedec decodes: only its own methods have an acceptance rule."""
    return condition.acceptance is not None


def rivals(summary: Summary, index: int) -> list[int]:
    """What a condition is to beat, of the same temperature and batch, `hf` among it.

    That is all that is not treedec's; `ar`, without which it would not show that drafting made something slower; and
    `vanilla`, which our trees are to beat. Of these two those that are compiled only if the condition is. `ar` itself
    drafts nothing, and is compared with `hf` only.
    """
    own = summary.conditions[index]
    if _plainly(own) == "ar":
        return []
    ours = {"ar"} if _plainly(own) == "vanilla" else {"ar", "vanilla"}
    return [
        other
        for other, condition in enumerate(summary.conditions)
        if (condition.temperature, condition.batch) == (own.temperature, own.batch)
        and (not is_ours(condition) or (_plainly(condition) in ours and is_compiled(condition) <= is_compiled(own)))
    ]


def fastest_rival(summary: Summary, index: int, prefill: bool, category: str | None = None) -> int | None:
    """The fastest that `rivals` names, or None: in decoding, of those whose prefill is no more than that."""
    others = [
        rival
        for rival in rivals(summary, index)
        if prefill or not summary.conditions[rival].method.startswith(_DRAFT_IN_PREFILL)
    ]
    return max(others, key=lambda rival: summary.speed(rival, category, prefill).value, default=None)


def is_compiled(condition: Condition) -> bool:
    return condition.method.startswith(COMPILED)


def _plainly(condition: Condition) -> str:
    """The method without what its name says of compilation and tree size."""
    return condition.method.removeprefix(COMPILED).partition("@")[0]
