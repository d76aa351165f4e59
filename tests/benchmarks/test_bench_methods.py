"""Methods: their names, what they decode, what is counted and timed on the way, and that nothing is left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from kit import characters, fresh_model, hooks, prompts, ragged_prompts, reference

import treedec
from treedec.benchmarks import methods
from treedec.benchmarks.clock import accepted_places
from treedec.benchmarks.counting import check_counts, counted_tokens
from treedec.benchmarks.methods import (
    COMPILED,
    Batch,
    Engine,
    Kind,
    Method,
    conditions_of,
    constant_assistant,
    parse_methods,
    public_command,
    weights_digest,
)
from treedec.benchmarks.results import Condition
from treedec.costs import Clock
from treedec.drafter import Outcome
from treedec.growth import DynamicTree
from treedec.heads import DraftModelDrafter, NgramDrafter, UnionDrafter
from treedec.heads.eagle import EagleConfig, EagleDrafter, EagleHead
from treedec.tree import TokenTree

NEW = 24


def slightly_different(model, noise=0.02, seed=3):
    """A draft model for it that is right now and then."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return draft


@pytest.fixture(scope="module", params=[torch.float32, torch.float64])
def pair(request):
    model = fresh_model(dtype=request.param)
    return model, slightly_different(model)


def engine_of(model, draft_model=None, **more):
    return Engine(model, characters(), **({"max_new_tokens": NEW, "draft_model": draft_model} | more))


def batch_of(ids, mask=None):
    return Batch(ids, torch.ones_like(ids) if mask is None else mask)


def decode(engine, method, batch, temperature=0.0, acceptance=None, seed=0):
    kinds = {kind.value: kind for kind in Kind}
    name, _, nodes = method.removeprefix(COMPILED).partition("@")
    kind = kinds.get(name, Kind.DRAFTER)
    source = name if kind is Kind.DRAFTER else None
    if kind.ours:
        acceptance = acceptance or ("coupled" if temperature else "greedy")
    decoder = engine.prepare(
        Condition(method, temperature, acceptance, len(batch.ids)),
        Method(method, kind, source, int(nodes or 0) or None, method.startswith(COMPILED)),
    )
    torch.manual_seed(seed)
    return decoder(batch)


ALL = (
    "hf", "ar", "vanilla", "hf-assisted", "hf-assisted-default", "hf-prompt-lookup", "ngram", "vanilla@8",
    "hf-assisted@3", "ngram@5",
)  # fmt: skip


def test_weights_are_told_apart_wherever_they_are(pair):
    model, draft = pair
    nothing = weights_digest(None)
    assert weights_digest(NgramDrafter()) == weights_digest(treedec.drafter.NoDrafts()) == nothing
    digests = [weights_digest(part) for part in (model, draft)]
    assert len({*digests, nothing}) == 3
    assert weights_digest(treedec.Target(draft)) == weights_digest(DraftModelDrafter(draft, depth=2)) == digests[1]
    assert weights_digest(UnionDrafter(NgramDrafter(), DraftModelDrafter(draft))) == digests[1]
    changed = copy.deepcopy(draft)
    next(changed.parameters())[0, 0] += 0.5
    assert weights_digest(changed) != digests[1] == weights_digest(copy.deepcopy(draft))


def test_weights_that_another_module_holds_once_more_count_once():
    model = fresh_model()
    width = model.config.hidden_size
    shape = EagleConfig(
        hidden_size=width, vocab_size=model.config.vocab_size, draft_vocab_size=20, target_hidden_size=width,
        intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, version=3, features=(1,),
    )  # fmt: skip
    head = EagleHead(shape).double()
    drafter = EagleDrafter(head, model, DynamicTree())
    assert drafter.step.head is head
    assert weights_digest(drafter) == weights_digest(head) != weights_digest(None)


