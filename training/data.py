"""Reads training text: from conversations or documents, wherever they are, to tokens and what the assistant wrote.

What counts as the assistant's, for any chat template. A conversation is tokenised as a whole, as the model sees it.
What the assistant says in a turn begins where the prompt for that turn ends, and ends with its content. A token is the
assistant's if it holds a character of that, so one that straddles the end of the prompt or of the content is; an added
token (`<|im_end|>`, `</s>`, …) that begins before it is not. The added token that ends the turn is the assistant's too,
because the model must learn to stop: the first one after the content, if nothing but white space lies between them.
Where no such token follows, as in the last turn of templates that write the end of a turn only with the beginning of
the next, what the assistant says ends with its content.

Where that is in the text is measured, not guessed: see `chat`. Whatever cannot be measured is an error that names the
sample.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from treedec.training.chat import BadSample, Chat
from treedec.training.contracts import Corpus
from treedec.training.sources import HUB_NAME, builder_of, first_line, is_file_name, rows

FORMATS = ("auto", "tokens", "messages", "sharegpt", "text")

# What tells the formats apart, the first that fits: the keys of a sample.
_KEYS = {
    "tokens": ("input_ids", "responses"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "text": ("text",),
}
_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant",
}  # fmt: skip
_SHOWN = 10  # broken samples that are reported one by one

_log = logging.getLogger(__name__)


def read_corpus(
    source: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    context_length: int | None = None,
    format: str = "auto",
    split: str = "train",
    max_length: int | None = None,
    max_tokens: int | None = None,
    skip_bad: bool = False,
) -> Corpus:
    """Read conversations or documents, tokenise them, and find what the assistant wrote.

    The formats, and the keys of a sample:

    * "tokens": `input_ids`, and `responses` with the `[start, end)` spans of what the assistant wrote, as
      `treedec.training.synth` writes them.
    * "messages": `messages`, each with `role` and `content`; a content is a string or a list of text parts.
    * "sharegpt": `conversations`, each with `from` and `value`. Both formats take either pair of keys.
    * "text": `text`, all of which is supervised. Blank texts are passed over.

    Args:
        source: a file of JSON lines; a `.txt` file, in which blank lines separate the documents; a `.json`, `.parquet`
            or `.csv` file; a folder of such files or one that `datasets` saved; or the name of a data set on the
            Hugging Face hub, `owner/name` or `owner/name:configuration`. What exists here is never looked up there.
        tokenizer: the target's; may be None for "tokens".
        vocab_size: the target's; token ids lie below it.
        context_length: the most tokens the target can read; None for no limit.
        format: one of `FORMATS`; "auto" decides by the name of the file and the keys of its first sample.
        split: which split of a folder or of a data set on the hub.
        max_length: conversations are cut after this many tokens, None for not at all.
        max_tokens: stop after the conversation that reaches this many tokens in all; None to read everything.
        skip_bad: leave broken samples out, say so through `logging` and count them, instead of raising an error.

    Returns:
        The corpus, which supervises something.

    Raises:
        FileNotFoundError: `source` is not there, and cannot be the name of a data set.
        ValueError: an argument is out of range; the source needs the `datasets` library, which is not installed; it
            cannot be read, is empty or supervises nothing; or one of its samples is broken, is longer than the target
            can read, or is such that the chat template does not show where the assistant speaks. Names the file and the
            line, or the data set and the sample.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    for name, limit in (("max_length", max_length), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, not {limit}")
    if max_length is not None and context_length is not None and max_length > context_length:
        raise ValueError(f"max_length {max_length} is beyond the target's context of {context_length} tokens")
    encoder = None if format == "auto" else _Encoder(format, tokenizer, source)
    decided = ""
    corpus = _Growing(vocab_size, context_length, max_length)
    skipped, first_skipped = 0, ""
    for place, raw in _samples(source, format, split):
        try:
            sample = _fields(raw)
            if encoder is None:
                encoder = _Encoder(_decide(sample, place), tokenizer, place)
                decided = f" (read as {encoder.format!r}, as the keys of {place} say; `format` can say otherwise)"
            corpus.add(*encoder.encode(sample))
        except BadSample as error:
            problem = f"{place}: {error}{decided}"
            if not skip_bad:
                raise ValueError(f"{problem}; `skip_bad` (--skip-bad) leaves such samples out") from error
            if skipped < _SHOWN:
                _log.warning("left out: %s", problem)
            skipped, first_skipped = skipped + 1, first_skipped or problem
        if max_tokens is not None and len(corpus.tokens) >= max_tokens:
            break
    if skipped:
        _log.warning("%s: %d broken samples left out, %d kept", source, skipped, len(corpus.offsets) - 1)
    found = corpus.finish(skipped)
    if not len(found):
        left_out = f" but {skipped} broken ones; the first is {first_skipped}" if skipped else ""
        raise ValueError(f"{source}: no samples{left_out}")
    _, begin, end = found.runs.T
    if not np.any(end - begin >= 2):
        raise ValueError(
            f"{source}: nothing is supervised: in none of its {len(found)} conversations does the assistant say two "
            "tokens or more, not counting the first token of the text"
        )
    return found


class _Growing:
    """A corpus that is being read. Its arrays grow in place, so that no second copy of them is ever needed.

    Args:
        vocab_size, context_length, max_length: see `read_corpus`.
    """

    def __init__(self, vocab_size: int, context_length: int | None, max_length: int | None):
        self.vocab_size, self.context_length, self.max_length = vocab_size, context_length, max_length
        self.tokens, self.offsets, self.responses = array("i"), array("q", [0]), array("q")

    def add(self, ids: Sequence[int], responses: Sequence[tuple[int, int]]) -> None:
        """One conversation; one without tokens is passed over.

        Raises:
            BadSample: a token id is out of range, or the conversation is too long.
        """
        if not ids:
            return
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < self.vocab_size:
                raise BadSample(f"token id {extreme} is not in the target's vocabulary [0, {self.vocab_size})")
        length = len(ids) if self.max_length is None else min(len(ids), self.max_length)
        if self.context_length is not None and length > self.context_length:
            raise BadSample(
                f"its {length} tokens are beyond the target's context of {self.context_length}; `max_length` "
                "(--max-length) cuts conversations"
            )
        conversation = len(self.offsets) - 1
        self.tokens.extend(ids[:length])
        self.offsets.append(len(self.tokens))
        for start, end in responses:
            if start < min(end, length):
                self.responses.extend((conversation, start, min(end, length)))

    def finish(self, skipped: int) -> Corpus:
        """The corpus, on the same memory."""
        tokens = np.frombuffer(self.tokens, dtype=np.int32) if self.tokens else np.empty(0, dtype=np.int32)
        responses = np.frombuffer(self.responses, dtype=np.int64) if self.responses else np.empty(0, dtype=np.int64)
        return Corpus(tokens, np.frombuffer(self.offsets, dtype=np.int64), responses.reshape(-1, 3), skipped)


def _samples(source: str | os.PathLike[str], format: str, split: str) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """The samples of a source and where each is: a line of JSON, or the fields themselves."""
    path = Path(source).expanduser()
    if path.is_dir():
        return rows(source, split)
    if not path.exists():
        if not isinstance(source, str) or not HUB_NAME.fullmatch(source) or is_file_name(path):
            raise FileNotFoundError(f"{source}: no such file or folder")
        return rows(source, split)
    if path.suffix == ".txt" and format in ("auto", "text"):
        return _documents(path)
    builder = builder_of(path)
    if builder is None or (path.suffix == ".json" and _first_byte(path) != b"["):
        return _json_lines(path)
    return rows(source, "train", builder)


def _first_byte(path: Path) -> bytes:
    """The first one that is not white space."""
    with path.open("rb") as file:
        return next((line.strip()[:1] for line in file if line.strip()), b"")


def _json_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}, line {number}", line


