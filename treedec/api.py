"""The public calls: `generate` as in transformers, and `stream`, the iterator under it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from treedec.acceptance import AcceptanceRule, acceptance_rule
from treedec.decode import Committed, Decoder, DecodingStats, Request
from treedec.drafter import Drafter, NoDrafts
from treedec.target import Target

# Warpers that are functions of the scores alone, so that a drafter may shape its own distributions with them.
_PREFIX_INDEPENDENT = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)

# Arguments of `model.generate` that mean something a token tree has no answer to (yet): refused, never ignored.
_REFUSED_ARGUMENTS = {
    "assistant_model": "give it as the drafter: treedec.DraftModelDrafter(assistant_model)",
    "assistant_tokenizer": "the draft model must share the target's vocabulary",
    "prompt_lookup_num_tokens": "give the drafter treedec.NgramDrafter()",
    "custom_generate": "treedec brings its own decode loop",
    "cache": "treedec keeps keys and values in its own cache",
    "past_key_values": "treedec keeps keys and values in its own cache",
    "negative_prompt_ids": "guided decoding needs a second pass of the model for every token",
    "cache_implementation": "treedec keeps keys and values in its own cache",
    "synced_gpus": "sharded generation is not supported",
}
_REFUSED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# What of a model's forward `generate` may be given: the mask, and a switch that changes nothing here.
_OWN_FORWARD_ARGUMENTS = {"attention_mask", "use_cache"}
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass
class TreeDecoderOutput(ModelOutput):
    """What `generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: `[B, L]` int64, prompts and continuations, padded on the right like `model.generate`'s.
        stats: counts of passes, tokens and accepted lengths, see `DecodingStats`.
        acceptance: name of the rule that ran.
        lossless: whether that rule keeps the target's output.
    """

    sequences: Tensor | None = None
    stats: DecodingStats | None = None
    acceptance: str | None = None
    lossless: bool | None = None


@dataclass(frozen=True)
class _Prepared:
    """A call of `model.generate`, stopped just before its decode loop."""

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    attention_mask: Tensor | None


def generate(
    model: PreTrainedModel | Target,
    input_ids: Tensor,
    drafter: Drafter | None = None,
    *,
    acceptance: str | AcceptanceRule | None = None,
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
        acceptance: `"greedy"`, `"coupled"`, `"residual"` or the lossy `"typical"`, or a rule. Default: `greedy` without
            sampling, `coupled` with.
        **generate_arguments: arguments of `model.generate` (`max_new_tokens`, `do_sample`, `temperature`, `streamer`,
            `stop_strings` with `tokenizer`, …). What does not apply to token trees is refused by name.

    Returns:
        `[B, L + new]` ids, or a `TreeDecoderOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: an empty prompt, ids beyond the vocabulary, a prompt past the model's context, an argument that
            does not apply, or a drafter that does not fit the model; before any pass.
    """
    streamer = generate_arguments.pop("streamer", None)
    prepared, decoder = _prepare(model, input_ids, drafter, acceptance, generate_arguments)
    stats = DecodingStats()
    if streamer is not None and len(prepared.input_ids) > 1:
        raise ValueError(f"a streamer takes one sequence, not a batch of {len(prepared.input_ids)}")
    if streamer is not None:
        streamer.put(input_ids.cpu())
    for block in decoder.run():
        stats.count(block)
        if streamer is not None:
            for token in block.tokens[0]:  # one by one, as `model.generate` does
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    sequences = _padded(decoder, prepared)
    if not prepared.config.return_dict_in_generate:
        return sequences
    return TreeDecoderOutput(sequences, stats, decoder.rule.name, decoder.rule.lossless)


def stream(
    model: PreTrainedModel | Target,
    input_ids: Tensor,
    drafter: Drafter | None = None,
    *,
    acceptance: str | AcceptanceRule | None = None,
    **generate_arguments: Any,
) -> Iterator[Committed]:
    """The iterator under `generate`: committed token blocks as they come, one per pass of the target.

    Arguments and errors are those of `generate`; they are checked here, before the first block is asked for. The
    iterator may be abandoned at any time.
    """
    if generate_arguments.get("streamer") is not None:
        raise ValueError("streamer goes with generate; stream itself hands out the tokens")
    _, decoder = _prepare(model, input_ids, drafter, acceptance, generate_arguments)
    return decoder.run()


def _prepare(
    model: PreTrainedModel | Target,
    input_ids: Tensor,
    drafter: Drafter | None,
    acceptance: str | AcceptanceRule | None,
    arguments: dict[str, Any],
) -> tuple[_Prepared, Decoder]:
    target = model if isinstance(model, Target) else Target(model)
    _check_prompt(target, input_ids)
    prepared = _prepared_by_transformers(target.model, input_ids, arguments)
    config = prepared.config
    if (mode := config.get_generation_mode()) not in _MODES:
        raise ValueError(
            f"these arguments (num_beams={config.num_beams}) ask for {mode.value}: treedec decodes greedily or samples"
        )
    if config.guidance_scale not in (None, 1):
        raise ValueError("guidance_scale: guided decoding needs a second pass of the model for every token")
    for name in _REFUSED_OUTPUTS:
        if getattr(config, name, False):
            raise ValueError(f"{name}=True is not supported: treedec returns sequences and statistics")
    if prepared.criteria.max_length is None:
        raise ValueError("the length is unbounded: give max_new_tokens or max_length")
    _check_batch_stops(prepared)
    mask = torch.ones_like(prepared.input_ids) if prepared.attention_mask is None else prepared.attention_mask
    if not bool(mask[:, -1].all()):
        raise ValueError(
            "prompts of different lengths must be padded on the left: the last column of attention_mask has zeros"
        )
    request = Request(
        prepared.input_ids,
        mask,
        max(prepared.criteria.max_length, prepared.input_ids.shape[1] + 1),  # `generate` yields one token at least
        _row_processors(target.model, prepared, arguments),
        LogitsProcessorList(p for p in prepared.processors if type(p) in _PREFIX_INDEPENDENT),
        prepared.criteria,
    )
    rule = acceptance_rule(acceptance, bool(config.do_sample))
    return prepared, Decoder(target, drafter or NoDrafts(), rule, request)


def _prepared_by_transformers(model: PreTrainedModel, input_ids: Tensor, arguments: dict[str, Any]) -> _Prepared:
    """Let `model.generate` resolve its own arguments and hand over what its decode loop would get."""
    for name, instead in _REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"{name} does not apply to treedec.generate: {instead}")
    for name in arguments.keys() & inspect.signature(model.forward).parameters.keys() - _OWN_FORWARD_ARGUMENTS:
        raise ValueError(f"{name} is an argument of {type(model).__name__}.forward that treedec does not pass on")
    arguments = dict(arguments)
    tokenizer = arguments.pop("tokenizer", None)
    stops = arguments.pop("stop_strings", None) or getattr(arguments.get("generation_config"), "stop_strings", None)
    if stops is not None:
        # `generate` loses the tokenizer on its way to a custom decode loop, and would miss it for the stop strings.
        if arguments.get("generation_config") is not None:
            arguments["generation_config"] = copy.deepcopy(arguments["generation_config"])
            arguments["generation_config"].stop_strings = None
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer: give tokenizer=")
        given = arguments.get("stopping_criteria") or []
        arguments["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(tokenizer, stops)])

    def take_over(
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: Any,
    ) -> _Prepared:
        return _Prepared(input_ids, logits_processor, stopping_criteria, generation_config, rest.get("attention_mask"))

    # Causal LMs are `GenerationMixin`s, which `PreTrainedModel` does not say; `generate` returns what `take_over` does.
    return cast(GenerationMixin, model).generate(input_ids, custom_generate=take_over, **arguments)


def _row_processors(
    model: PreTrainedModel, prepared: _Prepared, arguments: dict[str, Any]
) -> list[LogitsProcessorList]:
    """The logits processors of each row, made for that row.

    Rows advance at their own pace, so each is processed alone; but processors may know the prompt of their row (encoder
    penalties) or its index (`prefix_allowed_tokens_fn`). Processors that the user made are shared by all rows.
    """
    batch = prepared.input_ids.shape[0]
    if batch == 1 or all(type(processor) in _PREFIX_INDEPENDENT for processor in prepared.processors):
        return [prepared.processors] * batch
    allowed = arguments.get("prefix_allowed_tokens_fn")
    # Which prompt a row belongs to is for the processor to say: in transformers 5.21 it is the row itself, also where
    # a prompt has several return sequences.
    constraints = (p for p in prepared.processors if isinstance(p, PrefixConstrainedLogitsProcessor))
    rows_per_prompt = next((constraint._num_beams for constraint in constraints), 1)
    rows = []
    for row in range(batch):
        own = {**arguments, "num_return_sequences": 1, "stopping_criteria": None, "stop_strings": None}
        if prepared.attention_mask is not None:
            own["attention_mask"] = prepared.attention_mask[row : row + 1]
        if allowed is not None:
            prompt = row // rows_per_prompt
            own["prefix_allowed_tokens_fn"] = lambda _, ids, prompt=prompt: allowed(prompt, ids)
        rows.append(_prepared_by_transformers(model, prepared.input_ids[row : row + 1], own).processors)
    return rows


def _check_batch_stops(prepared: _Prepared) -> None:
    """Refuse the one case in which `generate` lets finished rows go on: several rows, no EOS, and another criterion."""
    kinds = {type(criterion) for criterion in prepared.criteria} - {MaxLengthCriteria, MaxTimeCriteria}
    ends = any(hasattr(criterion, "eos_token_id") for criterion in prepared.criteria)
    if len(prepared.input_ids) > 1 and kinds and not ends:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"{names} can end single rows of a batch only if there is an eos_token_id: set it, or give one row"
        )


def _check_prompt(target: Target, input_ids: Tensor) -> None:
    if input_ids.dim() != 2 or input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [B, L] with B, L >= 1, not {list(input_ids.shape)}: the prompt is empty")
    if input_ids.device != target.device:
        raise ValueError(f"input_ids are on {input_ids.device} and the model is on {target.device}: move them there")
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= target.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"token id {wrong} is outside the model's vocabulary of {target.vocab_size}: is it another tokenizer?"
        )
    limit = target.max_positions
    if limit is not None and input_ids.shape[1] >= limit:
        raise ValueError(f"the prompt has {input_ids.shape[1]} tokens, but the model's context ends at {limit}")


def _padded(decoder: Decoder, prepared: _Prepared) -> Tensor:
    rows = decoder.rows
    sequences = rows.ids[:, : max(rows.lengths)].clone()
    pad = prepared.config._pad_token_tensor
    beyond = (
        torch.arange(sequences.shape[1], device=sequences.device)
        >= torch.tensor(rows.lengths, device=sequences.device)[:, None]
    )
    return sequences if pad is None else sequences.masked_fill_(beyond, int(pad))
