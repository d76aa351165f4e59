"""Reads training text: from conversations or documents, wherever they are, to tokens and what the assistant wrote.

What counts as the assistant's, for any chat template. A conversation is tokenised as a whole, as the model sees it.
What the assistant says in a turn begins where the prompt for that turn ends, and ends with its content. A token is the
assistant's if it holds a character of that, so one that straddles the end of the prompt or of the content is; an added
token (`<|im_end|>`, `</s>`, …) that begins before it is not. The added token that ends the turn is the assistant's too,
because the model must learn to stop: the first one after the content, if nothing but white space lies between them.
Where no such token follows, as in the last turn of templates that write the end of a turn only with the beginning of
the next, what the assistant says ends with its content.

Where that is in the text is measured, not guessed: see `_Chat`. Whatever cannot be measured is an error that names the
sample.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from treedec.training.contracts import Corpus

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
_JSON_LINES = (".jsonl", ".ndjson")
# The builder of the `datasets` library that reads a file, by the end of its name.
_BUILDERS = {
    ".parquet": "parquet", ".csv": "csv", ".json": "json",
    ".jsonl.gz": "json", ".json.gz": "json", ".jsonl.zst": "json", ".json.zst": "json",
}  # fmt: skip
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?")
_SHOWN = 10  # broken samples that are reported one by one

_log = logging.getLogger(__name__)


class _BadSample(ValueError):
    """What is wrong with one sample, which can be left out."""


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
        except _BadSample as error:
            problem = f"{place}: {error}{decided}"
            if not skip_bad:
                raise ValueError(f"{problem}; `skip_bad` leaves such samples out") from error
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
            _BadSample: a token id is out of range, or the conversation is too long.
        """
        if not ids:
            return
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < self.vocab_size:
                raise _BadSample(f"token id {extreme} is not in the target's vocabulary [0, {self.vocab_size})")
        length = len(ids) if self.max_length is None else min(len(ids), self.max_length)
        if self.context_length is not None and length > self.context_length:
            raise _BadSample(
                f"its {length} tokens are beyond the target's context of {self.context_length}; `max_length` cuts "
                "conversations"
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
        return _rows(source, split)
    if not path.exists():
        if not isinstance(source, str) or not _HUB_NAME.fullmatch(source) or _is_file_name(path):
            raise FileNotFoundError(f"{source}: no such file or folder")
        return _rows(source, split)
    if path.suffix == ".txt" and format in ("auto", "text"):
        return _documents(path)
    builder = next((builder for ending, builder in _BUILDERS.items() if path.name.endswith(ending)), None)
    if builder is None or (path.suffix == ".json" and _first_byte(path) != b"["):
        return _json_lines(path)
    return _rows(source, "train", builder)


def _is_file_name(path: Path) -> bool:
    return path.name.endswith((".txt", *_JSON_LINES, *_BUILDERS))


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


def _rows(
    source: str | os.PathLike[str], split: str, builder: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The samples of whatever the `datasets` library reads, one at a time.

    Args:
        source: a file that `builder` reads, a folder, or a name on the hub.
        split: which split; a file has only "train".
        builder: None for a folder or a name.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source}: only the `datasets` library reads this: run `pip install 'treedec[train]'`"
        ) from error
    path = Path(source).expanduser()
    if path.is_dir() and not any(entry.is_file() for entry in path.rglob("*")):
        raise ValueError(f"{source}: a folder without files")
    where = f"{source}" if builder else f"{source}, split {split!r}"
    try:
        if builder:
            rows = datasets.load_dataset(builder, data_files=str(path), split=split, streaming=True)
        elif (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(path))[split]
        elif (path / "state.json").is_file():
            rows = datasets.load_from_disk(str(path))
        elif path.is_dir():
            rows = datasets.load_dataset(str(path), split=split, streaming=True)
        else:
            name = cast(re.Match[str], _HUB_NAME.fullmatch(str(source)))
            rows = datasets.load_dataset(name["name"], name["config"], split=split, streaming=True)
        numbered = enumerate(rows)
        while (row := next(numbered, None)) is not None:
            yield f"{where}, sample {row[0]}", row[1]
    # Downloads, file formats and schemas fail in the exceptions of as many libraries.
    except Exception as error:
        raise ValueError(f"{where}: the `datasets` library cannot read it ({_first_line(error)})") from error


