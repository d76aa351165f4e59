"""What a call of `generate` asks for: transformers resolves its own arguments, treedec refuses what it cannot do.

`model.generate` is run up to its decode loop and hands over what the loop would get: the ids, the logits processors,
the stopping criteria and the merged configuration. So every default, precedence and warning is transformers' own, and
no argument is interpreted twice.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    GenerationMixin,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)
from transformers.generation import EosTokenCriteria, GenerationMode

from treedec.decode import Request
from treedec.target import Target

# Warpers that are functions of the scores alone, so that a drafter may shape its own distributions with them.
_PREFIX_INDEPENDENT = (
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
# Processors and criteria that treat every row by itself and remember nothing, so that rows may run at their own pace.
# All others (also subclasses, and whatever the user wrote) are called for the whole batch, step by step.
_ROW_BY_ROW = (
    *_PREFIX_INDEPENDENT,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WatermarkLogitsProcessor,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

# What means something a token tree has no answer to: refused by name, never ignored. Arguments of `generate` first,
# then fields of its configuration, which may also come from the model's own.
_OWN_CACHE = "treedec keeps keys and values in its own cache"
_SECOND_PASS = "guided decoding needs a second pass of the model for every token"
_REFUSED_ARGUMENTS = {
    "assistant_model": "give it as the drafter: treedec.DraftModelDrafter(assistant_model)",
    "assistant_tokenizer": "the draft model must share the target's vocabulary",
    "cache": _OWN_CACHE,
    "custom_generate": "treedec brings its own decode loop",
    "negative_prompt_attention_mask": _SECOND_PASS,
    "negative_prompt_ids": _SECOND_PASS,
    "past_key_values": _OWN_CACHE,
    "synced_gpus": "sharded generation is not supported",
}
_REFUSED_CONFIG = {
    "assistant_early_exit": "treedec drafts with heads, draft models or n-grams",
    "constraints": "they need beams",
    "dola_layers": "DoLa decoding contrasts layers, which is another way of decoding",
    "force_words_ids": "they need beams; prefix_allowed_tokens_fn and logits_processor work",
    "is_assistant": "it is for models that draft inside transformers",
    "output_attentions": "a pass over a token tree has no attention matrix of the text",
    "output_hidden_states": "a pass over a token tree sees tokens that are not in the text",
    "prompt_lookup_num_tokens": "give the drafter treedec.NgramDrafter()",
    "token_healing": "it changes the prompt; heal the prompt before",
    "use_mtp": "give the drafter instead",
}
# What `generate` itself hands to its decode loop besides the arguments, and what changes nothing here.
_OWN_FORWARD_ARGUMENTS = {
    "attention_mask", "cache", "logits_to_keep", "past_key_values", "position_ids", "use_cache"
}  # fmt: skip
# What asks for no cache in particular.
_ANY_CACHE = (None, "dynamic", "hybrid")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(frozen=True)
class Prepared:
    """A call of `model.generate`, stopped just before its decode loop.

    Attributes:
        input_ids: `[B, L]` int64, expanded for several return sequences.
        processors: what `generate` would run on the scores of the whole batch.
        criteria: what would end it.
        config: its configuration, with all defaults filled in.
        forward_arguments: what would go to the model's forward.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    forward_arguments: Mapping[str, Any]

    @property
    def pad(self) -> int | None:
        """The id that fills finished rows."""
        pad = self.config._pad_token_tensor
        return None if pad is None else int(pad)


