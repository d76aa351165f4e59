"""The one token counter, and what its word is held against.

Published speeds are not comparable where every method counts its own tokens: one counts drafts that end behind the end
of the text, another the token that the prefill yields. Here a method hands over ids, and this file counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

from treedec.stats import DecodingStats


class BenchmarkDefect(Exception):
    """A method that returned other tokens than were asked for, or that counts them otherwise: the run is worthless."""


def counted_tokens(
    rows: Sequence[Sequence[int]], eos: Collection[int], pad: int | None, limit: int, who: str
) -> list[list[int]]:
    """The new tokens of each row of a batch, up to and with the first that ends it.

    Args:
        rows: per row the ids after the prompt, as the method returned them; in a batch, rows that end before others
            are padded to the longest.
        eos: ids that end a row.
        pad: what rows that have ended are filled with.
        limit: most new tokens.
        who: names the method and the prompt in messages.

    Raises:
        BenchmarkDefect: tokens behind the end of a row or beyond the limit, or a row that stops before both.
    """
    counted = [_until_end(row, eos) for row in rows]
    longest = max(len(row) for row in counted)
    for place, (row, kept) in enumerate(zip(rows, counted, strict=True)):
        name = who if len(rows) == 1 else f"{who}, row {place}"
        if len(row) > limit:
            raise BenchmarkDefect(f"{name}: {len(row)} new tokens, where at most {limit} were asked for")
        behind = row[len(kept) :]
        # Padding is what a row is filled with until the longest has ended, and no longer.
        if len(row) > longest or any(token != pad for token in behind):
            raise BenchmarkDefect(f"{name}: tokens behind the one that ends the text, from new token {len(kept)} on")
        if len(kept) < limit and (not kept or kept[-1] not in eos):
            raise BenchmarkDefect(
                f"{name}: stops after {len(kept)} new tokens, neither at the end of the text nor at {limit}"
            )
    return counted


def _until_end(row: Sequence[int], eos: Collection[int]) -> list[int]:
    end = next((place + 1 for place, token in enumerate(row) if token in eos), len(row))
    return list(row[:end])


def check_counts(counted: Sequence[Sequence[int]], stats: DecodingStats, first: int, who: str) -> None:
    """Hold a method's own statistics against the counter.

    Args:
        counted: what `counted_tokens` found.
        stats: the method's own counts.
        first: tokens that its prefill yielded, by its own account.
        who: names the method and the prompt.

    Raises:
        BenchmarkDefect: they do not agree.
    """
    tokens = sum(len(row) for row in counted)
    if stats.new_tokens != tokens:
        raise BenchmarkDefect(f"{who}: counts {stats.new_tokens} new tokens itself, and returned {tokens}")
    passes = sum(stats.accepted_lengths.values())
    committed = first + sum(length * times for length, times in stats.accepted_lengths.items())
    if committed != tokens or passes != stats.row_passes:
        raise BenchmarkDefect(
            f"{who}: its {stats.row_passes} passes committed {committed} tokens by its own account, the prefill's "
            f"included, and {tokens} were returned"
        )


def digest(counted: Sequence[Sequence[int]]) -> str:
    """Hex blake2b of 8 bytes over the tokens of all rows: equal for equal tokens."""
    text = ";".join(",".join(map(str, row)) for row in counted)
    return blake2b(text.encode(), digest_size=8).hexdigest()
