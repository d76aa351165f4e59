"""How often each acceptance rule would accept the children of one node, on real distributions.

    python -m treedec.benchmarks.acceptance question.jsonl --out result.json

lets the target continue prompts in Spec-Bench's format by sampling, and takes, at positions spread over what it wrote,
its distribution p and that of the first Medusa head, q, both at the temperature of the text. From these follow the
expected acceptance of every rule with 1, 2, 4, … children and the most that any rule could accept
(`treedec.bounds`): no decoding is timed, and no luck in decoding is involved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import treedec
from treedec.benchmarks.prompts import read_prompts
from treedec.benchmarks.record import check_writable, write_record
from treedec.bounds import AcceptanceBounds, acceptance_bounds
from treedec.cli import DeviceOption, Dtype, TargetOption, load, run_app
from treedec.models import encode_chat

_NAME = "python -m treedec.benchmarks.acceptance"
# Which of the bounds are reported, and as what: the rule, and how its children are found.
_WAYS = {
    "coupled": "coupled, top of q / e",
    "residual": "residual, drawn",  # and traversal
    "top": "residual, top of q",
    "hu": "residual, Hu et al.",
    "optimum": "optimum, drawn",
}

_Item = TypeVar("_Item")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Measurement:
    """Where p and q come from.

    Args:
        target: writes the text.
        tokenizer: for the prompts.
        drafter: Medusa heads of the target.
        positions: most positions taken from one text.
        max_new_tokens: most tokens of one text.
        seed: of every text.
    """

    def __init__(
        self,
        target: treedec.Target,
        tokenizer: PreTrainedTokenizerBase,
        drafter: treedec.MedusaDrafter,
        positions: int,
        max_new_tokens: int,
        seed: int,
    ):
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.positions, self.max_new_tokens, self.seed = positions, max_new_tokens, seed

    def write(self, prompt: str, temperature: float) -> tuple[Tensor, int]:
        """`[1, L + new]` ids of the prompt and what the target samples after it, and L."""
        ids = encode_chat(self.tokenizer, prompt).to(self.target.device)
        torch.manual_seed(self.seed)
        text = treedec.generate(
            self.target, ids, self.drafter, max_new_tokens=self.max_new_tokens,
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        )  # fmt: skip
        assert isinstance(text, Tensor)
        return text, ids.shape[1]

    @torch.no_grad()
    def distributions(self, text: Tensor, length: int, temperature: float) -> tuple[Tensor, Tensor]:
        """`[K, V]` p and q of the token after new ones, the last excepted, spread over a text whose prompt has `length`
        tokens."""
        # The root of a tree is token i; its children are drafted from the hidden state that predicted it, at i - 1.
        roots = spread(range(length, text.shape[1] - 1), self.positions)
        hidden = self.target.features(text)[0]
        p = (self.target.head(hidden[roots]).float() / temperature).softmax(-1)
        before = [root - 1 for root in roots]
        drafted = (self.drafter.logits(hidden[before], depths=1)[0].float() / temperature).softmax(-1)
        return p, torch.zeros_like(p).index_copy(1, self.drafter.heads.draft_ids, drafted)


def spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most `count` items, evenly spread."""
    count = min(count, len(items))
    return [items[(2 * place + 1) * len(items) // (2 * count)] for place in range(count)]


def concatenated(parts: Sequence[AcceptanceBounds]) -> AcceptanceBounds:
    """The bounds of all nodes, from those of several texts."""
    return AcceptanceBounds(
        **{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(AcceptanceBounds)}
    )


def figures(bounds: AcceptanceBounds, children: Sequence[int]) -> list[dict[str, Any]]:
    """For every way and number of children, the mean over all nodes, its distance from the optimum (of drawn children),
    and standard errors over nodes, which hold the Monte Carlo errors."""
    result: list[dict[str, Any]] = []
    for way in _WAYS:
        for n in children:
            accepted, distance = getattr(bounds, way)[:, n - 1], (bounds.optimum - getattr(bounds, way))[:, n - 1]
            result.append(
                {
                    "way": way,
                    "children": n,
                    "acceptance": float(accepted.mean()),
                    "acceptance_error": _standard_error(accepted),
                    "below_optimum": float(distance.mean()),
                    "below_optimum_error": _standard_error(distance),
                }
            )
    return result


def _standard_error(values: Tensor) -> float | None:
    return float(values.std()) / len(values) ** 0.5 if len(values) > 1 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code; `arguments` defaults to those of the process."""
    return run_app(app, _NAME, arguments)


@app.command()
def command(
    prompts: Annotated[Path, typer.Argument(help="JSONL in Spec-Bench's format.", show_default=False)],
    category: Annotated[
        str | None, typer.Option(help="Only prompts of this category; mt_bench is all of MT-Bench's.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many prompts, spread over the file.")] = 24,
    positions: Annotated[int, typer.Option(min=1, help="Most positions per prompt.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per prompt.")] = 64,
    temperatures: Annotated[
        list[float] | None, typer.Option("--temperature", help="Repeat the option for more.", show_default="1, 0.7")
    ] = None,
    children: Annotated[
        list[int] | None,
        typer.Option("--children", min=1, help="Repeat the option for more.", show_default="1, 2, 4, 8"),
    ] = None,
    draws: Annotated[int, typer.Option(min=2, help="Monte Carlo draws per position.")] = 64,
    target: TargetOption = "demo",
    drafter: Annotated[str, typer.Option(help="Medusa heads of the target.")] = "demo:medusa",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the target.")] = Dtype.float32,
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of every text.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Compute how often each acceptance rule would accept."""
    temperatures, children = temperatures or [1.0, 0.7], children or [1, 2, 4, 8]
    if min(temperatures) <= 0:
        raise ValueError("--temperature must be above 0: greedy decoding has one rule only")
    chosen = spread(read_prompts(prompts, [category] if category else []), limit)
    if out is not None:
        check_writable(out)
    model, tokenizer = load(target, dtype, device)
    heads = treedec.load_drafter(drafter, model)
    if not isinstance(heads, treedec.MedusaDrafter):
        raise ValueError(f"--drafter {drafter} has no Medusa heads to take distributions from")
    measurement = Measurement(treedec.Target(model), tokenizer, heads, positions, max_new_tokens, seed)
    summary: list[dict[str, Any]] = []
    progress = Console(stderr=True)
    for temperature in temperatures:
        parts = []
        numbered = track(list(enumerate(chosen, seed)), description=f"temperature {temperature}", console=progress)
        for own_seed, prompt in numbered:
            text, length = measurement.write(prompt.turns[0], temperature)
            if text.shape[1] > length + 1:  # else the first token ended it, and nothing follows
                p, q = measurement.distributions(text, length, temperature)
                parts.append(acceptance_bounds(p, q, max(children), draws, own_seed))
        if not parts:
            raise ValueError(f"at temperature {temperature} the target ended every text at once: nothing to measure")
        bounds = concatenated(parts)
        entries = figures(bounds, children)
        summary += [{"temperature": temperature, "positions": len(bounds.top), **entry} for entry in entries]
        _show(f"temperature {temperature}, {len(bounds.top)} positions", entries, children)
    if out is not None:
        write_record(out, _NAME, prompts, model.device, {"summary": summary})


def _show(title: str, entries: Sequence[dict[str, Any]], children: Sequence[int]) -> None:
    """The figures as a table, and once more as one to paste into Markdown."""
    header = ["acceptance (below optimum)", *(f"{n} child{'ren' if n > 1 else ''}" for n in children)]
    rows = [[label, *(_cell(entry) for entry in entries if entry["way"] == way)] for way, label in _WAYS.items()]
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")


def _cell(entry: dict[str, Any]) -> str:
    return "{acceptance:.3f} ({below_optimum:.3f})".format(**entry).replace("-0.000", "0.000")


if __name__ == "__main__":
    sys.exit(main())
