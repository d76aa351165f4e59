"""The NumPy oracle of one speculative step, by hand and by frequencies."""

import numpy as np
import pytest

from treedec.reference import speculative_step_verification

UNIFORM = np.full((4, 10), 0.1)


def distributions(rows, vocab, seed):
    return np.random.default_rng(seed).dirichlet(np.ones(vocab), size=rows)


def test_accepts_everything_when_p_equals_q():
    assert speculative_step_verification([1, 2, 3], UNIFORM[:3], UNIFORM[:3]) == [1, 2, 3]


def test_emits_a_bonus_token_when_p_has_one_row_more():
    step = speculative_step_verification([1, 2, 3], UNIFORM, UNIFORM[:3], rng=0)
    assert step[:3] == [1, 2, 3] and len(step) == 4 and 0 <= step[3] < 10


def test_accepts_everything_when_p_equals_a_q_below_the_guard():
    tiny = np.array([[1.0 - 1e-15, 1e-15]])
    assert all(speculative_step_verification([1], tiny, tiny, rng=seed) == [1] for seed in range(20))


def test_never_accepts_a_token_that_the_target_excludes():
    p, q = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.5, 0.5]])
    assert all(speculative_step_verification([0], p, q, rng=seed) == [1] for seed in range(20))


def test_a_token_with_no_mass_on_either_side_is_rejected():
    both = np.array([[0.0, 0.25, 0.75]])
    assert speculative_step_verification([0], both, both, rng=0) == [2]


def test_a07_a_residual_without_mass_falls_back_to_the_argmax():
    p = np.array([[0.2, 0.5, 0.3]])
    steps = [speculative_step_verification([0], p, 2 * p, rng=seed) for seed in range(40)]
    assert [1] in steps and all(step in ([0], [1]) for step in steps)


def test_the_first_rejection_ends_the_step():
    p = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    q = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert speculative_step_verification([0, 0, 0], p, q) == [0, 1]


def test_without_drafts_only_the_bonus_token_is_drawn():
    assert speculative_step_verification([], np.array([[0.0, 1.0]]), np.zeros((0, 2))) == [1]
    assert speculative_step_verification([], np.zeros((0, 2)), np.zeros((0, 2))) == []


def first_token_frequencies(p, q, claimed, draws=20_000):
    generator = np.random.default_rng(3)
    counts = np.zeros(p.shape[1])
    for token in generator.choice(p.shape[1], p=q[0], size=draws):
        counts[speculative_step_verification([token], p, claimed, generator)[0]] += 1
    return counts / draws


def test_the_first_token_follows_the_target():
    p, q = distributions(2, 5, seed=0), distributions(1, 5, seed=1)
    assert np.abs(first_token_frequencies(p, q, q) - p[0]).max() < 0.012


def test_control_a_wrong_q_is_noticed():
    p, q = distributions(2, 5, seed=0), distributions(1, 5, seed=1)
    assert np.abs(first_token_frequencies(p, q, np.full((1, 5), 0.2)) - p[0]).max() > 0.05


def test_a_seed_repeats_the_step():
    p, q = distributions(4, 6, seed=0), distributions(3, 6, seed=1)
    once, again = (speculative_step_verification([5, 0, 3], p, q, rng=11) for _ in range(2))
    assert once == again


@pytest.mark.parametrize(
    ("tokens", "p", "q", "message"),
    [
        ([[1, 2]], UNIFORM[:2], UNIFORM[:2], "one-dimensional"),
        ([0.5], UNIFORM[:1], UNIFORM[:1], "integers"),
        ([1, 2], UNIFORM[:1], UNIFORM[:2], "p_probs must be"),
        ([1, 2], UNIFORM[:4], UNIFORM[:2], "p_probs must be"),
        ([1, 2], UNIFORM[:2], UNIFORM[:3], "q_probs must be"),
        ([1], UNIFORM[0], UNIFORM[:1], "p_probs must be"),
        ([1], UNIFORM[:1], np.full((1, 9), 1 / 9), "vocabulary of 10"),
        ([1, 10], UNIFORM[:2], UNIFORM[:2], "token 10 at position 1"),
        ([-1], UNIFORM[:1], UNIFORM[:1], "token -1 at position 0"),
        ([1, 2], np.vstack([UNIFORM[:1], -UNIFORM[:1]]), UNIFORM[:2], "p_probs, row 1"),
        ([1], UNIFORM[:1], np.full((1, 10), np.nan), "q_probs, row 0"),
    ],
)
def test_bad_arguments_are_named(tokens, p, q, message):
    with pytest.raises(ValueError, match=message):
        speculative_step_verification(tokens, p, q)