def _documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The documents of a plain text, each where its first line is."""
    lines: list[bytes] = []
    begun = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                begun = begun if lines else number
                lines.append(line)
            elif lines:
                yield f"{path}, line {begun}", {"text": b"".join(lines)}
                lines = []
    if lines:
        yield f"{path}, line {begun}", {"text": b"".join(lines)}


def _fields(raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """A sample without the keys that are null, which is how tables spell those that are missing."""
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadSample(f"not a line of JSON ({first_line(error)})") from error
    if not isinstance(raw, dict):
        raise BadSample(f"a sample must be an object with keys, not {_kind(raw)}")
    return {key: value for key, value in raw.items() if value is not None}


def _decide(sample: Mapping[str, Any], place: str) -> str:
    for format, keys in _KEYS.items():
        if all(key in sample for key in keys):
            return format
    known = "; ".join(f"{' and '.join(keys)} for {format!r}" for format, keys in _KEYS.items())
    raise ValueError(f"{place}: its keys ({', '.join(sample) or 'none'}) are not those of a known format: {known}")


class _Encoder:
    """Makes tokens and responses of the samples of one format.

    Args:
        format: one of `_KEYS`.
        tokenizer: see `read_corpus`.
        place: what to name if the tokenizer is not enough for the format.

    Raises:
        ValueError: there is no tokenizer, or no chat template, and the format needs one.
    """

    def __init__(self, format: str, tokenizer: PreTrainedTokenizerBase | None, place: str | os.PathLike[str]):
        self.format, self._tokenizer = format, tokenizer
        if format == "tokens":
            return
        if tokenizer is None:
            raise ValueError(f"{place}: the format {format!r} needs a tokenizer")
        if format != "text":
            if not tokenizer.chat_template:
                raise ValueError(
                    f"{place}: the tokenizer has no chat template to render conversations with; set "
                    "`tokenizer.chat_template`, or give text or tokens"
                )
            self._chat = Chat(tokenizer)

    def encode(self, sample: Mapping[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the spans of what is supervised in ascending order.

        Raises:
            BadSample: the sample is not one of this format, or not one that the template shows exactly.
        """
        for key in _KEYS[self.format]:
            if key not in sample:
                raise BadSample(f"{key!r} is missing")
        if self.format == "tokens":
            return checked_tokens(sample["input_ids"], sample["responses"])
        if self.format == "text":
            return self._text(sample["text"])
        return self._chat.encode(_messages(sample[_KEYS[self.format][0]]))

    def _text(self, text: object) -> tuple[list[int], list[tuple[int, int]]]:
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n")
            except UnicodeDecodeError as error:
                raise BadSample(f"not UTF-8 ({error})") from error
        text = _checked_text(text, "text")
        if not text.strip():
            return [], []
        tokenizer = cast(PreTrainedTokenizerBase, self._tokenizer)
        ids = cast(list[int], tokenizer(text, verbose=False)["input_ids"])
        return ids, [(0, len(ids))]


