"""Learners of heads that read one position: Medusa (Cai et al. 2024, arXiv:2401.10774), Hydra (Ankner et al. 2024,
arXiv:2402.05109) and the recurrent head (after ReDrafter, Cheng et al. 2024, arXiv:2403.09919)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treedec.heads.hydra import HydraConfig, HydraHeads, PrefixConfig
from treedec.heads.medusa import MedusaConfig, MedusaHeads
from treedec.heads.recurrent import RecurrentConfig, RecurrentHead
from treedec.training.contracts import Batch
from treedec.training.learners.base import HeadLearner, ahead, hidden_and_vocab


@dataclass(frozen=True)
class MedusaOptions:
    """Attributes:
    heads, blocks: as in `MedusaConfig`.
    """

    heads: int = 4
    blocks: int = 1


class MedusaLearner(HeadLearner):
    """Medusa-1: heads on a frozen target."""

    method = "medusa"

    @classmethod
    def build(
        cls, model: PreTrainedModel, options: MedusaOptions, draft_ids: Tensor, *, labels: str = "soft"
    ) -> MedusaLearner:
        hidden, vocab = hidden_and_vocab(model)
        heads = MedusaHeads(MedusaConfig(hidden, vocab, options.heads, options.blocks, len(draft_ids)), draft_ids)
        return cls(heads, model, options.heads, labels, embeddings=False)

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        return self.heads(batch.hidden.flatten(0, 1)[rows])


@dataclass(frozen=True)
class HydraOptions:
    """Attributes:
    heads, blocks: as in `HydraConfig`.
    prefix: prefix attention (Hydra++), a decoder layer of the target's shape.
    """

    heads: int = 4
    blocks: int = 1
    prefix: bool = False


class HydraLearner(HeadLearner):
    """Hydra, and Hydra++ with `prefix`."""

    method = "hydra"

    @classmethod
    def build(
        cls, model: PreTrainedModel, options: HydraOptions, draft_ids: Tensor, *, labels: str = "soft"
    ) -> HydraLearner:
        hidden, vocab = hidden_and_vocab(model)
        prefix = None
        if options.prefix:
            text = model.config.get_text_config()
            prefix = PrefixConfig(
                intermediate_size=getattr(text, "intermediate_size", None) or 4 * hidden,
                num_attention_heads=text.num_attention_heads,
                num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
                head_dim=getattr(text, "head_dim", None) or hidden // text.num_attention_heads,
            )
        config = HydraConfig(hidden, vocab, options.heads, options.blocks, len(draft_ids), prefix=prefix)
        return cls(HydraHeads(config, draft_ids), model, options.heads, labels, embeddings=True)

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        hidden = batch.hidden
        if self.heads.prefix is not None:
            length = hidden.shape[1]
            positions = torch.arange(length, device=hidden.device).expand(len(hidden), -1)
            causal = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
            wide = hidden.to(next(self.heads.prefix.parameters()).dtype)
            hidden = self.heads.prefix(wide, positions, causal.expand(len(hidden), 1, -1, -1))
        return self.heads(hidden.flatten(0, 1)[rows], _following(self, batch, rows))


@dataclass(frozen=True)
class RecurrentOptions:
    """Attributes:
    depths: tokens ahead it is trained on; it can draft deeper.
    state_size, inner_size: as in `RecurrentConfig`; None for the target's width and twice as much.
    layers: hidden states it reads besides the LM-head input; None for a low, a middle and a high one.
    norm_features: as in `RecurrentConfig`.
    """

    depths: int = 5
    state_size: int | None = None
    inner_size: int | None = None
    layers: tuple[int, ...] | None = None
    norm_features: bool = True


class RecurrentLearner(HeadLearner):
    """The recurrent head."""

    method = "recurrent"

    @classmethod
    def build(
        cls, model: PreTrainedModel, options: RecurrentOptions, draft_ids: Tensor, *, labels: str = "soft"
    ) -> RecurrentLearner:
        hidden, vocab = hidden_and_vocab(model)
        state = options.state_size or hidden
        config = RecurrentConfig(
            hidden,
            vocab,
            state,
            options.inner_size or 2 * state,
            len(draft_ids),
            default_layers(model) if options.layers is None else tuple(options.layers),
            options.norm_features,
        )
        learner = cls(RecurrentHead(config, draft_ids), model, options.depths, labels, embeddings=True)
        learner.layers = config.features
        return learner

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        features = batch.hidden if batch.features is None else torch.cat([batch.hidden, batch.features], dim=-1)
        return self.heads(features.flatten(0, 1)[rows], _following(self, batch, rows))


def _following(learner: HeadLearner, batch: Batch, rows: Tensor) -> Tensor:
    """`[D, T, H]` embeddings of the root after each position and of the tokens after it."""
    tokens = [ahead(batch.input_ids, 1 + depth).flatten()[rows] for depth in range(learner.depths)]
    return learner.embed(torch.stack(tokens))


def default_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """The inputs of a low, a middle and a high decoder layer, as EAGLE-3 reads them (SafeAILab/EAGLE)."""
    layers = model.config.get_text_config().num_hidden_layers
    return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))
