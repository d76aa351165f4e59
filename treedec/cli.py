"""The command line: `treedec generate | synth | train | demo | check | convert | inspect`.

Knows arguments, terminals and exit codes; what the commands do lies in the modules they import. Those imports are
inside the commands, so that `--help` and a mistyped option answer at once instead of after loading torch.

Results go to standard output, everything else (progress, statistics, errors) to standard error. With `--json` the last
line of standard output is one JSON object. Exit codes: 0, 1 for a model that `check` refuses, 2 for a mistake in the
input (one line, no traceback), 130 for Ctrl-C.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REFUSED = 1
_BAD_INPUT = 2
_INTERRUPTED = 130
# What the library raises for mistakes of its caller. Its own exceptions derive from ValueError.
_USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
# click's UsageError, or that of the copy of click inside newer versions of typer: every mistyped option is one.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    help="Generate text faster with any Hugging Face causal LM, without changing what it says.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Interrupted(Exception):
    """Ctrl-C where there is something to say about what was kept."""


class Dtype(StrEnum):
    """Dtypes by their name on the command line."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Method(StrEnum):
    """Kinds of heads that can be trained."""

    medusa = "medusa"


class Format(StrEnum):
    """Formats that heads can be written in: the keys of `treedec.heads.formats.WRITERS`."""

    treedec = "treedec"
    vllm_medusa = "vllm-medusa"
    eagle3 = "eagle3"
    speculators = "speculators"


