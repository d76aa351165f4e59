"""Hydra heads (Ankner et al. 2024, arXiv:2402.05109): Medusa heads that also see the tokens chosen before them.

Head `i` guesses the token `i + 1` places after the root. Through residual blocks it reads the target's last hidden
state and, concatenated to it, the embeddings of the root and of the `i` tokens drafted after it; so its candidates
depend on the path that leads to them. In Hydra++ the hidden state first passes through prefix attention, a decoder
layer of the heads' own that reads the hidden states of the whole text so far.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from treedec.cache import SlotCache
from treedec.drafter import Drafter, DraftSession, DraftState
from treedec.growth import DynamicTree
from treedec.heads.attention import Attention, LayerCache, RMSNorm
from treedec.heads.sequential import SequentialSession, TrimmedHead, draft_vocabulary, embedding_table, follow
from treedec.target import Target, finish_logits

_CHUNK = 512  # columns of a prompt in one pass of the prefix layer


@dataclass(frozen=True)
class PrefixConfig:
    """Shape of the prefix attention, a Llama decoder layer.

    Attributes:
        intermediate_size: width of its MLP.
        num_attention_heads, num_key_value_heads, head_dim: n_h, n_kv and d of its attention.
        rms_norm_eps: of its norms.
        rope_theta: base of its rotary embeddings.
    """

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"key-value heads must divide the attention heads, and head_dim must be even to be rotated: {self}"
            )


@dataclass(frozen=True)
class HydraConfig:
    """Shape of a set of Hydra heads.

    Attributes:
        hidden_size: H, the width of the target's LM-head input and token embeddings.
        vocab_size: V, the rows of the target's LM head.
        heads: K, the number of heads: the deepest tree they can draft.
        blocks: L, residual blocks per head.
        draft_vocab_size: Vd, the number of tokens that can be drafted; equal to V when the vocabulary is not trimmed.
        own_lm_heads: every head has an LM head of its own, as in the original; otherwise all share the target's.
        prefix: the prefix attention of Hydra++; None for none.
    """

    hidden_size: int
    vocab_size: int
    heads: int = 4
    blocks: int = 1
    draft_vocab_size: int = 8192
    own_lm_heads: bool = False
    prefix: PrefixConfig | None = None

    def __post_init__(self) -> None:
        prefix: Any = self.prefix
        if isinstance(prefix, dict):  # as it comes from JSON
            object.__setattr__(self, "prefix", PrefixConfig(**prefix))
        if not isinstance(self.own_lm_heads, bool):
            raise ValueError(f"own_lm_heads must be true or false, not {self.own_lm_heads!r}")
        for name, value in asdict(self).items():
            if name not in ("own_lm_heads", "prefix") and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} tokens exceeds the target's {self.vocab_size}"
            )


class _Block(nn.Module):
    """A residual block, `residual(x) + silu(linear(x))`, which the first block of a head also narrows to H.

    It starts as the identity on the first H numbers, the hidden state.
    """

    def __init__(self, width: int, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(width, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.residual: nn.Module = nn.Identity()
        if width != hidden_size:
            self.residual = nn.Linear(width, hidden_size)
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))


class PrefixLayer(nn.Module):
    """Prefix attention: a Llama decoder layer over LM-head inputs, and the norm that follows the last layer.

    Args:
        config: its shape.
        hidden_size: H.
    """

    def __init__(self, config: PrefixConfig, hidden_size: int):
        super().__init__()
        llama = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.input_layernorm = RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(hidden_size, hidden_size, heads, key_value_heads, config.head_dim)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(llama)
        self.norm = RMSNorm(hidden_size, eps=config.rms_norm_eps)
        # Not a submodule: a change of dtype would round its frequencies.
        self._rotary = (LlamaRotaryEmbedding(llama),)

    def forward(self, hidden: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache | None = None) -> Tensor:
        """What takes the place of the hidden states.

        Args:
            hidden: `[B, N, H]` inputs of the target's LM head.
            positions: `[B, N]` int64.
            mask: `[B, 1, N, S]` bool, which keys each one sees.
            cache: keys and values of the text before; None if these N are all of it.

        Returns:
            `[B, N, H]`.
        """
        rotation = self._rotary[0].to(hidden.device)(hidden, positions)
        x = hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask, cache)
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


class HydraHeads(nn.Module):
    """The trainable part: per head a stack of residual blocks and, if they are its own, an LM head; in Hydra++ also the
    prefix attention before all of them.

    Untrained heads that share the target's LM head and have no prefix attention repeat the target's own prediction.

    Buffers:
        draft_ids: `[Vd]` int64, ascending; the target's ids that can be drafted.
    """

    draft_ids: Tensor

    def __init__(self, config: HydraConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.prefix = None if config.prefix is None else PrefixLayer(config.prefix, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _Block((head + 2) * hidden, hidden), *(_Block(hidden, hidden) for _ in range(config.blocks - 1))
            )
            for head in range(config.heads)
        )
        own = config.heads if config.own_lm_heads else 0
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, config.draft_vocab_size) for _ in range(own))
        self.register_buffer("draft_ids", draft_vocabulary(draft_ids, config.draft_vocab_size, config.vocab_size))

    def head(self, index: int, inputs: Tensor) -> Tensor:
        """What one head makes of its path.

        Args:
            index: which head.
            inputs: `[*, (index + 2) H]`, the hidden state that predicted the root (or what the prefix attention made of
                it), then the embeddings of the root and of the `index` tokens below it.

        Returns:
            `[*, H]` inputs of its LM head.
        """
        return self.blocks[index](inputs.to(next(self.blocks[index].parameters()).dtype))

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Read known texts, as in training.

        Args:
            hidden: `[T, H]` inputs of the target's LM head, or what the prefix attention made of them.
            embeddings: `[K, T, H]` of the K tokens that follow each of the T positions; the first is the root.

        Returns:
            `[K, T, H]` inputs of the LM head of each head.
        """
        inputs, outputs = hidden, []
        for index, embedding in enumerate(embeddings):
            inputs = torch.cat([inputs, embedding.to(hidden.dtype)], dim=-1)
            outputs.append(self.head(index, inputs))
        return torch.stack(outputs)


