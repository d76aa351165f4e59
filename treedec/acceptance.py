"""Acceptance rules: which path of a verified tree is committed, and which token follows it.

A rule sees one row through a `TreeView` and returns an `Accepted` path. `greedy` and `coupled` commit what
`model.generate` would commit, token for token; `residual` and `traversal` commit a sample of the target's distribution;
`typical` does neither and says so.

Notation: p is the target's distribution after all logits processors and warpers, q the distribution that the children
of a node were really drawn from, [x]+ = max(x, 0), norm[x] = x / Σx.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from treedec.chance import Chance
from treedec.drafter import Drafting


@dataclass(frozen=True)
class Accepted:
    """A committed path.

    Attributes:
        nodes: the root and the accepted nodes below it.
        token: the token after the last of them: the correction, the bonus token, or an accepted token that ends the
            row.
        finished: whether `token` ends the row.
    """

    nodes: list[int]
    token: int
    finished: bool


@dataclass
class TreeView:
    """One row's verified tree. Scores are computed when a rule asks for them, on the true prefix of the node.

    Attributes:
        tokens: token of each node.
        children: children of each node, in the order drawn.
        scores_at: `(node, path) → [V]` float scores after all processors; `path` leads from the root to the node.
        stops_after: `(path, token) → bool`, whether committing `token` after `path` ends the row.
        draft_at: `node → [V]` the distribution that the drawn children of the node were drawn from, or None.
        drawn: for each node, whether it was drawn from its parent's distribution; the others were chosen
            deterministically.
        noise_at: `depth → [V]` exponential noise for the token that follows a node of that depth.
        chance: random decisions.
    """

    tokens: list[int]
    children: list[list[int]]
    scores_at: Callable[[int, list[int]], Tensor]
    stops_after: Callable[[list[int], int], bool]
    draft_at: Callable[[int], Tensor | None]
    drawn: list[bool]
    noise_at: Callable[[int], Tensor]
    chance: Chance

    @cached_property
    def _probabilities(self) -> dict[int, Tensor]:
        return {}

    def probabilities(self, path: list[int]) -> Tensor:
        """`[V]` p after the last node of `path`; processors run once per node."""
        node = path[-1]
        if node not in self._probabilities:
            self._probabilities[node] = self.scores_at(node, path).softmax(-1)
        return self._probabilities[node]

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`."""
        return next((child for child in self.children[node] if self.tokens[child] == token), None)


class AcceptanceRule(ABC):
    """A way to turn a verified tree into committed tokens.

    Attributes:
        name: what `treedec.generate(acceptance=…)` calls it.
        lossless: whether the output keeps the target's own tokens (greedy, coupled) or distribution (residual,
            traversal).
        samples: whether it is for `do_sample=True`.
        drafting: how it wants drafts chosen.
        whole_tree: whether it scores nodes that may not be committed, which processors with a memory must not see.
    """

    name: str
    lossless: bool
    samples: bool
    drafting: Drafting
    whole_tree: bool = False

    @abstractmethod
    def accept(self, view: TreeView) -> Accepted:
        """Choose the path to commit."""


class Walk(AcceptanceRule):
    """Rules that decide node by node from the root down, so that processors see only the committed prefix."""

    def accept(self, view: TreeView) -> Accepted:
        return walk(
            self,
            [view],
            lambda paths: [view.scores_at(path[-1], path) for path in paths],
            lambda paths, tokens: [view.stops_after(path, token) for path, token in zip(paths, tokens, strict=True)],
        )[0]

    @abstractmethod
    def step(self, view: TreeView, path: list[int], scores: Tensor) -> tuple[int, int | None]:
        """The token that follows the last node of `path`, and the child that carries it, if any; `scores` is `[V]`."""


