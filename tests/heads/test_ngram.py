"""n-gram look-up: the right continuations, in the right order, from committed text only, within the budget."""

import math
import random
from dataclasses import replace

import pytest
import torch
from kit import DECODING, fresh_model, prompts, ragged_prompts, reference, tiny_model

import treedec
from treedec import NgramDrafter
from treedec.drafter import Drafting, DraftState


def state(texts, room=8, budget=64):
    rooms = room if isinstance(room, list) else [room] * len(texts)
    return DraftState(
        texts=texts, hidden=None, features=[None] * len(texts), room=rooms, budget=budget, drafting=Drafting.TOP,
        shape=None, noise=None, chance=None,
    )  # fmt: skip


def drafted(text, room=8, budget=64, **sizes):
    """The draft for one text, by a session that has seen nothing else."""
    return NgramDrafter(**sizes).start(None, 1, 1000).propose(state([text], room, budget))


def paths(tree, row=0):
    """Every node of a row, as the tokens that lead to it from below the root, in the order of the nodes."""
    result = []
    for node in range(int(tree.counts[row])):
        parent = int(tree.parents[row, node])
        result.append((*result[parent], int(tree.tokens[row, node])) if node else ())
    return result[1:]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),  # the longest suffix that occurred before
        ([1, 2, 3, 8, 1, 2, 7, 1, 2], [7, 1, 2]),  # the most recent of its occurrences, each of which goes on once
        ([5, 1, 2, 3, 6, 9, 2, 3, 4, 5, 1, 2, 3], [6, 9, 2]),  # a longer match further back
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 4, 6, 1, 2], [3, 5, 1]),  # the more frequent, then the more recent
        ([1, 1, 1], [1]),  # an occurrence may touch the suffix
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_a_chain_continues_the_longest_match_as_it_mostly_went_on(text, expected):
    tree = drafted(text, depth=3, longest=4, shortest=2, branches=1).tree
    assert tree.tokens[0].tolist() == [text[-1], *expected]
    assert tree.parents[0].tolist() == list(range(-1, len(expected)))


def test_a_single_continuation_is_a_chain_whatever_the_number_of_branches():
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    for branches in (1, 4):
        assert paths(drafted(text, branches=branches, nodes=16).tree)[-1] == (3, 4, 5, 6, 1, 2)
    assert len(paths(drafted(text, nodes=16).tree)) == 6


def test_the_tree_holds_every_continuation_merged_and_ordered_by_how_often_it_followed():
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 9, 9, 1, 2]
    draft = drafted(text, depth=2, shortest=2, longest=2, nodes=16)
    # 3 followed three times of four, and was itself followed twice by 5 and once by 4.
    assert paths(draft.tree) == [(3,), (3, 5), (9,), (3, 4), (9, 9)]
    two, three = 2 / 2**1.3, 2 / 3**1.3  # what is added to the occurrences of a context of two tokens, and of three
    first, second = 3 / (4 + two), 1 / (4 + two)
    expected = [1, first, first * 2 / (3 + three), second, first * 1 / (3 + three), second * 1 / (1 + three)]
    torch.testing.assert_close(draft.scores[0], torch.tensor(expected))


def test_sampled_text_is_estimated_to_repeat_itself_less():
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5, 1, 2]
    drafter = NgramDrafter(depth=2, shortest=2, longest=2, nodes=16, min_probability=0)
    draft = drafter.start(None, 1, 1000).propose(replace(state([text]), samples=True))
    assert paths(draft.tree) == [(3,), (3, 5), (3, 4)]
    two, three = 6 / 2**1.5, 6 / 3**1.5
    first = 3 / (3 + two)
    torch.testing.assert_close(draft.scores[0], torch.tensor([1, first, first * 2 / (3 + three), first / (3 + three)]))


def test_nodes_that_are_hardly_likely_are_not_added():
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 9, 9, 1, 2]
    everything = drafted(text, shortest=2, nodes=200, min_probability=0)
    scores = dict(zip(paths(everything.tree), everything.scores[0, 1:].tolist(), strict=True))
    kept = paths(drafted(text, shortest=2, nodes=200, min_probability=0.2).tree)
    assert kept == [path for path, score in scores.items() if score >= 0.2]
    assert 0 < len(kept) < len(scores)


def test_of_equally_frequent_tokens_the_latest_is_the_first_child():
    text = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2]
    tree = drafted(text, depth=1, shortest=2, longest=2, nodes=16).tree
    assert paths(tree) == [(7,), (6,), (5,)]
    assert paths(drafted(text, depth=1, shortest=2, longest=2, nodes=16, branches=2).tree) == [(7,), (6,)]


@pytest.mark.parametrize(("room", "budget", "nodes"), [(0, 64, 16), (1, 64, 16), (3, 64, 16), (8, 1, 16), (8, 4, 16)])
def test_room_and_budget_are_respected_and_spent_on_the_best_nodes(room, budget, nodes):
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 9, 9, 1, 2]
    everything = drafted(text, nodes=200, min_probability=0)
    scores = dict(zip(paths(everything.tree), everything.scores[0, 1:].tolist(), strict=True))
    tree = drafted(text, room=room, budget=budget, nodes=nodes, min_probability=0).tree
    kept = paths(tree)
    tree.validate(100, [room])
    assert len(kept) == min(budget - 1, nodes - 1, sum(len(path) <= room for path in scores))
    dropped = [score for path, score in scores.items() if path not in kept and len(path) <= room]
    assert not kept or min(scores[path] for path in kept) >= max(dropped, default=0.0)


