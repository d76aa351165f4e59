"""Acceptance rules, without a model: what they commit and how they ask; then through the engine, on a tiny one."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from enumeration import Drafted, Given, Replay, Tables, block, levels, outcomes, view
from hypothesis import given
from hypothesis import strategies as st
from kit import fresh_model

import treedec
from treedec import Draft, Drafter, DraftSession, TokenTree
from treedec.acceptance import Coupled, Greedy, Residual, Traversal, Typical, acceptance_rule, ratio, remove, residual
from treedec.drafter import draw_children
from treedec.reference import speculative_step_verification


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
        chain = Drafted(tables, (), levels(*[(1, "drawn")] * length), NumpyChance(seed))
        for node in range(length):  # draw it now: its decisions come before those of the rule
            chain.children[node]
        chain.chance = NumpyChance(seed + 1000)
        p = torch.stack([tables.p(text) for text in chain.texts]).numpy()
        q = torch.stack([chain.claimed(node) for node in range(length)]).numpy()
        expected = speculative_step_verification(chain.tokens[1:], p, q, np.random.default_rng(seed + 1000))
        accepted = Residual().accept(view(chain, tables, (), chain.chance))
        assert list(block(chain, accepted)) == expected
        lengths.add(len(expected))
    assert lengths == {1, 2, 3, 4, 5}


def test_a07_a_residual_that_rounds_to_nothing_leaves_the_target():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p)
    assert residual(p, torch.tensor([0.5, 0.5])).tolist() == [0, 1]
    assert remove(torch.tensor([0.0, 1.0]), 1).tolist() == [0, 0]
    assert remove(torch.tensor([0.5, 0.25, 0.25]), 0).tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_drafter_that_claims_never_to_draw_its_token_does_no_harm(dtype):
    """Also what a probability that underflows amounts to."""
    p = torch.tensor([0.5, 0.5, 0.0], dtype=dtype)
    q = torch.tensor([0.0, 1.0, 0.0], dtype=dtype)
    assert ratio(p, q, 0) > 1 and ratio(p, q, 2) == 0 and ratio(p, torch.full_like(q, 1e-45), 0) > 1
    tree = Given([None, 2, 0, 0], [[1, 2], [], [3], []], [q] * 4)
    for rule in (Residual(), Traversal()):
        for (nodes, token), probability in outcomes(lambda chance, rule=rule: accepted(rule, tree, p, chance)):
            assert nodes == (0, 2, 3) and token in (0, 1) and probability > 0


def accepted(rule, tree, p, chance):
    """`(nodes, token)` that a rule commits where every p is the same."""
    found = rule.accept(view(tree, Fixed(p), (), chance))
    return tuple(found.nodes), found.token


class Fixed:
    """The same p after every text."""

    def __init__(self, p):
        self.values = p

    def p(self, text):
        return self.values


def test_a07_drafts_from_the_target_itself_are_accepted_whole_in_float32():
    p = torch.randn(2_000, generator=torch.Generator().manual_seed(0)).mul(4).softmax(-1)
    tree = Given([None, *p.topk(3).indices.tolist(), 5], [[1], [2], [3], [4], []], [p.clone() for _ in range(5)])
    for rule in (Residual(), Traversal()):
        found = rule.accept(view(tree, Fixed(p), (), treedec.chance.TorchChance()))
        assert found.nodes == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rule", [Residual(), Traversal()], ids=lambda rule: rule.name)
def test_a07_rounding_leaves_something_to_draw_from(rule):
    """Every child is rejected although p̂ = q̂, as rounding can have it: p̂ stays."""
    p = torch.full((3,), 1 / 3)
    tree = Given([None, 0, 1, 2], [[1], [2], [3], []], [p] * 4)
    never = Replay([])
    never.accept = lambda probability: False
    found = rule.accept(view(tree, Fixed(p), (), never))
    assert found.nodes == [0] and found.token == 0


@pytest.mark.parametrize("rule", [Residual(), Traversal()], ids=lambda rule: rule.name)
def test_a_rejected_child_is_not_followed_whatever_its_drafter_claimed(rule):
    """The claim leaves p̂ at the rejected token; the deterministic child beside it has another one."""
    p, claim = torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.1])
    tree = Given([None, 0, 1], [[1, 2], [], []], [claim] * 3, [False, True, False])

    class Never(Replay):
        def accept(self, probability):
            return False

    found = rule.accept(view(tree, Fixed(p), (), Never([0])))
    assert (found.nodes, found.token) == ([0], 0)


# The end of a row.


STOPPING = Given([None, 0, 1, 0, 1], [[1, 4], [2], [3], [], []], None)


@pytest.mark.parametrize("rule", [Greedy(), Residual(), Traversal(), Typical()], ids=lambda rule: rule.name)
def test_a01_the_row_is_asked_once_per_committed_token_and_nothing_else(rule):
    p = Fixed(torch.tensor([0.6, 0.4], dtype=torch.float64))
    for stop in (None, 1, 2, 3):

        def commit(chance, stop=stop):
            asked = []

            def stops_after(path, token):
                asked.append((*path, token))
                return len(path) == stop

            return rule.accept(view(STOPPING, p, (), chance, stops_after)), asked

        for (found, asked), _ in outcomes(commit):
            tokens = block(STOPPING, found)
            assert asked == [(*found.nodes[: place + 1], tokens[place]) for place in range(len(tokens))]
            assert found.finished == (len(tokens) == stop) and len(tokens) <= (stop or 9)


# Coupled and greedy: what is committed does not depend on the tree.


@st.composite
def trees(draw, vocab):
    """Any tree, siblings with the same token included."""
    parents = [draw(st.integers(0, node)) for node in range(draw(st.integers(0, 9)))]
    children = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, 1):
        children[parent].append(node)
    return Given([None, *(draw(st.integers(0, vocab - 1)) for _ in parents)], children)


@given(st.lists(trees(3), min_size=8, max_size=8), st.integers(0, 50))
def test_greedy_and_coupled_choose_the_same_whatever_the_trees(forest, seed):
    tables = Tables(3, seed)
    noise = torch.empty(8, 3, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))
    for rule in (Greedy(), Coupled()):
        texts = []
        for grown in (forest, [Given([None], [[]])] * 8):
            text = ()
            for tree in grown:
                if len(text) < 8:
                    stops = lambda path, token, text=text: len(text) + len(path) >= 8  # noqa: E731
                    here = view(tree, tables, text, None, stops, lambda depth, text=text: noise[len(text) + depth])
                    text += block(tree, rule.accept(here))
            texts.append(text)
        assert texts[0] == texts[1] and len(texts[0]) == 8


def test_coupled_commits_the_samples_of_plain_decoding():
    """10,000 random (tree, p, q, seed): most of their trees hold several of the tokens that the noise favours."""
    generator, longest = np.random.default_rng(0), []
    for seed in range(10_000):
        vocab, depth = int(generator.integers(2, 6)), int(generator.integers(1, 4))
        tables = Pool(vocab, seed)
        noise = torch.from_numpy(generator.exponential(size=(depth + 1, vocab)))
        tree, texts = Given([None], [[]]), [()]
        for node in range(6):
            if node < len(texts) and len(texts[node]) < depth:
                ranked = (tables.q(texts[node]) / noise[len(texts[node])]).argsort(descending=True)
                for token in ranked[: generator.integers(0, 3)].tolist():
                    tree.children[node].append(len(tree.tokens))
                    tree.tokens.append(token)
                    tree.children.append([])
                    texts.append((*texts[node], token))
        found = block(
            tree, Coupled().accept(view(tree, tables, (), None, noise=lambda depth, noise=noise: noise[depth]))
        )
        plain = ()
        while len(plain) < len(found):
            plain += (int((tables.p(plain) / noise[len(plain)]).argmax()),)
        assert found == plain, (seed, tree)
        longest.append(len(found))
    assert sum(length > 2 for length in longest) > 2_000


class Pool:
    """Random p and q that resemble each other, from a few distributions made once: quick to look up."""

    def __init__(self, vocab, seed):
        self.table, self.seed = _pool(vocab), seed

    def p(self, text):
        return self.table[hash((self.seed, text)) % len(self.table)]

    def q(self, text):
        return (self.p(text) + self.p((*text, 0))) / 2


@cache
def _pool(vocab):
    return torch.from_numpy(np.random.default_rng(vocab).dirichlet(np.ones(vocab), 512))


def test_coupled_follows_the_noise_and_greedy_the_argmax():
    tables, tree = Tables(3), Given([None], [[]])
    favours_last = torch.tensor([1.0, 1.0, 1e-9])
    assert Coupled().accept(view(tree, tables, (), None, noise=lambda depth: favours_last)).token == 2
    assert Greedy().accept(view(tree, tables, (), None)).token == int(tables.p(()).argmax())


# Choosing a rule.


@pytest.mark.parametrize("name", ["greedy", "coupled", "residual", "traversal", "typical", None])
def test_a08_without_sampling_every_rule_is_greedy(name):
    assert acceptance_rule(name, do_sample=False).name == "greedy"


def test_rules_by_name_and_their_promises():
    names = ("coupled", "residual", "traversal", "typical")
    rules = {name: acceptance_rule(name, do_sample=True) for name in names}
    assert [name for name, rule in rules.items() if rule.lossless] == ["coupled", "residual", "traversal"]
    assert [name for name, rule in rules.items() if rule.whole_tree] == ["traversal", "typical"]
    assert Greedy().lossless and not Greedy().whole_tree
    assert acceptance_rule(None, do_sample=True).name == "coupled"
    mine = Typical(epsilon=0.2)
    assert acceptance_rule(mine, do_sample=True) is mine


def test_unfitting_rules_are_refused():
    for sampled in (False, True):
        with pytest.raises(
            ValueError, match="unknown acceptance rule 'medusa'; known are greedy, coupled, residual, traversal"
        ):
            acceptance_rule("medusa", sampled)
    with pytest.raises(ValueError, match="'greedy' does not sample"):
        acceptance_rule("greedy", do_sample=True)


# Through the whole engine, on a real (tiny) model.


class Drawn(Drafter):
    """Two children at the root and under each of its children, by a scheme, from a skewed q shaped like the target;
    `lies` about that q."""

    name, max_nodes = "drawn", 7

    def __init__(self, scheme, lies=False):
        self.scheme, self.lies = scheme, lies

    def start(self, target, batch, capacity):
        return _DrawnSession(self)


class _DrawnSession(DraftSession):
    def __init__(self, plan):
        self.plan = plan

    def propose(self, state):
        q = state.shape(torch.linspace(2, -1.5, 8)[None])[0].softmax(-1)
        rows, drawn, claimed = [], torch.zeros(len(state.texts), 7, dtype=torch.bool), torch.zeros_like(q)
        for row, (text, room) in enumerate(zip(state.texts, state.room, strict=True)):
            tokens, parents = ([], []) if text is None else ([text[-1]], [-1])
            for node in range(0 if text is None else (0, 1, 3)[min(room, 2)]):
                found = draw_children(q, 2, self.plan.scheme, state.chance)
                drawn[row, len(tokens) : len(tokens) + found.drawn] = True
                tokens += found.tokens
                parents += [node] * len(found.tokens)
                claimed = found.probabilities
            rows.append((tokens, parents))
        tree = TokenTree.from_rows(rows)
        if self.plan.lies:
            claimed = torch.full_like(q, 1 / len(q))
        return Draft(tree, claimed.expand(tree.batch, tree.width, -1), drawn[:, : tree.width])


def triples(acceptance, drafter, draws, temperature=1.0, top_k=0):
    """Frequencies of the three new tokens after the first (the prefill's), and those to expect. Both `[8, 8, 8]`."""
    model, batch = fresh_model("llama", vocab_size=8), 200
    ids, counts = torch.tensor([[1, 2, 3]]), np.zeros((8, 8, 8))
    for _ in range(draws // batch):
        out = treedec.generate(
            model, ids.expand(batch, -1), drafter, acceptance=acceptance, max_new_tokens=4, do_sample=True,
            temperature=temperature, top_k=top_k,
        )  # fmt: skip
        np.add.at(counts, tuple(out[:, 4:].T.numpy()), 1)
    texts = torch.tensor([[1, 2, 3, *text] for text in product(range(8), repeat=3)])
    scores = model(input_ids=texts).logits[:, 2:].float() / temperature  # the four distributions on the way
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[..., -1:], -torch.inf)
    p, tokens = scores.softmax(-1).double(), texts[:, 3:]
    before = p[:, :3].gather(2, tokens[:, :, None]).prod(1)  # [512, 1], of three tokens
    expected = (before * p[:, 3]).reshape(8, 8, 8, 8).sum(0).numpy()
    return counts, expected * counts.sum()


def chi_square(counts, expected):
    """Standard deviations by which Pearson's statistic exceeds its mean; rare cells are pooled."""
    assert counts[expected == 0].sum() == 0, "a token outside the support"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("draws", [4_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("acceptance", "scheme", "sampling"),
    [
        ("residual", "drawn", {"top_k": 3}),
        ("residual", "hu", {"temperature": 1.3}),
        ("traversal", "drawn", {"temperature": 1.3}),
        ("traversal", "hu", {"top_k": 3}),
    ],
    ids=str,
)
def test_a06_lossless_rules_through_the_engine_pass_a_chi_square_test(acceptance, scheme, sampling, draws):
    assert chi_square(*triples(acceptance, Drawn(scheme), draws, **sampling)) < 4


@pytest.mark.parametrize(("acceptance", "scheme"), [("residual", "hu"), ("traversal", "drawn")])
def test_a06_control_a_drafter_that_lies_about_q_fails_it(acceptance, scheme):
    assert chi_square(*triples(acceptance, Drawn(scheme, lies=True), 2_000)) > 10
