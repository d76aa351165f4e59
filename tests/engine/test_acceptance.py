"""Acceptance rules, without a model: what they commit on random targets, by exact enumeration.

A rule meets chance only through a `Chance`. `outcomes` replays a random experiment once for every possible course of
its decisions and multiplies their probabilities, so that the distribution of what is committed comes out exactly.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import fresh_model

import treedec
from treedec import Draft, Drafter, DraftSession, TokenTree
from treedec.acceptance import Coupled, Greedy, Residual, TreeView, Typical, acceptance_rule, remove, residual
from treedec.reference import speculative_step_verification

EXACT, BIASED = 1e-12, 1e-3


class Replay:
    """A `Chance` that takes the decisions of a script, then the first possible one, and notes all the others."""

    def __init__(self, script):
        self.script, self.taken, self.probability, self.untried = script, [], 1.0, []

    def decide(self, weights):
        place, possible = len(self.taken), [option for option, weight in enumerate(weights) if weight > 0]
        if place < len(self.script):
            option = self.script[place]
        else:
            option = possible[0]
            self.untried += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(option)
        self.probability *= weights[option]
        return option

    def accept(self, probability):
        probability = min(1.0, float(probability))
        return self.decide([1 - probability, probability]) == 1

    def sample(self, probabilities):
        return self.decide((probabilities / probabilities.sum()).tolist())


def outcomes(experiment):
    """Every `(result, probability)` of `experiment(chance)`."""
    pending = [[]]
    while pending:
        chance = Replay(pending.pop())
        result = experiment(chance)
        pending += chance.untried
        yield result, chance.probability


def distribution(results):
    """Summed probability of each result."""
    total = {}
    for result, probability in results:
        total[result] = total.get(result, 0.0) + probability
    return total


@dataclass(frozen=True)
class Tables:
    """A random target p(next | text) and drafter q(next | text).

    Attributes:
        vocab: V.
        seed: which tables.
        missing: how many tokens each distribution excludes, as top-k would.
    """

    vocab: int
    seed: int = 0
    missing: int = 0

    def p(self, text):
        return _table(self.vocab, self.missing, (self.seed, 0, *text))

    def q(self, text):
        return _table(self.vocab, self.missing, (self.seed, 1, *text))


@cache
def _table(vocab, missing, key):
    generator = np.random.default_rng(key)
    weights = generator.dirichlet(np.ones(vocab))
    weights[generator.permutation(vocab)[:missing]] = 0
    return torch.from_numpy(weights / weights.sum())


@dataclass
class Drafted:
    """A tree over a text, and the distribution that each node's children were drawn from (None: deterministic)."""

    tokens: list
    children: list
    q: list


SAMPLED, TOP = "sampled", "top"


def draw(q, width, kind, chance):
    """Children of one node: `width` tokens drawn from `q` without replacement, or its `width` best; and their q."""
    if kind == TOP:
        return q.topk(width).indices.tolist(), None
    tokens, left = [], q.clone()
    while len(tokens) < width and left.sum() > 0:
        tokens.append(chance.sample(left))
        left[tokens[-1]] = 0
    return tokens, q


def drafted(tables, text, shape, room, chance, distort=None):
    """`shape` gives `(width, kind)` per depth; `distort` alters the children of every node, as the controls do."""
    tree, texts = Drafted([None], [[]], [None]), [text]
    level = [0]
    for width, kind in shape[:room]:
        below = []
        for node in level:
            q = tables.q(texts[node])
            tokens, tree.q[node] = draw(q, width, kind, chance)
            if distort is not None:
                tokens, tree.q[node] = distort(tokens, q)
            for token in tokens:
                tree.children[node].append(len(tree.tokens))
                below.append(len(tree.tokens))
                tree.tokens.append(token)
                tree.children.append([])
                tree.q.append(None)
                texts.append((*texts[node], token))
        level = below
    return tree


def view(tree, tables, text, chance, stops_after=lambda path, token: False, noise=None):
    def scores_at(node, path):
        assert path[-1] == node
        return tables.p((*text, *(tree.tokens[above] for above in path[1:]))).log()

    drawn = [False] * len(tree.tokens)
    for node, children in enumerate(tree.children):
        for child in children:
            drawn[child] = tree.q[node] is not None
    return TreeView(tree.tokens, tree.children, scores_at, stops_after, lambda node: tree.q[node], drawn, noise, chance)


def committed(tree, accepted):
    return (*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token)


