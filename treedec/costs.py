"""What a pass of the target costs by its size, and how wide trees have to be to pay.

A pass over trees of up to N nodes in each of B rows computes B · N nodes: a row with few of them costs as much as the
widest. So nodes pay, or do not, column by column. In a batch fewer columns do than in a single row, for one node more
in each of eight rows costs eight nodes, and a pass over eight rows takes little longer than over one to begin with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treedec.compilation import emulated
from treedec.tree import TokenTree

if TYPE_CHECKING:
    from treedec.target import Target

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CONTEXT = 256
_WARM_UP = 2


class Clock:
    """Seconds, read when the device has done all that it was given.

    Args:
        device: the target's.
        counter: what to read; tests give one of their own.
    """

    def __init__(self, device: torch.device, counter: Callable[[], float] = time.perf_counter):
        self._device, self._counter = device, counter

    def read(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return self._counter()


@dataclass(frozen=True)
class CostCurve:
    """What a pass of the target costs on a machine.

    Attributes:
        nodes: sizes of passes, rising: the nodes of all rows, roots included.
        seconds: of one pass over so many nodes. For the width of trees only their ratios matter.

    Raises:
        ValueError: no points, sizes that do not rise from 1 or more, or seconds that are not above 0.
    """

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.nodes or len(self.nodes) != len(self.seconds):
            raise ValueError(f"costs need as many seconds as nodes, not {len(self.seconds)} and {len(self.nodes)}")
        if any(a >= b for a, b in zip((0, *self.nodes), self.nodes, strict=False)):
            raise ValueError(f"costs need rising numbers of nodes from 1 on, not {list(self.nodes)}")
        if not all(math.isfinite(each) and each > 0 for each in self.seconds):
            raise ValueError(f"costs need seconds above 0, not {list(self.seconds)}")

    @classmethod
    def of(cls, costs: Mapping[str, Any]) -> CostCurve:
        """The curve of the `costs` of a benchmark's result."""
        return cls(tuple(costs["nodes"]), tuple(costs["seconds"]))

    def covers(self, nodes: float) -> bool:
        return self.nodes[0] <= nodes <= self.nodes[-1]

    def at(self, nodes: float) -> float:
        """Seconds of a pass over so many nodes, linear between the measured sizes.

        Raises:
            ValueError: a size outside the measured ones: costs jump where a kernel changes, and no line knows where.
        """
        if not self.covers(nodes):
            raise ValueError(f"{nodes} nodes lie outside the measured {self.nodes[0]} to {self.nodes[-1]}")
        return float(np.interp(nodes, self.nodes, self.seconds))

    def width(self, scores: Tensor, rows: int) -> int:
        """How many columns of trees promise the most tokens per second, that of the roots included.

        A pass yields a token per row, and one for every node that is accepted.

        Args:
            scores: `[B, N]` floating, CPU: estimates that each node is accepted, falling along each row; 1 for roots, 0
                for padding and in rows that have finished.
            rows: how many have not.
        """
        tokens = scores.sum(0, dtype=torch.float64).cumsum(0).numpy()
        return 1 + int((tokens / self._estimate(rows * np.arange(1, len(tokens) + 1))).argmax())

    def least_score(self, rows: int) -> float:
        """A mean score of columns below which no number of them, up to 15, pays in so many rows."""
        columns = np.arange(1, 17)
        seconds = self._estimate(rows * columns)
        return max(0.0, float(((seconds[1:] / seconds[0] - 1) / columns[:-1]).min()))

    def _estimate(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for any sizes. Beyond the largest they are taken to rise as fast as from the first to the last."""
        seconds = np.interp(nodes, self.nodes, self.seconds)
        rise = (self.seconds[-1] - self.seconds[0]) / max(1, self.nodes[-1] - self.nodes[0])
        return seconds + max(0.0, rise) * np.maximum(nodes - self.nodes[-1], 0)


# The points are of the demo target on two cores of two AMD EPYCs, one with AVX512-BF16, the other with AVX2.
#
# A node adds 2 to 4 % to a pass over one in bfloat16 with its instructions, and in float32 compiled; of the pass and
# the drafting before it 1.5 to 2 %. With 3 %, EAGLE-3's trees in single rows were slower by 4 %.
FLAT = CostCurve((1, 51), (1.0, 2.0))
# For a single row, float32 and float64 have a kernel of their own. Beyond it nodes are cheap.
_STEP = CostCurve((1, 2, 8, 16, 32, 64), (1.0, 1.5, 1.5, 1.7, 2.3, 3.4))
# Without instructions for a dtype every row of a product takes its time: on AVX2 0.36 for float16, 0.41 for bfloat16.
# (float16 on AVX512, which mostly has none for it either, was not measured.)
_STEEP = CostCurve((1, 11), (1.0, 5.0))


def typical_costs(device: torch.device, dtype: torch.dtype, compiled: bool = False) -> CostCurve:
    """What passes cost on machines of a kind, for those that have not been measured.

    They are the same in every process. Were costs measured in each, trees would vary from one to the next, and with
    them the rounding in 16 bits.

    Args:
        device, dtype: of the target. Nothing but CPUs has been measured; other devices are taken to be no dearer than
            one with instructions for the dtype.
        compiled: its passes are.
    """
    if device.type != "cpu":
        return FLAT
    if emulated(dtype):
        return _STEEP
    return _STEP if dtype in (torch.float32, torch.float64) and not compiled else FLAT


def measure_costs(
    target: Target,
    text: Tensor | None = None,
    nodes: Sequence[int] = _SIZES,
    repeats: int = 9,
    clock: Clock | None = None,
) -> CostCurve:
    """Median seconds of a pass over a tree, by its size; the sizes take turns. Takes about `repeats` × `nodes` passes.

    Args:
        target: runs the passes; nothing is committed.
        text: `[1, L]` int64, L at least 1: ids of what stands before the tree; None for 256 arbitrary ones.
        nodes: sizes of the trees, which are binary; rising.
        repeats: passes per size.
        clock: takes the times; None for that of the device.

    Raises:
        ValueError: the text and the largest tree exceed the model's context; a text of another shape, no sizes, sizes
            that do not rise, or no passes.
    """
    CostCurve(tuple(nodes), (1.0,) * len(nodes))  # refuses sizes that are none, before any pass
    if repeats < 1 or (text is not None and (text.dim() != 2 or len(text) != 1 or text.numel() == 0)):
        shape = None if text is None else list(text.shape)
        raise ValueError(f"need at least one pass per size, and a text of shape [1, L]; not {repeats} and {shape}")
    largest, clock = max(nodes), clock or Clock(target.device)
    if text is None:
        room = _CONTEXT if target.context_length is None else min(_CONTEXT, target.context_length - largest)
        text = (torch.arange(max(room, 1), device=target.device) % target.vocab_size)[None]
    context = text.shape[1]
    if target.context_length is not None and context + largest > target.context_length:
        raise ValueError(f"the target's context of {target.context_length} tokens has no room for {largest} nodes")
    cache = target.allocate(1, context + largest)
    with torch.no_grad():
        if context > 1:
            target.prefill(cache, text[:, :-1].to(target.device))
        root = int(text[0, -1])
        trees = {
            size: TokenTree.from_rows([([root] * size, [(node - 1) // 2 if node else -1 for node in range(size)])])
            for size in nodes
        }
        seconds: dict[int, list[float]] = {size: [] for size in nodes}
        for repeat in range(-_WARM_UP, repeats):
            for size, tree in trees.items():
                started = clock.read()
                target.verify(cache, tree)
                took = clock.read() - started
                if repeat >= 0:
                    seconds[size].append(took)
    return CostCurve(tuple(nodes), tuple(median(seconds[size]) for size in nodes))
