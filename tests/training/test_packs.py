"""How conversations are divided: every usable one once, within the budget, its supervision counted in advance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import run_numbers

from treedec.training.contracts import Batch, Corpus
from treedec.training.packs import pack, supervised_counts

# Responses per conversation of the given length: several in one, from the first token on, up to the last one; and the
# three ways to supervise nothing, which are no response, an empty one and ones of too few tokens.
CONVERSATIONS = [
    (20, [(4, 9), (12, 20)]),
    (7, [(0, 7)]),
    (20, []),
    (30, [(3, 5), (10, 11), (20, 23)]),
    (3, [(2, 3)]),
    (0, []),
    (12, [(1, 12)]),
    (50, [(25, 50)]),
    (9, [(4, 4), (5, 6)]),
    (41, [(20, 30), (30, 41)]),
    (12, [(6, 12)]),
    (4, [(0, 3)]),
    (12, [(2, 9)]),
    (5, [(2, 5)]),
]
USABLE = [0, 1, 3, 6, 7, 9, 10, 11, 12, 13]


def corpus_of(conversations):
    lengths = [length for length, _ in conversations]
    responses = [(i, *one) for i, (_, parts) in enumerate(conversations) for one in parts]
    return Corpus(
        np.arange(sum(lengths), dtype=np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array(responses, dtype=np.int64).reshape(-1, 3),
    )


CORPUS = corpus_of(CONVERSATIONS)


def many(count=200, seed=0):
    random = np.random.default_rng(seed)
    return corpus_of([(int(length), [(0, int(length))]) for length in random.integers(3, 60, count)])


@pytest.mark.parametrize("tokens", [1, 24, 40, 1000])
def test_every_usable_conversation_is_in_one_pack(tokens):
    packs = pack(CORPUS, tokens, 0.2)
    assert sorted(index for members in packs.members for index in members) == USABLE
    assert packs.idle == len(CONVERSATIONS) - len(USABLE) == 4
    assert all(packs.members) and len(packs) == packs.train + len(packs.heldout)


@pytest.mark.parametrize("tokens", [24, 40, 128])
def test_no_pack_exceeds_the_budget_padding_included_but_a_single_conversation(tokens):
    corpus = many()
    packs = pack(corpus, tokens, 0.1)
    alone = [members for members in packs.members if corpus.lengths[members[0]] > tokens]
    assert all(len(members) == 1 for members in alone) and bool(alone) == (tokens < 59)
    sizes = [len(members) * max(corpus.lengths[list(members)]) for members in packs.members if members not in alone]
    assert max(sizes) <= tokens
    # One more would not have fitted: only the last packs of the two parts may be smaller.
    roomy = [
        place
        for place, members in enumerate(packs.members)
        if (len(members) + 1) * max(corpus.lengths[list(members)]) <= tokens
    ]
    assert set(roomy) <= {packs.train - 1, len(packs) - 1}


def test_conversations_of_about_the_same_length_share_a_pack():
    corpus = many()
    packs = pack(corpus, 256, 0.1)
    padded = sum(len(members) * max(corpus.lengths[list(members)]) for members in packs.members)
    assert padded < 1.1 * corpus.lengths.sum()


@pytest.mark.parametrize(("holdout", "count"), [(0.0, 1), (0.2, 2), (0.34, 3), (0.5, 5), (1.0, 9)])
def test_the_last_conversations_are_held_out(holdout, count):
    for seed in (0, 1):
        packs = pack(CORPUS, 40, holdout, seed)
        heldout = sorted(index for place in packs.heldout for index in packs.members[place])
        assert heldout == USABLE[-count:]
        assert packs.heldout == range(packs.train, len(packs.members))


def test_the_seed_alone_decides_who_shares_a_pack():
    corpus = corpus_of([(10, [(0, 10)])] * 30)
    one, again, other = (pack(corpus, 40, 0.1, seed) for seed in (3, 3, 4))
    assert one == again and one.members != other.members
    assert one.members[one.train :] == other.members[other.train :]
    assert pack(corpus, 40, 0.1) == pack(corpus, 40, 0.1, 0)


@pytest.mark.parametrize("usable", [0, 1])
def test_too_little_data_is_refused(usable):
    corpus = corpus_of([(5, [(2, 3)])] * 3 + [(5, [(1, 5)])] * usable)
    with pytest.raises(ValueError, match=f"{usable} of {3 + usable} conversations supervise anything"):
        pack(corpus, 40, 0.1)
    assert len(pack(corpus_of([(5, [(1, 5)])] * 2), 40, 0.1)) == 2


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_what_is_supervised_is_known_in_advance(offset, tokens):
    depths, packs = 8, pack(CORPUS, tokens, 0.3)
    counts = supervised_counts(CORPUS, packs, depths, offset)
    for members, ours in zip(packs.members, counts, strict=True):
        lengths = [CONVERSATIONS[index][0] for index in members]
        runs = run_numbers(lengths, [CONVERSATIONS[index][1] for index in members])
        batch = Batch(torch.zeros_like(runs), torch.tensor(lengths), runs, torch.zeros(*runs.shape, 1))
        assert ours.tolist() == [int(batch.supervised(offset + depth).sum()) for depth in range(depths)]
    assert (counts[:, 0] > 0).all() and (counts[:, -1] == 0).any()
