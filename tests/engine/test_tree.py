"""Token trees: derived structure against a naive walk, and errors that name the node."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treedec import TokenTree, TreeError

VOCAB = 50


@st.composite
def rows(draw):
    """`(tokens, parents)` per row; a row may be finished (empty)."""
    result = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 12))
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
        result.append((tokens, [-1 if i == 0 else draw(st.integers(0, i - 1)) for i in range(count)]))
    return result


def way_up(parents, node):
    """The node and its ancestors, the root last."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@given(rows())
def test_ancestors_and_depths_equal_a_naive_walk(given_rows):
    tree = TokenTree.from_rows(given_rows)
    for row, (_, parents) in enumerate(given_rows):
        for node in range(tree.width):
            path = way_up(parents, node) if node < len(parents) else [node]
            assert tree.ancestors[row, node].nonzero().squeeze(-1).tolist() == sorted(path)
            assert int(tree.depths[row, node]) == len(path) - 1


@given(rows())
def test_children_equal_a_naive_search_in_the_given_order(given_rows):
    tree = TokenTree.from_rows(given_rows)
    for row, (_, parents) in enumerate(given_rows):
        nodes = range(len(parents))
        assert tree.children(row) == [[child for child in nodes if parents[child] == node] for node in nodes]


@given(rows())
def test_from_rows_keeps_every_row_and_pads_the_rest(given_rows):
    tree = TokenTree.from_rows(given_rows)
    assert tree.batch == len(given_rows) and tree.width == max(1, max(len(tokens) for tokens, _ in given_rows))
    for row, (tokens, parents) in enumerate(given_rows):
        count = int(tree.counts[row])
        assert tree.tokens[row, :count].tolist() == tokens and tree.parents[row, :count].tolist() == parents


@given(rows())
def test_a_well_formed_tree_with_just_enough_room_is_valid(given_rows):
    tree = TokenTree.from_rows(given_rows)
    deepest = tree.depths.amax(1).tolist()
    tree.validate(VOCAB, deepest)
    for row, depth in enumerate(deepest):
        if depth > 0:
            room = [*deepest[:row], depth - 1, *deepest[row + 1 :]]
            with pytest.raises(TreeError, match=f"row {row}, node .*deeper"):
                tree.validate(VOCAB, room)


def test_chains_have_one_branch():
    tree = TokenTree.chains([[5, 6, 7], [], [8]])
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, 0], [-1, 0, 0]]
    assert tree.counts.tolist() == [3, 0, 1]
    assert tree.depths.tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0]]


@given(rows(), st.integers(1, 16))
def test_padding_a_tree_changes_none_of_its_nodes(given_rows, width):
    tree = TokenTree.from_rows(given_rows)
    wider, known = tree.padded(width), tree.width
    assert wider.width == max(width, known)
    assert torch.equal(wider.ancestors[:, :known, :known], tree.ancestors)
    assert [wider.children(row) for row in range(tree.batch)] == [tree.children(row) for row in range(tree.batch)]
    wider.validate(VOCAB, tree.depths.amax(1).tolist())


GOOD = ([3, 4, 5], [-1, 0, 1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (([3, 4, 5], [-1, 2, 0]), r"row 1, node 1 \(token 4, parent 2\): its parent is not an earlier node"),
        (([3, 4, 5], [-1, 0, 2]), r"row 1, node 2 \(token 5, parent 2\): its parent"),
        (([3, 4, 5], [-1, -1, 0]), r"row 1, node 1 \(token 4, parent -1\): its parent"),
        (([3, 4, 5], [0, 0, 0]), r"row 1, node 0 \(token 3, parent 0\): its parent"),
        (
            ([3, VOCAB, 5], [-1, 0, 0]),
            rf"row 1, node 1 \(token {VOCAB}, parent 0\): its token is outside .* of {VOCAB}",
        ),
        (([3, 4, -1], [-1, 0, 0]), r"row 1, node 2 \(token -1, parent 0\): its token is outside"),
        (([3, 4, 5, 6], [-1, 0, 1, 2]), r"row 1, node 3 \(token 6, parent 2\): it is deeper"),
    ],
)
def test_a12_a_malformed_node_is_named(bad, message):
    with pytest.raises(TreeError, match=message):
        TokenTree.from_rows([GOOD, bad]).validate(VOCAB, [2, 2])


def test_a12_parents_of_padding_mean_nothing():
    tree = TokenTree(torch.tensor([[3, 4, 4]]), torch.tensor([[-1, 5, -7]]), torch.tensor([1]))
    tree.validate(VOCAB, [0])
    assert torch.equal(tree.ancestors[0], torch.eye(3, dtype=torch.bool))


def test_a12_tokens_of_padding_take_part_in_the_pass_and_are_checked():
    tree = TokenTree(torch.tensor([[3, VOCAB]]), torch.tensor([[-1, 0]]), torch.tensor([1]))
    with pytest.raises(TreeError, match=r"row 0, node 1 .*outside the vocabulary"):
        tree.validate(VOCAB, [0])


def test_a12_a_wrong_number_of_rows_is_refused():
    with pytest.raises(TreeError, match="the tree has 1 rows, the batch has 2"):
        TokenTree.from_rows([GOOD]).validate(VOCAB, [2, 2])


@pytest.mark.parametrize("count", [4, -1])
def test_a12_counts_beyond_the_nodes_are_refused(count):
    tree = TokenTree(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, 0, 1]]), torch.tensor([count]))
    with pytest.raises(TreeError, match="counts"):
        tree.validate(VOCAB, [2])


@pytest.mark.parametrize(
    ("tokens", "parents", "counts"),
    [((1, 3), (1, 2), (1,)), ((3,), (3,), (1,)), ((1, 3), (1, 3), (2,)), ((1, 3), (1, 3), ())],
)
def test_a12_shapes_that_do_not_fit_are_refused(tokens, parents, counts):
    tree = TokenTree(*(torch.zeros(shape, dtype=torch.long) for shape in (tokens, parents, counts)))
    with pytest.raises(TreeError, match=r"must be \[B, N\], \[B, N\] and \[B\]"):
        tree.validate(VOCAB, [2])


def test_a12_tokens_and_parents_of_different_number_are_refused():
    with pytest.raises(TreeError, match="row 1: 3 tokens but 2 parents"):
        TokenTree.from_rows([GOOD, ([1, 2, 3], [-1, 0])])


def test_trees_are_cut_and_selected_row_by_row():
    tree = TokenTree.from_rows([([7, 1, 2, 3], [-1, 0, 1, 1]), ([], []), ([8, 4], [-1, 0])])
    cut = tree.cut(3)
    assert cut.tokens.tolist() == [[7, 1, 2], [0, 0, 0], [8, 4, 0]] and cut.parents[:, 0].tolist() == [-1] * 3
    assert cut.counts.tolist() == [3, 0, 2] and tree.cut(4) is tree and tree.counts.tolist() == [4, 0, 2]
    swapped = tree.select([2, 0, 1])
    assert swapped.tokens[:, 0].tolist() == [8, 7, 0] and swapped.counts.tolist() == [2, 4, 0]
    assert tree.select([2]).tokens.tolist() == [[8, 4, 0, 0]] and tree.select([2]).parents.tolist()[0][:2] == [-1, 0]
