"""Merged trees: no path twice, the best nodes kept, and every drafter told what became of its own tree."""

from dataclasses import replace

import pytest
import torch
from kit import (
    DECODING,
    VOCAB,
    check_visible_states,
    decoder,
    fresh_model,
    fresh_prefill,
    prompts,
    ragged_prompts,
    reference,
    scripted,
    tiny_model,
    uneven,
)

import treedec
from treedec import BestFirst, CostCurve, DraftModelDrafter, MedusaDrafter, NgramDrafter, TreeError
from treedec.drafter import Draft, Drafter, Drafting, DraftSession, DraftState, Outcome
from treedec.heads import MedusaConfig, MedusaHeads, UnionDrafter
from treedec.heads.checkpoint import save_heads
from treedec.models import Fingerprint
from treedec.tree import TokenTree

NEW = 40


class Fixed(Drafter):
    """Proposes the same branches whatever the text, and keeps what it was shown and told."""

    def __init__(self, branches, scores=None, features=None, name="fixed"):
        self.branches, self.scores, self.features, self.name = branches, scores, features, name
        self.max_nodes = 1 + len(branches)
        self.states, self.outcomes = [], []

    def start(self, target, batch, capacity):
        self.capacity = capacity
        return FixedSession(self)


class FixedSession(DraftSession):
    def __init__(self, plan):
        self.plan = plan

    def propose(self, state):
        self.plan.states.append(state)
        rows = []
        for text, room in zip(state.texts, state.room, strict=True):
            place, tokens, parents = {(): 0}, [] if text is None else text[-1:], [] if text is None else [-1]
            for path in self.plan.branches if text is not None else ():
                if len(path) <= room and len(tokens) < state.budget:
                    place[path] = len(tokens)
                    tokens.append(path[-1])
                    parents.append(place[path[:-1]])
            rows.append((tokens, parents))
        tree = TokenTree.from_rows(rows)
        if self.plan.scores is None:
            return Draft(tree)
        # Branches that the budget or the room cut off are the last ones in these tests.
        kept = self.plan.scores if tree.width == self.plan.max_nodes else self.plan.scores[: tree.width - 1]
        return Draft(tree, scores=torch.tensor([[1.0, *kept]] * len(rows)))

    def observe(self, outcome):
        self.plan.outcomes.append(outcome)


def state(texts, room=8, budget=64, features=None, drafting=Drafting.TOP):
    return DraftState(
        texts=texts, hidden=None, features=features or [None] * len(texts), room=[room] * len(texts), budget=budget,
        drafting=drafting, shape=lambda logits: logits, noise=None, chance=None,
    )  # fmt: skip


def session(*drafters, nodes=16, batch=1):
    return UnionDrafter(*drafters, nodes=nodes).start(treedec.Target(tiny_model()), batch, 100)


def scored(draft, row=0):
    """The score of every node of a row below the root, by the tokens that lead to it, in the order of the nodes."""
    tree, paths = draft.tree, []
    for node in range(int(tree.counts[row])):
        parent = int(tree.parents[row, node])
        paths.append((*paths[parent], int(tree.tokens[row, node])) if node else ())
    return dict(zip(paths[1:], draft.scores[row, 1 : len(paths)].tolist(), strict=True))


def no_path_twice(tree):
    for row in range(tree.batch):
        siblings = [[int(tree.tokens[row, child]) for child in children] for children in tree.children(row)]
        if any(len(set(tokens)) < len(tokens) for tokens in siblings):
            return False
    return True


def medusa(model, seed=0):
    module = MedusaHeads(MedusaConfig(32, VOCAB, 3, 1, VOCAB))
    with torch.no_grad():
        module.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    return MedusaDrafter(module.to(model.dtype), model, BestFirst(nodes=10, branching=4))


def nearly(model):
    """A draft model that often agrees with the target."""
    draft = fresh_model("llama")
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return draft


