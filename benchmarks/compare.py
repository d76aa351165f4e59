"""Plain `model.generate` against treedec on a prompt file, interleaved prompt by prompt in one run.

    python -m treedec.benchmarks.compare question.jsonl --category mt_bench --out result.json

reads prompts in Spec-Bench's format (one JSON object a line: `question_id`, `category`, `turns`), decodes the first
turn of each with every method in turn, and writes every row and the pooled figures. Speeds are pooled tokens over
pooled seconds, prefill included, and are meant as ratios within one run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from treedec.benchmarks.record import check_writable, write_record
from treedec.cli import DeviceOption, Dtype, TargetOption, load, run_app
from treedec.demo import first_difference
from treedec.models import encode_chat
from treedec.stats import DecodingStats

_NAME = "python -m treedec.benchmarks.compare"
_REFERENCE = "hf"  # what the other methods' tokens are compared with
_METHODS = (_REFERENCE, "none", "drafter", "none-compiled", "drafter-compiled")
# Spec-Bench files its MT-Bench prompts under the eight categories that MT-Bench itself has.
_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class Row:
    """One prompt decoded by one method.

    Attributes:
        prompt: its id.
        method: as on the command line.
        seconds: wall time, prefill included.
        stats: counts; those of `hf` are what one token a pass amounts to.
        matches_hf: whether the tokens are those of `hf`; None where `hf` did not run.
        first_difference: index of the first new token that is another one, or None.
        logit_gap: the model's own gap between the two tokens there, when decoding greedily.
    """

    prompt: str
    method: str
    seconds: float
    stats: DecodingStats
    matches_hf: bool | None = None
    first_difference: int | None = None
    logit_gap: float | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "method": self.method,
            "new_tokens": self.stats.new_tokens,
            "seconds": self.seconds,
            "passes": self.stats.row_passes,
            "accepted_lengths": self.stats.accepted_lengths,
            "matches_hf": self.matches_hf,
            "first_difference": self.first_difference,
            "logit_gap": self.logit_gap,
        }


def read_prompts(path: Path, category: str | None) -> list[tuple[str, str]]:
    """`(id, first turn)` of each prompt of a category (`mt_bench` being all of MT-Bench's), or of all.

    Raises:
        ValueError: a line that is not such an object (names the line), a repeated id, or no prompt at all.
    """
    prompts: dict[str, str] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                name, turn = str(row["question_id"]), row["turns"][0]
                if not isinstance(turn, str) or not isinstance(row["turns"], list):
                    raise TypeError("turns is not a list of texts")
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a prompt with question_id and turns ({error!r})"
                ) from error
            if name in prompts:
                raise ValueError(f"{path}, line {number}: question_id {name} appears twice")
            own = row.get("category")
            if category is None or own == category or (category == "mt_bench" and own in _MT_BENCH):
                prompts[name] = turn
    if not prompts:
        raise ValueError(f"{path} has no prompts" + (f" of category {category!r}" if category else ""))
    return list(prompts.items())


def read_methods(text: str) -> list[str]:
    """The methods of a comma list, each once, `hf` first: the others are compared with it.

    Raises:
        ValueError: an unknown method, or none at all.
    """
    methods = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for method in methods:
        kind, at, nodes = method.partition("@")
        sized = kind.startswith("drafter") and nodes.isdecimal() and int(nodes) >= 1
        if kind not in _METHODS or (at and not sized):
            raise ValueError(f"unknown method {method!r}; known are {', '.join(_METHODS)}, and drafter@NODES")
    if not methods:
        raise ValueError(f"no methods: give some of {', '.join(_METHODS)}")
    return sorted(methods, key=lambda method: method != _REFERENCE)  # a stable sort: the others keep their order


def pooled(rows: Sequence[Row], greedy: bool) -> dict[str, float | None]:
    """Figures of one method's rows, each from sums over all of them; None where there is nothing to tell.

    `exact_match` is the share of the prompts that `hf` decoded to the same tokens. `largest_gap_at_first_difference`
    is told of greedy decoding only: sampled tokens may part where no near-tie is.
    """
    stats, seconds = DecodingStats.merged([row.stats for row in rows]), sum(row.seconds for row in rows)
    compared = [row for row in rows if row.matches_hf is not None]
    return {
        "prompts": len(rows),
        "new_tokens": stats.new_tokens,
        "seconds": seconds,
        "tokens_per_second": stats.new_tokens / seconds,
        "mean_accepted_length": stats.mean_accepted_length,
        "exact_match": sum(bool(row.matches_hf) for row in compared) / len(compared) if compared else None,
        "largest_gap_at_first_difference": (
            max(row.logit_gap or 0.0 for row in compared) if greedy and compared else None
        ),
    }


class Comparison:
    """The methods of one run over one target.

    Args:
        model, tokenizer: the target.
        drafter: as for `load_drafter`.
        generation: arguments of `generate`.
        seed: of every prompt's sampling.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        drafter: str,
        generation: dict[str, Any],
        seed: int,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.drafter_name = drafter
        self.generation, self.seed = generation, seed
        self.greedy = not generation.get("do_sample")
        self._compiled: treedec.Target | None = None

    def prepare(self, method: str) -> Callable[[Tensor], tuple[Tensor, DecodingStats | None]]:
        """A function from `[1, L]` prompt ids to `[1, L + new]` ids and counts; `method` as `read_methods` gives it."""
        kind, _, nodes = method.partition("@")
        if kind == _REFERENCE:
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
        return encode_chat(self.tokenizer, prompt).to(self.model.device)

    def timed(
        self, decode: Callable[[Tensor], tuple[Tensor, DecodingStats | None]], ids: Tensor
    ) -> tuple[list[int], float, DecodingStats]:
        """New token ids, seconds and counts of one prompt."""
        torch.manual_seed(self.seed)
        started = time.perf_counter()
        sequences, stats = decode(ids)
        new = sequences[0, ids.shape[1] :].tolist()  # reading the ids waits for the device
        seconds = time.perf_counter() - started
        return new, seconds, _one_token_a_pass(len(new)) if stats is None else stats

    @torch.no_grad()
    def gap(self, ids: Tensor, reference: list[int], other: list[int], place: int) -> float | None:
        """The model's own logit gap between two outputs where they part: near 0 at a near-tie of a greedy decode."""
        if place >= min(len(reference), len(other)):
            return None
        prefix = torch.cat([ids, torch.tensor([reference[:place]], dtype=torch.long, device=ids.device)], dim=1)
        logits = self.model(prefix, logits_to_keep=1).logits[0, -1].float()
        return abs(float(logits[reference[place]] - logits[other[place]]))


def _one_token_a_pass(tokens: int) -> DecodingStats:
    """What plain decoding counts: the prefill yields the first token, and every further pass one."""
    passes = tokens - 1
    return DecodingStats(passes, tokens, 0, passes, {1: passes} if passes else {})


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
            if method == _REFERENCE:
                reference = new
            if reference is None:
                rows.append(Row(name, method, seconds, stats))
                continue
            place = first_difference(reference, new)
            gap = comparison.gap(ids, reference, new, place) if place is not None and comparison.greedy else None
            rows.append(Row(name, method, seconds, stats, place is None, place, gap))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and return its exit code; `arguments` defaults to those of the process."""
    return run_app(app, _NAME, arguments)


@app.command()
def command(
    prompts: Annotated[Path, typer.Argument(help="JSONL in Spec-Bench's format.", show_default=False)],
    category: Annotated[
        str | None, typer.Option(help="Only prompts of this category; mt_bench is all of MT-Bench's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    target: TargetOption = "demo",
    drafter: Annotated[str, typer.Option(help="What drafts, as for `treedec generate`.")] = "demo",
    methods: Annotated[
        str, typer.Option(help=f"Comma list of {', '.join(_METHODS)}; drafter@32 has trees of 32 nodes.")
    ] = "hf,drafter",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy; else sampling from the whole vocabulary.")
    ] = 0.0,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the target.")] = Dtype.bfloat16,
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of every prompt.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write rows and figures here as JSON.")] = None,
) -> None:
    """Compare ways of decoding on a prompt file."""
    chosen = read_methods(methods)
    chosen_prompts = read_prompts(prompts, category)[:limit]
    if out is not None:
        check_writable(out)
    generation: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        generation |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    model, tokenizer = load(target, dtype, device)
    comparison = Comparison(model, tokenizer, drafter, generation, seed)
    rows = compare(comparison, chosen_prompts, chosen, Console(stderr=True))
    summary = {method: pooled([row for row in rows if row.method == method], comparison.greedy) for method in chosen}
    if out is not None:
        figures: dict[str, object] = {"summary": summary, "rows": [row.to_dict() for row in rows]}
        write_record(out, _NAME, prompts, model.device, figures)
    _show(summary, chosen[0])


def _show(summary: dict[str, dict[str, Any]], baseline: str) -> None:
    table = Table("method", "tokens/s", f"ratio to {baseline}", "mean accepted length", "same tokens as hf")
    for method, figures in summary.items():
        ratio = figures["tokens_per_second"] / summary[baseline]["tokens_per_second"]
        same = figures["exact_match"]
        table.add_row(
            method,
            f"{figures['tokens_per_second']:.1f}",
            f"{ratio:.2f}",
            f"{figures['mean_accepted_length']:.2f}",
            "–" if same is None else f"{same:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
