"""Figures and tables as the Markdown of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from treedec.benchmarks.statistics import Estimate

NOTHING = "–"


def interval(estimate: Estimate) -> str:
    """Such as `1.52 [1.43, 1.61]`; without brackets where the interval is unknown."""
    if not math.isfinite(estimate.value):
        return NOTHING
    return f"{estimate.value:.2f}" + (f" [{estimate.low:.2f}, {estimate.high:.2f}]" if estimate.known else "")


def decimal(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share; just below all, it is rounded down, for 99.9 % is not 100 %."""
    if value is None:
        return NOTHING
    scaled = 100 * value * 10**digits
    rounded = math.floor(scaled) if 0.99 <= value < 1 else round(scaled)
    return f"{rounded / 10**digits:.{digits}f} %"


def yes(value: bool) -> str:
    """A "no" stands out."""
    return "yes" if value else "**no**"


def counted(items: Sequence[object], one: str, many: str | None = None) -> str:
    """How many there are, with their name in the singular or the plural."""
    return f"{len(items)} {one if len(items) == 1 else many or one + 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plain(value: Any) -> str:
    """A value of JSON in words, without its brackets."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(part)}" for key, part in value.items())
    return str(value)


def cell(text: str) -> str:
    """A text as it may stand in a table: one line, no bars, not endless."""
    text = re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
    return text if len(text) <= 240 else text[:239] + "…"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """A table whose columns but the first hold numbers, or texts."""
    lines = [header, ["---", *["---:" if numbers else "---"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