def prepare(target: Target, input_ids: Tensor, arguments: Mapping[str, Any]) -> Prepared:
    """Let `model.generate` resolve `arguments` for the prompts `[B, L]`.

    Raises:
        ValueError: an argument that does not apply, by name, and whatever `generate` itself refuses.
    """
    model = target.model
    for name, instead in _REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"{name} does not apply to treedec.generate: {instead}")
    passed_on = {"attention_mask", "use_cache"}
    for name in arguments.keys() & inspect.signature(model.forward).parameters.keys() - passed_on:
        raise ValueError(f"{name} is an argument of {type(model).__name__}.forward that treedec does not pass on")
    arguments = dict(arguments)
    defaults, given = model.generation_config, arguments.get("generation_config")
    if arguments.get("cache_implementation") not in _ANY_CACHE:
        raise ValueError(f"cache_implementation does not apply to treedec.generate: {_OWN_CACHE}")
    # Before `generate` acts on them; what comes with the model is seen to in `request`.
    _refuse({name: arguments.get(name, getattr(given, name, None)) for name in _REFUSED_CONFIG})
    if getattr(given, "cache_implementation", None) not in _ANY_CACHE:
        raise ValueError(f"generation_config.cache_implementation does not apply to treedec.generate: {_OWN_CACHE}")
    if defaults.cache_implementation is not None:
        arguments["cache_implementation"] = None  # one that comes with the model asks for nothing that is needed here
    tokenizer = arguments.pop("tokenizer", None)
    places = (arguments.get("stop_strings"), getattr(given, "stop_strings", None), defaults.stop_strings)
    stops = next((place for place in places if place is not None), None)
    if stops is not None:
        # `generate` loses the tokenizer on its way to a custom decode loop, and would miss it for the stop strings.
        arguments["stop_strings"] = None
        criteria = list(arguments.get("stopping_criteria") or [])
        if not any(isinstance(criterion, StopStringCriteria) for criterion in criteria):  # else that one goes before
            criteria.append(stop_string_criterion(stops, tokenizer))
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
        if given is not None:  # not both: transformers warns of arguments besides a configuration
            arguments["generation_config"] = copy.deepcopy(given)
            arguments["generation_config"].stop_strings = None
            if defaults.stop_strings is None:
                del arguments["stop_strings"]

    def take_over(
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **forward_arguments: Any,
    ) -> Prepared:
        return Prepared(input_ids, logits_processor, stopping_criteria, generation_config, forward_arguments)

    # Causal LMs are `GenerationMixin`s, which `PreTrainedModel` does not say; `generate` returns what `take_over` does.
    return cast(GenerationMixin, model).generate(input_ids, custom_generate=take_over, **arguments)


def stop_string_criterion(stops: str | list[str], tokenizer: Any) -> StopStringCriteria:
    """The criterion that `generate` makes of stop strings."""
    if tokenizer is None:
        raise ValueError("stop_strings need the tokenizer: give tokenizer=")
    return StopStringCriteria(tokenizer, stops)


def request(target: Target, prepared: Prepared, generator: torch.Generator | None = None) -> Request:
    """What the decode loop needs of a prepared call.

    Raises:
        ValueError: a configuration or a prompt that treedec cannot decode; the message names it.
    """
    _check_config(prepared.config)
    _check_forward_arguments(prepared)
    if prepared.criteria.max_length is None:
        raise ValueError("the length is unbounded: give max_new_tokens or max_length")
    mask = prepared.forward_arguments.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(prepared.input_ids)
    if mask.shape != prepared.input_ids.shape:
        raise ValueError(f"attention_mask {list(mask.shape)} does not fit input_ids {list(prepared.input_ids.shape)}")
    if not bool(mask[:, -1].all()):
        raise ValueError(
            "prompts of different lengths must be padded on the left: the last column of attention_mask has zeros"
        )
    batch, length = prepared.input_ids.shape
    max_length = max(prepared.criteria.max_length, length + 1)  # `generate` yields one token at least
    _check_positions(target, mask, max_length - length)
    config, ends = prepared.config, any(hasattr(criterion, "eos_token_id") for criterion in prepared.criteria)
    foreign = [rule for rule in (*prepared.processors, *prepared.criteria) if type(rule) not in _ROW_BY_ROW]
    # Without EOS, `generate` lets rows whose criteria are met go on until all are.
    until_all = batch > 1 and not ends and any(type(rule) is not MaxLengthCriteria for rule in prepared.criteria)
    together = bool(foreign) or until_all
    return Request(
        input_ids=prepared.input_ids,
        attention_mask=mask,
        max_length=max_length,
        processors=[prepared.processors] if together else _of_rows(prepared.processors, batch),
        warpers=LogitsProcessorList(p for p in prepared.processors if type(p) in _PREFIX_INDEPENDENT),
        criteria=prepared.criteria,
        together=together,
        rows_end=ends or batch == 1,
        pad=prepared.pad,
        foreign=sorted({type(rule).__name__ for rule in foreign}),
        keep_scores=bool(config.return_dict_in_generate and config.output_scores),
        keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        repairs_logits=any(type(rule) is InfNanRemoveLogitsProcessor for rule in prepared.processors),
        generator=generator,
        chunk=config.prefill_chunk_size,
    )


