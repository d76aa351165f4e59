"""Self-synthesis: training conversations written by the target itself, without a data set.

An instruction-tuned model that is given only the opening of a user turn writes the question, and then answers it
(Magpie, Xu et al. 2024, arXiv:2406.08464). Draft heads must imitate this very target, so its own text is also the best
text. `treedec.training.synth_answers` is for prompts that are given.

All conversations of a batch grow together: a row that ends a turn is fed the template's tokens up to the next turn,
while the others go on sampling. One batch is one unit of work: what is new in it is appended whole, and a run that was
interrupted continues with the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.models import Fingerprint
from treedec.target import Target
from treedec.training.openings import OPENINGS
from treedec.training.prompts import prompt_key
from treedec.training.synth_file import BatchFile, Written, progress_bar
from treedec.training.synth_rows import Growing, grow, never_in_text, special_ids

__all__ = ["SynthConfig", "Synthesizer", "TurnTemplate", "synthesize"]

# Part of every origin: what a file holds besides what its settings say. 2: no question twice.
_RULES = 2
_REFILLS = 4  # conversations per row and batch, where they may end before their length
_FUTILE = 20  # batches in a row without anything new before it is called off


@dataclass(frozen=True)
class SynthConfig:
    """What to synthesise.

    Attributes:
        tokens: stop after the batch with which the file holds this many tokens (questions, answers and template
            together).
        length: most tokens of a conversation; its turns go on until then.
        rows: conversations that are written at a time.
        answer_tokens: an answer that has not ended by then is ended, so that repetition loops do not fill the data.
        question_tokens: likewise for a question.
        turns: end a conversation after so many answers; None for going on until `length`.
        openings: first words of user turns.
        opened: the share of the conversations whose first question begins with one of them, the others being left to
            the model.
        question_temperature: sampling temperature of the user turns.
        answer_temperatures: conversation `i` answers at entry `i % len`; 0 is greedy.
        seed: batch `k` is drawn from the seed `(seed, k)`, whatever ran before it.
    """

    tokens: int = 1_000_000
    length: int = 512
    rows: int = 128
    answer_tokens: int = 256
    question_tokens: int = 160
    turns: int | None = None
    openings: tuple[str, ...] = OPENINGS
    opened: float = 0.75
    question_temperature: float = 0.8
    answer_temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "tokens", "length", "rows", "answer_tokens", "question_tokens", "turns")
        if not 0 <= self.opened <= 1:
            raise ValueError(f"opened must be a fraction in [0, 1], not {self.opened}")
        if self.opened and not (self.openings and all(self.openings)):
            raise ValueError("openings must be given and not be empty, unless opened is 0")
        check_temperatures([self.question_temperature])
        check_temperatures(self.answer_temperatures)

    @property
    def conversations(self) -> int:
        """How many a batch has, before repeated ones are left out."""
        return self.rows * (1 if self.turns is None else _REFILLS)


def check_positive(config: object, *names: str) -> None:
    """Raise `ValueError` for the first of some settings that is below 1; None is none."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Raise `ValueError` unless there are some, and none below 0."""
    if not temperatures or min(temperatures) < 0:
        raise ValueError("temperatures must be given and not be negative")


