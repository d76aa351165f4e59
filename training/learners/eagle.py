"""Learners of EAGLE heads: EAGLE-1 (Li et al. 2024, arXiv:2401.15077), whose heads EAGLE-2 drafts with, and EAGLE-3
with training-time test (Li et al. 2025, arXiv:2503.01840, section 3.2).

Training-time test: after the first step, whose pairs hold true features, the head goes on from its own outputs as it
does when it drafts. Every position unrolls a chain of its own, along the tokens of the text. At step `j` the chain that
began at position `p` stands at position `p + j`; it sees the true pairs up to `p`, and of the drafted ones those of its
own chain. Keys and values of all steps lie side by side in one cache, and the mask says which of them a chain sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from treedec.heads.eagle import EagleConfig, EagleHead
from treedec.training.contracts import Batch, Losses
from treedec.training.learners.base import HeadLearner, ahead, hidden_and_vocab, initialise
from treedec.training.learners.heads import default_layers
from treedec.training.losses import text_ranks

_DRAFTED = 5  # depths that are measured at least


@dataclass(frozen=True)
class Eagle3Options:
    """Attributes:
    depths: steps of the training-time test.
    layers: the hidden states it reads; None for a low, a middle and a high one.
    intermediate_size: width of its MLP; None for the target's.
    num_key_value_heads: of its attention; None for the target's. What the head learns of the last token passes through
        its values, which are narrow where the target has few.
    norm_before_residual, fc_norm: as in `EagleConfig`.
    """

    depths: int = 5
    layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False


@dataclass(frozen=True)
class EagleOptions:
    """Attributes:
    depths: steps it is unrolled for; the paper's is 1.
    intermediate_size: as in `Eagle3Options`.
    noise: features are blurred by uniform noise of at most this, so that the head learns to live with its own errors.
    regression: weight of the smooth L1 distance between its output and the true feature, averaged over its width,
        against 1 for the loss of its drafts (the paper's are 1 and 0.1).
    """

    depths: int = 1
    intermediate_size: int | None = None
    noise: float = 0.1
    regression: float = 10.0


class EagleLearner(HeadLearner):
    """What both versions have in common."""

    def __init__(self, head: EagleHead, model: PreTrainedModel, options: EagleOptions | Eagle3Options, labels: str):
        super().__init__(head, model, options.depths, labels, embeddings=True)
        self.layers = head.config.features
        self._noise = options.noise if isinstance(options, EagleOptions) else 0.0
        self._regression = options.regression if isinstance(options, EagleOptions) else 0.0

    def forward(self, batch: Batch) -> Losses:
        if not self._regression:
            return super().forward(batch)
        rows = self.rows(batch)
        outputs = self._outputs(batch, rows)
        losses = self.losses(batch, rows, self.heads.scored(outputs))
        wanted = batch.hidden.flatten(0, 1)[rows + 1].to(outputs.dtype)
        distance = F.smooth_l1_loss(outputs[0], wanted, reduction="sum")
        return replace(losses, extra=self._regression / wanted.shape[1] * distance)

    def unroll(self, batch: Batch, rows: Tensor, depths: int | None = None) -> Tensor:
        return self.heads.scored(self._outputs(batch, rows, depths))

    @torch.no_grad()
    def ranks(self, batch: Batch, top: int) -> Tensor:
        """As in `Learner`, as deep as EAGLE drafts: with a depth of 1, nothing else would tell how far it goes."""
        rows = self.rows(batch)
        states = self.unroll(batch, rows, max(self.depths, _DRAFTED))
        return text_ranks(states, rows, batch, self._frozen.head, self.text(batch), top)

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).to(self.heads.fc.weight.dtype)  # norms want their weights' dtype

    def _outputs(self, batch: Batch, rows: Tensor, depths: int | None = None) -> Tensor:
        """`[D, T, H]` what the layer puts out at each step, for the chains that begin at `rows`.

        Args:
            depths: steps; None for as many as are trained.
        """
        depths = depths or self.depths
        head, width = self.heads, batch.input_ids.shape[1]
        features = batch.hidden if batch.features is None else batch.features
        features = features.to(head.fc.weight.dtype)
        if self._noise and self.training:
            features = features + (torch.rand_like(features) * 2 - 1) * self._noise
        device, size = features.device, len(features)
        cache = DynamicCache()
        at = torch.arange(width, device=device).expand(size, -1)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(size, 1, -1, -1)
        output = head(self.embed(ahead(batch.input_ids, 1)), head.fuse(features), at, causal, cache)
        outputs = [output.flatten(0, 1)[rows]]
        if depths == 1:
            return torch.stack(outputs)
        # From here on only the chains in question, laid out row by row and padded: column c of a row is its c-th chain.
        row, column, start = _columns(rows, size, width)
        itself = torch.eye(start.shape[1], dtype=torch.bool, device=device).expand(size, 1, -1, -1)
        mask = at[:, None, None] <= start[:, None, :, None]
        output = output.gather(1, start[:, :, None].expand(-1, -1, output.shape[-1]))
        for step in range(1, depths):
            mask = torch.cat([mask, itself], dim=3)
            tokens = ahead(batch.input_ids, 1 + step).gather(1, start)
            output = head(self.embed(tokens), head.feedback(output), start + step, mask, cache)
            outputs.append(output[row, column])
        return torch.stack(outputs)


def _columns(rows: Tensor, size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the chains of each row are when they are pushed to the left.

    Returns:
        row and column `[T]` int64 of each of them; and `[B, Q]` int64, the position at which each begins, Q being the
        most that any row has. Chains that only pad begin at position 0, where they see one pair, harmlessly.
    """
    row = rows // width
    counts = torch.bincount(row, minlength=size)
    column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[row]
    start = torch.zeros(size, int(counts.max()) if len(rows) else 1, dtype=torch.long, device=rows.device)
    start[row, column] = rows % width
    return row, column, start


class Eagle1Learner(EagleLearner):
    """EAGLE-1, and so EAGLE-2: the layer reads LM-head inputs and predicts the next one."""

    method = "eagle"

    @classmethod
    def build(
        cls, model: PreTrainedModel, options: EagleOptions, draft_ids: Tensor, *, labels: str = "soft"
    ) -> EagleLearner:
        config = _config(model, draft_ids, options.intermediate_size, version=1)
        return cls(_fresh(config, draft_ids, model), model, options, labels)


class Eagle3Learner(EagleLearner):
    """EAGLE-3: the layer reads three fused levels of features and is free in what it puts out."""

    method = "eagle3"

    @classmethod
    def build(
        cls, model: PreTrainedModel, options: Eagle3Options, draft_ids: Tensor, *, labels: str = "soft"
    ) -> EagleLearner:
        config = _config(
            model,
            draft_ids,
            options.intermediate_size,
            options.num_key_value_heads,
            version=3,
            features=default_layers(model) if options.layers is None else tuple(options.layers),
            norm_before_residual=options.norm_before_residual,
            fc_norm=options.fc_norm,
        )
        return cls(_fresh(config, draft_ids, model), model, options, labels)


def _config(
    model: PreTrainedModel,
    draft_ids: Tensor,
    intermediate_size: int | None,
    key_value_heads: int | None = None,
    **others: Any,
) -> EagleConfig:
    """A head whose layer has the shape of the target's, but for what is given."""
    hidden, vocab = hidden_and_vocab(model)
    text = model.config.get_text_config()
    key_value_heads = key_value_heads or getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    return EagleConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=len(draft_ids),
        target_hidden_size=hidden,
        intermediate_size=intermediate_size or getattr(text, "intermediate_size", None) or 4 * hidden,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=key_value_heads,
        head_dim=getattr(text, "head_dim", None) or hidden // text.num_attention_heads,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)},
        **others,
    )


def _fresh(config: EagleConfig, draft_ids: Tensor, model: PreTrainedModel) -> EagleHead:
    head = EagleHead(config, draft_ids)
    initialise(head, getattr(model.config.get_text_config(), "initializer_range", 0.02))
    return head
