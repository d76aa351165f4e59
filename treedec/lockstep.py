"""Scores and stops on the way down a tree: of one row at a time, or of a batch whose rows advance together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

if TYPE_CHECKING:
    from treedec.decode import Decoder


class Lockstep:
    """The walk of a batch whose rows advance together: processors and criteria get exactly the calls of `generate`.

    They are given ids and scores of their own, and the random generator as it would be, from which they may draw.

    Args:
        decoder: whose rows they are; all unfinished ones have the same length.
        going: the unfinished rows.
        logits: `[B', N, V]` of the verified trees, of the rows that the decoder holds.
    """

    def __init__(self, decoder: Decoder, going: list[int], logits: Tensor):
        self._decoder, self._request, self._rows = decoder, decoder.request, decoder.rows
        self._going, self._logits = going, logits
        self._length = self._rows.lengths[going[0]]

    def scores_after(self, paths: list[list[int]]) -> list[Tensor]:
        step = self._length - self._decoder.prompt_length
        nodes = {row: path[-1] for row, path in zip(self._going, paths, strict=True) if not self._ended(row)}
        scores = self._logits.new_zeros(len(self._rows.lengths), self._logits.shape[2], dtype=torch.float32)
        for row, node in nodes.items():
            scores[row] = self._logits[self._decoder.places[row], node].float()
        suspects = [row for row in nodes if not all_finite(scores[row])]
        with self._random_numbers():
            scores = processed(self._request.processors[0], self._rows.ids[:, : self._length].clone(), scores)
        for row in suspects:  # unless a processor has mended them
            check_finite(scores[row], row, step)
        for row, path in zip(self._going, paths, strict=True):
            self._decoder.scores[row][path[-1]] = scores[row]
        if self._request.keep_scores:
            self._decoder.history += (scores,)
        return [scores[row] for row in self._going]

    def stops_after(self, paths: list[list[int]], tokens: list[int]) -> list[bool]:
        rows, chosen = self._rows, dict(zip(self._going, tokens, strict=True))
        # There is padding wherever rows end before the others.
        column = [cast(int, self._request.pad) if self._ended(row) else chosen[row] for row in range(len(rows.lengths))]
        rows.write(slice(None), self._length, column)
        self._length += 1
        history = self._decoder.history if self._request.keep_scores else None
        with self._random_numbers():
            verdict = self._request.criteria(rows.ids[:, : self._length].clone(), history).tolist()
        rows.stopped = [before or now for before, now in zip(rows.stopped, verdict, strict=True)]
        return [self._ended(row) for row in self._going]

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """While the user's code runs, the generator is where `generate` would have it, and its draws count."""
        noise = self._decoder.noise
        if noise is not None:
            noise.settle(self._decoder.steps_drawn)
        yield
        if noise is not None:
            noise.follow()

    def _ended(self, row: int) -> bool:
        return self._rows.stopped[row] if self._request.rows_end else all(self._rows.stopped)


def all_finite(scores: Tensor) -> bool:
    """Whether a token can be chosen: single ones may be ruled out by minus infinity."""
    return bool(scores.max().isfinite())  # NaN if any is, and minus infinity only if all are


def check_finite(scores: Tensor, row: int, step: int) -> None:
    """Raise `ValueError` for NaN or infinite `scores`."""
    if not all_finite(scores):
        raise ValueError(
            f"row {row}, step {step}: the model's logits are NaN or infinite, so no token can be chosen; check its "
            "weights and dtype (float16 overflows easily), or give remove_invalid_values=True"
        )


def processed(processors: LogitsProcessorList, ids: Tensor | None, scores: Tensor) -> Tensor:
    """Scores after processors; `ids` may be None where none of them looks at the prefix.

    transformers declares `ids` a `LongTensor`, which no tensor is to a type checker.
    """
    return processors(cast(torch.LongTensor, ids), scores)
