"""What a run says, as Markdown and pictures; of several runs, how far they agree.

The first page is one table of all conditions and then, at once, where treedec loses. Everything is computed from the
rows of the result files, and the same files give the same report, byte for byte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from treedec.benchmarks.losses import fastest_rival, is_compiled, is_ours, losses, rivals
from treedec.benchmarks.markdown import (
    NOTHING,
    cell,
    counted,
    decimal,
    interval,
    listed,
    percent,
    plain,
    table,
    yes,
)
from treedec.benchmarks.methods import COMPILED, REFERENCE
from treedec.benchmarks.plots import SOFTWARE, draw
from treedec.benchmarks.results import Condition, Result
from treedec.benchmarks.statistics import Estimate, Figures, Summary
from treedec.benchmarks.theory import RULES, condition_nodes, predictions
from treedec.costs import CostCurve
from treedec.models import Fingerprint

REPORT = "report.md"
_MARK = f"<!-- {SOFTWARE} -->"
# Sampling methods that give the tokens of `hf` under the same seed; the others promise its distribution, or less.
_SAME_TOKENS = "coupled"
_LOSSY = "typical"
_PLAIN = "ar"  # decodes by treedec's own passes without drafts: what predicted speed-ups are over
# What one has to know of a method, by its name.
_REMARKS = {
    re.compile("hf-assisted(@.*)?"): "hf-assisted is told to draft as many tokens in every pass as vanilla does, so "
    "that the two can be compared; hf-assisted-default is how transformers drafts unless told otherwise.",
    re.compile(f"{_PLAIN}|{COMPILED}{_PLAIN}"): f"× {_PLAIN}: over treedec's own passes without drafts, which are "
    "compiled where the condition's are.",
    re.compile("peer:(llama.cpp|vllm)"): "llama.cpp and vLLM decode without drafts here, as they do unless told "
    "otherwise.",
}
_LONG = {("target", "sample")}  # sixteen weights, which the result file keeps
_MEASURES = {False: "decoding", True: "with prefill"}
_INTERVALS = (
    "Speeds are pooled: all tokens over all seconds, never a mean of ratios. Brackets hold 95 % bootstrap intervals "
    "over prompts, the same resampled prompts on both sides of a ratio. A repeated run differs by the noise of two, so "
    "its ratios are expected within the brackets widened by √2 on a log scale; each on its own, 19 times out of 20."
)


def render(results: Sequence[Result], out: Path, baseline: str | None = None, overwrite: bool = False) -> str:
    """Write `report.md` and its pictures into a folder, and return the Markdown.

    Args:
        results: one run, or several of the same target and prompts to compare; of unfinished ones, what all reached.
        out: the folder, made if there is none. Pictures of an earlier report that this one does not have are removed.
        baseline: the method that ratios are to; by default `hf`, or the first method if there is no `hf`.
        overwrite: replace files of these names that no report wrote.

    Raises:
        ValueError: no results, a baseline that was not run, runs that cannot be compared, no prompt that all conditions
            decoded, or no matplotlib.
        FileExistsError: a file in the way that no report wrote.
    """
    if not results:
        raise ValueError("there is no result to report on")
    _check_comparable(results)
    results = _of_common_prompts(results)
    summaries = [Summary(result) for result in results]
    for summary in summaries:
        _check_complete(summary)
    baseline = _baseline(results, baseline)
    several = len(results) > 1
    pictures = {
        f"run{number}-{name}.png" if several else f"{name}.png": png
        for number, summary in enumerate(summaries, 1)
        for name, png in draw(summary, baseline).items()
    }
    if several:
        parts = [_comparison(summaries, baseline), _losses_of_all(summaries), _runs(summaries)]
        for number, summary in enumerate(summaries, 1):
            parts.append(_page(summary, baseline, f"Run {number}: ", f"run{number}-", pictures, with_losses=False))
    else:
        parts = [_page(summaries[0], baseline, "", "", pictures, with_losses=True)]
    text = "\n\n".join([_MARK, *parts]) + "\n"
    _write(out, text, pictures, overwrite)
    return text


def _baseline(results: Sequence[Result], wanted: str | None) -> str:
    run = [{condition.method: None for condition in result.conditions} for result in results]
    common = [method for method in run[0] if all(method in methods for methods in run)]
    if wanted is None:
        if not common:
            raise ValueError("these runs have no method in common that ratios could be to")
        return REFERENCE if REFERENCE in common else common[0]
    if wanted not in common:
        raise ValueError(f"the baseline {wanted!r} was not run; methods are {', '.join(common)}")
    return wanted


def _check_complete(summary: Summary) -> None:
    if summary.prompts == 0:
        failures = summary.result.failures
        first = (
            f"; the first failure: {_label(summary, failures[0].condition)}: {failures[0].error}" if failures else ""
        )
        raise ValueError(f"no prompt was decoded by every condition, so there is nothing to report{first}")


def _check_comparable(results: Sequence[Result]) -> None:
    """Runs may differ in dtype, settings and conditions, which the report tells, but not in what they decode with what.

    Raises:
        ValueError: another target or other prompts.
    """
    first, others = results[0], results[1:]
    for number, other in enumerate(others, 2):
        for what, why in (("targets", _other_target(first, other)), ("prompts", _other_prompts(first, other))):
            if why is not None:
                raise ValueError(f"runs 1 and {number} have other {what} and cannot be compared: {why}")


def _other_target(one: Result, other: Result) -> str | None:
    """What shows that two runs had other targets, or None."""
    names = [field.name for field in fields(Fingerprint)]
    if all(name in result.target for name in names for result in (one, other)):
        prints = [Fingerprint.from_dict({name: result.target[name] for name in names}) for result in (one, other)]
        return prints[0].mismatch(prints[1])
    for key in sorted({*one.target, *other.target} - {"dtype", "attention", "logits"}):
        if one.target.get(key) != other.target.get(key):
            return f"{key} is {one.target.get(key)!r} and {other.target.get(key)!r}"
    return None


def _other_prompts(one: Result, other: Result) -> str | None:
    """What shows that two runs had other prompts, or None. Equal ids are not enough: many files count from 1."""
    settings = [result.settings.get("prompts") for result in (one, other)]
    digests = [prompts.get("digest") if isinstance(prompts, dict) else None for prompts in settings]
    cut = one.unfinished or other.unfinished
    if (odd := sorted(one.reached ^ other.reached)) and not (cut and digests[0] == digests[1]):
        return f"{listed(odd)} in one of them only"
    lengths = {row.prompts: row.prompt_tokens for row in one.rows}
    for row in other.rows:
        if (length := lengths.get(row.prompts, row.prompt_tokens)) != row.prompt_tokens:
            return f"prompt {', '.join(row.prompts)} has {length} and {row.prompt_tokens} tokens"
    return "their texts differ" if None not in digests and digests[0] != digests[1] else None


def _of_common_prompts(results: Sequence[Result]) -> list[Result]:
    """The runs with the rows of those prompts only that all of them decoded in every condition."""
    if len(results) == 1:
        return list(results)
    decoded = [{name for row in result.complete_rows() for name in row.prompts} for result in results]
    common, reached = set.intersection(*decoded), frozenset.intersection(*(result.reached for result in results))
    return [
        replace(
            result,
            rows=tuple(row for row in result.rows if common.issuperset(row.prompts)),
            failures=tuple(failure for failure in result.failures if reached.issuperset(failure.prompts)),
        )
        for result in results
    ]


def _page(summary: Summary, baseline: str, title: str, prefix: str, pictures: Iterable[str], with_losses: bool) -> str:
    """The whole report of one run; `with_losses` says whether these are not told elsewhere."""

    def picture(name: str, text: str) -> str:
        return f"![{text}]({prefix}{name}.png)" if f"{prefix}{name}.png" in pictures else ""

    target, total = summary.result.target, len(summary.result.reached)
    what = " in ".join(str(target[key]) for key in ("name", "dtype") if key in target)
    sections = [
        f"# {title}{what or 'a target'}",
        f"{summary.prompts} of {total} prompts, in {counted(summary.categories, 'category', 'categories')}; speed-ups "
        f"are over `{baseline}` of the same temperature and batch. {_unfinished(summary.result)}{_INTERVALS}",
        "## All conditions",
        _overview(summary, baseline),
        *(["## Where we lose", _losses(summary)] if with_losses else []),
        "## By category",
        _by_category(summary, baseline),
        picture("speedup", "Speed-up by method and category"),
        "## Acceptance",
        _acceptance_text(summary),
        picture("accepted_length", "Histogram of accepted lengths"),
        picture("acceptance", "Acceptance by depth and rank"),
        _expected(summary),
        "## Where the time goes",
        _time_split(summary),
        picture("time_split", "Time per token: target, drafting, the rest"),
        "## Predicted and measured speed-up",
        _predicted(summary, baseline),
        picture("tree_size", "Speed against the size of the tree, and the cost of a pass"),
        "## Excluded prompts",
        _excluded(summary),
        "## How it was measured",
        _provenance(summary.result),
    ]
    return "\n\n".join(section for section in sections if section)


def _unfinished(result: Result) -> str:
    if not result.unreached:
        return ""
    return f"{result.unreached} more were asked for and are not in this report; the categories took turns. "


def _overview(summary: Summary, baseline: str) -> str:
    with_plain = baseline != _PLAIN and any(condition.method == _PLAIN for condition in summary.conditions)
    header = ["condition", "tokens/s", f"× {baseline}", f"× {baseline}, with prefill"]
    header += [f"× {_PLAIN}"] if with_plain else []
    header += ["mean accepted length", "same tokens as hf", "near-ties"]
    rows = []
    for index, condition in enumerate(summary.conditions):
        figures, other = summary.figures(index), summary.baseline_of(index, baseline)
        ratios = [_ratio(summary, index, other, prefill=prefill) for prefill in (False, True)]
        comparable = condition.temperature == 0 or condition.acceptance == _SAME_TOKENS
        rows.append(
            [
                _label(summary, index) + (" (lossy)" if _lossy(condition) else ""),
                decimal(summary.speed(index).value, 1),
                *ratios,
                *([_ratio(summary, index, _plain(summary, index))] if with_plain else []),
                decimal(figures.mean_accepted_length),
                percent(figures.exact_match) if comparable else NOTHING,
                _tied(figures) if condition.temperature == 0 else NOTHING,
            ]
        )
    dtype = summary.result.target["dtype"]
    legend = (
        "Tokens per second of decoding: the prefill, its seconds and the first token it yields are left out, but for "
        "the column that says so. transformers' assisted decoding and prompt look-up verify drafts in their prefill "
        "already, so for these the ratio with prefill is the fair one. Mean accepted length: tokens per target pass "
        f"after the prefill. Same tokens: share of outputs equal to those of `{REFERENCE}`; of sampling, only "
        f"`{_SAME_TOKENS}` promises that. Near-ties: of the greedy outputs that part from it, the share that do so "
        f"where the target's logits are within {summary.tie:.2g}, a few roundings in {dtype}."
    )
    methods = [condition.method for condition in summary.conditions]
    legend += "".join(f" {said}" for prefix, said in _REMARKS.items() if any(map(prefix.fullmatch, methods)))
    return f"{table(header, rows)}\n\n{legend}"


def _plain(summary: Summary, index: int) -> int | None:
    """What decodes by the same passes without drafts."""
    method = COMPILED + _PLAIN if is_compiled(summary.conditions[index]) else _PLAIN
    return summary.baseline_of(index, method) if is_ours(summary.conditions[index]) else None


def _tied(figures: Figures) -> str:
    return NOTHING if figures.near_ties is None else f"{percent(figures.near_ties)} of {figures.parted}"


def _lossy(condition: Condition) -> bool:
    return condition.temperature > 0 and condition.acceptance == _LOSSY


def _losses(summary: Summary) -> str:
    found = losses(summary)
    ours = [index for index, condition in enumerate(summary.conditions) if is_ours(condition)]
    if not ours:
        return "Nothing of treedec's was run."
    others = sorted(
        {summary.conditions[rival].method for index in ours for rival in rivals(summary, index)} - {REFERENCE}
    )
    compared = any(summary.baseline_of(index, REFERENCE) is not None for index in ours)
    if not compared and not others:
        return f"Unknown: neither `{REFERENCE}` nor another method was run to lose to."
    looked = (
        f"Looked at: {counted(ours, 'condition')} of treedec's, over all prompts and in each of "
        f"{counted(summary.categories, 'category', 'categories')}; "
        + (f"against `{REFERENCE}`, decoding and with prefill" if compared else f"`{REFERENCE}` was not run")
        + "; "
        + (f"likewise against the fastest of {', '.join(others)}." if others else "no other method was run.")
        + " A loss is a ratio whose whole interval lies below 1; of equally fast methods, one in 40 has it by chance."
    )
    parts = [looked, *_beside_rivals(summary, ours)]
    if found:
        rows = [
            [
                _label(summary, loss.condition),
                _label(summary, loss.against),
                _MEASURES[loss.prefill],
                interval(loss.places[None]) if None in loss.places else "no",
                "; ".join(f"{name} {interval(ratio)}" for name, ratio in loss.places.items() if name is not None)
                or NOTHING,
            ]
            for loss in found
        ]
        header = ["condition", "slower than", "measure", "over all prompts", "in categories"]
        parts.insert(0, table(header, rows, False))
    else:
        parts.insert(0, "**Nowhere that this run could tell.**")
    undecided = [
        _label(summary, index)
        for index in ours
        if (other := summary.baseline_of(index, REFERENCE)) is not None
        and (ratio := summary.ratio(index, other)).low <= 1 <= ratio.high
    ]
    if undecided:
        parts.append(
            f"Neither faster nor slower than `{REFERENCE}` beyond the noise, decoding: {', '.join(undecided)}."
        )
    wrong = [
        f"{_label(summary, index)} ({figures.parted - figures.tied} of {figures.compared} outputs)"
        for index in ours
        if summary.conditions[index].temperature == 0 and (figures := summary.figures(index)).parted > figures.tied
    ]
    if wrong:
        parts.append(f"Other greedy tokens than `{REFERENCE}`, and not at a near-tie: {', '.join(wrong)}.")
    return "\n\n".join(parts)


def _beside_rivals(summary: Summary, ours: Sequence[int]) -> list[str]:
    """A table of the ratios to the fastest rivals, whichever way they come out; nothing without rivals."""
    rows = []
    for index in ours:
        best = [fastest_rival(summary, index, prefill) for prefill in (False, True)]
        if best != [None, None]:
            rows.append([_label(summary, index)])
            for prefill, rival in zip((False, True), best, strict=True):
                ratio = NOTHING if rival is None else _ratio(summary, index, rival, prefill=prefill)
                rows[-1] += [NOTHING if rival is None else _label(summary, rival), ratio]
    header = ["condition", "fastest other, decoding", "speed over it", "fastest other, with prefill", "speed over it"]
    return [f"Over all prompts, beside the fastest of the others:\n\n{table(header, rows, False)}"] if rows else []


def _losses_of_all(summaries: Sequence[Summary]) -> str:
    runs = [f"### Run {number}\n\n{_losses(summary)}" for number, summary in enumerate(summaries, 1)]
    return "\n\n".join(["## Where we lose", *runs])


def _by_category(summary: Summary, baseline: str) -> str:
    categories = [None, *summary.categories]
    names = ["all", *summary.categories]
    pairs = [(index, summary.baseline_of(index, baseline)) for index in range(len(summary.conditions))]
    speeds = [
        [_label(summary, index), *(_ratio(summary, index, other, category) for category in categories)]
        for index, other in pairs
        if other is not None and other != index
    ]
    lengths = [
        [_label(summary, index)]
        + [decimal(summary.figures(index, category).mean_accepted_length) for category in categories]
        for index in range(len(summary.conditions))
        if summary.figures(index).mean_accepted_length is not None
    ]
    prompts = ["prompts", *(str(summary.figures(0, category).prompts) for category in categories)]
    parts = []
    if speeds:
        parts += [f"Decoding speed over that of `{baseline}`:", table(["condition", *names], [*speeds, prompts])]
    if lengths:
        parts += ["Mean accepted length:", table(["condition", *names], lengths)]
    return "\n\n".join(parts) or "There is nothing to compare."


def _acceptance_text(summary: Summary) -> str:
    if any(summary.figures(index).accepted_lengths for index in range(len(summary.conditions))):
        return "Counts are pooled over all passes after the prefill; a pass that accepts no draft commits one token."
    return "No method told how many tokens its passes committed."


def _expected(summary: Summary) -> str:
    """What each rule should accept of the first level, beside what was accepted there."""
    expected = summary.result.expected
    if not expected:
        return ""
    drafts = sorted({each.drafts for each in expected})
    rows: dict[tuple[str, float, str], dict[int, str]] = {}
    for each in expected:
        error = "" if each.error is None else f" ± {each.error:.3f}"
        rows.setdefault((each.method, each.temperature, each.rule), {})[each.drafts] = f"{each.acceptance:.3f}{error}"
    header = ["drafts of", "rule", *(counted(range(n), "child", "children") for n in drafts)]
    lines = [
        [cell(f"{method} T={temperature:g}"), RULES.get(rule, rule), *(found.get(n, NOTHING) for n in drafts)]
        for (method, temperature, rule), found in rows.items()
    ]
    measured = [
        f"{_label(summary, index)} {accepted:.3f} of {children:.1f} children"
        for index, condition in enumerate(summary.conditions)
        if condition.temperature > 0 and (first := _first_level(summary.figures(index))) is not None
        for children, accepted in [first]
    ]
    positions = sorted({each.positions for each in expected})
    note = (
        "How often a child of a node should be accepted, from the distributions of target and drafter at "
        f"{' or '.join(map(str, positions))} tokens that the target sampled after some of the prompts; ± is the "
        "standard error over these. No rule can do better than the optima with the same drafts; deterministic children "
        "are other drafts."
    )
    if measured:
        note += (
            f" Measured at the roots of the trees: {', '.join(measured)}. Their number of children varies, and where "
            "the drafter is bad, a place is a root more often."
        )
    return f"### Expected acceptance of one step\n\n{table(header, lines)}\n\n{note}"


def _first_level(figures: Figures) -> tuple[float, float] | None:
    """Mean number of children of the roots that have any, and how often one of them was accepted."""
    first = {rank: counts for (depth, rank), counts in (figures.acceptance_by_place or {}).items() if depth == 1}
    if not first:
        return None
    roots = first[1][0]
    return sum(reached for reached, _ in first.values()) / roots, sum(taken for _, taken in first.values()) / roots


def _time_split(summary: Summary) -> str:
    rows = []
    for index in range(len(summary.conditions)):
        figures = summary.figures(index)
        tokens, seconds = figures.decoded_tokens, figures.decode_seconds
        if not tokens or not seconds:
            continue
        parts = (figures.target_seconds, figures.draft_seconds, figures.rest_seconds)
        shares = [NOTHING if part is None else percent(part / seconds) for part in parts]
        prefill = 1e3 * figures.prefill_seconds / len(summary.rows(index))
        rows.append([_label(summary, index), f"{1e3 * seconds / tokens:.1f}", *shares, f"{prefill:.0f}"])
    header = ["condition", "ms per token", "target passes", "drafting", "the rest", "ms per prefill"]
    return table(header, rows) if rows else "Nothing was decoded after the prefill."


def _predicted(summary: Summary, baseline: str) -> str:
    costs = summary.result.costs
    if costs is None:
        return "What a pass of the target costs was not measured in this run."
    found = predictions(summary)
    if not found:
        return "No condition has trees of a known size, one prompt at a time, within the measured costs."
    header = ["condition", "nodes, mean", "mean accepted length", "drafting, ms per pass"]
    header += ["target, ms by the curve", "target, ms measured"]
    header += ["tokens/s, predicted", "tokens/s, measured", "speed-up, predicted", "speed-up, measured"]
    rows, curve = [], CostCurve.of(costs)
    for index, prediction in found.items():
        figures, nodes = summary.figures(index), condition_nodes(summary, index)
        other = _plain(summary, index)
        if other is None:
            other = summary.baseline_of(index, baseline)
        assert figures.passes and figures.draft_seconds is not None and nodes is not None
        measured = None if figures.target_seconds is None else 1e3 * figures.target_seconds / figures.passes
        rows.append(
            [
                _label(summary, index),
                decimal(nodes, 1),
                decimal(figures.mean_accepted_length),
                decimal(1e3 * figures.draft_seconds / figures.passes),
                decimal(1e3 * curve.at(nodes)),
                decimal(measured),
                decimal(prediction.tokens_per_second, 1),
                decimal(summary.speed(index).value, 1),
                decimal(prediction.speedup),
                NOTHING if other is None else f"{_ratio(summary, index, other)} × {_label(summary, other)}",
            ]
        )
    how = "a compiled target" if costs["compiled"] else "a target that is not compiled"
    note = (
        "Predicted: the cost of a pass of one node, over (cost of a pass over the tree + drafting) / mean accepted "
        f"length, from median passes of {how} behind {costs['context']} tokens of context. Beyond passes and drafting "
        "nothing is counted. The cost of the mean tree stands for the mean cost of trees of all sizes. Measured "
        f"speed-ups are over `{_PLAIN}` where it was run: it decodes by the same passes without drafts."
    )
    return f"{table(header, rows)}\n\n{note}"


def _excluded(summary: Summary) -> str:
    result = summary.result
    complete = {name for index in range(len(summary.conditions)) for row in summary.rows(index) for name in row.prompts}
    failed = {name for failure in result.failures for name in failure.prompts}
    left = sorted(result.reached - complete - failed)
    if not failed and not left:
        return "None: every condition decoded every prompt in every round."
    rows = [
        [", ".join(failure.prompts), _label(summary, failure.condition), cell(failure.error)]
        for failure in result.failures
    ]
    if left:
        why = "not decoded by every condition in every round, or in a batch with one that failed"
        rows.append([listed(left), NOTHING, why])
    head = f"{len(failed) + len(left)} of {len(result.reached)} prompts count for no condition:"
    return f"{head}\n\n{table(['prompts', 'failed in', 'why'], rows, False)}"


def _provenance(result: Result) -> str:
    rows = [
        [kind, str(key), cell(plain(value))]
        for kind in ("target", "machine", "versions", "settings")
        for key, value in getattr(result, kind).items()
        if (kind, key) not in _LONG
    ]
    return f"```\n{result.command}\n```\n\n{table(['of', 'what', 'value'], rows, False)}"


def _comparison(summaries: Sequence[Summary], baseline: str) -> str:
    numbers = range(1, len(summaries) + 1)
    labels = list(dict.fromkeys(condition.label for summary in summaries for condition in summary.conditions))
    header = ["condition", *(f"run {number}" for number in numbers)]
    header += ["moved by", "intervals overlap", "as a repeated run should"]
    rows = []
    for label in labels:
        ratios = [_ratio_of(summary, label, baseline) for summary in summaries]
        known = [ratio for ratio in ratios if ratio is not None and ratio.known]
        if all(ratio is None for ratio in ratios):
            continue
        row = [cell(label), *(NOTHING if ratio is None else interval(ratio) for ratio in ratios)]
        if len(known) > 1:
            values = [ratio.value for ratio in known]
            overlap = all(one.overlaps(other) for one in known for other in known)
            repeated = all(low <= ratio.value <= high for low, high in [known[0].repeat] for ratio in known[1:])
            row += [percent(max(values) / min(values) - 1, 1), yes(overlap), yes(repeated)]
        else:
            row += [NOTHING] * 3
        rows.append(row)
    sections = [
        f"# Comparison of {len(summaries)} runs",
        f"Decoding speed over that of `{baseline}` of the same temperature and batch in the same run. {_INTERVALS} The "
        "last column says whether all further runs lie within the brackets of the first, so widened.",
        "## All conditions",
        table(header, rows) if rows else "The runs have no condition that could be compared with the baseline.",
    ]
    return "\n\n".join(sections)


def _runs(summaries: Sequence[Summary]) -> str:
    """What is not the same in all runs, and what everyone asks first."""
    results = [summary.result for summary in summaries]
    rows = [["prompts", *(f"{summary.prompts} of {len(summary.result.reached)}" for summary in summaries)]]
    for kind in ("target", "machine", "versions", "settings"):
        parts: list[dict[str, Any]] = [getattr(result, kind) for result in results]
        for key in dict.fromkeys(key for part in parts for key in part):
            values = [plain(part.get(key)) for part in parts]
            if (kind, key) not in _LONG and (len(set(values)) > 1 or key in ("dtype", "processor")):
                rows.append([f"{kind}: {key}", *map(cell, values)])
    return f"## The runs\n\n{table(['', *(f'run {number}' for number in range(1, len(results) + 1))], rows, False)}"


def _ratio_of(summary: Summary, label: str, baseline: str) -> Estimate | None:
    index = next((place for place, condition in enumerate(summary.conditions) if condition.label == label), None)
    other = None if index is None else summary.baseline_of(index, baseline)
    return None if index is None or other is None or other == index else summary.ratio(index, other)


def _label(summary: Summary, index: int) -> str:
    return cell(summary.conditions[index].label)


def _ratio(summary: Summary, index: int, other: int | None, category: str | None = None, prefill: bool = False) -> str:
    if other is None:
        return NOTHING
    return "1" if other == index else interval(summary.ratio(index, other, category, prefill))


def _write(out: Path, text: str, pictures: dict[str, bytes], overwrite: bool) -> None:
    """Write all files, the report last; each whole or not at all."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file, and a report needs a folder")
    contents = {**pictures, REPORT: text.encode("utf-8")}
    foreign = [name for name in contents if (out / name).exists() and not _is_report(out / name)]
    if foreign and not overwrite:
        raise FileExistsError(f"{out / foreign[0]} is in the way, and no report wrote it: give another folder")
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        partial = out / (name + ".partial")
        partial.write_bytes(content)
        os.replace(partial, out / name)
    for path in sorted(out.glob("*.png")):
        if path.name not in contents and _is_report(path):
            path.unlink()


def _is_report(path: Path) -> bool:
    """Whether a file was written here: Markdown and PNGs both say so at their beginning."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(512)
    return start.startswith(_MARK.encode()) if path.suffix == ".md" else SOFTWARE.encode() in start