def test_paths_that_several_drafters_propose_become_one_with_the_highest_score():
    first = Fixed([(1,), (1, 2), (3,)], scores=[0.5, 0.2, 0.3])
    second = Fixed([(3,), (3, 4), (1,), (1, 2), (1, 5)], scores=[0.6, 0.5, 0.1, 0.05, 0.04])
    draft = session(first, second).propose(state([[9]]))
    expected = {(3,): 0.6, (1,): 0.5, (3, 4): 0.5, (1, 2): 0.2, (1, 5): 0.04}
    assert scored(draft) == pytest.approx(expected)
    assert list(scored(draft)) == list(expected)  # best first
    draft.tree.validate(VOCAB, [8])


@pytest.mark.parametrize("nodes", [None, 16])
def test_what_pays_is_decided_of_the_merged_tree(nodes):
    """A column that two drafters fill for half of the rows each pays together, and for neither alone."""
    costs, texts = CostCurve((2, 4, 6), (1.0, 1.25, 2.0)), [[9], [8]]

    class Half(Fixed):
        def __init__(self, row):
            super().__init__([(1,), (2,)], scores=[0.3, 0.01])
            self.row = row

        def start(self, target, batch, capacity):
            session = FixedSession(self)
            propose = session.propose

            def half(state):
                draft = propose(state)
                draft.scores[1 - self.row, 1:] = 0.001
                return draft.thinned(state)

            session.propose = half
            return session

    given = replace(state(texts), costs=costs)
    for row in (0, 1):
        assert Half(row).start(None, 2, 100).propose(given).tree.width == 1
    union = UnionDrafter(Half(0), Half(1), nodes=nodes).start(treedec.Target(tiny_model()), 2, 100)
    draft = union.propose(given)
    # Who says how many nodes there are to be gets them, whether they pay or not.
    assert draft.tree.counts.tolist() == ([2, 2] if nodes is None else [3, 3])
    assert draft.scores[:, 1].tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_the_budget_goes_to_the_best_nodes_of_all(nodes):
    first = Fixed([(1,), (1, 2), (1, 2, 3)], scores=[0.9, 0.3, 0.1])
    second = Fixed([(4,), (5,)], scores=[0.5, 0.2])
    best = [(1,), (4,), (1, 2), (5,)]
    assert list(scored(session(first, second, nodes=nodes).propose(state([[9]])))) == best[: nodes - 1]
    assert list(scored(session(first, second).propose(state([[9]], budget=nodes)))) == best[: nodes - 1]


def test_a_drafter_without_scores_is_right_every_second_time():
    draft = session(Fixed([(1,), (2,), (2, 3), (1, 4)])).propose(state([[9]]))
    assert scored(draft) == {(1,): 0.5, (2,): 0.25, (1, 4): 0.25, (2, 3): 0.125}


def test_a_union_of_unions_is_the_union_of_all():
    drafters = [
        Fixed([(1,), (1, 2)], scores=[0.5, 0.4]),
        Fixed([(1,), (7,)], scores=[0.6, 0.2]),
        Fixed([(3,), (3, 4)]),
    ]
    flat = session(*drafters).propose(state([[9], None]))
    nested = session(UnionDrafter(*drafters[:2]), drafters[2]).propose(state([[9], None]))
    assert scored(flat) == scored(nested)
    assert flat.tree.counts.tolist() == nested.tree.counts.tolist() == [6, 0]
    assert UnionDrafter(*drafters).name == "fixed+fixed+fixed"


