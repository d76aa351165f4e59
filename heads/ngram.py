"""n-gram look-up: the text's own past as the drafter (prompt look-up decoding, Saxena 2023; LLMA, arXiv:2304.04487).

Costs no model and no training, and wins where the output repeats the prompt or itself: summaries, edits, code. Where
the past goes on in several ways, the draft is a tree of them, the most frequent first (as in SuffixDecoding,
arXiv:2411.04975).
"""

from __future__ import annotations

import heapq

from treedec.drafter import Draft, Drafter, DraftSession, DraftState, score_table
from treedec.target import Target
from treedec.tree import TokenTree

# Places of one n-gram that are followed, the latest ones: in a text that repeats a line a thousand times, more would
# cost time and say nothing new.
_PLACES = 32

# For how many occurrences that went on otherwise an unknown context counts, and with which power of its length this
# falls: see `NgramDrafter`.
_GREEDY_PRIOR, _SAMPLED_PRIOR = (2.0, 1.3), (6.0, 1.5)


class NgramDrafter(Drafter):
    """Drafts what followed the longest suffix of the text that occurred before, in the prompt or in the output.

    The continuations of all its occurrences are merged, token by token, into one tree, which is grown best first. The
    estimate that a token x follows after a context of m tokens (the suffix and the path below the root) that went on
    n times, c times of these with x, is c / (n + 2 / m^1.3): the share of x, shrunk the more the fewer occurrences
    there are and the shorter the context is. Of tokens that followed equally often the latest comes first. A suffix
    that always went on in one way drafts a chain.

    The estimates were fitted to greedy answers of the demo model to the 96 bundled prompts of `treedec bench` (128
    tokens each). Nodes whose estimates were 0.14, 0.35, 0.53, 0.75 and 0.93 on average were right in 12, 42, 62, 92 and
    100 % of the cases there, so they can be compared with the probabilities of other drafters. The defaults are of the
    same answers and of the costs of a pass on two cores. Sampled text repeats itself less, and the estimate is
    c / (n + 6 / m^1.5) where the rule samples: in answers at T = 1 tokens of 0.13, 0.33, 0.57, 0.75 and 0.92 on average
    were right in 11, 31, 61, 78 and 95 % of the cases (of the greedy estimate's 0.34, 0.55 and 0.75 in 18, 35 and 63).

    Nothing is drawn at random, so every rule is exact with these drafts.

    Args:
        depth: most levels below the root.
        longest: longest suffix to look for.
        shortest: shortest suffix to trust.
        nodes: nodes per tree, the root included; None for `depth + 1`, those of one chain.
        branches: most children of one node. With 1 the tree is the chain of the best children.
        min_probability: nodes with lower estimates are not added. 0 for all nodes there is room for; else those that do
            not pay their costs are left out, too.

    Raises:
        ValueError: sizes that are not positive, `shortest` above `longest`, `nodes` below 2, or `min_probability`
            outside [0, 1].
    """

    name = "ngram"

    def __init__(
        self,
        depth: int = 15,
        longest: int = 4,
        shortest: int = 1,
        nodes: int | None = None,
        branches: int = 4,
        min_probability: float = 0.1,
    ):
        if depth < 1 or not 1 <= shortest <= longest:
            raise ValueError(f"need depth >= 1 and 1 <= shortest <= longest, not {depth}, {shortest}, {longest}")
        if branches < 1 or (nodes is not None and nodes < 2):
            raise ValueError(f"need branches >= 1 and nodes >= 2, not {branches}, {nodes}")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability must lie in [0, 1], not {min_probability}")
        self.min_probability = min_probability
        self.depth, self.longest, self.shortest, self.branches = depth, longest, shortest, branches
        self.max_nodes = depth + 1 if nodes is None else nodes

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        return _NgramSession(self, batch)


class _NgramSession(DraftSession):
    """One index per row. It knows committed text only, so a rejected draft leaves nothing behind in it."""

    def __init__(self, drafter: NgramDrafter, batch: int):
        self._drafter = drafter
        self._indexes = [_Index(drafter.longest, drafter.shortest) for _ in range(batch)]

    def propose(self, state: DraftState) -> Draft:
        rows: list[tuple[list[int], list[int], list[float]]] = []
        prior = _SAMPLED_PRIOR if state.samples else _GREEDY_PRIOR
        for text, index, room in zip(state.texts, self._indexes, state.room, strict=True):
            rows.append(([], [], []) if text is None else self._grow(text, index, room, state.budget, prior))
        tree = TokenTree.from_rows([(tokens, parents) for tokens, parents, _ in rows])
        draft = Draft(tree, scores=score_table([scores for _, _, scores in rows]))
        return draft.thinned(state) if self._drafter.min_probability > 0 else draft

    def _grow(
        self, text: list[int], index: _Index, room: int, budget: int, prior: tuple[float, float]
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and scores of the best nodes, best first."""
        weight, power = prior
        size, places = index.look_up(text)
        tokens, parents, depths, scores = [text[-1]], [-1], [0], [1.0]
        limit, deepest = min(self._drafter.max_nodes, budget), min(self._drafter.depth, room)
        # (-score, -latest place, parent, token, places of the node's own continuation)
        frontier: list[tuple[float, int, int, int, list[int]]] = []

        def offer_children(node: int, places: list[int]) -> None:
            followers: dict[int, list[int]] = {}
            going_on = [place for place in places if place < len(text)]
            for place in going_on:
                followers.setdefault(text[place], []).append(place + 1)
            best = sorted(followers.items(), key=lambda item: (len(item[1]), item[1][-1]), reverse=True)
            for token, after in best[: self._drafter.branches]:
                share = len(after) / (len(going_on) + weight / (size + depths[node]) ** power)
                if scores[node] * share >= self._drafter.min_probability:
                    heapq.heappush(frontier, (-scores[node] * share, -after[-1], node, token, after))

        if deepest > 0:
            offer_children(0, places)
        while frontier and len(tokens) < limit:
            negative, _, parent, token, after = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            scores.append(-negative)
            if depths[-1] < deepest:
                offer_children(len(tokens) - 1, after)
        return tokens, parents, scores


class _Index:
    """Where each n-gram of one row's text is followed by what. It grows with the text, which is never read twice.

    Args:
        longest, shortest: sizes of the n-grams.
    """

    def __init__(self, longest: int, shortest: int):
        self._sizes = range(longest, shortest - 1, -1)
        self._followed: dict[tuple[int, ...], list[int]] = {}  # the places right after each n-gram, ascending
        self._next = 1  # the first place that is not yet in it

    def look_up(self, text: list[int]) -> tuple[int, list[int]]:
        """Size of the longest suffix of `text` that occurred before, and the latest places after it, ascending.

        `(0, [])` where none did. `text` must begin with that of the last call.
        """
        for place in range(self._next, len(text)):
            for size in self._sizes:
                if size <= place:
                    self._followed.setdefault(tuple(text[place - size : place]), []).append(place)
        self._next = len(text)
        for size in self._sizes:
            if places := self._followed.get(tuple(text[-size:])):
                return size, places[-_PLACES:]
        return 0, []
