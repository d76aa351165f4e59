"""`treedec bench` as a function: from what was asked for to the result file."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import treedec
from treedec import benchmarks, heads
from treedec.benchmarks.distributions import expectations
from treedec.benchmarks.methods import (
    DRAFT_TOKENS,
    Engine,
    Kind,
    Method,
    conditions_of,
    parse_methods,
    public_name,
    weights_digest,
)
from treedec.benchmarks.peers.names import PEERS_FOLDER, check_installed
from treedec.benchmarks.prompts import BUNDLED, Prompt, read_prompts
from treedec.benchmarks.record import check_writable, processor
from treedec.benchmarks.results import Condition, Expectation, Result, read_result, write_result
from treedec.benchmarks.runner import Journal, Measured, Run, Unit, cost_curve, prompts_digest, units_of
from treedec.heads import load_draft_model
from treedec.models import DEMO, Fingerprint, on_device
from treedec.stats import DecodingStats
from treedec.target import Target


@dataclass(frozen=True)
class BenchConfig:
    """What to measure.

    Attributes:
        out: the result file.
        target: what `treedec.load_target` takes, as a name; the model itself comes separately.
        methods: see `parse_methods`.
        temperatures, acceptance, batch_sizes: see `conditions_of`.
        prompts: a file; None for the bundled ones. `categories` and `limit` as in `read_prompts`.
        rounds: how often all of it is decoded.
        minutes: stop measuring after so many and write the result of what there is, of whole rounds if there is one;
            None measures all. The same run goes on from there.
        max_new_tokens: per prompt.
        seed: that of every decode derives from it.
        draft_model: folder of a small causal LM, for the methods that need one.
        draft_tokens: what these draft per pass, unless their name says otherwise.
        threads: of the CPU; None leaves them as they are.
        costs: whether to measure what a pass costs by the size of its tree, too.
        expected: whether to compute how often each acceptance rule should accept, too, at temperatures above 0.
        peers_folder: where the environments of peers lie.
        overwrite: replace a result that is there, or another run's journal.
        command: what was typed, as it may be published.
    """

    out: Path
    target: str = DEMO
    methods: Sequence[str] = ("hf", "ar", "ngram")
    temperatures: Sequence[float] = (0.0,)
    acceptance: Sequence[str] = ("coupled",)
    batch_sizes: Sequence[int] = (1,)
    prompts: Path | None = None
    categories: Sequence[str] = ()
    limit: int | None = None
    rounds: int = 1
    minutes: float | None = None
    max_new_tokens: int = 128
    seed: int = 0
    draft_model: Path | None = None
    draft_tokens: int = DRAFT_TOKENS
    threads: int | None = None
    costs: bool = True
    expected: bool = True
    peers_folder: Path = PEERS_FOLDER
    overwrite: bool = False
    command: str = "treedec bench"

    @property
    def journal(self) -> Path:
        """Where an unfinished run is kept."""
        return self.out.with_name(self.out.name + ".partial.jsonl")


def bench(
    config: BenchConfig,
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    console: Console | None = None,
) -> Result:
    """Run a benchmark, or what is left of it, and write its result.

    Where `config.minutes` ended it, the result is `unfinished`, and the journal stays.

    Args:
        config: what to measure; all of it is checked before anything is loaded.
        load: loads the target.
        console: shows progress.

    Raises:
        ValueError: a mistake in the configuration or in a file that it names.
        OSError: a file cannot be read or written.
        BenchmarkDefect: see `Run.measure`.
    """
    methods = parse_methods(config.methods, config.target)
    conditions = conditions_of(methods, config.temperatures, config.acceptance, config.batch_sizes)
    _check_draft_model(config, methods)
    check_installed(config.peers_folder, [str(method.source) for method in methods if method.kind is Kind.PEER])
    prompts = read_prompts(config.prompts, config.categories, config.limit)
    units = units_of(prompts, config.batch_sizes)
    check_writable(config.out)
    if config.out.exists() and not config.overwrite and not _unfinished(config):
        raise ValueError(f"{config.out} is there already: give --overwrite to replace it, or another --out")
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    model, tokenizer = load()
    draft_model = None
    if config.draft_model is not None:
        draft_model = on_device(load_draft_model(config.draft_model, model.dtype), model.device).eval()
    engine = Engine(
        model,
        tokenizer,
        max_new_tokens=config.max_new_tokens,
        draft_model=draft_model,
        draft_tokens=config.draft_tokens,
        peers_folder=config.peers_folder,
    )
    try:
        return _measured(config, engine, conditions, prompts, units, console)
    finally:
        engine.close()


def _measured(
    config: BenchConfig,
    engine: Engine,
    conditions: Sequence[tuple[Condition, Method]],
    prompts: Sequence[Prompt],
    units: Sequence[Unit],
    console: Console | None,
) -> Result:
    model = engine.model
    run = Run(engine, conditions, units, rounds=config.rounds, seed=config.seed)
    ids = [engine.encode([prompt]).ids for prompt in prompts]
    about = {
        "machine": machine_facts(model.device),
        "versions": {**versions(), **engine.peers.versions},
        "target": target_facts(config.target, model, ids[0]),
        "settings": {**settings(config, prompts), "weights": _weights(engine)},
    }
    identity = {
        **about,
        "conditions": [condition.label for condition in run.conditions],
        # With their folders, of which the result keeps the last part only.
        "methods": list(config.methods),
        "draft_model": str(config.draft_model),
    }
    journal = Journal(config.journal, identity)
    done = journal.open(config.overwrite)
    if len(done) < len(units) * config.rounds:
        run.warm_up()
    left = len(units) * config.rounds - len(done)
    started = time.monotonic()
    for turn, place, measured in track(
        run.measure(done), description="measuring", total=left, console=console, disable=console is None
    ):
        journal.append(turn, place, measured)
        if config.minutes is not None and time.monotonic() - started >= 60 * config.minutes:
            break
    costs = None
    if config.costs:
        engine.close()  # peers are done
        # Half-way through the answer to the median prompt.
        context = int(median(each.shape[1] for each in ids)) + config.max_new_tokens // 2
        costs = cost_curve(Target(model), engine.clock, ids[0], context)
    expected: tuple[Expectation, ...] = ()
    if config.expected:
        engine.close()
        temperatures = [temperature for temperature in config.temperatures if temperature > 0]
        with nullcontext() if console is None else console.status("computing what each rule should accept"):
            expected = expectations(Target(model), engine.drafters, ids, temperatures, config.seed)
    kept = _whole_rounds(done, len(units))
    result = Result(
        command=config.command,
        **about,
        conditions=tuple(run.conditions),
        rows=tuple(row for measured in kept for row in measured.rows),
        failures=tuple(failure for measured in kept for failure in measured.failures),
        costs=costs,
        expected=expected,
    )
    write_result(config.out, result)
    if len(done) == len(units) * config.rounds:
        journal.remove()
    return result


def _whole_rounds(done: dict[tuple[int, int], Measured], units: int) -> list[Measured]:
    """What was measured, in order: of whole rounds, or of as much as there is of the first.

    Part of a further round would take all other prompts out of the result, of which only those count that were decoded
    in every round.
    """
    rounds = max(1, len(done) // units)
    return [done[key] for key in sorted(done) if key[0] < rounds]


def _unfinished(config: BenchConfig) -> bool:
    """Whether the result that is there is of a run whose journal is there, too, and may be replaced by more of it."""
    if not config.journal.exists():
        return False
    try:
        return read_result(config.out).unfinished
    except ValueError:
        return False


def _check_draft_model(config: BenchConfig, methods: Sequence[Method]) -> None:
    need = [method.name for method in methods if method.kind.needs_draft_model]
    if need and config.draft_model is None:
        raise ValueError(f"method {need[0]!r} needs --draft-model FOLDER")
    if config.draft_model is not None and not any(method.takes_draft_model for method in methods):
        raise ValueError("--draft-model is given, and none of the methods needs it")
    if config.draft_model is not None and not config.draft_model.is_dir():
        raise FileNotFoundError(f"--draft-model {config.draft_model} is no folder")


def settings(config: BenchConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What decides a run besides its conditions, in plain values; of files their names and what they hold."""
    path = config.prompts or BUNDLED
    return {
        "seed": config.seed,
        "rounds": config.rounds,
        "max_new_tokens": config.max_new_tokens,
        "prompts": {
            "file": path.name,
            "bundled": config.prompts is None,
            "categories": list(config.categories),
            "limit": config.limit,
            "count": len(prompts),
            "digest": prompts_digest(prompts),
        },
        "draft_model": None if config.draft_model is None else public_name(str(config.draft_model)),
        "draft_tokens": config.draft_tokens,
        "costs": config.costs,
    }


