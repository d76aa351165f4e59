"""How a target writes many texts at once: the rows of one batch, each at its own place in its own text.

A row that has finished is given the next text, so that the batch stays full. What a row has to read before it writes
(a prompt, the template between two turns) goes through the same passes as what the others sample: one token at a time
while most rows sample, many at a time while most rows read.

This file knows tokens only. What they mean, and when a text is finished, is up to the texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from treedec.target import Target

_COLUMNS = 64  # most tokens of one row in one pass
_USED = 0.75  # the least share of the places of a pass that hold tokens


class Growing(ABC):
    """One text while it grows.

    Attributes:
        tokens: the text so far; at least one token more than is cached, until it is done.
        cached: how many of them the target has read.
        most: the text never gets longer than this.
        done: nothing more is to be written.
        temperature: of the next token; 0 takes the most probable one.
        kind: which tokens must not come next, as an index into what `grow` is given.
    """

    tokens: list[int]
    most: int
    cached: int = 0
    done: bool = False

    @property
    @abstractmethod
    def temperature(self) -> float: ...

    @property
    @abstractmethod
    def kind(self) -> int: ...

    @abstractmethod
    def push(self, token: int) -> None:
        """Take a sampled token, and append what comes next: that token, another in its place, more after it."""


def grow(
    target: Target,
    texts: Sequence[Growing],
    rows: int,
    banned: Sequence[Tensor],
    generator: torch.Generator,
) -> None:
    """Let texts grow until all are done, in the order given, `rows` of them at a time.

    Args:
        target: writes them.
        texts: where they begin; they are changed.
        rows: of one pass.
        banned: per kind of next token, the ids that are never sampled, int64 on the target's device.
        generator: on the target's device; its state and the texts decide everything.
    """
    waiting = iter([text for text in texts if not text.done])
    batch = [text for _, text in zip(range(rows), waiting, strict=False)]
    if not batch:
        return
    cache = target.allocate(len(batch), max(text.most for text in texts) + _COLUMNS)
    live = dict(enumerate(batch))
    while live:
        ids, real = _columns(live, len(batch))
        mask = None if bool(real.all()) else real.to(target.device)
        logits = target.prefill(cache, ids.to(target.device), mask).logits[:, -1]
        lengths = cache.lengths
        ready = sorted(row for row, text in live.items() if lengths[row] == len(text.tokens))
        for row, text in live.items():
            text.cached = lengths[row]
        sampled = _sample(logits, ready, [live[row] for row in ready], banned, generator)
        emptied = False
        for row, token in zip(ready, sampled, strict=True):
            live[row].push(token)
            if not live[row].done:
                continue
            del live[row]
            if (following := next(waiting, None)) is not None:
                live[row] = following
                emptied = True
        if emptied:
            cache.rollback([live[row].cached if row in live else lengths[row] for row in range(len(batch))])


def _columns(live: dict[int, Growing], rows: int) -> tuple[Tensor, Tensor]:
    """`[rows, N]` ids of the next pass, padded on the left, and `[rows, N]` bool, which of them are tokens."""
    width = _width([len(text.tokens) - text.cached for text in live.values()])
    ids = torch.zeros(rows, width, dtype=torch.long)
    real = torch.zeros(rows, width, dtype=torch.bool)
    for row, text in live.items():
        read = text.tokens[text.cached : text.cached + width]
        ids[row, width - len(read) :] = torch.tensor(read, dtype=torch.long)
        real[row, width - len(read) :] = True
    return ids, real


def _width(unread: Sequence[int]) -> int:
    """How many tokens a row reads in the next pass at most, given how many each has to read (at least 1).

    The more, the fewer passes, and the more padding in the rows that have less to read.
    """
    best = 1
    for width in sorted({min(count, _COLUMNS) for count in unread}):
        if sum(min(count, width) for count in unread) >= _USED * width * len(unread):
            best = width
    return best


def _sample(
    logits: Tensor, rows: Sequence[int], texts: Sequence[Growing], banned: Sequence[Tensor], generator: torch.Generator
) -> list[int]:
    """One token for each of some rows of `[B, V]` logits, as their texts want it."""
    if not rows:
        return []
    logits = logits[list(rows)].float()
    for kind, never in enumerate(banned):
        members = [i for i, text in enumerate(texts) if text.kind == kind]
        if members and len(never):
            logits[torch.tensor(members, device=logits.device)[:, None], never] = -torch.inf
    heat = torch.tensor([text.temperature for text in texts], device=logits.device)
    # Inverse transform: one uniform number a row instead of V exponential ones. Every row takes one, so that what a
    # row draws does not depend on the temperatures of the others.
    uniform = torch.rand(len(texts), 1, generator=generator, device=logits.device)
    chosen = logits.argmax(-1)
    warm = [i for i, text in enumerate(texts) if text.temperature > 0]
    if warm:
        # Not colder than what a float32 can bear.
        scores = logits[warm] / heat[warm, None].clamp(min=1e-3)
        cumulative = scores.softmax(-1).cumsum(-1)
        total = cumulative[:, -1:]
        # Below the total, or a number that rounds to it would take the last token, which may be banned.
        below = torch.minimum(uniform[warm] * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen[warm] = torch.searchsorted(cumulative, below, right=True).squeeze(1)
    return chosen.tolist()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every special token, whether or not the tokenizer has a role for it (`all_special_ids` are those with one)."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def never_in_text(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> set[int]:
    """The ids that are no text: special tokens, and rows of the LM head that only pad the tokenizer's vocabulary."""
    return {id_ for id_ in special_ids(tokenizer) if id_ < vocab_size} | set(range(len(tokenizer), vocab_size))
