"""Every way to draft, one promise: the tokens of `model.generate`, whatever the heads say."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from kit import ALL_ARCHITECTURES, DECODING, VOCAB, costing, prompts, ragged_prompts, reference, tiny_model

import treedec
from treedec import CostCurve, UnsupportedModel
from treedec.growth import BestFirst, DynamicTree
from treedec.heads.draft_model import DraftModelDrafter
from treedec.heads.eagle import EagleConfig, EagleDrafter, EagleHead
from treedec.heads.hydra import HydraConfig, HydraDrafter, HydraHeads
from treedec.heads.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from treedec.heads.ngram import NgramDrafter
from treedec.heads.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentHead
from treedec.heads.union import UnionDrafter

NEW = 24
# Granite scales its logits, gemma 2 caps them, gpt2 has learned positions, mistral a window. The others are slow.
QUICK = ("llama", "gpt2", "mistral", "granite", "gemma2")
# XGLM's eager attention overflows in float64; gemma 3n keeps several hidden states of every token.
FLOAT32_ONLY, SEVERAL_STATES = ("xglm",), ("gemma3n_text",)
TREE = DynamicTree(nodes=12, depth=4, width=3, branching=3, min_probability=0.0, min_reach=0.0)
_LAYER = {
    "target_hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def heads_of(kind, config, dtype, seed=5):
    """Random heads, the same for the same seed; the usual initialisation would repeat the target's own prediction."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = kind(config, trimmed() if config.draft_vocab_size < VOCAB else None)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    return module.to(dtype).eval().requires_grad_(False)


def trimmed():
    return torch.arange(VOCAB)[::2][:40] + 1


def sizes(**others):
    return {"hidden_size": 32, "vocab_size": VOCAB, "draft_vocab_size": 40} | others


def build(name, model, thins=False):
    """A drafter with random heads, or the like, in the dtype of the model; whose trees lose what does not pay."""
    least = 1e-9 if thins else 0.0
    tree, best_first = replace(TREE, min_probability=least), BestFirst(12, min_probability=least)

    def heads(kind, config):
        return heads_of(kind, config, model.dtype)

    if name == "medusa":
        return MedusaDrafter(heads(MedusaHeads, MedusaConfig(**sizes(heads=3))), model, best_first)
    if name == "hydra":
        return HydraDrafter(heads(HydraHeads, HydraConfig(**sizes(heads=4))), model, tree)
    if name == "recurrent":
        config = RecurrentConfig(**sizes(state_size=16, inner_size=24, features=(0, 1)))
        return RecurrentDrafter(heads(RecurrentHead, config), model, tree)
    if name == "eagle":
        config = EagleConfig(**sizes(draft_vocab_size=VOCAB, version=1, fc_bias=True), **_LAYER)
        return EagleDrafter(heads(EagleHead, config), model, tree)
    if name == "eagle3":
        config = EagleConfig(**sizes(version=3, features=(0, 1, 2), own_lm_head=True), **_LAYER)
        return EagleDrafter(heads(EagleHead, config), model, tree)
    if name == "ngram":
        return NgramDrafter(min_probability=least)
    if name == "draft-model":
        return DraftModelDrafter(model, depth=3)
    members = NgramDrafter(min_probability=0), build("recurrent", model)
    return UnionDrafter(*members, nodes=None if thins else 16)


DRAFTERS = ("medusa", "hydra", "recurrent", "eagle", "eagle3", "ngram", "draft-model", "union")


@cache
def case(architecture, decoding, batch):
    # In float64, transformers' eager attention turns the padding of a ragged prompt into NaN (its softmax is float32).
    single = batch == "single" and architecture not in FLOAT32_ONLY
    model = tiny_model(architecture, torch.float64 if single else torch.float32)
    ids, mask = ragged_prompts() if batch == "ragged" else (prompts(), torch.ones(1, 12, dtype=torch.long))
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, **DECODING[decoding]}
    unending = reference(model, ids, **arguments).new[0]
    arguments["eos_token_id"] = next((token for token in unending[12:] if token not in unending[:12]), None)
    return model, ids, arguments, reference(model, ids, **arguments)


@pytest.mark.parametrize("batch", ["single", "ragged"])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL_ARCHITECTURES],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_equals_generate(name, architecture, decoding, batch):
    model, ids, arguments, expected = case(architecture, decoding, batch)
    drafter = build(name, model)
    if drafter.features and architecture in SEVERAL_STATES:
        with pytest.raises(UnsupportedModel, match="use a drafter that reads none"):
            treedec.generate(model, ids, drafter, **arguments)
        return
    torch.manual_seed(7)
    out = treedec.generate(model, ids, drafter, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)
    assert out.stats.drafted_tokens > 0 or name == "ngram"


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_only_nodes_that_pay_are_drafted_unless_every_tree_is_to_be_whole(name, decoding):
    model, ids, arguments, expected = case("llama", decoding, "ragged")

    def drafted(thins, costs):
        torch.manual_seed(7)
        drafter = build(name, model, thins)
        target = costing(model, costs)
        out = treedec.generate(target, ids, drafter, return_dict_in_generate=True, **arguments)
        assert torch.equal(out.sequences, expected.ids)
        return out.stats.drafted_tokens

    free, dear = CostCurve((1,), (1.0,)), CostCurve((1, 2), (1.0, 100.0))
    if name == "draft-model":  # its chains are as long as they were asked to be
        assert drafted(True, free) == drafted(True, dear) > 0
        return
    assert drafted(True, free) > drafted(True, dear) == 0
    some = [drafted(True, CostCurve((1, 101), (1.0, 1 + 100 * slope))) for slope in (0.005, 0.02, 0.05, 0.1, 0.2)]
    assert any(0 < drafts < drafted(True, free) for drafts in some)
    assert drafted(True, free) > 0 and drafted(False, free) == drafted(False, dear) > 0


@pytest.mark.parametrize("rule", ["residual", "traversal", "typical"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_drafts_for_every_rule(name, rule):
    model, ids, arguments, _ = case("llama", "T=1.0", "ragged")
    first, again = (
        treedec.generate(model, ids, build(name, model), acceptance=rule, seed=1, **arguments) for _ in range(2)
    )
    assert torch.equal(first, again) and first.shape[1] <= 12 + NEW and int(first.max()) < VOCAB
