"""Several drafters at once: their trees merged into one, which one pass of the target verifies.

Drafters are good at different text: n-gram look-up where the output repeats itself, heads everywhere else. Merged trees
cost one pass, and nodes that several of them propose are paid for once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from treedec.drafter import Draft, Drafter, Drafting, DraftSession, DraftState, Outcome, score_table
from treedec.target import Target
from treedec.tree import TokenTree

_NODES = 16  # at most, where nodes have to pay


class UnionDrafter(Drafter):
    """Merges the trees of several drafters and keeps the best nodes.

    Two nodes reached by the same tokens are one. Its score is the highest that a drafter gives it (`Draft.scores`), and
    the tree is grown best first until `nodes` are spent, or nodes do not pay their costs. A drafter without scores is
    taken to be right about the first child of a node every second time, about the next every fourth, and so on.

    Merging drops nodes, which is exact with every rule as long as nothing was drawn at random. So drafters are never
    asked for drawn candidates here: where a rule would have them (`residual`, `traversal`) they choose their top ones.
    A single draft model alone, whose chain is then drawn, may be accepted more often.

    Every drafter is told of each round in terms of its own tree: of the accepted path the part that the tree holds,
    also where these nodes were not kept or came from another drafter, and all committed tokens, which may be several
    more. The token that ends a round is not part of a path, though it may stand in the tree.

    Args:
        *drafters: what to merge, at least one; on equal scores the first comes first.
        nodes: nodes per merged tree, the root included, whether they pay or not; None for 16 at most, of which those
            that do not are left out. No drafter is asked for more.

    Raises:
        ValueError: no drafters; `nodes` below 2; one reads the LM-head input of every token (`features = ()`) and
            another hidden states by index, which one pass of the target does not return together; while generating, a
            draft that claims probabilities.
        TreeError: while generating, a draft that would be refused alone.
    """

    def __init__(self, *drafters: Drafter, nodes: int | None = None):
        if not drafters or (nodes is not None and nodes < 2):
            raise ValueError(f"need at least one drafter and nodes >= 2, not {len(drafters)} and {nodes}")
        self.drafters, self.max_nodes, self.thins = drafters, nodes or _NODES, nodes is None
        self.name = "+".join(drafter.name for drafter in drafters)
        self.features = _all_features(drafters)

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        text = capacity - self.max_nodes
        sessions = [drafter.start(target, batch, text + drafter.max_nodes) for drafter in self.drafters]
        return _UnionSession(self, sessions, target.vocab_size)


def _all_features(drafters: Sequence[Drafter]) -> tuple[int, ...] | None:
    wanted = [drafter.features for drafter in drafters if drafter.features is not None]
    if not wanted:
        return None
    if () in wanted and any(wanted):
        names = {drafter.name: drafter.features for drafter in drafters if drafter.features is not None}
        raise ValueError(
            f"these drafters cannot be merged, they read different kinds of hidden states: {names}; () is the input of "
            "the LM head, which the target does not return beside those of its layers"
        )
    return tuple(sorted({layer for layers in wanted for layer in layers}))


class _UnionSession(DraftSession):
    """One session per drafter, and the trees they proposed last."""

    def __init__(self, drafter: UnionDrafter, sessions: list[DraftSession], vocab_size: int):
        self._drafter, self._sessions, self._vocab_size = drafter, sessions, vocab_size
        self._trees: list[TokenTree] = []

    def propose(self, state: DraftState) -> Draft:
        budget = min(state.budget, self._drafter.max_nodes)
        drafts = []
        for drafter, session in zip(self._drafter.drafters, self._sessions, strict=True):
            draft = session.propose(self._state_for(drafter, state, budget))
            if draft.probabilities is not None:
                raise ValueError(
                    f"the drafter {drafter.name!r} drew its candidates at random although it was asked for its top "
                    "ones: its tree cannot be merged with others without bias, use it alone"
                )
            draft.validate(self._vocab_size, state.room)
            draft.tree.check_roots([None if text is None else text[-1] for text in state.texts])
            drafts.append(draft)
        self._trees = [draft.tree for draft in drafts]
        scored = [_scores(draft) for draft in drafts]
        rows = [_merge(self._trees, scored, row, budget) for row in range(len(state.texts))]
        tree = TokenTree.from_rows([(tokens, parents) for tokens, parents, _ in rows])
        draft = Draft(tree, scores=score_table([scores for _, _, scores in rows]))
        return draft.thinned(state) if self._drafter.thins else draft

    def observe(self, outcome: Outcome) -> None:
        # The last committed token follows the path: its states are not the drafter's to keep, it is the next root.
        accepted = [tokens[: len(path) - 1] for path, tokens in zip(outcome.paths, outcome.tokens, strict=True)]
        for session, tree in zip(self._sessions, self._trees, strict=True):
            paths = [_follow(tree, row, tokens) if outcome.paths[row] else [] for row, tokens in enumerate(accepted)]
            session.observe(Outcome(paths, [list(tokens) for tokens in outcome.tokens]))

    def _state_for(self, drafter: Drafter, state: DraftState, budget: int) -> DraftState:
        features = [_select(part, drafter.features, self._drafter.features) for part in state.features]
        drafting = Drafting.TOP if state.drafting is Drafting.SAMPLED else state.drafting
        return replace(state, features=features, drafting=drafting, budget=budget, merged=True)


def _select(part: Tensor | None, wanted: tuple[int, ...] | None, given: tuple[int, ...] | None) -> Tensor | None:
    """Of `[n, F]` features of the layers `given`, those of the layers `wanted`, in their order."""
    if part is None or wanted is None or not given:
        return None if wanted is None else part
    layers = part.unflatten(-1, (len(given), -1))  # [n, layers, H]
    return layers[:, [given.index(layer) for layer in wanted]].flatten(1)


def _scores(draft: Draft) -> list[list[float]]:
    """Per row and node the draft's score, or the default: half of what the parent and the siblings before it leave."""
    if draft.scores is not None:
        return draft.scores.tolist()
    scores = []
    for row in range(draft.tree.batch):
        row_scores = [1.0] * int(draft.tree.counts[row])
        for node, children in enumerate(draft.tree.children(row)):
            for rank, child in enumerate(children):
                row_scores[child] = row_scores[node] / 2 ** (rank + 1)
        scores.append(row_scores)
    return scores