def origin_of(config: Any, model: PreTrainedModel, *more: object) -> str:
    """What decides conversations, in 16 hexadecimal digits: their settings, the target, and what else.

    How many there are to be, and what happens to broken prompts, may change while a file grows.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in ("tokens", "skip_bad")}
    for key, value in settings.items():  # 1 and 1.0 are the same temperature
        if "temperature" in key:
            settings[key] = [float(entry) for entry in (value if isinstance(value, tuple) else [value])]
    made_of = [_RULES, settings, Fingerprint.of(model).to_dict(), *more]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TurnTemplate:
    """A chat template, cut into the token runs that surround what the model writes itself.

    Attributes:
        opening: everything before the first question.
        after_question: from the token that ends a question to the start of the answer.
        after_answer: from the token that ends an answer to the start of the next question.
    """

    opening: tuple[int, ...]
    after_question: tuple[int, ...]
    after_answer: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TurnTemplate:
        """Read the runs off a tokenizer's chat template.

        Raises:
            ValueError: no chat template; or one that puts nothing before the first turn, does not keep the contents of
                the turns verbatim and in order, or ends a turn with a token that is not special.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, so the model cannot be asked to write user turns: give prompts "
                "for it to answer (`--prompts`), or train on text that is there already"
            )
        marks = ["treedec-question", "treedec-answer", "treedec-followup"]
        roles = ["user", "assistant", "user"]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        pieces = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise ValueError(
                    f"the chat template does not keep the content of a turn: {mark!r} is missing from what it renders"
                )
            pieces.append(before)
        encoded = [tuple(tokenizer.encode(piece, add_special_tokens=False)) for piece in [*pieces, text]]
        opening, after_question, after_answer, _ = encoded
        if not after_question or not after_answer:
            raise ValueError("the chat template puts no token after a turn, so the model cannot say that it has ended")
        if not opening:
            raise ValueError(
                "the chat template puts no token before the first turn, so there is nothing to write a question after"
            )
        special = special_ids(tokenizer)
        for turn, end in (("a question", after_question[0]), ("an answer", after_answer[0])):
            if end not in special:
                raise ValueError(
                    f"the chat template ends {turn} with {tokenizer.decode([end])!r}, which is not a special token, so "
                    "the end of a turn could not be told from text"
                )
        return cls(opening, after_question, after_answer)


