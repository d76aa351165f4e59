"""Token trees: what a drafter proposes and one target pass verifies.

A tree is two integer arrays per row of the batch. Node 0 is the *root*: the last committed token, whose key and value
are not in the cache yet. Every other node is a candidate; `parents` points backwards, so the order is topological. A
chain (vanilla speculative decoding) is a tree with one branch, and plain decoding is a tree with one node.

Trees live on the CPU: drafters build them and the acceptance walk reads them there. The target moves what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class TreeError(ValueError):
    """A malformed token tree; the message names the row and the node."""


@dataclass(frozen=True, eq=False)
class TokenTree:
    """One token tree per row of a batch, padded to a common number of nodes.

    Attributes:
        tokens: `[B, N]` int64, CPU. Token ids; `tokens[b, 0]` is the last committed token of row `b`.
        parents: `[B, N]` int64, CPU. `parents[b, 0] == -1`; otherwise `0 <= parents[b, i] < i`.
        counts: `[B]` int64, CPU. Row `b` uses nodes `0 … counts[b] - 1`; the rest is padding. A row that has finished
            generating has count 0.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TokenTree:
        """Build a padded tree from one `(tokens, parents)` pair per row; an empty pair is a finished row."""
        width = max(1, max((len(tokens) for tokens, _ in rows), default=1))
        tokens = torch.zeros(len(rows), width, dtype=torch.long, device="cpu")
        parents = torch.zeros(len(rows), width, dtype=torch.long, device="cpu")
        parents[:, 0] = -1
        for row, (row_tokens, row_parents) in enumerate(rows):
            if len(row_tokens) != len(row_parents):
                raise TreeError(f"row {row}: {len(row_tokens)} tokens but {len(row_parents)} parents")
            tokens[row, : len(row_tokens)] = torch.as_tensor(row_tokens, dtype=torch.long, device="cpu")
            parents[row, : len(row_parents)] = torch.as_tensor(row_parents, dtype=torch.long, device="cpu")
        counts = [len(row_tokens) for row_tokens, _ in rows]
        return cls(tokens, parents, torch.tensor(counts, dtype=torch.long, device="cpu"))

    @classmethod
    def chains(cls, rows: Sequence[Sequence[int]]) -> TokenTree:
        """One-branch trees: row `b` is `rows[b][0] → rows[b][1] → …`."""
        return cls.from_rows([(row, range(-1, len(row) - 1)) for row in rows])

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """N, the padded number of nodes."""
        return self.tokens.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """`[B, N, N]` bool: entry `[b, i, j]` says that `j` is `i` or an ancestor of `i`. Padding sees only itself."""
        batch, width = self.tokens.shape
        parents, counts = self.parents.numpy(), self.counts.numpy()
        seen = np.zeros((batch, width, width), dtype=bool)
        rows = np.arange(batch)
        for node in range(width):
            if node > 0:
                seen[:, node] = seen[rows, np.clip(parents[:, node], 0, width - 1)] & (node < counts)[:, None]
            seen[:, node, node] = True
        return torch.from_numpy(seen)

    @cached_property
    def depths(self) -> Tensor:
        """`[B, N]` int64: 0 for the root (and for padding)."""
        return self.ancestors.sum(-1) - 1

    def padded(self, width: int) -> TokenTree:
        """The same trees with at least `width` nodes of room."""
        missing = width - self.width
        if missing <= 0:
            return self
        return TokenTree(F.pad(self.tokens, (0, missing)), F.pad(self.parents, (0, missing)), self.counts)

    def select(self, rows: Sequence[int]) -> TokenTree:
        """The trees of some rows; of all in their order this one, which may know its ancestors and depths already."""
        if list(rows) == list(range(self.batch)):
            return self
        return TokenTree(self.tokens[rows], self.parents[rows], self.counts[rows])

    def cut(self, width: int) -> TokenTree:
        """Of every tree the first `width` nodes at most."""
        if width >= self.width:
            return self
        return TokenTree(self.tokens[:, :width], self.parents[:, :width], self.counts.clamp(max=width))

    def children(self, row: int) -> list[list[int]]:
        """Per node of `row`, its children in the order the drafter gave them."""
        count = int(self.counts[row])
        result: list[list[int]] = [[] for _ in range(count)]
        for node, parent in enumerate(self.parents[row, :count].tolist()):
            if node > 0:
                result[parent].append(node)
        return result

    def validate(self, vocab_size: int, room: Sequence[int]) -> None:
        """Raise `TreeError` unless row `b` is a proper tree over ids below `vocab_size`, at most `room[b]` deep."""
        batch = len(room)
        if (
            self.tokens.shape != self.parents.shape
            or self.tokens.dim() != 2
            or self.counts.shape != self.tokens.shape[:1]
        ):
            raise TreeError(
                f"tokens {tuple(self.tokens.shape)}, parents {tuple(self.parents.shape)} and counts "
                f"{tuple(self.counts.shape)} must be [B, N], [B, N] and [B]"
            )
        if self.batch != batch:
            raise TreeError(f"the tree has {self.batch} rows, the batch has {batch}")
        if bool((self.counts > self.width).any()) or bool((self.counts < 0).any()):
            raise TreeError(f"counts {self.counts.tolist()} do not fit the {self.width} nodes of the tree")
        tokens, parents = self.tokens.numpy(), self.parents.numpy()  # a tenth of the overhead of torch on a small tree
        nodes = np.arange(self.width)
        used = nodes < self.counts.numpy()[:, None]
        in_order = np.where(nodes == 0, parents == -1, (parents >= 0) & (parents < nodes))
        known = (tokens >= 0) & (tokens < vocab_size)  # of padding too, which takes part in the pass
        self._refuse(used & ~in_order, "its parent is not an earlier node")
        self._refuse(~known, f"its token is outside the vocabulary of {vocab_size}")
        too_deep = self.depths.numpy() > np.asarray(room)[:, None]
        self._refuse(used & too_deep, "it is deeper than the row has room for")

    def check_roots(self, roots: Sequence[int | None]) -> None:
        """Raise `TreeError` unless every row begins with its root; `None` is a finished row, which has no nodes."""
        for row, root in enumerate(roots):
            if root is not None and (int(self.counts[row]) < 1 or int(self.tokens[row, 0]) != root):
                raise TreeError(f"row {row}, node 0: the root must be the last committed token, {root}")

    def _refuse(self, bad: np.ndarray, reason: str) -> None:
        if bad.any():
            row, node = np.argwhere(bad)[0].tolist()
            what = f"token {int(self.tokens[row, node])}, parent {int(self.parents[row, node])}"
            raise TreeError(f"row {row}, node {node} ({what}): {reason}")
