"""What passes cost decides how wide trees are: never what is said."""

import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import DECODING, costing, fresh_model, prompts, ragged_prompts, reference, scripted, tiny_model, uneven

import treedec
from treedec import CostCurve, Draft, Drafter, Drafting, DraftSession, DraftState, Target, TokenTree, measure_costs
from treedec.cache import SlotCache
from treedec.compilation import emulated
from treedec.costs import FLAT, Clock, typical_costs
from treedec.demo import fast_dtype

CPU = torch.device("cpu")
FREE = CostCurve((1,), (1.0,))
DEAR = CostCurve((1, 2), (1.0, 100.0))


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4),
)
def test_the_width_has_the_most_tokens_for_its_cost(steps, finished, rises):
    """Against all widths, for curves of any shape; finished rows neither cost nor count."""
    seconds = tuple(itertools.accumulate([1.0, *rises]))
    curve = CostCurve((1, 2, 5, 9, 20), seconds)
    rows = []
    for row, done in zip(steps, finished, strict=False):
        rows.append([0.0] * 5 if done else list(itertools.accumulate([1.0, *row], lambda above, share: above * share)))
    going = sum(row[0] > 0 for row in rows)
    if not going:
        return
    rate = [sum(sum(row[:width]) for row in rows) / curve.at(min(20, going * width)) for width in range(1, 6)]
    if 5 * going > 20:
        rise = (seconds[-1] - seconds[0]) / 19
        rate[4] = sum(map(sum, rows)) / (seconds[-1] + rise * (5 * going - 20))
    chosen = curve.width(torch.tensor(rows, dtype=torch.float64), going)
    assert rate[chosen - 1] == pytest.approx(max(rate))


def test_nodes_that_cost_nothing_are_all_taken_and_dear_ones_never():
    scores = torch.tensor([[1.0, 0.5, 0.25, 0.125]])
    assert FREE.width(scores, 1) == 4 and DEAR.width(scores, 1) == 1
    assert FREE.least_score(3) == 0 and DEAR.least_score(1) == pytest.approx(99)
    # A node of a probability p that costs c of a pass pays if 1 + p exceeds 1 + c.
    for share, width in ((0.29, 1), (0.31, 2)):
        assert CostCurve((1, 2), (1.0, 1.3)).width(torch.tensor([[1.0, share]]), 1) == width
    assert CostCurve((1, 2), (1.0, 1.3)).least_score(1) == pytest.approx(0.3)


def test_a_batch_has_narrower_trees_than_a_row():
    row = torch.tensor([0.8**depth for depth in range(12)])
    widths = [FLAT.width(row.expand(rows, -1), rows) for rows in (1, 2, 4, 8, 16, 64)]
    assert widths == sorted(widths, reverse=True) and widths[0] > 8 and widths[3] > 2 and widths[-1] <= 3
    least = [FLAT.least_score(rows) for rows in (1, 8, 64)]
    assert least == pytest.approx([0.02 / 1.0, 8 * 0.02 / 1.14, 64 * 0.02 / 2.26], rel=1e-6)
    # Beyond what was measured, passes are not taken to be free.
    assert CostCurve((1, 4), (1.0, 1.6)).least_score(8) == pytest.approx(8 * 0.2 / 2.4)


def test_typical_costs_are_those_of_the_device_and_the_dtype(monkeypatch):
    half, plain = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
    assert not any(map(emulated, plain)) and all(isinstance(emulated(dtype), bool) for dtype in half)
    for instructions in (True, False):
        for kernel in ("bf16", "fp16"):
            known = Mock(return_value=instructions)
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{kernel}_supported", known)
        for dtype in half:
            assert (typical_costs(CPU, dtype) is FLAT) == instructions
            assert typical_costs(CPU, dtype, compiled=True) is typical_costs(CPU, dtype)
            assert typical_costs(torch.device("cuda"), dtype) is FLAT
            assert Target(fresh_model(dtype=dtype)).costs is typical_costs(CPU, dtype)
    with monkeypatch.context() as without:  # builds for other processors have neither oneDNN nor its questions
        without.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        without.setattr(torch.ops, "mkldnn", None)
        assert all(map(emulated, half)) and not any(map(emulated, plain))
    for dtype in plain:
        assert Target(fresh_model(dtype=dtype)).costs is typical_costs(CPU, dtype) is not FLAT
        assert typical_costs(CPU, dtype, compiled=True) is typical_costs(torch.device("cuda"), dtype) is FLAT
    # How likely all nodes have to be, for a tree of two and of twelve to pay.
    for costs, two, twelve in (
        (FLAT, 0.02, 0.02), (typical_costs(CPU, torch.float32), 0.5, 0.055), (typical_costs(CPU, half[0]), 0.4, 0.4)
    ):  # fmt: skip
        for nodes, least in ((2, two), (12, twelve)):
            for share, pays in ((least * 0.98, False), (least * 1.02, True)):
                assert (costs.width(torch.tensor([[1.0, *[share] * (nodes - 1)]]), 1) == nodes) == pays, (nodes, share)