def test_every_drafter_is_told_of_its_own_tree():
    first = Fixed([(1,), (1, 2), (1, 2, 3)], scores=[0.9, 0.8, 0.7])
    second = Fixed([(5,), (1,), (1, 2), (1, 2, 4), (1, 6)], scores=[0.5, 0.4, 0.4, 0.4, 0.1])
    third = Fixed([(8,)], scores=[0.9])
    union = session(first, second, third, batch=3)
    tree = union.propose(state([[9], [9], None])).tree
    place = {path: node for node, path in enumerate([(), *scored(Draft(tree, scores=torch.zeros(3, tree.width)))])}
    accepted = [(), (1,), (1, 2), (1, 2, 4)]
    # The last token of the second row happens to stand in the trees of two drafters; it is a root, not a node.
    union.observe(Outcome([[place[path] for path in accepted], [0, place[1,]], []], [[1, 2, 4, 7], [1, 2], []]))
    assert first.outcomes[0].paths == [[0, 1, 2], [0, 1], []]
    assert second.outcomes[0].paths == [[0, 2, 3, 4], [0, 2], []]
    assert third.outcomes[0].paths == [[0], [0], []]
    assert all(drafter.outcomes[0].tokens == [[1, 2, 4, 7], [1, 2], []] for drafter in (first, second, third))


def test_nodes_that_were_not_kept_are_still_accepted_ones_of_their_drafter():
    """The scores of a drafter without the nodes of another may drop them; the path goes by tokens."""
    low, high = Fixed([(1,), (1, 2)], scores=[0.1, 0.05]), Fixed([(1,), (1, 2)], scores=[0.9, 0.8])
    union = session(low, high, nodes=3)
    union.propose(state([[9]]))
    union.observe(Outcome([[0, 1, 2]], [[1, 2, 3]]))
    assert low.outcomes[0].paths == high.outcomes[0].paths == [[0, 1, 2]]


@pytest.mark.parametrize("rule", ["coupled", "residual"])
def test_drafters_choose_their_top_candidates_where_a_rule_would_have_drawn_ones(rule):
    drafter = Fixed([(1,)])
    treedec.generate(
        tiny_model(), prompts(), UnionDrafter(drafter), acceptance=rule, do_sample=True, max_new_tokens=4, seed=0
    )
    assert drafter.states[0].drafting is (Drafting.COUPLED if rule == "coupled" else Drafting.TOP)
    assert drafter.states[0].samples


def test_drafters_are_told_that_nothing_is_sampled():
    drafter = Fixed([(1,)])
    treedec.generate(tiny_model(), prompts(), UnionDrafter(drafter), do_sample=False, max_new_tokens=4)
    assert drafter.states[0].drafting is Drafting.TOP and not drafter.states[0].samples


def test_drawn_candidates_are_refused():
    class Draws(Fixed):
        def start(self, target, batch, capacity):
            return DrawsSession(self)

    class DrawsSession(FixedSession):
        def propose(self, state):
            draft = super().propose(state)
            return replace(draft, probabilities=torch.full((1, draft.tree.width, VOCAB), 1 / VOCAB))

    with pytest.raises(ValueError, match="'dice' drew its candidates at random"):
        session(Fixed([(1,)]), Draws([(2,)], name="dice")).propose(state([[9]]))


def test_a_broken_tree_of_one_drafter_is_refused_as_it_would_be_alone():
    with pytest.raises(TreeError, match="outside the vocabulary"):
        session(Fixed([(1,)]), Fixed([(VOCAB,)])).propose(state([[9]]))
    with pytest.raises(TreeError, match="scores must be"):
        session(Fixed([(1,)], scores=[0.5, 0.5])).propose(state([[9]]))


def test_every_drafter_reads_its_own_hidden_states():
    """Features of one pass, cut apart: each gets what it would get alone."""
    model, ids = tiny_model(), ragged_prompts((12, 5))
    wishes = (None, (2,), (0, 1), (1, 0))
    arguments = {"attention_mask": ids[1], "max_new_tokens": 6, "do_sample": False}
    together = [Fixed([(1,)], features=wish) for wish in wishes]
    union = UnionDrafter(*together)
    assert union.features == (0, 1, 2)
    treedec.generate(model, ids[0], union, **arguments)
    for drafter, wish in zip(together, wishes, strict=True):
        alone = Fixed([(1,)], features=wish)
        treedec.generate(model, ids[0], alone, **arguments)
        for ours, own in zip(drafter.states, alone.states, strict=True):
            for part, expected in zip(ours.features, own.features, strict=True):
                assert (part is None) == (expected is None)
                assert part is None or torch.equal(part, expected)
    head_input = [Fixed([(1,)], features=()), Fixed([(2,)])]
    treedec.generate(model, ids[0], UnionDrafter(*head_input), **arguments)
    assert head_input[0].states[0].features[1].shape == (5, 32)
    assert head_input[1].states[0].features == [None, None]


