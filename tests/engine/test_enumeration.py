"""The rules that keep the target's distribution, proved by exact enumeration beside known mistakes that do not."""

from itertools import product
from math import prod

import pytest
import torch
from enumeration import BIASED, EXACT, Shape, Tables, blocks, distribution, error, levels, mean_length, outcomes
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from treedec.acceptance import AcceptanceRule, Accepted, Residual, Traversal, ratio, remove, residual
from treedec.drafter import Drafting, draw_children

LOSSLESS = (Residual(), Traversal())
by_name = {"ids": lambda rule: rule.name}

SHAPES = {
    "chain": [(1, "drawn")] * 2,
    "long chain": [(1, "drawn")] * 4,
    "two siblings": [(2, "drawn")] * 2,
    "three siblings": [(3, "drawn"), (1, "drawn")],
    "deterministic chain": [(1, "top")] * 2,
    "deterministic tree": [(3, "top"), (2, "top")],
    "drawn over deterministic": [(2, "drawn"), (2, "top")],
    "deterministic over drawn": [(2, "top"), (2, "drawn")],
    "Hu": [(3, "hu"), (2, "hu")],
    "mixed": [(4, "mixed"), (1, "mixed")],
    "everything": [(2, "hu"), (2, "drawn"), (1, "top")],
    "none": [],
}


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", LOSSLESS, **by_name)
def test_the_target_distribution_is_committed(rule, shape, vocab, missing):
    assert error(rule, Tables(vocab, missing=missing), levels(*SHAPES[shape])) < EXACT


@pytest.mark.parametrize("rule", LOSSLESS, **by_name)
def test_with_every_token_drafted_the_target_distribution_is_committed(rule):
    assert error(rule, Tables(4), levels((4, "drawn"))) < EXACT


@st.composite
def shapes(draw, nodes=6, schemes=("drawn", "top", "hu", "mixed")):
    """Any tree of up to `nodes` nodes below the root."""
    parents = [draw(st.integers(0, node)) for node in range(draw(st.integers(1, nodes)))]

    def grown(node):
        below = tuple(grown(child) for child, parent in enumerate(parents, 1) if parent == node)
        return Shape(draw(st.sampled_from(schemes)) if below else "none", below)

    return grown(0)


# p and q that exclude a token, up to all but one, as top-k and grammars make them.
tables = st.builds(Tables, st.integers(2, 3), st.integers(0, 10**6), st.integers(0, 1))


def check_exactness(shape, tables, length):
    for rule in LOSSLESS:
        assert error(rule, tables, shape, min(length, shape.depth + 1)) < EXACT, rule.name


# A row that ends after `length` tokens cuts the blocks of deeper trees.
@settings(max_examples=800)
@given(shapes(), tables, st.integers(1, 6))
def test_the_target_distribution_is_committed_whatever_the_tree(shape, tables, length):
    check_exactness(shape, tables, length)


@pytest.mark.slow
@settings(max_examples=1_000)
@given(shapes(7), st.builds(Tables, st.integers(3, 4), st.integers(0, 10**6), st.integers(0, 2)), st.integers(1, 6))
def test_the_target_distribution_is_committed_whatever_the_tree_often(shape, tables, length):
    check_exactness(shape, tables, length)


# Controls: mistakes that were made. Each differs from an exact rule or draft above in one thing.


class SubtractsWhatIsLeft(Residual):
    """Off by one: subtracts the q that the *next* sibling is drawn from."""

    def step(self, view, path, scores):
        p, q = scores.softmax(-1), view.draft_at(path[-1])
        for child in view.children[path[-1]]:
            token = view.tokens[child]
            if view.chance.accept(ratio(p, q, token)):
                return token, child
            q = remove(q, token)
            p = residual(p, q)
        return view.chance.sample(p), None


class DrawsPerPath(AcceptanceRule):
    """Draws a token for every node of every *path*: paths that share a node have several chances there."""

    name, lossless, samples, drafting = "per path", True, True, Drafting.TOP

    def accept(self, view):
        def follow(path):
            token = view.chance.sample(view.probabilities(path))
            below = [child for child in view.children[path[-1]] if view.tokens[child] == token]
            return follow([*path, *below]) if below else Accepted(path, token, view.stops_after(path, token))

        # One try for each child of the root: the longest counts.
        return max((follow([0]) for _ in view.children[0] or [0]), key=lambda accepted: len(accepted.nodes))


