"""Processors, criteria and streamers of the user: they see what `generate` would show them, step by step."""

import pytest
import torch
from kit import (
    DECODING,
    VOCAB,
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
from transformers import LogitsProcessor, StoppingCriteria

import treedec

NEW = 20
DECODINGS = ("greedy", "T=1.0", "top_k")
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}


def ours(model, ids, drafter=None, **arguments):
    torch.manual_seed(7)
    arguments.setdefault("attention_mask", torch.ones_like(ids))
    return treedec.generate(model, ids, drafter, **arguments)


# Processors and criteria of the user: the calls of `generate`, for a whole batch at a time.


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
