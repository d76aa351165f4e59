"""The public calls: `generate` as in transformers, the iterator `stream` under it, and `custom_generate` for theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from treedec.acceptance import AcceptanceRule, acceptance_rule
from treedec.arguments import Prepared, check_prompt, prepare, request, stop_string_criterion
from treedec.decode import Committed, Decoder
from treedec.drafter import Drafter, NoDrafts
from treedec.probe import ensure_exact
from treedec.stats import DecodingStats
from treedec.target import Target


@dataclass
class TreeDecoderOutput(ModelOutput):
    """What `generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: `[B, L]` int64, prompts and continuations, padded on the right like `model.generate`'s.
        scores: with `output_scores`, one `[B, V]` float32 per new token: the target's scores after all processors. Rows
            that have ended hold zeros.
        logits: with `output_logits`, one `[B, V]` float32 per new token: the target's raw logits, likewise.
        stats: counts of passes, tokens and accepted lengths, see `DecodingStats`.
        acceptance: name of the rule that ran.
        lossless: whether that rule keeps the target's output.
    """

    sequences: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    stats: DecodingStats | None = None
    acceptance: str | None = None
    lossless: bool | None = None


def generate(
    model: PreTrainedModel | Target,
    input_ids: Tensor,
    drafter: Drafter | None = None,
    *,
    acceptance: str | AcceptanceRule | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
    **generate_arguments: Any,
) -> Tensor | TreeDecoderOutput:
    """Generate like `model.generate(input_ids, …)`, several tokens per pass of the model.

    Greedy decoding returns the tokens of `model.generate`. Sampling (`do_sample=True`) returns, by default, the tokens
    that `model.generate` returns under the same `torch.manual_seed`, whatever the drafter. In 16-bit arithmetic a pass
    over several tokens rounds differently from a pass over one, so exact ties may fall differently there.

    Args:
        model: an unmodified causal LM, which is left as it was, or a `Target` around one.
        input_ids: `[B, L]` int64 prompts, left-padded if they differ in length (then give `attention_mask`).
        drafter: proposes token trees; None for plain decoding.
        acceptance: `"greedy"`, `"coupled"`, `"residual"`, `"traversal"` or the lossy `"typical"`, or a rule. Default:
            `greedy` without sampling, `coupled` with.
        seed: sample as after `torch.manual_seed(seed)`, without touching the default generator.
        generator: source of random numbers, on the model's device, in place of the default generator.
        streamer: gets the prompts, then one `[B]` of new ids after the other, as from `model.generate`.
        **generate_arguments: arguments of `model.generate` (`max_new_tokens`, `do_sample`, `temperature`,
            `stop_strings` with `tokenizer`, …). What does not apply to token trees is refused by name.

    Returns:
        `[B, L + new]` ids, or a `TreeDecoderOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: an empty prompt, ids beyond the vocabulary, a prompt past the model's context, an argument that
            does not apply, or a drafter that does not fit the model, before any pass; NaN or infinite logits when they
            occur, with their row and step.
    """
    target = _target(model)
    check_prompt(target, input_ids)
    prepared = prepare(target, input_ids, generate_arguments)
    return _output(_decoder(target, prepared, drafter, acceptance, seed, generator), prepared, streamer)


def stream(
    model: PreTrainedModel | Target,
    input_ids: Tensor,
    drafter: Drafter | None = None,
    *,
    acceptance: str | AcceptanceRule | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    **generate_arguments: Any,
) -> Iterator[Committed]:
    """The iterator under `generate`: committed token blocks as they come, one per pass of the target.

    Arguments and errors are those of `generate`; they are checked here, before the first block is asked for. The
    iterator may be abandoned at any time.
    """
    if generate_arguments.get("streamer") is not None:
        raise ValueError("streamer goes with generate; stream itself hands out the tokens")
    target = _target(model)
    check_prompt(target, input_ids)
    prepared = prepare(target, input_ids, generate_arguments)
    return _decoder(target, prepared, drafter, acceptance, seed, generator).run()


def custom_generate(
    drafter: Drafter | None = None,
    *,
    acceptance: str | AcceptanceRule | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    target: Target | None = None,
) -> Callable[..., Tensor | TreeDecoderOutput]:
    """A decode loop for `model.generate(**inputs, custom_generate=treedec.custom_generate(drafter))`.

    Everything else is said to `model.generate` itself, save what it loses on the way to a custom loop: a streamer, and
    stop strings with their tokenizer. Arguments and promises are those of `treedec.generate`.

    Args:
        target: a `Target` around the same model, for instance a compiled one.

    Raises:
        ValueError: when called, as `treedec.generate` does.
    """
    stops = None if stop_strings is None else stop_string_criterion(stop_strings, tokenizer)
    own_target = target

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **forward_arguments: Any,
    ) -> Tensor | TreeDecoderOutput:
        if own_target is not None and own_target.model is not model:
            raise ValueError("target is another model than the one whose generate was called")
        target = own_target or _target(model)
        check_prompt(target, input_ids)
        criteria = type(stopping_criteria)([*stopping_criteria, *([] if stops is None else [stops])])
        prepared = Prepared(input_ids, logits_processor, criteria, generation_config, forward_arguments)
        return _output(_decoder(target, prepared, drafter, acceptance, seed, generator), prepared, streamer)

    return decode


def _target(model: PreTrainedModel | Target) -> Target:
    return model if isinstance(model, Target) else Target(model)


def _decoder(
    target: Target,
    prepared: Prepared,
    drafter: Drafter | None,
    acceptance: str | AcceptanceRule | None,
    seed: int | None,
    generator: torch.Generator | None,
) -> Decoder:
    if seed is not None and generator is not None:
        raise ValueError("seed and generator are two ways to say the same: give one of them")
    if seed is not None:
        generator = torch.Generator(target.device).manual_seed(seed)
    if generator is not None and generator.device != target.device:
        raise ValueError(f"the generator is on {generator.device} and the model on {target.device}")
    asked = request(target, prepared, generator)
    rule = acceptance_rule(acceptance, bool(prepared.config.do_sample))
    if rule.whole_tree and asked.together:
        what = ", ".join(asked.foreign) or "criteria without an eos_token_id in a batch"
        raise ValueError(
            f"acceptance={rule.name!r} scores tokens that may not be committed, which {what} must not see: use "
            "'coupled' or 'residual'"
        )
    ensure_exact(target)
    return Decoder(target, drafter or NoDrafts(), rule, asked)


def _output(decoder: Decoder, prepared: Prepared, streamer: BaseStreamer | None) -> Tensor | TreeDecoderOutput:
    stats, blocks = DecodingStats(), []
    columns = _Columns(decoder, prepared)
    if streamer is not None:
        streamer.put(prepared.input_ids.cpu())
    for block in decoder.run():
        stats.count(block)
        if block.scores is not None or block.logits is not None:
            blocks.append(block)
        if streamer is not None:
            for column in columns.ready():
                streamer.put(column)
    if streamer is not None:
        streamer.end()
    sequences = columns.sequences()
    if not prepared.config.return_dict_in_generate:
        return sequences
    return TreeDecoderOutput(
        sequences,
        _by_step([block.scores for block in blocks if block.scores is not None]),
        _by_step([block.logits for block in blocks if block.logits is not None]),
        stats,
        decoder.rule.name,
        decoder.rule.lossless,
    )


class _Columns:
    """The output as `generate` writes it: one id for every row at a time, padding where a row has ended."""

    def __init__(self, decoder: Decoder, prepared: Prepared):
        self._rows, self._pad, self._given = decoder.rows, prepared.pad, prepared.input_ids.shape[1]

    def ready(self) -> Iterator[Tensor]:
        """`[B]` ids (on the CPU) of each further position that every row has reached or will not reach."""
        rows = self._rows
        going = [length for length, done in zip(rows.lengths, rows.finished, strict=True) if not done]
        sequences, reached = self.sequences().cpu(), min(going, default=max(rows.lengths))
        while self._given < reached:
            yield sequences[:, self._given]
            self._given += 1

    def sequences(self) -> Tensor:
        """`[B, L]` ids so far."""
        rows = self._rows
        sequences = rows.ids[:, : max(rows.lengths)].clone()
        if self._pad is None:  # then no row ends before the others
            return sequences
        places = torch.arange(sequences.shape[1], device=sequences.device)
        lengths = torch.tensor(rows.lengths, device=sequences.device)
        return sequences.masked_fill_(places >= lengths[:, None], self._pad)


def _by_step(blocks: list[list[list[Tensor]]]) -> tuple[Tensor, ...] | None:
    """From blocks of rows of `[V]` to one `[B, V]` per step; zeros where a row has ended."""
    if not blocks:
        return None
    rows = [[scores for block in blocks for scores in block[row]] for row in range(len(blocks[0]))]
    nothing = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(
        torch.stack([row[step] if step < len(row) else nothing for row in rows])
        for step in range(max(len(row) for row in rows))
    )