class ByHand(Traversal):
    """Traversal of a chain of two, written out, with S / (S + 1 − a) or another probability in its place."""

    def __init__(self, share):
        self.share = share

    def accept(self, view):
        first = view.children[0][0]
        leaf = view.children[first][0]
        (p, q), (below, drafted) = self.distributions(view, [0]), self.distributions(view, [0, first])
        reach = ratio(p, q, view.tokens[first]).clamp(max=1)
        if view.chance.accept((reach * ratio(below, drafted, view.tokens[leaf])).clamp(max=1)):
            return self.end(view, [0, first, leaf], view.probabilities([0, first, leaf]))
        left = (reach * below - drafted).clamp(min=0)
        if view.chance.accept(self.share(left.sum(), reach)):
            return self.end(view, [0, first], left if left.sum() > 0 else below)
        return self.end(view, [0], residual(p, q))

    @staticmethod
    def distributions(view, path):
        return view.probabilities(path), view.draft_at(path[-1])

    @staticmethod
    def end(view, path, p):
        return Accepted(path, view.chance.sample(p), False)


def as_if_drawn(tokens, drawn, claimed, q):
    return tokens, [True] * len(tokens), q


def sorted_by_q(tokens, drawn, claimed, q):
    return sorted(tokens, key=lambda token: -float(q[token])), drawn, claimed


def pruned_by_q(tokens, drawn, claimed, q):
    tokens = [token for token in tokens if q[token] > 0.2]
    return tokens, [True] * len(tokens), claimed


def lying(tokens, drawn, claimed, q):
    return tokens, drawn, None if claimed is None else torch.full_like(q, 1 / len(q))


DRAFT_MISTAKES = {
    "softmax q for a deterministic child": ("top", as_if_drawn),
    "drawn siblings sorted by their q": ("drawn", sorted_by_q),
    "drawn siblings pruned by their q": ("drawn", pruned_by_q),
    "another q than the one drawn from": ("drawn", lying),
    "Hu's draft that claims q itself": ("hu", lambda tokens, drawn, claimed, q: (tokens, drawn, q)),
}


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("mistake", DRAFT_MISTAKES)
@pytest.mark.parametrize("rule", LOSSLESS, **by_name)
def test_control_wrong_drafts_are_biased(rule, mistake, vocab):
    scheme, distort = DRAFT_MISTAKES[mistake]
    assert error(rule, Tables(vocab), levels((2, scheme), (2, scheme)), distort=distort) > BIASED


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize(
    ("rule", "scheme"),
    [(SubtractsWhatIsLeft(), "drawn"), (DrawsPerPath(), "top")],
    ids=["x removed before subtracting", "one draw per path"],
)
def test_control_wrong_rules_are_biased(rule, scheme, vocab):
    assert error(rule, Tables(vocab), levels((2, scheme), (2, scheme))) > BIASED


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize(
    ("share", "biased"),
    [
        (lambda total, reach: total / (total + 1 - reach), False),
        (lambda total, reach: total / (1 - reach), True),
        (lambda total, reach: total / reach, True),
        (lambda total, reach: total, True),
    ],
    ids=["S / (S + 1 − a)", "S / (1 − a)", "S / a", "S"],
)
def test_control_traversal_with_another_denominator_is_biased(share, biased, vocab):
    found = error(ByHand(share), Tables(vocab), levels((1, "drawn"), (1, "drawn")))
    assert found > BIASED if biased else found < EXACT


def test_control_the_undistorted_draft_of_the_controls_is_exact():
    assert error(Residual(), Tables(4), levels((2, "drawn"), (2, "drawn")), distort=as_if_drawn) < EXACT


# What the rules are elsewhere, and how often they accept.


def block_verification(tables, length):
    """Probability of every block that block verification (Sun et al. 2024, arXiv:2403.10444) commits: section 4 of the
    paper, written from its formulas for a whole chain X at once."""
    found = {}
    for chain in product(range(tables.vocab), repeat=length):
        p = [tables.p(chain[:place]) for place in range(length + 1)]
        q = [tables.q(chain[:place]) for place in range(length)]
        drafted = prod(float(q[place][token]) for place, token in enumerate(chain))
        if drafted == 0:
            continue
        reach, accept, after = [1.0], [], []  # p_i, h_i, and the unnormalised distribution of the token after i
        for place, token in enumerate(chain):
            reach.append(min(1.0, reach[-1] * float(p[place][token] / q[place][token])))
        for place in range(length):
            after.append((reach[place] * p[place] - q[place]).clamp(min=0))
            total = float(after[-1].sum())
            accept.append(total / (total + 1 - reach[place]) if total > 0 else 0.0)
        after.append(p[length])
        accept = [1.0, *accept[1:], reach[length]]
        rejected = drafted
        for place in range(length, -1, -1):
            for token in range(tables.vocab):
                if after[place][token] > 0:
                    share = float(after[place][token] / after[place].sum())
                    key = (*chain[:place], token)
                    found[key] = found.get(key, 0.0) + rejected * accept[place] * share
            rejected *= 1 - accept[place]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_traversal_of_a_chain_is_block_verification(length, seed):
    tables = Tables(3, seed)
    ours = blocks(Traversal(), tables, levels(*[(1, "drawn")] * length))
    expected = block_verification(tables, length)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-12)
    assert {key: value for key, value in ours.items() if value > 1e-12} == pytest.approx(expected, abs=1e-12)


