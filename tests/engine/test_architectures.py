"""Many architectures, one promise: the tokens of `model.generate`, or a refusal that says why.

Each runs greedily and sampled, alone and as a ragged batch, under drafts that are right, wrong, and right for a while.
Most of the drafts are for `make test-slow`.
"""

import inspect
from functools import cache

import pytest
import torch
import transformers
from kit import ALL_ARCHITECTURES, DECODING, DRAFTERS, VOCAB, prompts, ragged_prompts, reference, scripted, tiny_model
from transformers import AutoModelForCausalLM

import treedec
from treedec import Target, UnsupportedModel
from treedec.limits import KNOWN_LIMITS

NEW = 20
# XGLM's eager attention overflows in float64, whose lowest number it puts into a float32 softmax.
FLOAT32_ONLY = {"xglm"}


@cache
def case(architecture, mode, batch):
    """The model, the arguments of `generate`, and what it returned."""
    # In float64, transformers' eager attention turns the padding of a ragged prompt into NaN (its softmax is float32).
    single = batch == "single"
    dtype = torch.float64 if single and architecture not in FLOAT32_ONLY else torch.float32
    model = tiny_model(architecture, dtype)
    ids, mask = (prompts(), torch.ones(1, 12, dtype=torch.long)) if single else ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[mode]}
    return model, ids, arguments, reference(model, ids, **arguments)


# Of the drafts, those that are right for a while and on a later branch say most.
_QUICK = "last-branch-then-wrong"


@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=() if name == _QUICK else pytest.mark.slow) for name in DRAFTERS]
)
@pytest.mark.parametrize("batch", ("single", "ragged"))
@pytest.mark.parametrize("mode", ("greedy", "T=1.0"))
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_equals_generate(architecture, mode, batch, drafter):
    model, ids, arguments, expected = case(architecture, mode, batch)
    torch.manual_seed(7)
    drafts = scripted(expected, drafter, arguments["attention_mask"])
    assert torch.equal(treedec.generate(model, ids, drafts, **arguments), expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_positions_are_limited_where_the_model_cannot_embed_more(architecture):
    model = tiny_model(architecture, torch.float32)
    target = Target(model)
    beyond = {"input_ids": torch.tensor([[1]]), "position_ids": torch.tensor([[target.context_length]])}
    if target.max_positions is None:
        assert model(**beyond, use_cache=False).logits.isfinite().all()
    else:
        with pytest.raises((IndexError, RuntimeError)):
            model(**beyond, use_cache=False)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# Configuration, its own arguments, and what the refusal must say.
REFUSED = {
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ("MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4}, "ALiBi"),
    "falcon with alibi": ("FalconConfig", {"alibi": True}, "as configured, .*ALiBi"),
    "gpt_neo": (
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "by slot instead of position",
    ),
    "mamba": ("MambaConfig", {}, "recurrent state"),
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "n_groups": 1}, "recurrent state"),
    "falcon_mamba": ("FalconMambaConfig", {}, "recurrent state"),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32}, "recurrent state"),
    "recurrent_gemma": ("RecurrentGemmaConfig", {}, "recurrent state"),
    "jamba": ("JambaConfig", {"use_mamba_kernels": False}, "recurrent state"),
    "bamba": ("BambaConfig", {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]}, "recurrent state"),
    "qwen3_next": ("Qwen3NextConfig", {"num_experts": 4}, "recurrent state"),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "'conv'; each has short convolutions"),
    "llama4_text": ("Llama4TextConfig", {"num_local_experts": 2}, "'chunked_attention'; each attends within chunks"),
    "bart": ("BartConfig", {"is_decoder": True, "is_encoder_decoder": False}, "no cache or no position_ids"),
    "openai-gpt": ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "no cache"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoded_is_refused_with_the_reason(name):
    kind, arguments, reason = REFUSED[name]
    configuration_class = getattr(transformers, kind)
    known = inspect.signature(configuration_class).parameters
    common = {key: value for key, value in SMALL.items() if key in known}
    model = AutoModelForCausalLM.from_config(configuration_class(**(common | arguments)))
    with pytest.raises(UnsupportedModel, match=rf"{type(model).__name__}.*{reason}"):
        Target(model)
    with pytest.raises(UnsupportedModel, match=reason):
        treedec.generate(model, prompts(), max_new_tokens=2)


def test_the_table_of_limits_names_types_that_transformers_knows():
    assert KNOWN_LIMITS.keys() <= set(transformers.CONFIG_MAPPING)
