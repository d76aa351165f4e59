"""`treedec generate`: continue a prompt, and print the text as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treedec.cli.options import CompileOption, DeviceOption, Dtype, DtypeOption, JsonOption, TargetOption, load
from treedec.cli.run import print_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    if compile:  # in the first rounds, which are not to be timed; the same seed makes the same first trees
        torch.manual_seed(seed)
        treedec.generate(engine, ids, drafts, max_new_tokens=min(32, max_new_tokens), **arguments)
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
        print_json(result)
    else:
        print(rest)
        print(
            f"[{stats.new_tokens} tokens in {seconds:.1f} s, {result['tokens_per_second']:.1f} a second; "
            f"{stats.mean_accepted_length:.2f} tokens a pass; drafts: {drafts.name}; acceptance: {rule.name}"
            f"{'' if rule.lossless else ', not lossless'}]",
            file=sys.stderr,
        )


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
