"""The promise of greedy and coupled decoding: the very tokens of `model.generate`, whatever is drafted."""

from functools import cache

import pytest
import torch
from drafters import Scripted
from kit import (
    ARCHITECTURES,
    DECODING,
    DRAFTERS,
    VOCAB,
    fresh_model,
    prompts,
    ragged_prompts,
    reference,
    scripted,
    tiny_model,
    uneven,
)
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import treedec

DTYPES = {"float64": torch.float64, "float32": torch.float32}
NEW = 28
SEED = 7


def ours(model, ids, drafter=None, seed=SEED, **arguments):
    torch.manual_seed(seed)
    arguments.setdefault("attention_mask", torch.ones_like(ids))
    return treedec.generate(model, ids, drafter, **arguments)


def rng_state(seed=SEED):
    torch.manual_seed(seed)
    return torch.get_rng_state()


@cache
def single(architecture, dtype, decoding):
    model = tiny_model(architecture, DTYPES[dtype])
    return model, reference(model, prompts(), SEED, max_new_tokens=NEW, **DECODING[decoding])


@pytest.mark.parametrize("drafter", [*DRAFTERS, None])
@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_generate(architecture, dtype, decoding, drafter):
    model, expected = single(architecture, dtype, decoding)
    ids = ours(model, prompts(), drafter and scripted(expected, drafter), max_new_tokens=NEW, **DECODING[decoding])
    assert torch.equal(ids, expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("decoding", DECODING)
def test_a09_greedy_draws_no_random_numbers_and_sampling_does(decoding):
    _, expected = single("llama", "float64", decoding)
    assert torch.equal(expected.rng_state, rng_state()) == (decoding == "greedy")


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize(
    ("drafter", "accepted"),
    [("oracle", 4.5), ("adversary", 1), ("right-then-wrong", 3), ("last-branch", 4.5), ("last-branch-then-wrong", 3)],
)
def test_scripted_drafts_are_accepted_as_far_as_they_are_right(drafter, accepted, decoding):
    """Without this, equality could be the equality of plain decoding with itself."""
    model, expected = single("llama", "float64", decoding)
    out = ours(
        model,
        prompts(),
        scripted(expected, drafter),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **DECODING[decoding],
    )
    assert out.stats.new_tokens == NEW
    assert out.stats.mean_accepted_length == pytest.approx(accepted, abs=0.5 * (accepted > 1))


@pytest.mark.parametrize("length", [1, 5, 8, 9, 40])
@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_a14_sliding_window_with_prompts_below_at_and_beyond_it(architecture, length):
    model, ids = tiny_model(architecture), prompts(length=length)
    expected = reference(model, ids, max_new_tokens=NEW, do_sample=False)
    for name in DRAFTERS:
        assert torch.equal(
            ours(model, ids, scripted(expected, name), max_new_tokens=NEW, do_sample=False), expected.ids
        )


def test_a14_the_window_matters():
    wide = tiny_model("mistral", sliding_window=None)
    wide.load_state_dict(tiny_model("mistral").state_dict())
    _, expected = single("mistral", "float64", "greedy")
    assert not torch.equal(reference(wide, prompts(), max_new_tokens=NEW, do_sample=False).ids, expected.ids)


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0", "top_p"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_of_equal_lengths_equals_generate(architecture, decoding):
    model, ids = tiny_model(architecture), prompts(batch=3)
    expected = reference(model, ids, max_new_tokens=NEW, **DECODING[decoding])
    for drafter in (scripted(expected, "last-branch"), uneven(expected), None):
        assert torch.equal(ours(model, ids, drafter, max_new_tokens=NEW, **DECODING[decoding]), expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0", "top_k"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a11_a_ragged_batch_equals_generate(architecture, decoding):
    # In float64, transformers' eager attention turns the padding of a ragged prompt into NaN (its softmax is float32).
    model, (ids, mask) = tiny_model(architecture, torch.float32), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    for drafter in (scripted(expected, "last-branch", mask), uneven(expected, mask), None):
        assert torch.equal(ours(model, ids, drafter, **arguments), expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a11_each_ragged_row_equals_its_single_run(architecture):
    model, (ids, mask) = tiny_model(architecture), ragged_prompts()
    expected = reference(model, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    together = ours(model, ids, uneven(expected, mask), attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for row in range(3):
        alone = reference(model, ids[row : row + 1, mask[row].bool()], max_new_tokens=NEW, do_sample=False)
        assert together[row, ids.shape[1] :].tolist() == alone.new[0]


@pytest.mark.parametrize("pad", ["eos", "other"])
@pytest.mark.parametrize("place", [0, 1, 6, 13])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a11_a_row_that_ends_early_is_padded_and_the_others_go_on(decoding, place, pad):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    unending = reference(model, ids, **arguments)
    eos = unending.new[1][place]
    arguments |= {"eos_token_id": eos, "pad_token_id": eos if pad == "eos" else 0}
    expected = reference(model, ids, **arguments)
    for drafter in (scripted(unending, "last-branch", mask), uneven(unending, mask), None):
        assert torch.equal(ours(model, ids, drafter, **arguments), expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a01_eos_at_every_offset_of_a_block_ends_the_text(decoding, drafter):
    model, unending = single("llama", "float64", decoding)
    new = unending.new[0]
    for place in [place for place in range(13) if new.index(new[place]) == place]:
        arguments = {"max_new_tokens": NEW, "eos_token_id": new[place], "pad_token_id": 0, **DECODING[decoding]}
        expected = reference(model, prompts(), **arguments)
        out = ours(model, prompts(), scripted(unending, drafter), return_dict_in_generate=True, **arguments)
        assert out.sequences[0, 12:].tolist() == new[: place + 1] == expected.new[0]
        assert out.stats.new_tokens == place + 1
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
def test_a03_the_length_cap_is_met_exactly(limit, decoding, drafter):
    model, longer = single("llama", "float64", decoding)
    expected = reference(model, prompts(), max_new_tokens=limit, **DECODING[decoding])
    ids = ours(model, prompts(), scripted(longer, drafter), max_new_tokens=limit, **DECODING[decoding])
    assert ids.shape[1] == 12 + limit and torch.equal(ids, expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_a04_min_new_tokens_counts_tokens_not_rounds(place, decoding, drafter):
    model, unending = single("llama", "float64", decoding)
    arguments = {"max_new_tokens": NEW, "min_new_tokens": 10, "eos_token_id": unending.new[0][place], "pad_token_id": 0}
    expected = reference(model, prompts(), **arguments, **DECODING[decoding])
    assert expected.ids.shape[1] - 12 >= 10
    for known in (unending, expected):  # the first proposes EOS too early
        assert torch.equal(
            ours(model, prompts(), scripted(known, drafter), **arguments, **DECODING[decoding]), expected.ids
        )


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no_repeat_1gram": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[38], [92, 11], [96], [75, 6, 11]]},
    "all": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[11], [92, 26]]},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", ["greedy", "T=0.7"])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_a05_penalties_and_bans_apply_to_every_token(processors, decoding, drafter):
    model, without = single("qwen3", "float64", decoding)
    arguments = {"max_new_tokens": NEW, **PROCESSORS[processors], **DECODING[decoding]}
    expected = reference(model, prompts(), **arguments)
    assert torch.equal(ours(model, prompts(), scripted(expected, drafter), **arguments), expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)
    assert torch.equal(ours(model, prompts(), scripted(without, drafter), **arguments), expected.ids)


@pytest.mark.parametrize("processors", PROCESSORS)
def test_a05_the_processors_matter(processors):
    _, without = single("qwen3", "float64", "greedy")
    expected = reference(tiny_model("qwen3"), prompts(), max_new_tokens=NEW, do_sample=False, **PROCESSORS[processors])
    assert expected.new != without.new


FURTHER = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[11], [92, 26]]},
    "min_length": {"min_length": 20, "eos_token_id": 11, "pad_token_id": 0},
    "sequence_bias": {"sequence_bias": [[[11], -5.0], [[92, 11], 3.0]]},
    "suppress_tokens": {"suppress_tokens": [11]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [11]},
    "forced_eos_token_id": {"forced_eos_token_id": 5, "eos_token_id": 5, "pad_token_id": 0},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 3, "pad_token_id": 0},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: range(20 * row, 20 * row + 30)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "watermarking_config": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
}


# These hold state per row of the batch, but are called row by row.
@pytest.mark.parametrize("argument", FURTHER)
def test_a05_every_argument_that_shapes_scores_equals_generate(argument):
    model, arguments = tiny_model("qwen3"), {"max_new_tokens": NEW, "do_sample": False, **FURTHER[argument]}
    expected = reference(model, prompts(), **arguments)
    for name in ("last-branch", "right-then-wrong"):
        assert torch.equal(ours(model, prompts(), scripted(expected, name), **arguments), expected.ids)


@pytest.mark.parametrize("argument", FURTHER)
def test_a05_every_argument_that_shapes_scores_equals_generate_in_a_ragged_batch(argument):
    model, (ids, mask) = tiny_model("qwen3"), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, **FURTHER[argument]}
    expected = reference(model, ids, **arguments)
    assert torch.equal(ours(model, ids, uneven(expected, mask), **arguments), expected.ids)


