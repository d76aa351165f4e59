"""Self-synthesis: training conversations written by the target itself, without a data set.

An instruction-tuned model that is given only the opening of a user turn writes the question, and then answers it
(Magpie, Xu et al. 2024, arXiv:2406.08464). Draft heads must imitate this very target, so its own text is also the best
text.

All conversations of a batch advance in lockstep and need no padding: a row that ends a turn is fed the template's
tokens up to the next turn, while the others go on sampling. One batch is one unit of work: it is appended whole, and a
run that was interrupted continues with the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.models import Fingerprint
from treedec.target import Target
from treedec.training.openings import OPENINGS
from treedec.tree import TokenTree


@dataclass(frozen=True)
class SynthConfig:
    """What to synthesise.

    Attributes:
        tokens: stop after the batch that reaches this many tokens (questions, answers and template together).
        length: tokens per conversation; its turns go on until then.
        rows: conversations per batch.
        answer_tokens: an answer that has not ended by then is ended, so that repetition loops do not fill the data.
        question_tokens: likewise for a question.
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
    openings: tuple[str, ...] = OPENINGS
    opened: float = 0.75
    question_temperature: float = 1.0
    answer_temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "length", "rows", "answer_tokens", "question_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.opened <= 1:
            raise ValueError(f"opened must be a fraction in [0, 1], not {self.opened}")
        if self.opened and not (self.openings and all(self.openings)):
            raise ValueError("openings must be given and not be empty, unless opened is 0")
        if not self.answer_temperatures or min(self.question_temperature, *self.answer_temperatures) < 0:
            raise ValueError("temperatures must be given and not be negative")


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
            raise ValueError("the tokenizer has no chat template, so the model cannot be asked to write user turns")
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
        special = _special_ids(tokenizer)
        for turn, end in (("a question", after_question[0]), ("an answer", after_answer[0])):
            if end not in special:
                raise ValueError(
                    f"the chat template ends {turn} with {tokenizer.decode([end])!r}, which is not a special token, so "
                    "the end of a turn could not be told from text"
                )
        return cls(opening, after_question, after_answer)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every special token, whether or not the tokenizer has a role for it (`all_special_ids` are those with one)."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


@dataclass
class _Row:
    """One conversation while it grows."""

    tokens: list[int]
    temperature: float
    forced: list[int] = field(default_factory=list)
    answering: bool = False
    turn_start: int = 0
    turns: list[tuple[str, int, int]] = field(default_factory=list)  # role, first token, one past the last


