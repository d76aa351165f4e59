"""What a drafter is: something that proposes a token tree for every row and learns what became of it.

A `Drafter` is immutable and can be shared; `start` opens a `DraftSession` that holds the state of one generation. The
smallest drafter guesses from the text alone:

>>> class Stutter(Drafter):                        # guesses that the last token is repeated once
...     name = "stutter"
...     max_nodes = 2
...     def start(self, target, batch, capacity):
...         return StutterSession()
>>> class StutterSession(DraftSession):
...     def propose(self, state):
...         rows = [[] if text is None else [text[-1]] * min(2, 1 + room, state.budget)
...                 for text, room in zip(state.texts, state.room)]
...         return Draft(TokenTree.chains(rows))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from treedec.chance import Chance
from treedec.costs import FLAT, CostCurve
from treedec.target import Target
from treedec.tree import TokenTree, TreeError

# What a share in the race is worth. Fitted to 4,267 positions of answers at T = 1 to the bundled benchmark prompts,
# with drafts of the demo target's EAGLE-3 head: the log-likelihood of what the target picks is -1.18 per position, with
# 1 it is -1.26, and -6.6 where the share is in the odds of the best four only.
_RACE = 0.8


class Drafting(Enum):
    """How an acceptance rule wants candidates to be chosen."""

    TOP = "top"  # the most probable ones
    COUPLED = "coupled"  # the ones that win the target's own noise, ranked by q / e
    SAMPLED = "sampled"  # drawn from q, which the draft then carries; top ones (q absent) stay exact, and may be better


@dataclass(frozen=True)
class DraftState:
    """What a drafter may look at before a round. Lists have one entry per row; finished rows hold None.

    Attributes:
        texts: committed token ids without padding; the last one is the root of the tree to propose.
        hidden: `[B, H]`, the LM-head input from which the root was predicted; of finished rows anything.
        features: what `Drafter.features` asks for, `[n, F]` per row: of the n tokens whose features have become known
            since the last proposal. First that is the whole prompt, then the accepted path, its root included. Those of
            the root of the tree to propose are never known yet, so in all there are `len(text) - 1`.
        room: how many levels below the root can still be committed (0: propose the root alone).
        budget: most nodes that fit, the root included.
        drafting: how to choose candidates.
        shape: the target's prefix-independent logits warpers, `[*, V] → [*, V]`, e.g. temperature; drafting from
            distributions shaped alike is accepted more often. The identity when decoding greedily.
        noise: `noise(depth)` is the `[B, V]` float32 noise that decides the token at `depth` below the root; only for
            `Drafting.COUPLED`. Rows that are ahead of others see their own positions.
        chance: random decisions for `Drafting.SAMPLED`.
        samples: the rule samples; how it wants candidates chosen says nothing about that.
        costs: what a pass of the target costs by its size.
        merged: the tree is going to be one with those of other drafters, and will be thinned then.
    """

    texts: list[list[int] | None]
    hidden: Tensor
    features: list[Tensor | None]
    room: list[int]
    budget: int
    drafting: Drafting
    shape: Callable[[Tensor], Tensor]
    noise: Callable[[int], Tensor]
    chance: Chance
    samples: bool = False
    costs: CostCurve = FLAT
    merged: bool = False

    def odds(self, probabilities: Tensor, level: int, draft_ids: Tensor | None = None) -> Tensor:
        """Estimates that the target picks each token; the candidates that the rule wants have the largest ones.

        They are the probabilities themselves, or under `Drafting.COUPLED` 0.8 times the share of a token in the race,
        the sum of all odds q / e: an empirical fit, see `_RACE`. Shares above 0.9 were right in 76 % of the cases.

        Args:
            probabilities: `[B, *, Vd]` q, shaped, at `level` below the root.
            level: from 1.
            draft_ids: `[Vd]` int64, the ids that they belong to; None for all of the vocabulary.
        """
        if self.drafting is not Drafting.COUPLED:
            return probabilities
        noise = self.noise(level) if draft_ids is None else self.noise(level)[:, draft_ids]
        odds = probabilities / noise.reshape(len(noise), *[1] * (probabilities.dim() - 2), -1)
        return odds * (_RACE / odds.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Draft:
    """A proposed tree, and what it was drawn from.

    Attributes:
        tree: the candidates.
        probabilities: `[B, N, V]`: entry `[b, i]` is the distribution from which the children of node `i` were drawn,
            in order and without replacement. None when all children were chosen deterministically: then any tree is
            lossless.
        drawn: `[B, N]` bool, only with `probabilities`: which nodes were drawn from their parent's distribution. The
            others were chosen deterministically, whatever was drawn. None: all were drawn.
        scores: `[B, N]` float, CPU: the drafter's estimate that a node is accepted, which is that of its parent times
            the probability of its token there; 1 for the root, anything for padding. No rule reads them: drafters made
            of drafters give the more promising nodes the room (`treedec.heads.union`), and see `thinned`.
    """

    tree: TokenTree
    probabilities: Tensor | None = None
    drawn: Tensor | None = None
    scores: Tensor | None = None

    def thinned(self, state: DraftState) -> Draft:
        """The same without the nodes that do not pay their costs, see `CostCurve.width`; all of it if it is merged.

        The trees must have been grown best first, so that scores fall along each row.

        Raises:
            ValueError: there are no scores, or nodes were drawn at random, which must not be dropped.
        """
        if self.scores is None or self.probabilities is not None:
            raise ValueError("only drafts with scores, and none of whose nodes were drawn at random, can be thinned")
        if state.merged:
            return self
        used = torch.arange(self.tree.width, device="cpu") < self.tree.counts[:, None]
        scores = self.scores.cpu().where(used, 0.0).nan_to_num(0.0)
        width = state.costs.width(scores, int((self.tree.counts > 0).sum()))
        return replace(self, tree=self.tree.cut(width), scores=self.scores[:, :width])

    def validate(self, vocab_size: int, room: Sequence[int]) -> None:
        """Raise `TreeError` unless the tree is one (`TokenTree.validate`), its probabilities could be some, and there
        is a score for every node, if any."""
        self.tree.validate(vocab_size, room)
        shape = (self.tree.batch, self.tree.width)
        if self.scores is not None and tuple(self.scores.shape) != shape:
            raise TreeError(f"the draft's scores must be {list(shape)}, not {list(self.scores.shape)}")
        if self.drawn is not None and (self.probabilities is None or tuple(self.drawn.shape) != shape):
            raise TreeError(f"drawn must be {list(shape)}, and there must be probabilities that nodes were drawn from")
        if self.probabilities is None:
            return
        if tuple(self.probabilities.shape) != (*shape, vocab_size):
            raise TreeError(
                f"the draft's probabilities must be {[*shape, vocab_size]}, not {list(self.probabilities.shape)}"
            )
        lowest, total = self.probabilities.amin(-1), self.probabilities.sum(-1)
        bad = ~(lowest >= 0) | ~total.isfinite()
        if bool(bad.any()):
            row, node = bad.nonzero()[0].tolist()
            raise TreeError(f"row {row}, node {node}: the probabilities of its children are NaN, infinite or negative")


@dataclass(frozen=True)
class Outcome:
    """What became of a draft: per row the accepted nodes (root first; none if finished) and all committed tokens."""

    paths: list[list[int]]
    tokens: list[list[int]]


@dataclass(frozen=True)
class Children:
    """Candidates to follow one node.

    Attributes:
        tokens: their tokens, the drawn ones first and in the order drawn.
        drawn: how many were drawn; the others are deterministic.
        probabilities: `[V]` what the drawn ones were drawn from, to be claimed in `Draft.probabilities`; None without.
    """

    tokens: list[int]
    drawn: int
    probabilities: Tensor | None


def score_table(rows: Sequence[Sequence[float]]) -> Tensor:
    """`[B, N]` `Draft.scores` from those of each row, as `TokenTree.from_rows` pads them."""
    scores = torch.zeros(len(rows), max(1, *map(len, rows)), device="cpu")
    for row, values in enumerate(rows):
        scores[row, : len(values)] = torch.tensor(values, device="cpu")
    return scores


def draw_children(q: Tensor, width: int, scheme: str, chance: Chance) -> Children:
    """Candidates in a way that the lossless rules accept.

    - `"drawn"`: `width` tokens drawn from q without replacement.
    - `"top"`: the `width` most probable tokens.
    - `"hu"`: one token drawn from q outside its `width` − 1 most probable tokens, then these: the greedy scheme of Hu
      et al. 2025 (arXiv:2502.18779).

    Args:
        q: `[V]` probabilities.
        width: how many candidates; fewer where q excludes all other tokens.
        scheme: one of the above.
        chance: takes the random decisions.

    Raises:
        ValueError: an unknown scheme, or `width` below 1.
    """
    if width < 1 or scheme not in ("drawn", "top", "hu"):
        raise ValueError(f"cannot draw {width} children by {scheme!r}: give at least 1, by 'drawn', 'top' or 'hu'")
    width = min(width, int((q > 0).sum()))
    best = q.topk({"drawn": 0, "top": width, "hu": max(width - 1, 0)}[scheme]).indices.tolist()
    left = q.clone()
    left[best] = 0
    claimed = left / left.sum()
    drawn: list[int] = []
    while len(drawn) < width - len(best):
        drawn.append(chance.sample(left))
        left[drawn[-1]] = 0
    return Children(drawn + best, len(drawn), claimed if drawn else None)


class DraftSession(ABC):
    """The state of a drafter during one generation."""

    @abstractmethod
    def propose(self, state: DraftState) -> Draft:
        """A tree for every row: count 0 for finished rows, else at least the root."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 (an empty default: drafters without memory need not care)
        """Told after every round."""


class Drafter(ABC):
    """A way to draft.

    Attributes:
        name: shown in results.
        max_nodes: most nodes a proposal has, the root included; sizes the cache.
        features: which hidden states of the target it reads of every token: None for none but `DraftState.hidden`, `()`
            for the LM-head input, else indices as in transformers' `hidden_states` (i is the input of decoder layer i),
            which are concatenated.
    """

    name: str
    max_nodes: int
    features: tuple[int, ...] | None = None

    @abstractmethod
    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        """Open a session for `batch` rows of at most `capacity` tokens.

        Raises:
            ValueError: the drafter does not fit this target.
        """


class NoDrafts(Drafter):
    """Plain decoding: every tree is its root."""

    name = "none"
    max_nodes = 1

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        return _RootsOnly()


class _RootsOnly(DraftSession):
    def propose(self, state: DraftState) -> Draft:
        return Draft(TokenTree.chains([[] if text is None else text[-1:] for text in state.texts]))