def _weights(engine: Engine) -> dict[str, str]:
    """Digests of what drafts, by the name of its method: heads may be trained anew in the same folder."""
    found = {name: weights_digest(drafter) for name, drafter in engine.drafters}
    if engine.draft_model is not None:
        found["draft model"] = weights_digest(engine.draft_model)
    return {name: digest for name, digest in found.items() if digest != weights_digest(None)}


@torch.no_grad()
def target_facts(name: str, model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """Name, dtype and shape of a target, a few of its weights, which tell it from others of that shape, and how large
    its largest logits are after `[1, L]` ids: the power of two below the median of their magnitudes."""
    fingerprint = Fingerprint.of(model)
    largest = float(model(ids).logits[0].float().amax(-1).abs().median())
    return {
        "name": Path(name).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": model.config.get_text_config()._attn_implementation,
        "logits": 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0,
        **fingerprint.to_dict(),
        "sample": list(fingerprint.sample),
    }


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Processor, the widest instructions that torch uses on it, threads, device and system."""
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "system": platform.platform(),
    }


def versions() -> dict[str, Any]:
    """Of treedec and of what its speed depends on."""
    return {
        "treedec": treedec.__version__,
        "sources": sources_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


# Modules that tell of a result, and take no part in it.
_TELLING = ("report.py", "plots.py", "markdown.py", "losses.py", "statistics.py", "theory.py")


@cache
def sources_digest() -> str:
    """Hex blake2b of 8 bytes over the code that decodes and measures: rows of other code are another run's."""
    packages = [Path(str(module.__file__)).parent for module in (treedec, heads, benchmarks)]
    files = {path.resolve(): path.name for package in packages for path in package.rglob("*.py")}
    digest = blake2b(digest_size=8)
    for path in sorted(files):
        if path.name not in _TELLING and not {"cli", "training"} & set(path.parts[-2:-1]):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def summary(result: Result) -> dict[str, dict[str, Any]]:
    """Pooled figures of each condition by its label, over the prompts that count; None where there is nothing to tell.

    Reports say more, with intervals: see `treedec.benchmarks.report`.
    """
    rows = result.complete_rows()
    figures: dict[str, dict[str, Any]] = {}
    for index, condition in enumerate(result.conditions):
        own = [row for row in rows if row.condition == index]
        seconds, compared = sum(row.seconds for row in own), [row.matches for row in own if row.matches is not None]
        stats = DecodingStats.merged(
            [DecodingStats(row_passes=row.passes or 0, accepted_lengths=row.accepted_lengths or {}) for row in own]
        )
        figures[condition.label] = {
            "new_tokens": sum(row.new_tokens for row in own),
            "seconds": seconds,
            "tokens_per_second": sum(row.new_tokens for row in own) / seconds if seconds else None,
            "mean_accepted_length": stats.mean_accepted_length if stats.row_passes else None,
            "exact_match": sum(compared) / len(compared) if compared else None,
        }
    return figures
