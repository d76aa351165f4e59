"""The tables of the README and of docs/results.md are those of the rows in benchmarks/results."""

import re
from functools import cache
from pathlib import Path

import pytest

from treedec.benchmarks.markdown import NOTHING, decimal, interval
from treedec.benchmarks.results import read_result
from treedec.benchmarks.statistics import Summary

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = {
    "bfloat16, greedy": ("spec_bench_bf16", 0.0),
    "bfloat16, T = 1": ("spec_bench_bf16_sampled_compiled", 1.0),
    "float32, greedy": ("spec_bench_fp32_greedy", 0.0),
    "float32, T = 1": ("spec_bench_fp32_sampled", 1.0),
}


@cache
def run(name: str) -> Summary:
    return Summary(read_result(RESULTS / f"{name}.json"))


def condition(summary: Summary, said: str, temperature: float) -> int | None:
    """Of the run, what a first cell names: a method, and `b4` behind it for a batch of four."""
    method, _, batch = re.match(r"`([^`]+?)( b(\d+))?`", said).groups()
    wanted = (method, int(batch or 1), temperature)
    known = [(one.method, one.batch, one.temperature) for one in summary.conditions]
    return known.index(wanted) if wanted in known else None


def over(summary: Summary, index: int, method: str, **of_what) -> str:
    other = summary.baseline_of(index, method)
    return "1" if other == index else interval(summary.ratio(index, other, **of_what))


def figure(summary: Summary, index: int, column: str) -> str:
    """What a cell has to say."""
    method = summary.conditions[index].method
    if column == "tokens/s":
        return decimal(summary.speed(index).value, 1)
    if column == "over `generate`":
        return over(summary, index, "hf")
    if column == "with prefill":
        return over(summary, index, "hf", prefill=True)
    if column == "over no drafts":
        others = method.startswith(("hf", "peer:"))
        return "" if others else over(summary, index, "compiled:ar" if method.startswith("compiled:") else "ar")
    if column == "tokens per pass":
        return decimal(summary.figures(index).mean_accepted_length)
    assert column in summary.categories
    return over(summary, index, "hf", category=column).split(" [")[0]


def cells(line: str) -> list[str]:
    return [part.strip().replace("*", "") for part in line.strip("|\n").split("|")]


def tables(page: Path):
    """Each table with the result that was linked to last, and the temperature in that line: header and rows."""
    lines, linked = page.read_text(encoding="utf-8").splitlines(), None
    for place, line in enumerate(lines):
        for name in re.findall(r"benchmarks/results/(\w+)/report\.md", line):
            linked = name, 1.0 if "T = 1" in line else 0.0
        if line.startswith("| decoding |"):
            body = lines[place + 2 :]
            end = next((i for i, row in enumerate(body) if not row.startswith("|")), len(body))
            yield linked, cells(line)[1:], [cells(row) for row in body[:end]]


PAGES = [(name, *table) for name, *table in tables(ROOT / "docs" / "results.md")]


@pytest.mark.parametrize(
    ("of", "header", "rows"),
    PAGES,
    ids=[f"{name}-{temperature:g}-{header[-1]}" for (name, temperature), header, _ in PAGES],
)
def test_a_table_says_what_was_measured(of, header, rows):
    name, temperature = of
    summary = run(name)
    assert len(rows) > 2
    for said, *figures in rows:
        index = condition(summary, said, temperature)
        assert index is not None, said
        assert figures == [figure(summary, index, column) for column in header], said


def test_all_runs_of_the_readme_have_a_table_of_their_own():
    assert {of for of, *_ in PAGES} >= set(README.values())


def test_the_table_of_the_readme_has_the_ratios_of_four_settings():
    ((_, header, rows),) = tables(ROOT / "README.md")
    assert header == list(README)
    shown = set()
    for said, *figures in rows:
        expected = []
        for name, temperature in README.values():
            index = condition(run(name), said, temperature)
            reference = index is not None and run(name).conditions[index].method == "hf"
            speed = f"{run(name).speed(index).value:.1f} tokens/s" if reference else ""
            expected.append(NOTHING if index is None else speed or over(run(name), index, "hf"))
            shown.add((name, index))
        assert figures == expected, said
    # Nor is one left out that does badly.
    assert {(name, index) for name, _ in README.values() for index in range(len(run(name).conditions))} <= shown


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_published_result_can_be_read_and_has_rows(path):
    assert read_result(path).complete_rows()
