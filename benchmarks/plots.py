"""The pictures of a report.

Each function draws one picture of a `Summary`, or returns None where the run has nothing to draw; `draw` makes PNGs of
all of them. matplotlib is imported when the first is drawn, and never asked for a window. Colours are those of Okabe
and Ito, which colour-blind readers tell apart; markers, hatching and numbers tell the same.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treedec.benchmarks.statistics import Estimate, Summary, is_slower
from treedec.benchmarks.theory import tree_nodes
from treedec.costs import CostCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOFTWARE = "treedec bench report"  # what a PNG names as its maker
_BLUE, _ORANGE, _GREEN, _VERMILION, _SKY, _PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
_GREY = "#8A8A8A"
_SERIES = [(_BLUE, "o"), (_VERMILION, "s"), (_GREEN, "^"), (_PURPLE, "D"), (_ORANGE, "v"), (_SKY, "P"), ("black", "X")]
_COLUMNS = 4
# A place of a tree that was reached less often says nothing: its share is left blank.
_FEWEST = 20
_PLACES = 8  # depths and ranks shown


def draw(summary: Summary, baseline: str) -> dict[str, bytes]:
    """PNGs by name, without ending: `speedup`, `accepted_length`, `acceptance`, `time_split`, `tree_size`, if there is
    anything to draw.

    Args:
        summary: of a run.
        baseline: the method that speed-ups are over.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figures = {
        "speedup": speedup(summary, baseline),
        "accepted_length": accepted_length(summary),
        "acceptance": acceptance(summary),
        "time_split": time_split(summary),
        "tree_size": tree_size(summary),
    }
    return {name: _png(figure) for name, figure in figures.items() if figure is not None}


