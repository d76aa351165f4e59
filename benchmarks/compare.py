"""Plain `model.generate` against treedec on a prompt file, interleaved prompt by prompt in one run.

    python -m treedec.benchmarks.compare question.jsonl --category mt_bench --out result.json

reads prompts in Spec-Bench's format (one JSON object a line: `question_id`, `category`, `turns`), decodes the first
turn of each with every method in turn, and writes every row and the pooled figures. Speeds are pooled tokens over
pooled seconds, prefill included, and are meant as ratios within one run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import treedec
from treedec.decode import DecodingStats

_METHODS = ("hf", "none", "drafter", "none-compiled", "drafter-compiled")


@dataclass(frozen=True)
class Row:
    """One prompt decoded by one method."""

    prompt: str
    method: str
    new_tokens: int
    seconds: float
    passes: int
    accepted_lengths: dict[int, int]
    matches_hf: bool | None
    first_difference: int | None
    logit_gap: float | None


# Spec-Bench files its MT-Bench prompts under the eight categories that MT-Bench itself has.
_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


def read_prompts(path: Path, category: str | None) -> list[tuple[str, str]]:
    """`(id, first turn)` of each prompt of a category (`mt_bench` being all of MT-Bench's), or of all.

    Raises:
        ValueError: a line that is not such an object (names the line), a repeated id, or no prompt at all.
    """
    prompts: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            name, turn = str(row["question_id"]), row["turns"][0]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a prompt with question_id and turns ({error!r})") from error
        if name in prompts:
            raise ValueError(f"{path}, line {number}: question_id {name} appears twice")
        own = row.get("category")
        if category is None or own == category or (category == "mt_bench" and own in _MT_BENCH):
            prompts[name] = turn
    if not prompts:
        raise ValueError(f"{path} has no prompts" + (f" of category {category!r}" if category else ""))
    return list(prompts.items())


def pooled(rows: list[Row]) -> dict[str, float]:
    """Pooled figures of one method's rows; the accepted length pools tokens and passes, not averages of averages."""
    tokens, seconds = sum(row.new_tokens for row in rows), sum(row.seconds for row in rows)
    committed = sum(int(length) * times for row in rows for length, times in row.accepted_lengths.items())
    passes = sum(row.passes for row in rows)
    compared = [row for row in rows if row.matches_hf is not None]
    return {
        "prompts": len(rows),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mean_accepted_length": committed / passes if passes else 1.0,
        "exact_match": sum(bool(row.matches_hf) for row in compared) / len(compared) if compared else float("nan"),
        "largest_gap_at_first_difference": max((row.logit_gap or 0.0 for row in compared), default=0.0),
    }


class Comparison:
    """The methods of one run over one target.

    Args:
        target, drafter, dtype: as on the command line.
        generation: arguments of `generate`.
        seed: of every prompt's sampling.
    """

    def __init__(self, target: str, drafter: str, dtype: str, generation: dict[str, Any], seed: int):
        self.model, self.tokenizer = treedec.load_target(target, dtype=getattr(torch, dtype))
        self.drafter_name = drafter
        self.generation, self.seed = generation, seed
        self._compiled: treedec.Target | None = None

    def prepare(self, method: str) -> Callable[[Tensor], tuple[Tensor, DecodingStats | None]]:
        """A function from `[1, L]` prompt ids to `[1, L + new]` ids and counts.

        Raises:
            ValueError: an unknown method.
        """
        kind, _, nodes = method.partition("@")
        if kind not in _METHODS or (nodes and not (nodes.isdecimal() and kind.startswith("drafter"))):
            raise ValueError(f"unknown method {method!r}; known are {', '.join(_METHODS)}, and drafter@NODES")
        if kind == "hf":
            # Causal LMs are `GenerationMixin`s, which `PreTrainedModel` does not say.
            hf = cast(transformers.GenerationMixin, self.model)
            return lambda ids: (hf.generate(ids, attention_mask=torch.ones_like(ids), **self.generation), None)
        model: Any = self.model
        if kind.endswith("-compiled"):
            self._compiled = self._compiled or treedec.Target(self.model, compile=True)
            model = self._compiled
        tree = int(nodes) if nodes else None
        drafter = treedec.load_drafter(self.drafter_name, self.model, tree=tree) if kind.startswith("drafter") else None

        def decode(ids: Tensor) -> tuple[Tensor, DecodingStats | None]:
            output = treedec.generate(model, ids, drafter, return_dict_in_generate=True, **self.generation)
            assert isinstance(output, treedec.TreeDecoderOutput) and output.sequences is not None
            return output.sequences, output.stats

        return decode

    def encode(self, prompt: str) -> Tensor:
        chat = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return cast(Mapping[str, Tensor], encoded)["input_ids"].to(self.model.device)

    def timed(
        self, decode: Callable[[Tensor], tuple[Tensor, DecodingStats | None]], ids: Tensor
    ) -> tuple[list[int], float, DecodingStats | None]:
        torch.manual_seed(self.seed)
        started = time.perf_counter()
        sequences, stats = decode(ids)
        new = sequences[0, ids.shape[1] :].tolist()  # reading the ids waits for the device
        return new, time.perf_counter() - started, stats

    @torch.no_grad()
    def gap(self, ids: Tensor, reference: list[int], other: list[int], place: int) -> float | None:
        """The model's own logit gap between two outputs where they part: near 0 at a near-tie of a greedy decode."""
        if place >= min(len(reference), len(other)):
            return None
        prefix = torch.cat([ids, torch.tensor([reference[:place]], dtype=torch.long, device=ids.device)], dim=1)
        logits = self.model(prefix, logits_to_keep=1).logits[0, -1].float()
        return abs(float(logits[reference[place]] - logits[other[place]]))


def compare(comparison: Comparison, prompts: list[tuple[str, str]], methods: list[str], console: Console) -> list[Row]:
    """Decode every prompt with every method in turn, after one warm-up of each."""
    decoders = {method: comparison.prepare(method) for method in methods}
    for decode in decoders.values():
        comparison.timed(decode, comparison.encode(prompts[0][1]))
        comparison.timed(decode, comparison.encode(prompts[-1][1]))
    rows = []
    for name, prompt in track(prompts, description="comparing", console=console):
        ids, reference = comparison.encode(prompt), None
        for method, decode in decoders.items():
            new, seconds, stats = comparison.timed(decode, ids)
            if method == "hf":
                reference = new
            different = None
            if reference is not None:
                pairs = zip(reference, new, strict=False)
                different = next(
                    (i for i, (a, b) in enumerate(pairs) if a != b),
                    None if len(reference) == len(new) else min(len(reference), len(new)),
                )
            rows.append(
                Row(
                    prompt=name,
                    method=method,
                    new_tokens=len(new),
                    seconds=seconds,
                    passes=stats.row_passes if stats else len(new) - 1,
                    accepted_lengths=stats.accepted_lengths if stats else {1: len(new) - 1},
                    matches_hf=None if reference is None else different is None,
                    first_difference=different,
                    logit_gap=None
                    if reference is None or different is None
                    else comparison.gap(ids, reference, new, different),
                )
            )
    return rows


def main(
    prompts: Annotated[Path, typer.Argument(help="JSONL in Spec-Bench's format.")],
    category: Annotated[str | None, typer.Option(help="Only prompts of this category.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    target: str = "demo",
    drafter: str = "demo",
    methods: Annotated[
        str, typer.Option(help=f"Comma list of {', '.join(_METHODS)}; drafter@32 has trees of 32 nodes.")
    ] = "hf,drafter",
    max_new_tokens: int = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; else sampling from the whole vocabulary.")] = 0.0,
    dtype: str = "bfloat16",
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Write rows and figures here as JSON.")] = None,
) -> None:
    """Compare ways of decoding on a prompt file."""
    transformers.utils.logging.set_verbosity_error()
    chosen = methods.split(",")
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    console = Console(stderr=True)
    chosen_prompts = read_prompts(prompts, category)[:limit]
    comparison = Comparison(target, drafter, dtype, {"max_new_tokens": max_new_tokens, **sampling}, seed)
    rows = compare(comparison, chosen_prompts, chosen, console)
    summary = {method: pooled([row for row in rows if row.method == method]) for method in chosen}
    result = {
        "schema": 1,
        # The prompts by name only: where they lie is nobody else's business.
        "command": " ".join(["python -m treedec.benchmarks.compare", *sys.argv[1:]]).replace(
            str(prompts), prompts.name
        ),
        "machine": {"processor": _processor(), "threads": torch.get_num_threads(), "system": platform.platform()},
        "versions": {
            "treedec": treedec.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "summary": summary,
        "rows": [asdict(row) for row in rows],
    }
    if out is not None:
        partial = out.with_name(out.name + ".partial")
        partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
        os.replace(partial, out)
    _show(summary, chosen[0])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _show(summary: dict[str, dict[str, float]], baseline: str) -> None:
    table = Table("method", "tokens/s", f"ratio to {baseline}", "mean accepted length", "same tokens as hf")
    for method, figures in summary.items():
        ratio = figures["tokens_per_second"] / summary[baseline]["tokens_per_second"]
        table.add_row(
            method,
            f"{figures['tokens_per_second']:.1f}",
            f"{ratio:.2f}",
            f"{figures['mean_accepted_length']:.2f}",
            f"{figures['exact_match']:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
