"""Packs for tests of training: made by hand, or of a tiny target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treedec.target import Target
from treedec.training.contracts import Batch

#: What padding holds: anything finite must do, so it is nothing that could pass for a hidden state.
GARBAGE = 1e3


def run_numbers(lengths: Sequence[int], responses: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """`[B, L]` `Batch.runs` of texts whose responses are `[start, end)`."""
    runs, number = torch.full((len(lengths), max(lengths)), -1), 0
    for row, parts in enumerate(responses):
        for start, end in parts:
            runs[row, max(start - 1, 0) : max(end - 1, 0)] = number
            number += 1
    return runs


def batch_of(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[tuple[int, int]]],
    layers: tuple[int, ...] = (),
) -> Batch:
    """What the target makes of texts; padding is `GARBAGE`."""
    lengths = torch.tensor([len(text) for text in texts])
    width = int(lengths.max())
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    padding = (torch.arange(width) >= lengths[:, None])[:, :, None]
    hidden, features = Target(model).features(ids, layers=layers)
    features = None if features is None else features.masked_fill(padding, GARBAGE)
    runs = run_numbers(lengths.tolist(), responses)
    return Batch(ids, lengths, runs, hidden.masked_fill(padding, GARBAGE), features)


def runs_of(batch: Batch) -> list[list[tuple[int, int]]]:
    """The positions of each run, as (row, column), found one by one."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row, numbers in enumerate(batch.runs.tolist()):
        for column, number in enumerate(numbers):
            if number >= 0:
                found.setdefault(number, []).append((row, column))
    return list(found.values())