def check_prompt(target: Target, input_ids: Tensor) -> None:
    """Raise `ValueError` unless `input_ids` is a non-empty `[B, L]` of ids the model knows, on its device."""
    if input_ids.dim() != 2 or input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [B, L] with B, L >= 1, not {list(input_ids.shape)}: the prompt is empty")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers (int64), not {input_ids.dtype}")
    if input_ids.device != target.device:
        raise ValueError(f"input_ids are on {input_ids.device} and the model is on {target.device}: move them there")
    # May be more than the LM head can predict.
    known = cast(Tensor, target.model.get_input_embeddings().weight).shape[0]
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= known:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token id {wrong} is outside the model's vocabulary of {known}: is it another tokenizer?")


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}={value} is not supported: {_REFUSED_CONFIG[name]}")


def _check_config(config: GenerationConfig) -> None:
    _refuse({name: getattr(config, name, None) for name in _REFUSED_CONFIG})
    if config.guidance_scale not in (None, 1):
        raise ValueError(f"guidance_scale={config.guidance_scale} is not supported: {_SECOND_PASS}")
    if (mode := config.get_generation_mode()) not in _MODES:
        raise ValueError(
            f"these arguments (num_beams={config.num_beams}) ask for {mode.value}: treedec decodes greedily or samples"
        )


def _check_forward_arguments(prepared: Prepared) -> None:
    """Refuse what would change the model's passes; `generate` adds position ids and an empty cache of its own."""
    given = prepared.forward_arguments
    for name in given.keys() - _OWN_FORWARD_ARGUMENTS:
        raise ValueError(f"{name} is an argument of the model's forward that treedec does not pass on")
    if any(
        (cache := given.get(name)) is not None and cache.get_seq_length() > 0 for name in ("cache", "past_key_values")
    ):
        raise ValueError(f"past_key_values does not apply to treedec: {_OWN_CACHE}")
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None:
        real = torch.ones_like(prepared.input_ids) if mask is None else mask.long()
        expected = real.cumsum(1) - 1
        if positions.shape[-1] != expected.shape[1] or bool(((positions - expected) * real).any()):
            raise ValueError("position_ids other than those of the attention mask are not supported")


def _check_positions(target: Target, mask: Tensor, new_tokens: int) -> None:
    limit, switch, longest = target.max_positions, target.rope_switch, int(mask.sum(1).max())
    if limit is not None and longest > limit:
        raise ValueError(f"the prompt has {longest} tokens, but the model's context ends at {limit}")
    # In `generate` the longest row decides for all, and some models count its padding; here rows go their own pace.
    alone = len(mask) == 1 and bool(mask.all())
    if not alone and switch is not None and longest + new_tokens - 1 > switch.position:
        raise ValueError(
            f"from position {switch.position} on, the model rotates all rows of a batch as its longest row requires, "
            f"and this one may reach position {longest + new_tokens - 2}: decode one row at a time, without padding, "
            "or fewer tokens"
        )
    if target.window is not None and bool((mask[:, :-1].bool() & ~mask[:, 1:].bool()).any()):
        raise ValueError(
            "attention_mask has zeros between ones, which the sliding windows of `generate` count as tokens: take "
            "these tokens out of input_ids"
        )


def _of_rows(processors: LogitsProcessorList, batch: int) -> list[LogitsProcessorList]:
    """The processors of each row; one of them is told how long the padding of every row is."""
    lengths = [getattr(processor, "prompt_ignore_length", None) for processor in processors]
    if batch == 1 or not any(isinstance(length, Tensor) for length in lengths):
        return [processors] * batch
    rows = []
    for row in range(batch):
        own = LogitsProcessorList()
        for processor, length in zip(processors, lengths, strict=True):
            if isinstance(length, Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = length[row : row + 1]
            own.append(processor)
        rows.append(own)
    return rows
