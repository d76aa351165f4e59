"""`treedec synth`: the text that heads are trained on, in the words of their target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from treedec.cli.options import DeviceOption, Dtype, DtypeOption, JsonOption, TargetOption, load
from treedec.cli.run import Interrupted, print_json

if TYPE_CHECKING:
    from treedec.training.synth_file import Written

_LEFT = ("duplicates", "too_long", "broken")  # what `Written` counts that is not in the file


def synth(
    out: Annotated[Path, typer.Option(help="JSONL file; one that exists is continued.", show_default=False)],
    target: TargetOption = "demo",
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Answer these instead of asking, too: a file of JSON lines or of a prompt a line, or a data set (NAME "
            "or NAME:CONFIGURATION).",
            show_default="none",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Which split of a data set of prompts.")] = "train",
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Stop after the batch that reaches this many tokens.",
            show_default="1000000; all that the prompts make",
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Most tokens of a conversation.", show_default="512; 1024 with prompts")
    ] = None,
    rows: Annotated[int, typer.Option(help="Conversations that are written at a time.")] = 128,
    turns: Annotated[
        int | None, typer.Option(help="Most answers of a conversation.", show_default="as many as fit")
    ] = None,
    question_temperature: Annotated[
        float | None, typer.Option(help="Temperature of the user turns.", show_default="0.8")
    ] = None,
    question_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one question.", show_default="160")
    ] = None,
    opened: Annotated[
        float | None,
        typer.Option(
            help="Share of the conversations whose first words are from a list of kinds of requests.",
            show_default="0.75",
        ),
    ] = None,
    answer_temperatures: Annotated[
        list[str] | None,
        typer.Option(
            help="Temperatures of the answers, in turn: repeat the option or separate with commas.",
            show_default="0,0.7,0,1",
        ),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the whole run.")] = 0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out prompts that cannot be read, instead of stopping there.")
    ] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a model write the conversations that its heads are trained on."""
    given: dict[str, Any] = {
        "tokens": tokens, "length": length, "rows": rows, "turns": turns, "answer_tokens": answer_tokens, "seed": seed,
        "answer_temperatures": _numbers("--answer-temperatures", answer_temperatures or []) or None,
    }  # fmt: skip
    asking: dict[str, Any] = {
        "question_temperature": question_temperature,
        "question_tokens": question_tokens,
        "opened": opened,
    }
    given, asking = ({k: v for k, v in part.items() if v is not None} for part in (given, asking))
    write: Callable[..., Written]
    if prompts is None:
        from treedec.training.synth import SynthConfig, synthesize

        if skip_bad:
            raise ValueError("--skip-bad is about --prompts, and there are none")
        write = partial(synthesize, config=SynthConfig(**given, **asking))
    else:
        from treedec.training.prompts import PromptSource
        from treedec.training.synth_answers import AnswerConfig, answer_prompts

        if asking:
            raise ValueError(f"--{next(iter(asking)).replace('_', '-')} is about questions, which --prompts gives")
        write = partial(
            answer_prompts, source=PromptSource(prompts, split), config=AnswerConfig(**given, skip_bad=skip_bad)
        )
    model, tokenizer = load(target, dtype, device)
    started = time.perf_counter()
    try:
        written = write(model, tokenizer, path=out, console=Console(stderr=True))
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted; {out} keeps all whole batches: run the same again to go on") from error
    if as_json:
        print_json({"out": str(out), **asdict(written), "seconds": round(time.perf_counter() - started, 2)})
    else:
        left = [
            f"{count} {what.replace('_', ' ')}" for what, count in asdict(written).items() if what in _LEFT and count
        ]
        said = f" ({', '.join(left)} left out)" if left else ""
        print(f"{out}: {written.conversations} conversations, {written.tokens} tokens{said}")


def _numbers(option: str, values: Sequence[str]) -> tuple[float, ...]:
    """Numbers given one by one, separated by commas, or both."""
    try:
        return tuple(float(part) for value in values for part in value.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{option} takes numbers, not {','.join(values)!r}") from None