@pytest.mark.parametrize("emulates", [True, False])
def test_the_demo_takes_no_dtype_that_the_processor_emulates(emulates, monkeypatch):
    readings = itertools.chain(range(10), itertools.count(100, 2))  # the first of the two looks faster
    monkeypatch.setattr("treedec.demo.time.perf_counter", lambda: next(readings))
    monkeypatch.setattr("treedec.demo.emulated", lambda dtype: emulates)
    assert fast_dtype(CPU) == (torch.float32 if emulates else torch.bfloat16)


@given(st.integers(1, 12), st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4), st.floats(0.0, 1.0))
def test_no_number_of_columns_below_the_least_score_pays(rows, rises, below):
    """Also where a second node costs more than all others, as where a kernel changes."""
    curve = CostCurve((1, 2, 5, 9, 40), tuple(itertools.accumulate([1.0, *rises])))
    least = curve.least_score(rows)

    def columns(score):
        return torch.cat([torch.ones(rows, 1), torch.full((rows, 15), score)], 1)

    if 0 < least <= 1:
        assert curve.width(columns(min(1.0, least * 1.001)), rows) > 1 or least * 1.001 > 1
        assert curve.width(columns(least * 0.999 * below), rows) == 1


class TestThinning:
    TREE = TokenTree.from_rows([([7, 1, 2, 3], [-1, 0, 1, 1]), ([], []), ([7, 4], [-1, 0])])

    def state(self, costs, merged=False):
        texts = [[7], None, [7]]
        return DraftState(
            texts, torch.zeros(3, 2), [None] * 3, [4, 0, 4], 9, Drafting.TOP, lambda logits: logits, None, None,
            costs=costs, merged=merged,
        )  # fmt: skip

    def draft(self, padding, **more):
        scores = torch.tensor([[1.0, 0.9, 0.6, 0.3], [padding] * 4, [1.0, 0.2, padding, padding]])
        return Draft(self.TREE, scores=scores, **more)

    @pytest.mark.parametrize("padding", [0.0, 1.0, math.nan, math.inf])
    def test_rows_that_have_finished_and_padding_do_not_count(self, padding):
        # Columns are worth 0.55, 0.3 and 0.15 in the mean of two rows.
        for slope, width in ((0.0, 4), (0.06, 4), (0.12, 3), (0.26, 2), (0.7, 1)):
            thinned = self.draft(padding).thinned(self.state(CostCurve((2, 12), (1.0, 1 + 5 * slope))))
            assert thinned.tree.width == thinned.scores.shape[1] == width, slope
            assert thinned.tree.counts.tolist() == [min(4, width), 0, min(2, width)]
            assert torch.equal(thinned.tree.tokens, self.TREE.tokens[:, :width])
            assert torch.equal(thinned.tree.parents, self.TREE.parents[:, :width])
            thinned.validate(10, [4, 0, 4])

    def test_scores_that_are_not_numbers_are_worth_nothing(self):
        draft = Draft(TokenTree.chains([[7, 1, 2]]), scores=torch.tensor([[1.0, math.nan, math.nan]]))
        assert draft.thinned(self.state(FLAT)).tree.width == 1

    def test_what_is_going_to_be_merged_is_left_whole(self):
        draft = self.draft(0.0)
        assert draft.thinned(self.state(DEAR, merged=True)) is draft

    def test_drafts_that_must_stay_whole_are_refused(self):
        for bad in (Draft(self.TREE), self.draft(0.0, probabilities=torch.ones(3, 4, 10))):
            with pytest.raises(ValueError, match="drawn at random"):
                bad.thinned(self.state(FLAT))


class Knows(Drafter):
    """Half of its scores fall below what pays, in one row and in a batch."""

    name, max_nodes = "knows", 4

    def __init__(self):
        self.seen = []

    def start(self, target, batch, capacity):
        return KnowsSession(self.seen)


