"""Drafting level by level: candidates as each way of drafting wants them, and the same text whatever is drafted."""

import pytest
import torch
from kit import DECODING, VOCAB, prompts, ragged_prompts, reference, tiny_model

import treedec
from treedec import Drafter, Drafting, DraftState
from treedec.growth import DynamicTree
from treedec.heads.sequential import SequentialSession, TrimmedHead, draft_vocabulary, embedding_table

NEW = 24


class Oracle(Drafter):
    """Knows the continuation of every prompt; it is right along the path until it `errs`, and guesses off it.

    Args:
        expected: what `model.generate` returned.
        lengths: tokens per prompt.
        errs: which places in the continuation it is wrong about, `(row, place) → bool`.
        draft_ids: its draft vocabulary.
    """

    name = "oracle"

    def __init__(self, expected, lengths, growth, errs=lambda row, place: False, draft_ids=None):
        self.expected, self.lengths, self.growth, self.max_nodes = expected.new, lengths, growth, growth.nodes
        self.errs, self.draft_ids = errs, torch.arange(VOCAB) if draft_ids is None else draft_ids
        self.trimmed = draft_ids

    def start(self, target, batch, capacity):
        return OracleSession(self)


class OracleSession(SequentialSession):
    def __init__(self, plan):
        super().__init__(plan.growth, plan.trimmed)
        self.plan = plan

    def begin(self, state):
        self.texts = state.texts
        self.paths = [[] for _ in state.texts]  # of the expanded nodes
        return self.logits([[()]] * len(state.texts))[:, 0]

    def expand(self, tokens, parents):
        assert tokens.shape == parents.shape == (len(self.texts), tokens.shape[1])
        new = [
            [(*(self.paths[row][parent] if parent >= 0 else ()), token) for token, parent in zip(*pair, strict=True)]
            for row, pair in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True))
        ]
        self.paths = [before + more for before, more in zip(self.paths, new, strict=True)]
        return self.logits(new)

    def logits(self, paths):
        logits = torch.randn(len(paths), len(paths[0]), VOCAB, generator=torch.Generator().manual_seed(len(paths[0])))
        for row, row_paths in enumerate(paths):
            for node, path in enumerate(row_paths):
                right = self.right(row, path)
                if right is not None:
                    logits[row, node, right] += 30
        return logits[..., self.plan.draft_ids]

    def right(self, row, path):
        if self.texts[row] is None:
            return None
        done = len(self.texts[row]) - self.plan.lengths[row]
        upcoming = self.plan.expected[row][done:]
        place = done + len(path)
        if tuple(upcoming[: len(path)]) != path or len(upcoming) <= len(path):
            return None
        return (upcoming[len(path)] + 7) % VOCAB if self.plan.errs(row, place) else upcoming[len(path)]


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0", "top_p"])
def test_trees_that_are_right_for_longer_in_some_rows_leave_a_ragged_batch_alone(decoding):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    for errs in (lambda row, place: False, lambda row, place: True, lambda row, place: place % (row + 2) == row):
        for draft_ids in (None, torch.arange(0, VOCAB, 2)):
            drafter = Oracle(expected, mask.sum(1).tolist(), DynamicTree(nodes=10, depth=3, width=3), errs, draft_ids)
            torch.manual_seed(7)
            ours = treedec.generate(model, ids, drafter, **arguments)
            assert torch.equal(ours, expected.ids)
            assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a_drafter_that_is_right_is_accepted_to_the_last_level(decoding):
    model, depth = tiny_model(), 4
    arguments = {"max_new_tokens": 1 + 5 * (depth + 1), **DECODING[decoding]}
    expected = reference(model, prompts(), **arguments)
    drafter = Oracle(expected, [prompts().shape[1]], DynamicTree(nodes=12, depth=depth, width=2))
    torch.manual_seed(7)
    out = treedec.generate(model, prompts(), drafter, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, expected.ids)
    assert out.stats.accepted_lengths == {depth + 1: 5}


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a_ragged_batch_stops_at_an_end_in_the_middle_of_an_accepted_path(decoding):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    free = reference(model, ids, **arguments)
    ends = [free.new[0][5], free.new[1][9]]
    arguments |= {"eos_token_id": ends, "pad_token_id": 0}
    expected = reference(model, ids, **arguments)
    assert expected.ids.tolist() != free.ids.tolist()
    drafter = Oracle(free, mask.sum(1).tolist(), DynamicTree(nodes=12, depth=4))
    torch.manual_seed(7)
    assert torch.equal(treedec.generate(model, ids, drafter, **arguments), expected.ids)


class Fixed(SequentialSession):
    """Gives the logits it was made with: `first` `[B, Vd]` after the roots, `then` `[B, Vd]` after every node."""

    def __init__(self, growth, first, then, draft_ids=None):
        super().__init__(growth, draft_ids)
        self.first, self.then, self.begun = first, then, 0

    def begin(self, state):
        self.begun += 1
        return self.first

    def expand(self, tokens, parents):
        return self.then[:, None].expand(-1, tokens.shape[1], -1)


def state_for(texts, drafting=Drafting.TOP, room=8, budget=64, temperature=1.0, noise=None):
    return DraftState(
        texts=texts, hidden=torch.zeros(len(texts), 1), features=[None] * len(texts), room=[room] * len(texts),
        budget=budget, drafting=drafting, shape=lambda logits: logits / temperature, noise=noise, chance=None,
    )  # fmt: skip