def test_the_index_grows_with_the_text_and_holds_nothing_else():
    """A session that saw the text grow by irregular steps drafts as one that sees it for the first time."""
    generator = random.Random(0)
    texts = [[generator.randrange(5) for _ in range(length)] for length in (1, 7, 20)]
    session = NgramDrafter(nodes=12, min_probability=0).start(None, 3, 1000)
    for turn in range(60):
        given = [None if row == 1 and turn > 30 else list(text) for row, text in enumerate(texts)]
        ours = session.propose(state(given, room=[8, 5, 8]))
        assert ours.tree.counts[1] == 0 or turn <= 30
        for row, text in enumerate(given):
            if text is not None:
                fresh = drafted(text, room=[8, 5, 8][row], nodes=12, min_probability=0)
                assert paths(ours.tree, row) == paths(fresh.tree)
        for text in texts:
            text += [generator.randrange(5) for _ in range(generator.randrange(1, 5))]


def test_text_is_indexed_once():
    """What a round costs does not grow with the text."""

    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return super().__getitem__(place)

    session = NgramDrafter().start(None, 1, 10_000)
    text = [place % 7 for place in range(3000)]
    session.propose(state([Counted(text)]))
    before = Counted.reads
    session.propose(state([Counted([*text, 1, 2, 3])]))
    assert Counted.reads - before < 600


@pytest.mark.parametrize("nodes", [None, 4, 24])
def test_tokens_are_those_of_generate(nodes):
    """A ragged batch of three, whose rows end at EOS or at the length cap, with trees that really branch."""
    model, (ids, mask) = tiny_model(), ragged_prompts()
    drafter = NgramDrafter(min_probability=0, longest=2, nodes=nodes)
    for decoding in ("greedy", "T=0.7"):
        arguments = {"attention_mask": mask, "max_new_tokens": 60, **DECODING[decoding]}
        free = reference(model, ids, **arguments)
        for eos in (None, [free.new[0][20], free.new[2][33]]):
            stops = {"eos_token_id": eos, "pad_token_id": 0}
            expected = reference(model, ids, **arguments, **stops)
            assert torch.equal(treedec.generate(model, ids, drafter, seed=7, **arguments, **stops), expected.ids)


@pytest.mark.parametrize("rule", ["residual", "traversal"])
def test_at_temperature_zero_the_rules_that_draw_anew_are_greedy(rule):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    greedy = reference(model, ids, attention_mask=mask, max_new_tokens=60, do_sample=False)
    output = treedec.generate(
        model, ids, NgramDrafter(min_probability=0, nodes=16), acceptance=rule, attention_mask=mask, max_new_tokens=60,
        do_sample=True, temperature=1e-6, top_k=0, return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(output.sequences, greedy.ids)


def test_residual_draws_one_token_at_a_time_from_the_target_whatever_the_tree():
    """So a single row has the tokens of `generate`, and every row its distribution."""
    model = tiny_model()
    for decoding in ("T=0.7", "top_p"):
        arguments = {"max_new_tokens": 60, **DECODING[decoding]}
        expected = reference(model, prompts(), **arguments)
        output = treedec.generate(
            model, prompts(), NgramDrafter(min_probability=0, nodes=16), acceptance="residual", seed=7,
            return_dict_in_generate=True, **arguments,
        )  # fmt: skip
        assert torch.equal(output.sequences, expected.ids)
        assert output.stats.drafted_tokens > 100


def rounds_of_twelve(*likelihoods):
    """A model all but without memory: within each twelve, t is followed by t + 1, t + 2, … as likely as asked."""
    model = fresh_model()
    state = model.state_dict()
    for name, weight in state.items():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(0.001)
    # Tokens are orthogonal within their twelve; the norm before the head scales them to the square root of 32.
    tokens = torch.arange(96)
    state["model.embed_tokens.weight"].zero_()
    state["model.embed_tokens.weight"][tokens, tokens % 12] = 1
    state["model.embed_tokens.weight"][tokens, 12 + tokens // 12] = 1
    state["lm_head.weight"].zero_()
    for step, likelihood in enumerate(likelihoods, 1):
        following = tokens // 12 * 12 + (tokens + step) % 12
        # Scores: log(likelihood) + 60 where both the place and the dozen are right, 30 less if one is.
        state["lm_head.weight"][following, tokens % 12] = (30 + math.log(likelihood)) / 4
        state["lm_head.weight"][following, 12 + tokens // 12] = 30 / 4
    model.load_state_dict(state)
    return model


def test_repetition_pays():
    """Twelve tokens until it has come round, then sixteen a pass."""
    output = treedec.generate(
        rounds_of_twelve(1.0), torch.tensor([[5]]), NgramDrafter(), max_new_tokens=200, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences[0, :14].tolist() == [5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6]
    assert output.stats.mean_accepted_length > 7


def test_where_the_text_goes_on_in_two_ways_a_tree_is_accepted_further_than_a_chain_of_as_many_nodes():
    lengths = []
    for branches in (1, 4):
        output = treedec.generate(
            rounds_of_twelve(0.6, 0.4), torch.tensor([[5]]), NgramDrafter(branches=branches),
            max_new_tokens=400, do_sample=True, top_k=0, seed=7, return_dict_in_generate=True,
        )  # fmt: skip
        lengths.append(output.stats.mean_accepted_length)
    assert lengths[1] > 1.2 * lengths[0]


@pytest.mark.parametrize("sizes", [{"depth": 0}, {"shortest": 0}, {"shortest": 5}, {"branches": 0}, {"nodes": 1}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="need"):
        NgramDrafter(**sizes)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_probability_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=r"min_probability must lie in \[0, 1\]"):
        NgramDrafter(min_probability=share)
