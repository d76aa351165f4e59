"""Edges: bad numbers, ends of contexts, little room, threads, odd inputs, careless drafters."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drafters import Scripted
from kit import (
    DECODING,
    VOCAB,
    Explodes,
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
