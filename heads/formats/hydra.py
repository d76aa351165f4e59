"""Hydra heads as the authors' trainer saves them: `config.json` and `hydra_lm_head.pt`.

Read in zankner/Hydra at 3f39fbd (`hydra/model/hydra_model.py`, `hydra/model/hydra_heads/mlp_head.py` and
`prefix_mlp_head.py`, `hydra/model/modeling_llama_kv.py`, `hydra/train/train.py`): the file is the state of the
`hydra_head` module. Of grounded heads of the architecture `mlp`, head `i` has

- `hydra_mlp.{i}.0.linear.{weight,bias}` and `hydra_mlp.{i}.0.res_connection.{weight,bias}`, `[H, (i + 2) H]` and `[H]`:
  a block that reads the hidden state and the embeddings of i + 1 tokens;
- `hydra_mlp.{i}.{j}.linear.{weight,bias}`, `[H, H]` and `[H]`, for the other blocks, which are one block under several
  names;
- `hydra_lm_head.{i}.{weight,bias}`, `[V, H]` and `[V]`.

The architecture `prefix-mlp` (Hydra++) has dropout modules between these, so that block `j` is `hydra_mlp.{i}.{2 j +
1}` and the LM head `hydra_lm_head.{i}.1`. It also has a Llama model of one layer over the LM-head inputs,
`prefix_embeding_layer.layers.0.*` and `prefix_embeding_layer.norm.weight`. The base of its rotary embeddings is always
10000.

Of no use are the token embeddings of the target, which the module holds on to (`input_embed_fn.weight`), and those of
the prefix layer, which reads hidden states instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from treedec.heads.hydra import HydraConfig, PrefixConfig

_READABLE = ("mlp", "prefix-mlp")
_IGNORED = re.compile(r"input_embed_fn\.weight|prefix_embeding_layer\.embed_tokens\.weight|.*\.rotary_emb\.\w+")
_PREFIX = "prefix_embeding_layer"

#: By the names of a file: our names, and shapes.
_Layout = dict[str, tuple[str, tuple[int, ...]]]


def read_hydra(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    draft_ids: Tensor | None = None,
    base: PretrainedConfig | None = None,
) -> tuple[HydraConfig, dict[str, Tensor]]:
    """Heads of the authors' layout as `HydraHeads` takes them.

    The numbers of heads and blocks are counted in the tensors; configurations of the same family are known to be wrong.

    Args:
        config: the contents of `config.json`.
        tensors: the contents of `hydra_lm_head.pt`.
        draft_ids: `[Vd]` int64, ascending; keep only these rows of the LM heads. None for all.
        base: configuration of the target, a Llama model. Only `prefix-mlp` needs it: the number of attention heads of
            the prefix layer is that of the target, and is written nowhere else.

    Returns:
        The shape, and the state of the module: `HydraHeads(shape).load_state_dict(state)`.

    Raises:
        ValueError: another architecture or hidden state, heads that do not see the drafted tokens, no `base` where one
            is needed, or tensors that are unknown, missing or misshapen; they are named.
    """
    prefixed = _architecture(config) == "prefix-mlp"
    named = {name: tensor for name, tensor in tensors.items() if not _IGNORED.fullmatch(name)}
    block, lm_head = ("hydra_mlp.0.1", "hydra_lm_head.0.1") if prefixed else ("hydra_mlp.0.0", "hydra_lm_head.0")
    if f"{block}.linear.weight" not in named or f"{lm_head}.weight" not in named:
        raise ValueError(f"there are no Hydra heads in it: {block}.linear.weight or {lm_head}.weight is missing")
    vocab_size, hidden_size = len(named[f"{lm_head}.weight"]), len(named[f"{block}.linear.weight"])
    heads = len({name.split(".")[1] for name in named if name.startswith("hydra_mlp.")})
    blocks = len({name.split(".")[2] for name in named if name.startswith("hydra_mlp.0.")})
    layout = _heads_layout(heads, blocks, hidden_size, vocab_size, prefixed)
    prefix = None
    if prefixed:
        prefix = _prefix_config(named, base)
        layout |= _prefix_layout(prefix, hidden_size)
    ids = torch.arange(vocab_size) if draft_ids is None else draft_ids
    state: dict[str, Tensor] = {"draft_ids": ids}
    for theirs, (ours, shape) in layout.items():
        tensor = named.pop(theirs, None)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise ValueError(f"tensor {theirs} of {list(shape)} {found}")
        state[ours] = tensor[ids] if ours.startswith("lm_heads.") else tensor
    if named:
        raise ValueError(f"tensor {min(named)} is not part of {heads} Hydra heads with {blocks} blocks")
    return HydraConfig(hidden_size, vocab_size, heads, blocks, len(ids), own_lm_heads=True, prefix=prefix), state


def _architecture(config: Mapping[str, Any]) -> str:
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in _READABLE:
        raise ValueError(f"heads of hydra_head_arch {architecture!r} cannot be read; only {', '.join(_READABLE)} can")
    if not config.get("grounded_heads", False):
        raise ValueError("heads with grounded_heads false do not see the drafted tokens and cannot be read")
    if config.get("hidden_state_offset", 0) != 0:
        raise ValueError(
            f"heads with hidden_state_offset {config['hidden_state_offset']} read an earlier layer than the last; only "
            "offset 0 can be read"
        )
    return architecture


def _heads_layout(heads: int, blocks: int, hidden_size: int, vocab_size: int, prefixed: bool) -> _Layout:
    layout: _Layout = {}
    for head in range(heads):
        for block in range(blocks):
            theirs = f"hydra_mlp.{head}.{2 * block + 1 if prefixed else block}"
            width = (head + 2) * hidden_size if block == 0 else hidden_size
            for their_part, part in (("linear", "linear"), ("res_connection", "residual"))[: 2 if block == 0 else 1]:
                ours = f"blocks.{head}.{block}.{part}"
                layout[f"{theirs}.{their_part}.weight"] = (f"{ours}.weight", (hidden_size, width))
                layout[f"{theirs}.{their_part}.bias"] = (f"{ours}.bias", (hidden_size,))
        theirs = f"hydra_lm_head.{head}.1" if prefixed else f"hydra_lm_head.{head}"
        layout[f"{theirs}.weight"] = (f"lm_heads.{head}.weight", (vocab_size, hidden_size))
        layout[f"{theirs}.bias"] = (f"lm_heads.{head}.bias", (vocab_size,))
    return layout


def _prefix_config(tensors: Mapping[str, Tensor], base: PretrainedConfig | None) -> PrefixConfig:
    gate = tensors.get(f"{_PREFIX}.layers.0.mlp.gate_proj.weight")
    if gate is None:
        raise ValueError(f"tensor {_PREFIX}.layers.0.mlp.gate_proj.weight is missing")
    if base is None:
        raise ValueError(
            "heads of hydra_head_arch 'prefix-mlp' can be read only with the configuration of their target"
        )
    if (kind := (base.rope_parameters or {}).get("rope_type", "default")) != "default":
        raise ValueError(f"a prefix layer with rotary embeddings of type {kind!r} cannot be read; only 'default' can")
    heads = base.num_attention_heads
    return PrefixConfig(
        intermediate_size=len(gate),
        num_attention_heads=heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.hidden_size // heads,
        rms_norm_eps=base.rms_norm_eps,
    )


def _prefix_layout(prefix: PrefixConfig, hidden_size: int) -> _Layout:
    inner = prefix.intermediate_size
    queries, keys = (n * prefix.head_dim for n in (prefix.num_attention_heads, prefix.num_key_value_heads))
    layer = {
        "self_attn.q_proj": (queries, hidden_size),
        "self_attn.k_proj": (keys, hidden_size),
        "self_attn.v_proj": (keys, hidden_size),
        "self_attn.o_proj": (hidden_size, queries),
        "mlp.gate_proj": (inner, hidden_size),
        "mlp.up_proj": (inner, hidden_size),
        "mlp.down_proj": (hidden_size, inner),
        "input_layernorm": (hidden_size,),
        "post_attention_layernorm": (hidden_size,),
    }
    layout: _Layout = {
        f"{_PREFIX}.layers.0.{name}.weight": (f"prefix.{name}.weight", shape) for name, shape in layer.items()
    }
    return layout | {f"{_PREFIX}.norm.weight": ("prefix.norm.weight", (hidden_size,))}
