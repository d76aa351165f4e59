"""n-gram look-up: the text's own past as the drafter (prompt look-up decoding, Saxena 2023; LLMA, arXiv:2304.04487).

Costs no model and no training, and wins where the output repeats the prompt or itself: summaries, edits, code.
"""

from __future__ import annotations

import numpy as np

from treedec.drafter import Draft, Drafter, DraftSession, DraftState
from treedec.target import Target
from treedec.tree import TokenTree


class NgramDrafter(Drafter):
    """Drafts the continuation of the most recent earlier occurrence of the longest matching suffix.

    Args:
        depth: tokens per chain.
        longest: longest suffix to look for.
        shortest: shortest suffix to trust.
    """

    name = "ngram"

    def __init__(self, depth: int = 8, longest: int = 4, shortest: int = 2):
        if depth < 1 or not 1 <= shortest <= longest:
            raise ValueError(f"need depth >= 1 and 1 <= shortest <= longest, not {depth}, {shortest}, {longest}")
        self.depth, self.longest, self.shortest, self.max_nodes = depth, longest, shortest, depth + 1

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        return _NgramSession(self)

    def continuation(self, text: list[int]) -> list[int]:
        """Up to `depth` tokens that followed the longest suffix of `text` the last time it occurred; may be empty."""
        ids = np.asarray(text)
        for size in range(min(self.longest, len(ids) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)  # the suffix itself is left out
            found = (windows == ids[-size:]).all(axis=1).nonzero()[0]
            if len(found):
                start = int(found[-1]) + size
                return text[start : start + self.depth]
        return []


class _NgramSession(DraftSession):
    def __init__(self, drafter: NgramDrafter):
        self._drafter = drafter

    def propose(self, state: DraftState) -> Draft:
        chains = []
        for text, room in zip(state.texts, state.room, strict=True):
            most = min(room, state.budget - 1)
            chains.append([] if text is None else [text[-1], *self._drafter.continuation(text)[:most]])
        return Draft(TokenTree.chains(chains))
