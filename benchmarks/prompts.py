"""What the benchmark asks: its own prompts, or any file in Spec-Bench's format.

A file holds one JSON object a line with `question_id`, `category` and `turns`, a list of texts; further keys are left
alone. Lines without any text are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

BUNDLED = Path(__file__).parent / "prompts.jsonl"

# Spec-Bench files its MT-Bench prompts under the eight categories that MT-Bench itself has, ten prompts in each.
MT_BENCH = "mt_bench"
_MT_BENCH_PARTS = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer.

    Attributes:
        id: unique within a file.
        category: what kind of task it is.
        turns: what the user says, one text per turn, at least one.
    """

    id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: Path | None = None, categories: Sequence[str] = (), limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, in its order.

    A file with all eight categories of MT-Bench, as Spec-Bench's has, is read as having the one category `mt_bench` in
    their place.

    Args:
        path: the file; None for the bundled prompts.
        categories: only these; none for all.
        limit: the first so many prompts of each category; None for all.

    Raises:
        ValueError: a line that is no such object, an id that appears twice, a category that the file does not have, or
            no prompt at all; the message names the file, and the line and the key where there is one.
        OSError: the file cannot be read.
    """
    path = path or BUNDLED
    prompts = list(_read(path))
    if not prompts:
        raise ValueError(f"{path} is empty: it has no prompts")
    if {prompt.category for prompt in prompts} >= _MT_BENCH_PARTS:
        prompts = [
            replace(prompt, category=MT_BENCH) if prompt.category in _MT_BENCH_PARTS else prompt for prompt in prompts
        ]
    known = dict.fromkeys(prompt.category for prompt in prompts)
    if unknown := [category for category in categories if category not in known]:
        raise ValueError(f"{path} has no category {unknown[0]!r}; it has {', '.join(known)}")
    wanted = set(categories) or set(known)
    taken = dict.fromkeys(wanted, 0)
    chosen = []
    for prompt in prompts:
        if prompt.category in wanted and (limit is None or taken[prompt.category] < limit):
            taken[prompt.category] += 1
            chosen.append(prompt)
    return chosen


def _read(path: Path) -> Iterator[Prompt]:
    lines: dict[str, int] = {}  # where each id was
    # By bytes: a text may hold characters that `str.splitlines` takes for the end of a line.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        prompt = _prompt(line, where)
        if prompt.id in lines:
            raise ValueError(f"{where}: question_id {prompt.id!r} appears twice, first in line {lines[prompt.id]}")
        lines[prompt.id] = number
        yield prompt


def _prompt(line: bytes, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are such
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    for key in ("question_id", "category", "turns"):
        if key not in row:
            raise ValueError(f"{where}: the key {key!r} is missing")
    name, category, turns = row["question_id"], row["category"], row["turns"]
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ValueError(f"{where}: question_id must be a number or a text, not {name!r}")
    if not isinstance(category, str) or not category:
        raise ValueError(f"{where}: category must be a text, not {category!r}")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: turns must be a list of at least one text, not {turns!r}")
    for place, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"{where}: turns[{place}] must be a text that is not empty, not {turn!r}")
    return Prompt(str(name), category, tuple(turns))
