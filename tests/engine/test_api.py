"""The public calls: what they refuse, what they leave behind, and what they report."""

import copy

import pytest
import torch
from kit import VOCAB, Explodes, fresh_model, hooks, prompts, ragged_prompts, reference, scripted, tiny_model
from transformers import GenerationConfig, LogitsProcessorList

import treedec
from treedec import Draft, Drafter, DraftSession, TokenTree, TreeError

NEW = 16
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True}


class Untouchable(Drafter):
    """Must not be asked for anything: errors come before generation starts."""

    name, max_nodes = "untouchable", 4

    def start(self, target, batch, capacity):
        pytest.fail("the drafter was started")


def generate(ids, model=None, **arguments):
    return treedec.generate(model or tiny_model(), ids, Untouchable(), **(GREEDY | arguments))


@pytest.mark.parametrize("shape", [(1, 0), (0, 5), (5,), (1, 2, 3)])
def test_an_empty_prompt_is_refused(shape):
    with pytest.raises(ValueError, match=r"input_ids must be \[B, L\].*the prompt is empty"):
        generate(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the model's vocabulary of {VOCAB}"):
        generate(torch.tensor([[1, token, 2]]))


@pytest.mark.parametrize("length", [25, 26])
def test_a15_a_prompt_past_the_context_is_refused(length):
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens, but the model's context ends at 24"):
        generate(prompts(length=length), fresh_model("gpt2", n_positions=24))


def test_beams_are_refused():
    with pytest.raises(ValueError, match="num_beams=2"):
        generate(prompts(), num_beams=2)


def test_a11_padding_on_the_right_is_refused():
    ids, mask = ragged_prompts()
    with pytest.raises(ValueError, match="padded on the left"):
        generate(ids.flip(1), attention_mask=mask.flip(1))


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="max_new_token_typo"):
        generate(prompts(), max_new_token_typo=3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_an_unknown_rule_is_refused(sampling):
    with pytest.raises(ValueError, match="unknown acceptance rule 'nope'"):
        generate(prompts(), acceptance="nope", **sampling)


def test_greedy_acceptance_with_sampling_is_refused():
    with pytest.raises(ValueError, match="does not sample"):
        generate(prompts(), acceptance="greedy", do_sample=True)


def test_a08_temperature_zero_is_refused_like_in_generate():
    with pytest.raises(ValueError, match="temperature"):
        generate(prompts(), do_sample=True, temperature=0.0)


def test_errors_come_from_the_call_and_not_from_the_first_block():
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        treedec.stream(tiny_model(), torch.tensor([[VOCAB]]), **GREEDY)


class Malformed(Drafter):
    name, max_nodes = "malformed", 3

    def __init__(self, below_root):
        self.below_root = below_root

    def start(self, target, batch, capacity):
        return _MalformedSession(self.below_root)


class _MalformedSession(DraftSession):
    def __init__(self, below_root):
        self.below_root = below_root

    def propose(self, state):
        tokens, parents = self.below_root
        return Draft(TokenTree.from_rows([([text[-1], *tokens], [-1, *parents]) for text in state.texts]))


@pytest.mark.parametrize(("tokens", "parents"), [([3, 4], [2, 0]), ([VOCAB], [0]), ([3, 4], [0, 2])])
def test_a12_a_malformed_draft_names_row_and_node(tokens, parents):
    with pytest.raises(TreeError, match="row 0, node"):
        treedec.generate(tiny_model(), prompts(), Malformed((tokens, parents)), **GREEDY)


def test_a12_a_draft_deeper_than_its_room_is_refused():
    with pytest.raises(TreeError, match=r"row 0, node 2 .*deeper"):
        treedec.generate(tiny_model(), prompts(), Malformed(([3, 4], [0, 1])), max_new_tokens=3, do_sample=False)


def test_a12_a_draft_larger_than_announced_is_refused():
    drafter = Malformed((list(range(6)), [0] * 6))
    with pytest.raises(ValueError, match="does not fit"):
        treedec.generate(tiny_model(), prompts(), drafter, max_new_tokens=3, do_sample=False)


# A17: what a call leaves behind.


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a17_a_b_a(sampling):
    model, drafter_of = tiny_model(), {}
    ids = {"A": prompts(length=6, seed=1), "B": prompts(length=30, seed=2)}
    expected = {name: reference(model, ids[name], **sampling) for name in ids}
    for name in ids:
        drafter_of[name] = scripted(expected[name], "last-branch-then-wrong")
    for name in "ABA":
        torch.manual_seed(7)
        assert torch.equal(treedec.generate(model, ids[name], drafter_of[name], **sampling), expected[name].ids)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a17_a_call_after_an_exception_is_like_a_first_one(after, sampling):
    model = fresh_model()
    expected = reference(model, prompts(), **sampling)
    drafter = scripted(expected, "last-branch")
    with pytest.raises(RuntimeError, match="boom"):
        treedec.generate(model, prompts(), drafter, logits_processor=LogitsProcessorList([Explodes(after)]), **sampling)
    assert hooks(model) == []
    torch.manual_seed(7)
    assert torch.equal(treedec.generate(model, prompts(), drafter, **sampling), expected.ids)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a17_model_configurations_and_inputs_are_unchanged(sampling):
    model, (ids, mask) = fresh_model(), ragged_prompts()
    before = [copy.deepcopy(x) for x in (model.config.to_dict(), model.generation_config.to_dict(), ids, mask)]
    attributes, weights = set(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    expected = reference(model, ids, attention_mask=mask, **sampling)
    drafter = scripted(expected, "last-branch", mask)
    treedec.generate(model, ids, drafter, attention_mask=mask, bad_words_ids=[[3]], **sampling)
    assert model.config.to_dict() == before[0] and model.generation_config.to_dict() == before[1]
    assert torch.equal(ids, before[2]) and torch.equal(mask, before[3])
    assert set(vars(model)) == attributes and hooks(model) == [] and not model.training
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a17_a_generation_config_of_the_user_is_unchanged():
    mine = GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=5, eos_token_id=3, pad_token_id=0)
    before = copy.deepcopy(mine.to_dict())
    torch.manual_seed(7)
    ids = treedec.generate(tiny_model(), prompts(), generation_config=mine)
    assert mine.to_dict() == before
    assert torch.equal(ids, reference(tiny_model(), prompts(), generation_config=mine).ids)


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_a17_an_abandoned_stream_leaves_no_hooks_and_the_generator_where_it_stopped(blocks):
    model = fresh_model()
    expected = reference(model, prompts(), **SAMPLED)
    torch.manual_seed(7)
    stream = treedec.stream(model, prompts(), scripted(expected, "oracle"), **SAMPLED)
    taken = sum(len(next(stream).tokens[0]) for _ in range(blocks))
    stream.close()
    state = torch.get_rng_state()
    assert hooks(model) == [] and taken == [0, 1, 6, 11][blocks]
    torch.manual_seed(7)
    if taken:
        assert torch.equal(state, reference(model, prompts(), max_new_tokens=taken, do_sample=True).rng_state)
    else:
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_stream_between_whose_blocks_gradients_are_as_before(sampling):
    blocks = treedec.stream(tiny_model(), prompts(), **sampling)
    next(blocks)
    assert torch.is_grad_enabled()
    blocks.close()
    assert torch.is_grad_enabled()


# What is returned.


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a19_the_blocks_of_a_stream_are_the_new_tokens_of_generate(sampling):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    expected = reference(model, ids, attention_mask=mask, **sampling)
    torch.manual_seed(7)
    rows = [[], [], []]
    blocks = list(treedec.stream(model, ids, scripted(expected, "last-branch", mask), attention_mask=mask, **sampling))
    for block in blocks:
        for row, tokens in zip(rows, block.tokens, strict=True):
            row += tokens
    assert rows == expected.new
    assert [block.prefill for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert blocks[-1].finished == [True] * 3 and not any(any(block.finished) for block in blocks[:-1])


def test_a24_the_statistics_count_what_happened():
    model = tiny_model()
    expected = reference(model, prompts(), **GREEDY)
    drafter = scripted(expected, "last-branch-then-wrong")
    out = treedec.generate(model, prompts(), drafter, return_dict_in_generate=True, **GREEDY)
    # 1 from the prefill, then 3 a pass: 2 right ones and the correction; 15 tokens in 5 passes.
    assert (out.stats.new_tokens, out.stats.target_passes, out.stats.row_passes) == (16, 5, 5)
    assert out.stats.accepted_lengths == {3: 5} and out.stats.mean_accepted_length == 3
    # 5 levels of 3 candidates each; the last round has room for 2 levels.
    assert out.stats.drafted_tokens == 15 + 15 + 15 + 15 + 6
    plain = treedec.generate(model, prompts(), return_dict_in_generate=True, **GREEDY)
    assert (plain.stats.target_passes, plain.stats.mean_accepted_length, plain.stats.drafted_tokens) == (15, 1, 0)


@pytest.mark.parametrize(
    ("acceptance", "sampling", "name", "lossless"),
    [
        (None, GREEDY, "greedy", True),
        ("typical", GREEDY, "greedy", True),
        (None, SAMPLED, "coupled", True),
        ("residual", SAMPLED, "residual", True),
        ("typical", SAMPLED, "typical", False),
    ],
)
def test_a08_the_output_says_which_rule_ran_and_whether_it_is_lossless(acceptance, sampling, name, lossless):
    model = tiny_model()
    out = treedec.generate(model, prompts(), acceptance=acceptance, return_dict_in_generate=True, **sampling)
    assert (out.acceptance, out.lossless) == (name, lossless)
    if not sampling["do_sample"]:
        assert torch.equal(out.sequences, reference(model, prompts(), **GREEDY).ids)


@pytest.mark.parametrize("rule", ["residual", "typical"])
def test_the_lossy_and_the_residual_rule_respect_length_and_eos(rule):
    model = tiny_model()
    expected = reference(model, prompts(), **SAMPLED)
    for seed in range(5):
        torch.manual_seed(seed)
        eos = expected.new[0][:8]
        arguments = {"eos_token_id": eos, "pad_token_id": 0, "top_k": 5, **SAMPLED}
        out = treedec.generate(model, prompts(), scripted(expected, "last-branch"), acceptance=rule, **arguments)
        new = out[0, 12:].tolist()
        assert len(new) <= NEW and not set(new[:-1]) & set(eos)
        assert new[-1] in eos or len(new) == NEW
