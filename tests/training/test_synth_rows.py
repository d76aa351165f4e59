"""Rows that grow together: what a pass reads, and what is drawn."""

from __future__ import annotations

import pytest
import torch

from treedec.training.synth_rows import _COLUMNS, Growing, _sample, _width


class Fixed(Growing):
    """A text of one temperature and kind."""

    def __init__(self, temperature, kind=0):
        self.tokens, self.most = [0], 2
        self._temperature, self._kind = temperature, kind

    @property
    def temperature(self):
        return self._temperature

    @property
    def kind(self):
        return self._kind

    def push(self, token):
        raise AssertionError("nothing is written here")


def _drawn(logits, texts, banned, rows=None):
    generator = torch.Generator().manual_seed(5)
    return _sample(logits, range(len(texts)) if rows is None else rows, texts, banned, generator)


def test_tokens_are_drawn_as_often_as_they_are_probable():
    count, heat = 40_000, 0.7
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -torch.inf])
    tokens = _drawn(logits.repeat(count, 1), [Fixed(heat)] * count, [torch.tensor([4])])
    found = torch.bincount(torch.tensor(tokens), minlength=6).double()
    logits[4] = -torch.inf
    expected = count * (logits.double() / heat).softmax(-1)
    chi_square = ((found - expected)[:4] ** 2 / expected[:4]).sum()
    assert found[4:].sum() == 0 and chi_square < 16.3  # 0.1 % of such tables have more, at 3 degrees of freedom
    warmer = count * (logits.double() / 0.75).softmax(-1)
    assert ((found - warmer)[:4] ** 2 / warmer[:4]).sum() > 50, "the control: it tells close temperatures apart"


def test_the_greatest_number_takes_a_token_that_may_come(monkeypatch):
    """Rounding must not reach beyond the last probable token."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **more: torch.full(shape, 1.0))
    logits = torch.tensor([[0.3, 0.1, -0.2, 0.0, 0.0, 0.0]])
    assert _drawn(logits, [Fixed(1.0)], [torch.tensor([3, 4, 5])]) == [2]


def test_rows_have_temperatures_and_bans_of_their_own():
    logits = torch.tensor([[9.0, 8.0, 0.0], [9.0, 8.0, 0.0], [0.0, 9.0, 8.0], [9.0, 0.0, 0.0]])
    banned = [torch.tensor([], dtype=torch.long), torch.tensor([0])]
    texts = [Fixed(0.0), Fixed(0.0, kind=1), Fixed(0.0, kind=1)]
    assert _drawn(logits, texts, banned, rows=[0, 1, 2]) == [0, 1, 1]
    assert _drawn(logits, [Fixed(0.0), Fixed(1e-9)], banned, rows=[3, 2]) == [0, 1]
    assert _drawn(logits, [], banned, rows=[]) == []
    assert logits[1, 0] == 9.0, "the model's logits stay as they are"


@pytest.mark.parametrize(
    ("unread", "width"),
    [
        ([1], 1), ([40], 40), ([500, 500], _COLUMNS), ([1, 1, 1, 30], 1), ([30, 30, 30, 1], 30),
        ([10, 10, 20, 20], 20), ([9, 10, 30, 1], 10), ([1, 2], 2), ([1, 1, 2], 1),
    ],
)  # fmt: skip
def test_passes_are_as_wide_as_they_can_be_filled(unread, width):
    assert _width(unread) == width


class Letter(Fixed):
    """Ends with the first token that is written."""

    def push(self, token):
        self.tokens.append(token)
        self.done = True