def checked_tokens(ids: object, responses: object) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and spans of a sample as they are meant.

    Raises:
        BadSample: they are something else, or the spans do not ascend, overlap or leave the text.
    """
    if not is_list_of_ints(ids) or not ids:
        raise BadSample("input_ids must be a list of token ids, and not an empty one")
    ids = cast(list[int], ids)
    if not isinstance(responses, list) or not all(is_list_of_ints(span) and len(span) == 2 for span in responses):
        raise BadSample("responses must be a list of [start, end] pairs of token positions")
    for start, end in responses:
        if not 0 <= start <= end <= len(ids):
            raise BadSample(f"the response [{start}, {end}) does not lie within its {len(ids)} tokens")
    for (_, before), (start, end) in pairwise(responses):
        if start < before:
            raise BadSample(f"the response [{start}, {end}) begins before the one listed before it has ended")
    return ids, [(start, end) for start, end in responses]


def is_list_of_ints(value: object) -> bool:
    """Whether it is a list that holds nothing but integers."""
    return isinstance(value, list) and set(map(type, value)) <= {int}  # True and False are instances of int, too


def _messages(items: object) -> list[dict[str, str]]:
    """Messages as chat templates take them."""
    if not isinstance(items, list) or not items:
        raise BadSample(f"the messages must be a list, and not an empty one, not {_kind(items)}")
    messages = []
    for index, item in enumerate(items):
        name = f"messages[{index}]"
        if not isinstance(item, dict):
            raise BadSample(f"{name} must be an object with a role and a content, not {_kind(item)}")
        role = item.get("role") or item.get("from")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadSample(f"{name} has the role {role!r}, which is none of {', '.join(_ROLES)}")
        if item.get("tool_calls") or item.get("function_call"):
            raise BadSample(f"{name} calls a tool, and where that is in the text cannot be told")
        content = item.get("content")
        message = {"role": _ROLES[role], "content": _content(item.get("value") if content is None else content, name)}
        if message["role"] == "assistant":
            if not message["content"].strip():
                raise BadSample(f"{name} is a turn in which the assistant says nothing")
            if item.get("reasoning_content"):
                message["reasoning_content"] = _checked_text(item["reasoning_content"], f"{name} reasoning_content")
        messages.append(message)
    return messages


def _content(content: object, name: str) -> str:
    if not isinstance(content, list):
        return _checked_text(content, f"the content of {name}")
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise BadSample(f"the content of {name} has a part that is not text: {str(part)[:80]}")
    return _checked_text("".join(part["text"] for part in content), f"the content of {name}")


def _checked_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise BadSample(f"{name} must be a string, not {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSample(f"{name} holds half a character ({error})") from error
    return text


def _kind(value: object) -> str:
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__
