"""The contract of `generate`: every argument works as in transformers or is refused by name."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drafters import Scripted
from kit import (
    DECODING,
    VOCAB,
    characters,
    decoder,
    fresh_model,
    hooks,
    prompts,
    ragged_prompts,
    reference,
    scripted,
    tiny_model,
    uneven,
)
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import treedec
from treedec import Draft, Drafter, DraftSession, TokenTree

NEW = 20
DECODINGS = ("greedy", "T=1.0", "top_k")
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}


def ours(model, ids, drafter=None, **arguments):
    torch.manual_seed(7)
    arguments.setdefault("attention_mask", torch.ones_like(ids))
    return treedec.generate(model, ids, drafter, **arguments)


# Every field of the configuration: it works like this, is refused, or `generate` itself makes nothing of it here.

WORKS = {
    "max_length": {"max_length": 30},
    "max_new_tokens": {"max_new_tokens": 5},
    "min_length": {"min_length": 20, "eos_token_id": 11, "pad_token_id": 0},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": 11, "pad_token_id": 0},
    "max_time": {"max_time": 1e6},
    "stop_strings": {"stop_strings": ["+"], "tokenizer": characters()},
    "do_sample": {"do_sample": True},
    "use_cache": {"use_cache": False},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "top_k": {"do_sample": True, "top_k": 3},
    "top_p": {"do_sample": True, "top_p": 0.6},
    "min_p": {"do_sample": True, "min_p": 0.2},
    "top_h": {"do_sample": True, "top_h": 0.4},
    "typical_p": {"do_sample": True, "typical_p": 0.6},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.02},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.02},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[11], [92, 26]]},
    "renormalize_logits": {"do_sample": True, "renormalize_logits": True, "top_k": 4},
    "forced_bos_token_id": {"forced_bos_token_id": 4},
    "forced_eos_token_id": {"forced_eos_token_id": 5, "eos_token_id": 5, "pad_token_id": 0},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (5, 1.5),
        "eos_token_id": 3,
        "pad_token_id": 0,
    },
    "suppress_tokens": {"suppress_tokens": [11, 26]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [11, 26]},
    "sequence_bias": {"sequence_bias": [[[11], -5.0], [[92, 11], 3.0]]},
    "watermarking_config": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "pad_token_id": {"eos_token_id": 11, "pad_token_id": 1},
    "eos_token_id": {"eos_token_id": [11, 26, 38], "pad_token_id": 0},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "guidance_scale": {"guidance_scale": 1.0},
    "num_beams": {"num_beams": 1},
}
REFUSED = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "constraints": {"constraints": [object()]},
    "force_words_ids": {"force_words_ids": [[3]], "num_beams": 2},
    "dola_layers": {"dola_layers": "low"},
    "cache_implementation": {"cache_implementation": "static"},
    "token_healing": {"token_healing": True, "tokenizer": characters()},
    "guidance_scale": {"guidance_scale": 1.5},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "is_assistant": {"is_assistant": True},
    "use_mtp": {"use_mtp": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
}
RETURNED = {"output_scores", "output_logits", "return_dict_in_generate"}  # tested below
INERT = {
    # of beams, of assisted and of contrastive decoding, without which they say nothing
    *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),
    *(
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
    ),
    *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "max_matching_ngram_size"),
    # of encoders, of caches and of compilation: treedec has its own
    *("bos_token_id", "decoder_start_token_id", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    "continuous_batching_config",
}


def test_every_field_of_the_generation_configuration_is_accounted_for():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert fields <= WORKS.keys() | REFUSED.keys() | RETURNED | INERT


@pytest.mark.parametrize("name", WORKS)
def test_fields_that_work_equal_generate(name):
    model, given = tiny_model("qwen3"), {**({} if name == "max_length" else GREEDY), **WORKS[name]}
    given.setdefault("do_sample", False)
    if name.endswith("repetition_penalty"):
        given["max_new_tokens"] = 2 * NEW
    for ids, mask in ((prompts(), None), ragged_prompts()):
        mask = torch.ones_like(ids) if mask is None else mask
        batch = mask.repeat_interleave(given.get("num_return_sequences", 1), dim=0)
        expected = reference(model, ids, attention_mask=mask, **given)
        for drafter in (uneven(expected, batch), scripted(expected, "right-then-wrong", batch)):
            assert torch.equal(ours(model, ids, drafter, attention_mask=mask, **given), expected.ids)
            assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_do_not_apply_are_refused_by_name(name):
    match = {"penalty_alpha": "contrastive_search", "guidance_scale": "guidance_scale=1.5"}.get(name, name)
    with pytest.raises(ValueError, match=match):
        ours(tiny_model(), prompts(), **(GREEDY | REFUSED[name]))


def test_fields_of_the_model_s_own_configuration_work():
    model = fresh_model()
    model.generation_config.update(
        do_sample=True, top_k=4, max_new_tokens=NEW, stop_strings=["+"], cache_implementation="static"
    )
    before = model.generation_config.to_dict()
    model.generation_config.cache_implementation = None  # a static cache leaves a trace on the model
    expected = reference(model, prompts(), tokenizer=characters())
    model.generation_config.cache_implementation = "static"
    attributes = set(vars(model))
    out = ours(model, prompts(), scripted(expected, "last-branch"), tokenizer=characters())
    assert torch.equal(out, expected.ids)
    assert model.generation_config.to_dict() == before and set(vars(model)) == attributes


# What is returned: scores and logits.


@pytest.mark.parametrize("name", ["oracle", "right-then-wrong", "last-branch", "last-branch-then-wrong"])
@pytest.mark.parametrize("decoding", DECODINGS)
def test_a18_scores_and_logits_are_those_of_generate(decoding, name):
    model = tiny_model()
    asked = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "repetition_penalty": 1.3}
    arguments = {"max_new_tokens": NEW, **DECODING[decoding], **asked}
    torch.manual_seed(7)
    theirs = model.generate(prompts(), **arguments)
    plain = reference(model, prompts(), **(arguments | {"return_dict_in_generate": False}))
    out = ours(model, prompts(), scripted(plain, name), **arguments)
    assert torch.equal(out.sequences, theirs.sequences)
    assert len(out.scores) == len(out.logits) == NEW
    torch.testing.assert_close(out.scores, theirs.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(out.logits, theirs.logits, atol=1e-4, rtol=0)
    mine = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    of_generate = model.compute_transition_scores(theirs.sequences, theirs.scores, normalize_logits=True)
    torch.testing.assert_close(mine, of_generate, atol=1e-4, rtol=0)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a18_scores_of_a_ragged_batch_stop_with_each_row(decoding, together):
    model, (ids, mask) = tiny_model(dtype=torch.float32), ragged_prompts()
    unending = reference(model, ids, attention_mask=mask, max_new_tokens=NEW, **DECODING[decoding])
    arguments = {"eos_token_id": unending.new[1][6], "pad_token_id": 0, "attention_mask": mask, **DECODING[decoding]}
    arguments |= {"max_new_tokens": NEW, "output_scores": True, "output_logits": True}
    if together:
        arguments["logits_processor"] = [Untouched()]
    expected = reference(model, ids, **arguments)
    torch.manual_seed(7)
    theirs = model.generate(ids, return_dict_in_generate=True, **arguments)
    out = ours(model, ids, uneven(expected, mask), return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, theirs.sequences) and len(out.scores) == len(theirs.scores)
    new = out.sequences[:, ids.shape[1] :]
    for row in range(3):
        ends = (new[row] == arguments["eos_token_id"]).nonzero().flatten().tolist()
        length = ends[0] + 1 if ends else new.shape[1]
        for mine, of_generate in ((out.scores, theirs.scores), (out.logits, theirs.logits)):
            mine, of_generate = (torch.stack(steps)[:, row] for steps in (mine, of_generate))
            torch.testing.assert_close(mine[:length], of_generate[:length], atol=1e-4, rtol=0)
            assert not mine[length:].any()


def test_a18_no_scores_unless_asked_for():
    out = ours(tiny_model(), prompts(), return_dict_in_generate=True, **GREEDY)
    assert out.scores is None and out.logits is None
    assert isinstance(ours(tiny_model(), prompts(), output_scores=True, **GREEDY), torch.Tensor)


# Seeds and generators.


@pytest.mark.parametrize("acceptance", ["coupled", "residual"])
def test_a09_a_seed_is_like_manual_seed_but_leaves_the_generator_alone(acceptance):
    model = tiny_model()
    expected = reference(model, prompts(), seed=5, **SAMPLED)
    drafter, before = scripted(expected, "right-then-wrong"), torch.manual_seed(1).get_state()
    first, again = (
        treedec.generate(model, prompts(), drafter, seed=5, acceptance=acceptance, **SAMPLED) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(first, again)
    if acceptance == "coupled":
        assert torch.equal(first, expected.ids)
    other = treedec.generate(model, prompts(), drafter, seed=6, acceptance=acceptance, **SAMPLED)
    assert not torch.equal(first, other)


def test_a09_a_generator_is_used_and_left_where_generate_would_have_left_the_default_one():
    model, generator = tiny_model(), torch.Generator().manual_seed(7)
    expected = reference(model, prompts(), **SAMPLED)
    before = torch.manual_seed(1).get_state()
    out = treedec.generate(model, prompts(), scripted(expected, "last-branch"), generator=generator, **SAMPLED)
    assert torch.equal(out, expected.ids) and torch.equal(generator.get_state(), expected.rng_state)
    assert torch.equal(torch.get_rng_state(), before)
    blocks = treedec.stream(model, prompts(), seed=7, **SAMPLED)
    assert [token for block in blocks for token in block.tokens[0]] == expected.new[0]
    with pytest.raises(ValueError, match="seed and generator are two ways"):
        treedec.generate(model, prompts(), seed=1, generator=generator, **SAMPLED)
    with pytest.raises(ValueError, match="the generator is on meta"):
        treedec.generate(model, prompts(), generator=_Elsewhere(), **SAMPLED)


class _Elsewhere:
    device = torch.device("meta")


# The adapter.


@pytest.mark.parametrize("name", ["oracle", "last-branch-then-wrong", None])
@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_adapter_equals_generate(decoding, name):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"max_new_tokens": NEW, "repetition_penalty": 1.2, "attention_mask": mask, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    drafter = name and scripted(expected, name, mask)
    torch.manual_seed(7)
    out = model.generate(ids, custom_generate=treedec.custom_generate(drafter), **arguments)
    assert torch.equal(out, expected.ids) and torch.equal(torch.get_rng_state(), expected.rng_state)


def test_the_adapter_takes_what_model_generate_loses():
    model, recorder = tiny_model(), Recorder()
    plain = reference(model, prompts(), **SAMPLED)
    stop = "".join(characters().convert_ids_to_tokens(plain.new[0][8:10]))
    expected = reference(model, prompts(), stop_strings=stop, tokenizer=characters(), **SAMPLED)
    adapter = treedec.custom_generate(
        scripted(plain, "oracle"), seed=7, streamer=recorder, stop_strings=stop, tokenizer=characters()
    )
    out = model.generate(prompts(), custom_generate=adapter, return_dict_in_generate=True, **SAMPLED)
    assert torch.equal(out.sequences, expected.ids) and out.stats.new_tokens == expected.ids.shape[1] - 12
    assert (
        torch.cat([ids.flatten() for ids in recorder.given]).tolist() == expected.ids[0].tolist() and recorder.ends == 1
    )
    with pytest.raises(ValueError, match="stop_strings need the tokenizer"):
        treedec.custom_generate(stop_strings="x")


def test_the_adapter_refuses_what_treedec_does_not_do():
    model, other = tiny_model(), fresh_model()
    beginning = model(prompts(), use_cache=True).past_key_values
    position_ids = torch.arange(5, 17)[None]
    for given, message in (
        ({"num_beams": 2}, "num_beams=2"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"position_ids": position_ids}, "position_ids other than"),
        ({"past_key_values": beginning}, "past_key_values does not apply"),
    ):
        ids = torch.cat([prompts(), prompts(seed=2)], dim=1) if "past_key_values" in given else prompts()
        with pytest.raises(ValueError, match=message):
            model.generate(ids, custom_generate=treedec.custom_generate(), **GREEDY, **given)
    with pytest.raises(ValueError, match="target is another model"):
        model.generate(prompts(), custom_generate=treedec.custom_generate(target=treedec.Target(other)), **GREEDY)


def test_the_adapter_takes_a_target():
    model = tiny_model()
    adapter = treedec.custom_generate(target=treedec.Target(model))
    assert torch.equal(model.generate(prompts(), custom_generate=adapter, **GREEDY), ours(model, prompts(), **GREEDY))


# Processors and criteria of the user: the calls of `generate`, for a whole batch at a time.


class Untouched(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Recording(LogitsProcessor):
    def __init__(self):
        self.ids, self.shapes = [], []

    def __call__(self, input_ids, scores):
        self.ids.append(input_ids.tolist())
        self.shapes.append((scores.shape, scores.dtype))
        return scores


class RecordingCriteria(StoppingCriteria):
    def __init__(self):
        self.ids, self.scores = [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.ids.append(input_ids.tolist())
        self.scores.append(scores if scores is None else [step.clone() for step in scores])
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("decoding", DECODINGS)
def test_processors_and_criteria_of_the_user_get_the_calls_of_generate_in_a_batch(decoding, eos):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    if eos:
        ends = reference(model, ids, **arguments).new[1][5]
        arguments |= {"eos_token_id": ends, "pad_token_id": 3}
    calls = []
    expected = reference(model, ids, **arguments)
    for run in (reference, lambda *a, **k: ours(*a, drafter=uneven(expected, mask), **k)):
        processor, criteria = Recording(), RecordingCriteria()
        run(model, ids, logits_processor=[processor], stopping_criteria=[criteria], **arguments)
        calls.append((processor.ids, processor.shapes, criteria.ids, criteria.scores))
    assert calls[0] == calls[1]


def test_criteria_of_the_user_get_the_scores_if_they_are_kept():
    model, kept = tiny_model(dtype=torch.float32), {"output_scores": True, "return_dict_in_generate": True}
    calls = []
    expected = reference(model, prompts(3), **GREEDY)
    for run in (model.generate, lambda ids, **k: ours(model, ids, uneven(expected), **k)):
        criteria = RecordingCriteria()
        run(prompts(3), stopping_criteria=[criteria], **kept, **GREEDY)
        calls.append(criteria.scores)
    torch.testing.assert_close(calls[0], calls[1], atol=1e-4, rtol=0)


class Grammar(LogitsProcessor):
    """One automaton per row, as grammar libraries keep them: it is advanced by the last token of every call."""

    def __init__(self):
        self.states = None

    def __call__(self, input_ids, scores):
        if self.states is None:
            self.states = list(range(len(input_ids)))
        else:
            assert len(input_ids) == len(self.states), "called for another batch than it began with"
            self.states = [
                (state * 31 + int(token) + 1) % 5 for state, token in zip(self.states, input_ids[:, -1], strict=True)
            ]
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        for row, state in enumerate(self.states):
            allowed[row, state::5] = True
        return scores.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("name", ["oracle", "adversary", "right-then-wrong", "last-branch", "uneven"])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_stateful_grammar_equals_generate(batch, decoding, name):
    model, (ids, mask) = tiny_model(), ragged_prompts((12, 5, 9)[:batch])
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    expected = reference(model, ids, logits_processor=[Grammar()], **arguments)
    assert expected.new != reference(model, ids, **arguments).new
    drafter = uneven(expected, mask) if name == "uneven" else scripted(expected, name, mask)
    assert torch.equal(ours(model, ids, drafter, logits_processor=[Grammar()], **arguments), expected.ids)


class EndsAt(StoppingCriteria):
    """Ends the row in which a token has just been generated."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("place", [0, 3, 9])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a_criterion_ends_rows_if_there_is_an_eos_and_else_the_batch_when_all_have_met_it(decoding, place, eos):
    model, ids = tiny_model(), prompts(3)
    arguments = {"max_new_tokens": NEW, **DECODING[decoding]}
    if eos:
        arguments |= {"eos_token_id": VOCAB - 1, "pad_token_id": 0}
    plain = reference(model, ids, **arguments)
    stops = [EndsAt(plain.new[row][place + row]) for row in range(3)]
    expected = reference(model, ids, stopping_criteria=stops, **arguments)
    assert torch.equal(ours(model, ids, uneven(plain), stopping_criteria=stops, **arguments), expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("rule", ["typical", "traversal"])
def test_rules_that_score_the_whole_tree_refuse_processors_with_a_memory(rule):
    given = {"acceptance": rule, "logits_processor": [Grammar()], **SAMPLED}
    with pytest.raises(ValueError, match=f"acceptance='{rule}' scores tokens .* which Grammar must not see"):
        ours(tiny_model(), prompts(), **given)
    with pytest.raises(ValueError, match="criteria without an eos_token_id in a batch must not see"):
        ours(tiny_model(), prompts(2), acceptance=rule, stop_strings="a", tokenizer=characters(), **SAMPLED)


class Noisy(LogitsProcessor):
    """Draws from the generator that the sampling itself draws from."""

    def __call__(self, input_ids, scores):
        return scores + torch.randn(scores.shape).to(scores)


class StopsAtRandom(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.rand(len(input_ids)) < 0.05


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a09_processors_and_criteria_may_draw_random_numbers(batch, eos):
    model, (ids, mask) = tiny_model(), ragged_prompts((12, 5, 9)[:batch])
    arguments = {
        "attention_mask": mask,
        "logits_processor": [Noisy()],
        "stopping_criteria": [StopsAtRandom()],
        **SAMPLED,
    }
    if eos:
        arguments |= {"eos_token_id": [11, 26], "pad_token_id": 0}
    expected = reference(model, ids, **arguments)
    for drafter in (scripted(expected, "last-branch", mask), uneven(expected, mask), None):
        assert torch.equal(ours(model, ids, drafter, **arguments), expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


class Keeping(LogitsProcessor):
    """Keeps the ids it was given, wants them contiguous, and writes into them."""

    def __init__(self):
        self.kept = []

    def __call__(self, input_ids, scores):
        self.kept.append((input_ids, input_ids.view(-1).tolist()))
        return scores


def test_processors_get_ids_of_their_own():
    processor = Keeping()
    ours(tiny_model(), prompts(3), scripted(reference(tiny_model(), prompts(3), **GREEDY), "oracle"),
         logits_processor=[processor], **GREEDY)  # fmt: skip
    assert len(processor.kept) == NEW and all(ids.flatten().tolist() == text for ids, text in processor.kept)


class Mends(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.nan_to_num(nan=-5.0)


def test_a_processor_of_the_user_may_mend_logits():
    model = fresh_model()
    model.lm_head.weight[4] = torch.nan
    expected = reference(model, prompts(), logits_processor=[Mends()], **GREEDY)
    drafter = scripted(expected, "oracle")
    assert torch.equal(ours(model, prompts(), drafter, logits_processor=[Mends()], **GREEDY), expected.ids)
    with pytest.raises(ValueError, match="row 0, step 0: the model's logits are NaN"):
        ours(model, prompts(), logits_processor=[Untouched()], **GREEDY)


# Streamers.


class Recorder:
    def __init__(self):
        self.given, self.ends = [], 0

    def put(self, value):
        self.given.append(value)

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a19_a_streamer_gets_what_generate_gives_it(decoding, batch, early):
    model, (ids, mask) = tiny_model(), ragged_prompts((12, 5, 9)[:batch])
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    plain = reference(model, ids, **arguments)
    if early:
        arguments |= {"eos_token_id": [row[4 + 3 * place] for place, row in enumerate(plain.new)], "pad_token_id": 0}
    theirs, mine = Recorder(), Recorder()
    expected = reference(model, ids, streamer=theirs, **arguments)
    drafters = [uneven(plain, mask), scripted(plain, "oracle", mask)]
    for drafter in drafters:
        mine = Recorder()
        ours(model, ids, drafter, streamer=mine, **arguments)
        assert [value.tolist() for value in mine.given] == [value.tolist() for value in theirs.given]
        assert mine.ends == theirs.ends == 1
    assert (expected.ids.shape[1] < 12 + NEW) == early


def test_a19_a_stream_has_no_streamer():
    with pytest.raises(ValueError, match="streamer goes with generate"):
        treedec.stream(tiny_model(), prompts(), streamer=Recorder(), max_new_tokens=2)


# Bad numbers, the end of the context, and little room.


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_that_are_not_finite_raise_with_row_and_step_and_the_next_call_works(batch, decoding, poison):
    model, ids = fresh_model(), prompts(batch)
    arguments = {"max_new_tokens": NEW, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    row = batch - 1
    seen = [token for other in expected.new[:row] for token in other] + ids.flatten().tolist()
    place = next(place for place, token in enumerate(expected.new[row]) if token not in seen)
    token = expected.new[row][place]
    kept = model.get_input_embeddings().weight[token].clone()
    # Minus infinity in a hidden state is one more way to NaN; as a logit it may rule out single tokens.
    model.get_input_embeddings().weight[token] = poison
    for drafter in (scripted(expected, "oracle"), scripted(expected, "right-then-wrong"), None):
        with pytest.raises(ValueError, match=f"row {row}, step {place + 1}: the model's logits are NaN or infinite"):
            ours(model, ids, drafter, **arguments)
        assert hooks(model) == []
    model.get_input_embeddings().weight[token] = kept
    assert torch.equal(ours(model, ids, scripted(expected, "oracle"), **arguments), expected.ids)


def test_single_logits_of_minus_infinity_and_repaired_ones_are_as_in_generate():
    class Ruled(torch.nn.Linear):
        bad = -torch.inf

        def forward(self, hidden):
            out = super().forward(hidden)
            out[..., 5:20] = self.bad
            return out

    model = fresh_model()
    head = Ruled(32, VOCAB, bias=False, dtype=torch.float64)
    head.weight = model.lm_head.weight
    model.lm_head = head
    expected = reference(model, prompts(), **SAMPLED)
    assert torch.equal(ours(model, prompts(), scripted(expected, "last-branch"), **SAMPLED), expected.ids)
    head.bad = torch.nan
    repaired = {"remove_invalid_values": True, **GREEDY}
    expected = reference(model, prompts(), **repaired)
    assert torch.equal(ours(model, prompts(), scripted(expected, "last-branch"), **repaired), expected.ids)
    with pytest.raises(ValueError, match="row 0, step 0"):
        ours(model, prompts(), **GREEDY)


class Explodes(LogitsProcessor):
    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("boom")
        return scores


@pytest.mark.parametrize("after", [0, 1, 4, 9])
@pytest.mark.parametrize("batch", [1, 3])
def test_a17_an_exception_leaves_the_generator_where_it_leaves_it_in_generate(batch, after):
    model, ids, states = tiny_model(), prompts(batch), []
    expected = reference(model, ids, **SAMPLED)
    for run in (model.generate, lambda ids, **given: ours(model, ids, scripted(expected, "last-branch"), **given)):
        torch.manual_seed(7)
        with pytest.raises(RuntimeError, match="boom"):
            run(ids, logits_processor=[Explodes(after)], **SAMPLED)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a15_a_prompt_that_fills_the_context_has_one_more_token():
    model, ids = fresh_model("gpt2", n_positions=24), prompts(length=24)
    expected = reference(model, ids, max_new_tokens=1, do_sample=False)
    assert torch.equal(ours(model, ids, max_new_tokens=1, do_sample=False), expected.ids)
    with pytest.raises(ValueError, match="row 0 has reached the last of the model's 24 positions"):
        ours(model, ids, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("decoys", [0, 2])
def test_with_little_room_in_the_cache_the_tree_shrinks_down_to_plain_decoding(decoys):
    model, drafted = tiny_model(), []
    expected = reference(model, prompts(), **GREEDY)
    for spare in (0, 1, 2, 20):
        run = decoder(model, prompts(), Scripted(expected.new, [12], VOCAB, decoys=decoys), NEW)
        run.cache = run.target.allocate(1, 12 + NEW - 1 + spare)  # the last token is never cached
        blocks = list(run.run())
        assert [token for block in blocks for token in block.tokens[0]] == expected.new[0]
        drafted.append(sum(block.drafted[0] for block in blocks))
    assert drafted[0] < drafted[-1] or decoys == 0  # a chain that fits the length cap fits the slots


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_drafted_token_that_overflows_spoils_nothing(batch, decoding):
    """In float16 a token that would never be chosen may overflow; its values are masked, but `0 · NaN` is NaN."""
    model, ids = fresh_model(), prompts(batch)
    arguments = {"max_new_tokens": NEW, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    used = {token for row in [*expected.new, *ids.tolist()] for token in row}
    never = next(token for token in range(VOCAB) if token not in used)
    model.get_input_embeddings().weight[never] = torch.nan
    for known in ([[never] * NEW] * batch, [row[:2] + [never] * (NEW - 2) for row in expected.new]):
        drafter = Scripted(known, [12] * batch, VOCAB)
        out = ours(model, ids, drafter, return_dict_in_generate=True, **arguments)
        assert torch.equal(out.sequences, expected.ids)


# Rotary embeddings whose frequencies change with the length of the text.

_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]}
SWITCHING = {
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, {"max_position_embeddings": 20}),
    "longrope": ("llama", _LONGROPE | {"original_max_position_embeddings": 20}, {"max_position_embeddings": 80}),
    "longrope of phi3": (
        "phi3",
        _LONGROPE | {"original_max_position_embeddings": 20},
        {"max_position_embeddings": 80, "original_max_position_embeddings": 20},
    ),
}


def switching(name):
    architecture, rope, others = SWITCHING[name]
    return fresh_model(architecture, rope_parameters=rope, **others)


@pytest.mark.parametrize("length", [5, 17, 19, 20, 21, 30])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("name", SWITCHING)
def test_a15_decoding_across_a_change_of_rotary_frequencies_equals_generate(name, decoding, length):
    ids = prompts(length=length)
    arguments = {"max_new_tokens": NEW, **DECODING[decoding]}
    expected = reference(switching(name), ids, **arguments)
    for drafter in ("oracle", "last-branch-then-wrong", None):
        out = ours(switching(name), ids, drafter and scripted(expected, drafter), **arguments)
        assert torch.equal(out, expected.ids)


@pytest.mark.parametrize("name", SWITCHING)
def test_a15_a_prompt_that_is_to_be_divided_is_divided_as_by_generate(name):
    arguments = {"prefill_chunk_size": 8, **GREEDY}
    expected = reference(switching(name), prompts(length=30), **arguments)
    assert torch.equal(
        ours(switching(name), prompts(length=30), scripted(expected, "oracle"), **arguments), expected.ids
    )


@pytest.mark.parametrize("name", SWITCHING)
def test_a15_a_batch_is_not_decoded_across_a_change_of_rotary_frequencies(name):
    model, (ids, mask) = switching(name), ragged_prompts()
    arguments = {"attention_mask": mask, "do_sample": False}
    expected = reference(switching(name), ids, max_new_tokens=9, **arguments)
    assert torch.equal(ours(model, ids, uneven(expected, mask), max_new_tokens=9, **arguments), expected.ids)
    with pytest.raises(ValueError, match=r"from position 20 on, .* decode one row at a time"):
        ours(model, ids, max_new_tokens=10, **arguments)
    with pytest.raises(ValueError, match="without padding"):
        ours(model, ids[1:2], attention_mask=mask[1:2], max_new_tokens=20)


# Threads, contexts, and odd inputs.


def test_a17_threads_that_decode_with_one_model_do_not_disturb_each_other():
    model, ids = tiny_model(), [prompts(length=length, seed=length) for length in (5, 9, 14)]
    expected = [reference(model, each, max_new_tokens=40, do_sample=False) for each in ids]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            runs = [
                pool.submit(
                    treedec.generate, model, each, scripted(wanted, "last-branch"), max_new_tokens=40, do_sample=False
                )
                for each, wanted in zip(ids, expected, strict=True)
            ]
            found = [run.result() for run in runs]
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(out, wanted.ids) for out, wanted in zip(found, expected, strict=True))


def test_the_default_device_is_not_that_of_trees():
    with torch.device("meta"):
        tree = treedec.TokenTree.from_rows([([1, 2, 3], [-1, 0, 0]), ([], [])])
        tree.padded(5).validate(VOCAB, [1, 0])
        assert tree.ancestors.device.type == tree.depths.device.type == "cpu"


def test_ids_of_another_integer_type_are_as_in_generate():
    expected = reference(tiny_model(), prompts().int(), **GREEDY)
    out = ours(tiny_model(), prompts().int(), **GREEDY)
    assert out.dtype == expected.ids.dtype and torch.equal(out, expected.ids)
    with pytest.raises(ValueError, match="input_ids must be integers"):
        ours(tiny_model(), prompts().float(), **GREEDY)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a14_gaps_in_the_attention_mask_equal_generate_unless_there_is_a_window(architecture):
    model, ids, mask = tiny_model(architecture), prompts(), torch.ones(1, 12, dtype=torch.long)
    mask[0, [2, 3, 7]] = 0
    if architecture == "mistral":
        with pytest.raises(ValueError, match="zeros between ones, which the sliding windows"):
            ours(model, ids, attention_mask=mask, **GREEDY)
    else:
        expected = reference(model, ids, attention_mask=mask, **GREEDY)
        drafter = scripted(expected, "last-branch", mask)
        assert torch.equal(ours(model, ids, drafter, attention_mask=mask, **GREEDY), expected.ids)


class Careless(Drafter):
    """Draws, writes and appends where a drafter should not."""

    name, max_nodes = "careless", 2

    def start(self, target, batch, capacity):
        torch.rand(3)
        return _CarelessSession()


class _CarelessSession(DraftSession):
    def propose(self, state):
        torch.rand(5)
        state.noise(1).zero_()
        tree = TokenTree.chains([[] if text is None else [text[-1], 3][: 1 + room]
                                 for text, room in zip(state.texts, state.room, strict=True)])  # fmt: skip
        for text in state.texts:
            if text is not None:
                text.append(3)
        return Draft(tree)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_careless_drafter_changes_nothing(batch):
    model, ids = tiny_model(), prompts(batch)
    expected = reference(model, ids, **SAMPLED)
    assert torch.equal(ours(model, ids, Careless(), **SAMPLED), expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)


class Unlikely(Drafter):
    name, max_nodes = "unlikely", 2

    def __init__(self, probabilities, drawn=None):
        self.probabilities, self.drawn = probabilities, drawn

    def start(self, target, batch, capacity):
        return _UnlikelySession(self)


class _UnlikelySession(DraftSession):
    def __init__(self, plan):
        self.plan = plan

    def propose(self, state):
        return Draft(TokenTree.chains([[state.texts[0][-1], 3]]), self.plan.probabilities, self.plan.drawn)


@pytest.mark.parametrize(
    ("probabilities", "drawn", "message"),
    [
        (torch.full((1, 2, VOCAB), torch.nan), None, "row 0, node 0: the probabilities .* NaN"),
        (torch.full((1, 2, VOCAB), -1.0), None, "row 0, node 0: the probabilities .* negative"),
        (torch.ones(1, 2, VOCAB - 1), None, r"must be \[1, 2, 97\], not \[1, 2, 96\]"),
        (torch.ones(1, 2, VOCAB), torch.ones(1, 3, dtype=torch.bool), r"drawn must be \[1, 2\]"),
        (None, torch.ones(1, 2, dtype=torch.bool), "drawn must be"),
    ],
)
def test_a12_a_draft_with_impossible_probabilities_is_refused(probabilities, drawn, message):
    with pytest.raises(treedec.TreeError, match=message):
        ours(tiny_model(), prompts(), Unlikely(probabilities, drawn), acceptance="residual", **SAMPLED)