@pytest.mark.parametrize("drafting", list(Drafting))
@pytest.mark.parametrize("trimmed", [False, True])
def test_candidates_are_those_that_the_rule_wants(drafting, trimmed):
    """Of every node: the most probable ones after shaping, or those that win the noise of their own level."""
    generator, temperature = torch.Generator().manual_seed(1), 0.7
    ids = torch.arange(0, VOCAB, 3) if trimmed else None
    first, then = torch.randn(2, 2, VOCAB if ids is None else len(ids), generator=generator, dtype=torch.float64)
    noise = torch.empty(3, 2, VOCAB).exponential_(generator=generator)
    growth = DynamicTree(nodes=40, depth=2, width=2, branching=3, min_probability=0.0, min_reach=0.0)
    session = Fixed(growth, first, then, ids)
    draft = session.propose(state_for([[1], [2]], drafting, temperature=temperature, noise=lambda depth: noise[depth]))
    draft.validate(VOCAB, [8, 8])
    assert draft.probabilities is None
    for row in range(2):
        tokens, children = draft.tree.tokens[row].tolist(), draft.tree.children(row)
        assert len(tokens) == 1 + 3 + 2 * 3
        for node, follow in enumerate(children):
            if not follow:
                continue
            level = int(draft.tree.depths[row, node]) + 1
            scores = ((first if level == 1 else then)[row] / temperature).softmax(-1)
            if drafting is Drafting.COUPLED:
                scores = scores / noise[level, row, slice(None) if ids is None else ids]
            best = scores.argsort(descending=True)[:3]
            assert [tokens[child] for child in follow] == (best if ids is None else ids[best]).tolist()


@pytest.mark.parametrize("trimmed", [False, True])
def test_odds_are_what_a_token_has_of_the_race_at_its_level(trimmed):
    """Of the race of all drafted tokens: shares in the best few only would promise that one of them wins."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(0, VOCAB, 3) if trimmed else None
    q = torch.randn(2, 3, VOCAB if ids is None else len(ids), generator=generator).softmax(-1)
    noise = torch.empty(4, 2, VOCAB).exponential_(generator=generator)
    assert state_for([[1], [2]], Drafting.TOP).odds(q, 2, ids) is q
    odds = state_for([[1], [2]], Drafting.COUPLED, noise=lambda level: noise[level]).odds(q, 2, ids)
    for row in range(2):
        for node in range(3):
            race = q[row, node] / noise[2, row, slice(None) if ids is None else ids]
            torch.testing.assert_close(odds[row, node], 0.8 * race / race.sum())


def test_every_round_takes_in_what_was_committed_also_without_room_for_a_tree():
    session = Fixed(DynamicTree(), torch.zeros(2, VOCAB), torch.zeros(2, VOCAB))
    for state in (state_for([[5], None], room=0), state_for([[5], None], budget=1)):
        tree = session.propose(state).tree
        assert tree.counts.tolist() == [1, 0] and tree.tokens[0, 0] == 5
    assert session.begun == 2


def test_a_draft_vocabulary_smaller_than_the_branching_is_drafted_whole():
    session = Fixed(DynamicTree(branching=8), torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([4, 7, 9]))
    tree = session.propose(state_for([[5]], room=1)).tree
    assert sorted(tree.tokens[0].tolist()[1:]) == [4, 7, 9]


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_the_trimmed_head_scores_as_the_target_does(name):
    model, ids = tiny_model(name), torch.arange(1, VOCAB, 5)
    target = treedec.Target(model)
    verified = target.prefill(target.allocate(1, 32), prompts())
    for draft_ids in (None, ids):
        ours = TrimmedHead(model, 32, VOCAB, draft_ids)(verified.hidden)
        wanted = verified.logits if draft_ids is None else verified.logits[..., ids]
        torch.testing.assert_close(ours, wanted, atol=1e-9, rtol=0)


def test_what_does_not_fit_the_target_is_refused():
    with pytest.raises(ValueError, match=r"LM head of shape \(50, 32\).*belong to another model"):
        TrimmedHead(tiny_model(), 32, 50, None)
    with pytest.raises(ValueError, match="read embeddings of 16 numbers, but LlamaForCausalLM's have 32"):
        embedding_table(tiny_model(), 16)
    assert draft_vocabulary(None, 3, 9).tolist() == [0, 1, 2]
    for bad in ([0, 1], [0, 2, 2], [-1, 0, 1], [5, 7, 9]):
        with pytest.raises(ValueError, match="3 ascending ids below 9"):
            draft_vocabulary(torch.tensor(bad), 3, 9)


def test_scores_are_products_along_paths():
    growth = DynamicTree(nodes=9, depth=3, width=2, branching=3, min_probability=0.0, min_reach=0.0)
    first, then = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.06, 0.04]]), torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    draft = Fixed(growth, first.log(), then.log()).propose(state_for([[4], [5]]))
    assert draft.tree.counts.tolist() == [9, 9]
    for row in range(2):
        for node in range(1, 9):
            parent, token = int(draft.tree.parents[row, node]), int(draft.tree.tokens[row, node])
            share = (first if parent == 0 else then)[row, token]
            assert float(draft.scores[row, node]) == pytest.approx(float(draft.scores[row, parent] * share))
        assert draft.scores[row, 0] == 1
