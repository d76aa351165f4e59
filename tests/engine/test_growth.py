"""Growth policies: static shapes, and best-first growth against brute force."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treedec import BestFirst, StaticTree, TokenTree, TreeError

CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
# Depth d offers the tokens 10 d, 10 d + 1, …, so that a path can be read off its tokens.
RANKED = [([10 * depth + rank for rank in range(4)], [0.5, 0.25, 0.15, 0.1]) for depth in range(1, 5)]


def paths(tokens, parents):
    """The tree as a set of token paths."""
    found = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    assert len(set(found)) == len(found), "siblings must differ"
    return set(found[1:])


def expected_paths(choices):
    return {tuple(10 * depth + rank for depth, rank in enumerate(path, 1)) for path in choices}


def test_a_static_tree_has_the_paths_of_its_choices():
    tree = StaticTree(CHOICES)
    assert (tree.depth, tree.branching, tree.nodes) == (3, 2, 7)
    assert paths(*tree.grow(9, RANKED, limit=64)) == expected_paths(CHOICES)


def test_a12_the_order_of_choices_changes_nothing():
    grown = {str(StaticTree(order).grow(9, RANKED, 64)) for order in itertools.permutations(CHOICES[:5])}
    assert len(grown) == 1


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((), "at least one path"),
        (((),), r"path \(\) must be a non-empty"),
        (((0,), (-1,)), r"path \(-1,\) must be"),
        (((0,), (1, 0)), r"path \(1, 0\) has no parent: \(1,\) is missing"),
        (((0,), (0, 0), (0,)), r"path \(0,\) is given twice"),
    ],
)
def test_a12_malformed_choices_are_named(choices, message):
    with pytest.raises(TreeError, match=message):
        StaticTree(choices)


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_static_tree_shrinks_to_what_fits(limit, depth, width):
    candidates = [(tokens[:width], scores[:width]) for tokens, scores in RANKED[:depth]]
    tokens, parents = StaticTree(CHOICES).grow(9, candidates, limit)
    assert tokens[0] == 9 and len(tokens) <= limit
    TokenTree.from_rows([(tokens, parents)]).validate(100, [depth])
    fitting = [path for path in CHOICES if len(path) <= depth and max(path) < width]
    kept = paths(tokens, parents)
    assert kept <= expected_paths(fitting) and len(kept) == min(len(fitting), limit - 1)


@st.composite
def scored(draw):
    """Up to three depths of up to three candidates each, with falling scores."""
    score = st.floats(0.01, 1.0)
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return [
        (
            [10 * depth + rank for rank in range(width)],
            sorted(draw(st.lists(score, min_size=width, max_size=width)), reverse=True),
        )
        for depth, width in enumerate(widths, 1)
    ]


def all_nodes(candidates):
    """Every path of ranks with its probability."""
    result = {}
    for depth in range(1, len(candidates) + 1):
        for ranks in itertools.product(*(range(len(scores)) for _, scores in candidates[:depth])):
            result[ranks] = math.prod(candidates[level][1][rank] for level, rank in enumerate(ranks))
    return result


def best_total(nodes, size):
    """The largest sum of probabilities over all subtrees of `size` nodes below the root, by exhaustive growth."""
    layer = {frozenset()}
    for _ in range(min(size, len(nodes))):
        layer = {
            tree | {node}
            for tree in layer
            for node in nodes
            if node not in tree and (len(node) == 1 or node[:-1] in tree)
        }
    return max(sum(nodes[node] for node in tree) for tree in layer)


def total(candidates, tokens, parents):
    return sum(
        math.prod(candidates[level][1][token % 10] for level, token in enumerate(path))
        for path in paths(tokens, parents)
    )


@given(scored(), st.integers(1, 5))
def test_best_first_equals_the_best_subtree_by_brute_force(candidates, size):
    tokens, parents = BestFirst(nodes=size + 1).grow(9, candidates, limit=64)
    nodes = all_nodes(candidates)
    assert len(tokens) - 1 == min(size, len(nodes))
    assert total(candidates, tokens, parents) == pytest.approx(best_total(nodes, size), abs=1e-12)


@given(scored(), st.floats(0.0, 1.0))
def test_best_first_stops_at_the_nodes_that_are_worth_it(candidates, threshold):
    tokens, parents = BestFirst(nodes=64, min_probability=threshold).grow(9, candidates, limit=64)
    worth = {path for path, probability in all_nodes(candidates).items() if probability >= threshold * (1 + 1e-12)}
    doubtful = {path for path, probability in all_nodes(candidates).items() if probability >= threshold * (1 - 1e-12)}
    assert expected_paths(worth) <= paths(tokens, parents) <= expected_paths(doubtful)


@given(scored(), st.integers(1, 6), st.integers(1, 6))
def test_best_first_keeps_to_the_smaller_of_both_limits_and_stays_topological(candidates, nodes, limit):
    tokens, parents = BestFirst(nodes=nodes).grow(9, candidates, limit)
    assert len(tokens) == min(nodes, limit, 1 + len(all_nodes(candidates)))
    TokenTree.from_rows([(tokens, parents)]).validate(100, [len(candidates)])


def test_best_first_keeps_to_its_depth_and_branching():
    tokens, parents = BestFirst(nodes=64, branching=2, depth=2).grow(9, RANKED, limit=64)
    assert paths(tokens, parents) == expected_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])


def test_best_first_without_candidates_is_the_root():
    assert BestFirst().grow(9, [], limit=8) == ([9], [-1])


@pytest.mark.parametrize(
    "bad", [{"nodes": 0}, {"branching": 0}, {"depth": 0}, {"min_probability": 1.5}, {"min_probability": -0.1}]
)
def test_best_first_refuses_settings_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        BestFirst(**bad)
