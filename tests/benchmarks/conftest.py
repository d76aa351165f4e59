"""What the benchmarks read: a prompt file and a target."""

from __future__ import annotations

import pytest
import torch
from kit import VOCAB, fresh_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def prompt_file(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokenizer knows words `w0`, `w1`, … and has no chat template."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("model")
    fresh_model(dtype=torch.float32).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return path
