"""Medusa heads of others.

FasterDecoding and TGI: `medusa_lm_head.pt` or `.safetensors` with `{i}.{j}.linear.{weight,bias}` for block j of head i
and, after the L blocks, its LM head `{i}.{L}.weight`; a model merged with its heads has them under `medusa_head.`. Read
in FasterDecoding/Medusa at e2a5d20, `medusa/model/medusa_model.py`, and its `medusa_model_legacy.py`, whose heads have
no LM head and go through the target's, as TGI's second version does (text-generation-inference,
`server/text_generation_server/layers/medusa.py`). The number of heads in `config.json` is not to be trusted: published
files say 2 and hold 5, so it is counted. With L > 1 the original uses one block L times over (a list of the same
module), which a writer that drops copies stores once.

vLLM: `blocks.{i}.layers.{j}.{weight,bias}`, `lm_heads.{i}.weight`, `token_map` (`model_executor/models/medusa.py`).
There, biases are dropped without a word unless the configuration has `medusa_fc_bias`, and `original_lm_head` makes all
heads use `lm_heads.0`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treedec.heads.checkpoint import CheckpointError, Stored
from treedec.heads.formats.reading import Source, Tensors, ascending, base_name
from treedec.heads.medusa import MedusaConfig

_ORIGINAL = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


def read_medusa(source: Source) -> Stored:
    """FasterDecoding's and TGI's heads; their LM heads, where they have them, span the whole vocabulary.

    Raises:
        CheckpointError: a tensor is unknown, missing or misshapen, or the vocabulary is not known.
    """
    tensors = source.tensors
    places = [match for key in tensors if (match := _ORIGINAL.fullmatch(key))]
    if not places:
        raise CheckpointError(f"{tensors.path} holds no Medusa heads: no tensor is named like '0.0.linear.weight'")
    heads = 1 + max(int(match[1]) for match in places)
    lm_heads = [int(match[2]) for match in places if match[3] == "weight"]
    blocks = max(lm_heads) if lm_heads else 1 + max(int(match[2]) for match in places)
    if blocks == 0:
        raise CheckpointError(f"{tensors.path} holds LM heads without residual blocks, which are no Medusa heads")
    hidden = tensors.shape("0.0.linear.weight")[0]
    vocab = tensors.shape(f"0.{blocks}.weight")[0] if lm_heads else source.base.vocab_size(tensors.path)
    tied = "0.1.linear.weight" not in tensors
    state = _stacked(
        tensors, heads, blocks, hidden, lambda head, block: f"{head}.{0 if tied else block}.linear", bias=True
    )
    if lm_heads:
        state["lm_heads"] = torch.stack(
            [tensors.take(f"{head}.{blocks}.weight", vocab, hidden) for head in range(heads)]
        )
    tensors.finish()
    config = MedusaConfig(hidden, vocab, heads, blocks, vocab, own_lm_heads=bool(lm_heads))
    state["draft_ids"] = torch.arange(vocab)
    return Stored("medusa", config, state, tensors.path, base=base_name(source.config))


def read_vllm_medusa(source: Source) -> Stored:
    """vLLM's heads. What `original_lm_head` shares is taken for the target's LM head, and compared with it on loading.

    Raises:
        CheckpointError: a tensor is unknown, missing or misshapen, or `token_map` is no draft vocabulary.
    """
    source = source.renamed(lambda key: key.replace("medusa_heads.", ""))  # as vLLM does
    tensors, config = source.tensors, source.config
    places = [match for key in tensors if (match := _VLLM.fullmatch(key))]
    if not places:
        raise CheckpointError(
            f"{tensors.path} holds no Medusa heads: no tensor is named like 'blocks.0.layers.0.weight'"
        )
    heads, blocks = (1 + max(int(match[group]) for match in places) for group in (1, 2))
    hidden = tensors.shape("blocks.0.layers.0.weight")[0]
    vocab = config.get("vocab_size") or source.base.vocab_size(tensors.path)
    drafted = config.get("truncated_vocab_size") or vocab
    state = _stacked(
        tensors, heads, blocks, hidden, lambda head, block: f"blocks.{head}.layers.{block}",
        bias="blocks.0.layers.0.bias" in tensors,
    )  # fmt: skip
    ids = torch.arange(vocab)
    if drafted < vocab:
        ids = tensors.take_ids("token_map", drafted)
    state["draft_ids"], order = ascending(ids, vocab, "token_map", tensors.path)
    shared = bool(config.get("original_lm_head", False))

    def lm_head(head: int) -> Tensor:
        key = f"lm_heads.{head}.weight"
        # vLLM cuts LM heads of the whole vocabulary down to those rows.
        whole = key in tensors and tensors.shape(key)[0] == vocab
        return tensors.take(key, vocab if whole else drafted, hidden)[state["draft_ids"] if whole else order]

    if not shared:
        state["lm_heads"] = torch.stack([lm_head(head) for head in range(heads)])
    copied = lm_head(0) if shared else None
    tensors.finish()
    shape = MedusaConfig(hidden, vocab, heads, blocks, drafted, own_lm_heads=not shared)
    return Stored("medusa", shape, state, tensors.path, base=base_name(config), lm_head=copied)


def write_vllm_medusa(stored: Stored, lm_head: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and tensors for vLLM, which drafts a chain with them.

    Args:
        stored: Medusa heads.
        lm_head: `[Vd, H]` rows of the target's LM head, for heads without their own.
    """
    shape: MedusaConfig = stored.config
    weight, bias = stored.tensors["weight"], stored.tensors["bias"]
    biased = bool(bias.any())
    tensors = {}
    for head in range(shape.heads):
        for block in range(shape.blocks):
            tensors[f"blocks.{head}.layers.{block}.weight"] = weight[head, block]
            if biased:
                tensors[f"blocks.{head}.layers.{block}.bias"] = bias[head, block]
    lm_heads = stored.tensors["lm_heads"] if lm_head is None else lm_head[None]
    tensors |= {f"lm_heads.{head}.weight": rows for head, rows in enumerate(lm_heads)}
    if shape.draft_vocab_size < shape.vocab_size:
        tensors["token_map"] = stored.tensors["draft_ids"].long()
    # No other name may hold "num" with "heads" or "layers": vLLM takes any such key for these two.
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.draft_vocab_size,
        "num_heads": shape.heads,
        "num_hidden_layers": shape.blocks,
        "medusa_fc_bias": biased,
        "original_lm_head": lm_head is not None,
        "torch_dtype": str(weight.dtype).removeprefix("torch."),
    }
    return config if stored.base is None else config | {"base_model_name_or_path": stored.base}, tensors


def _stacked(
    tensors: Tensors, heads: int, blocks: int, hidden: int, name: Callable[[int, int], str], bias: bool
) -> dict[str, Tensor]:
    """The residual blocks as `MedusaHeads` has them: `weight [K, L, H, H]` and `bias [K, L, H]`, zero for none."""

    def stacked(kind: str, *shape: int) -> Tensor:
        return torch.stack(
            [
                torch.stack([tensors.take(f"{name(head, block)}.{kind}", *shape) for block in range(blocks)])
                for head in range(heads)
            ]
        )

    weight = stacked("weight", hidden, hidden)
    return {"weight": weight, "bias": stacked("bias", hidden) if bias else weight.new_zeros(weight.shape[:3])}
