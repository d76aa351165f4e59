"""Typical acceptance: its own rule, and that it says what it is."""

from dataclasses import dataclass

import pytest
import torch
from enumeration import BIASED, Given, Replay, Tables, distribution, error, levels, outcomes, view

from treedec.acceptance import Typical


@dataclass(frozen=True)
class Fixed:
    """The same p after every text."""

    values: tuple

    def p(self, text):
        return torch.tensor(self.values, dtype=torch.float64)


def test_typical_accepts_by_the_lower_of_both_thresholds():
    # H = 1.0297, δ exp(−H) = 0.3 · 0.3571 = 0.1071 > ε: the bar is ε = 0.09.
    flat = torch.tensor([0.5, 0.3, 0.12, 0.08], dtype=torch.float64)
    assert Typical().acceptable(flat).tolist() == [True, True, True, False]
    assert Typical(epsilon=0.2).acceptable(flat).tolist() == [True, True, True, False]
    assert Typical(epsilon=0.2, delta=0.9).acceptable(flat).tolist() == [True, True, False, False]
    # Eight equal tokens: H = ln 8, δ exp(−H) = 0.0375 < 1/8: all are acceptable.
    assert Typical().acceptable(torch.full((8,), 0.125, dtype=torch.float64)).all()


def test_typical_always_accepts_the_argmax():
    # exp(−H) ≤ max p, with equality for equal tokens: there only rounding decides.
    rule = Typical(epsilon=0.999, delta=1 - 1e-12)
    assert all(rule.acceptable(torch.full((vocab,), 1 / vocab)).any() for vocab in range(2, 100))
    assert Typical(epsilon=0.999).acceptable(torch.tensor([1.0, 0.0])).tolist() == [True, False]


def test_typical_commits_the_longest_path_of_acceptable_nodes():
    p = Fixed((0.5, 0.3, 0.12, 0.08))
    # Paths 0-3 (3 is unacceptable), 2-1-0 and 3.
    tree = Given([None, 0, 2, 3, 3, 1, 0], [[1, 2, 3], [4], [5], [], [], [6], []])
    for _, chance in ((0, Replay([0])), (1, Replay([2]))):
        accepted = Typical().accept(view(tree, p, (), chance))
        assert accepted.nodes == [0, 2, 5, 6] and accepted.token == chance.taken[0]


def test_typical_prefers_the_more_probable_of_equally_long_paths():
    tree = Given([None, 2, 0, 1, 1], [[1, 2], [3], [4], [], []])
    assert Typical().accept(view(tree, Fixed((0.5, 0.3, 0.12, 0.08)), (), Replay([]))).nodes == [0, 2, 4]


def test_typical_draws_the_last_token_from_the_acceptable_ones():
    tree, p = Given([None], [[]]), Fixed((0.5, 0.3, 0.12, 0.08))
    drawn = distribution(outcomes(lambda chance: Typical().accept(view(tree, p, (), chance)).token))
    assert drawn == pytest.approx({0: 0.5 / 0.92, 1: 0.3 / 0.92, 2: 0.12 / 0.92})


def test_a01_typical_ends_with_an_accepted_token_that_ends_the_row():
    tree, p = Given([None, 1, 0, 0], [[1], [2], [3], []]), Fixed((0.5, 0.3, 0.12, 0.08))
    accepted = Typical().accept(view(tree, p, (), Replay([]), lambda path, token: token == 0))
    assert (accepted.nodes, accepted.token, accepted.finished) == ([0, 1], 0, True)


@pytest.mark.parametrize("shape", [levels((3, "top"), (2, "top")), levels()])
def test_typical_deviates_from_the_target_distribution(shape):
    assert error(Typical(), Tables(4), shape) > BIASED


@pytest.mark.parametrize("bad", [{"epsilon": 0}, {"epsilon": 1}, {"delta": 0}, {"delta": 1.5}])
def test_typical_refuses_thresholds_out_of_range(bad):
    with pytest.raises(ValueError, match="epsilon and delta"):
        Typical(**bad)
