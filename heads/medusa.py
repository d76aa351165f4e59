"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): head `k` guesses the token `k + 1` places after the one the target
predicts.

Every head reads the target's last hidden state, alone, through residual blocks `x + silu(W x + b)`, and shares the
target's LM head, by default restricted to a draft vocabulary of its most frequent tokens, or brings its own. One matrix
product drafts all depths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from treedec.drafter import Draft, Drafter, DraftSession, DraftState, score_table
from treedec.growth import BestFirst, GrowthPolicy
from treedec.heads.sequential import draft_vocabulary
from treedec.target import Target, finish_logits
from treedec.tree import TokenTree


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of a set of Medusa heads.

    Attributes:
        hidden_size: H, the width of the target's LM-head input.
        vocab_size: V, the rows of the target's LM head.
        heads: K, the number of heads: the deepest tree they can draft.
        blocks: residual blocks per head.
        draft_vocab_size: Vd, the number of tokens that can be drafted; equal to V when the vocabulary is not trimmed.
        own_lm_heads: every head has an LM head of its own instead of the target's, as the heads of the paper do.
    """

    hidden_size: int
    vocab_size: int
    heads: int = 4
    blocks: int = 1
    draft_vocab_size: int = 8192
    own_lm_heads: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.own_lm_heads, bool):
            raise ValueError(f"own_lm_heads must be true or false, not {self.own_lm_heads!r}")
        for name, value in asdict(self).items():
            if name != "own_lm_heads" and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} tokens exceeds the target's {self.vocab_size}"
            )


class MedusaHeads(nn.Module):
    """The trainable part: K stacks of residual blocks, evaluated together.

    Parameters are stacked over heads, `weight [K, L, H, H]` (output, input) and `bias [K, L, H]`, so that all heads are
    one batched product. They start at zero: an untrained head is the identity and repeats the target's own prediction.
    LM heads of their own are `lm_heads [K, Vd, H]`, and None where the target's is shared.

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
        self.lm_heads = (
            nn.Parameter(torch.zeros(config.heads, config.draft_vocab_size, config.hidden_size))
            if config.own_lm_heads
            else None
        )
        self.register_buffer("draft_ids", draft_vocabulary(draft_ids, config.draft_vocab_size, config.vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, H]` hidden states to `[K, T, H]` inputs of the LM head, shared or their own."""
        x = hidden.to(self.weight.dtype).expand(self.config.heads, *hidden.shape)
        for block in range(self.config.blocks):
            x = x + F.silu(torch.baddbmm(self.bias[:, block, None], x, self.weight[:, block].transpose(1, 2)))
        return x


class MedusaDrafter(Drafter):
    """Drafts a tree from Medusa heads: candidates per depth, combined by a growth policy.

    Args:
        heads: trained heads, in the dtype and on the device of the target.
        model: the target whose LM head they share, unless they have their own.
        growth: the shape of the trees.

    Attributes:
        draft_ids: `[Vd]` int64, the target's ids that can be drafted; None for all of them.

    Raises:
        ValueError: the heads do not fit the model, or the policy asks for a tree deeper than the heads or wider than
            the draft vocabulary.
    """

    name = "medusa"

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, growth: GrowthPolicy):
        config = heads.config
        head = model.get_output_embeddings()
        if head.weight.shape != (config.vocab_size, config.hidden_size):
            raise ValueError(
                f"the heads were trained for an LM head of shape {(config.vocab_size, config.hidden_size)}, "
                f"but {type(model).__name__}'s is {tuple(head.weight.shape)}: they belong to another model"
            )
        if growth.depth is not None and growth.depth > config.heads:
            raise ValueError(f"the tree is {growth.depth} levels deep, but there are only {config.heads} Medusa heads")
        if growth.branching > config.draft_vocab_size:
            raise ValueError(
                f"the tree takes {growth.branching} candidates a level, but the draft vocabulary has only "
                f"{config.draft_vocab_size} tokens"
            )
        self.heads, self.growth, self.max_nodes = heads, growth, growth.nodes
        self._target_config = model.config.get_text_config()
        self.draft_ids = heads.draft_ids if config.draft_vocab_size < config.vocab_size else None
        if heads.lm_heads is None:
            # A copy of the trimmed rows: gathering them anew in every round would cost as much as the product itself.
            self._weight = head.weight.detach() if self.draft_ids is None else head.weight.detach()[heads.draft_ids]
            bias = getattr(head, "bias", None)
            self._bias = None if bias is None else bias.detach()[heads.draft_ids]

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        if (target.vocab_size, target.hidden_size) != (self.heads.config.vocab_size, self.heads.config.hidden_size):
            raise ValueError("these Medusa heads were loaded for another model")
        return _MedusaSession(self)

    @torch.no_grad()
    def logits(self, hidden: Tensor, depths: int) -> Tensor:
        """`[T, H]` hidden states to `[depths, T, Vd]` logits of the first heads, over `heads.draft_ids`."""
        x = self.heads(hidden)[:depths]  # [depths, T, H]
        if self.heads.lm_heads is None:
            return finish_logits(F.linear(x, self._weight, self._bias), self._target_config)
        # LM heads of their own were trained to yield logits as they are.
        return torch.bmm(x, self.heads.lm_heads[:depths].transpose(1, 2))

    @torch.no_grad()
    def candidates(self, state: DraftState) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """Per row and depth, the best candidates and their scores, best first: `[B][K][branching]` ids and scores."""
        depths = min(self.heads.config.heads, max(state.room))
        if depths == 0:
            return [[] for _ in state.room], [[] for _ in state.room]
        q = state.shape(self.logits(state.hidden, depths)).softmax(-1)
        scores = torch.stack([state.odds(q[depth], depth + 1, self.draft_ids) for depth in range(depths)])
        top, index = scores.topk(self.growth.branching, dim=-1)
        ids = index if self.draft_ids is None else self.draft_ids[index]
        return ids.transpose(0, 1).tolist(), top.transpose(0, 1).tolist()


class _MedusaSession(DraftSession):
    """Medusa heads keep nothing between rounds: all they need is the target's last hidden state."""

    def __init__(self, drafter: MedusaDrafter):
        self._drafter = drafter

    def propose(self, state: DraftState) -> Draft:
        ids, scores = self._drafter.candidates(state)
        growth = self._drafter.growth
        rows: list[tuple[list[int], list[int]]] = []
        values: list[list[float]] = []
        for text, room, row_ids, row_scores in zip(state.texts, state.room, ids, scores, strict=True):
            candidates = list(zip(row_ids, row_scores, strict=True))[:room]
            rows.append(([], []) if text is None else growth.grow(text[-1], candidates, state.budget))
            values.append(_values(*rows[-1], candidates))
        draft = Draft(TokenTree.from_rows(rows), scores=score_table(values))
        return draft.thinned(state) if isinstance(growth, BestFirst) and growth.thins else draft


def _values(tokens: list[int], parents: list[int], candidates: list[tuple[list[int], list[float]]]) -> list[float]:
    """Of every node the product of the scores along its path; what a policy adds of its own is worth nothing."""
    depths, values = [0] * len(tokens), [1.0] * len(tokens)
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            offered = candidates[depths[parent]] if depths[parent] < len(candidates) else ([], [])
            values[node] = values[parent] * dict(zip(*offered, strict=True)).get(token, 0.0)
    return values