TargetOption = Annotated[str, typer.Option(help="'demo', a model folder, or the name of a model on the hub.")]
HeadsTargetOption = Annotated[
    str | None,
    typer.Option(
        help="The model the heads are for, as for generate; needed where a format leaves something to it.",
        show_default="none",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Where the target runs, such as cpu or cuda:1.", show_default="the GPU if there is one, else cpu"
    ),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of the target; 'auto' is that of its stored weights.")]
CompileOption = Annotated[bool, typer.Option("--compile", help="Compile the target's passes first (takes minutes).")]
JsonOption = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `arguments` defaults to those of the process."""
    return run_app(app, "treedec", arguments)


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line that goes by a name, with the exit codes and one-line errors described above."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(list(arguments) or ["--help"], prog_name=name, standalone_mode=False) or 0
    except _UsageError as error:
        return _say(f"error: {error.format_message()}", _BAD_INPUT)
    except _USER_ERRORS as error:
        return _say(f"error: {error}", _BAD_INPUT)
    except _Interrupted as error:
        return _say(str(error), _INTERRUPTED)
    except typer.Abort:  # how older versions of typer tell of Ctrl-C; newer ones return the exit code
        code = _INTERRUPTED
    return _say("interrupted", _INTERRUPTED) if code == _INTERRUPTED else code


def _say(message: str, code: int) -> int:
    """Print one line, whatever line breaks the message has, and return the exit code."""
    print("treedec:", " ".join(message.split()), file=sys.stderr)
    return code


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(help="What to ask, or '-' to read it from standard input.", show_default=False)
    ],
    target: TargetOption = "demo",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="'demo', a folder of heads or of a draft model, 'ngram', or 'none' for plain decoding.",
            show_default="demo for the demo target, else ngram",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 decodes greedily.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.", show_default="the model's own")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Top-k sampling; 0 for all tokens.", show_default="the model's own")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling: the same seed gives the tokens of model.generate.")] = 0,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="'greedy', 'coupled', 'residual', 'traversal', or 'typical' (not lossless).",
            show_default="greedy, or coupled when sampling",
        ),
    ] = None,
    tree_size: Annotated[
        int | None,
        typer.Option(min=1, help="Nodes of a token tree, its root included.", show_default="the drafter's own"),
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    compile: CompileOption = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt, printing the text as it comes."""
    # The line break that ends a piped text is not part of what is asked.
    prompt = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if temperature == 0 and (top_p is not None or top_k is not None):
        raise ValueError("--top-p and --top-k need sampling: give a --temperature above 0")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature > 0 else {}

    model, tokenizer = load(target, dtype, device)
    import torch

    import treedec
    from treedec.acceptance import acceptance_rule
    from treedec.models import encode_chat, encode_text

    ids = (encode_text if raw else encode_chat)(tokenizer, prompt).to(model.device)
    name = drafter if drafter is not None else ("demo" if target == "demo" else "ngram")
    drafts = treedec.load_drafter(name, model, tree=tree_size)
    rule = acceptance_rule(acceptance, do_sample=temperature > 0)
    engine = treedec.Target(model, compile=compile)
    arguments: dict[str, Any] = {"acceptance": rule, "do_sample": temperature > 0}
    arguments.update((key, value) for key, value in sampling.items() if value is not None)
    if compile:  # at the first pass, which is not to be timed; the same seed makes the same first trees
        torch.manual_seed(seed)
        treedec.generate(engine, ids, drafts, max_new_tokens=min(8, max_new_tokens), **arguments)
    torch.manual_seed(seed)
    started = time.perf_counter()
    blocks = treedec.stream(engine, ids, drafts, max_new_tokens=max_new_tokens, **arguments)
    text, stats = IncrementalText(tokenizer), treedec.DecodingStats()
    for block in blocks:
        stats.count(block)
        piece = text.push(block.tokens[0])
        if not as_json:
            print(piece, end="", flush=True)
    rest = text.finish()
    seconds = time.perf_counter() - started
    result = {
        "text": text.text,
        "new_tokens": stats.new_tokens,
        "target_passes": stats.target_passes,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(stats.new_tokens / seconds, 2),
        "mean_accepted_length": round(stats.mean_accepted_length, 4),
        "method": drafts.name,
        "acceptance": rule.name,
        "lossless": rule.lossless,
    }
    if as_json:
        _print_json(result)
    else:
        print(rest)
        print(
            f"[{stats.new_tokens} tokens in {seconds:.1f} s, {result['tokens_per_second']:.1f} a second; "
            f"{stats.mean_accepted_length:.2f} tokens a pass; drafts: {drafts.name}; acceptance: {rule.name}"
            f"{'' if rule.lossless else ', not lossless'}]",
            file=sys.stderr,
        )


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="JSONL file; one that exists is continued.", show_default=False)],
    target: TargetOption = "demo",
    tokens: Annotated[int, typer.Option(help="Stop after the batch that reaches this many tokens.")] = 1_000_000,
    length: Annotated[int, typer.Option(help="Tokens per conversation.")] = 512,
    rows: Annotated[int, typer.Option(help="Conversations per batch.")] = 128,
    question_temperature: Annotated[float, typer.Option(help="Temperature of the user turns.")] = 1.0,
    answer_temperatures: Annotated[
        list[str] | None,
        typer.Option(
            help="Temperatures of the answers, in turn: repeat the option or separate with commas.",
            show_default="0,0.7,0,1",
        ),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the whole run.")] = 0,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let an instruct model write the conversations that its heads are trained on."""
    temperatures = _numbers("--answer-temperatures", answer_temperatures or [])
    from treedec.training.synth import SynthConfig, synthesize

    chosen = {"answer_temperatures": temperatures} if temperatures else {}
    config = SynthConfig(tokens, length, rows, answer_tokens, question_temperature, seed=seed, **chosen)
    model, tokenizer = load(target, dtype, device)
    started = time.perf_counter()
    try:
        written = synthesize(model, tokenizer, out, config, console=Console(stderr=True))
    except KeyboardInterrupt as error:
        raise _Interrupted(f"interrupted; {out} keeps all whole batches: run the same again to go on") from error
    if as_json:
        seconds = round(time.perf_counter() - started, 2)
        _print_json({"out": str(out), "tokens": written, "conversations": written // length, "seconds": seconds})
    else:
        print(f"{out}: {written // length} conversations, {written} tokens")


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Conversations, as written by synth.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the run; the heads go to OUT/heads.", show_default=False)],
    method: Annotated[Method, typer.Option(help="Kind of heads.")] = Method.medusa,
    target: TargetOption = "demo",
    heads: Annotated[int, typer.Option(help="Number of heads: the deepest tree they can draft.")] = 4,
    blocks: Annotated[int, typer.Option(help="Residual blocks per head.")] = 1,
    draft_vocab_size: Annotated[int, typer.Option(help="Tokens that can be drafted.")] = 8192,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 4,
    batch_positions: Annotated[int, typer.Option(help="Positions per step.")] = 4096,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up; a cosine takes it to zero.")] = 1e-3,
    warmup: Annotated[float, typer.Option(help="Fraction of the steps over which the learning rate rises.")] = 0.05,
    holdout: Annotated[float, typer.Option(help="Fraction of the conversations kept for evaluation.")] = 0.03,
    seed: Annotated[int, typer.Option(help="Seed of the data order.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with an interrupted run in OUT.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again where OUT has a run.")] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train draft heads for a target; the target itself stays as it is."""
    if not data.is_file():
        raise FileNotFoundError(f"no data file {str(data)!r}; `treedec synth` writes one")
    from treedec.training import trainer

    config = trainer.TrainConfig(
        method=method.value,
        heads=heads,
        blocks=blocks,
        draft_vocab_size=draft_vocab_size,
        epochs=epochs,
        batch_positions=batch_positions,
        learning_rate=learning_rate,
        warmup=warmup,
        holdout=holdout,
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    model, tokenizer = load(target, dtype, device)
    started = time.perf_counter()
    console = Console(stderr=True)
    try:
        measured: dict[str, Any] = trainer.train(
            model, tokenizer, data, out, config, resume=resume, overwrite=overwrite, console=console
        )
    except trainer.TrainingInterrupted as error:
        raise _Interrupted(str(error)) from error
    except trainer.TrainingDiverged as error:
        raise ValueError(str(error)) from error
    folder = out / trainer.HEADS_FOLDER
    if as_json:
        _print_json({"out": str(folder), "seconds": round(time.perf_counter() - started, 2), **measured})
    else:
        shares = " ".join(f"{share:.3f}" for share in measured["top1"])
        print(f"{folder}: held-out agreement with the target's own choice, per head: {shares}")


@app.command()
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
    _quiet_transformers()
    from treedec.demo import run
    from treedec.models import pick_device

    chosen = None if dtype is Dtype.auto else _torch_dtype(dtype)
    console = Console(stderr=as_json)
    result = run(drafter, max_new_tokens, seed, chosen, console, device=pick_device(device), compile=compile)
    if as_json:
        _print_json(result)


@app.command()
def check(
    model: Annotated[
        str, typer.Argument(help="'demo', a model folder, or the name of a model on the hub.", show_default=False)
    ],
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure whether a model scores token trees exactly; exit code 1 if it does not."""
    target, _ = load(model, dtype, device)
    from treedec.probe import report

    facts = report(target)
    if as_json:
        # JSON knows no NaN.
        _print_json({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()})
    else:
        Console().print(_check_table(facts), highlight=False)
    if not facts["supported"]:
        raise typer.Exit(_REFUSED)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A folder of heads, in any format that is read.", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    to: Annotated[Format, typer.Option(help="The format to write.", show_default=False)],
    target: HeadsTargetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace heads that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write draft heads in another format; their weights stay as they are."""
    _quiet_transformers()
    from treedec.heads.formats import detect, read, write

    model = None if target is None else load(target, Dtype.auto, "cpu")[0]
    stored = read(source, model)
    # "demo" is no name that others know.
    write(destination, stored, to.value, model, base=None if target == "demo" else target, overwrite=overwrite)
    if as_json:
        _print_json({"out": str(destination), "from": detect(source), "to": to.value, "method": stored.method})
    else:
        print(f"{destination}: {stored.method} heads as {to.value}")


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A folder of heads.", show_default=False)],
    target: HeadsTargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a folder of draft heads holds, and which formats it can be written in."""
    _quiet_transformers()
    from treedec.heads import formats

    facts = formats.inspect(path, None if target is None else load(target, Dtype.auto, "cpu")[0])
    if as_json:
        _print_json(facts)
    else:
        Console().print(_heads_table(facts), highlight=False)


def _heads_table(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    shape = {key: "the target's" if value is None else value for key, value in facts["shape"].items()}
    rows = {
        "format": facts["format"],
        "method": facts["method"],
        "shape": ", ".join(f"{key} {value}" for key, value in shape.items()),
        "target": f"{facts['base'] or 'not named'} ({facts['target'] or 'no fingerprint'})",
        "size": f"{facts['parameters']:,} parameters, {facts['bytes'] / 1e6:.1f} MB",
        **{f"as {name}": "yes" if reason is None else f"no: {reason}" for name, reason in facts["writes"].items()},
    }
    for label, value in rows.items():
        table.add_row(label, escape(value))
    return table


def _check_table(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "model": facts["model"],
        "runs in": f"{facts['dtype']} on {facts['device']}, {facts['attention']} attention",
    }
    if "window" in facts:
        limit, switch = facts["max_positions"], facts["rope_switch"]
        rows["window"] = "none" if facts["window"] is None else f"{facts['window']} tokens"
        rows["positions"] = f"no limit, made for {facts['context_length']}" if limit is None else f"at most {limit}"
        if switch is not None:
            rows["positions"] += f", other rotary frequencies from {switch['position']}"
    if "error" in facts:
        rows["deviation"] = f"{facts['error']:.1e} over a token tree ({facts['tolerance']:.1e} is rounding)"
        rows["noise"] = f"{facts['noise']:.1e} between two ways to read the same text"
        rows["control"] = f"{facts['control']:.1e} under a wrong mask"
    verdict = "exact" if facts["reason"] is None else facts["reason"]
    rows["verdict"] = verdict if facts["supported"] else f"refused: {verdict}"
    for label, value in rows.items():
        table.add_row(label, escape(value))
    return table


class IncrementalText:
    """Token ids to text, piece by piece; characters whose bytes are spread over several tokens come out whole.

    Decoding tokens one at a time loses the spaces between words in many tokenizers, so a piece is what the text gains
    when its tokens are decoded together with those of the piece before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._printed = 0  # the piece before starts and ends at these tokens
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._pieces)

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the new text, or nothing while its last character is incomplete."""
        self._ids += ids
        gained = self._gained()
        # A byte sequence that is cut short decodes to U+FFFD: more tokens may complete it.
        return "" if gained.endswith("\ufffd") else self._emit(gained)

    def finish(self) -> str:
        """What has been held back."""
        return self._emit(self._gained())

    def _gained(self) -> str:
        before = self._decode(self._ids[self._context : self._printed])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _emit(self, piece: str) -> str:
        if piece:
            self._context, self._printed = self._printed, len(self._ids)
            self._pieces.append(piece)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def load(target: str, dtype: Dtype, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer, as the options `--target`, `--dtype` and `--device` name them."""
    _quiet_transformers()
    from treedec.models import load_target, pick_device

    place = pick_device(device)
    return load_target(target, dtype="auto" if dtype is Dtype.auto else _torch_dtype(dtype), device=place)


def _torch_dtype(dtype: Dtype) -> torch.dtype:
    import torch

    return getattr(torch, dtype.value)


def _quiet_transformers() -> None:
    """Loading bars and advice would mix with the text; errors still come as exceptions."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _numbers(option: str, values: Sequence[str]) -> tuple[float, ...]:
    """Numbers given one by one, separated by commas, or both."""
    try:
        return tuple(float(part) for value in values for part in value.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{option} takes numbers, not {','.join(values)!r}") from None


def _print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, ensure_ascii=False))
