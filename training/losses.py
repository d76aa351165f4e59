"""What Medusa heads are trained on (Medusa-1: Cai et al. 2024, arXiv:2401.10774, section 2.2) and measured by.

The target stays frozen and is its own teacher: heads are fitted to its distributions, not to single tokens, because
that is what a draft will be verified against. In a run of consecutive hidden states `h_0 .. h_{n-1}`, `h_{t+1+k}` gives
the distribution of the token that head `k` must guess from `h_t`.

Logits over the draft vocabulary are by far the largest thing here, so they exist for one block of rows and one head at
a time, and the gradient of the loss, which is known in closed form, is taken while they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from treedec.target import logit_factor

# Rows of logits alive at a time. 8,192 float32 columns make 8 MB, which stays in the cache of a desktop processor.
_BLOCK = 256


@dataclass(frozen=True)
class DraftHead:
    """The target's LM head, restricted to the draft vocabulary and frozen.

    Attributes:
        weight: `[Vd, H]` in the model's dtype, which is also the one matrix products run in. What the model multiplies
            its logits by (cohere, granite) is part of it.
        bias: `[Vd]`, multiplied likewise, or None where the LM head has none.
        cap: where logits are soft-capped, `cap * tanh(logits / cap)` (gemma 2), or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    cap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, draft_ids: Tensor) -> DraftHead:
        """The rows `draft_ids` (`[Vd]` int64) of a model's LM head, as a copy that shares nothing with the model."""
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        ids, factor = draft_ids.to(head.weight.device), logit_factor(config)
        weight, bias = head.weight.detach()[ids], getattr(head, "bias", None)
        return cls(
            _scaled(weight, factor),
            None if bias is None else _scaled(bias.detach()[ids], factor),
            getattr(config, "final_logit_softcapping", None),
        )


@dataclass(frozen=True)
class HeadLosses:
    """Sums and means over the rows at which each head is supervised.

    Attributes:
        kl: `[K]` mean KL(teacher || head) in nats; 0 for a head without a supervised row. Differentiable in the states.
        hits: `[K]` rows at which the head's best draft token is the teacher's.
        counts: `[K]` supervised rows.
    """

    kl: Tensor
    hits: Tensor
    counts: Tensor

    def total(self, weights: Tensor) -> Tensor:
        """The scalar to minimise: `sum_k weights[k] kl[k]`."""
        return (self.kl * weights.to(self.kl)).sum()


def draft_logits(hidden: Tensor, head: DraftHead) -> Tensor:
    """`[n, H]` LM-head inputs to `[n, Vd]` scores in float32 (float64 for a float64 head).

    The one place that turns hidden states into scores, for the teacher and for the heads.
    """
    scores = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if head.cap is None else torch.tanh(scores / head.cap) * head.cap


def medusa_loss(states: Tensor, hidden: Tensor, starts: Tensor, head: DraftHead, block: int = _BLOCK) -> HeadLosses:
    """The Medusa-1 loss of a batch of runs laid end to end.

    Args:
        states: `[K, T, H]` what the heads make of `hidden`, in any floating dtype.
        hidden: `[T, H]` the target's LM-head inputs: several runs of consecutive positions, one after the other.
        starts: `[T]` int64, for each row the index of the first row of its run. Head `k` is supervised at row `t` by
            row `t + 1 + k` if that is still in the same run.
        head: the frozen LM head.
        block: rows of logits held at a time.

    Returns:
        Finite losses, zero if nothing is supervised (`T` may be 0).
    """
    return HeadLosses(*_SoftLabelLoss.apply(states, hidden, starts, head, block))


