"""SlotCache: keys and values in preallocated slots that are never copied, moved or cropped.

Keys are position-encoded before they are cached and attention does not care about the order of its keys. So a pass
writes its N nodes into N free slots of each row and the mask says which slots a node sees. Accepting a path makes its
slots visible; the slots of rejected nodes are simply handed out again. Rows may commit different numbers of tokens.

This file is the only place where keys and values are read or written.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin


class _Bookkeeping:
    """What layers need to know of their cache. Did they hold the cache itself, the two would refer to each other, and
    keys and values would outlive their last use until the garbage collector runs, which does not see their size.

    Attributes:
        capacity, allocated, rows, slots, lengths, high_water: as in `SlotCache`.
    """

    def __init__(self, batch: int, capacity: int, allocated: int, device: torch.device):
        self.capacity, self.allocated = capacity, allocated
        self.rows = torch.arange(batch, device=device)[:, None]
        self.slots = torch.zeros(batch, 0, dtype=torch.long, device=device)
        self.lengths = [0] * batch
        self.high_water = 0


class SlotLayer(CacheLayerMixin):
    """One layer's key and value buffers, `[B, n_kv, capacity, d]`, allocated at the first update."""

    is_sliding = False  # windows are part of the mask: every layer keeps every slot
    keys: Tensor  # None before the first update, which nothing reads; the base class says `Tensor | None`
    values: Tensor

    def __init__(self, books: _Bookkeeping):
        super().__init__()
        self._books = books

    def __deepcopy__(self, memo: dict[int, Any]) -> SlotLayer:
        # Models that run some layers several times (dory) extend the cache with copies of those layers, before the
        # first update. Their keys go to the same slots.
        return SlotLayer(self._books)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # One slot more than is ever handed out: were the buffer exactly as long as the mask in the first compiled pass,
        # the compiler would take the two lengths for one and compile again when they part.
        slots = self._books.allocated + 1
        # Zeros, not empty: a masked slot still takes part in `0 · value`, and uninitialised memory may hold NaN.
        self.keys = key_states.new_zeros(*key_states.shape[:2], slots, key_states.shape[-1])
        self.values = value_states.new_zeros(*value_states.shape[:2], slots, value_states.shape[-1])
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, n_kv, N, d]` states to the slots of the pass in flight; return those below the high-water mark."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Indexed assignment, not scatter_, which on the CPU copies the whole buffer first (8 times slower at 256 rows).
        rows, slots = self._books.rows, self._books.slots
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        high = self._books.high_water
        return self.keys[:, :, :high], self.values[:, :, :high]

    def grow(self, slots: int) -> None:
        """Make room for that many more slots."""
        if self.is_initialized:
            self.keys = functional.pad(self.keys, (0, 0, 0, slots))
            self.values = functional.pad(self.values, (0, 0, 0, slots))

    def select(self, rows: list[int]) -> None:
        """Keep the buffers of some rows only. Slots that were never used are not copied."""
        if self.is_initialized:
            high = self._books.high_water
            for name in ("keys", "values"):
                before = getattr(self, name)
                after = before.new_zeros(len(rows), *before.shape[1:])
                after[:, :, :high] = before[rows, :, :high]
                setattr(self, name, after)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._books.high_water, 0

    def get_seq_length(self) -> int:
        return max(self._books.lengths)

    def get_max_length(self) -> int:
        return self._books.capacity


class SlotCache(Cache):
    """The target's keys and values for a batch of rows that advance at their own pace.

    Args:
        layers: number of attention layers of the model.
        batch: rows.
        capacity: slots per row; must hold every committed token plus the nodes of one tree.
        device: where the bookkeeping tensors live (the model's device).
        granularity: the attended length is rounded up to a multiple of this, so that shapes repeat.
        at_once: slots allocated at first, since a cap on the length may be far beyond what is generated; caches that
            need more double, which copies them.

    Attributes:
        allocated: slots per row that there is memory for, at most `capacity`.
        visible: `[B, allocated]` bool, slots that hold committed tokens.
        positions: `[B, allocated]` int64, position of the token in each slot (meaningful where visible or in flight).
        slots: `[B, N]` int64, slots of the pass in flight; `rows` `[B, 1]` goes with it.
        flight: `[B, K + N]` int64, the same after those of the K nodes that it keeps, see `reserve`.
        lengths: committed tokens per row, host integers.
        high_water: slots `>= high_water` have never been used; attention stops there.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        device: torch.device,
        granularity: int = 64,
        at_once: int = 4096,
    ):
        self._books = _Bookkeeping(batch, capacity, min(capacity, at_once), device)
        super().__init__(layers=[SlotLayer(self._books) for _ in range(layers)])
        self.granularity = granularity
        self.visible = torch.zeros(batch, self.allocated, dtype=torch.bool, device=device)
        self.positions = torch.zeros(batch, self.allocated, dtype=torch.long, device=device)
        self.flight = self.slots

    @property
    def capacity(self) -> int:
        return self._books.capacity

    @property
    def allocated(self) -> int:
        return self._books.allocated

    @property
    def rows(self) -> Tensor:
        return self._books.rows

    @property
    def slots(self) -> Tensor:
        return self._books.slots

    @property
    def lengths(self) -> list[int]:
        return self._books.lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._books.lengths = lengths

    @property
    def high_water(self) -> int:
        return self._books.high_water

    @property
    def free(self) -> int:
        """Slots left in the fullest row: the largest tree that still fits."""
        return self.capacity - max(self.lengths)

    def reserve(self, positions: Tensor, keep: int = 0) -> None:
        """Hand out the lowest free slots of each row to the nodes of the next pass.

        Args:
            positions: `[B, N]` int64 on the cache's device, the position of each node.
            keep: how many nodes of the passes before, nothing having been committed since, are to keep their slots: a
                tree that is drafted level by level.

        Raises:
            ValueError: fewer than N slots are free.
        """
        nodes = keep + positions.shape[1]
        if nodes > self.free:
            raise ValueError(f"a pass over {nodes} nodes does not fit: {self.free} of {self.capacity} slots are free")
        if max(self.lengths) + nodes > self.allocated:
            self._grow(max(self.lengths) + nodes)
        # Free slots are handed out lowest first, so no slot beyond lengths + nodes can be in use, and a stable sort of
        # the visibility bits lists the free ones first, in order, without asking the host.
        near = self.visible[:, : max(self.lengths) + nodes]
        order = torch.argsort(near.to(torch.uint8), dim=1, stable=True)
        self.flight = order[:, :nodes]
        self._books.slots = order[:, keep:nodes].clone(
            memory_format=torch.contiguous_format
        )  # a view would carry the cache's length into the compiled pass
        self.positions.scatter_(1, self.slots, positions)
        used = max(max(self.lengths) + nodes, self.high_water)
        self._books.high_water = min(-(-used // self.granularity) * self.granularity, self.allocated)

    def _grow(self, needed: int) -> None:
        more = min(self.capacity, max(needed, 2 * self.allocated)) - self.allocated
        self.visible = functional.pad(self.visible, (0, more))
        self.positions = functional.pad(self.positions, (0, more))
        for layer in self.layers:
            cast(SlotLayer, layer).grow(more)
        self._books.allocated += more

    def commit(self, accepted: Tensor) -> None:
        """Make the accepted nodes of the pass in flight visible to all later passes.

        Args:
            accepted: `[B, N']` bool, CPU; the nodes of each row's committed path. The rest of the N is padding.
        """
        # The slots of a pass are free and distinct, so this neither hides a visible slot nor writes one twice.
        self.visible.scatter_(1, self.slots[:, : accepted.shape[1]], accepted.to(self.visible.device))
        self.lengths = [length + count for length, count in zip(self.lengths, accepted.sum(1).tolist(), strict=True)]

    def erase(self) -> None:
        """Zero the slots of the pass in flight, so that what it wrote has no part in any later one."""
        for layer in self.layers:
            states = cast(SlotLayer, layer)
            states.keys[self.rows, :, self.slots] = 0
            states.values[self.rows, :, self.slots] = 0

    def select(self, rows: list[int]) -> None:
        """Keep some rows only, in that order, which copies their keys and values; between two passes.

        Of the nodes that a pass kept in flight nothing is known afterwards.
        """
        for layer in self.layers:
            cast(SlotLayer, layer).select(rows)
        self.visible, self.positions = self.visible[rows], self.positions[rows]
        self.lengths = [self.lengths[row] for row in rows]
        self._books.rows = torch.arange(len(rows), device=self.visible.device)[:, None]

    def rollback(self, lengths: list[int]) -> None:
        """Hide committed tokens at positions `>= lengths[b]` (for drafters that drafted past what was accepted)."""
        limits = torch.tensor(lengths, device=self.visible.device)[:, None]
        self.visible &= self.positions < limits
        self.lengths = [min(length, limit) for length, limit in zip(self.lengths, lengths, strict=True)]

    def visible_states(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one row in position order, each `[n_kv, length, d]` (for inspection)."""
        slots = self.visible[row].nonzero().squeeze(-1)
        slots = slots[torch.argsort(self.positions[row, slots])]
        states = cast(SlotLayer, self.layers[layer])  # the base class allows for layers without keys
        return states.keys[row][:, slots], states.values[row][:, slots]
