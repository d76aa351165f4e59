"""A small language model as the drafter: vanilla speculative decoding, a tree with one branch.

Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318); with the coupled rule it is the
drafter-invariant form of Daliri et al. 2024 (arXiv:2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treedec.drafter import Draft, Drafter, Drafting, DraftSession, DraftState, Outcome
from treedec.target import Target
from treedec.tree import TokenTree


class DraftModelDrafter(Drafter):
    """Drafts a chain of `depth` tokens with a causal LM that shares the target's vocabulary.

    Args:
        model: the draft model, or a `Target` around it (to compile it).
        depth: tokens per chain.

    Raises:
        ValueError: `depth` below 1; at the start of a generation, another vocabulary than the target's.
        UnsupportedModel: see `Target`.
    """

    name = "draft-model"

    def __init__(self, model: PreTrainedModel | Target, depth: int = 4):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.depth, self.max_nodes = depth, depth + 1
        self._target = model if isinstance(model, Target) else Target(model)

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        if self._target.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {self._target.vocab_size} tokens and the target one of "
                f"{target.vocab_size}: they must share it"
            )
        return _DraftModelSession(self._target, self.depth, batch, capacity)


class _DraftModelSession(DraftSession):
    """Keeps the draft model's keys and values of exactly the committed tokens, plus the chain in flight.

    Args:
        chunk: most tokens per pass while it catches up with the prompt.
    """

    def __init__(self, target: Target, depth: int, batch: int, capacity: int, chunk: int = 512):
        self._target, self._depth, self._chunk = target, depth, chunk
        # While catching up, the nodes of shorter rows are padding that needs slots too.
        self._cache = target.allocate(batch, capacity + chunk)
        self._text_lengths = [0] * batch

    def propose(self, state: DraftState) -> Draft:
        self._text_lengths = [0 if text is None else len(text) for text in state.texts]
        chains = [[] if text is None else text[-1:] for text in state.texts]
        depth = min(self._depth, max(state.room), state.budget - 1)
        if self._target.max_positions is not None:
            # The draft model's context may be shorter than the target's: beyond it, decoding goes on without drafts.
            depth = min(depth, self._target.max_positions - max(self._text_lengths) + 1)
        if depth < 1:
            return Draft(TokenTree.chains(chains))
        logits = self._catch_up(state.texts)
        drawn_from: list[Tensor] = []
        for level in range(depth):
            if level > 0:
                logits = self._feed([chain[-1:] for chain in chains])
            q = state.shape(logits).softmax(-1)  # [B, V]
            drawn_from.append(q)
            for row, token in enumerate(self._choose(q, level, state)):
                if state.texts[row] is not None:
                    chains[row].append(token)
        chains = [chain[: room + 1] for chain, room in zip(chains, state.room, strict=True)]
        tree = TokenTree.chains(chains)
        if state.drafting is not Drafting.SAMPLED:
            return Draft(tree)
        drawn_from.append(torch.zeros_like(drawn_from[0]))  # the last node has no children
        return Draft(tree, torch.stack(drawn_from, dim=1)[:, : tree.width])

    def observe(self, outcome: Outcome) -> None:
        # Before this round the cache held the text up to the root; of the chain it keeps what was accepted.
        kept = [max(text - 1, 0) + len(path) for text, path in zip(self._text_lengths, outcome.paths, strict=True)]
        self._cache.rollback(kept)

    def _choose(self, q: Tensor, level: int, state: DraftState) -> list[int]:
        if state.drafting is Drafting.COUPLED:
            return (q / state.noise(level + 1)).argmax(-1).tolist()
        if state.drafting is Drafting.SAMPLED:
            return [0 if text is None else state.chance.sample(q[row]) for row, text in enumerate(state.texts)]
        return q.argmax(-1).tolist()

    def _catch_up(self, texts: list[list[int] | None]) -> Tensor:
        """Cache every committed token that is not cached yet; `[B, V]` logits after each row's last one."""
        lengths = self._cache.lengths
        pending = [[] if text is None else text[done:] for text, done in zip(texts, lengths, strict=True)]
        width = max(len(row) for row in pending)  # at least 1: a root is never cached before its round
        # Padded on the left, so that one column holds the last token of every row and the head runs on it alone.
        ids = torch.tensor([[0] * (width - len(row)) + row for row in pending], device=self._target.device)
        missing = torch.tensor([width - len(row) for row in pending], device=ids.device)
        real = torch.arange(width, device=ids.device) >= missing[:, None]
        return self._target.prefill(self._cache, ids, real, self._chunk).logits[:, -1]

    def _feed(self, tokens: list[list[int]]) -> Tensor:
        """Cache one more token of each row (none of empty rows); `[B, V]` logits after it."""
        tree = TokenTree.chains(tokens)
        verified = self._target.verify(self._cache, tree)
        self._cache.commit(tree.counts[:, None] > 0)
        return verified.logits[:, 0]
