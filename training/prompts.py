"""Prompts to be answered: where they are read from, and what of them is kept.

A prompt is a conversation without its answers: what the system and the user say, cut where the assistant speaks. Data
sets write conversations in several ways, which are told apart by their keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treedec.training.sources import HUB_NAME, JSON_LINES, builder_of, is_file_name, rows

_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant",
    "human": "user", "gpt": "assistant", "model": "assistant",
}  # fmt: skip
_KEYS = "'messages', 'conversations', 'prompt', 'instruction' or 'text'"

Message = dict[str, str]


class BrokenPrompt(ValueError):
    """Something that is no prompt; says where it stands and what is wrong."""


@dataclass(frozen=True)
class Prompt:
    """What is said to the assistant, in one conversation.

    Attributes:
        turns: before each answer, the messages that lead to it, none of them the assistant's.
        place: where it was read.
    """

    turns: tuple[tuple[Message, ...], ...]
    place: str

    @property
    def key(self) -> bytes:
        """The same for prompts that ask the same."""
        return prompt_key([message for turn in self.turns for message in turn])


def prompt_key(messages: Iterable[Mapping[str, str]]) -> bytes:
    """16 bytes that are the same for messages that differ in case, spacing or closing punctuation only."""
    normal = [
        (message["role"], " ".join(unicodedata.normalize("NFKC", message["content"]).casefold().split()).rstrip(".?! "))
        for message in messages
    ]
    return hashlib.blake2b(json.dumps(normal).encode(), digest_size=16).digest()


class PromptSource:
    """Where prompts are read from, as often as needed and always in the same order.

    Args:
        source: a file of JSON lines (`.jsonl`, `.ndjson`) or one that `datasets` reads (`.json`, `.parquet`, `.csv`);
            any other file, which has a prompt a line; a folder or the name of a data set, as `datasets` reads it,
            `NAME` or `NAME:CONFIGURATION`; or an iterable of rows, such as a data set that is loaded already. A row is
            a text or a mapping with `messages`, `conversations`, `prompt`, `instruction` (and `input`) or `text`.
        split: of a folder or a data set.

    Raises:
        FileNotFoundError: there is no such file or folder, and a data set cannot have that name.

    Attributes:
        name: what places are called.
        identity: tells sources apart: what a file holds, the name of a data set.
    """

    def __init__(self, source: str | os.PathLike[str] | Iterable[str | Mapping[str, Any]], split: str = "train"):
        self._rows: Iterable[Any]
        if not isinstance(source, (str, os.PathLike)):
            self.name, self.identity, self._rows = "row", "given rows", source
            return
        path = Path(source)
        if not path.is_file():
            if not path.is_dir() and (is_file_name(path) or not HUB_NAME.fullmatch(str(source))):
                raise FileNotFoundError(f"{source}: no such file or folder of prompts")
            self.name, self.identity = f"{source}, split {split!r}, row", f"{source}, split {split!r}"
            self._rows = _DataSet(str(source), split)
            return
        with path.open("rb") as file:
            self.identity = hashlib.file_digest(file, "sha256").hexdigest()
        builder = builder_of(path)
        self.name = f"{path}, line" if builder is None else f"{path}, row"
        self._rows = _Lines(path) if builder is None else _DataSet(str(path), "train", builder)

    def __iter__(self) -> Iterator[Prompt | BrokenPrompt]:
        """Prompts and what should have been one, in the order of the source; empty lines are neither."""
        for number, row in enumerate(self._rows, 1):
            if row == "":
                continue
            place = f"{self.name} {number}"
            try:
                yield Prompt(_turns(row), place)
            except ValueError as error:
                yield BrokenPrompt(f"{place}: {error}")


class _Lines:
    """The rows of a file, read anew by every iterator; an exception in the place of one that cannot be read."""

    def __init__(self, path: Path):
        self._path = path
        self._parse = path.suffix in JSON_LINES

    def __iter__(self) -> Iterator[Any]:
        with self._path.open("rb") as file:
            for line in file:
                yield self._row(line.strip())

    def _row(self, line: bytes) -> Any:
        try:
            text = line.decode()
            return json.loads(text) if self._parse and text else text
        except (ValueError, RecursionError):
            return ValueError("not JSON" if self._parse else "not UTF-8")


class _DataSet:
    """What `sources.rows` yields, streamed anew by every iterator."""

    def __init__(self, name: str, split: str, builder: str | None = None):
        self._where = name, split, builder

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (row for _, row in rows(*self._where))


def _turns(row: Any) -> tuple[tuple[Message, ...], ...]:
    """What of a row is said to the assistant.

    Raises:
        ValueError: it is not a prompt; says what is wrong.
    """
    turns: list[tuple[Message, ...]] = []
    heard: list[Message] = []
    for message in _messages(row):
        if message["role"] != "assistant":
            heard.append(message)
        elif heard:
            turns.append(tuple(heard))
            heard = []
        else:
            raise ValueError("the assistant speaks where nothing has been said to it")
    if heard and heard[-1]["role"] == "user":
        turns.append(tuple(heard))
    if not turns:
        raise ValueError("there is nothing to answer")
    if not all(any(message["role"] == "user" for message in turn) for turn in turns):
        raise ValueError("the assistant answers where the user has said nothing")
    return tuple(turns)


def _messages(row: Any) -> Sequence[Message]:
    """The messages of a row, whichever way it writes them."""
    if isinstance(row, str):
        return [_said("user", row)]
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, Mapping):
        raise ValueError(f"a text or an object is expected, not {row!r:.60}")
    for key in ("messages", "conversations", "prompt"):
        value = row.get(key)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return [_message(entry) for entry in value]
    for key in ("prompt", "instruction", "text"):
        if isinstance(row.get(key), str):
            more = row.get("input") if key == "instruction" else None
            return [_said("user", f"{row[key]}\n\n{more}" if more else row[key])]
    raise ValueError(f"none of {_KEYS} is there, as a text or as a list of messages")


def _message(entry: Any) -> Message:
    """One message, of `role` and `content` or of `from` and `value`."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"a message is expected, not {entry!r:.60}")
    role, content = (entry.get("role", entry.get("from")), entry.get("content", entry.get("value")))
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"the role {role!r} is none of {', '.join(_ROLES)}")
    if _ROLES[role] == "assistant":
        return {"role": "assistant", "content": ""}  # will be said anew
    return _said(_ROLES[role], content)


def _said(role: str, content: Any) -> Message:
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"a message of the {role} has no text, or not only text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a message of the {role} holds half a character ({error})") from error
    return {"role": role, "content": content}
