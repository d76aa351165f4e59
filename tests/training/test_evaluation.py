"""What is measured on held-out packs, with a learner whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import run_numbers
from training_runs import counting_model

from treedec.target import Target
from treedec.training.contracts import Batch, Corpus, Learner, Losses, Packs
from treedec.training.evaluation import Evaluator, better
from treedec.training.processes import join

CORPUS = Corpus(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64), np.zeros((0, 3), dtype=np.int64))
# Two packs: what the counting target would write, and what it would not; the end of the first run goes on beyond it.
TEXTS = (
    (list(range(12)), [(2, 7), (9, 12)]),
    ([5, 6, 7, 1, 9, 3, 8, 2], [(3, 8)]),
)


class Source:
    corpus, packs = CORPUS, Packs(((0,), (0,), (1,)), 1, 0)

    def __init__(self, model):
        self.target, self.asked = Target(model), []

    def batch(self, pack):
        self.asked.append(pack)
        ids, spans = TEXTS[pack - 1]
        tokens = torch.tensor([ids])
        return Batch(tokens, torch.tensor([len(ids)]), run_numbers([len(ids)], [spans]), self.target.features(tokens))


class Known(Learner):
    """Knows the text's next tokens, all but those of rank `wrong` at depth 1; its loss is 2 at depth 0 and 4 at 1."""

    method, depths = "known", 2

    def __init__(self, offset=1, wrong=0, unlabelled=0, deeper=0):
        super().__init__()
        self.offset, self.wrong, self.draft_ids = offset, wrong, torch.arange(23)
        self.unlabelled, self.deeper = unlabelled, deeper
        self.depths = 2 if offset else 1

    def forward(self, batch: Batch) -> Losses:
        assert not self.training
        counts = torch.stack([batch.supervised(self.offset + depth).sum() for depth in range(self.depths)])
        sums = counts * torch.tensor([2.0, 4.0])[: self.depths]
        return Losses(sums, counts // 2, counts - self.unlabelled, extra=counts[0] * 0.5)

    def ranks(self, batch: Batch, top: int) -> torch.Tensor:
        ranks = torch.zeros(self.depths + self.deeper, *batch.input_ids.shape, dtype=torch.long)
        ranks[-1] = min(self.wrong, top)
        return ranks

    def save(self, folder, training, overwrite=False):
        raise AssertionError("nothing is saved in an evaluation")


@pytest.fixture
def evaluator():
    model = counting_model()
    return Evaluator(Target(model), Source(model), 4, join(model, sharded=False))


def test_sums_are_pooled_over_packs(evaluator):
    learner = Known().train()
    measured = evaluator.measure(learner)
    assert learner.training
    # Runs of 5, 3 and 5 positions: 4 + 2 + 4 are supervised at depth 0, and one less each at depth 1.
    assert measured["counts"] == [10, 7] and measured["loss"] == [2.0, 4.0] and measured["extra"] == 0.5
    assert measured["mean_loss"] == pytest.approx((20 + 28) / 17)
    assert measured["accuracy"] == [(3 + 2) / 10, (2 + 1) / 7] and measured["top1"] == [1.0, 1.0]


def test_nothing_is_accepted_beyond_the_end_of_a_run(evaluator):
    measured = evaluator.measure(Known())
    # 4 tokens after the first: 3 and 1; 2 tokens: 1 pass; 4 again: 2 passes.
    assert measured["accepted_length"] == (4 + 2 + 4) / (2 + 1 + 2)
    assert (measured["runs"], measured["greedy_runs"]) == (3, 2)
    assert measured["accepted_length_greedy"] == (4 + 2) / (2 + 1)


def test_ranks_are_told_apart(evaluator):
    measured = evaluator.measure(Known(wrong=2))
    assert (measured["top1"], measured["top4"]) == ([1.0, 0.0], [1.0, 1.0])
    assert measured["accepted_length"] == 2.0, "the tree follows the third guess"
    assert evaluator.measure(Known(wrong=99))["top8"] == [1.0, 0.0]
    assert evaluator.measure(Known(wrong=99))["accepted_length"] == (4 + 2 + 4) / (2 + 1 + 2)


def test_labels_that_cannot_be_drafted_are_misses(evaluator):
    """Or heads with hard labels would seem the better, the fewer tokens they can draft."""
    measured = evaluator.measure(Known(unlabelled=1))
    assert measured["counts"] == [10 - 2, 7 - 2] and measured["loss"] == [20 / 8, 28 / 5]
    assert measured["top1"] == [1.0, 1.0] and measured["extra"] == 0.5


def test_heads_that_draft_deeper_than_they_were_trained_to_accept_more(evaluator):
    assert evaluator.measure(Known())["accepted_length"] == (4 + 2 + 4) / (2 + 1 + 2)
    measured = evaluator.measure(Known(deeper=1))
    assert measured["accepted_length"] == (4 + 2 + 4) / (1 + 1 + 1) and len(measured["top1"]) == 2


def test_a_draft_model_drafts_a_chain_of_first_choices(evaluator):
    measured = evaluator.measure(Known(offset=0))
    assert measured["counts"] == [13] and measured["accepted_length"] == (4 + 2 + 4) / (1 + 1 + 1)
    second = evaluator.measure(Known(offset=0, wrong=1))
    assert second["accepted_length"] == 1.0 and second["top4"] == [1.0]


def test_the_targets_own_choices_are_computed_once(evaluator, monkeypatch):
    first = evaluator.measure(Known())
    monkeypatch.setattr(Target, "head", lambda *_: pytest.fail("computed again"))
    assert evaluator.measure(Known()) == first and evaluator.source.asked == [1, 2, 1, 2]


def test_more_accepted_is_better_and_then_less_loss():
    def measured(length, loss):
        return {"accepted_length": length, "mean_loss": loss}

    assert better(measured(2.0, 9.0), measured(1.9, 1.0)) and not better(measured(1.9, 1.0), measured(2.0, 9.0))
    assert better(measured(2.0, 1.0), measured(2.0, 2.0)) and not better(measured(2.0, 2.0), measured(2.0, 2.0))