class Synthesizer:
    """Writes batches of conversations with one target.

    Raises:
        ValueError: the tokenizer has no usable chat template, or a conversation does not fit the model's context.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: SynthConfig):
        self.config, self.tokenizer, self.target = config, tokenizer, Target(model)
        self.template = TurnTemplate.of(tokenizer)
        limit = self.target.context_length
        if limit is not None and config.length > limit:
            raise ValueError(f"length {config.length} is beyond the model's context of {limit} tokens")
        if config.length <= len(self.template.opening):
            raise ValueError(
                f"length {config.length} leaves no room after the {len(self.template.opening)} tokens of the template"
            )
        vocab_size = self.target.vocab_size
        # Rows of the LM head beyond the tokenizer's vocabulary only pad it.
        banned = {id_ for id_ in _special_ids(tokenizer) if id_ < vocab_size} | set(range(len(tokenizer), vocab_size))
        self._openings = [tokenizer.encode(text, add_special_tokens=False) for text in config.openings]
        self._never_question = sorted(banned - {self.template.after_question[0]})
        self._never_answer = sorted(banned - {self.template.after_answer[0]})

    @property
    def origin(self) -> str:
        """What decides the conversations, in 16 hexadecimal digits: target, template, all settings but `tokens`."""
        config = asdict(self.config)
        del config["tokens"]
        # 1 and 1.0 are the same temperature.
        config["question_temperature"] = float(self.config.question_temperature)
        config["answer_temperatures"] = [float(temperature) for temperature in self.config.answer_temperatures]
        made_of = [config, Fingerprint.of(self.target.model).to_dict(), asdict(self.template)]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]

    @torch.inference_mode()
    def batch(self, index: int) -> list[dict[str, object]]:
        """The conversations of batch `index`, each with `messages`, `input_ids` and `responses` (token spans)."""
        config, target = self.config, self.target
        generator = torch.Generator(target.device).manual_seed(config.seed * 1_000_003 + index)
        temperatures = config.answer_temperatures
        opening = list(self.template.opening)
        words = self._first_words(generator)
        rows = [
            _Row(
                list(opening),
                temperatures[(index * config.rows + i) % len(temperatures)],
                forced=words[i],
                turn_start=len(opening),
            )
            for i in range(config.rows)
        ]
        cache = target.allocate(config.rows, config.length)
        if opening[:-1]:
            prompt = torch.tensor([opening[:-1]] * config.rows, dtype=torch.long, device=target.device)
            target.prefill(cache, prompt)
        committed = torch.ones(config.rows, 1, dtype=torch.bool)
        while len(rows[0].tokens) < config.length:
            verified = target.verify(cache, TokenTree.chains([row.tokens[-1:] for row in rows]))
            cache.commit(committed)
            sampled = self._sample(verified.logits[:, 0], rows, generator)
            for row, token in zip(rows, sampled, strict=True):
                self._advance(row, token)
        return [self._finish(row) for row in rows]

    def _first_words(self, generator: torch.Generator) -> list[list[int]]:
        """The tokens that each row's first question is made to begin with, none for some."""
        rows, device = self.config.rows, generator.device
        left = torch.rand(rows, generator=generator, device=device) >= self.config.opened
        if bool(left.all()):
            return [[] for _ in range(rows)]
        choice = torch.randint(len(self._openings), (rows,), generator=generator, device=device)
        return [[] if free else list(self._openings[k]) for free, k in zip(left.tolist(), choice.tolist(), strict=True)]

    def _sample(self, logits: Tensor, rows: Sequence[_Row], generator: torch.Generator) -> list[int]:
        """One token per row from `[B, V]` logits, at each row's temperature, never a special token inside a turn."""
        logits = logits.float()
        for answering, never, end in (
            (False, self._never_question, self.template.after_question[0]),
            (True, self._never_answer, self.template.after_answer[0]),
        ):
            members = [i for i, row in enumerate(rows) if row.answering is answering]
            logits[torch.tensor(members, dtype=torch.long)[:, None], torch.tensor(never, dtype=torch.long)] = -torch.inf
            fresh = [i for i in members if rows[i].turn_start == len(rows[i].tokens)]
            logits[torch.tensor(fresh, dtype=torch.long), end] = -torch.inf  # no empty turns
        heat = torch.tensor(
            [row.temperature if row.answering else self.config.question_temperature for row in rows],
            device=logits.device,
        )
        greedy = logits.argmax(-1)
        cumulative = (logits / heat.clamp(min=1e-3)[:, None]).softmax(-1).cumsum(-1)
        # Inverse transform: one uniform number a row instead of V exponential ones; the seed contract of generate is
        # not at stake here.
        uniform = torch.rand(len(rows), 1, generator=generator, device=logits.device) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, uniform, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
        return torch.where(heat > 0, drawn, greedy).tolist()

    def _advance(self, row: _Row, sampled: int) -> None:
        """Append the sampled token, or the next one that the template forces."""
        token = row.forced.pop(0) if row.forced else sampled
        following = self.template.after_answer if row.answering else self.template.after_question
        in_turn = len(row.tokens) >= row.turn_start
        most = self.config.answer_tokens if row.answering else self.config.question_tokens
        if in_turn and len(row.tokens) - row.turn_start >= most:
            token, row.forced = following[0], []
        row.tokens.append(token)
        if in_turn and token == following[0]:
            # The end token is part of what the assistant says: heads must learn when it stops.
            row.turns.append(("assistant" if row.answering else "user", row.turn_start, len(row.tokens)))
            row.forced = list(following[1:])
            row.answering = not row.answering
            row.turn_start = len(row.tokens) + len(row.forced)

    def _finish(self, row: _Row) -> dict[str, object]:
        turns = list(row.turns)
        if row.turn_start < len(row.tokens):
            turns.append(("assistant" if row.answering else "user", row.turn_start, len(row.tokens)))
        decode = self.tokenizer.decode
        return {
            "messages": [
                {"role": role, "content": decode(row.tokens[start:end], skip_special_tokens=True)}
                for role, start, end in turns
            ],
            "input_ids": row.tokens,
            "responses": [[start, end] for role, start, end in turns if role == "assistant"],
        }