@pytest.mark.parametrize(
    "argument", [{"min_p": 0.1}, {"typical_p": 0.8}, {"epsilon_cutoff": 0.01}, {"eta_cutoff": 0.01}]
)
def test_every_argument_that_shapes_sampling_equals_generate(argument):
    model, arguments = tiny_model(), {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, **argument}
    expected = reference(model, prompts(), **arguments)
    assert torch.equal(ours(model, prompts(), scripted(expected, "last-branch"), **arguments), expected.ids)


@pytest.mark.parametrize("decoding", ["T=1.0", "top_k"])
def test_several_return_sequences_equal_generate(decoding):
    model, arguments = tiny_model(), {"max_new_tokens": NEW, "num_return_sequences": 3, **DECODING[decoding]}
    expected = reference(model, prompts(), **arguments)
    assert len({tuple(row) for row in expected.new}) == 3
    assert torch.equal(ours(model, prompts(), uneven(expected), **arguments), expected.ids)


class RecordingProcessor(LogitsProcessor):
    def __init__(self):
        self.calls, self.scores = [], []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.tolist(), scores.dtype, scores.shape))
        self.scores.append(scores.clone())
        return scores


class RecordingCriteria(StoppingCriteria):
    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0", "top_k"])
def test_processors_and_criteria_get_exactly_the_calls_of_generate(decoding, drafter):
    model, expected = single("llama", "float64", decoding)
    recorded = []
    for run in (reference, lambda *a, **k: ours(*a, drafter=scripted(expected, drafter), **k)):
        processor, criteria = RecordingProcessor(), RecordingCriteria()
        run(
            model,
            prompts(),
            max_new_tokens=NEW,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList([criteria]),
            **DECODING[decoding],
        )
        recorded.append((processor, criteria))
    (their_processor, their_criteria), (our_processor, our_criteria) = recorded
    assert len(our_criteria.calls) == NEW and our_criteria.calls == their_criteria.calls
    assert our_processor.calls == their_processor.calls
    torch.testing.assert_close(torch.cat(our_processor.scores), torch.cat(their_processor.scores), atol=1e-5, rtol=0)


