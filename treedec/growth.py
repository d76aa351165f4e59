"""Growth policies: from a drafter's scores to a token tree.

Independent heads (Medusa) give one candidate list per depth, whatever the path; a policy decides which combinations of
candidates are worth a node. Every policy returns parents before children.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treedec.tree import TreeError

#: Candidates per depth, best first: `(token ids, scores)`, the score being the drafter's estimate that the target,
#: having followed the path so far, picks this token.
Candidates = Sequence[tuple[Sequence[int], Sequence[float]]]


class GrowthPolicy(Protocol):
    """Chooses the nodes of a tree."""

    @property
    def depth(self) -> int | None:
        """Deepest level the policy asks for; None for as deep as the drafter goes."""
        ...

    @property
    def branching(self) -> int:
        """How many candidates per depth the policy looks at."""
        ...

    @property
    def nodes(self) -> int:
        """Largest number of nodes of a tree, the root included."""
        ...

    def grow(self, root: int, candidates: Candidates, limit: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a tree of at most `limit` nodes, the root included."""
        ...


@dataclass(frozen=True)
class BestFirst:
    """Take the most probable node next, until the budget is spent or no node is worth its cost.

    Under independent per-depth scores a node's probability is the product along its path, so best-first growth is
    exact: the tree it returns has the largest expected accepted length of all trees of its size (Medusa, section
        2.3.3).

    Attributes:
        nodes: nodes per tree, the root included.
        min_probability: nodes below this probability are not added. A node is worth drafting while its probability
            times the cost of an average token exceeds what one more node adds to a target pass.
        branching: candidates per depth.
        depth: deepest level, None for no limit.
    """

    nodes: int = 16
    min_probability: float = 0.0
    branching: int = 8
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.branching < 1 or (self.depth is not None and self.depth < 1):
            raise ValueError(f"nodes, branching and depth must be at least 1: {self}")
        if not 0 <= self.min_probability <= 1:
            raise ValueError(f"min_probability must lie in [0, 1], not {self.min_probability}")

    def grow(self, root: int, candidates: Candidates, limit: int) -> tuple[list[int], list[int]]:
        tokens, parents = [root], [-1]
        limit = min(limit, self.nodes)
        frontier: list[
            tuple[float, int, int, int]
        ] = []  # (-probability, parent, depth, rank): the best sibling not yet taken
        probability = [1.0]

        def offer(parent: int, depth: int, rank: int) -> None:
            if depth < len(candidates) and rank < min(len(candidates[depth][0]), self.branching):
                heapq.heappush(frontier, (-probability[parent] * candidates[depth][1][rank], parent, depth, rank))

        offer(0, 0, 0)
        while frontier and len(tokens) < limit:
            negative, parent, depth, rank = heapq.heappop(frontier)
            if -negative < self.min_probability:
                break
            tokens.append(candidates[depth][0][rank])
            parents.append(parent)
            probability.append(-negative)
            offer(parent, depth, rank + 1)
            if self.depth is None or depth + 1 < self.depth:
                offer(len(tokens) - 1, depth + 1, 0)
        return tokens, parents


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape given as Medusa choices: one path of candidate ranks per node.

    `((0,), (1,), (0, 0))` is two children of the root, ranked first and second, and one child under the first.

    Attributes:
        choices: paths of ranks, in any order; each path's own prefix must be a choice too.

    Raises:
        TreeError: an empty or repeated path, a negative rank, or a path without its parent; names the path.
    """

    choices: tuple[tuple[int, ...], ...]
    _parents: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        paths = sorted((tuple(path) for path in self.choices), key=lambda path: (len(path), path))
        if not paths:
            raise TreeError("a static tree needs at least one path")
        place: dict[tuple[int, ...], int] = {(): 0}
        parents = []
        for path in paths:
            if not path or min(path) < 0:
                raise TreeError(f"path {path} must be a non-empty tuple of ranks counted from 0")
            if path in place:
                raise TreeError(f"path {path} is given twice")
            if path[:-1] not in place:
                raise TreeError(f"path {path} has no parent: {path[:-1]} is missing from the choices")
            parents.append(place[path[:-1]])
            place[path] = len(place)
        object.__setattr__(self, "choices", tuple(paths))
        object.__setattr__(self, "_parents", tuple(parents))

    @property
    def depth(self) -> int:
        return len(self.choices[-1])

    @property
    def branching(self) -> int:
        return 1 + max(max(path) for path in self.choices)

    @property
    def nodes(self) -> int:
        return 1 + len(self.choices)

    def grow(self, root: int, candidates: Candidates, limit: int) -> tuple[list[int], list[int]]:
        tokens, parents, place = [root], [-1], {0: 0}
        for node, (path, parent) in enumerate(zip(self.choices, self._parents, strict=True), 1):
            depth = len(path) - 1
            # Near the end of the room, depths are missing; paths are sorted by depth, so a child never outlives its
            # parent.
            fits = depth < len(candidates) and path[-1] < len(candidates[depth][0]) and parent in place
            if fits and len(tokens) < limit:
                place[node] = len(tokens)
                tokens.append(candidates[depth][0][path[-1]])
                parents.append(place[parent])
        return tokens, parents
