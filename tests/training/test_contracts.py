"""What a corpus says of its conversations, and which positions of a pack are supervised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import run_numbers, runs_of

from treedec.training.contracts import Batch, Corpus

CORPUS = Corpus(
    tokens=np.arange(100, 120, dtype=np.int32),
    offsets=np.array([0, 8, 8, 15, 20]),
    responses=np.array([[0, 2, 4], [0, 5, 8], [2, 0, 3], [2, 3, 3], [3, 0, 0], [3, 4, 5]]),
)


def batch_of(runs):
    runs = torch.tensor(runs)
    return Batch(torch.zeros_like(runs), torch.full((len(runs),), runs.shape[1]), runs, torch.zeros(*runs.shape, 1))


def test_a_position_is_supervised_if_its_teacher_lies_in_the_same_run():
    batch = batch_of([[-1, -1, 0, 0, 0, 1, 1, -1], [2, -1, -1, -1, -1, -1, 3, 3]])
    expected = {
        0: [[0, 0, 1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1, 1]],
        1: [[0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0]],
        2: [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
        3: [[0] * 8] * 2,
        8: [[0] * 8] * 2,
        50: [[0] * 8] * 2,
    }
    for ahead, wanted in expected.items():
        supervised = batch.supervised(ahead)
        assert supervised.dtype == torch.bool and supervised.int().tolist() == wanted


def test_supervision_equals_a_search_run_by_run():
    runs = run_numbers([20, 3, 11], [[(0, 6), (6, 7), (9, 20)], [], [(1, 11)]])
    batch = batch_of(runs.tolist())
    for ahead in range(22):
        expected = torch.zeros_like(runs, dtype=torch.bool)
        for run in runs_of(batch):
            for row, column in run:
                expected[row, column] = (row, column + ahead) in run
        assert torch.equal(batch.supervised(ahead), expected)
    assert not batch_of([[-1, -1, -1]]).supervised(0).any(), "outside all runs is no run"


def test_a_run_is_where_the_next_token_is_the_assistants():
    assert CORPUS.runs.tolist() == [[0, 1, 3], [0, 4, 7], [2, 0, 2], [2, 2, 2], [3, 0, 0], [3, 3, 4]]
    for run, (conversation, start, stop) in zip(CORPUS.runs.tolist(), CORPUS.responses.tolist(), strict=True):
        positions = range(CORPUS.lengths[conversation])  # the first token of a text follows no position
        assert list(range(*run[1:])) == [p for p in positions if start <= p + 1 < stop]


def test_conversations_and_what_the_assistant_wrote_in_them():
    assert len(CORPUS) == 4 and CORPUS.lengths.tolist() == [8, 0, 7, 5]
    assert CORPUS.conversation(2).tolist() == list(range(108, 115)) and len(CORPUS.conversation(1)) == 0
    assert CORPUS.response_tokens(np.array([0])).tolist() == [102, 103, 105, 106, 107]
    assert CORPUS.response_tokens(np.array([3, 2])).tolist() == [108, 109, 110, 119]
    none = CORPUS.response_tokens(np.array([1]))
    assert none.tolist() == [] and none.dtype == np.int32


def test_a_corpus_without_responses():
    corpus = Corpus(np.zeros(3, dtype=np.int32), np.array([0, 3]), np.zeros((0, 3), dtype=np.int64))
    assert corpus.runs.shape == (0, 3) and corpus.response_tokens(np.array([0])).tolist() == []


@pytest.mark.parametrize("part", ["tokens", "offsets", "responses"])
def test_corpora_that_differ_in_anything_have_different_digests(part):
    changed = getattr(CORPUS, part).copy()
    changed.flat[1] += 1
    assert replace(CORPUS, **{part: changed}).digest != CORPUS.digest
    assert replace(CORPUS, skipped=5).digest == replace(CORPUS).digest == CORPUS.digest
