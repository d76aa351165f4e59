"""A small language model as the drafter: vanilla speculative decoding, a tree with one branch.

Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318); with the coupled rule it is the
drafter-invariant form of Daliri et al. 2024 (arXiv:2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from treedec.drafter import Draft, Drafter, Drafting, DraftSession, DraftState, Outcome
from treedec.target import Target
from treedec.tree import TokenTree


class DraftModelDrafter(Drafter):
    """Drafts a chain of `depth` tokens with a causal LM that shares the target's tokenizer.

    LM heads of one family may have different numbers of rows, because their makers padded the same vocabulary
    differently. Neither the rows nor the configurations tell padding from another vocabulary: so heads of different
    sizes are refused, unless the caller says that the tokenizer is the same. Then token i is token i in both; tokens
    that the target does not have are never drafted; and those that only the target has get no probability from the
    draft model, which reads its token 0 in their place. The output is exact even if the caller is wrong, but then the
    drafts are worthless.

    Args:
        model: the draft model, or a `Target` around it (to compile it).
        depth: tokens per chain.
        same_tokenizer: the caller's word that both models use one tokenizer and their LM heads differ, if at all, in
            rows beyond its vocabulary.

    Raises:
        ValueError: `depth` below 1; at the start of a generation, an LM head with another number of rows than the
            target's without `same_tokenizer`.
        UnsupportedModel: see `Target`.
    """

    name = "draft-model"

    def __init__(self, model: PreTrainedModel | Target, depth: int = 4, same_tokenizer: bool = False):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.depth, self.max_nodes, self.same_tokenizer = depth, depth + 1, same_tokenizer
        self._target = model if isinstance(model, Target) else Target(model)

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        if self._target.vocab_size != target.vocab_size and not self.same_tokenizer:
            raise ValueError(
                f"the draft model has a vocabulary of {self._target.vocab_size} tokens and the target one of "
                f"{target.vocab_size}: they must share it. If they have the same tokenizer and only the padding of "
                "their LM heads differs, say so: DraftModelDrafter(model, same_tokenizer=True)"
            )
        return _DraftModelSession(self._target, target.vocab_size, self.depth, batch, capacity)


class _DraftModelSession(DraftSession):
    """Keeps the draft model's keys and values of exactly the committed tokens, plus the chain in flight.

    Args:
        target: the draft model.
        vocab_size: V, the rows of the LM head of the model it drafts for.
        chunk: most tokens per pass while it catches up with the prompt.
    """

    def __init__(self, target: Target, vocab_size: int, depth: int, batch: int, capacity: int, chunk: int = 512):
        self._target, self._vocab_size, self._depth, self._chunk = target, vocab_size, depth, chunk
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
        odds: list[Tensor] = []  # [B] for each level
        for level in range(depth):
            if level > 0:
                logits = self._feed([chain[-1:] for chain in chains])
            q = state.shape(self._fitted(logits)).softmax(-1)  # [B, V]
            drawn_from.append(q)
            tokens, chosen = self._choose(q, level, state)
            odds.append(chosen)
            for row, token in enumerate(tokens):
                if state.texts[row] is not None:
                    chains[row].append(token)
        chains = [chain[: room + 1] for chain, room in zip(chains, state.room, strict=True)]
        tree = TokenTree.chains(chains)
        scores = torch.stack([torch.ones_like(odds[0]), *odds], dim=1).cumprod(dim=1)[:, : tree.width].cpu()
        if state.drafting is not Drafting.SAMPLED:
            return Draft(tree, scores=scores)
        drawn_from.append(torch.zeros_like(drawn_from[0]))  # the last node has no children
        return Draft(tree, torch.stack(drawn_from, dim=1)[:, : tree.width], scores=scores)

    def observe(self, outcome: Outcome) -> None:
        # Before this round the cache held the text up to the root; of the chain it keeps what was accepted. If the text
        # goes on differently from there, by a token or, when other drafters took part, by several, that is caught up
        # with in the next round.
        kept = [max(text - 1, 0) + len(path) for text, path in zip(self._text_lengths, outcome.paths, strict=True)]
        self._cache.rollback(kept)

    def _choose(self, q: Tensor, level: int, state: DraftState) -> tuple[list[int], Tensor]:
        """A token for each row from `[B, V]` probabilities, and `[B]` estimates that the target chooses it too."""
        odds = state.odds(q, level + 1)
        if state.drafting is Drafting.SAMPLED:
            tokens = [0 if text is None else state.chance.sample(q[row]) for row, text in enumerate(state.texts)]
        else:
            tokens = odds.argmax(-1).tolist()
        return tokens, odds[range(len(tokens)), tokens]

    def _fitted(self, logits: Tensor) -> Tensor:
        """`[B, ·]` logits of the draft model over the target's V tokens: cut, or padded with impossible ones."""
        missing = self._vocab_size - logits.shape[-1]
        return functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _catch_up(self, texts: list[list[int] | None]) -> Tensor:
        """Cache every committed token that is not cached yet; `[B, V]` logits after each row's last one."""
        lengths = self._cache.lengths
        pending = [[] if text is None else text[done:] for text, done in zip(texts, lengths, strict=True)]
        width = max(len(row) for row in pending)  # at least 1: a root is never cached before its round
        if width <= min(self._depth + 1, self._chunk):
            # As in most rounds but the first: a compiled draft model has compiled passes over trees, not over prompts.
            return self._feed(pending)
        # Padded on the left, so that one column holds the last token of every row and the head runs on it alone.
        ids = torch.tensor([[0] * (width - len(row)) + row for row in pending], device=self._target.device)
        missing = torch.tensor([width - len(row) for row in pending], device=ids.device)
        ids = ids.where(ids < self._target.vocab_size, 0)  # the target may have tokens that the draft model has not
        real = torch.arange(width, device=ids.device) >= missing[:, None]
        return self._target.prefill(self._cache, ids, real, self._chunk).logits[:, -1]

    def _feed(self, tokens: list[list[int]]) -> Tensor:
        """Cache a few more tokens of each row (none of empty rows); `[B, V]` logits after each row's last one."""
        known = self._target.vocab_size  # the target may have tokens that the draft model has not
        tree = TokenTree.chains([[token if token < known else 0 for token in row] for row in tokens])
        verified = self._target.verify(self._cache, tree)
        self._cache.commit(torch.arange(tree.width, device="cpu") < tree.counts[:, None])
        return verified.logits[range(len(tokens)), (tree.counts - 1).clamp(min=0).tolist()]