def synthesize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike[str],
    config: SynthConfig,
    *,
    console: Console | None = None,
) -> int:
    """Append conversations to a JSONL file until it holds `config.tokens` tokens.

    A file that exists is continued: batches already in it are skipped, and what a kill left of an unfinished one is
    dropped. The same configuration therefore gives the same file whether or not the run was interrupted. A file with
    anything else in it is left as it is: every line says in `origin` what it was made with.

    Args:
        model, tokenizer: the target.
        path: the JSONL file; each line has `origin`, `messages`, `input_ids` and `responses` (`[start, end)` spans of
            answers).
        config: see `SynthConfig`.
        console: where progress is shown; None for standard error.

    Returns:
        The number of tokens in the file.

    Raises:
        ValueError: the tokenizer has no usable chat template, a conversation does not fit the model's context, or the
            file holds something else than conversations of this configuration and target.
    """
    path = Path(path)
    writer = Synthesizer(model, tokenizer, config)
    origin = writer.origin
    done = _completed_batches(path, config.rows, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = -(-config.tokens // (config.length * config.rows))
    with _progress(console) as progress:
        task = progress.add_task("synthesising", total=wanted, completed=done, speed="")
        for index in range(done, wanted):
            started = time.monotonic()
            lines = [json.dumps({"origin": origin, **sample}, ensure_ascii=False) for sample in writer.batch(index)]
            with path.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
                file.flush()
                os.fsync(file.fileno())
            speed = config.length * config.rows / (time.monotonic() - started)
            progress.update(task, advance=1, speed=f"{speed:.0f} tokens/s")
    return max(done, wanted) * config.length * config.rows


def _completed_batches(path: Path, rows: int, origin: str) -> int:
    """How many whole batches `path` holds; the beginning of another one is cut off.

    Raises:
        ValueError: there is anything but conversations of this origin; the file is as it was.
    """
    if not path.exists():
        return 0
    ours = f'{{"origin": "{origin}", '.encode()
    lines, offset, end_of_batch = 0, 0, 0
    with path.open("rb") as file:
        for line in file:
            place = f"{path}, line {lines + 1}"
            if not line.endswith(b"\n"):
                if line[: len(ours)] != ours[: len(line)]:
                    raise ValueError(f"{place}: not the beginning of a conversation; remove it, or give another file")
                break
            try:
                found = _parse(line, place).get("origin")
            except ValueError as error:
                raise ValueError(f"{error}; the file is left as it is: give another one") from error
            if found != origin:
                raise ValueError(
                    f"{place}: written with other settings, another target or by something else (its 'origin' is "
                    f"{found!r}, not {origin!r}); give what the file was begun with, or another file"
                )
            lines, offset = lines + 1, offset + len(line)
            if lines % rows == 0:
                end_of_batch = offset
    if end_of_batch < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end_of_batch)
    return lines // rows


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
    )


def read_samples(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The conversations of a JSONL file such as `synthesize` writes, each with at least two keys.

    Yields:
        Dicts with `input_ids`, a list of ints, and `responses`, a list of spans `[start, end)` in ascending order that
        lie within the text and do not overlap. Other keys are passed on as they are.

    Raises:
        ValueError: a line is something else; names the file, the line and what is wrong.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            yield _parse(line, f"{path}, line {number}")


def _parse(line: bytes, place: str) -> dict[str, Any]:
    """One line of a data file, checked; `place` says where it is."""
    try:
        sample = json.loads(line)
        ids, responses = sample["input_ids"], sample["responses"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{place}: not a conversation with input_ids and responses ({error!r})") from error
    if not _is_list_of_ints(ids):
        raise ValueError(f"{place}: input_ids must be a list of token ids")
    if not isinstance(responses, list) or not all(_is_list_of_ints(span) and len(span) == 2 for span in responses):
        raise ValueError(f"{place}: responses must be a list of [start, end] pairs of token positions")
    for start, end in responses:
        if not 0 <= start <= end <= len(ids):
            raise ValueError(f"{place}: the response [{start}, {end}) does not lie within its {len(ids)} tokens")
    for (_, before), (start, end) in pairwise(responses):
        if start < before:
            raise ValueError(
                f"{place}: the response [{start}, {end}) begins before the one that is listed before it has ended"
            )
    return sample


def _is_list_of_ints(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # True and False are ints, too