class HydraDrafter(Drafter):
    """Drafts trees with Hydra heads.

    Args:
        heads: trained heads, in the dtype and on the device of the target.
        model: the target whose embeddings and, unless they have their own, LM head they share.
        growth: the shape of the trees.

    Raises:
        ValueError: the heads do not fit the model, or the tree is to be deeper than there are heads.
    """

    name = "hydra"

    def __init__(self, heads: HydraHeads, model: PreTrainedModel, growth: DynamicTree):
        config = heads.config
        if growth.depth > config.heads:
            raise ValueError(f"the tree is {growth.depth} levels deep, but there are only {config.heads} Hydra heads")
        self.heads, self.growth, self.max_nodes = heads, growth, growth.nodes
        self.features = None if config.prefix is None else ()
        self.draft_ids = heads.draft_ids if config.draft_vocab_size < config.vocab_size else None
        self.embeddings = embedding_table(model, config.hidden_size)
        # Made also for heads with their own, since it checks that they belong to this target.
        self._lm_head = TrimmedHead(model, config.hidden_size, config.vocab_size, self.draft_ids)
        self._target_config = model.config.get_text_config()

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        if (target.vocab_size, target.hidden_size) != (self.heads.config.vocab_size, self.heads.config.hidden_size):
            raise ValueError("these Hydra heads were loaded for another model")
        prefix = self.heads.prefix
        reader = None if prefix is None else _Prefix(prefix, batch, capacity, target.device, _CHUNK)
        return _HydraSession(self, reader)

    def logits(self, index: int, inputs: Tensor) -> Tensor:
        """`[*, (index + 2) H]` inputs of one head (see `HydraHeads.head`) to `[*, Vd]` logits."""
        hidden = self.heads.head(index, inputs)
        if self.heads.config.own_lm_heads:
            return finish_logits(self.heads.lm_heads[index](hidden), self._target_config)
        return self._lm_head(hidden)


class _Prefix:
    """The prefix attention over the texts of one generation: keys and values of exactly the tokens it was shown.

    Args:
        layer: the prefix attention.
        batch: rows.
        capacity: most tokens per row.
        device: where the target is.
        chunk: most columns in one pass.
    """

    def __init__(self, layer: PrefixLayer, batch: int, capacity: int, device: torch.device, chunk: int):
        self._layer, self._cache = layer, LayerCache(batch, capacity, 0, device, chunk)

    def read(self, features: list[Tensor | None], like: Tensor) -> Tensor:
        """`[B, H]`, what it makes of each row's last token.

        Args:
            features: per row, `[n, H]` LM-head inputs of the tokens that follow those it was shown; None for none.
            like: `[B, H]`, for the dtype and the device.
        """
        counts = [0 if new is None else len(new) for new in features]
        hidden = like.new_zeros(len(features), max(counts), like.shape[1])
        for row, new in enumerate(features):
            if new is not None:
                hidden[row, hidden.shape[1] - len(new) :] = new

        def layer(columns: slice, positions: Tensor, mask: Tensor) -> Tensor:
            return self._layer(hidden[:, columns], positions, mask, self._cache)

        return self._cache.read(counts, hidden.shape[1], layer)[:, -1]


class _HydraSession(SequentialSession):
    """Keeps the paths of the level in the making, and what the prefix attention has read.

    Else the heads need only the target's last hidden state.
    """

    def __init__(self, drafter: HydraDrafter, prefix: _Prefix | None):
        super().__init__(drafter.growth, drafter.draft_ids)
        self._drafter, self._prefix = drafter, prefix
        self._level = 0  # how many levels have been expanded
        self._inputs = torch.empty(0)  # `[B, n, (level + 2) H]` of the nodes of the last one
        self._seen = -1  # the place of the first of them; the root's is −1

    def begin(self, state: DraftState) -> Tensor:
        hidden = state.hidden if self._prefix is None else self._prefix.read(state.features, state.hidden)
        roots = torch.tensor([0 if text is None else text[-1] for text in state.texts], device=hidden.device)
        self._level, self._seen = 0, -1
        self._inputs = torch.cat([hidden, self._drafter.embeddings[roots]], dim=-1)[:, None]
        return self._drafter.logits(0, self._inputs)[:, 0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        # Parents are nodes of the level before.
        paths = follow(self._inputs, parents - self._seen)
        self._level, self._seen = self._level + 1, self._seen + self._inputs.shape[1]
        self._inputs = torch.cat([paths, self._drafter.embeddings[tokens]], dim=-1)
        return self._drafter.logits(self._level, self._inputs)
