"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): head `k` guesses the token `k + 1` places after the one the target predicts.

Every head reads the target's last hidden state, alone, through residual blocks `x + silu(W x + b)`, and shares the target's
LM head, by default restricted to a draft vocabulary of its most frequent tokens. One matrix product drafts all depths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of a set of Medusa heads.

    Attributes:
        hidden_size: H, the width of the target's LM-head input.
        vocab_size: V, the rows of the target's LM head.
        heads: K, the number of heads: the deepest tree they can draft.
        blocks: residual blocks per head.
        draft_vocab_size: Vd, the number of tokens that can be drafted; equal to V when the vocabulary is not trimmed.
    """

    hidden_size: int
    vocab_size: int
    heads: int = 4
    blocks: int = 1
    draft_vocab_size: int = 8192

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"a draft vocabulary of {self.draft_vocab_size} tokens exceeds the target's {self.vocab_size}")


class MedusaHeads(nn.Module):
    """The trainable part: K stacks of residual blocks, evaluated together.

    Parameters are stacked over heads, `weight [K, L, H, H]` (output, input) and `bias [K, L, H]`, so that all heads are one
    batched product. They start at zero: an untrained head is the identity and repeats the target's own prediction.

    Buffers:
        draft_ids: `[Vd]` int64, ascending; the target's ids that can be drafted.
    """

    draft_ids: Tensor

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        shape = (config.heads, config.blocks, config.hidden_size)
        self.weight = nn.Parameter(torch.zeros(*shape, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(shape))
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        if ids.shape != (config.draft_vocab_size,) or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
            raise ValueError(f"draft_ids must be {config.draft_vocab_size} ascending ids below {config.vocab_size}")
        self.register_buffer("draft_ids", ids.long())

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, H]` hidden states to `[K, T, H]` inputs of the (shared) LM head."""
        x = hidden.to(self.weight.dtype).expand(self.config.heads, *hidden.shape)
        for block in range(self.config.blocks):
            x = x + F.silu(torch.baddbmm(self.bias[:, block, None], x, self.weight[:, block].transpose(1, 2)))
        return x
