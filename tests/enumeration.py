"""Exact enumeration: the distribution of what an acceptance rule commits on random targets, without a model.

A rule meets chance only through a `Chance`. `outcomes` replays a random experiment once for every possible course of
its decisions and multiplies their probabilities, so that distributions come out exactly. Drafts are drawn when a rule
looks at them, not before: what it never looks at need not be enumerated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from treedec.acceptance import TreeView
from treedec.drafter import draw_children

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


@dataclass(frozen=True)
class Shape:
    """What a tree has below one node: how its children are found, and the shape below each of them.

    A subtree belongs to a *place* among the siblings, not to a token. `scheme` is one of `draw_children`, or

    - `"mixed"`: half of them drawn, half of them the top of q, which may carry the same tokens; the drawn ones are
      listed last.
    """

    scheme: str = "none"
    below: tuple[Shape, ...] = ()

    @property
    def depth(self):
        return 1 + max(shape.depth for shape in self.below) if self.below else 0

    @property
    def nodes(self):
        return 1 + sum(shape.nodes for shape in self.below)


def levels(*specifications):
    """The shape with the same `(width, scheme)` at every node of a level."""
    if not specifications:
        return Shape()
    (width, scheme), *rest = specifications
    return Shape(scheme, (levels(*rest),) * width)


def children(q, shape, chance):
    """The children that a shape asks for, as `(tokens, which of them were drawn, q to claim)`."""
    width = len(shape.below)
    if shape.scheme != "mixed":
        found = draw_children(q, width, shape.scheme, chance)
        return found.tokens, [place < found.drawn for place in range(len(found.tokens))], found.probabilities
    drawn = draw_children(q, width - width // 2, "drawn", chance)
    top = draw_children(q, width // 2, "top", chance).tokens if width > 1 else []
    return top + drawn.tokens, [False] * len(top) + [True] * drawn.drawn, drawn.probabilities


Distort = Callable[[list, list, torch.Tensor, torch.Tensor], tuple[list, list, torch.Tensor]]


class Drafted:
    """A tree over a text, of which a node's children are drawn when they are looked at.

    Args:
        tables: to draft from.
        text: before the root.
        shape: of the tree.
        chance: takes the random decisions.
        distort: alters the children of every node, `(tokens, drawn, claimed q, q) → (tokens, drawn, claimed q)`, as
            the controls do.
    """

    def __init__(self, tables, text, shape, chance, distort: Distort | None = None):
        self.tables, self.chance, self.distort = tables, chance, distort
        self.tokens, self.drawn, self.texts, self.shapes = [None], [False], [text], [shape]
        self._children, self._claimed = {}, {}
        self.children = _Lookup(self._children_of)

    def _children_of(self, node):
        if node not in self._children:
            self._children[node], self._claimed[node] = [], None
            shape, text = self.shapes[node], self.texts[node]
            if shape.below:
                q = self.tables.q(text)
                tokens, drawn, claimed = children(q, shape, self.chance)
                if self.distort is not None:
                    tokens, drawn, claimed = self.distort(tokens, drawn, claimed, q)
                self._claimed[node] = claimed
                for token, how, below in zip(tokens, drawn, shape.below, strict=False):  # q may not allow all of them
                    self._children[node].append(len(self.tokens))
                    self.tokens.append(token)
                    self.drawn.append(how)
                    self.texts.append((*text, token))
                    self.shapes.append(below)
        return self._children[node]

    def claimed(self, node):
        self._children_of(node)
        return self._claimed[node]


@dataclass
class _Lookup:
    """`lookup[key]` is `function(key)`."""

    function: Callable

    def __getitem__(self, key):
        return self.function(key)


@dataclass
class Given:
    """A tree that is there already: what `Drafted` draws, written down. Children are deterministic without `q`."""

    tokens: list
    children: list
    q: list | None = None
    drawn: list | None = None

    def __post_init__(self):
        self.drawn = self.drawn or [self.q is not None] * len(self.tokens)

    def claimed(self, node):
        return None if self.q is None else self.q[node]


def view(tree, tables, text, chance, stops_after=lambda path, token: False, noise=None):
    def scores_at(node, path):
        assert path[-1] == node
        return tables.p((*text, *(tree.tokens[above] for above in path[1:]))).log()

    return TreeView(tree.tokens, tree.children, scores_at, stops_after, tree.claimed, tree.drawn, noise, chance)


def block(tree, accepted):
    """The tokens that a rule commits."""
    return (*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token)


def blocks(rule, tables, shape, length=99, distort=None):
    """Probability of every block that one round may commit after an empty text, in a row that ends with `length`
    tokens."""

    def one_round(chance):
        tree = Drafted(tables, (), shape, chance, distort)
        here = view(tree, tables, (), chance, lambda path, token: len(path) >= length)
        return block(tree, rule.accept(here))

    return distribution(outcomes(one_round))


@cache
def target(tables, length, text=()):
    """`[V] * length`: the target's joint distribution of the tokens after a text."""
    if length == 0:
        return np.ones(())
    p = tables.p(text).numpy()
    return np.stack([p[token] * target(tables, length - 1, (*text, token)) for token in range(tables.vocab)])


def error(rule, tables, shape, length=None, distort=None):
    """By how much the joint distribution of the first `length` tokens (as many as a round can commit) is off.

    They are those of one round, with the rest sampled from the target: with blocks like that, every further round
    leaves the distribution as it is.
    """
    length = shape.depth + 1 if length is None else length
    found = np.zeros([tables.vocab] * length)
    for tokens, probability in blocks(rule, tables, shape, length, distort).items():
        found[tokens] += probability * target(tables, length - len(tokens), tokens)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    return np.abs(found - target(tables, length)).max()


def mean_length(rule, tables, shape):
    """Expected number of tokens that a round commits."""
    return sum(probability * len(tokens) for tokens, probability in blocks(rule, tables, shape).items())
