"""Drafters that make bugs show: random heads are almost never accepted, so a broken walk would never be walked."""

from __future__ import annotations

from treedec import Draft, Drafter, DraftSession, DraftState, Target, TokenTree


class Scripted(Drafter):
    """Drafts from known continuations.

    Args:
        continuations: per row, the tokens that the reference decoder produced after the prompt.
        prompt_lengths: per row, the number of prompt tokens without padding.
        vocab_size: to make wrong tokens.
        depth: levels of the right path.
        right: how many of its tokens are right; the rest is wrong.
        decoys: wrong siblings drafted *before* the right token at every level, so that the right path is the last
            branch.
    """

    name = "scripted"

    def __init__(self, continuations, prompt_lengths, vocab_size, depth=4, right=4, decoys=0):
        self.continuations, self.prompt_lengths, self.vocab_size = continuations, prompt_lengths, vocab_size
        self.depth, self.right, self.decoys = depth, right, decoys
        self.max_nodes = 1 + depth * (1 + decoys)

    def start(self, target: Target, batch: int, capacity: int) -> DraftSession:
        return _ScriptedSession(self)


class _ScriptedSession(DraftSession):
    def __init__(self, plan: Scripted):
        self.plan = plan

    def propose(self, state: DraftState) -> Draft:
        return Draft(
            TokenTree.from_rows([self.row(i, text, state.room[i], state.budget) for i, text in enumerate(state.texts)])
        )

    def row(self, index, text, room, budget):
        if text is None:
            return [], []
        plan = self.plan
        done = len(text) - plan.prompt_lengths[index]
        upcoming = plan.continuations[index][done : done + plan.depth]
        tokens, parents, parent = [text[-1]], [-1], 0
        for level, token in enumerate(upcoming[:room]):
            if len(tokens) + 1 + plan.decoys > budget:
                break
            for decoy in range(plan.decoys):
                tokens.append((token + 1 + decoy) % plan.vocab_size)
                parents.append(parent)
            tokens.append(token if level < plan.right else (token + 7) % plan.vocab_size)
            parents.append(parent)
            parent = len(tokens) - 1
        return tokens, parents


def drafters(continuations, prompt_lengths, vocab_size):
    """The standard set: oracle, adversary, right-then-wrong, and right on the last branch, as chains and trees."""
    make = lambda **kwargs: Scripted(continuations, prompt_lengths, vocab_size, **kwargs)  # noqa: E731
    return {
        "oracle": make(),
        "adversary": make(right=0),
        "right-then-wrong": make(right=2),
        "last-branch": make(decoys=2),
        "last-branch-then-wrong": make(decoys=2, right=2, depth=5),
    }
