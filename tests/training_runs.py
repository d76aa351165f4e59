"""Tiny targets, texts and configs for tests of training as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from treedec.training.config import TrainConfig
from treedec.training.contracts import Corpus

QUIET = Console(quiet=True)
VOCAB, HIDDEN = 97, 32


def config_of(**changes: Any) -> TrainConfig:
    """Three Medusa heads for two short epochs, unless something else is said."""
    chosen: dict[str, Any] = {
        "options": {"heads": 3} if changes.get("method", "medusa") in ("medusa", "hydra") else {},
        "draft_vocab_size": 60,
        "epochs": 2,
        "pack_tokens": 80,
        "learning_rate": 1e-3,
        "holdout": 0.2,
        "log_every": 2,
        "checkpoint_every": 3,
        "tensorboard": False,
    }
    return TrainConfig(**(chosen | changes))


def tiny_model(vocab: int = VOCAB, hidden: int = HIDDEN, **changes: Any) -> LlamaForCausalLM:
    """A target of two layers, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            eos_token_id=None,
            **changes,
        )
        return LlamaForCausalLM(config).eval()


def counting_model(vocab: int = 23) -> LlamaForCausalLM:
    """A target that continues `x` with `x + 1`: one-hot embeddings pass untouched to a shifted LM head."""
    model = tiny_model(vocab)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, HIDDEN))
        model.lm_head.weight.copy_(torch.eye(vocab, HIDDEN).roll(1, 0))
    return model


def corpus_of(samples: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]], skipped: int = 0) -> Corpus:
    """Texts with their responses `[start, end)`."""
    lengths = [len(ids) for ids, _ in samples]
    responses = [(number, *span) for number, (_, spans) in enumerate(samples) for span in spans]
    return Corpus(
        np.array([token for ids, _ in samples for token in ids], dtype=np.int32),
        np.cumsum([0, *lengths]),
        np.array(responses, dtype=np.int64).reshape(-1, 3),
        skipped,
    )


def random_samples(count: int = 20, seed: int = 0, vocab: int = VOCAB) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Texts of 18 to 24 random tokens with two responses."""
    random = np.random.default_rng(seed)
    return [
        (random.integers(vocab, size=18 + number % 7).tolist(), [(4, 10), (13, 18 + number % 7)])
        for number in range(count)
    ]


def state_of(out: Path) -> dict[str, Any]:
    """The checkpoint of a run."""
    return torch.load(out / "state.pt", weights_only=True)


def assert_same(a: Any, b: Any, path: str = "state") -> None:
    """Bitwise equality of nested checkpoints."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