def walk(
    rule: Walk,
    views: Sequence[TreeView],
    scores_after: Callable[[list[list[int]]], Sequence[Tensor]],
    stops_after: Callable[[list[list[int]], list[int]], Sequence[bool]],
) -> list[Accepted]:
    """Walk the trees of rows that advance together, one token a step, until one of them leaves its tree.

    Every step asks once for the scores and once whether the rows end, as `generate` does. A row that ends stays as it
    is (its path no longer grows and its token is meaningless) while the others go on.

    Args:
        rule: chooses each token.
        views: one per row.
        scores_after: `paths → [V]` processed scores after the last node of each path.
        stops_after: `(paths, tokens) → bool` for each row.
    """
    paths = [[0] for _ in views]
    accepted: list[Accepted | None] = [None] * len(views)
    while True:
        going = [row for row, done in enumerate(accepted) if done is None]
        scores = scores_after(paths)
        steps = {row: rule.step(views[row], paths[row], scores[row]) for row in going}
        tokens = [steps[row][0] if row in steps else 0 for row in range(len(views))]
        finished = stops_after(paths, tokens)  # once per committed token, as in `generate`
        leaves = any(steps[row][1] is None and not finished[row] for row in going)
        for row in going:
            token, child = steps[row]
            if finished[row] or leaves or child is None:
                accepted[row] = Accepted(paths[row], token, finished[row])
            else:
                paths[row].append(child)
        if all(done is not None for done in accepted):
            return [done for done in accepted if done is not None]


class Greedy(Walk):
    """Follow the argmax of the processed scores: the tokens of `generate(do_sample=False)`, whatever the tree."""

    name, lossless, samples, drafting = "greedy", True, False, Drafting.TOP

    def step(self, view: TreeView, path: list[int], scores: Tensor) -> tuple[int, int | None]:
        token = int(scores.argmax())
        return token, view.child(path[-1], token)


class Coupled(Walk):
    """Follow y = argmax(p / e) with the noise e that `generate` would use: its very tokens under the same seed.

    Losslessness holds by construction and for any tree, because y does not depend on the drafts; the drafter uses the
    same noise only to guess y better. Background: drafter-invariant speculative decoding (Daliri et al. 2024,
    arXiv:2408.07978) and Gumbel-max list coupling (Khisti et al. 2024, arXiv:2410.18234).
    """

    name, lossless, samples, drafting = "coupled", True, True, Drafting.COUPLED

    def step(self, view: TreeView, path: list[int], scores: Tensor) -> tuple[int, int | None]:
        p = scores.softmax(-1)
        token = int((p / view.noise_at(len(path) - 1)).argmax())
        if not p[token] > 0:  # NaN compares false; `torch.multinomial` would raise here too
            raise ValueError(f"the target's distribution {len(path) - 1} levels below the root has NaN or no support")
        return token, view.child(path[-1], token)


class Residual(Walk):
    """Recursive rejection: exactly the target's distribution, for drawn and for deterministic children, and both.

    Drawn children first, in the order drawn: accept x with probability min(1, p̂(x) / q̂(x)), p̂ and q̂ starting at p and
    q. After a rejection p̂ ← norm[p̂ − q̂]+ with the q̂ that x was drawn from, then q̂(x) ← 0 and q̂ ← norm[q̂], because
    x was drawn without replacement. With all of them rejected, y ~ p̂ is drawn and followed into the deterministic child
    that carries it, if there is one: the same as testing these children in turn, each with a one-hot q. (A softmax in
    place of that one-hot q would be biased.)

    So this one rule is, depending on the draft,

    - chains: Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023 (arXiv:2302.01318);
    - drawn siblings: SpecInfer (arXiv:2305.09781), without replacement as in Jeon et al. 2024 (arXiv:2402.14160);
    - deterministic trees: following one y ~ p (EAGLE, arXiv:2406.16858, does it child by child: accept x with
      probability p̂(x), else take x out of p̂);
    - the top n − 1 tokens S of q beside one drawn from q' = norm[q outside S]: the greedy scheme of Hu et al. 2025
      (arXiv:2502.18779). It accepts with probability p(S) + Σ_{x ∉ S} min(p(x), q'(x)), and no rule accepts these
      children more often.
    """

    name, lossless, samples, drafting = "residual", True, True, Drafting.SAMPLED

    def step(self, view: TreeView, path: list[int], scores: Tensor) -> tuple[int, int | None]:
        node = path[-1]
        p, q = scores.softmax(-1), view.draft_at(node)
        if q is not None:
            q = q.to(p.dtype)
            for child in view.children[node]:
                if view.drawn[child]:
                    token = view.tokens[child]
                    if view.chance.accept(ratio(p, q, token)):
                        return token, child
                    p, q = residual(p, q), remove(q, token)
        token = view.chance.sample(p)
        # Never into a rejected child: p̂ excludes its token, but rounding, or a drafter that lies, may not.
        chosen = (child for child in view.children[node] if view.tokens[child] == token and not view.drawn[child])
        return token, next(chosen, None)


