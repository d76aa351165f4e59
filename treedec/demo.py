"""`treedec demo`: the same prompts through Hugging Face `generate` and through treedec, in one run.

For each prompt the two take turns, greedily and then sampled at temperature 1 from the whole vocabulary under one seed,
so that whatever else the machine does meets both alike. Loading and one warm-up of each are not timed; the prefill is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from treedec.api import generate
from treedec.compilation import emulated
from treedec.drafter import Drafter
from treedec.models import DEMO, encode_chat, load_target
from treedec.stats import DecodingStats
from treedec.target import Target

PROMPTS = {
    "explain": "Explain to a curious twelve-year-old why the sky is blue at noon and red at sunset.",
    "code": "Write a Python function that returns the n-th Fibonacci number without recursion, and show one call.",
    "list": "List eight things to check before riding a bicycle to work in winter, one short line each.",
    "story": "Tell a short story about a lighthouse keeper who receives a letter that was posted a hundred years ago.",
}

_GREEDY: dict[str, Any] = {"do_sample": False}
# Nothing cut off: a top-k or top-p would make the target easier to guess.
_SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
MODES = {"greedy": _GREEDY, "sampled": _SAMPLED}


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways.

    Attributes:
        prompt: its name in `PROMPTS`.
        mode: `"greedy"` or `"sampled"`.
        plain, ours: new token ids of `model.generate` and of treedec.
        plain_seconds, our_seconds: wall time, prefill included.
        stats: treedec's counts.
    """

    prompt: str
    mode: str
    plain: list[int]
    ours: list[int]
    plain_seconds: float
    our_seconds: float
    stats: DecodingStats

    @property
    def differs_at(self) -> int | None:
        """Index of the first new token that differs, or None if all are the same."""
        return first_difference(self.plain, self.ours)