def test_what_cannot_be_merged_is_refused():
    with pytest.raises(ValueError, match=r"different kinds of hidden states: .*'a': \(\).*'b': \(1,\)"):
        UnionDrafter(Fixed([], features=(), name="a"), Fixed([], features=(1,), name="b"))
    with pytest.raises(ValueError, match="at least one drafter"):
        UnionDrafter()
    with pytest.raises(ValueError, match="nodes >= 2"):
        UnionDrafter(Fixed([]), nodes=1)


def test_drafters_have_room_for_trees_of_their_own_size():
    large, small = Fixed([(1,)] * 40), Fixed([(1,)])
    UnionDrafter(large, small, nodes=4).start(treedec.Target(tiny_model()), 1, 100)
    assert (large.capacity, small.capacity) == (96 + 41, 96 + 2)


def unions(model, expected, mask):
    """Drafters that are right at different places, with a budget that does not hold them all."""
    return {
        "ngram+draft-model": UnionDrafter(
            NgramDrafter(min_probability=0), DraftModelDrafter(nearly(model), 4), nodes=8
        ),
        "all": UnionDrafter(
            medusa(model),
            NgramDrafter(min_probability=0),
            DraftModelDrafter(nearly(model), 3),
            uneven(expected, mask),
            nodes=14,
        ),
    }


def test_tokens_are_those_of_generate():
    """A ragged batch of three whose rows end at EOS or at the length cap."""
    model, (ids, mask) = tiny_model(), ragged_prompts()
    for decoding in ("greedy", "T=1.0", "top_p"):
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
        free = reference(model, ids, **arguments)
        for eos in (None, [free.new[0][20], free.new[2][33]]):
            stops = {"eos_token_id": eos, "pad_token_id": 0}
            expected = reference(model, ids, **arguments, **stops)
            for name, drafter in unions(model, free, mask).items():
                torch.manual_seed(7)
                ours = treedec.generate(model, ids, drafter, **arguments, **stops)
                assert torch.equal(ours, expected.ids), (decoding, name, eos)
                assert torch.equal(torch.get_rng_state(), expected.rng_state), (decoding, name, eos)