class EveryThirdCallBansTheBest(LogitsProcessor):
    """Depends on how often it was called, and writes in place."""

    def __init__(self):
        self.times = 0

    def __call__(self, input_ids, scores):
        self.times += 1
        if self.times % 3 == 0:
            scores[:, scores.argmax(-1)] = -torch.inf
        return scores


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a_stateful_processor_that_writes_in_place_equals_generate(decoding, drafter):
    model = tiny_model()

    def arguments():
        processors = LogitsProcessorList([EveryThirdCallBansTheBest()])
        return {"max_new_tokens": NEW, "logits_processor": processors, **DECODING[decoding]}

    expected = reference(model, prompts(), **arguments())
    assert torch.equal(ours(model, prompts(), scripted(expected, drafter), **arguments()), expected.ids)


class StopsAfter(StoppingCriteria):
    """A stop string as tokens: done once the text ends with them."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -len(self.tokens) :] == input_ids.new_tensor(self.tokens)).all(-1)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a02_a_stop_sequence_in_a_block_or_across_two_is_seen(drafter):
    model, unending = single("llama", "float64", "greedy")
    for end in range(2, 14):
        stops = StoppingCriteriaList([StopsAfter(*unending.new[0][end - 2 : end])])
        arguments = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": stops}
        expected = reference(model, prompts(), **arguments)
        assert torch.equal(ours(model, prompts(), scripted(unending, drafter), **arguments), expected.ids)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("left", [1, 2, 4, 5])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a15_decoding_up_to_the_last_position_equals_generate(architecture, left, drafter):
    context = 24
    model = fresh_model(
        architecture, **{"n_positions" if architecture == "gpt2" else "max_position_embeddings": context}
    )
    ids = prompts(length=context - left)
    # The token at the last position still predicts one more, which has no position of its own.
    arguments = {"max_new_tokens": left + 1, "do_sample": False}
    expected = reference(model, ids, **arguments)
    out = ours(model, ids, scripted(expected, drafter), return_dict_in_generate=True, **arguments)
    assert out.stats.new_tokens == left + 1 and torch.equal(out.sequences, expected.ids)


@pytest.mark.parametrize("decoys", [0, 2])
@pytest.mark.parametrize("left", [1, 2, 4, 5])
def test_a15_no_draft_reaches_beyond_the_last_position(left, decoys):
    """More tokens are allowed than fit: the text ends itself, just in time, and drafts must not run ahead of it."""
    model, ids = fresh_model("gpt2", n_positions=24, seed=7), prompts(length=24 - left)
    unending = reference(model, ids, max_new_tokens=left + 1, do_sample=False).new[0]
    assert unending.index(unending[-1]) == left
    arguments = {"max_new_tokens": 40, "eos_token_id": unending[-1], "pad_token_id": 0, "do_sample": False}
    eager = Scripted([unending + [1] * 10], [24 - left], VOCAB, decoys=decoys)
    assert torch.equal(ours(model, ids, eager, **arguments), reference(model, ids, **arguments).ids)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a15_positions_run_out_row_by_row(drafter):
    model, (ids, mask) = fresh_model("gpt2", n_positions=24), ragged_prompts((20, 12, 17))
    arguments = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    expected = reference(model, ids, **arguments)
    assert torch.equal(ours(model, ids, scripted(expected, drafter, mask), **arguments), expected.ids)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "qwen3"])
def test_a16_eager_and_sdpa_decode_the_same(architecture):
    ids, arguments = prompts(), {"max_new_tokens": NEW, "do_sample": False}
    models = [tiny_model(architecture, attention=attention) for attention in ("eager", "sdpa")]
    expected = reference(models[0], ids, **arguments)
    assert torch.equal(reference(models[1], ids, **arguments).ids, expected.ids)
    for model in models:
        for name in ("last-branch", "last-branch-then-wrong"):
            assert torch.equal(ours(model, ids, scripted(expected, name), **arguments), expected.ids)


def test_a08_a_tiny_temperature_is_greedy():
    model, greedy = single("llama", "float64", "greedy")
    for name in DRAFTERS:
        ids = ours(model, prompts(), scripted(greedy, name), max_new_tokens=NEW, do_sample=True, temperature=1e-6)
        assert torch.equal(ids, greedy.ids)


def test_a07_a_single_candidate_leaves_a_valid_token():
    model, greedy = single("llama", "float64", "greedy")
    for acceptance in ("coupled", "residual"):
        for tight in ({"top_k": 1}, {"top_p": 1e-6}):
            ids = ours(
                model,
                prompts(),
                scripted(greedy, "last-branch"),
                max_new_tokens=NEW,
                do_sample=True,
                acceptance=acceptance,
                **tight,
            )
            assert torch.equal(ids, greedy.ids)


@pytest.mark.parametrize("acceptance", ["coupled", "residual", "typical"])
def test_a09_the_seed_decides(acceptance):
    model, expected = single("llama", "float64", "T=1.0")
    drafter = scripted(expected, "right-then-wrong")
    first, again, other = (
        ours(model, prompts(), drafter, seed=seed, max_new_tokens=NEW, do_sample=True, acceptance=acceptance)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.max() < VOCAB
