"""Where the time goes: one clock for every method, and meters around the parts of treedec's loop.

A GPU works behind the program's back, so the clock waits for it before every reading. Nothing here touches the user's
model or drafter: they are wrapped, and the wrappers are what the loop sees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from treedec.cache import SlotCache
from treedec.costs import Clock
from treedec.drafter import Draft, Drafter, DraftSession, DraftState, Outcome
from treedec.target import Target, Verified
from treedec.tree import TokenTree


class PassWatch(StoppingCriteria):
    """Watches a `generate` of transformers from where it asks whether to stop, which is once per pass. It never stops.

    Lengths are those of the tensor it is shown, so that watching reads nothing from the device, save when it takes the
    time of the first pass.

    Attributes:
        first_token: the clock's reading when the first pass had been decided, None before.
        lengths: `[t]` of the text after each pass.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self.first_token: float | None = None
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.first_token is None:
            self.first_token = self._clock.read()
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass
class Meter:
    """What one generation spent in which part, and what became of its trees.

    Attributes:
        clock: takes the times.
        draft_seconds: in the drafter, since the last `restart`.
        target_seconds: in passes of the target, since the last `restart`.
        rounds: each tree and its outcome, since then; `accepted_places` counts in them when no clock is running.
    """

    clock: Clock
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    rounds: list[tuple[TokenTree, Outcome]] = field(default_factory=list)

    def restart(self) -> None:
        self.draft_seconds = self.target_seconds = 0.0
        self.rounds = []

    @contextmanager
    def drafting(self) -> Iterator[None]:
        started = self.clock.read()
        yield
        self.draft_seconds += self.clock.read() - started

    @contextmanager
    def verifying(self) -> Iterator[None]:
        started = self.clock.read()
        yield
        self.target_seconds += self.clock.read() - started


def accepted_places(
    rounds: Iterable[tuple[TokenTree, Outcome]], eos: Collection[int]
) -> dict[tuple[int, int], tuple[int, int]]:
    """`(depth, rank)`, both from 1, to how many candidates there had an accepted parent (or the root for one), and how
    many of these were accepted too.

    Args:
        rounds: trees and what became of them.
        eos: ids that end a row.
    """
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for tree, outcome in rounds:
        for row, (path, tokens) in enumerate(zip(outcome.paths, outcome.tokens, strict=True)):
            if not path:
                continue
            children = tree.children(row)
            for depth, node in enumerate(path, 1):
                accepted = path[depth] if depth < len(path) else None
                for rank, child in enumerate(children[node], 1):
                    # A candidate that ends the row is committed as its last token and is no part of the path.
                    ends = accepted is None and tokens[-1] in eos and int(tree.tokens[row, child]) == tokens[-1]
                    reached, taken = places.get((depth, rank), (0, 0))
                    places[depth, rank] = (reached + 1, taken + (child == accepted or ends))
    return places


class MeteredTarget(Target):
    """A target whose passes are timed."""

    def __init__(self, model: PreTrainedModel, meter: Meter, compile: bool = False):
        self._meter = meter  # before what follows, which runs a pass if it is to compile
        super().__init__(model, compile)

    def prefill(
        self,
        cache: SlotCache,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        chunk: int | None = None,
        features: tuple[int, ...] | None = None,
    ) -> Verified:
        with self._meter.verifying():
            return super().prefill(cache, input_ids, attention_mask, chunk, features)

    def verify(self, cache: SlotCache, tree: TokenTree, features: tuple[int, ...] | None = None) -> Verified:
        with self._meter.verifying():
            return super().verify(cache, tree, features)


class MeteredDrafter(Drafter):
    """A drafter whose sessions are timed, and whose trees are kept with what became of them."""

    def __init__(self, drafter: Drafter, meter: Meter):
        self.drafter, self._meter = drafter, meter
        self.name, self.max_nodes, self.features = drafter.name, drafter.max_nodes, drafter.features

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        return _MeteredSession(self.drafter.start(target, batch, capacity), self._meter)


class _MeteredSession(DraftSession):
    def __init__(self, session: DraftSession, meter: Meter):
        self._session, self._meter = session, meter
        self._tree: TokenTree | None = None

    def propose(self, state: DraftState) -> Draft:
        with self._meter.drafting():
            draft = self._session.propose(state)
        self._tree = draft.tree
        return draft

    def observe(self, outcome: Outcome) -> None:
        with self._meter.drafting():
            self._session.observe(outcome)
        assert self._tree is not None  # a round begins with a proposal
        # A tree that overflowed was verified as its roots alone, and has nothing accepted.
        self._meter.rounds.append((self._tree, outcome))
