"""What target and drafter say at the same places, p and q, while the target writes: from which
`treedec.benchmarks.theory` tells what any acceptance rule would do with them.

The text is decoded without drafts, so that each of its tokens is a root once. Under trees, the roots would be the
places behind what was accepted: they would be seen the more often, the worse the drafter is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

import treedec
from treedec.benchmarks.results import Expectation
from treedec.benchmarks.theory import expected_acceptance
from treedec.drafter import Draft, Drafter, DraftSession, DraftState, Outcome
from treedec.heads import DraftModelDrafter, EagleDrafter, HydraDrafter, MedusaDrafter, RecurrentDrafter
from treedec.target import Target
from treedec.tree import TokenTree

PROMPTS, TOKENS, POSITIONS = 12, 48, 16
CHILDREN = (1, 2, 4, 8)
DRAWS = 16  # per position: what they leave open is little beside how much positions differ
# Those that guess from a distribution; n-gram look-up has none, and a union several.
_WITH_DISTRIBUTION = (MedusaDrafter, HydraDrafter, RecurrentDrafter, EagleDrafter, DraftModelDrafter)

_Item = TypeVar("_Item")


def expectations(
    target: Target,
    drafters: Sequence[tuple[str, Drafter]],
    texts: Sequence[Tensor],
    temperatures: Iterable[float],
    seed: int = 0,
) -> tuple[Expectation, ...]:
    """How often each rule should accept a child of a node, for every drafter that has distributions.

    Args:
        target: writes, at most `TOKENS` new tokens after each of at most `PROMPTS` texts.
        drafters: by the name of their method.
        texts: `[1, L]` ids of prompts.
        temperatures: above 0; of the text, and of both distributions.
        seed: of the first text, which each further one counts up, and of the estimates.
    """
    found = []
    for temperature in temperatures:
        for method, drafter in drafters:
            if not isinstance(drafter, _WITH_DISTRIBUTION):
                continue
            triples = [
                (*pair, number)
                for number, ids in enumerate(spread(texts, PROMPTS))
                for pair in spread(recorded(target, drafter, ids, temperature, TOKENS, seed + number), POSITIONS)
            ]
            if not triples:  # every text ended at once
                continue
            p, q, numbers = zip(*triples, strict=True)
            found += [
                Expectation(method, temperature, len(triples), each.rule, each.drafts, each.acceptance, each.error)
                for each in expected_acceptance(torch.stack(p), torch.stack(q), CHILDREN, DRAWS, seed, numbers)
            ]
    return tuple(found)


def recorded(
    target: Target, drafter: Drafter, ids: Tensor, temperature: float, max_new_tokens: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """`[V]` float32 p and q of every new token but the first, which no drafter is asked for, and the last.

    Args:
        target: writes.
        drafter: one that guesses from a distribution.
        ids: `[1, L]` int64.
        temperature: above 0; of the text, and of both distributions.
        max_new_tokens: length of the text.
        seed: of the text.
    """
    probe = _Probe(drafter, target)
    for _ in treedec.stream(
        target, ids, probe, max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        seed=seed,
    ):  # fmt: skip
        pass
    return probe.pairs


class _Probe(Drafter):
    """A drafter whose distributions are kept, and whose trees are not."""

    def __init__(self, drafter: Drafter, target: Target):
        self.name, self.max_nodes, self.features = drafter.name, drafter.max_nodes, drafter.features
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._drafter, self._target = drafter, target

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        session = self._drafter.start(target, batch, capacity)
        return _ProbeSession(session, self._target, getattr(self._drafter, "draft_ids", None), self.pairs)


class _ProbeSession(DraftSession):
    """Of one row."""

    def __init__(
        self, session: DraftSession, target: Target, draft_ids: Tensor | None, pairs: list[tuple[Tensor, Tensor]]
    ):
        self._session, self._target, self._draft_ids, self._pairs = session, target, draft_ids, pairs
        self._q: Tensor | None = None

    def propose(self, state: DraftState) -> Draft:
        # What the root was predicted from has become known now, and is what the last round's guess was about.
        p = state.shape(self._target.head(state.hidden).float()).softmax(-1)[0]
        if self._q is not None:
            self._pairs.append((p, self._q))
        asked: list[Tensor] = []

        def shape(logits: Tensor) -> Tensor:
            shaped = state.shape(logits)
            asked.append(shaped)
            return shaped

        self._session.propose(replace(state, shape=shape))
        self._q = None
        if asked:  # else there was no room for a tree
            # Every drafter scores the first level first, whatever comes behind it in the same tensor.
            first = asked[0].flatten(0, -2)[0].float().softmax(-1)
            self._q = first if self._draft_ids is None else torch.zeros_like(p).index_copy(0, self._draft_ids, first)
        return Draft(TokenTree.chains([[] if text is None else text[-1:] for text in state.texts]))

    def observe(self, outcome: Outcome) -> None:
        self._session.observe(outcome)


def spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most `count` items, evenly spread."""
    count = min(count, len(items))
    return [items[(2 * place + 1) * len(items) // (2 * count)] for place in range(count)]
