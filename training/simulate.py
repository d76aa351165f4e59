"""Acceptance without decoding: how many tokens a pass would yield if the target said what the held-out text says.

A head is asked, at every position of a response, at which place of its drafts the text's own next tokens stand, given
that the drafts before them were right. That is all there is to know: the static tree of a given size that accepts most
follows from it, and so does every walk of a decoder through the text.

Mean accepted length τ = new tokens after the first / target passes after the prefill, pooled over all runs: the sum of
the ones over the sum of the others, as `DecodingStats.mean_accepted_length` counts it.

What is simulated is greedy acceptance of what the text holds. On texts that the target itself wrote greedily, this is
decoding; on texts it sampled or never wrote, it is a comparison between heads.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Path = tuple[int, ...]


@dataclass(frozen=True)
class Simulated:
    """Counts of a simulation.

    Attributes:
        tokens: new tokens after the first of each run.
        passes: of the target, after the prefill.
        histogram: how many passes accepted 0, 1, … drafted tokens; it sums to the passes.
    """

    tokens: int
    passes: int
    histogram: tuple[int, ...]

    @property
    def mean_accepted_length(self) -> float:
        """τ, tokens per pass; 0 before any pass."""
        return self.tokens / self.passes if self.passes else 0.0


def chained(ranks: np.ndarray, depths: int) -> np.ndarray:
    """What a draft model (`offset` 0) would guess at each depth, in the terms of heads that know the root.

    Args:
        ranks: `[1, T]` ranks along a run: of the token after each position.
        depths: D, tokens drafted ahead.

    Returns:
        `[D, T]`: the draft at depth `d` from `p`, whose root is `p + 1`, is the model's guess after `p + 1 + d`.
    """
    length = ranks.shape[1]
    padded = np.concatenate([ranks[0], np.full(depths + 1, -1, dtype=ranks.dtype)])
    return np.stack([padded[1 + depth : 1 + depth + length] for depth in range(depths)])


def best_tree(ranks: np.ndarray, nodes: int) -> tuple[Path, ...]:
    """The static tree whose paths the text follows most often.

    A position follows a path if the text's next tokens stand at just these places of the drafts. Whoever follows a path
    follows its beginnings, so the most followed paths form a tree, and no other of that size accepts more tokens on
    average over the positions.

    Args:
        ranks: `[D, T]` ranks at T positions, of all runs together; negative where a token cannot be accepted.
        nodes: size of the tree, its root included.

    Returns:
        At most `nodes - 1` paths in the order in which they were chosen: the most followed first, a parent before its
        children. Paths that no position follows are left out.
    """
    chosen: list[Path] = []
    # Entries: (-count, depth, path) and who follows the path; ties go to the shorter, then to the better ranked.
    heap: list[tuple[int, int, Path, np.ndarray]] = []
    _push_children(heap, ranks, (), np.arange(ranks.shape[1]))
    while heap and len(chosen) < nodes - 1:
        _, _, path, followers = heapq.heappop(heap)
        chosen.append(path)
        _push_children(heap, ranks, path, followers)
    return tuple(chosen)


def accepted_length(runs: Sequence[np.ndarray], tree: Sequence[Path]) -> Simulated:
    """Walk through runs as a decoder with that tree would.

    From position `p`, whose next token is the root, a pass accepts the `a` tokens along which the text stays in the
    tree and yields them and one of the target's own: it goes on from `p + a + 1`. The first token of a run comes out of
    the prefill; at its end, a pass yields no more than there is.

    Args:
        runs: `[D, T]` ranks of each run, negative where a token cannot be accepted (beyond the run, for one).
        tree: paths, prefix-closed.
    """
    deepest = max((len(path) for path in tree), default=0)
    histogram = np.zeros(deepest + 1, dtype=np.int64)
    tokens = passes = 0
    wanted = set(tree)
    for ranks in runs:
        accepted = _accepted(ranks, wanted)
        last = ranks.shape[1] - 1
        position = 0
        while position < last:
            count = int(accepted[position])
            histogram[count] += 1
            passes += 1
            position += count + 1
        tokens += max(last, 0)
    return Simulated(tokens, passes, tuple(histogram.tolist()))


def _push_children(
    heap: list[tuple[int, int, Path, np.ndarray]], ranks: np.ndarray, path: Path, followers: np.ndarray
) -> None:
    if len(path) == ranks.shape[0]:
        return
    following = ranks[len(path), followers]
    for rank in np.unique(following[following >= 0]).tolist():
        chosen = followers[following == rank]
        # Paths are all different, so the arrays are never compared.
        heapq.heappush(heap, (-len(chosen), len(path) + 1, (*path, rank), chosen))


def _accepted(ranks: np.ndarray, tree: set[Path]) -> np.ndarray:
    """`[T]` int64: along how many tokens the text stays in the tree, from each position."""
    accepted = np.zeros(ranks.shape[1], dtype=np.int64)
    # Positions that share a path go down the tree together.
    groups: list[tuple[Path, np.ndarray]] = [((), np.arange(ranks.shape[1]))]
    while groups:
        path, members = groups.pop()
        if len(path) == ranks.shape[0]:
            continue
        following = ranks[len(path), members]
        for rank in np.unique(following[following >= 0]).tolist():
            child = (*path, rank)
            if child in tree:
                inside = members[following == rank]
                accepted[inside] = len(child)
                groups.append((child, inside))
    return accepted
