"""What the assistant says in a conversation, for any chat template: which tokens of the rendered text are its own.

What a token must hold to count is said in `data`.
"""

from __future__ import annotations

import contextlib
import copy
import re
from itertools import pairwise
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from treedec.training.sources import first_line

_ADVICE = "put {% generation %} blocks into the template to mark what the assistant says"


class BadSample(ValueError):
    """What is wrong with one sample, which can be left out."""


class Chat:
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
            BadSample: the template refuses the messages, or it cannot be told what is the assistant's.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._render(messages)
        if self._blocks:
            ids, responses = self._by_blocks(messages, turns, text)
        else:
            ids, responses = self._by_marks(messages, turns, text)
        for turn, (first, last) in zip(turns, responses, strict=True):
            if first >= last:
                raise BadSample(f"what the assistant says in messages[{turn}] has no token")
        for turn, ((_, before), (first, _)) in zip(turns[1:], pairwise(responses), strict=True):
            if first < before:
                raise BadSample(f"messages[{turn}] shares tokens with the turn before it; {_ADVICE}")
        return ids, responses

    def _render(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        # A template is a program: besides what it refuses on purpose, it fails in any way that programs do.
        except Exception as error:
            raise BadSample(f"the chat template refuses its messages ({first_line(error)})") from error
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
            raise BadSample(
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
            raise BadSample(
                f"the chat template has {len(blocks)} {{% generation %}} blocks for the {len(turns)} turns of the "
                "assistant; correct the template"
            )
        responses = []
        for turn, (first, last) in zip(turns, blocks, strict=True):
            before, after = self._around(messages, turn)
            begin, end = len(before), len(text) - len(after)
            unchanged = text.startswith(before) and text.endswith(after)
            if unchanged and not (offsets[first, 0] <= begin and end <= offsets[last - 1, 1]):
                raise BadSample(
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
            raise BadSample(
                f"the chat template changes what stands around messages[{turn}] with what the assistant says there; "
                f"{_ADVICE}"
            )
        end = len(text) - len(after)
        if not text[begin if content is None else content : end].strip():
            raise BadSample(f"the chat template leaves out what the assistant says in messages[{turn}]; {_ADVICE}")
        return begin, end

    def _prompt(self, messages: list[dict[str, str]], turn: int) -> str:
        """What a turn is the answer to; empty if the template does not render it without the turn."""
        if turn:
            with contextlib.suppress(BadSample):
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
            raise BadSample(
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


def _untrimmed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy that counts all white space among the characters of a token.

    The last step of some tokenizers takes it off. That step otherwise only adds the special tokens of bare texts, which
    chat templates write themselves.
    """
    changed = copy.deepcopy(tokenizer)
    cast(Any, changed).backend_tokenizer.post_processor = None
    return changed