def ratio(p: Tensor, q: Tensor, token: int) -> Tensor:
    """p(x) / q(x) of `[V]` distributions, a scalar. Where q(x) rounds to 0 it is huge, or 0 if p(x) = 0: never NaN."""
    return p[token] / q[token].clamp(min=torch.finfo(q.dtype).tiny)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm[p − q]+ of `[V]` distributions, or p itself where rounding leaves nothing (p = q is not rejected)."""
    left = (p - q).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def remove(q: Tensor, token: int) -> Tensor:
    """q without `token`, renormalised; all zeros when it held everything."""
    left = q.clone()
    left[token] = 0
    total = left.sum()
    return left / total if total > 0 else left


class Traversal(AcceptanceRule):
    """Traversal verification, from the leaves to the root: exactly the target's distribution (Weng et al. 2025,
    arXiv:2505.12398).

    Where recursive rejection gives up a path at its first rejected token, this rule asks for a path as a whole, and a
    probable token makes good for an improbable one above it. a(root) = 1 and a(x) = min(1, a(parent) · p̂(x) / q̂(x)).
    Visit the first leaf in depth-first order and accept its path with probability a(leaf), followed by a token from the
    leaf's own p̂. Otherwise delete the leaf and update its parent: with R = [a · p̂ − q̂]+ and S = ΣR,

        a ← S / (S + 1 − a),    p̂ ← R / S,    q̂ without x, as in `Residual`,

    and go on; a parent without children left is a leaf. Drawn children come before deterministic ones, which have a
    one-hot q. On a chain this is block verification (Sun et al. 2024, arXiv:2403.10444); on a tree of one level it is
    `Residual`.

    It accepts at least as much as `Residual` where no sibling has more below it than those before it, as in trees grown
    best first (found by enumeration, not proved); elsewhere it may end on a short path where `Residual` goes on along a
    longer one. It scores nodes that are then not committed, so it is not for processors with a memory.
    """

    name, lossless, samples, drafting, whole_tree = "traversal", True, True, Drafting.SAMPLED, True

    def accept(self, view: TreeView) -> Accepted:
        visited = [_Visited(view, [0], view.probabilities([0]).new_ones(()))]
        while True:
            here = visited[-1]
            if here.pending:
                visited.append(here.first_child())
            elif len(visited) == 1 or view.chance.accept(here.reach):
                return committed(view, here.path, view.chance.sample(here.p))
            else:
                visited.pop()
                visited[-1].delete_first_child()


class _Visited:
    """A node on the way to the visited leaf.

    Attributes:
        path: from the root to the node.
        reach: scalar a.
        p: `[V]` p̂, scored when first needed.
        q: `[V]` q̂ of the drawn children, if any.
        pending: children not yet deleted, the next one first.
    """

    def __init__(self, view: TreeView, path: list[int], reach: Tensor):
        self._view, self.path, self.reach = view, path, reach
        self.q = view.draft_at(path[-1])
        self.pending = sorted(view.children[path[-1]], key=lambda child: not view.drawn[child])

    @cached_property
    def p(self) -> Tensor:
        return self._view.probabilities(self.path)

    def first_child(self) -> _Visited:
        child = self.pending[0]
        reach = self.reach * ratio(self.p, self._drawn_from(child), self._view.tokens[child])
        return _Visited(self._view, [*self.path, child], reach.clamp(max=1))

    def delete_first_child(self) -> None:
        child = self.pending.pop(0)
        left = (self.reach * self.p - self._drawn_from(child)).clamp(min=0)
        total = left.sum()
        if total > 0:
            self.p, self.reach = left / total, total / (total + 1 - self.reach)
        elif self.reach < 1:
            self.reach = torch.zeros_like(self.reach)
        # Else p̂ = q̂, whose children are never rejected, but by rounding: then both stay.
        if self._view.drawn[child] and self.q is not None:
            self.q = remove(self.q, self._view.tokens[child])

    def _drawn_from(self, child: int) -> Tensor:
        """`[V]` q̂ that the child was drawn from: one-hot for a deterministic one."""
        if self._view.drawn[child] and self.q is not None:
            return self.q.to(self.p.dtype)
        one_hot = torch.zeros_like(self.p)
        one_hot[self._view.tokens[child]] = 1
        return one_hot


def committed(view: TreeView, path: list[int], token: int) -> Accepted:
    """A path chosen as a whole and the token after it, up to the first token that ends the row.

    The row is asked once per committed token, in order, and about no other, as `generate` does.
    """
    for depth, node in enumerate(path[1:], 1):
        if view.stops_after(path[:depth], view.tokens[node]):
            return Accepted(path[:depth], view.tokens[node], finished=True)
    return Accepted(path, token, view.stops_after(path, token))


class Typical(AcceptanceRule):
    """Medusa's typical acceptance (Cai et al. 2024, arXiv:2401.10774, section 2.3.1). LOSSY: not the target's
    distribution.

    A candidate is acceptable iff p(x) > min(ε, δ · exp(−H(p))). Of the paths of acceptable nodes the longest is
    committed, among equals the most probable one; the token after it is drawn from p restricted to its acceptable
    tokens.

    Args:
        epsilon: ε, the hard threshold.
        delta: δ, the factor of the entropy-dependent threshold.
    """

    name, lossless, samples, drafting, whole_tree = "typical", False, True, Drafting.TOP, True

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3):
        if not (0 < epsilon < 1 and 0 < delta < 1):
            raise ValueError(f"epsilon and delta must lie in (0, 1), not {epsilon} and {delta}")
        self.epsilon, self.delta = epsilon, delta

    def acceptable(self, p: Tensor) -> Tensor:
        """`[V]` bool. The argmax always is: δ · exp(−H) < max p, which rounding must not undo."""
        entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum()
        allowed = p > torch.minimum(p.new_tensor(self.epsilon), self.delta * (-entropy).exp())
        allowed[p.argmax()] = True
        return allowed

    def accept(self, view: TreeView) -> Accepted:
        best: tuple[list[int], float] = ([0], 0.0)  # a path of acceptable nodes and its log-likelihood
        pending = [best]
        while pending:
            path, likelihood = here = pending.pop()
            best = max(best, here, key=lambda candidate: (len(candidate[0]), candidate[1]))
            if not view.children[path[-1]]:
                continue
            p = view.probabilities(path)
            allowed = self.acceptable(p)
            for child in view.children[path[-1]]:
                token = view.tokens[child]
                if bool(allowed[token]):
                    pending.append(([*path, child], likelihood + float(p[token].log())))
        p = view.probabilities(best[0])
        return committed(view, best[0], view.chance.sample(p * self.acceptable(p)))


_RULES: dict[str, type[AcceptanceRule]] = {rule.name: rule for rule in (Greedy, Coupled, Residual, Traversal, Typical)}


def acceptance_rule(choice: str | AcceptanceRule | None, do_sample: bool) -> AcceptanceRule:
    """The rule for a call of `generate`: by name, as given, or the default for the kind of decoding.

    Without sampling there is only the argmax path, so every rule equals `greedy` there (typical acceptance too: at
    temperature 0 it accepts the argmax alone).

    Raises:
        ValueError: unknown name, or `greedy` with `do_sample=True`.
    """
    if isinstance(choice, str) and choice not in _RULES:
        raise ValueError(f"unknown acceptance rule {choice!r}; known are {', '.join(_RULES)}")
    if not do_sample:
        return Greedy()
    rule = _RULES[choice]() if isinstance(choice, str) else choice or Coupled()
    if not rule.samples:
        raise ValueError(f"acceptance {rule.name!r} does not sample, but do_sample=True was asked for")
    return rule