def joint(rule, tables, shape, length=3, distort=None):
    """The distribution of the first `length` tokens, decoded in as many rounds as it takes: `[V, …, V]`."""
    result = np.zeros([tables.vocab] * length)
    reached = {(): 1.0}
    for size in range(length):
        for text in [text for text in reached if len(text) == size]:

            def block(chance, text=text):
                tree = drafted(tables, text, shape, length - len(text) - 1, chance, distort)
                here = view(tree, tables, text, chance, lambda path, token: len(text) + len(path) >= length)
                return text + committed(tree, rule.accept(here))

            for longer, probability in distribution(outcomes(block)).items():
                reached[longer] = reached.get(longer, 0.0) + reached[text] * probability
    for text, probability in reached.items():
        if len(text) == length:
            result[text] = probability
    return result


def target(tables, length=3):
    result = np.zeros([tables.vocab] * length)
    for text in product(range(tables.vocab), repeat=length):
        result[text] = np.prod([float(tables.p(text[:place])[text[place]]) for place in range(length)])
    return result


def error(rule, tables, shape, length=3, distort=None):
    found = joint(rule, tables, shape, length, distort)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    return np.abs(found - target(tables, length)).max()


SHAPES = {
    "chain": [(1, SAMPLED)] * 2,
    "two siblings": [(2, SAMPLED)] * 2,
    "three siblings": [(3, SAMPLED), (1, SAMPLED)],
    "deterministic chain": [(1, TOP)] * 2,
    "deterministic tree": [(3, TOP), (2, TOP)],
    "sampled over deterministic": [(2, SAMPLED), (2, TOP)],
    "deterministic over sampled": [(2, TOP), (2, SAMPLED)],
    "none": [],
}


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_commits_the_target_distribution(shape, vocab, missing):
    assert error(Residual(), Tables(vocab, missing=missing), SHAPES[shape]) < EXACT


@pytest.mark.parametrize("seed", range(1, 6))
def test_residual_commits_the_target_distribution_for_other_tables(seed):
    assert error(Residual(), Tables(3, seed), SHAPES["two siblings"]) < EXACT
    assert error(Residual(), Tables(5, seed, missing=2), SHAPES["chain"]) < EXACT


DEEP = {
    "chain": [(1, SAMPLED)] * 3,
    "siblings at the top": [(2, SAMPLED), (1, SAMPLED), (1, TOP)],
    "alternating": [(2, TOP), (1, SAMPLED), (2, TOP)],
}


@pytest.mark.parametrize("shape", DEEP)
def test_residual_commits_the_target_distribution_three_levels_deep(shape):
    assert error(Residual(), Tables(3), DEEP[shape], length=4) < EXACT


def test_residual_with_every_token_drafted_still_commits_the_target_distribution():
    assert error(Residual(), Tables(4), [(4, SAMPLED)], length=2) < EXACT


class RemovesBeforeSubtracting(Residual):
    """Off by one: subtracts the q that the *next* sibling is drawn from."""

    def step(self, view, path, scores):
        node = path[-1]
        p, q = scores.softmax(-1), view.draft_at(node)
        for child in view.children[node]:
            token = view.tokens[child]
            if view.chance.accept(p[token] / q[token]):
                return token, child
            q = remove(q, token)
            p = residual(p, q)
        return view.chance.sample(p), None


def as_if_drawn(tokens, q):
    return tokens, q


def sorted_by_q(tokens, q):
    return sorted(tokens, key=lambda token: -float(q[token])), q


def pruned_by_q(tokens, q):
    return [token for token in tokens if q[token] > 0.2], q


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize(
    ("rule", "kind", "distort"),
    [
        (Residual(), TOP, as_if_drawn),
        (Residual(), SAMPLED, sorted_by_q),
        (Residual(), SAMPLED, pruned_by_q),
        (RemovesBeforeSubtracting(), SAMPLED, as_if_drawn),
    ],
    ids=["softmax q for a deterministic child", "sorted by q", "pruned by q", "x removed before subtracting"],
)
def test_control_known_mistakes_are_biased(rule, kind, distort, vocab):
    assert error(rule, Tables(vocab), [(2, kind)] * 2, distort=distort) > BIASED


def test_control_the_undistorted_draft_of_the_controls_is_exact():
    assert error(Residual(), Tables(4), SHAPES["two siblings"], distort=as_if_drawn) < EXACT