class _Conversation(Growing):
    """A conversation both sides of which the target writes.

    Args:
        template: surrounds the turns.
        words: the tokens that the first question begins with.
        config: where turns and conversation end.
        temperature: of the answers.
    """

    def __init__(self, template: TurnTemplate, words: Sequence[int], config: SynthConfig, temperature: float):
        self._template, self._config, self._warmth = template, config, temperature
        self.most = config.length
        self.answering = False
        self.turn_start = len(template.opening)
        self.turns: list[tuple[str, int, int]] = []  # role, first token, one past the last
        self.tokens: list[int] = []
        self._extend([*template.opening, *words[: config.question_tokens]])

    @property
    def temperature(self) -> float:
        return self._warmth if self.answering else float(self._config.question_temperature)

    @property
    def kind(self) -> int:
        """Of question and answer, in this order, twice: the first token of a turn must not end it."""
        return self.answering + 2 * (self.turn_start == len(self.tokens))

    def push(self, token: int) -> None:
        template, config = self._template, self._config
        following = template.after_answer if self.answering else template.after_question
        most = config.answer_tokens if self.answering else config.question_tokens
        if len(self.tokens) - self.turn_start >= most:
            token = following[0]
        if token != following[0]:
            self._extend([token])
            return
        # The end token is part of what the assistant says: heads must learn when it stops.
        self.turns.append(("assistant" if self.answering else "user", self.turn_start, len(self.tokens) + 1))
        if self.answering and 2 * (config.turns or 0) == len(self.turns):
            self._extend([token])
            self.done = True
            return
        self.turn_start = len(self.tokens) + len(following)
        self.answering = not self.answering
        self._extend(following)

    def _extend(self, tokens: Iterable[int]) -> None:
        self.tokens = [*self.tokens, *tokens][: self.most]
        self.done = len(self.tokens) == self.most

    def sample(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """What is kept of it: `messages`, `input_ids` and `responses` (token spans)."""
        turns = list(self.turns)
        if self.turn_start < len(self.tokens) and not (turns and turns[-1][2] == len(self.tokens)):
            turns.append(("assistant" if self.answering else "user", self.turn_start, len(self.tokens)))
        return {
            "messages": [
                {"role": role, "content": tokenizer.decode(self.tokens[start:end], skip_special_tokens=True)}
                for role, start, end in turns
            ],
            "input_ids": self.tokens,
            "responses": [[start, end] for role, start, end in turns if role == "assistant"],
        }


class Synthesizer:
    """Writes batches of conversations with one target.

    Raises:
        ValueError: the tokenizer has no usable chat template, or a conversation does not fit the model's context.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: SynthConfig):
        self.config, self.tokenizer, self.target = config, tokenizer, Target(model)
        self.template = TurnTemplate.of(tokenizer)
        check_context(self.target, config.length)
        if config.length <= len(self.template.opening):
            raise ValueError(
                f"length {config.length} leaves no room after the {len(self.template.opening)} tokens of the template"
            )
        never = never_in_text(tokenizer, self.target.vocab_size)
        ends = (self.template.after_question[0], self.template.after_answer[0])
        kinds = [never - {end} for end in ends] + [never | {end} for end in ends]
        self.banned = [torch.tensor(sorted(ids), dtype=torch.long, device=self.target.device) for ids in kinds]
        self._openings = [tokenizer.encode(text, add_special_tokens=False) for text in config.openings]

    @property
    def origin(self) -> str:
        """What decides the conversations, in 16 hexadecimal digits: target, template, all settings but `tokens`."""
        return origin_of(self.config, self.target.model, asdict(self.template))

    @torch.inference_mode()
    def batch(self, index: int) -> list[dict[str, Any]]:
        """The conversations of batch `index`, each with `messages`, `input_ids` and `responses` (token spans)."""
        config = self.config
        generator = torch.Generator(self.target.device).manual_seed(config.seed * 1_000_003 + index)
        temperatures = config.answer_temperatures
        conversations = [
            _Conversation(self.template, words, config, temperatures[number % len(temperatures)])
            for number, words in enumerate(self._first_words(generator), index * config.conversations)
        ]
        grow(self.target, conversations, config.rows, self.banned, generator)
        return [conversation.sample(self.tokenizer) for conversation in conversations]

    def _first_words(self, generator: torch.Generator) -> list[list[int]]:
        """The tokens that each conversation of a batch is made to begin with, none for some."""
        count, device = self.config.conversations, generator.device
        left = torch.rand(count, generator=generator, device=device) >= self.config.opened
        if bool(left.all()):
            return [[] for _ in range(count)]
        choice = torch.randint(len(self._openings), (count,), generator=generator, device=device)
        return [[] if free else self._openings[k] for free, k in zip(left.tolist(), choice.tolist(), strict=True)]


def check_context(target: Target, length: int) -> None:
    """Raise `ValueError` for conversations that are longer than the model's context."""
    limit = target.context_length
    if limit is not None and length > limit:
        raise ValueError(f"length {length} is beyond the model's context of {limit} tokens")


def synthesize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike[str],
    config: SynthConfig,
    *,
    console: Console | None = None,
) -> Written:
    """Append conversations to a JSONL file until it holds `config.tokens` tokens.

    No first question is written twice: later ones that differ in case, spacing or closing punctuation only are left
    out. A file that exists is continued: batches already in it are skipped, and what a kill left of an unfinished one
    is dropped. The same configuration therefore gives the same file whether or not the run was interrupted. A file with
    anything else in it is left as it is: every line says in `origin` what it was made with.

    Args:
        model, tokenizer: the target.
        path: the JSONL file; each line has `origin`, `batch` (which batch, which line of it, of how many), `messages`,
            `input_ids` and `responses` (`[start, end)` spans of answers).
        config: see `SynthConfig`.
        console: where progress is shown; None for standard error.

    Raises:
        ValueError: the tokenizer has no usable chat template, a conversation does not fit the model's context, the file
            holds something else than conversations of this configuration and target, or the model repeats itself only.
    """
    writer = Synthesizer(model, tokenizer, config)
    asked: set[bytes] = set()

    def is_new(sample: Mapping[str, Any]) -> bool:
        before = len(asked)
        asked.add(prompt_key(sample["messages"][:1]))
        return len(asked) > before

    file = BatchFile(path, writer.origin, is_new)
    futile = 0
    with progress_bar(console) as progress:
        task = progress.add_task("synthesising", total=config.tokens, completed=file.tokens, speed="")
        while file.tokens < config.tokens:
            started, before = time.monotonic(), file.tokens
            file.append(file.batches, [sample for sample in writer.batch(file.batches) if is_new(sample)])
            speed = (file.tokens - before) / (time.monotonic() - started)
            repeated = 1 - file.conversations / (file.batches * config.conversations)
            progress.update(task, completed=file.tokens, speed=f"{speed:.0f} tokens/s, {repeated:.0%} repeated")
            futile = 0 if file.tokens > before else futile + 1
            if futile == _FUTILE:
                raise ValueError(
                    f"the last {futile * config.conversations} questions have all been asked before: raise the "
                    f"temperature of questions, give more openings, or be content with {file.tokens} tokens"
                )
    return Written(file.tokens, file.conversations, duplicates=file.batches * config.conversations - file.conversations)
