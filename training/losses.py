"""What draft heads are trained on and measured by.

The target stays frozen and is its own teacher: heads are fitted to its distributions, not to single tokens, because
that is what a draft will be verified against (as Medusa-1 does in self-distillation: Cai et al. 2024, arXiv:2401.10774,
section 2.3). Which position teaches which is said in `contracts`.

Logits over the draft vocabulary are by far the largest thing here, so they exist for one block of rows and one depth at
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
from treedec.training.contracts import Batch, Losses

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


def draft_logits(hidden: Tensor, head: DraftHead) -> Tensor:
    """`[n, H]` LM-head inputs to `[n, Vd]` scores in float32 (float64 for a float64 head).

    The one place that turns hidden states into scores, for the teacher and for the heads.
    """
    scores = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if head.cap is None else torch.tanh(scores / head.cap) * head.cap


def distillation(
    states: Tensor,
    rows: Tensor,
    batch: Batch,
    head: DraftHead,
    *,
    offset: int = 1,
    text: Tensor | None = None,
    block: int = _BLOCK,
) -> Losses:
    """How far drafts are from what the target would say, and the gradient of that.

    Args:
        states: `[D, T, H]` what is to be read by the LM head at each depth, in any floating dtype.
        rows: `[T]` int64, ascending: the positions they belong to, within the `B L` of the flattened batch. All
            positions that are supervised at depth 0 must be among them.
        batch: the pack; its `hidden` is the teacher.
        head: the frozen LM head.
        offset: as in `Learner`: a state at position `p` and depth `d` is taught by position `p + offset + d`.
        text: None to minimise `KL(teacher || draft)`; or `[B L]` int64, the place in the draft vocabulary of the token
            that follows each position in the text, −1 if it has none, to minimise the cross-entropy of those tokens.
            Positions without one then count for nothing.
        block: rows of logits held at a time.

    Returns:
        Finite losses, zero if nothing is supervised.
    """
    with torch.autocast(states.device.type, enabled=False):  # dtypes are chosen here, not by what surrounds it
        return Losses(*_Distillation.apply(states, rows, batch, head, offset, text, block))


class _Distillation(torch.autograd.Function):
    """Sums of `KL(p || softmax(z))`, or of `-log softmax(z)[y]`, with their gradient `softmax(z) - p`.

    For a label y, p is 1 at y. Where `z = c tanh(s / c)`, the gradient in `s` is that times `dz/ds = 1 - (z / c)^2`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        rows: Tensor,
        batch: Batch,
        head: DraftHead,
        offset: int,
        text: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        depths, device = states.shape[0], states.device
        wide = torch.promote_types(head.weight.dtype, torch.float32)
        sums = torch.zeros(depths, dtype=wide, device=device)
        hits, counts = sums.new_zeros(depths, dtype=torch.long), sums.new_zeros(depths, dtype=torch.long)
        gradient = torch.zeros_like(states) if ctx.needs_input_grad[0] else None
        for teachers, readers in _lessons(rows, batch, offset, depths, block):
            z = draft_logits(batch.hidden.flatten(0, 1)[teachers], head)
            best = z.argmax(-1, keepdim=True)
            p, normaliser = _softmax(z)
            negative_entropy = torch.linalg.vecdot(p, z) - normaliser
            labels = None if text is None else text[teachers]
            for depth, (index, taught) in enumerate(readers):
                z = draft_logits(states[depth, index], head)
                q, normaliser = _softmax(z)
                if labels is None:
                    loss, error = negative_entropy + normaliser - torch.linalg.vecdot(p, z), q.sub_(p)
                else:
                    taught, label = taught & (labels >= 0), labels.clamp(min=0)[:, None]
                    loss = normaliser - z.gather(1, label)[:, 0]
                    error = q.scatter_add_(1, label, q.new_full((), -1.0).expand_as(label))
                sums[depth] += torch.where(taught, loss, 0).sum()
                hits[depth] += ((z.gather(1, best)[:, 0] >= z.amax(-1)) & taught).sum()
                counts[depth] += taught.sum()
                if gradient is not None:
                    if head.cap is not None:
                        error = error * (1 - (z / head.cap).square())
                    error = error.to(head.weight.dtype) @ head.weight
                    gradient[depth].index_add_(0, index, error.mul_(taught[:, None]).to(gradient.dtype))
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits, counts)
        return sums, hits, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_sums[:, None, None].to(gradient.dtype), None, None, None, None, None, None


@torch.no_grad()
def text_ranks(
    states: Tensor,
    rows: Tensor,
    batch: Batch,
    head: DraftHead,
    text: Tensor,
    top: int,
    *,
    offset: int = 1,
    block: int = _BLOCK,
) -> Tensor:
    """At which place of the drafts the text's own token stands.

    Args:
        states, rows, batch, head, offset, block: as in `distillation`.
        text: `[B L]` int64 as there.
        top: ranks from which on all count the same.

    Returns:
        `[D, B, L]` int64, see `Learner.ranks`.
    """
    ranks = torch.full((states.shape[0], batch.input_ids.numel()), top, device=states.device)
    for teachers, readers in _lessons(rows, batch, offset, states.shape[0], block):
        labels = text[teachers]
        for depth, (index, taught) in enumerate(readers):
            z = draft_logits(states[depth, index], head)
            found = (z > z.gather(1, labels.clamp(min=0)[:, None])).sum(1).clamp(max=top)
            known = taught & (labels >= 0)
            ranks[depth, rows[index[known]]] = found[known]
    return ranks.unflatten(1, batch.input_ids.shape)


def _scaled(rows: Tensor, factor: float) -> Tensor:
    """`rows * factor` in the dtype of `rows`; 16-bit numbers are rounded once, at the end."""
    return rows if factor == 1 else (rows.to(torch.promote_types(rows.dtype, torch.float32)) * factor).to(rows.dtype)


def _softmax(z: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of `[n, Vd]` and its log-normaliser `[n]`.

    The largest entry gives the normaliser, `log sum exp z = max z - log max p`: half the cost of a second `logsumexp`.
    """
    p = z.softmax(-1)
    return p, z.amax(-1) - p.amax(-1).log()


def _lessons(
    rows: Tensor, batch: Batch, offset: int, depths: int, block: int
) -> Iterator[tuple[Tensor, list[tuple[Tensor, Tensor]]]]:
    """The teachers, block by block, and who learns from them.

    Yields:
        teachers: `[n]` int64 positions in the flattened batch.
        readers: for each depth `index [n]`, which of the T rows a teacher teaches, and `taught [n]` bool, whether it
            does. Few do not (`depth` per run); leaving them in costs less than copying what the others learn from.
    """
    runs = batch.runs.flatten()
    place = torch.full_like(runs, -1)
    place[rows] = torch.arange(len(rows), device=rows.device)
    # Whoever teaches at a deeper depth also teaches at depth 0.
    first = batch.supervised(offset).flatten().nonzero()[:, 0]
    for teachers in (first + offset).split(block):
        readers = []
        for depth in range(depths):
            position = teachers - offset - depth
            index = place[position.clamp(min=0)]
            taught = (position >= 0) & (runs[position.clamp(min=0)] == runs[teachers])
            readers.append((index.clamp(min=0), taught))
        yield teachers, readers
