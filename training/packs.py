"""Divides a corpus: what is held out, and which conversations are computed together."""

from __future__ import annotations

import numpy as np

from treedec.training.contracts import Corpus, Packs


def pack(corpus: Corpus, tokens: int, holdout: float, seed: int = 0) -> Packs:
    """Conversations of about the same length together, at most `tokens` tokens a pack, padding included.

    A conversation longer than that has a pack of its own. Conversations in which no response has two positions (see
    `contracts`) are in no pack. The last ones, a fraction `holdout`, are held out; which of the others share a pack is
    decided by `seed`.

    Raises:
        ValueError: fewer than two conversations supervise anything.
    """
    conversation, begin, end = corpus.runs.T
    usable = np.unique(conversation[end - begin >= 2])
    if len(usable) < 2:
        raise ValueError(
            f"{len(usable)} of {len(corpus)} conversations supervise anything, and one must be held out: more data is "
            "needed; a conversation counts if the assistant says two tokens or more at a time"
        )
    heldout = min(max(1, round(holdout * len(usable))), len(usable) - 1)
    random = np.random.default_rng(seed)
    train = _fill(corpus, random.permutation(usable[:-heldout]), tokens)
    return Packs((*train, *_fill(corpus, usable[-heldout:], tokens)), len(train), len(corpus) - len(usable))


def _fill(corpus: Corpus, conversations: np.ndarray, tokens: int) -> list[tuple[int, ...]]:
    """Longest first: then a pack is as long as its first conversation."""
    packs: list[list[int]] = []
    longest = 0
    for index in conversations[np.argsort(-corpus.lengths[conversations], kind="stable")].tolist():
        if not packs or (len(packs[-1]) + 1) * longest > tokens:
            packs.append([])
            longest = int(corpus.lengths[index])
        packs[-1].append(index)
    return [tuple(members) for members in packs]


def supervised_counts(corpus: Corpus, packs: Packs, depths: int, offset: int) -> np.ndarray:
    """`[P, D]` int64: positions of each pack that are supervised at each depth, known before anything is computed."""
    conversation, begin, end = corpus.runs.T
    ahead = offset + np.arange(depths)
    per_run = np.maximum((end - begin)[:, None] - ahead, 0)  # [R, D]
    per_conversation = np.zeros((len(corpus), depths), dtype=np.int64)
    np.add.at(per_conversation, conversation, per_run)
    return np.stack([per_conversation[list(members)].sum(0) for members in packs.members])