class TestNames:
    def test_kinds_and_sizes(self, tmp_path):
        heads = tmp_path / "mine" / "heads"
        heads.mkdir(parents=True)
        parsed = parse_methods(
            ["hf", "vanilla@6", "ngram", "recurrent@32", f"{heads}@16", f"{tmp_path}+ngram", "hf"], "demo"
        )
        assert [(method.kind, method.source, method.nodes) for method in parsed] == [
            (Kind.HF, None, None),
            (Kind.VANILLA, None, 6),
            (Kind.DRAFTER, "ngram", None),
            (Kind.DRAFTER, "demo:recurrent", 32),
            (Kind.DRAFTER, str(heads), 16),
            (Kind.DRAFTER, f"{tmp_path}+ngram", None),
        ]
        assert [method.name for method in parsed[3:]] == ["recurrent@32", "mine/heads@16", f"{tmp_path.name}+ngram"]

    def test_ours_run_on_a_compiled_target(self):
        parsed = parse_methods(["ar", "compiled:ar", "compiled:recurrent@32", "compiled:vanilla"], "demo")
        assert [method.name for method in parsed] == ["ar", "compiled:ar", "compiled:recurrent@32", "compiled:vanilla"]
        assert [method.compiled for method in parsed] == [False, True, True, True]
        assert [(method.kind, method.source, method.nodes) for method in parsed[1:]] == [
            (Kind.AR, None, None), (Kind.DRAFTER, "demo:recurrent", 32), (Kind.VANILLA, None, None),
        ]  # fmt: skip

    def test_a_union_is_the_best_heads_and_ngrams(self):
        assert parse_methods(["union"], "demo")[0].source == "demo+ngram"

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["guess"], "unknown method 'guess': known are hf, ar, vanilla"),
            (["Hf"], "unknown method 'Hf'"),
            (["ngram+guess"], "unknown method 'ngram\\+guess'"),
            (["demo:guess"], "unknown method"),
            (["@8"], "unknown method '@8'"),
            ([""], "unknown method ''"),
            (["hf@4"], "hf has no trees"),
            (["ar@4"], "ar has no trees"),
            (["hf-assisted-default@4"], "hf-assisted-default has no trees"),
            (["ngram@"], "number of nodes"),
            (["ngram@1"], "number of nodes"),
            (["ngram@x"], "number of nodes"),
            (["hydra"], "no such heads are shipped"),
            (["compiled:hf"], "only treedec's own methods"),
            (["compiled:guess"], "unknown method 'guess'"),
            ([], "no methods"),
        ],
    )
    def test_others_are_refused(self, names, said):
        with pytest.raises(ValueError, match=said):
            parse_methods(names, "demo")

    @pytest.mark.parametrize("name", ["medusa", "recurrent", "union"])
    def test_short_names_are_for_the_demo_target(self, name):
        with pytest.raises(ValueError, match="no shipped heads for the target 'mine'"):
            parse_methods([name], "mine")

    def test_folders_of_one_name_are_refused(self, tmp_path):
        for parent in "ab":
            (tmp_path / parent / "same").mkdir(parents=True)
        with pytest.raises(ValueError, match="two methods would be called 'same'"):
            parse_methods([str(tmp_path / parent / "same") for parent in "ab"], "demo")

    def test_a_command_is_published_without_folders(self):
        given = ["treedec", "bench", "--methods", "hf,/home/me/heads@4+ngram,runs/x", "--out", "/tmp/a/b.json"]
        assert public_command(given) == "treedec bench --methods hf,heads@4+ngram,runs/x --out b.json"


class TestConditions:
    def of(self, *names, temperatures=(0.0,), rules=("coupled",), batches=(1,)):
        return [condition for condition, _ in conditions_of(parse_methods(names, "demo"), temperatures, rules, batches)]

    def test_rules_are_for_our_sampling_only(self):
        assert self.of("hf", "ar", "ngram", temperatures=(0.0, 1.0), rules=("coupled", "residual")) == [
            Condition("hf", 0.0, None, 1),
            Condition("ar", 0.0, "greedy", 1),
            Condition("ngram", 0.0, "greedy", 1),
            Condition("hf", 1.0, None, 1),
            Condition("ar", 1.0, "coupled", 1),
            Condition("ngram", 1.0, "coupled", 1),
            Condition("ngram", 1.0, "residual", 1),
        ]

    def test_what_decodes_single_prompts_is_left_out_of_batches(self):
        assert self.of("hf", "hf-prompt-lookup", batches=(1, 4)) == [
            Condition("hf", 0.0, None, 1),
            Condition("hf-prompt-lookup", 0.0, None, 1),
            Condition("hf", 0.0, None, 4),
        ]
        with pytest.raises(ValueError, match="hf-prompt-lookup decodes one prompt at a time"):
            self.of("hf", "hf-prompt-lookup", batches=(4,))

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"rules": ("guess",)}, "unknown acceptance rule 'guess'"),
            ({"rules": ("greedy",)}, "does not sample"),
            ({"temperatures": (-1.0,)}, "temperature"),
            ({"temperatures": (float("nan"),)}, "temperature"),
            ({"temperatures": (float("inf"),)}, "temperature"),
            ({"batches": (0,)}, "batch"),
            ({"temperatures": ()}, "at least one"),
        ],
    )
    def test_mistakes_are_named(self, more, said):
        with pytest.raises(ValueError, match=said):
            self.of("hf", **more)


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}


