"""Options that several commands share, and the target they name."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Dtype(StrEnum):
    """Dtypes by their name on the command line."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


TargetOption = Annotated[str, typer.Option(help="'demo', a model folder, or the name of a model on the hub.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Where the target runs, such as cpu or cuda:1.", show_default="the GPU if there is one, else cpu"
    ),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of the target; 'auto' is that of its stored weights.")]
CompileOption = Annotated[bool, typer.Option("--compile", help="Compile the passes first (takes minutes).")]
JsonOption = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object.")]


def load(
    target: str, dtype: Dtype, device: str | None, runs: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer, as the options `--target`, `--dtype` and `--device` name them.

    If it is going to run, and in a dtype that this processor is slow with, a line on standard error says so.
    """
    quiet_transformers()
    from treedec.compilation import emulated
    from treedec.models import load_target, pick_device

    place = pick_device(device)
    model, tokenizer = load_target(target, dtype="auto" if dtype is Dtype.auto else torch_dtype(dtype), device=place)
    if runs and model.device.type == "cpu" and emulated(model.dtype):
        name = str(model.dtype).removeprefix("torch.")
        print(
            f"treedec: this processor has no instructions for {name}, so passes over many tokens (training, prompts, "
            "trees) take several times as long as with --dtype float32",
            file=sys.stderr,
        )
    return model, tokenizer


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """A dtype that is not `auto`."""
    import torch

    return getattr(torch, dtype.value)


def quiet_transformers() -> None:
    """Loading bars and advice would mix with the text; errors still come as exceptions."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
