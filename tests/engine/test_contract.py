"""Where a user of `generate` could be surprised: random state, batches, arguments, stops, and drafters that err."""

import pytest
import torch
from kit import (
    DECODING,
    VOCAB,
    characters,
    decoder,
    fresh_model,
    prompts,
    ragged_prompts,
    reference,
    scripted,
    tiny_model,
    uneven,
)
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LogitsProcessor,
    StoppingCriteria,
)

import treedec
from treedec import Draft, Drafter, DraftSession, TokenTree, TreeError, UnsupportedModel
from treedec.acceptance import Coupled

NEW = 24
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}


def tokens(blocks):
    return [token for block in blocks for token in block.tokens[0]]


def test_a09_a_stream_takes_the_seed_that_is_set_before_its_first_block():
    model, expected = tiny_model(), reference(tiny_model(), prompts(), **SAMPLED)
    blocks = treedec.stream(model, prompts(), scripted(expected, "oracle"), **SAMPLED)
    torch.manual_seed(7)
    assert tokens(blocks) == expected.new[0]
    assert torch.equal(torch.get_rng_state(), expected.rng_state)


def test_a09_a_seed_set_while_a_stream_is_open_is_neither_ignored_nor_lost():
    torch.manual_seed(3)
    torch.empty(1, VOCAB).exponential_()
    one_draw_after_seed_3 = torch.get_rng_state()
    blocks = treedec.stream(tiny_model(), prompts(), **SAMPLED)
    next(blocks)
    torch.manual_seed(3)
    next(blocks)
    assert torch.equal(torch.get_rng_state(), one_draw_after_seed_3)
    torch.manual_seed(4)
    untouched = torch.get_rng_state()
    del blocks
    assert torch.equal(torch.get_rng_state(), untouched)


def test_a09_streams_side_by_side_do_not_share_their_noise():
    torch.manual_seed(0)
    pairs = zip(
        treedec.stream(tiny_model(), prompts(), **SAMPLED),
        treedec.stream(tiny_model(), prompts(), **SAMPLED),
        strict=True,
    )
    left, right = zip(*[(a.tokens[0], b.tokens[0]) for a, b in pairs], strict=True)
    assert left != right


def test_noise_is_freed_once_every_unfinished_row_has_passed_it():
    model, ids = tiny_model(), prompts(2)
    expected = reference(model, ids, **SAMPLED)
    early = expected.new[0][2]
    run = decoder(model, ids, uneven(expected), NEW, rule=Coupled())
    run.request.criteria.append(EndsAt(early, 0))
    torch.manual_seed(7)
    for _ in run.run():
        assert run.noise is not None
        assert len(run.noise._drawn) <= 8
        assert len(run.noise._states) <= 8


class EndsAt(StoppingCriteria):
    """Ends the row in which a token has just been generated."""

    def __init__(self, token, _row):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_a15_a_row_that_finishes_at_the_last_position_does_not_stop_the_others():
    model, ids = fresh_model("gpt2", n_positions=24), prompts(3, 20)
    arguments = {"max_new_tokens": 5, "do_sample": False}
    expected = reference(model, ids, **arguments)
    assert torch.equal(treedec.generate(model, ids, uneven(expected), **arguments), expected.ids)


class Careless(Drafter):
    """Proposes what it is told to."""

    name, max_nodes = "careless", 4

    def __init__(self, *rows):
        self.rows = rows

    def start(self, target, batch, capacity):
        return CarelessSession(self.rows)


class CarelessSession(DraftSession):
    def __init__(self, rows):
        self.rows = rows

    def propose(self, state):
        return Draft(TokenTree.from_rows(list(self.rows)))