# Sampling with drafts, transformers draws other random numbers than without.
@pytest.mark.parametrize(
    ("method", "arguments"),
    [(method, GREEDY) for method in ALL] + [(method, SAMPLED) for method in ALL if not method.startswith("hf-")],
)
def test_methods_return_what_generate_does(pair, method, arguments):
    model, draft = pair
    sampled = arguments["do_sample"]
    expected = reference(model, prompts(), seed=5, max_new_tokens=NEW, **arguments)
    decoded = decode(engine_of(model, draft), method, batch_of(prompts()), temperature=float(sampled), seed=5)
    assert decoded.rows == expected.new
    if decoded.stats is not None:
        check_counts(decoded.rows, decoded.stats, decoded.first, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "vanilla"])
def test_a_compiled_target_decodes_the_same(pair, method):
    model, draft = pair
    engine, batch = engine_of(model, draft), batch_of(prompts())
    plain, compiled = (decode(engine, name, batch) for name in (method, f"compiled:{method}"))
    assert compiled.rows == plain.rows and compiled.stats == plain.stats
    assert engine.compiled_target._compiled is not None and engine.target._compiled is None
    if method == "vanilla":
        drafters = [metered.drafter for metered in engine._drafters.values()]
        assert [drafter._target._compiled is not None for drafter in drafters] == [False, True]


