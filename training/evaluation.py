"""What heads are measured by on the held-out packs: losses, accuracy, and the acceptance that `simulate` foretells."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from treedec.target import Target
from treedec.training.contracts import Batch, FeatureSource, Learner
from treedec.training.processes import shares
from treedec.training.simulate import accepted_length, best_tree, chained

TOPS = (1, 4, 8)
# Of the tokens of a run, the share that must be the target's first choice for the run to count as written greedily.
# Not all: ties and the rounding of another batch size decide some otherwise.
_GREEDY = 0.95
_BLOCK = 256  # rows of full logits alive at a time


@dataclass(frozen=True)
class _Measured:
    """One pack: sums over positions, and of each run the ranks `[D', T]` and whether the target wrote it greedily.

    `counts` are the positions that the losses are of, `supervised` also those whose token cannot be drafted.
    """

    pack: int
    supervised: np.ndarray
    sums: np.ndarray
    hits: np.ndarray
    counts: np.ndarray
    extra: float
    ranks: list[np.ndarray]
    greedy: list[bool]


class Evaluator:
    """Measures heads on the held-out packs of a source; each process takes its share of them.

    Args:
        target: the target, whose own choices are computed once.
        source: where its states come from.
        nodes: size of the token tree that is simulated, root included.
        accelerator: of this process.
        autocast: dtype of the heads' matrix products, or None.
    """

    def __init__(
        self,
        target: Target,
        source: FeatureSource,
        nodes: int,
        accelerator: Accelerator,
        autocast: torch.dtype | None = None,
    ):
        self.target, self.source, self.nodes = target, source, nodes
        self.accelerator, self.autocast = accelerator, autocast
        self._greedy: dict[int, list[bool]] = {}

    def measure(self, learner: Learner) -> dict[str, Any]:
        """The same on every process, and whatever their number.

        Returns:
            `loss` (list over depths, nats a position), `mean_loss` (of all positions of all depths together), `extra`
            (a position of depth 0), `accuracy` (list: the best draft is the teacher's first choice among those that can
            be drafted), `counts` (list of positions), `top1`, `top4`, `top8` (lists: the text's own token is among so
            many drafts, of all supervised positions), `accepted_length` (mean accepted length of the best static tree
            of `nodes` nodes, see `simulate`), `accepted_length_greedy` (over the `greedy_runs` of `runs` that hold what
            the target would write greedily; None if there are none).
        """
        heldout, mine = self.source.packs.heldout, []
        was_training = learner.training
        learner.eval()
        for place, counts in shares(len(heldout), self.accelerator):
            measured = self._pack(learner, heldout[place])
            if counts:
                mine.append(measured)
        learner.train(was_training)
        packs = sorted(gather_object(mine), key=lambda measured: measured.pack)
        return self._pooled(packs, learner.offset)

    @torch.no_grad()
    def _pack(self, learner: Learner, pack: int) -> _Measured:
        batch = self.source.batch(pack)
        top = min(len(learner.draft_ids), max(*TOPS, self.nodes))
        device = batch.hidden.device.type
        with torch.autocast(device, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            losses, ranks = learner(batch), learner.ranks(batch, top)
        supervised = [batch.supervised(learner.offset + depth) for depth in range(len(ranks))]
        for depth, taught in enumerate(supervised):
            ranks[depth] = torch.where(taught & (ranks[depth] < top), ranks[depth], -1)
        runs = _runs(batch)
        if pack not in self._greedy:
            agrees = self._agrees(batch)
            self._greedy[pack] = [float(agrees[row, span].mean()) >= _GREEDY for row, span in runs]
        found = ranks.to("cpu", torch.int32).numpy()
        return _Measured(
            pack,
            np.array([int(taught.sum()) for taught in supervised[: learner.depths]]),
            losses.sums.cpu().double().numpy(),
            losses.hits.cpu().numpy(),
            losses.counts.cpu().numpy(),
            0.0 if losses.extra is None else float(losses.extra),
            [found[:, row, span] for row, span in runs],
            self._greedy[pack],
        )

    def _agrees(self, batch: Batch) -> np.ndarray:
        """`[B, L]` float: 1 where the text goes on with the target's first choice over its whole vocabulary."""
        rows = batch.hidden.flatten(0, 1).split(_BLOCK)
        greedy = torch.cat([self.target.head(part).argmax(-1) for part in rows]).view_as(batch.input_ids)
        agrees = torch.zeros(batch.input_ids.shape, device=greedy.device)
        agrees[:, :-1] = (greedy[:, :-1] == batch.input_ids[:, 1:]).float()
        return agrees.cpu().numpy()

    def _pooled(self, packs: list[_Measured], offset: int) -> dict[str, Any]:
        names = ("sums", "hits", "counts", "supervised")
        sums, hits, counts, supervised = (sum(getattr(pack, name) for pack in packs) for name in names)
        seen, every = np.maximum(counts, 1), np.maximum(supervised, 1)
        ranks = [one for pack in packs for one in pack.ranks]
        together = np.concatenate(ranks, axis=1)[: len(every)]
        shares_of = {f"top{top}": (((together >= 0) & (together < top)).sum(1) / every).tolist() for top in TOPS}
        if offset == 0:  # a draft model drafts its first choices, one after the other
            ranks = [chained(np.where(one == 0, 0, -1), self.nodes - 1) for one in ranks]
        tree = best_tree(np.concatenate(ranks, axis=1), self.nodes)
        greedy = [
            one for one, is_greedy in zip(ranks, (g for pack in packs for g in pack.greedy), strict=True) if is_greedy
        ]
        return {
            "loss": (sums / seen).tolist(),
            "mean_loss": float(sums.sum() / seen.sum()),
            "extra": sum(pack.extra for pack in packs) / int(every[0]),
            "accuracy": (hits / seen).tolist(),
            "counts": counts.tolist(),
            **shares_of,
            "accepted_length": accepted_length(ranks, tree).mean_accepted_length,
            "accepted_length_greedy": accepted_length(greedy, tree).mean_accepted_length if greedy else None,
            "greedy_runs": len(greedy),
            "runs": len(ranks),
        }


def _runs(batch: Batch) -> list[tuple[int, slice]]:
    """Row and columns of each run of a batch, in order."""
    found = []
    for row, numbers in enumerate(batch.runs.cpu().numpy()):
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        spans = (slice(first, last) for first, last in pairwise(edges))
        found += [(row, span) for span in spans if numbers[span.start] >= 0]
    return found


def better(measured: dict[str, Any], than: dict[str, Any]) -> bool:
    """Whether heads that were measured so accept more; of those that accept the same, whether their loss is lower."""
    return (measured["accepted_length"], -measured["mean_loss"]) > (than["accepted_length"], -than["mean_loss"])
