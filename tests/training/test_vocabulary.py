"""Which tokens can be drafted."""

from __future__ import annotations

import pytest
import torch
from training_runs import corpus_of, tiny_model

from treedec.training.contracts import Packs
from treedec.training.vocabulary import coverage, draft_vocabulary, eos_ids, response_tokens


def test_draft_vocabulary():
    tokens = torch.tensor([5, 5, 5, 9, 9, 2, 7])
    assert draft_vocabulary(tokens, 12, 2).tolist() == [5, 9]
    assert draft_vocabulary(tokens, 12, 3).tolist() == [2, 5, 9], "ties go to the smaller id"
    assert draft_vocabulary(tokens.int().numpy(), 12, 6).tolist() == [0, 1, 2, 5, 7, 9], "the rest by ascending id"
    assert draft_vocabulary(tokens, 12, 3, (11, 10)).tolist() == [5, 10, 11], "what ends a text is always in"
    assert draft_vocabulary(tokens, 12, 12).tolist() == list(range(12))
    with pytest.raises(ValueError, match="no room for the 3 tokens"):
        draft_vocabulary(tokens, 12, 2, (1, 2, 3))


def test_coverage():
    assert coverage(torch.tensor([1, 2, 2, 3]), torch.tensor([2, 3])) == 0.75
    assert coverage(torch.tensor([], dtype=torch.long), torch.tensor([2])) == 0.0


def test_only_what_the_assistant_wrote_counts():
    corpus = corpus_of([([1, 2, 3, 4], [(1, 3)]), ([5, 6, 7], [(0, 1), (2, 3)]), ([8, 9], [(0, 2)])])
    packs = Packs(((2,), (0, 1)), 1, 0)
    assert response_tokens(corpus, packs, [1]).tolist() == [2, 3, 5, 7]
    assert response_tokens(corpus, packs, range(2)).tolist() == [2, 3, 5, 7, 8, 9]
    assert response_tokens(corpus, packs, []).tolist() == []


def test_every_declared_end_of_a_text_is_found():
    class Tokenizer:
        eos_token_id = 7

    model = tiny_model()
    assert eos_ids(model, None) == ()
    model.generation_config.eos_token_id = [3, 9999]
    model.config.eos_token_id = 5
    assert eos_ids(model, Tokenizer()) == (3, 5, 7), "none that the LM head does not have"