@pytest.mark.parametrize("sampled", [False, True])
def test_watching_changes_nothing(pair, sampled):
    """The criterion that takes the time leaves tokens and random numbers as they are."""
    arguments = SAMPLED if sampled else GREEDY
    for method, extra in (("hf-assisted", True), ("hf-prompt-lookup", False)):
        model, draft = pair
        more = {"assistant_model": constant_assistant(draft, 4)} if extra else {"prompt_lookup_num_tokens": 10}
        expected = reference(model, prompts(), seed=5, max_new_tokens=NEW, **arguments, **more)
        decoded = decode(engine_of(model, draft), method, batch_of(prompts()), temperature=float(sampled), seed=5)
        assert decoded.rows == expected.new
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("method", ["hf", "ar", "ngram", "vanilla"])
def test_batches_of_ragged_prompts(method):
    model = fresh_model()
    ids, mask = ragged_prompts()
    first = reference(model, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    model.generation_config.eos_token_id = first.new[1][NEW // 2]  # a row that ends before the others
    expected = reference(model, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    model.generation_config.pad_token_id = 0
    engine = engine_of(model, slightly_different(model))
    decoded = decode(engine, method, batch_of(ids, mask))
    counted, wanted = (
        counted_tokens(rows, engine.eos, engine.pad, NEW, method) for rows in (decoded.rows, expected.new)
    )
    assert counted == wanted
    assert len({len(row) for row in counted}) > 1


def test_the_models_are_left_as_they_were(pair):
    model, draft = pair
    before = [(m.generation_config.to_dict(), dict(vars(m)).keys(), len(hooks(m))) for m in pair]
    engine = engine_of(model, draft)
    for method in ALL:
        decode(engine, method, batch_of(prompts()))
    assert [(m.generation_config.to_dict(), dict(vars(m)).keys(), len(hooks(m))) for m in pair] == before


class TestAssistedLikeOurs:
    """The first token of treedec comes from the prompt alone; transformers drafts there already. So a prompt for
    transformers that includes treedec's first token makes the passes of both the same."""

    def passes(self, pair, tokens, assistant=None):
        model, draft = pair
        both = []
        for seed in range(6):
            ids = prompts(seed=seed)
            ours = decode(
                engine_of(model, draft, draft_tokens=tokens, max_new_tokens=NEW + 1), "vanilla", batch_of(ids)
            )
            longer = torch.cat([ids, torch.tensor([ours.rows[0][:1]])], dim=1)
            engine = engine_of(model, draft, draft_tokens=assistant or tokens)
            theirs = decode(engine, "hf-assisted", batch_of(longer))
            assert ours.rows[0][1:] == theirs.rows[0]
            assert ours.first == 1
            histogram = dict(theirs.stats.accepted_lengths)
            histogram[theirs.first] = histogram.get(theirs.first, 0) + 1
            both.append((ours.stats.accepted_lengths, histogram))
        return both

    @pytest.mark.parametrize("tokens", [1, 2, 4, 7])
    def test_the_same_drafts_are_accepted_alike(self, pair, tokens):
        both = self.passes(pair, tokens)
        assert all(ours == theirs for ours, theirs in both)
        lengths = {length for ours, _ in both for length in ours}
        assert 1 in lengths and len(lengths) > 1  # some drafts were wrong and some were right

    def test_other_drafts_are_not(self, pair):
        assert any(ours != theirs for ours, theirs in self.passes(pair, 4, assistant=2))

    def test_nor_those_that_transformers_makes_by_itself(self, pair, monkeypatch):
        monkeypatch.setattr(methods, "constant_assistant", lambda model, tokens: model)
        assert any(ours != theirs for ours, theirs in self.passes(pair, 4))


def test_a_draft_model_is_asked_for(pair):
    with pytest.raises(ValueError, match="'vanilla' needs a draft model"):
        decode(engine_of(pair[0]), "vanilla", batch_of(prompts()))


class TestTimes:
    """A clock that only the model's passes and the drafter advance."""

    @pytest.fixture
    def timed(self):
        model, now = fresh_model(), [0.0]
        model.register_forward_pre_hook(lambda *_: now.__setitem__(0, now[0] + 1.0))
        engine = engine_of(model, clock=Clock(model.device, lambda: now[0]))
        for method in ("hf", "ar"):
            decode(engine, method, batch_of(prompts()))  # probes the model once
        return engine, now

    def test_prefill_and_decoding_are_told_apart(self, timed):
        engine, _ = timed
        for method in ("hf", "ar"):
            decoded = decode(engine, method, batch_of(prompts()))
            assert (decoded.prefill_seconds, decoded.decode_seconds) == (1.0, NEW - 1.0)

    def test_drafting_and_passes_are_told_apart(self, timed, monkeypatch):
        engine, now = timed

        class Slow(treedec.NgramDrafter):
            def start(self, target, batch, capacity):
                now[0] += 5.0
                session = super().start(target, batch, capacity)
                propose, observe = session.propose, session.observe

                def slow(then, seconds):
                    def call(argument):
                        now[0] += seconds
                        return then(argument)

                    return call

                session.propose, session.observe = slow(propose, 0.25), slow(observe, 0.5)
                return session

        monkeypatch.setattr(treedec, "load_drafter", lambda *_, **__: Slow())
        decoded = decode(engine, "slow", batch_of(prompts()))
        passes = decoded.stats.row_passes
        assert decoded.prefill_seconds == 6.0
        assert (decoded.draft_seconds, decoded.target_seconds) == (0.75 * passes, 1.0 * passes)
        assert decoded.decode_seconds == 1.75 * passes


class TestPlaces:
    def places(self, tree, paths, tokens, eos=()):
        return accepted_places([(TokenTree.from_rows(tree), Outcome(paths, tokens))], eos)

    #      0 → 1 → 3, 4
    #        → 2 → 5
    TREE = ([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 2])

    def test_children_of_accepted_nodes_are_reached(self):
        assert self.places([self.TREE], [[0, 1, 4]], [[1, 4, 7]]) == {
            (1, 1): (1, 1), (1, 2): (1, 0), (2, 1): (1, 0), (2, 2): (1, 1),
        }  # fmt: skip
        assert self.places([self.TREE], [[0]], [[8]]) == {(1, 1): (1, 0), (1, 2): (1, 0)}

    def test_a_candidate_that_ends_the_row_is_accepted(self):
        reached = {(1, 1): (1, 1), (1, 2): (1, 0), (2, 1): (1, 1), (2, 2): (1, 0)}
        assert self.places([self.TREE], [[0, 1]], [[1, 3]], eos=(3,)) == reached
        # By another rule than the end it would have been part of the path.
        assert self.places([self.TREE], [[0, 1]], [[1, 3]])[2, 1] == (1, 0)

    def test_rows_are_added_and_finished_ones_left_out(self):
        rows = [self.TREE, ([], []), ([9, 1], [-1, 0])]
        assert self.places(rows, [[0], [], [0, 1]], [[8], [], [1, 2]]) == {(1, 1): (2, 1), (1, 2): (1, 0)}

    def test_on_chains_they_agree_with_the_accepted_lengths(self, pair):
        model, draft = pair
        decoded = decode(engine_of(model, draft), "vanilla", batch_of(prompts()))
        lengths = decoded.stats.accepted_lengths
        assert decoded.places and {rank for _, rank in decoded.places} == {1}
        for (depth, _), (reached, accepted) in decoded.places.items():
            assert accepted == sum(times for length, times in lengths.items() if length > depth)
            assert accepted <= reached