@st.composite
def nested(draw, nodes=7):
    """Trees in which no sibling has more below it than the ones tested before it, as best-first growth makes them."""

    def cut(shape, width, depth):
        below = tuple(cut(child, width, depth - 1) for child in shape.below[:width]) if depth > 0 else ()
        return Shape(shape.scheme if below else "none", below)

    def grown(depth):
        if depth == 0:
            return Shape()
        below = [grown(draw(st.integers(0, depth - 1)))]
        while len(below) < 3 and draw(st.booleans()):
            below.append(cut(below[-1], draw(st.integers(0, 3)), draw(st.integers(0, 3))))
        return Shape(draw(st.sampled_from(("drawn", "top", "hu"))), tuple(below))

    shape = grown(draw(st.integers(1, 3)))
    assume(shape.nodes <= nodes)
    return shape


@settings(max_examples=400)
@given(nested(), tables)
def test_traversal_accepts_at_least_as_much_as_residual_where_earlier_siblings_have_more_below_them(shape, tables):
    least, most = (mean_length(rule, tables, shape) for rule in LOSSLESS)
    assert most >= least - 1e-12
    if shape.depth == 1:
        assert most == pytest.approx(least, abs=1e-12)


def test_traversal_may_accept_less_where_a_later_sibling_has_more_below_it():
    siblings = (Shape(), levels((2, "drawn")))
    for below, accepts_less in ((siblings, True), (siblings[::-1], False)):
        shape = Shape("drawn", (Shape("drawn", below),))
        least, most = (mean_length(rule, Tables(3, seed=1), shape) for rule in LOSSLESS)
        assert (most < least - 0.001) == accepts_less


def test_traversal_accepts_more_of_deeper_trees():
    for shape in ("chain", "two siblings", "Hu"):
        rules = [mean_length(rule, Tables(3), levels(*SHAPES[shape])) for rule in LOSSLESS]
        assert rules[1] > rules[0] + 0.01


@given(tables, st.integers(1, 3))
def test_hus_scheme_is_accepted_as_often_as_it_can_be(tables, width):
    p, q = tables.p(()), tables.q(())
    best = q.topk(min(width - 1, int((q > 0).sum()))).indices
    left = q.clone()
    left[best] = 0
    expected = p[best].sum()
    if left.sum() > 0:
        expected += torch.minimum(p, left / left.sum())[left > 0].sum()
    accepted = mean_length(Residual(), tables, levels((width, "hu"))) - 1
    assert accepted == pytest.approx(float(expected), abs=1e-12)


def drawn_last(tokens, drawn, claimed, q):
    return tokens[::-1], drawn[::-1], claimed


@pytest.mark.parametrize("rule", LOSSLESS, **by_name)
def test_drawn_children_are_tested_first_wherever_they_stand(rule):
    expected = blocks(rule, Tables(4), levels((3, "hu")))
    assert blocks(rule, Tables(4), levels((3, "hu")), distort=drawn_last) == pytest.approx(expected, abs=1e-12)


def test_children_are_drawn_as_they_say():
    q = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    drawn = distribution(outcomes(lambda chance: tuple(draw_children(q, 2, "drawn", chance).tokens)))
    assert drawn[1, 3] == pytest.approx(0.4 * 0.3 / 0.6) and len(drawn) == 12
    top = draw_children(q, 2, "top", None)
    assert (top.tokens, top.drawn, top.probabilities) == ([1, 3], 0, None)
    (hu,) = (found for found, _ in outcomes(lambda chance: draw_children(q, 3, "hu", chance)) if found.tokens[0] == 0)
    assert (hu.tokens, hu.drawn) == ([0, 1, 3], 1)
    torch.testing.assert_close(hu.probabilities, torch.tensor([1 / 3, 0, 2 / 3, 0], dtype=torch.float64))


@pytest.mark.parametrize(("scheme", "tokens", "drawn"), [("drawn", [1], 1), ("top", [1], 0), ("hu", [1], 1)])
def test_children_end_where_q_does(scheme, tokens, drawn):
    (found,) = (found for found, _ in outcomes(lambda chance: draw_children(torch.eye(3)[1], 3, scheme, chance)))
    assert (found.tokens, found.drawn) == (tokens, drawn)


@pytest.mark.parametrize(("width", "scheme"), [(0, "drawn"), (2, "best")])
def test_unknown_ways_to_draw_are_refused(width, scheme):
    with pytest.raises(ValueError, match="give at least 1, by 'drawn', 'top' or 'hu'"):
        draw_children(torch.ones(4) / 4, width, scheme, None)
