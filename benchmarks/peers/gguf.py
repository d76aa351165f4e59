"""The target as a GGUF file for llama.cpp, weight by weight as it is: nothing is quantized.

Only Llama models without biases, and only with a tokenizer from another GGUF file: prompts come as ids, but llama.cpp
loads no model without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_FILE_TYPES = {torch.float32: "ALL_F32", torch.bfloat16: "MOSTLY_BF16", torch.float16: "MOSTLY_F16"}
_TOKENIZER = "tokenizer."


def write_gguf(model: PreTrainedModel, path: Path, tokenizer: Path) -> None:
    """Write a model as GGUF.

    Args:
        model: on the CPU, in a dtype of at most 32 bits.
        path: the file to make.
        tokenizer: a GGUF file whose tokenizer is copied.

    Raises:
        ValueError: the model is none that can be written, or its vocabulary is not that of the tokenizer.
    """
    import gguf

    config: Any = model.config
    _check(model)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[model.dtype]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _copy_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():  # tied weights come once, and llama.cpp ties what is missing
        stored = names.get_name(name, try_suffixes=(".weight",))
        if stored is None:
            raise ValueError(f"llama.cpp has no name for the weight {name!r}")
        own = heads.get(name.split(".")[-2])
        _add(writer, stored, weight.detach() if own is None else interleaved(weight.detach(), own))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """`[heads · D, H]` rows of queries or keys in the order of llama.cpp.

    Rotary embeddings turn pairs of a head's dimensions: i and i + D/2 in transformers, 2i and 2i + 1 in llama.cpp.
    """
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def _check(model: PreTrainedModel) -> None:
    config: Any = model.config
    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"only Llama models are written for llama.cpp, not {type(model).__name__}")
    if model.dtype not in _FILE_TYPES:
        raise ValueError(f"llama.cpp has no weights in {str(model.dtype).removeprefix('torch.')}: give another --dtype")
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"rotary embeddings of type {kind!r} are not written for llama.cpp")
    if config.hidden_act != "silu":
        raise ValueError(f"llama.cpp's Llama models have silu, not {config.hidden_act}")
    if biases := [name for name, _ in model.named_parameters() if name.endswith(".bias")]:
        raise ValueError(f"biases, such as {biases[0]}, are not written for llama.cpp")


def _copy_tokenizer(writer: Any, source: Path, vocabulary: int) -> None:
    import gguf

    fields = gguf.GGUFReader(source).fields
    known = len(fields["tokenizer.ggml.tokens"].data)
    if known != vocabulary:
        raise ValueError(
            f"llama.cpp needs a tokenizer for {vocabulary} tokens, and the only one at hand, of {source.name}, "
            f"knows {known}"
        )
    for name, field in fields.items():
        if name.startswith(_TOKENIZER):
            of = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of)


def _add(writer: Any, name: str, weight: Tensor) -> None:
    import gguf

    # llama.cpp computes norms in float32 and takes their weights in nothing else.
    weight = (weight.float() if weight.dim() == 1 else weight).contiguous()
    if weight.dtype is torch.bfloat16:  # which numpy does not have
        writer.add_tensor(name, weight.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, weight.numpy())
