"""Answers to given prompts: the target says anew what the assistant says in a data set.

Draft heads must imitate their target, so they learn from its answers, not from those of whoever wrote the data. Where a
conversation has several turns, the user's are as given and follow upon the target's own answers.

The unit of work is a window of prompts: its answers are appended whole, and a run that was interrupted continues with
the next window. Within one, a row whose conversation has ended goes on with another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import jinja2
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.target import Target
from treedec.training.prompts import BrokenPrompt, Message, Prompt, PromptSource
from treedec.training.synth import check_context, check_positive, check_temperatures, origin_of
from treedec.training.synth_file import BatchFile, Written, progress_bar
from treedec.training.synth_rows import Growing, grow, never_in_text, special_ids

_WINDOW = 8  # conversations per row and window: the more, the less the rows wait for the last of a window
_MARK = "treedec-answer"


@dataclass(frozen=True)
class AnswerConfig:
    """How prompts are answered.

    Attributes:
        tokens: stop after the window with which the file holds this many tokens, prompts and template included; None
            for going on until all prompts are answered.
        length: most tokens of a conversation. What the user says beyond it is left out, and an answer that reaches it
            is cut; prompts that leave no room for an answer are left out.
        rows: conversations that are written at a time.
        answer_tokens: an answer that has not ended by then is ended, so that repetition loops do not fill the data.
        turns: most answers of a conversation; None for all.
        answer_temperatures: conversation `i` answers at entry `i % len`; 0 is greedy.
        seed: window `k` is drawn from the seed `(seed, k)`, whatever ran before it.
        skip_bad: leave out prompts that cannot be read, instead of stopping at the first.
    """

    tokens: int | None = None
    length: int = 1024
    rows: int = 128
    answer_tokens: int = 256
    turns: int | None = None
    answer_temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    seed: int = 0
    skip_bad: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "tokens", "length", "rows", "answer_tokens", "turns")
        check_temperatures(self.answer_temperatures)


class ChatFormat:
    """What surrounds answers in a tokenizer's chat template; without one, prompts of one turn are texts to continue.

    Raises:
        ValueError: nothing tells that an answer has ended.

    Attributes:
        end: the token that answers are ended with.
        ends: the tokens by which the model says that an answer has ended; `end` is one of them.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        known: Any = getattr(model.generation_config, "eos_token_id", None) if model.generation_config else None
        known = known if isinstance(known, list) else [known, tokenizer.eos_token_id]
        ends = [id_ for id_ in known if id_ is not None]
        if tokenizer.chat_template:
            said = [{"role": "user", "content": "treedec-question"}, {"role": "assistant", "content": _MARK}]
            after = self._encode_after_mark(self._render(said, open=False))
            if after and after[0] in special_ids(tokenizer):
                ends.insert(0, after[0])
        if not ends:
            raise ValueError("neither the chat template nor the model's configuration names a token that ends answers")
        self.end, self.ends = ends[0], frozenset(ends)

    def script(self, prompt: Prompt, turns: int | None) -> list[list[int]]:
        """The tokens before each answer: the first run is the beginning, each other follows upon the end of an answer.

        Raises:
            BrokenPrompt: the chat template cannot express it.
        """
        runs: list[list[int]] = []
        history: list[Message] = []
        try:
            for turn in prompt.turns[:turns]:
                history += turn
                runs.append(self._run(history, first=not runs))
                history.append({"role": "assistant", "content": _MARK})
        except (jinja2.TemplateError, ValueError) as error:
            raise BrokenPrompt(f"{prompt.place}: the chat template does not take it: {error}") from error
        return runs

    def _run(self, history: Sequence[Message], first: bool) -> list[int]:
        """What leads from the last answer of a conversation, or its beginning, to the next."""
        if not self.tokenizer.chat_template:
            if len(history) > 1:
                raise ValueError("the tokenizer has none, so there can be one message only, of the user")
            return self.tokenizer.encode(history[0]["content"])
        text = self._render(history, open=True)
        if first:
            return self.tokenizer.encode(text, add_special_tokens=False)
        run = self._encode_after_mark(text)
        return run[1:] if run[:1] == [self.end] else run

    def _render(self, messages: Sequence[Message], open: bool) -> str:
        return cast(str, self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open))

    def _encode_after_mark(self, text: str) -> list[int]:
        _, found, after = text.rpartition(_MARK)
        if not found:
            raise ValueError("what the assistant has said does not show in it")
        return self.tokenizer.encode(after, add_special_tokens=False)