class NumpyChance:
    """Takes its decisions from the generator in the way of the reference."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def accept(self, probability):
        return self.generator.random() < float(probability)

    def sample(self, probabilities):
        weights = probabilities.numpy()
        return int(self.generator.choice(len(weights), p=weights / weights.sum()))


def test_residual_on_chains_agrees_with_the_reference_draw_by_draw():
    lengths = set()
    for seed in range(300):
        tables, length = Tables(5, seed, missing=seed % 2), 1 + seed % 4
        generator = np.random.default_rng(seed)
        tree, text = Drafted([None], [[]], [None]), ()
        for place in range(length):
            tree.q[place] = tables.q(text)
            token = int(generator.choice(5, p=tree.q[place].numpy()))
            tree.children[place].append(place + 1)
            tree.tokens.append(token)
            tree.children.append([])
            tree.q.append(None)
            text = (*text, token)
        p = torch.stack([tables.p(text[:place]) for place in range(length + 1)]).numpy()
        q = torch.stack(tree.q[:length]).numpy()
        expected = speculative_step_verification(text, p, q, np.random.default_rng(seed + 1000))
        accepted = Residual().accept(view(tree, tables, (), NumpyChance(seed + 1000)))
        assert list(committed(tree, accepted)) == expected
        lengths.add(len(expected))
    assert lengths == {1, 2, 3, 4, 5}


def test_a07_a_residual_that_rounds_to_nothing_leaves_the_target():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p)
    assert residual(p, torch.tensor([0.5, 0.5])).tolist() == [0, 1]
    assert remove(torch.tensor([0.0, 1.0]), 1).tolist() == [0, 0]
    assert remove(torch.tensor([0.5, 0.25, 0.25]), 0).tolist() == [0, 0.5, 0.5]


# Coupled and greedy: what is committed does not depend on the tree.


@st.composite
def trees(draw, vocab):
    """Any tree, siblings with the same token included."""
    parents = [draw(st.integers(0, node)) for node in range(draw(st.integers(0, 9)))]
    children = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, 1):
        children[parent].append(node)
    tokens = [None, *(draw(st.integers(0, vocab - 1)) for _ in parents)]
    return Drafted(tokens, children, [None] * len(tokens))


@given(st.lists(trees(3), min_size=8, max_size=8), st.integers(0, 50))
def test_greedy_and_coupled_choose_the_same_whatever_the_trees(forest, seed):
    tables = Tables(3, seed)
    noise = torch.empty(8, 3, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))
    for rule in (Greedy(), Coupled()):
        texts = []
        for grown in (forest, [Drafted([None], [[]], [None])] * 8):
            text = ()
            for tree in grown:
                if len(text) < 8:
                    stops = lambda path, token, text=text: len(text) + len(path) >= 8  # noqa: E731
                    here = view(tree, tables, text, None, stops, lambda depth, text=text: noise[len(text) + depth])
                    text += committed(tree, rule.accept(here))
            texts.append(text)
        assert texts[0] == texts[1] and len(texts[0]) == 8


def test_coupled_follows_the_noise_and_greedy_the_argmax():
    tables, tree = Tables(3), Drafted([None], [[]], [None])
    favours_last = torch.tensor([1.0, 1.0, 1e-9])
    assert Coupled().accept(view(tree, tables, (), None, noise=lambda depth: favours_last)).token == 2
    assert Greedy().accept(view(tree, tables, (), None)).token == int(tables.p(()).argmax())


# Typical acceptance: its own rule, and that it says what it is.


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
    tree = Drafted([None, 0, 2, 3, 3, 1, 0], [[1, 2, 3], [4], [5], [], [], [6], []], [None] * 7)
    for _, chance in ((0, Replay([0])), (1, Replay([2]))):
        accepted = Typical().accept(view(tree, p, (), chance))
        assert accepted.nodes == [0, 2, 5, 6] and accepted.token == chance.taken[0]


def test_typical_prefers_the_more_probable_of_equally_long_paths():
    tree = Drafted([None, 2, 0, 1, 1], [[1, 2], [3], [4], [], []], [None] * 5)
    assert Typical().accept(view(tree, Fixed((0.5, 0.3, 0.12, 0.08)), (), Replay([]))).nodes == [0, 2, 4]


def test_typical_draws_the_last_token_from_the_acceptable_ones():
    tree, p = Drafted([None], [[]], [None]), Fixed((0.5, 0.3, 0.12, 0.08))
    drawn = distribution(outcomes(lambda chance: Typical().accept(view(tree, p, (), chance)).token))
    assert drawn == pytest.approx({0: 0.5 / 0.92, 1: 0.3 / 0.92, 2: 0.12 / 0.92})


def test_a01_typical_ends_with_an_accepted_token_that_ends_the_row():
    tree, p = Drafted([None, 1, 0, 0], [[1], [2], [3], []], [None] * 4), Fixed((0.5, 0.3, 0.12, 0.08))
    accepted = Typical().accept(view(tree, p, (), Replay([]), lambda path, token: token == 0))
    assert (accepted.nodes, accepted.token, accepted.finished) == ([0, 1], 0, True)


@pytest.mark.parametrize("shape", ["deterministic tree", "none"])
def test_typical_deviates_from_the_target_distribution(shape):
    assert error(Typical(), Tables(4), SHAPES[shape]) > BIASED


@pytest.mark.parametrize("bad", [{"epsilon": 0}, {"epsilon": 1}, {"delta": 0}, {"delta": 1.5}])
def test_typical_refuses_thresholds_out_of_range(bad):
    with pytest.raises(ValueError, match="epsilon and delta"):
        Typical(**bad)


# Choosing a rule.


@pytest.mark.parametrize("name", ["greedy", "coupled", "residual", "typical", None])
def test_a08_without_sampling_every_rule_is_greedy(name):
    assert acceptance_rule(name, do_sample=False).name == "greedy"


def test_rules_by_name_and_their_promises():
    lossless = {name: acceptance_rule(name, do_sample=True).lossless for name in ("coupled", "residual", "typical")}
    assert lossless == {"coupled": True, "residual": True, "typical": False} and Greedy().lossless
    assert acceptance_rule(None, do_sample=True).name == "coupled"
    mine = Typical(epsilon=0.2)
    assert acceptance_rule(mine, do_sample=True) is mine


def test_unfitting_rules_are_refused():
    for sampled in (False, True):
        with pytest.raises(ValueError, match="unknown acceptance rule 'medusa'; known are greedy, coupled, residual"):
            acceptance_rule("medusa", sampled)
    with pytest.raises(ValueError, match="'greedy' does not sample"):
        acceptance_rule("greedy", do_sample=True)


# Residual through the whole engine, on a real (tiny) model.


class Drawn(Drafter):
    """Draws two siblings from a skewed q, shaped like the target, and a child under each; `lies` about that q."""

    name, max_nodes = "drawn", 5

    def __init__(self, logits, lies=False):
        self.logits, self.lies = logits, lies

    def start(self, target, batch, capacity):
        return _DrawnSession(self)


class _DrawnSession(DraftSession):
    def __init__(self, plan):
        self.plan = plan

    def propose(self, state):
        q = state.shape(self.plan.logits[None])[0].softmax(-1)
        rows = []
        for text, room in zip(state.texts, state.room, strict=True):
            tokens, parents = ([], []) if text is None else ([text[-1]], [-1])
            if text is not None and room > 0:
                first = state.chance.sample(q)
                tokens += [first, state.chance.sample(remove(q, first))]
                parents += [0, 0]
            if text is not None and room > 1:
                tokens += [state.chance.sample(q), state.chance.sample(q)]
                parents += [1, 2]
            rows.append((tokens, parents))
        tree = TokenTree.from_rows(rows)
        claimed = torch.full_like(q, 1 / len(q)) if self.plan.lies else q
        return Draft(tree, claimed.expand(tree.batch, tree.width, -1))


def triples(drafter, draws, **sampling):
    """Frequencies of three new tokens (the first comes from the prefill), and those to expect. Both `[8, 8, 8]`."""
    model, batch = fresh_model("llama", vocab_size=8), 100
    ids = torch.tensor([[1, 2, 3]])
    counts = np.zeros((8, 8, 8))
    arguments = {"max_new_tokens": 3, "do_sample": True, **sampling}
    for _ in range(draws // batch):
        out = treedec.generate(model, ids.expand(batch, -1), drafter, acceptance="residual", **arguments)
        np.add.at(counts, tuple(out[:, 3:].T.numpy()), 1)
    expected = np.zeros((8, 8, 8))
    _, decoding = treedec.api._prepare(model, ids, None, None, arguments)
    warp = lambda text: decoding.request.processors[0](text, model(input_ids=text).logits[:, -1].float()).softmax(-1)[0]  # noqa: E731
    for text in product(range(8), repeat=2):
        grown = torch.tensor([[1, 2, 3, *text]])
        a, b = warp(ids)[text[0]], warp(grown[:, :4])[text[1]]
        expected[text] = (a * b * warp(grown)).numpy()
    return counts, expected * counts.sum()


def chi_square(counts, expected):
    """Standard deviations by which Pearson's statistic exceeds its mean; rare cells are pooled."""
    assert counts[expected == 0].sum() == 0, "a token outside the support"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


SKEWED = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])


@pytest.mark.parametrize("draws", [4_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_k": 0, "temperature": 1.3}], ids=str)
def test_a06_residual_through_the_engine_passes_a_chi_square_test(sampling, draws):
    assert chi_square(*triples(Drawn(SKEWED), draws, **sampling)) < 4


def test_a06_control_a_drafter_that_lies_about_q_fails_it():
    assert chi_square(*triples(Drawn(SKEWED, lies=True), 4_000, top_k=0)) > 10