class _SoftLabelLoss(torch.autograd.Function):
    """KL(p || softmax(z)) with its gradient `softmax(z) - p`, computed block by block in the forward pass.

    Where `z = c tanh(s / c)`, the gradient in `s` is that times `dz/ds = 1 - (z / c)^2`.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, hidden: Tensor, starts: Tensor, head: DraftHead, block: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = states.shape[0]
        wide = torch.promote_types(head.weight.dtype, torch.float32)
        kl = torch.zeros(heads, dtype=wide, device=states.device)
        hits, counts = kl.new_zeros(heads, dtype=torch.long), kl.new_zeros(heads, dtype=torch.long)
        gradient = torch.zeros_like(states) if ctx.needs_input_grad[0] else None
        for first, last in _blocks(1, hidden.shape[0], block):  # row 0 teaches nobody
            z = draft_logits(hidden[first:last], head)
            best = z.argmax(-1, keepdim=True)
            p, normaliser = _softmax(z)
            negative_entropy = torch.linalg.vecdot(p, z) - normaliser
            for k, rows, taught in _pairs(first, last, starts, heads):
                teachers = slice(last - first - len(taught), None)
                z = draft_logits(states[k, rows], head)
                q, normaliser = _softmax(z)
                rows_kl = negative_entropy[teachers] + normaliser - torch.linalg.vecdot(p[teachers], z)
                kl[k] += torch.where(taught, rows_kl, 0).sum()
                hits[k] += ((z.gather(1, best[teachers])[:, 0] >= z.amax(-1)) & taught).sum()
                counts[k] += taught.sum()
                if gradient is not None:
                    error = q.sub_(p[teachers])
                    if head.cap is not None:
                        error = error * (1 - (z / head.cap).square())
                    error = error.to(head.weight.dtype) @ head.weight
                    gradient[k, rows] = error.mul_(taught[:, None]).to(gradient.dtype)
        divisor = counts.clamp(min=1)
        if gradient is not None:
            ctx.save_for_backward(gradient.div_(divisor[:, None, None].to(gradient.dtype)))
        ctx.mark_non_differentiable(hits, counts)
        return kl / divisor, hits, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_kl[:, None, None].to(gradient.dtype), None, None, None, None


def _scaled(rows: Tensor, factor: float) -> Tensor:
    """`rows * factor` in the dtype of `rows`; 16-bit numbers are rounded once, at the end."""
    return rows if factor == 1 else (rows.to(torch.promote_types(rows.dtype, torch.float32)) * factor).to(rows.dtype)


def _softmax(z: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of `[n, Vd]` and its log-normaliser `[n]`.

    The largest entry gives the normaliser, `log sum exp z = max z - log max p`: half the cost of a second `logsumexp`.
    """
    p = z.softmax(-1)
    return p, z.amax(-1) - p.amax(-1).log()


@torch.no_grad()
def agreement(
    states: Tensor,
    starts: Tensor,
    greedy: Tensor,
    draft_ids: Tensor,
    head: DraftHead,
    top: int = 5,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """How often the heads draft the token that the target then takes.

    Args:
        states, starts, head, block: as in `medusa_loss`.
        greedy: `[T]` the target's greedy token after each row, over its full vocabulary.
        draft_ids: `[Vd]` the ids of the draft vocabulary.
        top: how many drafts per head are looked at (at most Vd).

    Returns:
        ranks, `[K, top]` int64: how many supervised rows find the greedy token at each rank of the head's drafts; and
        the number of supervised rows, `[K]` int64. A greedy token outside the draft vocabulary is at no rank.
    """
    heads = states.shape[0]
    ranks = torch.zeros(heads, top, dtype=torch.long, device=states.device)
    counts = torch.zeros(heads, dtype=torch.long, device=states.device)
    for first, last in _blocks(1, states.shape[1], block):
        for k, rows, taught in _pairs(first, last, starts, heads):
            drafts = draft_ids[draft_logits(states[k, rows], head).topk(top).indices]
            ranks[k] += ((drafts == greedy[last - len(drafts) : last, None]) & taught[:, None]).sum(0)
            counts[k] += taught.sum()
    return ranks, counts


def _blocks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, last)) for start in range(first, last, size))


def _pairs(first: int, last: int, starts: Tensor, heads: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Which rows of each head the teacher rows `first .. last - 1` supervise.

    Yields `(k, rows, taught)`: row `rows[i]` of head `k` belongs to the i-th of the *last* `len(rows)` teacher rows,
    and counts if `taught[i]`. Few rows do not count (`k + 1` per run); leaving them in costs less than gathering.
    """
    for k in range(heads):
        rows = slice(max(first - 1 - k, 0), last - 1 - k)
        if rows.stop > rows.start:
            readers = torch.arange(rows.start, rows.stop, device=starts.device)
            yield k, rows, readers >= starts[rows.start + 1 + k : last]
