"""Target: a tree in one pass scores like its paths, prefill in chunks like at once, and nothing is left behind."""

from dataclasses import replace

import pytest
import torch
from kit import ARCHITECTURES, VOCAB, fresh_model, hooks, prompts, ragged_prompts, tiny_model
from transformers import LlamaConfig, LlamaModel, T5Config, T5ForConditionalGeneration

from treedec import Target, TokenTree, UnsupportedModel
from treedec.target import RopeSwitch

CONTEXT = prompts(length=13)
# Three levels, several children per node, and siblings in an order that mixes the branches.
TOKENS, PARENTS = [5, 11, 12, 13, 14, 15, 16, 17, 18], [-1, 0, 0, 1, 2, 1, 3, 4, 3]
SUPPORTED = [(name, None) for name in ARCHITECTURES] + [(name, "eager") for name in ("llama", "mistral", "gpt2")]
# Eager attention takes its softmax in float32 whatever the model's dtype.
TOLERANCE = {"eager": 2e-5, "sdpa": 1e-11}


def prefilled(target, ids=CONTEXT, mask=None, **how):
    cache = target.allocate(ids.shape[0], 64)
    return cache, target.prefill(cache, ids, mask, **how)


def way_down(node):
    return [] if node < 0 else [*way_down(PARENTS[node]), TOKENS[node]]


@torch.no_grad()
def sequential(model, tokens):
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize(("architecture", "attention"), SUPPORTED)
def test_a16_every_node_of_a_tree_scores_like_its_own_path(architecture, attention):
    model = tiny_model(architecture, attention=attention)
    target, tolerance = Target(model), TOLERANCE[model.config._attn_implementation]
    cache, first = prefilled(target)
    torch.testing.assert_close(first.logits[0, -1], sequential(model, CONTEXT[0].tolist()), atol=tolerance, rtol=0)
    verified = target.verify(cache, TokenTree.from_rows([(TOKENS, PARENTS)]))
    for node in range(len(TOKENS)):
        expected = sequential(model, CONTEXT[0].tolist() + way_down(node))
        torch.testing.assert_close(verified.logits[0, node], expected, atol=tolerance, rtol=0)


def test_control_the_shape_of_the_tree_matters():
    target = Target(tiny_model())
    cache, _ = prefilled(target)
    tree = target.verify(cache, TokenTree.from_rows([(TOKENS, PARENTS)])).logits
    chain = target.verify(cache, TokenTree.chains([TOKENS])).logits
    assert torch.allclose(tree[:, :2], chain[:, :2]) and (tree[:, 2:] - chain[:, 2:]).abs().amax(-1).min() > 1e-3


def test_verify_commits_nothing():
    target = Target(tiny_model())
    cache, _ = prefilled(target)
    tree = TokenTree.from_rows([(TOKENS, PARENTS)])
    once, again = target.verify(cache, tree), target.verify(cache, tree)
    assert cache.lengths == [13] and torch.equal(once.logits, again.logits)