def _fields(raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """A sample without the keys that are null, which is how tables spell those that are missing."""
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _BadSample(f"not a line of JSON ({_first_line(error)})") from error
    if not isinstance(raw, dict):
        raise _BadSample(f"a sample must be an object with keys, not {_kind(raw)}")
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
            self._chat = _Chat(tokenizer)

    def encode(self, sample: Mapping[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the spans of what is supervised in ascending order.

        Raises:
            _BadSample: the sample is not one of this format, or not one that the template shows exactly.
        """
        for key in _KEYS[self.format]:
            if key not in sample:
                raise _BadSample(f"{key!r} is missing")
        if self.format == "tokens":
            return _checked_tokens(sample["input_ids"], sample["responses"])
        if self.format == "text":
            return self._text(sample["text"])
        return self._chat.encode(_messages(sample[_KEYS[self.format][0]]))

    def _text(self, text: object) -> tuple[list[int], list[tuple[int, int]]]:
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n")
            except UnicodeDecodeError as error:
                raise _BadSample(f"not UTF-8 ({error})") from error
        text = _checked_text(text, "text")
        if not text.strip():
            return [], []
        tokenizer = cast(PreTrainedTokenizerBase, self._tokenizer)
        ids = cast(list[int], tokenizer(text, verbose=False)["input_ids"])
        return ids, [(0, len(ids))]


def _checked_tokens(ids: object, responses: object) -> tuple[list[int], list[tuple[int, int]]]:
    if not _is_list_of_ints(ids) or not ids:
        raise _BadSample("input_ids must be a list of token ids, and not an empty one")
    ids = cast(list[int], ids)
    if not isinstance(responses, list) or not all(_is_list_of_ints(span) and len(span) == 2 for span in responses):
        raise _BadSample("responses must be a list of [start, end] pairs of token positions")
    for start, end in responses:
        if not 0 <= start <= end <= len(ids):
            raise _BadSample(f"the response [{start}, {end}) does not lie within its {len(ids)} tokens")
    for (_, before), (start, end) in pairwise(responses):
        if start < before:
            raise _BadSample(f"the response [{start}, {end}) begins before the one listed before it has ended")
    return ids, [(start, end) for start, end in responses]


def _is_list_of_ints(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}  # True and False are instances of int, too


def _messages(items: object) -> list[dict[str, str]]:
    """Messages as chat templates take them."""
    if not isinstance(items, list) or not items:
        raise _BadSample(f"the messages must be a list, and not an empty one, not {_kind(items)}")
    messages = []
    for index, item in enumerate(items):
        name = f"messages[{index}]"
        if not isinstance(item, dict):
            raise _BadSample(f"{name} must be an object with a role and a content, not {_kind(item)}")
        role = item.get("role") or item.get("from")
        if not isinstance(role, str) or role not in _ROLES:
            raise _BadSample(f"{name} has the role {role!r}, which is none of {', '.join(_ROLES)}")
        if item.get("tool_calls") or item.get("function_call"):
            raise _BadSample(f"{name} calls a tool, and where that is in the text cannot be told")
        content = item.get("content")
        message = {"role": _ROLES[role], "content": _content(item.get("value") if content is None else content, name)}
        if message["role"] == "assistant":
            if not message["content"].strip():
                raise _BadSample(f"{name} is a turn in which the assistant says nothing")
            if item.get("reasoning_content"):
                message["reasoning_content"] = _checked_text(item["reasoning_content"], f"{name} reasoning_content")
        messages.append(message)
    return messages


def _content(content: object, name: str) -> str:
    if not isinstance(content, list):
        return _checked_text(content, f"the content of {name}")
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise _BadSample(f"the content of {name} has a part that is not text: {str(part)[:80]}")
    return _checked_text("".join(part["text"] for part in content), f"the content of {name}")


def _checked_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise _BadSample(f"{name} must be a string, not {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _BadSample(f"{name} holds half a character ({error})") from error
    return text


class _Chat:
    """Renders conversations with a chat template, tokenises them and finds what the assistant says in them.

    Where the content of a turn is: the conversation is rendered again with a mark in its place. If the text begins with
    what stands before the mark and ends with what stands after it, then what lies between them is the content, whatever
    the template has made of it. Where the turn begins: the messages before it, rendered with the prompt for an answer,
    are the beginning of the text; the rest up to the content is what the model itself must write before it. A template
    that rewrites what stands before, because of what the content is, still shows the beginning by the prompt.

    A template with `{% generation %}` blocks says itself where the assistant speaks, if the tokenizer is a fast one. It
    is checked that there is one block for each turn, with the content of the turn in it.

    Args:
        tokenizer: has a chat template; is left as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._fast = bool(tokenizer.is_fast)
        self._tokenizer = _untrimmed(tokenizer) if self._fast else tokenizer
        template = tokenizer.get_chat_template()
        self._blocks = self._fast and re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        # Chat models end turns with special tokens, but some of their tokenizers forget to say that these are special.
        # White space, of which some add long runs, ends nothing.
        added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._markers = added | set(tokenizer.all_special_ids)

    def encode(self, messages: list[dict[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the token spans of what the assistant says in each of its turns.

        Raises:
            _BadSample: the template refuses the messages, or it cannot be told what is the assistant's.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._render(messages)
        if self._blocks:
            ids, responses = self._by_blocks(messages, turns, text)
        else:
            ids, responses = self._by_marks(messages, turns, text)
        for turn, (first, last) in zip(turns, responses, strict=True):
            if first >= last:
                raise _BadSample(f"what the assistant says in messages[{turn}] has no token")
        for turn, ((_, before), (first, _)) in zip(turns[1:], pairwise(responses), strict=True):
            if first < before:
                raise _BadSample(f"messages[{turn}] shares tokens with the turn before it; {_ADVICE}")
        return ids, responses

    def _render(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        # A template is a program: besides what it refuses on purpose, it fails in any way that programs do.
        except Exception as error:
            raise _BadSample(f"the chat template refuses its messages ({_first_line(error)})") from error
        return cast(str, rendered)

    def _by_marks(
        self, messages: list[dict[str, str]], turns: list[int], text: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        spans = [self._span(messages, turn, text) for turn in turns]
        if not self._fast:
            return self._by_pieces(messages, spans, text)
        ids, offsets, _ = self._tokens(messages)
        responses = []
        for begin, end in spans:
            first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
            last = int(np.searchsorted(offsets[:, 0], end, side="left"))
            if first < last and ids[first] in self._markers and offsets[first, 0] < begin:
                first += 1
            # Some tokens at the end of turns take the white space before them in.
            ended = first < last and ids[last - 1] in self._markers and offsets[last - 1, 1] > end
            responses.append((first, last if ended else self._with_end(ids, last)))
        return ids, responses

    def _by_pieces(
        self, messages: list[dict[str, str]], spans: list[tuple[int, int]], text: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """For tokenizers that do not tell which characters a token holds: the text is tokenised in pieces."""
        encoded = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        whole = cast(dict[str, list[int]], encoded)["input_ids"]
        ids: list[int] = []
        places = []
        for begin, end in pairwise([0, *(edge for span in spans for edge in span), len(text)]):
            places.append(len(ids))
            if begin < end:
                piece = self._tokenizer(text[begin:end], add_special_tokens=False, verbose=False)
                ids.extend(cast(list[int], piece["input_ids"]))
        if ids != whole:
            raise _BadSample(
                "this tokenizer does not tell which characters a token holds, and the text in pieces has other tokens "
                "than as a whole; use a fast tokenizer"
            )
        return ids, [(first, self._with_end(ids, last)) for first, last in zip(places[1::2], places[2::2], strict=True)]

    def _by_blocks(
        self, messages: list[dict[str, str]], turns: list[int], text: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets, mask = self._tokens(messages)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).tolist()
        blocks = list(zip(edges[::2], edges[1::2], strict=True))
        if len(blocks) != len(turns):
            raise _BadSample(
                f"the chat template has {len(blocks)} {{% generation %}} blocks for the {len(turns)} turns of the "
                "assistant; correct the template"
            )
        responses = []
        for turn, (first, last) in zip(turns, blocks, strict=True):
            before, after = self._around(messages, turn)
            begin, end = len(before), len(text) - len(after)
            unchanged = text.startswith(before) and text.endswith(after)
            if unchanged and not (offsets[first, 0] <= begin and end <= offsets[last - 1, 1]):
                raise _BadSample(
                    f"what the assistant says in messages[{turn}] is not within the {{% generation %}} block of the "
                    "chat template; correct the template"
                )
            prompt = self._prompt(messages, turn) if ids[first] in self._markers else ""
            if text.startswith(prompt) and offsets[first, 0] < len(prompt):
                first += 1
            responses.append((first, self._with_end(ids, last, first)))
        return ids, responses

    def _tokens(self, messages: list[dict[str, str]]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Token ids; `[L, 2]` the characters that each holds; `[L]` whether it overlaps a generation block."""
        encoded = cast(
            dict[str, list[Any]],
            self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=self._blocks,
                tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
            ),
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return encoded["input_ids"], offsets, np.array(encoded.get("assistant_masks", []), dtype=np.int64)

    def _span(self, messages: list[dict[str, str]], turn: int, text: str) -> tuple[int, int]:
        """The characters that the assistant says in one of its turns, without what ends it."""
        before, after = self._around(messages, turn)
        prompt = self._prompt(messages, turn)
        content = len(before) if text.startswith(before) else None
        begin = content
        if text.startswith(prompt) and (content is None or before.startswith(prompt)):
            # A template that does not write prompts leaves the name of the role to the turn. White space belongs to the
            # turn all the same: in "[INST] … [/INST] answer", it is often part of the first token that is written.
            blank = content is not None and not before[len(prompt) :].strip()
            if blank or (prompt and prompt != self._render(messages[:turn])):
                begin = len(prompt)
        if begin is None or not text.endswith(after):
            raise _BadSample(
                f"the chat template changes what stands around messages[{turn}] with what the assistant says there; "
                f"{_ADVICE}"
            )
        end = len(text) - len(after)
        if not text[begin if content is None else content : end].strip():
            raise _BadSample(f"the chat template leaves out what the assistant says in messages[{turn}]; {_ADVICE}")
        return begin, end

    def _prompt(self, messages: list[dict[str, str]], turn: int) -> str:
        """What a turn is the answer to; empty if the template does not render it without the turn."""
        if turn:
            with contextlib.suppress(_BadSample):
                return self._render(messages[:turn], prompt=True)
        return ""

    def _around(self, messages: list[dict[str, str]], turn: int) -> tuple[str, str]:
        """What the template writes before and after the content of a turn, when that is nothing special."""
        mark = "treedec-answer"
        while any(mark in value for message in messages for value in message.values()):
            mark += "-x"
        marked = [*messages[:turn], {**messages[turn], "content": mark}, *messages[turn + 1 :]]
        rendered = self._render(marked)
        if rendered.count(mark) != 1:
            raise _BadSample(
                f"the chat template writes the content of messages[{turn}] {rendered.count(mark)} times instead of "
                f"once; {_ADVICE}"
            )
        before, _, after = rendered.partition(mark)
        return before, after

    def _with_end(self, ids: list[int], last: int, block: int | None = None) -> int:
        """One past the token that ends the turn whose last token is `last - 1`, or `last` if there is none.

        Args:
            block: where the turn begins, if its end may be among its tokens, with white space behind it.
        """
        if block is not None:
            inside = last
            while inside > block and self._is_blank(ids[inside - 1]):
                inside -= 1
            if inside > block and ids[inside - 1] in self._markers:
                return inside
        end = last
        while end < len(ids) and self._is_blank(ids[end]):
            end += 1
        return end + 1 if end < len(ids) and ids[end] in self._markers else last

    def _is_blank(self, token: int) -> bool:
        return token not in self._markers and not cast(str, self._tokenizer.decode([token])).strip()


_ADVICE = "put {% generation %} blocks into the template to mark what the assistant says"


def _untrimmed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy that counts all white space among the characters of a token.

    The last step of some tokenizers takes it off. That step otherwise only adds the special tokens of bare texts, which
    chat templates write themselves.
    """
    changed = copy.deepcopy(tokenizer)
    cast(Any, changed).backend_tokenizer.post_processor = None
    return changed


def _kind(value: object) -> str:
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__


def _first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