class _Dialogue(Growing):
    """A conversation one side of which is given.

    Args:
        prompt: what is given.
        script: its tokens, see `ChatFormat.script`; there is room for some of an answer after the first run.
        chat: says what ends answers.
        config: where answers and conversation end.
        temperature: of the answers.
    """

    def __init__(
        self, prompt: Prompt, script: list[list[int]], chat: ChatFormat, config: AnswerConfig, temperature: float
    ):
        self._prompt, self._script, self._chat, self._temperature = prompt, script, chat, temperature
        self._answer_tokens = config.answer_tokens
        self.most = min(config.length, sum(len(run) + config.answer_tokens + 1 for run in script))
        self.tokens = list(script[0])
        self.start = len(self.tokens)
        self.responses: list[list[int]] = []

    @property
    def temperature(self) -> float:
        return self._temperature

    @property
    def kind(self) -> int:
        """0 within an answer, 1 for its first token, which must not end it."""
        return int(self.start == len(self.tokens))

    def push(self, token: int) -> None:
        ended = token in self._chat.ends or len(self.tokens) - self.start >= self._answer_tokens
        self.tokens.append(self._chat.end if ended else token)
        if not ended and len(self.tokens) < self.most:
            return
        self.responses.append([self.start, len(self.tokens)])
        following = self._script[len(self.responses)] if len(self.responses) < len(self._script) else None
        if following is None or len(self.tokens) + len(following) >= self.most:
            self.done = True
            return
        self.tokens += following
        self.start = len(self.tokens)

    def sample(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """What is kept of it: `messages`, `input_ids` and `responses` (token spans)."""
        messages: list[Message] = []
        for given, (start, end) in zip(self._prompt.turns, self.responses, strict=False):
            text = cast(str, tokenizer.decode(self.tokens[start:end], skip_special_tokens=True))
            messages += [*given, {"role": "assistant", "content": text}]
        return {"messages": messages, "input_ids": self.tokens, "responses": self.responses}


class Answerer:
    """Answers windows of prompts with one target.

    Args:
        model, tokenizer: the target.
        config: see `AnswerConfig`.

    Raises:
        ValueError: nothing tells that an answer has ended, or a conversation does not fit the model's context.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: AnswerConfig):
        self.config, self.tokenizer, self.target = config, tokenizer, Target(model)
        self.chat = ChatFormat(model, tokenizer)
        check_context(self.target, config.length)
        never = never_in_text(tokenizer, self.target.vocab_size)
        kinds = [never - self.chat.ends, never | self.chat.ends]
        self.banned = [torch.tensor(sorted(ids), dtype=torch.long, device=self.target.device) for ids in kinds]

    def origin(self, source: str) -> str:
        """What decides the answers to the prompts of a source, in 16 hexadecimal digits."""
        template = self.tokenizer.chat_template
        return origin_of(self.config, self.target.model, template, sorted(self.chat.ends), source)

    @torch.inference_mode()
    def batch(self, index: int, window: Sequence[tuple[Prompt, list[list[int]]]]) -> list[dict[str, Any]]:
        """Window `index`, answered: prompts with their scripts to `messages`, `input_ids` and `responses`, in order."""
        config = self.config
        generator = torch.Generator(self.target.device).manual_seed(config.seed * 1_000_003 + index)
        temperatures = config.answer_temperatures
        dialogues = [
            _Dialogue(prompt, script, self.chat, config, temperatures[number % len(temperatures)])
            for number, (prompt, script) in enumerate(window, index * _WINDOW * config.rows)
        ]
        # Alike beside alike: the first prompts are read together, and short texts attend to few slots.
        ordered = sorted(dialogues, key=lambda dialogue: len(dialogue.tokens))
        grow(self.target, ordered, config.rows, self.banned, generator)
        return [dialogue.sample(self.tokenizer) for dialogue in dialogues]


class _Scripts:
    """The prompts of a source that are to be answered, each with its script, and counts of the others."""

    def __init__(self, source: PromptSource, chat: ChatFormat, config: AnswerConfig):
        self._source, self._chat, self._config = source, chat, config
        self.duplicates = self.too_long = self.broken = 0

    def __iter__(self) -> Iterator[tuple[Prompt, list[list[int]]]]:
        asked: set[bytes] = set()
        for prompt in self._source:
            try:
                if isinstance(prompt, BrokenPrompt):
                    raise prompt
                script = self._chat.script(prompt, self._config.turns)
            except BrokenPrompt as error:
                if not self._config.skip_bad:
                    raise BrokenPrompt(f"{error}; skip_bad (--skip-bad) leaves such prompts out") from error
                self.broken += 1
                continue
            if prompt.key in asked:
                self.duplicates += 1
            elif len(script[0]) >= self._config.length:
                self.too_long += 1
            else:
                asked.add(prompt.key)
                yield prompt, script


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: PromptSource | str | os.PathLike[str] | Iterable[str | Mapping[str, Any]],
    path: str | os.PathLike[str],
    config: AnswerConfig,
    *,
    console: Console | None = None,
) -> Written:
    """Append the target's answers to given prompts to a JSONL file, until all are answered or there are enough tokens.

    A prompt that differs from an earlier one in case, spacing or closing punctuation only is left out. A file that
    exists is continued, as `synthesize` does, and under the same conditions; the source must be the same as well. Of
    files that is checked, of data sets the name, of given rows nothing.

    Args:
        model, tokenizer: the target. Without a chat template, prompts are texts that it continues.
        source: see `PromptSource`.
        path: the JSONL file; its lines are as `synthesize` writes them, in the order of the prompts.
        config: see `AnswerConfig`.
        console: where progress is shown; None for standard error.

    Raises:
        BrokenPrompt: a prompt cannot be read, or the chat template does not take it; names the file and the line. What
            was answered before is kept.
        ValueError: there is no prompt, the source cannot be read, nothing tells that an answer has ended, conversations
            do not fit the model's context, or the file holds something else than these answers.
    """
    prompts = source if isinstance(source, PromptSource) else PromptSource(source)
    writer = Answerer(model, tokenizer, config)
    file = BatchFile(path, writer.origin(prompts.identity))
    scripts = _Scripts(prompts, writer.chat, config)
    following, index = iter(scripts), 0
    with progress_bar(console) as progress:
        task = progress.add_task("answering", total=config.tokens, completed=file.tokens, speed="")
        while config.tokens is None or file.tokens < config.tokens:
            window = list(islice(following, _WINDOW * config.rows))
            if not window:
                break
            if index >= file.batches:
                started, before = time.monotonic(), file.tokens
                file.append(index, writer.batch(index, window))
                speed = (file.tokens - before) / (time.monotonic() - started)
                progress.update(task, completed=file.tokens, speed=f"{speed:.0f} tokens/s")
            index += 1
    if not file.conversations:
        raise ValueError(f"{prompts.name}s: no prompt to answer ({scripts.too_long} too long, {scripts.broken} broken)")
    return Written(file.tokens, file.conversations, scripts.duplicates, scripts.too_long, scripts.broken)
