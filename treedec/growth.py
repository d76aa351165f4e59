"""Growth policies: from a drafter's scores to a token tree.

Independent heads (Medusa) give one candidate list per depth, whatever the path; a `GrowthPolicy` decides which
combinations of candidates are worth a node. Where candidates depend on the path, `DynamicTree` also decides which nodes
to ask the drafter about. All return parents before children.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from treedec.costs import FLAT, CostCurve
from treedec.tree import TokenTree, TreeError

#: Candidates per depth, best first: `(token ids, scores)`, the score being the drafter's estimate that the target,
#: having followed the path so far, picks this token.
Candidates = Sequence[tuple[Sequence[int], Sequence[float]]]

#: The k best candidates to follow each of n nodes per row: `(token ids, scores)`, `[B, n, k]` int64 and floating.
Scored = tuple[Tensor, Tensor]


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
        min_probability: nodes below this probability are not added. 0 for trees as large as they can be; else the
            drafter also leaves out the nodes that do not pay their costs (`Draft.thinned`).
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

    @property
    def thins(self) -> bool:
        """Whether nodes that do not pay their costs are left out."""
        return self.min_probability > 0

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


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's dynamic draft tree (Li et al. 2024, arXiv:2406.16858, section 4): expand level by level, then rerank.

    A node's value is the product of the drafter's scores along its path. Every level asks the drafter what follows the
    `width` nodes of the level before that are worth most; of all candidates seen, the tree holds those worth most.

    Attributes:
        nodes: nodes per tree, the root included.
        depth: deepest level.
        width: nodes expanded per level.
        branching: candidates that follow one node.
        min_probability: nodes worth less than this are not added, see `BestFirst`; those worth nothing never are.
        min_reach: another level is drafted only if the nodes that it would follow are together worth this much, in the
            mean of the rows, and beyond that what makes its nodes pay (`CostCurve.least_score`). On two cores a level
            of the demo target's EAGLE-3 head takes 1.6 ms (compiled 1.0) and a token 9 (compiled).
    """

    nodes: int = 16
    depth: int = 8
    width: int = 4
    branching: int = 4
    min_probability: float = 0.03
    min_reach: float = 0.2

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.width, self.branching) < 1:
            raise ValueError(f"nodes, depth, width and branching must be at least 1: {self}")
        for name in ("min_probability", "min_reach"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], not {getattr(self, name)}")

    @property
    def thins(self) -> bool:
        """Whether nodes that do not pay their costs are left out."""
        return self.min_probability > 0

    @property
    def expanded(self) -> int:
        """Most nodes of one tree that the drafter is asked about, the root aside."""
        return (self.depth - 1) * self.width

    def grow(
        self,
        roots: Sequence[int | None],
        first: Scored,
        expand: Callable[[int, Tensor, Tensor], Scored],
        room: Sequence[int],
        limit: int,
        costs: CostCurve = FLAT,
    ) -> tuple[TokenTree, Tensor]:
        """A tree for every row, and the value of each node, `[B, N]` on the CPU, which falls along each row.

        Args:
            roots: per row the root's token, None for a finished row, whose tree is empty.
            first: candidates to follow each root, `[B, 1, k]`.
            expand: `expand(level, tokens, parents)` gives the candidates at `level` below the root, which follow n more
                nodes per row: their tokens and the places of their parents among all nodes expanded so far, both `[B,
                n]` int64; place −1 is the root. Rows with fewer nodes worth expanding are padded with others.
            room: deepest level per row.
            limit: most nodes per row, the root included.
            costs: of passes; in a batch more has to be expected of a level.
        """
        budget, levels = min(limit, self.nodes) - 1, min(self.depth, max(room))
        if budget < 1 or levels < 1:
            tree = TokenTree.chains([[] if root is None else [root] for root in roots])
            return tree, torch.ones(tree.tokens.shape, device="cpu")
        going = sum(root is not None for root in roots)
        least = costs.least_score(going) if self.thins else 0.0
        ids, scores = first
        tokens, values = ids[:, 0, :0], scores[:, 0, :0]  # [B, C] all candidates so far, level by level
        parents = expanded = tokens  # [B, C] places of their parents; [B, E] which candidates have been expanded
        reached, places = torch.ones_like(scores[:, :, 0]), torch.full_like(ids[:, :, 0], -1)  # of the nodes expanded
        fits = torch.tensor(room, device=ids.device)[:, None]
        for level in range(1, levels + 1):
            new_values = (reached[:, :, None] * scores).nan_to_num(0).flatten(1) * (fits >= level)
            new_parents = places.repeat_interleave(ids.shape[2], dim=1)
            seen = tokens.shape[1]
            tokens, parents = torch.cat([tokens, ids.flatten(1)], 1), torch.cat([parents, new_parents], 1)
            values = torch.cat([values, new_values], 1)
            if level == levels:
                break
            reached, index = new_values.topk(min(self.width, new_values.shape[1]))  # sorted, best first
            # What follows a node is worth no more than the node, and of equals the earlier candidate is taken.
            last = values.topk(budget).values[:, -1:] if values.shape[1] >= budget else 0
            # What pays is a matter of means over the rows, but it takes luck for a node below them to matter.
            pays = self._worth_adding(reached) & (reached >= least) & (reached > last)
            # One question to the device, not two.
            wide, reach = torch.stack([pays.sum(1).amax().to(reached.dtype), (reached * pays).sum()]).tolist()
            if wide == 0 or reach < (self.min_reach + least) * going:
                break
            wide = int(wide)
            reached, index = reached[:, :wide], index[:, :wide]
            ids, scores = expand(level + 1, tokens[:, seen:].gather(1, index), new_parents.gather(1, index))
            places = expanded.shape[1] + torch.arange(wide, device=ids.device).expand(len(ids), wide)
            expanded = torch.cat([expanded, seen + index], 1)
        return self._rerank(roots, tokens, values, parents, expanded, budget)

    def _rerank(
        self,
        roots: Sequence[int | None],
        tokens: Tensor,
        values: Tensor,
        parents: Tensor,
        expanded: Tensor,
        budget: int,
    ) -> tuple[TokenTree, Tensor]:
        """The trees of the candidates worth most, see `grow` for the tensors.

        They are connected: values never rise along a path, and since the sort is stable, an ancestor of the same value
        comes first.
        """
        values, order = values.sort(dim=1, descending=True, stable=True)
        ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
        node = 1 + torch.empty_like(order).scatter_(1, order, ranks)  # [B, C] of each candidate, the root being 0
        node = torch.cat([torch.zeros_like(node[:, :1]), node.gather(1, expanded)], 1)  # [B, 1 + E] of each place + 1
        chosen = order[:, :budget]
        counts = self._worth_adding(values[:, :budget]).sum(1, keepdim=True)
        bits = values[:, :budget].float().view(torch.int32)  # as integers, so that one copy brings all to the CPU
        above = node.gather(1, 1 + parents.gather(1, chosen))
        table = torch.cat([counts, tokens.gather(1, chosen), above, bits], 1).cpu()
        size = chosen.shape[1]
        rows: list[tuple[list[int], list[int]]] = []
        for root, (count, *both) in zip(roots, table[:, : 1 + 2 * size].tolist(), strict=True):
            row_tokens, row_parents = both[:count], both[size:][:count]
            rows.append(([], []) if root is None else ([root, *row_tokens], [-1, *row_parents]))
        tree = TokenTree.from_rows(rows)
        scores = F.pad(table[:, 1 + 2 * size :].int().view(torch.float32), (1, 0), value=1.0)
        return tree, scores[:, : tree.width]

    def _worth_adding(self, values: Tensor) -> Tensor:
        return (values >= self.min_probability) & (values > 0)
