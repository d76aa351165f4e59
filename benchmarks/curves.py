"""Learning curves of training runs, as a picture.

    python -m treedec.benchmarks.curves run --out curves.png
    python -m treedec.benchmarks.curves small medium large --out data_size.png

One run: its losses, how often each depth is right, and the simulated acceptance, over the steps. Several: how far each
of them came, over the positions it was trained on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treedec.benchmarks.record import check_writable
from treedec.cli import run_app

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAME = "python -m treedec.benchmarks.curves"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def read_metrics(run: Path) -> dict[str, Any]:
    """`metrics.json` of a run.

    Raises:
        FileNotFoundError: there is none, because nothing has been evaluated yet or it is no run.
        ValueError: it is something else.
    """
    path = run / "metrics.json" if run.is_dir() else run
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a training run that has been evaluated")
    try:
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not (metrics["evaluations"] and metrics["history"] and metrics["final"]):
            raise ValueError("it is empty")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what training writes ({error!r})") from error
    return metrics


def over_steps(metrics: dict[str, Any]) -> Figure:
    """Three panels of one run."""
    history, evaluations = metrics["history"], metrics["evaluations"]
    figure, (losses, accuracies, lengths) = _panels(3)
    steps, at = [entry["step"] for entry in history], [entry["step"] for entry in evaluations]
    for depth in range(len(evaluations[0]["top1"])):
        colour = f"C{depth}"
        losses.plot(steps, [entry["losses"][depth] for entry in history], colour, alpha=0.4, linewidth=0.8)
        losses.plot(at, [entry["loss"][depth] for entry in evaluations], colour, marker=".", label=f"depth {depth + 1}")
        accuracies.plot(steps, [entry["accuracy"][depth] for entry in history], colour, alpha=0.4, linewidth=0.8)
        accuracies.plot(at, [entry["accuracy"][depth] for entry in evaluations], colour, marker=".")
    for name, label in (("accepted_length", "all held-out text"), ("accepted_length_greedy", "greedy held-out text")):
        known = [(entry["step"], entry[name]) for entry in evaluations if entry[name] is not None]
        if known:
            lengths.plot(*zip(*known, strict=True), marker=".", label=label)
    nodes = metrics["config"]["eval_nodes"]
    _label(losses, "loss (nats)", "step", "thin: training, dots: held out")
    _label(accuracies, "first choice is the target's", "step", "among what can be drafted")
    _label(lengths, "mean accepted length", "step", f"simulated, {nodes} nodes")
    losses.legend(fontsize=8)
    lengths.legend(fontsize=8)
    return figure


def over_positions(runs: Sequence[dict[str, Any]]) -> Figure:
    """Two panels of several runs."""
    figure, (accuracies, lengths) = _panels(2)
    finals = sorted((metrics["final"] for metrics in runs), key=lambda final: final["positions"])
    positions = [final["positions"] for final in finals]
    for depth in range(min(len(final["top1"]) for final in finals)):
        shares = [final["accuracy"][depth] for final in finals]
        accuracies.plot(positions, shares, f"C{depth}", marker=".", label=f"depth {depth + 1}")
    for name, label in (("accepted_length", "all held-out text"), ("accepted_length_greedy", "greedy held-out text")):
        known = [(final["positions"], final[name]) for final in finals if final[name] is not None]
        if known:
            lengths.plot(*zip(*known, strict=True), marker=".", label=label)
    _label(accuracies, "first choice is the target's", "positions trained on", "held out")
    _label(lengths, "mean accepted length", "positions trained on", "simulated")
    for panel in (accuracies, lengths):
        panel.set_xscale("log")
        panel.legend(fontsize=8)
    return figure


def _panels(count: int) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * count, 3.2), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, so that no window system is asked for
    return figure, figure.subplots(1, count)


def _label(panel: Any, what: str, over: str, title: str) -> None:
    panel.set_ylabel(what)
    panel.set_xlabel(over)
    panel.set_title(title, fontsize=9)
    panel.grid(alpha=0.3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the curves and return the exit code; `arguments` defaults to those of the process."""
    return run_app(app, _NAME, arguments)


@app.command()
def command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs, or their metrics.json.")],
    out: Annotated[Path, typer.Option(help="The picture, .png or .svg.", show_default=False)],
) -> None:
    """Draw the learning curves of training runs."""
    metrics = [read_metrics(run) for run in runs]
    check_writable(out)
    figure = over_steps(metrics[0]) if len(metrics) == 1 else over_positions(metrics)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
