"""`treedec train`: draft heads for a target, from data that is given or that the target writes itself."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from treedec.cli.options import DeviceOption, Dtype, DtypeOption, JsonOption, TargetOption, load
from treedec.cli.run import Interrupted, print_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from treedec.training.config import TrainConfig
    from treedec.training.contracts import Corpus

_OWN_TOKENS, _OWN_LENGTH = 400_000, 256


class Labels(StrEnum):
    """What heads imitate."""

    soft = "soft"
    hard = "hard"


class States(StrEnum):
    """Where the target's hidden states come from."""

    stored = "stored"
    online = "online"


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run; the heads go to OUT/heads.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            help="A file of conversations (JSON lines with messages, conversations, text or input_ids; .parquet; .txt) "
            "or a data set on the hub.",
            show_default="the target writes OUT/data.jsonl itself",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="medusa, medusa2, hydra, recurrent, eagle, eagle3 or draft-model.", show_default="medusa"),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the method, such as heads=3; may be repeated.", show_default="none"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of options; those given here count instead.", show_default="none")
    ] = None,
    target: TargetOption = "demo",
    tokens: Annotated[
        int | None, typer.Option(help="Tokens that the target writes, without --data.", show_default="400000")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="How samples look: tokens, messages, sharegpt or text.", show_default="what the first one has"
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a data set; not for single files.", show_default="train")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut conversations after so many tokens.", show_default="not at all")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Read so many tokens of the data.", show_default="all")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave broken samples out, instead of stopping there.")
    ] = False,
    initial_heads: Annotated[
        Path | None,
        typer.Option(help="Heads of the same shape to go on from, with other data.", show_default="random weights"),
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Tokens that can be drafted.", show_default="8192")
    ] = None,
    labels: Annotated[
        Labels | None,
        typer.Option(help="Imitate the target's distributions or the tokens of the text.", show_default="soft"),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", show_default="4")] = None,
    max_steps: Annotated[int | None, typer.Option(help="End after so many steps.", show_default="none")] = None,
    pack_tokens: Annotated[
        int | None, typer.Option(help="Tokens that are computed together.", show_default="2048")
    ] = None,
    packs_per_step: Annotated[
        int | None, typer.Option(help="Packs per step, of all processes together.", show_default="1")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="After the warm-up; a cosine takes it to zero.", show_default="what suits the method"),
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations.", show_default="an epoch")] = None,
    eval_nodes: Annotated[
        int | None, typer.Option(help="Nodes of the tree that is simulated.", show_default="16")
    ] = None,
    features: Annotated[
        States | None,
        typer.Option(help="Store the target's hidden states, or compute them in each step.", show_default="stored"),
    ] = None,
    features_folder: Annotated[
        Path | None,
        typer.Option(help="Where they are stored; runs on the same data can share them.", show_default="OUT/features"),
    ] = None,
    holdout: Annotated[
        float | None, typer.Option(help="Fraction of the conversations kept for evaluation.", show_default="0.03")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the whole run.", show_default="0")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.", show_default="50")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would take, and write nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with an interrupted run in OUT.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again where OUT has a run.")] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train draft heads for a target; the target itself stays as it is.

    Without data, the target writes its own: the one command then does everything. On several processes: `accelerate
    launch --module treedec train …`, or torchrun, with data that is there.
    """
    reading = {
        "format": format,
        "split": split,
        "max_length": max_length,
        "max_tokens": max_tokens,
        "skip_bad": skip_bad or None,
    }
    reading = {name: value for name, value in reading.items() if value is not None}
    if data is None and reading:
        raise ValueError(f"--{next(iter(reading)).replace('_', '-')} is about --data, and there is none")
    if data is not None and tokens is not None:
        raise ValueError("--tokens is for a target that writes its own text; with --data there is --max-tokens")
    try:
        from treedec.training import runs, trainer
        from treedec.training.plan import plan, render
    except ModuleNotFoundError as error:
        raise ValueError(f"training needs {error.name}: pip install 'treedec[train]'") from error

    given = {
        "method": method,
        "options": _options(option or []) or None,
        "initial_heads": initial_heads and str(initial_heads),
        "draft_vocab_size": draft_vocab_size,
        "labels": labels and labels.value,
        "epochs": epochs,
        "max_steps": max_steps,
        "pack_tokens": pack_tokens,
        "packs_per_step": packs_per_step,
        "learning_rate": learning_rate,
        "eval_every": eval_every,
        "eval_nodes": eval_nodes,
        "features": features and features.value,
        "features_folder": features_folder and str(features_folder),
        "holdout": holdout,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
    }
    settings = _settings(config, {name: value for name, value in given.items() if value is not None})
    if data is None and _processes() > 1:
        raise ValueError("several processes need --data; let one process write it first: `treedec synth`")
    if data is None and dry_run:
        raise ValueError("--dry-run needs --data; `treedec synth --out data.jsonl` writes some")
    if not dry_run:
        runs.check_folder(out, resume, overwrite)  # before anything is computed
    model, tokenizer = load(target, dtype, _own_device(device, settings.shard_target))
    started = time.perf_counter()
    console = Console(stderr=True)
    try:
        if data is None:
            tokens = _OWN_TOKENS if tokens is None else tokens
            trainer.check(model, tokenizer, settings)
            data = _own_text(model, tokenizer, out, tokens, settings.seed, overwrite, console)
            reading = {"max_tokens": tokens}  # there may be more, from another run in this folder
        corpus = _corpus(data, model, tokenizer, reading)
        if dry_run:
            planned = plan(model, corpus, settings, _processes(), tokenizer)
            print_json(planned) if as_json else Console().print(render(planned), highlight=False)
            return
        measured = trainer.train(
            model, tokenizer, corpus, out, settings, resume=resume, overwrite=overwrite, console=console
        )
    except runs.TrainingInterrupted as error:
        raise Interrupted(str(error)) from error
    # A full disk, and a library that only some methods need, are for the user to mend as well.
    except (runs.TrainingDiverged, OSError, ImportError) as error:
        raise ValueError(str(error)) from error
    if os.environ.get("RANK", "0") != "0":
        return  # one of several processes speaks
    folder = out / runs.HEADS_FOLDER
    if as_json:
        print_json({"out": str(folder), "seconds": round(time.perf_counter() - started, 2), **measured})
        return
    greedy = measured["accepted_length_greedy"]
    print(
        f"{folder}: {settings.method}, mean accepted length {measured['accepted_length']:.2f} on held-out text "
        f"({'none of it greedy' if greedy is None else f'{greedy:.2f} where it is greedy'}; simulated, "
        f"{settings.eval_nodes} nodes)"
    )
    if (folder / "adapter").is_dir():
        print(f"these heads draft for the target with {folder / 'adapter'} merged into it: see docs/training.md")


def _settings(path: Path | None, given: dict[str, Any]) -> TrainConfig:
    from treedec.training.config import TrainConfig

    return TrainConfig(**given) if path is None else TrainConfig.from_yaml(path, **given)


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; values as in YAML, so that 3, 0.5, true and [2, 15, 27] are what they look like."""
    import yaml

    from treedec.training.config import Loader

    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ValueError(f"--option takes NAME=VALUE, not {pair!r}")
        try:
            options[name] = yaml.load(value, Loader)
        except yaml.YAMLError:
            raise ValueError(f"--option {name}: {value!r} is no value") from None
    return options


def _own_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    tokens: int,
    seed: int,
    overwrite: bool,
    console: Console,
) -> str:
    """A file of conversations that the target has written, finished if it was begun.

    Whatever is there and fits is kept, also to start a run again: it would be written as it is.
    """
    from treedec.training.runs import DATA_FILE, STATE_FILE
    from treedec.training.synth import SynthConfig, Synthesizer, synthesize

    path, config = out / DATA_FILE, SynthConfig(tokens=tokens, length=_OWN_LENGTH, seed=seed)
    held = _held(path, Synthesizer(model, tokenizer, config).origin, overwrite)
    if (out / STATE_FILE).exists() and not overwrite and held is not None and held < tokens:
        raise ValueError(
            f"the run in {out} was begun with fewer tokens: {path} holds {held}, not {tokens}; give the --tokens of "
            "that run, or --overwrite to start again with more"
        )
    try:
        synthesize(model, tokenizer, path, config, console=console)
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted; {path} keeps all whole batches: run the same again to go on") from error
    return str(path)