def run(
    drafter: str,
    max_new_tokens: int,
    seed: int,
    dtype: torch.dtype | None,
    console: Console,
    *,
    device: torch.device | None = None,
    compile: bool = False,
) -> dict[str, Any]:
    """Compare on all prompts, show the answers and a table on `console`, and return the figures.

    Args:
        drafter: as for `load_drafter`.
        max_new_tokens: per answer.
        seed: set before each sampled answer.
        dtype: of the target; None for `fast_dtype(device)`.
        console: where to show things.
        device: of the target; None for the CPU.
        compile: compile the passes over trees first, see `Target`.
    """
    from treedec.heads import load_drafter

    device = device or torch.device("cpu")
    model, tokenizer = load_target(DEMO, dtype=dtype or fast_dtype(device), device=device)
    drafts = load_drafter(drafter, model)
    target = Target(model, compile=compile)
    prompts = {name: encode_chat(tokenizer, text).to(device) for name, text in PROMPTS.items()}
    first = next(iter(prompts.values()))
    for mode in MODES:
        compare(target, first, drafts, "warm-up", mode, 32 if compile else 8, seed)

    dtype_name = str(model.dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    where = f"{threads} threads" if device.type == "cpu" else str(device)
    console.print(f"SmolLM2-135M-Instruct, {dtype_name}, {where}, drafts: {drafts.name}", highlight=False)
    results = []
    for name, ids in prompts.items():
        console.print(f"\n[bold]{escape(PROMPTS[name])}[/bold]", highlight=False)
        for mode in MODES:
            result = compare(target, ids, drafts, name, mode, max_new_tokens, seed)
            results.append(result)
            text = str(tokenizer.decode(result.ours, skip_special_tokens=True)).strip()
            console.print(f"[dim]{mode}:[/dim] {escape(text)}", highlight=False)
    console.print()
    console.print(_table(results))
    if any(result.differs_at is not None for result in results) and model.dtype in (torch.bfloat16, torch.float16):
        console.print(
            f"{dtype_name} rounds a pass over many tokens differently from a pass over one, so a near-tie between two "
            "tokens can fall the other way, and the texts part there. In float32: treedec demo --dtype float32",
            style="dim",
            highlight=False,
        )
    return {
        "target": DEMO,
        "dtype": dtype_name,
        "device": str(device),
        "compiled": compile,
        "threads": threads,
        "method": drafts.name,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "prompts": [{"prompt": result.prompt, "mode": result.mode, **figures([result])} for result in results],
        **{mode: figures([result for result in results if result.mode == mode]) for mode in MODES},
        "total": figures(results),
    }


def compare(target: Target, ids: Tensor, drafter: Drafter, name: str, mode: str, tokens: int, seed: int) -> Comparison:
    """Decode one `[1, L]` prompt both ways, plain first."""
    arguments = {**MODES[mode], "max_new_tokens": tokens}
    # Given explicitly, as transformers would otherwise work it out from the ids.
    mask = torch.ones_like(ids)
    model: Any = target.model  # transformers annotates `generate` in a way that type checkers cannot call
    new = slice(ids.shape[1], None)
    # Reading the ids waits for the device, which treedec does in every pass.
    plain, plain_seconds = _timed(lambda: model.generate(ids, attention_mask=mask, **arguments)[0, new].tolist(), seed)
    ours, our_seconds = _timed(
        lambda: generate(target, ids, drafter, attention_mask=mask, return_dict_in_generate=True, **arguments), seed
    )
    return Comparison(name, mode, plain, ours.sequences[0, new].tolist(), plain_seconds, our_seconds, stats=ours.stats)


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter one included; None if all are the same."""
    pairs = enumerate(zip(reference, other, strict=False))
    end = None if len(reference) == len(other) else min(len(reference), len(other))
    return next((i for i, (a, b) in pairs if a != b), end)


def figures(results: Sequence[Comparison]) -> dict[str, Any]:
    """Counts and times of some comparisons, summed before any ratio is taken."""
    plain_tokens, our_tokens = sum(len(r.plain) for r in results), sum(len(r.ours) for r in results)
    plain_seconds, our_seconds = sum(r.plain_seconds for r in results), sum(r.our_seconds for r in results)
    plain_speed, our_speed = plain_tokens / plain_seconds, our_tokens / our_seconds
    return {
        "new_tokens": our_tokens,
        "identical": all(r.differs_at is None for r in results),
        "differs_at": results[0].differs_at if len(results) == 1 else None,
        "plain_seconds": round(plain_seconds, 3),
        "seconds": round(our_seconds, 3),
        "plain_tokens_per_second": round(plain_speed, 2),
        "tokens_per_second": round(our_speed, 2),
        "speedup": round(our_speed / plain_speed, 3),
        "mean_accepted_length": round(DecodingStats.merged([r.stats for r in results]).mean_accepted_length, 3),
    }


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies in it faster than in float32, else float32.

    Where oneDNN has no kernels for bfloat16 it is float32, though for eight rows the two are close there. Else a
    measurement of a few milliseconds knows, on every architecture; for CUDA devices torch does.
    """
    if device.type != "cpu":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32

    if emulated(torch.bfloat16):
        return torch.float32

    def seconds(dtype: torch.dtype) -> float:
        x, weight = torch.ones(8, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            x @ weight.T
            times.append(time.perf_counter() - started)
        return min(times)

    return torch.bfloat16 if seconds(torch.bfloat16) < seconds(torch.float32) else torch.float32


def _timed(call: Callable[[], Any], seed: int) -> tuple[Any, float]:
    torch.manual_seed(seed)
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def _table(results: Sequence[Comparison]) -> Table:
    table = Table(
        caption="generate, treedec: tokens/s with prefill; length: tokens per pass; until n: the first n agree"
    )
    table.add_column("prompt")
    table.add_column("mode")
    for heading in ("tokens", "generate", "treedec", "ratio", "length"):
        table.add_column(heading, justify="right")
    table.add_column("identical", no_wrap=True)
    for result in results:
        same = "yes" if result.differs_at is None else f"until {result.differs_at}"
        table.add_row(result.prompt, result.mode, *_cells(figures([result])), same)
    table.add_section()
    for mode in (*MODES, "total"):
        members = [result for result in results if mode in ("total", result.mode)]
        same_of = sum(result.differs_at is None for result in members)
        cells = [*_cells(figures(members)), f"{same_of} of {len(members)}"]
        table.add_row("all", "both" if mode == "total" else mode, *cells, style="bold")
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["new_tokens"]),
        f"{row['plain_tokens_per_second']:.1f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}×",
        f"{row['mean_accepted_length']:.2f}",
    ]
