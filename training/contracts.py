"""What the parts of training exchange: the text, what the target makes of it, what a step measures.

    data -> Corpus -> pack -> Packs        which conversations are computed together
    Corpus, Packs, target -> FeatureSource -> Batch     the target's hidden states of one pack
    Batch -> Learner -> Losses             what heads make of them

A *pack* is the unit of everything: the target computes the hidden states of a pack in one forward pass, whether they
are stored or not, and a step of training is made of whole packs. So stored and recomputed states are the same bits.

Positions and depths, for all methods. Let `h_p` be the target's LM-head input at token `x_p`; it predicts `x_{p+1}`. A
response `[start, end)` makes the *run* of positions `start - 1 .. end - 2`, those whose next token the assistant wrote
(`0 ..` if the text begins with the response). Draft heads that know `h_p` and the root `x_{p+1}` guess `x_{p+2+d}` at
depth `d` (0-based), for which `h_{p+1+d}` is the teacher. They are supervised where `p` and `p + 1 + d` lie in the same
run. A draft model guesses `x_{p+1}` at `p`, for which `h_p` is the teacher: it has `offset` 0 instead of 1.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Corpus:
    """Tokenised conversations, and what in them the assistant wrote.

    Attributes:
        tokens: `[sum of lengths]` int32, all conversations end to end.
        offsets: `[S + 1]` int64; conversation `i` is `tokens[offsets[i]:offsets[i + 1]]`.
        responses: `[R, 3]` int64: conversation, first token and one past the last of each response, in ascending order;
            those of a conversation do not overlap.
        skipped: samples of the source that were left out because they were broken.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    responses: np.ndarray
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """`[S]` int64 tokens of each conversation."""
        return np.diff(self.offsets)

    @cached_property
    def runs(self) -> np.ndarray:
        """`[R, 3]` int64: conversation, first position and one past the last of the run of each response."""
        conversation, start, end = self.responses.T
        return np.stack([conversation, np.maximum(start - 1, 0), np.maximum(end - 1, 0)], axis=1)

    @cached_property
    def digest(self) -> str:
        """What tells corpora apart, as a SHA-256 in hexadecimal digits."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.offsets, self.responses):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def conversation(self, index: int) -> np.ndarray:
        """`[L]` int32 tokens of one."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def response_tokens(self, conversations: np.ndarray) -> np.ndarray:
        """`[T]` int32, all tokens that the assistant wrote in some conversations."""
        picked = self.responses[np.isin(self.responses[:, 0], conversations)]
        parts = [self.tokens[self.offsets[c] + start : self.offsets[c] + end] for c, start, end in picked.tolist()]
        return np.concatenate(parts) if parts else self.tokens[:0]


@dataclass(frozen=True)
class Packs:
    """A corpus, divided into packs; the first `train` are trained on, the others held out.

    Attributes:
        members: the conversations of each pack.
        train: how many packs are trained on.
        idle: conversations in no pack, because they supervise nothing.
    """

    members: tuple[tuple[int, ...], ...]
    train: int
    idle: int

    def __len__(self) -> int:
        return len(self.members)

    @property
    def heldout(self) -> range:
        """The packs that are held out."""
        return range(self.train, len(self.members))


@dataclass(frozen=True)
class Batch:
    """The conversations of one pack, padded on the right, where causal attention never looks.

    Attributes:
        input_ids: `[B, L]` int64, padded with 0.
        lengths: `[B]` int64.
        runs: `[B, L]` int64, a number for the run that a position lies in, which no other run of the pack has; −1
            outside all runs.
        hidden: `[B, L, H]` the target's LM-head inputs, in its dtype; of padding, anything finite.
        features: `[B, L, F]` the other hidden states that the learner asked for (`Learner.layers`), side by side; None
            if it asked for none.
    """

    input_ids: Tensor
    lengths: Tensor
    runs: Tensor
    hidden: Tensor
    features: Tensor | None = None

    def supervised(self, ahead: int) -> Tensor:
        """`[B, L]` bool: positions `p` for which `p` and `p + ahead` lie in the same run; `ahead` from 0."""
        later = torch.full_like(self.runs, -1)
        if ahead < self.runs.shape[1]:
            later[:, : self.runs.shape[1] - ahead] = self.runs[:, ahead:]
        return (self.runs >= 0) & (later == self.runs)


class FeatureSource(Protocol):
    """Where batches come from: computed now, or stored before."""

    @property
    def corpus(self) -> Corpus: ...

    @property
    def packs(self) -> Packs: ...

    def batch(self, pack: int) -> Batch:
        """One pack, on the device of the target."""
        ...


@dataclass(frozen=True)
class Losses:
    """What one pack measures: sums, so that packs, processes and depths can be put together before ratios are taken.

    Attributes:
        sums: `[D]` sum over the supervised positions of the loss at each depth, in nats. Differentiable.
        hits: `[D]` int64, at how many of these the best draft is the teacher's first choice within the draft
            vocabulary.
        counts: `[D]` int64 supervised positions, of hard labels only those whose token can be drafted.
        extra: what a method minimises besides (EAGLE-1's regression, Medusa-2's language modelling), already weighted:
            a sum over the positions supervised at depth 0. Differentiable; None for nothing.
    """

    sums: Tensor
    hits: Tensor
    counts: Tensor
    extra: Tensor | None = None


class Learner(nn.Module, ABC):
    """What is trained, as the trainer sees it: a module whose parameters that require a gradient are all trained.

    What it needs of the frozen target it keeps outside its parameters and buffers. It is created in the dtype of the
    masters (float32, float64 for a float64 target), the same on every process for the same seed of torch.

    Attributes:
        method: its key in `treedec.training.learners.LEARNERS`.
        layers: the hidden states it reads besides the LM-head input, as indices into transformers' `hidden_states`.
        depths: D, how many tokens ahead it is trained to guess.
        offset: how many positions after `p` the teacher of depth 0 is; see the module.
        draft_ids: `[Vd]` int64, ascending: the ids that can be drafted.
    """

    method: str
    layers: tuple[int, ...] = ()
    depths: int
    offset: int = 1
    draft_ids: Tensor

    def at(self, progress: float) -> None:
        """Called before every step with the fraction of the run that is done: from 0, to below 1 in the last step."""

    @abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """The losses of one pack. Finite whatever it holds."""

    @abstractmethod
    def ranks(self, batch: Batch, top: int) -> Tensor:
        """`[D', B, L]` int64: at which place of the drafts at depth `d`, best first and from 0, the text's own token
        stands, when the drafts before it were the text's own tokens; `top` if it is not among the first `top`, or the
        text has no such token. Without gradients. D' is D, or more for heads that draft deeper than they were trained
        to."""

    @abstractmethod
    def save(self, folder: str | os.PathLike[str], training: Mapping[str, object], overwrite: bool = False) -> None:
        """Write what was trained as `treedec.load_drafter` reads it, complete or not at all.

        Args:
            folder: the folder to make.
            training: anything JSON can hold about how it was trained.
            overwrite: replace an earlier checkpoint of the same kind; nothing else is ever replaced.
        """
