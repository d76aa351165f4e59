"""EAGLE heads of others.

EAGLE-1 and 2 (SafeAILab/EAGLE at cb7e084, `eagle/model/cnets1.py`): `embed_tokens`, `fc` and `layers.0.*`, a Llama
layer without its first norm. `fc` has a bias unless the configuration says `"bias": false`.

EAGLE-3 (`eagle/model/cnets.py` there; sglang, `models/llama_eagle3.py`; vLLM, `models/llama_eagle3.py`): `midlayer.*`,
or `layers.0.*` in files made for vLLM, `fc`, `norm` and `lm_head`. `d2t` holds offsets: draft token i is the target's
`i + d2t[i]`; `t2d` marks the target's ids that can be drafted. Both may be absent when all can. The target's layers
that it reads are the inputs of 2, N/2 and N − 3 unless the configuration has `eagle_aux_hidden_state_layer_ids`: under
this name vLLM counts as transformers counts `hidden_states`; sglang reads `eagle_config`, where an id stands for the
output of that layer, which is one less.

speculators (vllm-project/speculators, `models/eagle3/`): the same tensors as `layers.0.*`, the layer described by a
`transformer_layer_config` that leaves out transformers' defaults, and options of its own. A missing
`norm_before_residual` is false to speculators and has been true to vLLM, so it is always written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from treedec.heads.checkpoint import CONFIG_FILE, CheckpointError, Stored
from treedec.heads.eagle import EagleConfig
from treedec.heads.formats.reading import Source, ascending, base_name

_LAYER = "layer."
_LAYER_KINDS: Mapping[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Only a bound: native heads know none, and readers cut it down to the target's.
_MAX_POSITIONS = 131072


def read_eagle(source: Source) -> Stored:
    """EAGLE-1 and EAGLE-2, whose weights are alike.

    Raises:
        CheckpointError: a tensor is unknown, missing or misshapen, or the configuration describes no such head.
    """
    layer = _layer_config(source, source.config, "llama")  # whatever it says, as the authors' code takes it
    shape = _shape(source, layer, version=1, draft_vocab_size=layer["vocab_size"])
    # The authors' loader gives `fc` a bias unless it is told not to, so its absence from such a file is damage.
    return _read(source, EagleConfig(**shape, fc_bias=bool(source.config.get("bias", True))), base_name(source.config))


def read_eagle3(source: Source) -> Stored:
    """EAGLE-3 as SafeAILab and sglang have it, `midlayer.` or `layers.0.`.

    Raises:
        CheckpointError: a tensor is unknown, missing or misshapen, the vocabulary maps contradict each other, or the
            configuration describes no such head.
    """
    config = source.config
    layer = _layer_config(source, config, "llama")
    return _read(source, _eagle3_config(source, layer, _taps(source)), base_name(config))


def read_speculators(source: Source) -> Stored:
    """EAGLE-3 as speculators has it.

    Raises:
        CheckpointError: as for `read_eagle3`, or the folder holds another kind of speculator.
    """
    config, path = source.config, source.tensors.path
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise CheckpointError(
            f"{path.parent / CONFIG_FILE}: speculators of the kind {kind!r} cannot be read, only 'eagle3'"
        )
    given = config.get("transformer_layer_config") or {}
    layer = _layer_config(source, given, given.get("model_type", "qwen3"))
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return _read(source, _eagle3_config(source, layer, _taps(source)), verifier.get("name_or_path"))


def write_eagle3(stored: Stored, lm_head: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and tensors for SafeAILab's code, sglang and vLLM.

    Args:
        stored: an EAGLE-3 head without options that the authors' code does not know, see `eagle3_refuses`.
        lm_head: `[Vd, H]` rows of the target's LM head, for heads without their own.
    """
    shape: EagleConfig = stored.config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_described(shape, stored),
        "bias": False,
        "draft_vocab_size": shape.draft_vocab_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.features),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.features],
            "use_aux_hidden_state": True,
        },
    }
    if shape.target_hidden_size != shape.hidden_size:  # its mere presence keeps the authors' code from the embeddings
        config["target_hidden_size"] = shape.target_hidden_size
    if stored.base is not None:
        config["base_model_name_or_path"] = stored.base
    return config, _written(stored, lm_head, "midlayer.")