def speedup(summary: Summary, baseline: str) -> Figure | None:
    """Ratio of decoding speeds to the baseline, with 95 % intervals: one panel per category, one line per condition."""
    pairs = [(index, summary.baseline_of(index, baseline)) for index in range(len(summary.conditions))]
    shown = [(index, other) for index, other in pairs if other is not None and other != index]
    if not shown:
        return None
    categories: list[str | None] = [None, *(summary.categories if len(summary.categories) > 1 else ())]
    figure, panels = _grid(len(categories), height=0.55 + 0.2 * len(shown), sharex=True, sharey=True)
    for panel, category in zip(panels, categories, strict=True):
        for place, (index, other) in enumerate(shown):
            ratio = summary.ratio(index, other, category)
            if not math.isfinite(ratio.value):
                continue
            slower = is_slower(ratio)
            colour, marker = (_VERMILION, "s") if slower else (_BLUE, "o")
            panel.errorbar(ratio.value, place, xerr=_bars([ratio]), fmt=marker, color=colour, markersize=4, capsize=2)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_title("all prompts" if category is None else category, fontsize=9)
        panel.set_yticks(range(len(shown)), [_short(summary.conditions[index].label) for index, _ in shown], fontsize=8)
        panel.set_ylim(len(shown) - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
    _label_bottoms(panels, f"speed-up over {baseline}")
    figure.suptitle("Decoding speed, 95 % intervals over prompts (squares: slower)", fontsize=10)
    return figure


def accepted_length(summary: Summary) -> Figure | None:
    """Share of target passes that committed 1, 2, … tokens: one panel per condition."""
    shown = [
        (index, lengths)
        for index in range(len(summary.conditions))
        if (lengths := summary.figures(index).accepted_lengths) and max(lengths) > 1
    ]
    if not shown:
        return None
    longest = max(_longest(lengths) for _, lengths in shown)
    figure, panels = _grid(len(shown), height=1.35, sharex=True, sharey=True)
    for panel, (index, lengths) in zip(panels, shown, strict=True):
        passes = sum(lengths.values())
        panel.bar(list(lengths), [times / passes for times in lengths.values()], color=_BLUE, width=0.8)
        mean = summary.figures(index).mean_accepted_length
        assert mean is not None
        panel.axvline(mean, color="black", linestyle="--", linewidth=1)
        panel.set_title(f"{_short(summary.conditions[index].label)}: mean {mean:.2f}", fontsize=8)
        panel.set_xlim(0.4, longest + 0.6)
        panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        panel.grid(axis="y", alpha=0.3)
    _label_bottoms(panels, "tokens per pass")
    _label_lefts(panels, "share of passes")
    figure.suptitle("Accepted length: tokens committed per target pass (dashed: mean)", fontsize=10)
    return figure


def acceptance(summary: Summary) -> Figure | None:
    """How often a candidate is accepted once its parent was, by depth and rank: one heat map per condition."""
    shown = [
        (index, places)
        for index in range(len(summary.conditions))
        if (places := summary.figures(index).acceptance_by_place)
    ]
    if not shown:
        return None
    import numpy as np

    inside = {
        index: {place: counts for place, counts in places.items() if max(place) <= _PLACES and counts[0] >= _FEWEST}
        for index, places in shown
    }
    depths, ranks = (max((place[axis] for places in inside.values() for place in places), default=1) for axis in (0, 1))
    figure, panels = _grid(len(shown), height=0.5 + 0.2 * depths)
    for panel, (index, places) in zip(panels, inside.items(), strict=True):
        shares = np.full((depths, ranks), np.nan)
        for (depth, rank), (reached, accepted) in places.items():
            shares[depth - 1, rank - 1] = accepted / reached
        panel.set_facecolor("#EEEEEE")
        panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            if not np.isnan(share):
                colour = "white" if share > 0.55 else "black"
                panel.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
        panel.set_xticks(range(ranks), range(1, ranks + 1), fontsize=8)
        panel.set_yticks(range(depths), range(1, depths + 1), fontsize=8)
        panel.set_title(_short(summary.conditions[index].label), fontsize=8)
        panel.set_xlabel("rank among siblings", fontsize=8)
    _label_lefts(panels, "depth")
    figure.suptitle(
        f"Acceptance by place in the tree: % accepted once the parent was (grey: reached < {_FEWEST} times)",
        fontsize=10,
    )
    return figure


def _longest(lengths: dict[int, int]) -> int:
    """The longest accepted length that is worth its place on an axis."""
    passes = sum(lengths.values())
    return max((length for length, times in lengths.items() if times >= passes / 500), default=max(lengths))


def time_split(summary: Summary) -> Figure | None:
    """Milliseconds of decoding per token: drafting, target passes, the rest; one bar per condition."""
    shown = [index for index in range(len(summary.conditions)) if summary.figures(index).decoded_tokens]
    if not shown:
        return None
    figure, (panel,) = _grid(1, height=0.9 + 0.24 * len(shown), width=7.0)
    for place, index in enumerate(shown):
        figures = summary.figures(index)
        scale = 1e3 / figures.decoded_tokens
        parts = [(figures.target_seconds, _BLUE, ""), (figures.draft_seconds, _ORANGE, "//")]
        parts.append((figures.rest_seconds, "#BBBBBB", ""))
        if figures.rest_seconds is None:
            parts = [(figures.decode_seconds, "white", "")]
        start = 0.0
        for seconds, colour, hatch in parts:
            assert seconds is not None
            edge = _GREY if colour == "white" else "white"
            panel.barh(place, seconds * scale, left=start, color=colour, hatch=hatch, edgecolor=edge, height=0.7)
            start += seconds * scale
        panel.text(start, place, f" {start:.1f}", va="center", fontsize=8)
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(facecolor=_BLUE, label="target passes"),
            Patch(facecolor=_ORANGE, hatch="//", edgecolor="white", label="drafting"),
            Patch(facecolor="#BBBBBB", label="the rest"),
            Patch(facecolor="white", edgecolor=_GREY, label="not split"),
        ],
        fontsize=8, ncols=4, loc="outside lower center", frameon=False,
    )  # fmt: skip
    panel.set_yticks(range(len(shown)), [_short(summary.conditions[index].label) for index in shown], fontsize=8)
    panel.set_ylim(len(shown) - 0.4, -0.6)
    panel.margins(x=0.1)
    panel.set_xlabel("milliseconds per token, prefill left out", fontsize=8)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    figure.suptitle("Where the time goes", fontsize=10)
    return figure


def tree_size(summary: Summary) -> Figure | None:
    """Speed against the size of the tree, for methods run with several, beside what a pass of the target costs."""
    families: dict[str, list[tuple[int, int]]] = {}
    for index, condition in enumerate(summary.conditions):
        method, at, _ = condition.method.rpartition("@")
        if (nodes := tree_nodes(condition.method)) is not None and at:
            rest = condition.label.removeprefix(condition.method)
            families.setdefault(method + rest, []).append((nodes, index))
    shown = {name: sorted(members) for name, members in families.items() if len(members) > 1}
    if not shown:
        return None
    curve = None if summary.result.costs is None else CostCurve.of(summary.result.costs)
    figure, panels = _grid(1 if curve is None else 2, height=2.6, width=3.6, sharex=True)
    for place, (name, members) in enumerate(shown.items()):
        colour, marker = _SERIES[place % len(_SERIES)]
        speeds = [summary.speed(index) for _, index in members]
        panels[0].errorbar(
            [nodes for nodes, _ in members], [each.value for each in speeds], yerr=_bars(speeds), color=colour,
            marker=marker, markersize=4, linewidth=1.2, capsize=2, label=_short(name),
        )  # fmt: skip
    panels[0].set_ylabel("tokens per second", fontsize=8)
    panels[0].set_title("decoding speed, 95 % intervals", fontsize=9)
    panels[0].legend(fontsize=7)
    if curve is not None:
        panels[1].plot(curve.nodes, [1e3 * each for each in curve.seconds], color="black", marker="o", markersize=3)
        panels[1].set_ylabel("milliseconds per target pass", fontsize=8)
        panels[1].set_title("cost of a pass", fontsize=9)
    sizes = sorted({nodes for members in shown.values() for nodes, _ in members} | set(curve.nodes if curve else ()))
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, sizes, fontsize=8)
        panel.set_xticks([], minor=True)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("nodes of the tree", fontsize=8)
        panel.grid(alpha=0.3)
    return figure


def _grid(
    count: int, height: float, width: float = 2.1, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, Sequence[Any]]:
    """A figure of `count` panels, at most four in a row, each `height` by `width` inches besides its labels."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'treedec[bench]'") from error
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.8 + width * columns, 0.8 + (height + 0.45) * rows), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, so that no window system is asked for
    panels = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False).flatten().tolist()
    for panel in panels[count:]:
        panel.remove()
    for panel in panels[:count]:
        panel.tick_params(labelsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, panels[:count]


def _label_bottoms(panels: Sequence[Any], text: str) -> None:
    """Label the lowest panel of every column, and give it the numbers that a removed neighbour would have had."""
    columns = min(len(panels), _COLUMNS)
    for panel in panels[-columns:]:
        panel.set_xlabel(text, fontsize=8)
        panel.tick_params(labelbottom=True)


def _label_lefts(panels: Sequence[Any], text: str) -> None:
    for panel in panels[::_COLUMNS]:
        panel.set_ylabel(text, fontsize=8)


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """`[2, n]` lengths of error bars below and above; none where the interval is unknown."""
    below = [each.value - each.low if each.known else 0.0 for each in estimates]
    return [below, [each.high - each.value if each.known else 0.0 for each in estimates]]


def _short(label: str) -> str:
    """A label that fits beside a panel: of a long path, its end tells most."""
    return label if len(label) <= 30 else "…" + label[-29:]


def _png(figure: Figure) -> bytes:
    """The same bytes for the same picture: no date, no version of matplotlib."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": SOFTWARE})
    return buffer.getvalue()
