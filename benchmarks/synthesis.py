"""How much of a model's own speed synthesis reaches.

    python -m treedec.benchmarks.synthesis --rows 128 --length 128

writes batches of conversations, or of answers with `--prompts`, and after each lets the model read as many rows of the
same length, with the cache that transformers gives it: what every row is given at once, then one column at a time,
without sampling, template or mask. Both are timed in every round, so that what else the machine does hits both; the
last line of standard output is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from treedec.cli import DeviceOption, Dtype, TargetOption, load, run_app
from treedec.target import Target
from treedec.training.prompts import Prompt, PromptSource
from treedec.training.synth import SynthConfig, Synthesizer
from treedec.training.synth_answers import AnswerConfig, Answerer

_NAME = "python -m treedec.benchmarks.synthesis"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code; `arguments` defaults to those of the process."""
    return run_app(app, _NAME, arguments)


@app.command()
def command(
    prompts: Annotated[
        str | None, typer.Option(help="Answer these instead, as for synth.", show_default="the model asks, too")
    ] = None,
    target: TargetOption = "demo",
    rows: Annotated[int, typer.Option(min=1, help="Rows of a pass.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Most tokens of a conversation.")] = 128,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 96,
    conversations: Annotated[
        int | None, typer.Option(min=1, help="Prompts of one round.", show_default="four a row")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often both are timed.")] = 3,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the target.")] = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """Time synthesis and the model's own forward passes in turn."""
    model, tokenizer = load(target, dtype, device)
    if prompts is None:
        config = SynthConfig(length=length, rows=rows, answer_tokens=answer_tokens)
        asking = Synthesizer(model, tokenizer, config)
        batch: Callable[[int], list[dict[str, Any]]] = asking.batch
        given = len(asking.template.opening)
    else:
        answers = AnswerConfig(length=length, rows=rows, answer_tokens=answer_tokens)
        batch, given = _answering(model, tokenizer, prompts, answers, conversations or 4 * rows)
    measured: dict[str, list[float]] = {"synthesis": [], "forward": []}
    for index in range(rounds):
        seconds, samples = _timed(partial(batch, index), model.device)
        lengths = [len(sample["input_ids"]) for sample in samples]
        measured["synthesis"].append(sum(lengths) / seconds)
        seconds, read = _timed(partial(_forward, model, rows, given, max(lengths)), model.device)
        measured["forward"].append(read / seconds)
        print(
            f"round {index}: synthesis {measured['synthesis'][-1]:.0f} tokens/s, "
            f"forward {measured['forward'][-1]:.0f} tokens/s",
            flush=True,
        )
    ratios = [ours / own for ours, own in zip(measured["synthesis"], measured["forward"], strict=True)]
    figures = {name: round(statistics.median(values), 1) for name, values in measured.items()}
    print(json.dumps({**figures, "ratio": round(statistics.median(ratios), 3), "rows": rows, "rounds": rounds}))


def _answering(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, config: AnswerConfig, count: int
) -> tuple[Callable[[int], list[dict[str, Any]]], int]:
    """What answers the first prompts of a source that can be read and leave room, drawn anew for every index, and the
    tokens of the shortest."""
    writer = Answerer(model, tokenizer, config)
    readable = (prompt for prompt in PromptSource(source) if isinstance(prompt, Prompt))
    scripts = ((prompt, writer.chat.script(prompt, None)) for prompt in readable)
    window = list(islice(((prompt, script) for prompt, script in scripts if len(script[0]) < config.length), count))
    if not window:
        raise ValueError(f"{source}: no prompt to answer")
    return lambda index: writer.batch(index, window), min(len(script[0]) for _, script in window)


@torch.inference_mode()
def _forward(model: PreTrainedModel, rows: int, given: int, columns: int) -> int:
    """Let the model read columns, the first `given` at once, then one by one; returns how many tokens they are."""
    target = Target(model)
    arguments: dict[str, Any] = {"use_cache": True, target.cache_argument: DynamicCache(config=model.config)}
    if target.keeps_logits:
        arguments["logits_to_keep"] = 1
    for width in [given, *[1] * (columns - given)]:
        model(input_ids=torch.ones(rows, width, dtype=torch.long, device=model.device), **arguments)
    return rows * columns


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


if __name__ == "__main__":
    sys.exit(main())
