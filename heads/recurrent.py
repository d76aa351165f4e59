"""A recurrent head: one small cell that reads the drafted tokens one by one, in the spirit of ReDrafter (Cheng et al.
2024, arXiv:2403.09919).

Its state begins as the target's hidden states at the position that predicted the root; every token, the root first,
moves it on by its embedding, which is the target's. The same cell serves all depths, so the depth of a tree has no
limit, and what it says goes through the target's LM head, by default restricted to a draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from treedec.drafter import Drafter, DraftSession, DraftState
from treedec.growth import DynamicTree
from treedec.heads.attention import GroupNorm, RMSNorm
from treedec.heads.sequential import SequentialSession, TrimmedHead, draft_vocabulary, embedding_table, follow
from treedec.target import Target


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent head.

    Attributes:
        hidden_size: H, the width of the target's hidden states and token embeddings.
        vocab_size: V, the rows of the target's LM head.
        state_size: S, the width of the state.
        inner_size: I, the width within the cell.
        draft_vocab_size: Vd, the number of tokens that can be drafted; equal to V when the vocabulary is not trimmed.
        features: which hidden states the state begins from besides the LM-head input: indices as in transformers'
            `hidden_states`.
        norm_features: each of these hidden states is normalised by itself: their sizes may differ by orders of
            magnitude.
    """

    hidden_size: int
    vocab_size: int
    state_size: int = 512
    inner_size: int = 1024
    draft_vocab_size: int = 8192
    features: tuple[int, ...] = ()
    norm_features: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists only
        if not isinstance(self.norm_features, bool):
            raise ValueError(f"norm_features must be true or false, not {self.norm_features!r}")
        sizes = {name: value for name, value in asdict(self).items() if name not in ("features", "norm_features")}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} tokens exceeds the target's {self.vocab_size}"
            )


class RecurrentHead(nn.Module):
    """The trainable part.

    With `x = [norm(s), norm(e)]` of the state s and the embedding e of the next token, the cell is a gated residual
    block, `s + down(silu(gate x) * up x)`.

    Buffers:
        draft_ids: `[Vd]` int64, ascending; the target's ids that can be drafted.
    """

    draft_ids: Tensor

    def __init__(self, config: RecurrentConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        hidden, state, inner = config.hidden_size, config.state_size, config.inner_size
        levels = 1 + len(config.features)
        self.feature_norm = GroupNorm(levels * hidden, levels, eps=1e-6) if config.norm_features else nn.Identity()
        self.first = nn.Linear(levels * hidden, state, bias=False)
        self.state_norm = RMSNorm(state, eps=1e-6)
        self.embedding_norm = RMSNorm(hidden, eps=1e-6)
        self.gate = nn.Linear(state + hidden, inner, bias=False)
        self.up = nn.Linear(state + hidden, inner, bias=False)
        self.down = nn.Linear(inner, state, bias=False)
        self.norm = RMSNorm(state, eps=1e-6)
        self.project = nn.Identity() if state == hidden else nn.Linear(state, hidden, bias=False)
        self.register_buffer("draft_ids", draft_vocabulary(draft_ids, config.draft_vocab_size, config.vocab_size))

    def begin(self, features: Tensor) -> Tensor:
        """`[*, (1 + F) H]`, the LM-head input and the other features at one position, to the `[*, S]` state there."""
        return self.first(self.feature_norm(features.to(self.first.weight.dtype)))

    def step(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """`[*, S]` states after one more token, given its `[*, H]` embedding."""
        x = torch.cat([self.state_norm(states), self.embedding_norm(embeddings.to(states.dtype))], dim=-1)
        return states + self.down(F.silu(self.gate(x)) * self.up(x))

    def output(self, states: Tensor) -> Tensor:
        """`[*, S]` states to `[*, H]` inputs of the (shared) LM head, for the token that follows."""
        return self.project(self.norm(states))

    def forward(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Read known texts, as in training.

        Args:
            features: `[T, (1 + F) H]`, see `begin`.
            embeddings: `[D, T, H]` of the D tokens that follow each of the T positions; the first is the root.

        Returns:
            `[D, T, H]` inputs of the LM head after each of them.
        """
        states, outputs = self.begin(features), []
        for embedding in embeddings:
            states = self.step(states, embedding)
            outputs.append(self.output(states))
        return torch.stack(outputs)


class RecurrentDrafter(Drafter):
    """Drafts trees with a recurrent head.

    Args:
        head: a trained head, in the dtype and on the device of the target.
        model: the target whose embeddings and LM head it shares.
        growth: the shape of the trees.

    Raises:
        ValueError: the head does not fit the model.
    """

    name = "recurrent"

    def __init__(self, head: RecurrentHead, model: PreTrainedModel, growth: DynamicTree):
        config = head.config
        layers = model.config.get_text_config().num_hidden_layers
        for layer in config.features:
            if not 0 <= layer < layers:
                raise ValueError(f"the head reads the input of decoder layer {layer}, but the target has {layers}")
        self.head, self.growth, self.max_nodes = head, growth, growth.nodes
        # The LM-head input at the position in question is in every state; nothing else needs to be gathered for it.
        self.features = config.features or None
        self.draft_ids = head.draft_ids if config.draft_vocab_size < config.vocab_size else None
        self.lm_head = TrimmedHead(model, config.hidden_size, config.vocab_size, self.draft_ids)
        self.embeddings = embedding_table(model, config.hidden_size)

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        if (target.vocab_size, target.hidden_size) != (self.head.config.vocab_size, self.head.config.hidden_size):
            raise ValueError("this recurrent head was loaded for another model")
        return _RecurrentSession(self)


class _RecurrentSession(SequentialSession):
    """Keeps the states of the tree in the making; nothing outlives a round."""

    def __init__(self, drafter: RecurrentDrafter):
        super().__init__(drafter.growth, drafter.draft_ids)
        self._drafter = drafter
        self._states = torch.empty(0)  # `[B, 1 + E, S]` after the root and all nodes expanded so far

    def begin(self, state: DraftState) -> Tensor:
        hidden = state.hidden
        if self._drafter.features is not None:
            # Those of the token before the root are the last to become known.
            width = hidden.shape[1] * len(self._drafter.features)
            last = [hidden.new_zeros(width) if new is None else new[-1] for new in state.features]
            hidden = torch.cat([hidden, torch.stack(last)], dim=-1)
        roots = torch.tensor([0 if text is None else text[-1] for text in state.texts], device=hidden.device)
        head = self._drafter.head
        self._states = head.step(head.begin(hidden), self._drafter.embeddings[roots])[:, None]
        return self._drafter.lm_head(head.output(self._states[:, 0]))

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        head = self._drafter.head
        states = head.step(follow(self._states, parents + 1), self._drafter.embeddings[tokens])
        self._states = torch.cat([self._states, states], dim=1)
        return self._drafter.lm_head(head.output(states))