@pytest.mark.parametrize("row", [([VOCAB - 1], [-1]), ([], [])])
def test_a_tree_that_does_not_begin_with_the_last_committed_token_is_refused(row):
    model = tiny_model()
    first = reference(model, prompts(), max_new_tokens=1, do_sample=False).new[0][0]
    assert first != VOCAB - 1
    with pytest.raises(TreeError, match=f"row 0, node 0: the root must be the last committed token, {first}"):
        treedec.generate(model, prompts(), Careless(row), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": torch.arange(12)[None]}, "position_ids is an argument of"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"num_beams": 3}, "num_beams=3"),
        ({"cache_implementation": "static"}, "cache_implementation does not apply"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"generation_config": GenerationConfig(guidance_scale=1.5, max_new_tokens=3)}, "guidance_scale"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"assistant_model": tiny_model()}, "DraftModelDrafter"),
        ({"negative_prompt_ids": prompts()}, "negative_prompt_ids"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        treedec.generate(tiny_model(), prompts(), **{"max_new_tokens": 3, **arguments})


def test_arguments_that_change_nothing_are_accepted():
    expected = reference(tiny_model(), prompts(), max_new_tokens=5, do_sample=False)
    arguments = {"use_cache": True, "synced_gpus": False, "guidance_scale": 1.0, "assistant_model": None}
    ours = treedec.generate(tiny_model(), prompts(), max_new_tokens=5, do_sample=False, **arguments)
    assert torch.equal(ours, expected.ids)


def test_prompts_on_another_device_are_refused():
    with pytest.raises(ValueError, match="input_ids are on meta and the model is on cpu"):
        treedec.generate(tiny_model(), prompts().to("meta"), max_new_tokens=3)


def test_prefix_allowed_tokens_fn_gets_the_index_of_the_prompt():
    model, (ids, mask) = tiny_model(), ragged_prompts()
    allowed = [list(range(0, VOCAB, 3)), list(range(1, VOCAB, 3)), list(range(2, VOCAB, 3))]
    arguments = {"attention_mask": mask, "num_return_sequences": 2, **SAMPLED}
    arguments["prefix_allowed_tokens_fn"] = lambda row, _: allowed[
        row % 3
    ]  # transformers 5.21 counts rows, not prompts
    expected = reference(model, ids, **arguments)
    drafter = uneven(expected, mask.repeat_interleave(2, dim=0))
    torch.manual_seed(7)
    assert torch.equal(treedec.generate(model, ids, drafter, **arguments), expected.ids)


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf)


def test_a_distribution_without_support_raises_and_the_next_call_works():
    with pytest.raises(ValueError, match="has NaN or no support"):
        treedec.generate(tiny_model(), prompts(), logits_processor=[Nothing()], **SAMPLED)
    expected = reference(tiny_model(), prompts(), **SAMPLED)
    torch.manual_seed(7)
    assert torch.equal(treedec.generate(tiny_model(), prompts(), **SAMPLED), expected.ids)


@pytest.mark.parametrize("where", ["argument", "generation_config"])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
def test_a02_stop_strings_end_the_text_where_generate_ends_it(where, decoding):
    model, tokenizer = tiny_model(), characters()
    plain = reference(model, prompts(), max_new_tokens=NEW, **DECODING[decoding])
    stop = "".join(tokenizer.convert_ids_to_tokens(plain.new[0][8:10]))
    arguments = {"max_new_tokens": NEW, **DECODING[decoding]}
    if where == "argument":
        arguments["stop_strings"] = [stop]
    else:
        arguments["generation_config"] = GenerationConfig(stop_strings=[stop])
    expected = reference(model, prompts(), tokenizer=tokenizer, **arguments)
    assert expected.ids.shape[1] <= prompts().shape[1] + 10
    for name in ("oracle", "last-branch"):
        torch.manual_seed(7)
        ours = treedec.generate(model, prompts(), scripted(plain, name), tokenizer=tokenizer, **arguments)
        assert torch.equal(ours, expected.ids)
    with pytest.raises(ValueError, match="stop_strings need the tokenizer"):
        treedec.generate(model, prompts(), **arguments)


def test_a16_models_whose_attention_does_not_go_by_position_are_refused():
    layers = [[["global", "local"], 1]]
    neo = GPTNeoConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=layers)
    falcon = FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    for model in (GPTNeoForCausalLM(neo), FalconForCausalLM(falcon)):
        with pytest.raises(UnsupportedModel, match=r"by slot|ALiBi"):
            treedec.generate(model.eval(), prompts(), max_new_tokens=3)


def test_what_the_user_gave_is_left_as_it_was():
    model, config = tiny_model(), GenerationConfig(stop_strings=["!!"], max_new_tokens=4)
    criteria, before = [EndsAt(5, 0)], config.to_dict()
    treedec.generate(model, prompts(), generation_config=config, stopping_criteria=criteria, tokenizer=characters())
    assert config.to_dict() == before
    assert len(criteria) == 1
