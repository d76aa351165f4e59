"""A chat model in miniature: a token per letter, and a chat template of a few tokens."""

from __future__ import annotations

import torch
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

QUIET = Console(quiet=True)
LETTERS = "abcdefgu"
BEGIN, END, OTHER = range(3)  # <s>, </s>, and <x>: a special token without a role, as chat models have many
PADDING = 3  # rows of the LM head beyond the tokenizer's vocabulary
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


def letters(template=TEMPLATE):
    """A tokenizer with a token per letter, so that decoding and encoding lose nothing."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<x>", *LETTERS])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<x>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=3 + len(LETTERS) + PADDING, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=BEGIN, eos_token_id=END,
        pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.to(dtype)