def write_speculators(stored: Stored, lm_head: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and tensors for speculators and vLLM, which draft a chain with them.

    Args:
        stored: an EAGLE-3 head, see `speculators_refuses`.
        lm_head: `[Vd, H]` rows of the target's LM head, for heads without their own.
    """
    shape: EagleConfig = stored.config
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": stored.base,
                "architectures": [] if stored.target is None else [stored.target.architecture],
            },
        },
        "transformer_layer_config": _described(shape, stored),
        "draft_vocab_size": shape.draft_vocab_size,
        **{name: getattr(shape, name) for name in _OPTIONS},
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(shape.features),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": _dtype(stored),
    }
    return config, _written(stored, lm_head, "layers.0.")


def eagle3_refuses(stored: Stored) -> str | None:
    """Why `write_eagle3` has no way to say what this head is, or None."""
    shape: EagleConfig = stored.config
    # Other readers would skip what they do not know, and draft worse without ever failing.
    names = (*_OPTIONS, "attention_bias", "qk_norm", "fc_bias", "sliding_window")
    unknown = [name for name in names if getattr(shape, name)]
    if shape.version != 3:
        return "it is an EAGLE-1 head"
    if len(shape.features) != 3 or min(shape.features) < 1:
        return f"it reads the layers {shape.features} of the target, and not three of them"
    return f"that format has no {', '.join(unknown)}" if unknown else None


def speculators_refuses(stored: Stored) -> str | None:
    """Why `write_speculators` has no way to say what this head is, or None."""
    shape: EagleConfig = stored.config
    if shape.version != 3:
        return "it is an EAGLE-1 head"
    if shape.fc_bias:
        return "that format has no fc_bias"
    if shape.target_hidden_size != shape.hidden_size:
        return f"that format has no target of another width ({shape.target_hidden_size}, not {shape.hidden_size})"
    return None


def _layer_config(source: Source, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The configuration of a decoder layer of that kind, with transformers' defaults filled in."""
    path = source.tensors.path.parent / CONFIG_FILE
    if kind not in _LAYER_KINDS:
        raise CheckpointError(f"{path}: a layer of the kind {kind!r} cannot be read, only {' or '.join(_LAYER_KINDS)}")
    try:
        layer = _LAYER_KINDS[kind](**{key: value for key, value in given.items() if key != "model_type"}).to_dict()
    except Exception as error:  # transformers raises whatever a wrong value leads to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} describes no {kind} layer ({reason})") from error
    if layer["hidden_act"] != "silu":
        raise CheckpointError(f"{path}: hidden_act is {layer['hidden_act']!r}, and only silu can be read")
    return layer


def _shape(source: Source, layer: Mapping[str, Any], version: int, draft_vocab_size: int) -> dict[str, Any]:
    """Arguments of `EagleConfig` that all kinds of EAGLE have."""
    prefix = _prefix(source)
    heads = layer["num_attention_heads"]
    rope = {key: value for key, value in layer["rope_parameters"].items() if key != "type"}  # an old name of rope_type
    return {
        "hidden_size": layer["hidden_size"],
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": source.config.get("target_hidden_size") or layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": layer["num_key_value_heads"],
        "head_dim": layer.get("head_dim") or layer["hidden_size"] // heads,
        "version": version,
        "rms_norm_eps": layer["rms_norm_eps"],
        "rope_parameters": rope,
        "sliding_window": _window(layer),
        "attention_bias": f"{prefix}self_attn.q_proj.bias" in source.tensors,
        "own_embeddings": "embed_tokens.weight" in source.tensors,
    }


def _window(layer: Mapping[str, Any]) -> int | None:
    """What the layer sees of the text: speculators' trainer gives it a window of 2048 unless told otherwise."""
    kinds = layer.get("layer_types") or ["full_attention"]
    return layer.get("sliding_window") if kinds[0] == "sliding_attention" else None


def _eagle3_config(source: Source, layer: Mapping[str, Any], features: tuple[int, ...]) -> EagleConfig:
    config, tensors = source.config, source.tensors
    options: dict[str, Any] = {name: bool(config.get(name, False)) for name in _OPTIONS}
    declared = config.get("draft_vocab_size")
    # sglang takes the target's LM head where the configuration declares no draft vocabulary and the file has none.
    own = "lm_head.weight" in tensors or declared is not None
    drafted = tensors.shape("lm_head.weight")[0] if own else layer["vocab_size"]
    if declared is not None and declared != drafted:
        raise CheckpointError(
            f"{tensors.path}: 'lm_head.weight' has {drafted} rows, but {CONFIG_FILE} says draft_vocab_size {declared}"
        )
    return EagleConfig(
        **_shape(source, layer, version=3, draft_vocab_size=drafted),
        features=features,
        fc_bias="fc.bias" in tensors,
        qk_norm=f"{_prefix(source)}self_attn.q_norm.weight" in tensors,
        own_lm_head=own,
        **options,
    )


def _taps(source: Source) -> tuple[int, ...]:
    """The target's layers that the head reads, as indices into transformers' `hidden_states`."""
    ids = source.config.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(ids)
    ids = (source.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(layer + 1 for layer in ids)
    path = source.tensors.path
    layers = source.base.layers(path)
    taps = (2, layers // 2, layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise CheckpointError(f"{path} was trained for a target of at least 7 layers, and this one has {layers}")
    return taps


def _prefix(source: Source) -> str:
    return "midlayer." if any(key.startswith("midlayer.") for key in source.tensors) else "layers.0."


def _read(source: Source, config: EagleConfig, base: str | None) -> Stored:
    """All tensors that the configuration asks for, under treedec's names."""
    tensors, prefix = source.tensors, _prefix(source)
    state = {}
    for key, shape in _shapes(config).items():
        if key == "fc_norm.weight":
            state[key] = _read_fc_norm(source, config)
        elif key.endswith("o_proj.bias") and prefix + key.removeprefix(_LAYER) not in tensors:
            state[key] = torch.zeros(shape, dtype=state["fc.weight"].dtype)  # Qwen2's attention has one for q, k and v
        else:
            state[key] = tensors.take(re.sub(f"^{re.escape(_LAYER)}", prefix, key), *shape)
    ids, order = _draft_ids(source, config)
    if config.own_lm_head:
        state["lm_head.weight"] = state["lm_head.weight"][order]
    state["draft_ids"] = ids
    tensors.finish()
    return Stored("eagle", config, state, tensors.path, base=base)


def _read_fc_norm(source: Source, config: EagleConfig) -> Tensor:
    """`[F]`: one norm of everything, or one for each of the target's layers."""
    size, tensors = config.target_hidden_size, source.tensors
    if config.norm_before_fc:
        return tensors.take("input_norm.weight", len(config.features) * size)
    return torch.cat([tensors.take(f"fc_norm.{place}.weight", size) for place in range(len(config.features))])


def _draft_ids(source: Source, config: EagleConfig) -> tuple[Tensor, Tensor]:
    """`[Vd]` ascending ids of the target that can be drafted, and the rows of the LM head that they belong to."""
    tensors, path = source.tensors, source.tensors.path
    drafted, vocab = config.draft_vocab_size, config.vocab_size
    ids = torch.arange(drafted)
    if "d2t" in tensors or drafted < vocab:
        ids = ids + tensors.take_ids("d2t", drafted)
    ids, order = ascending(ids, vocab, "d2t", path)
    if "t2d" in tensors:
        marked = tensors.take_ids("t2d", vocab).bool()
        if not torch.equal(marked.nonzero()[:, 0], ids):
            raise CheckpointError(f"{path}: 't2d' marks other ids of the target than those that 'd2t' leads to")
    return ids, order


def _shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of `EagleHead` and their shapes; its docstring says what they are."""
    size, inner, width = config.hidden_size, config.intermediate_size, config.hidden_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    fused = 2 * size
    if config.version == 3:
        width, fused = 2 * size, len(config.features) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, fused)}
    if config.fc_bias:
        shapes["fc.bias"] = (size,)
    projections = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (size, queries)}
    for name, shape in projections.items():
        shapes[f"layer.self_attn.{name}_proj.weight"] = shape
        if config.attention_bias:
            shapes[f"layer.self_attn.{name}_proj.bias"] = shape[:1]
    if config.qk_norm:
        shapes |= {f"layer.self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes |= {f"layer.mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")}
    shapes["layer.mlp.down_proj.weight"] = (size, inner)
    shapes["layer.post_attention_layernorm.weight"] = (size,)
    if config.version == 3:
        shapes |= {f"layer.{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm")}
        shapes["norm.weight"] = (size,)
    if config.norm_before_fc or config.fc_norm:
        shapes["fc_norm.weight"] = (fused,)
    if config.own_embeddings:
        shapes["embed_tokens.weight"] = (config.vocab_size, size)
    if config.own_lm_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, size)
    return shapes


def _described(shape: EagleConfig, stored: Stored) -> dict[str, Any]:
    """The decoder layer as transformers configures it, in the names that all of its versions read."""
    rope = dict(shape.rope_parameters)
    theta, kind = rope.pop("rope_theta", 10000.0), rope.pop("rope_type", "default")
    window = (
        {} if shape.sliding_window is None else {"sliding_window": shape.sliding_window, "use_sliding_window": True}
    )
    return {
        **window,
        "layer_types": ["full_attention" if shape.sliding_window is None else "sliding_attention"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": theta,
        # Both names of the kind: old readers know `type` only.
        "rope_scaling": None if kind == "default" else {"type": kind, "rope_type": kind, **rope},
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": _MAX_POSITIONS,
        "attention_bias": shape.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": _dtype(stored),
    }


def _dtype(stored: Stored) -> str:
    return str(stored.tensors["fc.weight"].dtype).removeprefix("torch.")


def _written(stored: Stored, lm_head: Tensor | None, prefix: str) -> dict[str, Tensor]:
    """The head's tensors with the layer under `prefix`, and the vocabulary maps if not every token can be drafted."""
    shape: EagleConfig = stored.config
    tensors: dict[str, Tensor] = {}
    for key, tensor in stored.tensors.items():
        if key == "fc_norm.weight" and shape.fc_norm:
            parts = tensor.chunk(len(shape.features))
            tensors |= {f"fc_norm.{place}.weight": part for place, part in enumerate(parts)}
        elif key == "fc_norm.weight":
            tensors["input_norm.weight"] = tensor
        elif key != "draft_ids":
            tensors[re.sub(f"^{re.escape(_LAYER)}", prefix, key)] = tensor
    if lm_head is not None:
        tensors["lm_head.weight"] = lm_head
    if shape.draft_vocab_size < shape.vocab_size:
        ids = stored.tensors["draft_ids"].long()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors
