"""`treedec bench`: ways of decoding compared on one machine, and `treedec bench report`, what it found."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from treedec.cli.options import DeviceOption, Dtype, JsonOption, TargetOption, load, quiet_transformers
from treedec.cli.run import REFUSED, Interrupted, print_json

if TYPE_CHECKING:
    from treedec.benchmarks.results import Result

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

_METHODS = ("hf", "ar", "ngram")
_DEMO_METHODS = (*_METHODS, "medusa", "recurrent", "eagle3", "union")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="The result file to make (JSON).", show_default=False)] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="What to compare: hf, ar, vanilla, hf-assisted, hf-assisted-default, hf-prompt-lookup, ngram, medusa, "
            "hydra, recurrent, eagle3, union, peer:llama.cpp, peer:vllm, peer:flashspec, or folders of heads or of a "
            "draft model, joined by '+' to draft together; @32 behind one for trees of 32 nodes. Repeat the option or "
            "separate with commas.",
            show_default=f"{','.join(_DEMO_METHODS)} for the demo target, else {','.join(_METHODS)}",
        ),
    ] = None,
    target: TargetOption = "demo",
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL in Spec-Bench's format.", show_default="the bundled prompts")
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option(help="Only prompts of these categories.", show_default="all")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many prompts of each category.", show_default="all")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often to decode every prompt.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Stop measuring after so many and write the result of the prompts so far; the same again goes on.",
            show_default="no limit",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per prompt.")] = 128,
    temperatures: Annotated[
        list[str] | None,
        typer.Option(help="0 is greedy; else sampling from the whole vocabulary.", show_default="0"),
    ] = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            help="Rules of treedec's sampling: 'coupled', 'residual', 'traversal', or 'typical' (not lossless).",
            show_default="coupled",
        ),
    ] = None,
    batch_sizes: Annotated[
        list[str] | None, typer.Option(help="Prompts that are decoded together.", show_default="1")
    ] = None,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the draft model of vanilla, hf-assisted(-default) and peer:flashspec.", show_default="none"
        ),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens that it drafts per pass.")] = 4,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the target.")] = Dtype.bfloat16,
    device: DeviceOption = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the CPU.", show_default="as torch chooses")
    ] = None,
    seed: Annotated[int, typer.Option(help="What all random choices derive from.")] = 0,
    costs: Annotated[
        bool, typer.Option("--costs/--no-costs", help="Measure what a pass costs by the size of its tree, too.")
    ] = True,
    expected: Annotated[
        bool,
        typer.Option(
            "--expected/--no-expected",
            help="Compute how often each acceptance rule should accept at temperatures above 0, too, which takes a "
            "few minutes.",
        ),
    ] = True,
    peers_folder: Annotated[Path, typer.Option(help="Where `make bench-peers` put the environments of peers.")] = Path(
        "build/peers"
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a result that is there, or another run's unfinished one.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare ways of decoding, prompt by prompt in turn. Interrupted, the same command goes on where it was."""
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise ValueError("give --out FILE, where the result goes")
    quiet_transformers()
    from treedec.benchmarks.bench import BenchConfig, summary
    from treedec.benchmarks.bench import bench as run
    from treedec.benchmarks.counting import BenchmarkDefect
    from treedec.benchmarks.methods import public_command

    config = BenchConfig(
        out=out,
        target=target,
        methods=_parts(methods) or (_DEMO_METHODS if target == "demo" else _METHODS),
        temperatures=[_number(float, "--temperatures", text) for text in _parts(temperatures) or ["0"]],
        acceptance=_parts(acceptance) or ["coupled"],
        batch_sizes=[_number(int, "--batch-sizes", text) for text in _parts(batch_sizes) or ["1"]],
        prompts=prompts,
        categories=_parts(category),
        limit=limit,
        rounds=rounds,
        minutes=minutes,
        max_new_tokens=max_new_tokens,
        seed=seed,
        draft_model=draft_model,
        draft_tokens=draft_tokens,
        threads=threads,
        costs=costs,
        expected=expected,
        peers_folder=peers_folder,
        overwrite=overwrite,
        command=public_command(["treedec", "bench", *map(shlex.quote, _arguments(context))]),
    )
    if acceptance and not any(config.temperatures):
        raise ValueError("--acceptance is about sampling: give --temperatures above 0")
    try:
        result = run(config, lambda: load(target, dtype, device), Console(stderr=True))
    except BenchmarkDefect as error:
        print(f"treedec: {error}; no result is written", file=sys.stderr)
        raise typer.Exit(REFUSED) from error
    except KeyboardInterrupt as error:
        if not config.journal.exists():
            raise
        raise Interrupted(
            f"interrupted; {config.journal} keeps all whole prompts: run the same again to go on"
        ) from error
    figures = summary(result)
    if as_json:
        print_json({"out": str(out), **_counts(result), "conditions": figures})
    else:
        Console().print(_table(figures), highlight=False)
        print(
            f"{out}: "
            + ", ".join(
                f"{count} {what}" for what, count in _counts(result).items() if count or what != "not_reached"
            ).replace("_", " ")
        )
        if config.journal.exists():
            print(f"{config.journal} keeps what was measured: run the same again to go on")


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT…", help="Result files of `treedec bench`.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder to write report.md and its plots to.", show_default=False)],
    baseline: Annotated[
        str | None,
        typer.Option(help="The method that ratios are to.", show_default="hf, or the first method without it"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files in the folder that no report wrote.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the report of one run, or of several beside each other."""
    from treedec.benchmarks.report import render
    from treedec.benchmarks.results import read_result

    text = render([read_result(path) for path in results], out, baseline, overwrite)
    if as_json:
        print_json({"out": str(out), "results": [str(path) for path in results]})
    else:
        print(text)


def _arguments(context: typer.Context) -> list[str]:
    """The options that were given, by their own names, whether they came from a shell or from a program."""
    given = []
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            given.append(option if value else option.replace("--", "--no-", 1))
        else:
            given += [
                part
                for each in (value if isinstance(value, (list, tuple)) else [value])
                for part in (option, _text(each))
            ]
    return given


def _text(value: object) -> str:
    return str(getattr(value, "value", value))


def _parts(values: Sequence[str] | None) -> list[str]:
    """Of options that may be repeated or hold commas, each part once."""
    return list(dict.fromkeys(part.strip() for value in values or () for part in value.split(",") if part.strip()))


def _number(kind: type, option: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} takes {what}, not {text!r}") from error


def _counts(result: Result) -> dict[str, int]:
    complete = {prompt for row in result.complete_rows() for prompt in row.prompts}
    return {
        "prompts": len(complete),
        "excluded": len(result.reached) - len(complete),
        "not_reached": result.unreached,
        "rows": len(result.rows),
    }


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table("method", "tokens/s, with prefill", "tokens per pass", "same tokens as hf")
    for label, own in figures.items():
        speed, length, same = (own[key] for key in ("tokens_per_second", "mean_accepted_length", "exact_match"))
        table.add_row(
            escape(label),
            "–" if speed is None else f"{speed:.1f}",
            "–" if length is None else f"{length:.2f}",
            "–" if same is None else f"{same:.0%}",
        )
    return table