def _merge(
    trees: list[TokenTree], scores: list[list[list[float]]], row: int, limit: int
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and scores of the `limit` best nodes of one row of all trees, best first."""
    score: dict[tuple[int, ...], float] = {}  # of each path of tokens, the root included
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for tree, tree_scores in zip(trees, scores, strict=True):
        paths: list[tuple[int, ...]] = []
        count = int(tree.counts[row])
        for node, (token, parent) in enumerate(
            zip(tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist(), strict=True)
        ):
            above = paths[parent] if node else ()
            paths.append((*above, token))
            if paths[-1] not in score:
                score[paths[-1]] = 0.0
                children.setdefault(above, []).append(paths[-1])
            score[paths[-1]] = max(score[paths[-1]], tree_scores[row][node])
    tokens: list[int] = []
    parents: list[int] = []
    kept: list[float] = []
    # (-score, number in the order of discovery, parent, path)
    frontier = [(-score[path], 0, -1, path) for path in children.get((), [])]
    found = len(frontier)
    while frontier and len(tokens) < limit:
        negative, _, parent, path = heapq.heappop(frontier)
        tokens.append(path[-1])
        parents.append(parent)
        kept.append(-negative)
        for child in children.get(path, []):
            heapq.heappush(frontier, (-score[child], found, len(tokens) - 1, child))
            found += 1
    return tokens, parents, kept


def _follow(tree: TokenTree, row: int, tokens: list[int]) -> list[int]:
    """The nodes of the path of `tokens` below the root, as far as the tree has it."""
    children, path = tree.children(row), [0]
    for token in tokens:
        following = next((child for child in children[path[-1]] if int(tree.tokens[row, child]) == token), None)
        if following is None:
            break
        path.append(following)
    return path