def test_rows_of_a_batch_have_their_own_trees():
    model = tiny_model("mistral")
    target, (ids, mask) = Target(model), ragged_prompts((13, 4, 9))
    cache, _ = prefilled(target, ids, mask)
    rows = [(TOKENS, PARENTS), ([7], [-1]), (TOKENS[:4], PARENTS[:4])]
    verified = target.verify(cache, TokenTree.from_rows(rows))
    for row, (tokens, _) in enumerate(rows):
        text = ids[row, mask[row].bool()].tolist()
        for node in range(len(tokens)):
            path = way_down(node) if row != 1 else [7]
            torch.testing.assert_close(verified.logits[row, node], sequential(model, text + path), atol=1e-11, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 13])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_a13_prefill_in_chunks_equals_prefill_at_once(architecture, chunk):
    target, (ids, mask) = Target(tiny_model(architecture)), ragged_prompts((13, 3, 9))  # a chunk may be all padding
    whole_cache, whole = prefilled(target, ids, mask)
    cache, chunked = prefilled(target, ids, mask, chunk=chunk)
    torch.testing.assert_close(chunked.logits, whole.logits, atol=1e-11, rtol=0)
    torch.testing.assert_close(chunked.hidden, whole.hidden, atol=1e-11, rtol=0)
    assert cache.lengths == whole_cache.lengths == [13, 3, 9]
    for row in range(3):
        for layer in range(2):
            for part, expected in zip(
                cache.visible_states(layer, row), whole_cache.visible_states(layer, row), strict=True
            ):
                torch.testing.assert_close(part, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_ragged_prefill_equals_each_row_alone(architecture):
    model = tiny_model(architecture)
    ids, mask = ragged_prompts((13, 1, 9))
    _, verified = prefilled(Target(model), ids, mask)
    for row in range(3):
        alone = sequential(model, ids[row, mask[row].bool()].tolist())
        torch.testing.assert_close(
            verified.logits[row, 0], alone, atol=TOLERANCE[model.config._attn_implementation], rtol=0
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_is_the_input_of_the_head(architecture):
    model = tiny_model(architecture)
    target = Target(model)
    cache, first = prefilled(target)
    verified = target.verify(cache, TokenTree.chains([[5, 11]]))
    assert first.hidden.shape == (1, 1, target.hidden_size) and first.logits.shape == (1, 1, VOCAB)
    assert verified.hidden.shape == (1, 2, target.hidden_size) and target.vocab_size == VOCAB
    torch.testing.assert_close(target.head(verified.hidden), verified.logits, atol=1e-11, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_features_are_the_hidden_states_of_the_passes(architecture):
    model = tiny_model(architecture)
    target = Target(model)
    features = target.features(CONTEXT)
    assert features.shape == (1, 13, target.hidden_size)
    tolerance = TOLERANCE[model.config._attn_implementation]
    torch.testing.assert_close(features[:, -1:], prefilled(target)[1].hidden, atol=tolerance, rtol=0)
    torch.testing.assert_close(features[:, 4:5], prefilled(target, CONTEXT[:, :5])[1].hidden, atol=tolerance, rtol=0)


@pytest.mark.parametrize("layers", [(1,), (2, 0), (-1, 1)])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_features_of_layers_lie_side_by_side(architecture, layers):
    model = tiny_model(architecture)
    target = Target(model)
    hidden, features = target.features(CONTEXT, layers=layers)
    assert torch.equal(hidden, target.features(CONTEXT))
    with torch.no_grad():
        states = model(input_ids=CONTEXT, output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(features, torch.cat([states[layer] for layer in layers], dim=-1))


def test_features_of_no_layers():
    target = Target(tiny_model())
    hidden, features = target.features(CONTEXT, layers=())
    assert features is None and torch.equal(hidden, target.features(CONTEXT))


def test_features_of_layers_that_have_several_states_per_token_are_refused():
    target = Target(tiny_model("gemma3n_text"))
    assert target.features(CONTEXT).shape == (1, 13, target.hidden_size)
    with pytest.raises(UnsupportedModel, match="which this model has several of per token"):
        target.features(CONTEXT, layers=(1,))


def test_a17_hooks_are_gone_after_every_pass_and_after_a_failed_one():
    model = fresh_model()
    target = Target(model)
    cache, _ = prefilled(target)
    target.verify(cache, TokenTree.chains([[5, 11]]))
    target.features(CONTEXT)
    assert hooks(model) == []
    with pytest.raises(IndexError):
        target.verify(cache, TokenTree.chains([[VOCAB]]))
    assert hooks(model) == []


def test_a16_a_backend_without_tree_masks_is_refused():
    model = fresh_model()
    model.config._attn_implementation_internal = "flash_attention_2"  # past the check that the package is installed
    with pytest.raises(UnsupportedModel, match=r"'flash_attention_2' cannot take a tree mask.*'sdpa'"):
        Target(model)


def test_encoder_decoder_models_are_refused():
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        Target(T5ForConditionalGeneration(config))


def test_models_without_a_head_are_refused():
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UnsupportedModel, match="no LM head"):
        Target(LlamaModel(config))


def test_layers_that_keep_other_state_are_refused():
    model = fresh_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        Target(model)


SWITCH = 16
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
# Architecture, configuration, and what its rope switch is to be.
SWITCHING = {
    "dynamic": (
        "llama",
        {"rope_parameters": _DYNAMIC, "max_position_embeddings": SWITCH},
        RopeSwitch(SWITCH, every_position=True, restarts=False),
    ),
    "longrope": (
        "llama",
        {"rope_parameters": _LONGROPE | {"original_max_position_embeddings": SWITCH}},
        RopeSwitch(SWITCH, every_position=False, restarts=False),
    ),
    "longrope of phi3": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": SWITCH},
        RopeSwitch(SWITCH, every_position=False, restarts=True),
    ),
}


def switching(name):
    architecture, config, switch = SWITCHING[name]
    return fresh_model(architecture, **config), switch


@pytest.mark.parametrize("name", SWITCHING)
def test_a_rope_switch_is_known_and_positions_go_on_beyond_it(name):
    model, switch = switching(name)
    assert Target(model).rope_switch == switch and Target(model).max_positions is None
    assert switch.levels_below(SWITCH - 3) == 2 and switch.levels_below(SWITCH - 1) == 0
    assert switch.levels_below(SWITCH) == (0 if switch.every_position else None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_tables_of_positions_limit_them(architecture):
    target = Target(tiny_model(architecture))
    assert target.context_length == 256 and target.rope_switch is None
    assert target.max_positions == (256 if architecture == "gpt2" else None)


@pytest.mark.parametrize("name", SWITCHING)
def test_prefill_beyond_the_rope_switch_is_not_divided(name, monkeypatch):
    monkeypatch.setattr("treedec.target._CHUNK", 5)
    model, _ = switching(name)
    for length in (SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 9):
        ids = prompts(length=length)
        _, verified = prefilled(Target(model), ids)
        torch.testing.assert_close(verified.logits[0, -1], sequential(model, ids[0].tolist()), atol=1e-11, rtol=0)


def decoded(model, text, switch):
    """Logits after `CONTEXT` and after what a text adds to it, in blocks as long as a switch allows; their lengths."""
    target, root = Target(model), CONTEXT.shape[1]
    cache, verified = prefilled(target)
    found, blocks = [verified.logits[0]], []
    while root < text.shape[1] - 1:
        if switch.restarts and root == switch.position:
            cache, verified = prefilled(target, text[:, : root + 1])
            found.append(verified.logits[0])
            root += 1
            continue
        levels = switch.levels_below(root)
        block = text[:, root : min(root + 1 + (3 if levels is None else min(3, levels)), text.shape[1] - 1)]
        found.append(target.verify(cache, TokenTree.chains(block.tolist())).logits[0])
        cache.commit(torch.ones(block.shape, dtype=torch.bool))
        blocks.append(block.shape[1])
        root += block.shape[1]
    return torch.cat(found), blocks


@pytest.mark.parametrize("name", SWITCHING)
def test_decoding_across_the_rope_switch_equals_generate(name):
    model, switch = switching(name)
    out = model.generate(CONTEXT, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True)
    expected = torch.cat(out.logits).double()  # which `generate` hands out in float32
    found, blocks = decoded(model, out.sequences, switch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert max(blocks) > 1 and (blocks[-1] > 1) == (not switch.every_position)
    # Control: as if there were no switch.
    wrong, _ = decoded(model, out.sequences, replace(switch, position=1000))
    assert (wrong - expected).abs().max() > 1e-2
