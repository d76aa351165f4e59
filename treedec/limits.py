"""Limits: which models cannot be decoded with token trees, by what they say of themselves.

A tree pass gives each node a slot, a position and the set of slots it sees. It fits models whose layers keep keys and
values only and whose attention depends on nothing but the mask and the positions. Here is what can be told without a
forward pass; `treedec.probe` measures the rest.
"""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

_INSTEAD = "use model.generate"
_RECURRENT = "keeps a recurrent state, which would have to be forked at every branch of a tree"
_CONVOLUTION = "has short convolutions over the last tokens, which on a tree are not those of the branch"
_ALIBI = "biases attention by the distance between slots (ALiBi), which on a tree is not that between tokens"
_SELECTED = "picks the keys of each token by an index that knows no branches"

# The one table of model types with a known limit: what holds of every checkpoint of that type. What depends on the
# configuration (layer kinds, ALiBi as an option) is looked up there, so that it also holds for types not listed here.
KNOWN_LIMITS = {
    "bamba": _RECURRENT,
    "bloom": _ALIBI,
    "cpmant": "builds its attention mask from segments of its own",
    "falcon_h1": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "gpt_neo": "masks attention by slot instead of position",
    "jamba": _RECURRENT,
    "kimi_linear": _RECURRENT,
    "lfm2_moe": _CONVOLUTION,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "minimax": _RECURRENT,
    "moshi": "applies its sliding window to the answer, but not within the prompt",
    "mpt": _ALIBI,
    "nemotron_h": _RECURRENT,
    "olmo_hybrid": _RECURRENT,
    "openai-gpt": "has no cache of keys and values",
    "qwen3_next": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "reformer": "hashes tokens into buckets instead of attending by position",
    "rwkv": _RECURRENT,
    "xlm": "has a cache of its own kind",
    "xlnet": "has no cache of keys and values",
    "xlstm": _RECURRENT,
    "zamba": _RECURRENT,
    "zamba2": _RECURRENT,
}

# What shows in a configuration, whatever the type, that attention depends on more than masks and positions.
_UNFIT_CONFIGURATIONS = {"alibi": _ALIBI, "attention_layers": KNOWN_LIMITS["gpt_neo"]}

#: Layers whose mask is plain causality, and those that add a window to it.
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
_FIT_LAYERS = frozenset({FULL_ATTENTION, SLIDING_ATTENTION})
_UNFIT_LAYERS = {
    "chunked_attention": "attends within chunks of the text",
    "conv": _CONVOLUTION,
    "hybrid": _RECURRENT,
    "hybrid_sliding": _CONVOLUTION,
    "indexed_attention": _SELECTED,
    "linear_attention": _RECURRENT,
    "mamba": _RECURRENT,
}

#: Attention backends that pass a ready-made mask on untouched, and its form: True where a key is seen, or what is added
#: to its score. Flash and flex attention build masks of their own and have no way to take a tree.
BACKENDS = {"sdpa": "boolean", "eager": "additive"}


class UnsupportedModel(ValueError):
    """The model, as configured, cannot be decoded with token trees; the message says why and what to do."""


def check_configuration(model: PreTrainedModel) -> None:
    """Refuse what the class and the configuration of a model already rule out.

    Raises:
        UnsupportedModel: encoder-decoder or recurrent model, one without an LM head, an attention backend or a kind of
            layer that cannot take a tree mask, a forward without cache or positions, or weights on several devices.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; treedec decodes decoder-only models: {_INSTEAD}")
    if not isinstance(model.get_output_embeddings(), nn.Module):
        raise UnsupportedModel(f"{name} has no LM head; load it with AutoModelForCausalLM")
    if config.model_type in KNOWN_LIMITS:
        raise UnsupportedModel(f"{name} {KNOWN_LIMITS[config.model_type]}: {_INSTEAD}")
    for attribute, reason in _UNFIT_CONFIGURATIONS.items():
        if getattr(config, attribute, None):
            raise UnsupportedModel(f"{name}, as configured, {reason}: {_INSTEAD}")
    for kind in sorted(_layer_kinds(config) - _FIT_LAYERS):
        reason = _UNFIT_LAYERS.get(kind, "is of a kind that treedec does not know")
        raise UnsupportedModel(f"{name} has layers of kind {kind!r}; each {reason}: {_INSTEAD}")
    if config._attn_implementation not in BACKENDS:
        raise UnsupportedModel(
            f"attention backend {config._attn_implementation!r} cannot take a tree mask; load the model with "
            "attn_implementation=" + " or ".join(repr(backend) for backend in BACKENDS)
        )
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedModel(f"{name} is spread over several devices; load it on one")
    parameters = inspect.signature(model.forward).parameters
    if not {"cache", "past_key_values"} & parameters.keys() or "position_ids" not in parameters:
        raise UnsupportedModel(f"{name}.forward takes no cache or no position_ids, which a tree needs: {_INSTEAD}")


def _layer_kinds(config: object) -> set[str]:
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds | ({"chunked_attention"} if getattr(config, "attention_chunk_size", None) else set())
