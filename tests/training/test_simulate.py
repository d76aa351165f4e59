"""Acceptance without decoding: trees and walks against their definitions, spelt out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treedec.training.simulate import accepted_length, best_tree, chained


def walk(ranks, tree):
    """One run, token by token: (tokens, passes, accepted of each pass)."""
    depths, length = ranks.shape
    position, tokens, accepted = 0, 0, []
    while position < length - 1:  # the last position is that of the last token but one
        path = ()
        while len(path) < depths and (*path, int(ranks[len(path), position])) in tree:
            path = (*path, int(ranks[len(path), position]))
        accepted.append(len(path))
        tokens += min(len(path) + 1, length - 1 - position)
        position += len(path) + 1
    return tokens, len(accepted), accepted


@st.composite
def ranked(draw, depths=3, ranks=3):
    """Ranks of a few runs, those that lead beyond a run's end out of reach, as an evaluation hands them over."""
    runs = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 9))
        run = np.array(draw(st.lists(st.integers(-1, ranks - 1), min_size=depths * length, max_size=depths * length)))
        run = run.reshape(depths, length)
        for depth in range(depths):
            run[depth, max(length - 1 - depth, 0) :] = -1
        runs.append(run)
    return runs


@given(ranked(), st.integers(1, 8))
def test_a_walk_is_what_a_decoder_does(runs, nodes):
    tree = best_tree(np.concatenate(runs, axis=1), nodes)
    found = accepted_length(runs, tree)
    walked = [walk(run, set(tree)) for run in runs]
    assert found.tokens == sum(tokens for tokens, _, _ in walked) == sum(run.shape[1] - 1 for run in runs)
    assert found.passes == sum(passes for _, passes, _ in walked) == sum(found.histogram)
    accepted = [count for _, _, counts in walked for count in counts]
    assert list(found.histogram) == [accepted.count(count) for count in range(len(found.histogram))]
    assert found.mean_accepted_length == (found.tokens / found.passes if found.passes else 0)


@given(ranked(depths=2, ranks=2), st.integers(1, 7))
def test_no_other_tree_of_that_size_accepts_more_over_the_positions(runs, nodes):
    ranks = np.concatenate(runs, axis=1)

    def covered(tree):
        return sum(
            sum(tuple(ranks[: len(path), position].tolist()) == path for path in tree)
            for position in range(ranks.shape[1])
        )

    chosen = best_tree(ranks, nodes)
    assert len(chosen) <= nodes - 1 and all(path[:-1] in ((), *chosen) for path in chosen)
    paths = [path for depth in (1, 2) for path in product(range(2), repeat=depth)]
    best = 0
    for picked in product([False, True], repeat=len(paths)):
        tree = [path for path, taken in zip(paths, picked, strict=True) if taken]
        if len(tree) <= nodes - 1 and all(path[:-1] in ((), *tree) for path in tree):
            best = max(best, covered(tree))
    assert covered(chosen) == best


def test_a_parent_comes_before_its_children_and_better_ranks_first():
    ranks = np.array([[0, 0, 1, 1, 0], [1, 1, 0, 0, -1]])
    assert best_tree(ranks, 5) == ((0,), (1,), (0, 1), (1, 0))
    assert best_tree(ranks, 2) == ((0,),)
    assert best_tree(ranks, 1) == ()
    assert best_tree(ranks, 99) == best_tree(ranks, 5), "what nobody follows is left out"


def test_without_drafts_every_pass_yields_one_token():
    ranks = np.zeros((2, 6), dtype=int)
    found = accepted_length([ranks, ranks[:, :1]], ())
    assert (found.tokens, found.passes, found.histogram, found.mean_accepted_length) == (5, 5, (5,), 1.0)
    assert accepted_length([ranks[:, :1]], ()).mean_accepted_length == 0.0


def test_lengths_are_pooled_not_averaged():
    right, wrong = np.zeros((1, 9), dtype=int), np.full((1, 3), -1)
    right[0, -1] = -1
    found = accepted_length([right, wrong], ((0,),))
    assert (found.tokens, found.passes) == (8 + 2, 4 + 2)  # 5 / 3, where the mean of the means is 3 / 2
    assert found.mean_accepted_length == pytest.approx(10 / 6)


def test_a_chain_guesses_from_the_root_onwards():
    """`ranks[0, p]` is of the token after `p`; a pass whose root is the token at `p + 1` drafts what follows that."""
    chain = chained(np.array([[5, 0, 0, -1, 0]]), 3)
    assert chain.tolist() == [[0, 0, -1, 0, -1], [0, -1, 0, -1, -1], [-1, 0, -1, -1, -1]]
    assert accepted_length([chain], ((0,), (0, 0), (0, 0, 0))).histogram == (0, 1, 1, 0)