@pytest.mark.parametrize("rule", ["residual", "traversal"])
def test_at_temperature_zero_the_rules_that_draw_anew_are_greedy(rule):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    greedy = reference(model, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for drafter in unions(model, greedy, mask).values():
        output = treedec.generate(
            model, ids, drafter, acceptance=rule, attention_mask=mask, max_new_tokens=NEW, do_sample=True,
            temperature=1e-6, top_k=0, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(output.sequences, greedy.ids)
        assert output.stats.mean_accepted_length > 1.5


def test_residual_draws_one_token_at_a_time_from_the_target_whatever_the_tree():
    """So a single row has the tokens of `generate`, also with a draft model, which would be drawn from alone."""
    model = tiny_model()
    expected = reference(model, prompts(), max_new_tokens=NEW, **DECODING["T=0.7"])
    for drafter in unions(model, expected, None).values():
        output = treedec.generate(
            model, prompts(), drafter, acceptance="residual", seed=7, max_new_tokens=NEW, return_dict_in_generate=True,
            **DECODING["T=0.7"],
        )  # fmt: skip
        assert torch.equal(output.sequences, expected.ids)
        assert output.stats.mean_accepted_length > 1.2


def test_a_union_is_accepted_wherever_one_of_its_drafters_is():
    model, (ids, mask) = tiny_model(), ragged_prompts()
    expected = reference(model, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)

    def passes(drafter):
        output = treedec.generate(
            model, ids, drafter, attention_mask=mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
        )
        return output.stats.target_passes

    right = scripted(expected, "oracle", mask)
    assert passes(UnionDrafter(medusa(model), scripted(expected, "adversary", mask), right, nodes=40)) == passes(right)


def test_a_draft_model_in_a_union_keeps_the_state_of_a_fresh_start():
    """The accepted path leaves its chain at every place, also by several tokens, and its chain is cut: after each round
    its cache holds the committed text, as far as it goes, and the next chain is that of a session just begun."""
    model, (ids, mask) = tiny_model(), ragged_prompts()
    expected = reference(model, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    draft = nearly(model)
    chains = DraftModelDrafter(draft, depth=4)
    union = UnionDrafter(chains, scripted(expected, "right-then-wrong", mask), NgramDrafter(min_probability=0), nodes=7)
    decoding = decoder(model, ids, union, NEW, attention_mask=mask)
    own = decoding.session._sessions[0]
    behind, kept = set(), set()
    for _ in decoding.run():
        check_visible_states(model, decoding)
        going = [row for row, done in enumerate(decoding.rows.finished) if not done]
        for row in going:
            text, length = decoding.rows.texts[row], own._cache.lengths[row]
            behind.add(len(text) - length)
            assert length < len(text)
            if length == 0:
                continue
            for layer, (k, v) in enumerate(fresh_prefill(draft, text[:length])):
                ours_k, ours_v = own._cache.visible_states(layer, row)
                torch.testing.assert_close(ours_k, k, atol=1e-11, rtol=0)
                torch.testing.assert_close(ours_v, v, atol=1e-11, rtol=0)
            kept.add(length)
        if going and decoding.session._trees:
            # What the engine will ask next, asked of both; nothing of it is accepted, and the engine asks it again.
            texts = [list(text) if row in going else None for row, text in enumerate(decoding.rows.texts)]
            fresh = chains.start(treedec.Target(model), len(texts), 200).propose(state(texts, room=5))
            used = own.propose(state(texts, room=5))
            assert torch.equal(used.tree.tokens, fresh.tree.tokens)
            own.observe(Outcome([[] for _ in texts], [[] for _ in texts]))
    assert behind >= {1, 2, 3} and len(kept) > 20


def test_drafters_joined_by_a_plus_draft_together():
    model = tiny_model()
    drafter = treedec.load_drafter("ngram+ngram", model, tree=10)
    assert isinstance(drafter, UnionDrafter) and drafter.max_nodes == 10 and drafter.name == "ngram+ngram"
    expected = reference(model, prompts(), max_new_tokens=20, do_sample=False)
    assert torch.equal(treedec.generate(model, prompts(), drafter, max_new_tokens=20, do_sample=False), expected.ids)
    with pytest.raises(FileNotFoundError, match="no drafter 'nosuch'"):
        treedec.load_drafter("ngram+nosuch", model)
    with pytest.raises(ValueError, match="must be a number of nodes"):
        treedec.load_drafter("ngram+ngram", model, tree=treedec.BestFirst(8))


def test_heads_that_are_joined_grow_as_large_a_tree_as_the_merged_one(tmp_path):
    model = tiny_model()
    vocab, hidden = model.get_output_embeddings().weight.shape
    save_heads(tmp_path / "heads", MedusaHeads(MedusaConfig(hidden, vocab, 3, 1, vocab)), Fingerprint.of(model), {})
    joined = treedec.load_drafter(f"{tmp_path / 'heads'}+ngram", model, tree=40)
    assert [member.max_nodes for member in joined.drafters] == [40, NgramDrafter().max_nodes]
    joined = treedec.load_drafter(f"{tmp_path / 'heads'}+ngram", model)
    assert [member.max_nodes for member in joined.drafters] == [16, NgramDrafter().max_nodes]
