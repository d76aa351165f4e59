"""Growth policies: static shapes, best-first growth against brute force, dynamic trees against a plain twin."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treedec import BestFirst, CostCurve, StaticTree, TokenTree, TreeError
from treedec.growth import DynamicTree

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


# Passes of all sizes cost the same.
NOTHING_MORE = CostCurve((1,), (1.0,))


class Opinions:
    """A drafter whose candidates depend on the row and the whole path; tokens tell depth and rank, as above.

    Args:
        rows: how many rows.
        branching: candidates per node.
        total: what the scores of a node's candidates add up to.
    """

    def __init__(self, rows, branching, seed=0, total=1.0):
        self.rows, self.branching, self.seed, self.total, self.calls = rows, branching, seed, total, []

    def after(self, row, path):
        """Ids and falling scores of what may follow a path."""
        generator = torch.Generator().manual_seed(hash((self.seed, row, path)) % 2**31)
        scores = self.total * torch.randn(self.branching, generator=generator, dtype=torch.float64).softmax(0)
        return [10 * (len(path) + 1) + rank for rank in range(self.branching)], scores.sort(descending=True).values

    def _scored(self, paths):
        both = [[self.after(row, path) for path in row_paths] for row, row_paths in enumerate(paths)]
        ids = torch.tensor([[ids for ids, _ in row] for row in both])
        return ids, torch.stack([torch.stack([scores for _, scores in row]) for row in both])

    def first(self):
        self.paths = [[] for _ in range(self.rows)]
        return self._scored([[()]] * self.rows)

    def expand(self, level, tokens, parents):
        self.calls.append(tokens.shape[1])
        new = [
            [(*(self.paths[row][parent] if parent >= 0 else ()), token) for token, parent in zip(*pair, strict=True)]
            for row, pair in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True))
        ]
        self.paths = [before + more for before, more in zip(self.paths, new, strict=True)]
        assert all(len(path) == level - 1 for row in new for path in row)
        return self._scored(new)

    def grow(self, policy, room, limit=64, costs=NOTHING_MORE):
        tree, scores = policy.grow([9] * self.rows, self.first(), self.expand, room, limit, costs)
        assert scores.shape == tree.tokens.shape and scores.device.type == "cpu"
        return tree

    def value(self, row, path):
        """The product of the scores along a path."""
        value = 1.0
        for depth, token in enumerate(path):
            ids, scores = self.after(row, path[:depth])
            value *= float(scores[ids.index(token)])
        return value


def dynamic_twin(policy, opinions, row, room, limit):
    """The paths of one row's tree, by the plain algorithm, which drafts all levels; and of each level but the first
    how much the nodes that it follows are together worth, of those that are worth following."""
    found, level, reaches = {}, {(): 1.0}, []
    for _ in range(min(policy.depth, room)):
        best = sorted(level, key=level.get, reverse=True)[: policy.width]
        if () not in level:
            kept = sorted(found.values(), reverse=True)[: min(policy.nodes, limit) - 1]
            last = kept[-1] if 0 < len(kept) == min(policy.nodes, limit) - 1 else 0
            pays = [path for path in best if level[path] > max(last, 0) and level[path] >= policy.min_probability]
            reaches.append(sum(level[path] for path in pays))
        level = {
            (*path, token): level[path] * float(score)
            for path in best
            for token, score in zip(*opinions.after(row, path), strict=True)
        }
        found |= level
    worth = [path for path in found if found[path] >= policy.min_probability and found[path] > 0]
    return set(sorted(worth, key=found.get, reverse=True)[: max(0, min(policy.nodes, limit) - 1)]), reaches


def mean_reaches(policy, opinions, rows, room):
    by_row = [dynamic_twin(policy, opinions, row, room, 64)[1] for row in range(rows)]
    return [sum(level) / rows for level in zip(*by_row, strict=True)]


def row_paths(tree, row):
    count = int(tree.counts[row])
    return paths(tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist())


@given(
    st.builds(
        DynamicTree,
        nodes=st.integers(1, 20),
        depth=st.integers(1, 4),
        width=st.integers(1, 5),
        branching=st.integers(1, 4),
        min_probability=st.sampled_from([0.0, 0.03, 0.2]),
        min_reach=st.just(0.0),
    ),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(1, 24),
    st.integers(0, 10**6),
)
def test_a_dynamic_tree_equals_its_plain_twin_in_every_row(policy, room, limit, seed):
    opinions = Opinions(len(room), policy.branching, seed)
    tree = opinions.grow(policy, room, limit)
    tree.validate(100, room)
    assert len(opinions.calls) < policy.depth and sum(opinions.calls) <= policy.expanded
    for row, levels in enumerate(room):
        assert row_paths(tree, row) == dynamic_twin(policy, opinions, row, levels, limit)[0]


def test_a_dynamic_tree_tells_what_its_nodes_are_worth():
    opinions, policy = Opinions(3, 4), DynamicTree(nodes=9, depth=3)
    tree, scores = policy.grow([9, None, 9], opinions.first(), opinions.expand, [3, 0, 2], 64)
    for row in (0, 2):
        found, tokens, parents = [], tree.tokens[row].tolist(), tree.parents[row].tolist()
        for node in range(int(tree.counts[row])):
            found.append((*found[parents[node]], tokens[node]) if node else ())
            assert float(scores[row, node]) == pytest.approx(opinions.value(row, found[-1]), rel=1e-6)
        assert scores[row, : len(found)].tolist() == sorted(scores[row, : len(found)].tolist(), reverse=True)


@given(st.floats(0.001, 0.5), st.integers(1, 4), st.integers(0, 10**6))
def test_levels_and_nodes_that_passes_are_too_dear_for_are_not_drafted(slope, rows, seed):
    costs, opinions = CostCurve((1, 101), (1.0, 1 + 100 * slope)), Opinions(rows, 3, seed)
    least = costs.least_score(rows)
    policy = DynamicTree(nodes=20, depth=4, width=3, branching=3, min_reach=0.1)
    opinions.grow(policy, [4] * rows, costs=costs)
    twin = replace(policy, min_probability=max(least, policy.min_probability))
    reaches = mean_reaches(twin, opinions, rows, 4)
    assert len(opinions.calls) == next((i for i, mean in enumerate(reaches) if mean < 0.1 + least), len(reaches))
    # Who wants every tree as large as it can be gets it.
    whole, same = replace(policy, min_probability=0.0, min_reach=0.0), Opinions(rows, 3, seed)
    assert same.grow(whole, [4] * rows, costs=costs).counts.tolist() == [20] * rows


@given(st.floats(0.01, 1.0), st.integers(2, 20), st.integers(1, 3), st.integers(0, 10**6))
def test_a_dynamic_tree_stops_where_rows_are_not_likely_to_get(reach, nodes, rows, seed):
    policy = DynamicTree(nodes=nodes, depth=5, width=3, branching=3, min_reach=reach)
    opinions = Opinions(rows, 3, seed)
    tree = opinions.grow(policy, [5] * rows)
    # A level is drafted for all rows or for none, by what it is worth in all.
    reaches = mean_reaches(policy, opinions, rows, 5)
    deepest = 1 + next((place for place, mean in enumerate(reaches) if mean < reach), len(reaches))
    assert len(opinions.calls) == deepest - 1
    whole = replace(policy, depth=deepest, min_reach=0.0)
    for row in range(rows):
        assert row_paths(tree, row) == dynamic_twin(whole, opinions, row, 5, 64)[0]


def test_a_dynamic_tree_asks_only_about_nodes_whose_children_could_still_enter():
    sure = Opinions(2, 1)
    assert sure.grow(DynamicTree(nodes=9, depth=4, branching=1), [5, 5]).counts.tolist() == [5, 5]
    assert sure.calls == [1, 1, 1]
    unsure = Opinions(2, 4, total=0.01)
    assert unsure.grow(DynamicTree(), [5, 5]).counts.tolist() == [1, 1] and not unsure.calls
    full = Opinions(1, 4)  # two nodes, and of the four candidates none below the second is worth anything
    full.grow(DynamicTree(nodes=3, depth=4, width=4), [5])
    assert all(call < 2 for call in full.calls)


def test_a_dynamic_tree_stays_connected_where_children_are_worth_as_much_as_their_parents():
    class Certain(Opinions):
        def after(self, row, path):
            ids, _ = super().after(row, path)
            return ids, torch.tensor([1.0] * self.branching, dtype=torch.float64)

    for nodes in range(2, 30):
        tree = Certain(2, 3).grow(DynamicTree(nodes=nodes, depth=3, width=3), [3, 2])
        tree.validate(100, [3, 2])
        for row, room in enumerate((3, 2)):
            row_paths(tree, row)
            # Ties go to the candidate seen first, so no level below the second is needed before 3 + 9 are in.
            assert int(tree.counts[row]) == min(nodes, 4 if nodes < 5 else 13 if room == 2 else 22)


def test_a_dynamic_tree_leaves_out_worthless_and_undefined_candidates():
    scores = torch.tensor([[[0.5, 0.0, torch.nan]], [[torch.nan, 1.0, 0.25]]])
    ids = torch.tensor([[[1, 2, 3]], [[4, 5, 6]]])
    tree, values = DynamicTree(depth=1, min_probability=0.0).grow([9, 9], (ids, scores), None, [3, 3], 64)
    assert values.tolist() == [[1.0, 0.5, 0.0], [1.0, 1.0, 0.25]]
    assert [row_paths(tree, row) for row in range(2)] == [{(1,)}, {(5,), (6,)}]


def test_finished_rows_and_rows_without_room_get_no_candidates():
    opinions = Opinions(3, 4)

    def grow(room, limit):
        return DynamicTree().grow([9, None, 8], opinions.first(), opinions.expand, room, limit)[0]

    assert grow([2, 0, 0], 64).counts.tolist()[1:] == [0, 1]
    for room, limit in (([0, 0, 0], 64), ([3, 0, 3], 1)):
        tree = grow(room, limit)
        assert tree.counts.tolist() == [1, 0, 1] and tree.tokens[:, 0].tolist() == [9, 0, 8]


@pytest.mark.parametrize(
    "bad",
    [
        *({name: 0} for name in ("nodes", "branching", "depth", "width")),
        *({name: value} for name in ("min_probability", "min_reach") for value in (1.5, -0.1)),
    ],
)
def test_a_dynamic_tree_refuses_settings_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        DynamicTree(**bad)
