"""Attention for draft heads that are, or hold, a decoder layer of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from treedec.cache import SlotCache

_Output = TypeVar("_Output")


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings, named as in Llama, whose input has a width of its own.

    Args:
        inputs: width of what it reads.
        outputs: width of what it returns.
        heads: n_h, query heads.
        key_value_heads: n_kv, which divides n_h.
        head_dim: d.
        bias: q, k, v and o have a bias.
        norm_eps: queries and keys are normalised per head with this epsilon (Qwen3); None for not at all.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        heads: int,
        key_value_heads: int,
        head_dim: int,
        bias: bool = False,
        norm_eps: float | None = None,
    ):
        super().__init__()
        self.head_dim, self.normed = head_dim, norm_eps is not None
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, outputs, bias=bias)
        if norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, eps=norm_eps)
            self.k_norm = RMSNorm(head_dim, eps=norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None) -> Tensor:
        """Attend from N tokens to S keys.

        Args:
            x: `[B, N, inputs]`.
            rotation: cosines and sines of the tokens' positions, `[B, N, d]` each.
            mask: `[B, 1, N, S]` bool, True where a token attends to a key.
            cache: takes the new keys and values as those of its layer 0, and gives back all S; None if these N are all.

        Returns:
            `[B, N, outputs]`.
        """
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, heads, N, d]
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input: under autocast, torch has no fused kernel for two dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, tuple(self.normalized_shape), self.weight.to(x.dtype), self.eps)


class GroupNorm(nn.Module):
    """RMSNorm of each of some groups of equal width."""

    def __init__(self, size: int, groups: int, eps: float):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        return self.weight * F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)


class LayerCache(SlotCache):
    """Keys and values of the one layer of a draft head: of the committed text, and of a tree in flight.

    Args:
        batch: rows.
        capacity: most committed tokens per row.
        tree: most nodes of a tree.
        device: where the head is.
        chunk: most tokens of a row that are read in one pass.
        window: how many tokens each one attends to, itself included; None for all before it.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        tree: int,
        device: torch.device,
        chunk: int = 512,
        window: int | None = None,
    ):
        # While text is read, that of shorter rows is padded, which needs slots too.
        super().__init__(1, batch, capacity + max(chunk, tree), device)
        self._chunk, self._window = chunk, window

    def read(self, counts: list[int], width: int, layer: Callable[[slice, Tensor, Tensor], _Output]) -> _Output:
        """Read and commit the tokens that come next, padded on the left: one column holds the last one of every row.

        Args:
            counts: how many there are in each row, not 0 in all.
            width: N, to how many columns they are padded, at least the largest count.
            layer: `layer(columns, positions, mask)` runs the layer over some of the N columns, with positions `[B, n]`
                int64 and mask `[B, 1, n, S]` bool.

        Returns:
            What `layer` gave for the last columns; the very last one is of each row's last token, or of padding.
        """
        device = self.rows.device
        steps = torch.arange(width) - (width - torch.tensor(counts))[:, None]
        positions = (torch.tensor(self.lengths)[:, None] + steps).clamp(min=0)
        for start in range(0, width, self._chunk):
            columns = slice(start, start + self._chunk)
            here = steps[:, columns] >= 0
            every = torch.ones(here.shape[1], here.shape[1], dtype=torch.bool)
            # A padded column sees only itself: a row of the mask with nothing visible would make the softmax NaN.
            sees = every.tril() & here[:, None] | torch.eye(len(every), dtype=torch.bool)
            at = positions[:, columns].to(device)
            output = layer(columns, at, self.mask(at, sees.to(device)))
            self.commit(here)
        return output

    def mask(self, positions: Tensor, sees: Tensor, keep: int = 0) -> Tensor:
        """Make room for N tokens, and say which keys they attend to.

        Args:
            positions: `[B, N]` int64.
            sees: `[B, N, keep + N]` bool, which tokens in flight, these last, each one sees beside all committed ones.
            keep: how many tokens of the passes before are in flight, see `SlotCache.reserve`.

        Returns:
            `[B, 1, N, S]` bool, True where a token attends to a key.
        """
        self.reserve(positions, keep)
        tokens = positions.shape[1]
        allowed = self.visible[:, None, : self.high_water].repeat(1, tokens, 1)
        allowed.scatter_(2, self.flight[:, None].expand(-1, tokens, -1), sees)
        if self._window is not None:
            allowed &= positions[:, :, None] - self.positions[:, None, : self.high_water] < self._window
        return allowed[:, None]
