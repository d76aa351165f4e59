"""`treedec demo`: Hugging Face generate against treedec on a few prompts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from treedec.cli.options import CompileOption, DeviceOption, Dtype, JsonOption, quiet_transformers, torch_dtype
from treedec.cli.run import print_json


def demo(
    drafter: Annotated[str, typer.Option(help="What drafts, as for generate.")] = "demo",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per answer.")] = 96,
    seed: Annotated[int, typer.Option(help="Seed of the sampled answers.")] = 0,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of the target; 'auto' is bfloat16 where it is faster, else float32.")
    ] = Dtype.auto,
    device: DeviceOption = None,
    compile: CompileOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a few prompts with Hugging Face generate and with treedec, and compare."""
    quiet_transformers()
    from treedec.demo import run
    from treedec.models import pick_device

    chosen = None if dtype is Dtype.auto else torch_dtype(dtype)
    console = Console(stderr=as_json)
    result = run(drafter, max_new_tokens, seed, chosen, console, device=pick_device(device), compile=compile)
    if as_json:
        print_json(result)
