"""Drafting level by level, for drafters whose candidates depend on the path that leads to them (Hydra, recurrent heads,
EAGLE).

Such a drafter says what follows the root, then what follows each of a few nodes, and so on; `DynamicTree` decides which
nodes it is asked about and which of its candidates become the tree.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from treedec.drafter import Draft, DraftSession, DraftState
from treedec.growth import DynamicTree, Scored
from treedec.target import finish_logits


class SequentialSession(DraftSession):
    """Grows a tree level by level.

    Candidates are the drafter's most probable tokens; under `Drafting.COUPLED` those most likely to win the target's
    noise. They are chosen deterministically, so that any tree is lossless under every rule.

    Args:
        growth: the shape of the trees.
        draft_ids: `[Vd]` int64, the target's ids of the draft vocabulary; None for all.
    """

    def __init__(self, growth: DynamicTree, draft_ids: Tensor | None):
        self._growth, self._draft_ids = growth, draft_ids

    @abstractmethod
    def begin(self, state: DraftState) -> Tensor:
        """Take in what the last round committed, and score what follows each root.

        It is called in every round, also where there is no room for a tree.

        Returns:
            `[B, Vd]` logits; of finished rows anything finite.
        """

    @abstractmethod
    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Score what follows n new nodes of each row; n varies from level to level.

        Args:
            tokens: `[B, n]` int64, their tokens as ids of the target.
            parents: `[B, n]` int64, the place of each one's parent among all nodes expanded so far in this tree, in the
                order in which they were given; −1 for the root.

        Returns:
            `[B, n, Vd]` logits.
        """

    @torch.no_grad()
    def propose(self, state: DraftState) -> Draft:
        roots = [None if text is None else text[-1] for text in state.texts]
        first = self._best(state, 1, self.begin(state)[:, None])

        def expand(level: int, tokens: Tensor, parents: Tensor) -> Scored:
            return self._best(state, level, self.expand(tokens, parents))

        tree, scores = self._growth.grow(roots, first, expand, state.room, state.budget, state.costs)
        draft = Draft(tree, scores=scores)
        return draft.thinned(state) if self._growth.thins else draft

    def _best(self, state: DraftState, level: int, logits: Tensor) -> Scored:
        """The best candidates at `level` below the root: `[B, n, Vd]` logits to `[B, n, k]` ids and scores."""
        odds = state.odds(state.shape(logits).softmax(-1), level, self._draft_ids)
        top, index = odds.topk(min(self._growth.branching, odds.shape[-1]), dim=-1)
        return (index if self._draft_ids is None else self._draft_ids[index]), top


class TrimmedHead(nn.Module):
    """The target's LM head, restricted to the draft vocabulary.

    Args:
        model: the target.
        hidden_size, vocab_size: what the drafter was trained for.
        draft_ids: `[Vd]` int64, the target's ids of the draft vocabulary; None for all.

    Raises:
        ValueError: the LM head has another shape.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, model: PreTrainedModel, hidden_size: int, vocab_size: int, draft_ids: Tensor | None):
        super().__init__()
        head = model.get_output_embeddings()
        if head.weight.shape != (vocab_size, hidden_size):
            raise ValueError(
                f"the heads were trained for an LM head of shape {(vocab_size, hidden_size)}, "
                f"but {type(model).__name__}'s is {tuple(head.weight.shape)}: they belong to another model"
            )
        rows = slice(None) if draft_ids is None else draft_ids
        # Of a trimmed vocabulary it is a copy: to gather the rows in every round would cost as much as the product.
        self.register_buffer("weight", head.weight.detach()[rows], persistent=False)
        bias = getattr(head, "bias", None)
        self.register_buffer("bias", None if bias is None else bias.detach()[rows], persistent=False)
        self._config = model.config.get_text_config()

    def forward(self, hidden: Tensor) -> Tensor:
        """`[*, H]` inputs of the LM head to `[*, Vd]` logits, scaled and capped as the target's own."""
        return finish_logits(F.linear(hidden, self.weight, self.bias), self._config)


def draft_vocabulary(draft_ids: Tensor | None, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """`[Vd]` int64: the ids, or the first ones if there are none given.

    Raises:
        ValueError: they are not that many ascending ids of the vocabulary.
    """
    ids = torch.arange(draft_vocab_size) if draft_ids is None else draft_ids
    ascending = ids.shape == (draft_vocab_size,) and not bool((ids[1:] <= ids[:-1]).any())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(f"draft_ids must be {draft_vocab_size} ascending ids below {vocab_size}")
    return ids.long()


def embedding_table(model: PreTrainedModel, hidden_size: int) -> Tensor:
    """`[V, H]`, the target's token embeddings as they are stored; some targets scale them when they read them.

    Raises:
        ValueError: they are not `hidden_size` wide.
    """
    table = cast(Tensor, model.get_input_embeddings().weight).detach()
    if table.shape[-1] != hidden_size:
        raise ValueError(
            f"the heads read embeddings of {hidden_size} numbers, but {type(model).__name__}'s have "
            f"{table.shape[-1]}: use heads that do not read them, such as Medusa's"
        )
    return table


def follow(states: Tensor, places: Tensor) -> Tensor:
    """`[B, E, *]` of E nodes to `[B, n, *]` of those at `places` `[B, n]`."""
    return states[torch.arange(len(states), device=states.device)[:, None], places]
