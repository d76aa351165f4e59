"""The contract of `generate`: every argument works as in transformers or is refused by name."""

import pytest
import torch
from kit import (
    DECODING,
    Recorder,
    Untouched,
    characters,
    fresh_model,
    prompts,
    ragged_prompts,
    reference,
    scripted,
    tiny_model,
    uneven,
)
from transformers import GenerationConfig

import treedec

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
