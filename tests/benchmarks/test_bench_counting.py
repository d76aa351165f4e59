"""The token counter: what it counts, and the defects that it catches."""

from __future__ import annotations

import pytest

from treedec.benchmarks.counting import BenchmarkDefect, check_counts, counted_tokens, digest
from treedec.stats import DecodingStats

EOS, PAD = 9, 0


def count(*rows, eos=(EOS,), pad=PAD, limit=5):
    return counted_tokens(rows, eos, pad, limit, "method, prompt 1")


@pytest.mark.parametrize("row", [[1, 2, 3, 4, 5], [1, 9], [9], [1, 2, 3, 4, 9]])
def test_a_row_ends_at_the_limit_or_with_eos(row):
    assert count(row) == [row]


def test_rows_that_end_before_others_are_padded():
    assert count([1, 9, 0, 0], [1, 2, 3, 9]) == [[1, 9], [1, 2, 3, 9]]
    assert count([1, 9, 9, 9], [1, 2, 3, 9], pad=9) == [[1, 9], [1, 2, 3, 9]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, 2, 3, 4, 5, 6]], "6 new tokens, where at most 5"),
        ([[1, 9, 3]], "behind the one that ends the text, from new token 2 on"),
        ([[1, 9, 0]], "behind the one that ends the text"),  # nobody asked for padding
        ([[1, 9, 9]], "behind the one that ends the text"),
        ([[1, 9, 3, 0], [1, 2, 3, 9]], "prompt 1, row 0: tokens behind"),
        ([[1, 9, 0, 0], [1, 2, 9, 0]], "behind the one that ends the text"),
        ([[1, 2]], "stops after 2 new tokens"),
        ([[]], "stops after 0 new tokens"),
        ([[1, 2, 0, 0, 0], [1, 2, 3, 4, 5, 6]], "row 1: 6 new tokens"),
    ],
)
def test_a_method_that_returns_something_else_is_a_defect(rows, said):
    with pytest.raises(BenchmarkDefect, match=said) as error:
        count(*rows)
    assert str(error.value).startswith("method, prompt 1")


def test_without_eos_only_the_limit_ends_a_row():
    assert count([9, 9, 9, 9, 9], eos=(), pad=None) == [[9] * 5]
    with pytest.raises(BenchmarkDefect):
        count([9], eos=(), pad=None)


def stats(new_tokens, lengths):
    return DecodingStats(3, new_tokens, 0, sum(lengths.values()), lengths)


def test_counts_that_agree():
    check_counts([[1] * 8], stats(8, {1: 1, 3: 2}), 1, "m")
    check_counts([[1] * 8, [1]], stats(9, {1: 1, 3: 2}), 2, "m")


@pytest.mark.parametrize(
    ("own", "first"),
    [
        (stats(9, {1: 1, 3: 2}), 1),  # a token counted twice
        (stats(8, {1: 2, 3: 2}), 1),  # in the histogram only
        (stats(8, {1: 1, 3: 2}), 2),  # the prefill's once more
        (DecodingStats(3, 8, 0, 4, {1: 1, 3: 2}), 1),  # a pass that is not in the histogram
    ],
)
def test_a_double_counted_token_is_caught(own, first):
    with pytest.raises(BenchmarkDefect, match="m: "):
        check_counts([[1] * 8], own, first, "m")


def test_digests_tell_tokens_and_rows_apart():
    texts = [[[1, 2]], [[1], [2]], [[12]], [[1, 2, 3]], [[2, 1]]]
    assert len({digest(rows) for rows in texts}) == len(texts)
    assert digest([[1, 2]]) == digest([(1, 2)]) and len(digest([[1]])) == 16