class KnowsSession(DraftSession):
    def __init__(self, seen):
        self.seen = seen

    def propose(self, state):
        self.seen.append(state.costs)
        chains = [
            [] if text is None else [text[-1], 3, 4, 5][: 1 + room]
            for text, room in zip(state.texts, state.room, strict=True)
        ]
        tree = TokenTree.chains(chains)
        scores = torch.tensor([1.0, 0.4, 0.3, 0.01])[: tree.width]
        draft = Draft(tree, scores=scores.expand(tree.tokens.shape))
        return draft.thinned(state)


def test_drafters_are_told_the_costs_of_the_target():
    for costs in (FREE, DEAR, FLAT):
        drafter = Knows()
        out = treedec.generate(
            costing(tiny_model(), costs), prompts(), drafter, max_new_tokens=8, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert set(drafter.seen) == {costs}
        assert (out.stats.drafted_tokens == 0) == (costs is DEAR)
    drafter = Knows()
    treedec.generate(tiny_model(), prompts(), drafter, max_new_tokens=4, do_sample=False)
    assert set(drafter.seen) == {typical_costs(CPU, torch.float64)}


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_costs_do_not_change_the_text(decoding):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": 20, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    drafted = set()
    for costs in (FREE, DEAR, FLAT, CostCurve((1, 2, 3), (1.0, 1.2, 5.0))):
        torch.manual_seed(7)
        out = treedec.generate(
            costing(model, costs), ids, treedec.NgramDrafter(min_probability=1e-9), return_dict_in_generate=True,
            **arguments,
        )  # fmt: skip
        assert torch.equal(out.sequences, expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)
        drafted.add(out.stats.drafted_tokens)
    assert 0 in drafted and len(drafted) > 2


class TestMeasuring:
    def test_the_medians_of_sizes_in_turn(self, monkeypatch):
        target, now, sizes = Target(fresh_model(dtype=torch.float32)), [0.0], []
        verify = target.verify

        def metered(cache, tree, features=None):
            sizes.append(tree.width)
            now[0] += tree.width + (100.0 if len(sizes) > 12 else 0.0)  # a hiccup at the end
            return verify(cache, tree, features)

        monkeypatch.setattr(target, "verify", metered)
        costs = measure_costs(target, prompts(), nodes=(1, 2, 8), repeats=3, clock=Clock(CPU, lambda: now[0]))
        assert costs == CostCurve((1, 2, 8), (1.0, 2.0, 8.0)) and sizes == [1, 2, 8] * 5

    @pytest.mark.parametrize("positions", [2048, 70, 65])
    def test_what_it_measures_by_default_fits_the_model(self, positions):
        target = Target(fresh_model(dtype=torch.float32, max_position_embeddings=positions))
        costs = measure_costs(target, repeats=1)
        assert costs.nodes[0] == 1 and costs.nodes[-1] == 64 and min(costs.seconds) > 0
        treedec.generate(costing(target.model, costs), prompts(), treedec.NgramDrafter(), max_new_tokens=5)

    def test_a_context_without_room_is_refused(self):
        target = Target(fresh_model(dtype=torch.float32, max_position_embeddings=40))
        with pytest.raises(ValueError, match="context of 40 tokens has no room for 64 nodes"):
            measure_costs(target)
        with pytest.raises(ValueError, match="context of 40 tokens has no room for 30 nodes"):
            measure_costs(target, prompts(), nodes=(1, 30))

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"nodes": ()}, "as many seconds as nodes"), ({"nodes": (2, 1)}, "rising"), ({"repeats": 0}, "one pass"),
            ({"text": torch.zeros(2, 3, dtype=torch.long)}, r"shape \[1, L\]; not 9 and \[2, 3\]"),
            ({"text": torch.zeros(1, 0, dtype=torch.long)}, r"not 9 and \[1, 0\]"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_measured_is_refused_before_any_pass(self, arguments, said):
        target = Target(fresh_model(dtype=torch.float32))
        target.verify = target.prefill = None
        with pytest.raises(ValueError, match=said):
            measure_costs(target, **arguments)


def test_rows_of_a_cache_can_be_given_up():
    cache, single = SlotCache(1, 3, 40, CPU, granularity=4), SlotCache(1, 1, 40, CPU, granularity=4)

    def write(cache, rows, place):
        positions = torch.tensor(rows)[:, None] // 10 * 100 + torch.tensor([place, place + 1])
        cache.reserve(positions)
        states = torch.tensor(rows, dtype=torch.float64)[:, None, None, None].expand(-1, 1, 2, 3) + place
        cache.layers[0].update(states, -states)
        cache.commit(torch.ones(len(rows), 2, dtype=torch.bool))

    write(cache, [10, 20, 30], 0)
    write(single, [30], 0)
    cache.select([2])
    assert cache.lengths == [2] and cache.free == 38
    # What compiled passes are handed does not remember the rows before.
    assert cache.rows.tolist() == [[0]] and (cache.rows._base is None or cache.rows._base.shape[0] == 1)
    assert torch.equal(cache.positions, single.positions) and torch.equal(cache.visible, single.visible)
    write(cache, [30], 2)
    write(single, [30], 2)
    for ours, expected in zip(cache.visible_states(0, 0), single.visible_states(0, 0), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_passes_compute_only_rows_that_go_on(decoding, monkeypatch):
    model, (ids, mask) = tiny_model(), ragged_prompts((9, 5, 12, 8))
    arguments = {"attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 0, **DECODING[decoding]}
    free = reference(model, ids, **arguments)

    def places(ends):
        return {next((place for place, token in enumerate(row) if token in ends), 20) for row in free.new}

    pairs = itertools.combinations(sorted({token for row in free.new for token in row[2:]}), 2)
    arguments["eos_token_id"] = list(max(pairs, key=lambda ends: len(places(ends) - {0, 1})))
    assert len(places(arguments["eos_token_id"])) > 2, "rows should end at different places"
    expected = reference(model, ids, **arguments)
    target, computed = Target(model), []
    verify = target.verify

    def watched(cache, tree, features=None):
        computed.append((tree.batch, int((tree.counts > 0).sum())))
        return verify(cache, tree, features)

    monkeypatch.setattr(target, "verify", watched)
    for drafter in (None, scripted(expected, "right-then-wrong", mask), uneven(expected, mask)):
        computed.clear()
        torch.manual_seed(7)
        assert torch.equal(treedec.generate(target, ids, drafter, **arguments), expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)
        assert all(batch == going for batch, going in computed) and len(set(computed)) > 2
    # What drafters read of the target is of their own row.
    seen = []

    class Peeks(Drafter):
        name, max_nodes, features = "peeks", 8, ()

        def start(self, *sizes):
            self.inner, self.told = uneven(expected, mask).start(*sizes), [[] for _ in ids]
            return self

        def propose(self, state):
            for row, text in enumerate(state.texts):
                if text is not None:
                    self.told[row].append(state.features[row])
                    states = target.features(torch.tensor([text[:-1]]))[0]
                    torch.testing.assert_close(state.hidden[row], states[-1])
                    torch.testing.assert_close(torch.cat(self.told[row]), states)
            seen.append(sum(text is not None for text in state.texts))
            return self.inner.propose(state)

        def observe(self, outcome):
            self.inner.observe(outcome)

    torch.manual_seed(7)
    assert torch.equal(treedec.generate(target, ids, Peeks(), **arguments), expected.ids) and min(seen) < 4
    # Compiled passes have at least two rows, unless there is only one; those that have finished have no nodes.
    monkeypatch.setattr(Target, "least_rows", 2)
    computed.clear()
    torch.manual_seed(7)
    assert torch.equal(treedec.generate(target, ids, uneven(expected, mask), **arguments), expected.ids)
    assert {batch for batch, _ in computed} >= {4, 2} and min(batch for batch, _ in computed) == 2
    assert any(going == 1 for _, going in computed)


def test_a_tree_is_verified_as_it_was_validated(monkeypatch):
    """What it derives of itself, ancestors and depths, is not computed again."""
    target, drafted, verified = Target(tiny_model()), [], []
    verify, validate = target.verify, Draft.validate

    def validated(draft, *limits):
        drafted.append(draft.tree)
        validate(draft, *limits)

    def watched(cache, tree, features=None):
        verified.append(tree)
        return verify(cache, tree, features)

    monkeypatch.setattr(target, "verify", watched)
    monkeypatch.setattr(Draft, "validate", validated)
    treedec.generate(target, prompts(), Knows(), max_new_tokens=8, do_sample=False)
    assert len(verified) > 2 and all(ours is theirs for ours, theirs in zip(verified, drafted, strict=True))