def _held(path: Path, origin: str, overwrite: bool) -> int | None:
    """How many tokens of an origin a file holds, None where there is none; to overwrite, one of another is removed.

    Raises:
        ValueError: it holds something else, and is not to be overwritten or was not written here.
    """
    from treedec.training.synth_file import BatchFile

    if not path.exists():
        return None
    try:
        return BatchFile(path, origin).tokens
    except ValueError as error:
        with path.open("rb") as file:
            ours = re.match(rb'{"origin": "[0-9a-f]{16}", ', file.read(64)) is not None
        if not (ours and overwrite):
            raise ValueError(f"{error}{', or --overwrite to start again' if ours else ''}") from error
    path.unlink()
    return None


def _corpus(data: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reading: dict[str, Any]) -> Corpus:
    from treedec.target import Target
    from treedec.training.data import read_corpus

    target = Target(model)
    return read_corpus(data, tokenizer, vocab_size=target.vocab_size, context_length=target.context_length, **reading)


def _processes() -> int:
    """How many were launched together, as torchrun and accelerate say it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _own_device(device: str | None, sharded: bool) -> str | None:
    """Each of several processes on a machine with GPUs has one of its own, unless the user says where.

    A target that is to be sharded fits none of them as a whole: it waits in the memory of the CPU.
    """
    import torch

    if device is None and sharded:
        return "cpu"
    if device is None and _processes() > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device
