"""EAGLE heads: one decoder layer that continues the target's own features (EAGLE-1, Li et al. 2024, arXiv:2401.15077;
EAGLE-2, arXiv:2406.16858, which drafts with the same heads; EAGLE-3, Li et al. 2025, arXiv:2503.01840).

A feature is what the target made of a token. The head reads pairs, the feature of the token at t beside the embedding
of the token at t + 1, and says which token follows at t + 2. Its output stands in for the feature at t + 1, which is
not known yet, so that it can go on to draft from its own drafts.

Where the papers leave things open, it was read in the authors' code (SafeAILab/EAGLE at cb7e084: `model/cnets1.py` for
EAGLE-1 and 2, `model/cnets.py` for EAGLE-3) and in vllm-project/speculators at c05b95b (`models/eagle3/core.py` and
`model_definitions.py`) what the weights expect:

- The pair of the feature at t has position t (0-based); rotary embeddings being relative, that speculators trains from
  position 1 on makes no difference.
- EAGLE-1 and 2: `fc` reads the embedding first, then the feature. Nothing is normalised before attention and nothing
  after the layer: its output is a feature as the target's LM head reads them.
- EAGLE-3: `fc` fuses the features of the target's layers, of true ones only; a drafted step puts the layer's output in
  its place. What is fed back is the output before the final norm; after it in EAGLE-3.1 (`norm_output`). The residual
  around attention starts from the fused feature as it is, or normalised (`norm_before_residual`).
- Embeddings are rows of the table, also for targets that scale theirs (gemma).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from treedec.drafter import Drafter, DraftSession, DraftState
from treedec.growth import DynamicTree
from treedec.heads.attention import Attention, GroupNorm, LayerCache, RMSNorm
from treedec.heads.sequential import SequentialSession, TrimmedHead, draft_vocabulary, follow
from treedec.target import Target

#: Kinds of rotary embedding whose frequencies do not change with the length of the text: cached keys stay right.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: Options that only EAGLE-3 has.
_VERSION_3_ONLY = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "own_lm_head")


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shape of an EAGLE head; `asdict` of it is JSON.

    Attributes:
        hidden_size: H, the width of the draft layer.
        vocab_size: V, the rows of the target's LM head.
        draft_vocab_size: Vd, the number of tokens that can be drafted; equal to V when the vocabulary is not trimmed.
        target_hidden_size: Ht, the width of the target's hidden states; equal to H before version 3.
        intermediate_size: width of the layer's MLP.
        num_attention_heads, num_key_value_heads, head_dim: n_h, n_kv and d of its attention.
        version: 1 for EAGLE-1 and EAGLE-2, which have the same weights; 3 for EAGLE-3.
        features: EAGLE-3: the target's layers it reads, as indices into transformers' `hidden_states` (i is the input
            of decoder layer i). Before: none, it reads the LM-head input.
        rms_norm_eps: of all norms.
        rope_parameters: as in transformers' configurations.
        sliding_window: how many tokens each one attends to, itself included; None for all before it.
        attention_bias: q, k, v and o have a bias, as in a Llama configuration.
        qk_norm: queries and keys are normalised per attention head, as in Qwen3.
        fc_bias: `fc` has a bias.
        norm_before_residual: the residual around attention starts from the normalised feature.
        norm_before_fc: all of what `fc` reads is normalised together.
        fc_norm: it is normalised layer by layer.
        norm_output: the final norm is part of what is fed back.
        own_embeddings: the head has a table of embeddings, rather than using the target's.
        own_lm_head: it has an LM head, rather than using the target's.

    Raises:
        ValueError: these do not make a head; says which.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    version: int = 3
    features: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    sliding_window: int | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embeddings: bool = False
    own_lm_head: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists only
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "int" and (type(value) is not int or value < 1):
                raise ValueError(f"{option.name} must be an integer of at least 1, not {value!r}")
            if option.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{option.name} must be true or false, not {value!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {self.sliding_window}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} tokens exceeds the target's {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads: "
                "one must be a multiple of the other"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated, not {self.head_dim}")
        self._check_rope()
        self._check_version()

    @property
    def feature_size(self) -> int:
        """F, the width of the features it reads of every token: of one layer, or several side by side."""
        return max(len(self.features), 1) * self.target_hidden_size

    def _check_rope(self) -> None:
        kind = self.rope_parameters.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise ValueError(f"rope_type must be one of {', '.join(_ROPE_TYPES)}, not {kind!r}")
        if self.rope_parameters.get("partial_rotary_factor", 1) != 1:
            raise ValueError("a partial_rotary_factor other than 1 is not supported: all of a head is rotated")

    def _check_version(self) -> None:
        if self.version == 1:
            if given := [name for name in _VERSION_3_ONLY if getattr(self, name)]:
                raise ValueError(f"{', '.join(given)}: only a head of version 3 has that")
            if self.features:
                raise ValueError(f"a head of version 1 reads the LM-head input, not layers {self.features}")
            if self.hidden_size != self.target_hidden_size:
                raise ValueError(
                    f"a head of version 1 predicts features of the target: its hidden_size of {self.hidden_size} must "
                    f"be the target_hidden_size of {self.target_hidden_size}"
                )
        elif self.version == 3:
            if not self.features or min(self.features) < 0:
                raise ValueError(
                    f"features must name at least one layer for a head of version 3, from 0: {self.features}"
                )
            if self.norm_before_fc and self.fc_norm:
                raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them")
        else:
            raise ValueError(f"version must be 1 (EAGLE-1 and EAGLE-2) or 3 (EAGLE-3), not {self.version}")


class EagleHead(nn.Module):
    """The trainable part of EAGLE.

    Parameters (`.bias` where the configuration says so):
        `fc.weight`: `[H, 2H]`, version 3 `[H, F]` with F the `feature_size`.
        `layer.self_attn.{q,k,v,o}_proj.weight`: q `[n_h·d, W]`, k and v `[n_kv·d, W]`, o `[H, n_h·d]`; W is H, in
            version 3 2H.
        `layer.self_attn.{q,k}_norm.weight`: `[d]`, with `qk_norm`.
        `layer.mlp.{gate,up,down}_proj.weight`, `layer.post_attention_layernorm.weight`: as in Llama.
        `layer.{input_layernorm,hidden_norm}.weight`, `norm.weight`: `[H]`, version 3.
        `fc_norm.weight`: `[F]`, with `norm_before_fc` or `fc_norm` (those of the layers one after the other).
        `embed_tokens.weight`: `[V, H]`, with `own_embeddings`.
        `lm_head.weight`: `[Vd, H]`, with `own_lm_head`.

    Buffers:
        draft_ids: `[Vd]` int64, ascending; the target's ids that can be drafted.

    Args:
        config: its shape.
        draft_ids: None for the first Vd ids.

    Raises:
        ValueError: `draft_ids` are not Vd ascending ids below V.
    """

    draft_ids: Tensor

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size if config.version == 1 else config.feature_size, size, bias=config.fc_bias)
        self.layer = _Layer(config)
        if config.version == 3:
            self.norm = RMSNorm(size, eps=eps)
        if config.norm_before_fc or config.fc_norm:
            self.fc_norm = GroupNorm(config.feature_size, len(config.features) if config.fc_norm else 1, eps)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", draft_vocabulary(draft_ids, config.draft_vocab_size, config.vocab_size))
        # In a tuple, where `to(torch.bfloat16)` does not find it: frequencies must stay float32.
        self._rotary = (LlamaRotaryEmbedding(_llama_config(config)),)

    def fuse(self, features: Tensor) -> Tensor:
        """`[…, F]` true features of the target to `[…, H]` features as `forward` reads them."""
        if self.config.version == 1:
            return features
        if self.config.norm_before_fc or self.config.fc_norm:
            features = self.fc_norm(features)
        return self.fc(features)

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """What the layer makes of N pairs of a token's feature and the embedding of the token after it.

        Args:
            embedded: `[B, N, H]` embeddings of the tokens at t + 1.
            features: `[B, N, H]` features of the tokens at t: `fuse` of true ones, `feedback` of drafted ones.
            positions: `[B, N]` int64, t.
            mask: `[B, 1, N, S]` bool, which of the S keys in the cache, these N included, each pair attends to.
            cache: where keys and values go; None to attend to these N only, then S is N.

        Returns:
            `[B, N, H]`, to be taken further by `feedback` and `scored`.
        """
        if self.config.version == 1:
            features = self.fc(torch.cat((embedded, features), dim=-1))
        rotation = self._rotary[0].to(features.device)(features, positions)
        return self.layer(embedded, features, rotation, mask, cache)

    def feedback(self, output: Tensor) -> Tensor:
        """`[…, H]` outputs to what stands in for the features of the tokens at t + 1."""
        return self.norm(output) if self.config.norm_output else output

    def scored(self, output: Tensor) -> Tensor:
        """`[…, H]` outputs to what the LM head reads, to score the tokens at t + 2."""
        return output if self.config.version == 1 else self.norm(output)


class _Layer(nn.Module):
    """A Llama decoder layer. In version 3, attention reads the embedding beside the feature, both normalised."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.self_attn = Attention(
            inputs=size if config.version == 1 else 2 * size,
            outputs=size,
            heads=config.num_attention_heads,
            key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            norm_eps=eps if config.qk_norm else None,
        )
        self.mlp = LlamaMLP(_llama_config(config))
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        if config.version == 3:
            self.input_layernorm = RMSNorm(size, eps=eps)
            self.hidden_norm = RMSNorm(size, eps=eps)

    def forward(
        self, embedded: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None
    ) -> Tensor:
        x = residual = features
        if self.config.version == 3:
            normed = self.hidden_norm(features)
            x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
            residual = normed if self.config.norm_before_residual else features
        x = residual + self.self_attn(x, rotation, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def _llama_config(config: EagleConfig) -> LlamaConfig:
    """What transformers' parts of a Llama layer need to know."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_parameters=dict(config.rope_parameters),
    )


class EagleDrafter(Drafter):
    """Drafts a dynamic tree (EAGLE-2) with an EAGLE head.

    Args:
        head: a trained head, in the dtype and on the device of the target.
        model: the target, whose features it reads, and whose embeddings and LM head it uses where it has none.
        growth: the shape of the trees.

    Attributes:
        draft_ids: `[Vd]` int64, the target's ids that can be drafted; None for all of them.

    Raises:
        ValueError: the head does not fit the model.
    """

    def __init__(self, head: EagleHead, model: PreTrainedModel, growth: DynamicTree):
        config = head.config
        _check_fit(config, model)
        self.name = "eagle" if config.version == 1 else "eagle3"
        self.head, self.growth, self.max_nodes, self.features = head, growth, growth.nodes, config.features
        self.draft_ids = head.draft_ids if config.draft_vocab_size < config.vocab_size else None
        table = (head.embed_tokens.weight if config.own_embeddings else _embeddings(model)).detach()
        # An LM head of its own was trained to yield logits as they are, not to be scaled as the target's.
        lm_head = (
            head.lm_head
            if config.own_lm_head
            else TrimmedHead(model, config.hidden_size, config.vocab_size, self.draft_ids)
        )
        self.step = EagleStep(head, table, lm_head)

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        _check_fit(self.head.config, target.model)
        window = self.head.config.sliding_window
        cache = LayerCache(batch, capacity, self.growth.expanded, target.device, window=window)
        return _EagleSession(self, cache, target.compiled(self.step))


class EagleStep(nn.Module):
    """What is done for some pairs at once: the head, with what it reads of the target before and after.

    Args:
        head: the head.
        table: `[V, H]` embeddings.
        lm_head: scores `[…, Vd]` from what `EagleHead.scored` gives.
    """

    table: Tensor

    def __init__(self, head: EagleHead, table: Tensor, lm_head: nn.Module):
        super().__init__()
        self.head, self.lm_head = head, lm_head
        self.register_buffer("table", table, persistent=False)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache, known: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the layer over N pairs.

        Args:
            tokens: `[B, N]` int64, those at t + 1.
            features: of the tokens at t: true ones, `[B, N, F]`, or what was fed back, `[B, N, H]`.
            positions, mask, cache: see `EagleHead.forward`.
            known: features are true ones; then only the last pair is taken further.

        Returns:
            What to feed back `[B, N, H]` and logits `[B, N, Vd]`; of the last pair only if `known`.
        """
        if known:
            features = self.head.fuse(features)
        output = self.head(F.embedding(tokens, self.table), features, positions, mask, cache)
        if known:
            output = output[:, -1:]
        return self.head.feedback(output), self.lm_head(self.head.scored(output))


def _embeddings(model: PreTrainedModel) -> Tensor:
    """The target's table."""
    return cast(nn.Embedding, model.get_input_embeddings()).weight


def _check_fit(config: EagleConfig, model: PreTrainedModel) -> None:
    """Raise `ValueError` unless a head of that shape can draft for the model; names both shapes."""
    name, text = type(model).__name__, model.config.get_text_config()
    lm_head, table = model.get_output_embeddings().weight, _embeddings(model)
    if config.vocab_size != lm_head.shape[0]:
        raise ValueError(
            f"the head was trained for a vocabulary of {config.vocab_size} tokens, but {name}'s LM head has the shape "
            f"{tuple(lm_head.shape)}: they belong to different models"
        )
    if not config.own_lm_head and config.hidden_size != lm_head.shape[1]:
        raise ValueError(
            f"the head uses an LM head of shape {(config.vocab_size, config.hidden_size)}, but {name}'s is "
            f"{tuple(lm_head.shape)}"
        )
    if not config.own_embeddings and (config.hidden_size != table.shape[1] or config.vocab_size > table.shape[0]):
        raise ValueError(
            f"the head uses embeddings of shape {(config.vocab_size, config.hidden_size)}, but {name}'s are "
            f"{tuple(table.shape)}"
        )
    if config.features and config.target_hidden_size != text.hidden_size:
        raise ValueError(
            f"the head reads hidden states of width {config.target_hidden_size}, but {name}'s have {text.hidden_size}"
        )
    if config.features and max(config.features) > text.num_hidden_layers:
        raise ValueError(
            f"the head reads the hidden states {config.features}, but {name} has only those from 0 to "
            f"{text.num_hidden_layers}"
        )


class _EagleSession(SequentialSession):
    """Keeps the head's keys and values of exactly the committed pairs, all made from true features.

    Pairs of the tree in flight, made from drafted features, are never committed: once a token is, its true feature is
    known.

    Args:
        drafter: the head and what it shares with the target.
        cache: its keys and values, none so far.
        step: the drafter's step, or the same compiled.
    """

    def __init__(self, drafter: EagleDrafter, cache: LayerCache, step: Callable[..., tuple[Tensor, Tensor]]):
        super().__init__(drafter.growth, drafter.draft_ids)
        self._drafter, self._head, self._cache, self._step = drafter, drafter.head, cache, step
        # Compiled, a dimension of size 1 would be a kind of its own.
        self._least = 1 if step is drafter.step else 2

    def begin(self, state: DraftState) -> Tensor:
        counts, tokens, features = self._new_pairs(state)
        # The prompt is read by the plain step: compiled, a cache without any keys would be a kind of its own.
        step = self._step if any(self._cache.lengths) else self._drafter.step

        def layer(columns: slice, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return step(tokens[:, columns], features[:, columns], positions, mask, self._cache, True)

        # Of the nodes of the tree, the root first: what to feed back, how deep they are, which other ones they see.
        self._states, logits = self._cache.read(counts, tokens.shape[1], layer)  # [B, 1 + K, H]
        self._depths = torch.zeros_like(tokens[:, :1])  # [B, 1 + K]
        self._sees = torch.zeros(len(tokens), 1, 0, dtype=torch.bool, device=tokens.device)  # [B, 1 + K, K]
        self._lengths = torch.tensor(self._cache.lengths, device=tokens.device)[:, None]
        return logits[:, 0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        places, new, before = 1 + parents, tokens.shape[1], self._sees.shape[2]
        if new < self._least:
            tokens, places = tokens.repeat(1, self._least), places.repeat(1, self._least)
        depths = follow(self._depths, places)
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        sees = torch.cat([follow(self._sees, places), itself], dim=2)
        positions = self._lengths + depths
        mask = self._cache.mask(positions, sees, keep=before)
        states = follow(self._states, places)
        states, logits = self._step(tokens, states, positions, mask, self._cache, False)
        self._states = torch.cat([self._states, states[:, :new]], dim=1)
        self._depths = torch.cat([self._depths, depths[:, :new] + 1], dim=1)
        self._sees = torch.cat([F.pad(self._sees, (0, new)), sees[:, :new, : before + new]], dim=1)
        return logits[:, :new]

    def _new_pairs(self, state: DraftState) -> tuple[list[int], Tensor, Tensor]:
        """The pairs that the last round made known: how many per row; tokens `[B, N]`, features `[B, N, F]`.

        They are padded on the left.
        """
        lengths = self._cache.lengths
        new = [[] if text is None else text[1 + done :] for text, done in zip(state.texts, lengths, strict=True)]
        counts = [len(row) for row in new]
        width, weight = max(*counts, self._least), self._head.fc.weight
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in new], device=weight.device)
        features = weight.new_zeros(len(new), width, self._head.config.feature_size)
        for row, (count, given) in enumerate(zip(counts, state.features, strict=True)):
            if count == 0:
                continue
            if given is None or given.shape != (count, features.shape[2]):
                raise ValueError(
                    f"row {row}: an EAGLE head needs the features of the last {count} known tokens, "
                    f"{[count, features.shape[2]]}, not {None if given is None else list(given.shape)}"
                )
            features[row, width - count :] = given
        return counts, tokens, features
