"""`treedec check`: whether a model scores token trees exactly."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from treedec.cli.options import DeviceOption, Dtype, DtypeOption, JsonOption, load
from treedec.cli.run import REFUSED, print_json


def check(
    model: Annotated[
        str, typer.Argument(help="'demo', a model folder, or the name of a model on the hub.", show_default=False)
    ],
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure whether a model scores token trees exactly; exit code 1 if it does not."""
    target, _ = load(model, dtype, device)
    from treedec.probe import report

    facts = report(target)
    if as_json:
        # JSON knows no NaN.
        print_json({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()})
    else:
        Console().print(_check_table(facts), highlight=False)
    if not facts["supported"]:
        raise typer.Exit(REFUSED)


def _check_table(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "model": facts["model"],
        "runs in": f"{facts['dtype']} on {facts['device']}, {facts['attention']} attention",
    }
    if "window" in facts:
        limit, switch = facts["max_positions"], facts["rope_switch"]
        rows["window"] = "none" if facts["window"] is None else f"{facts['window']} tokens"
        rows["positions"] = f"no limit, made for {facts['context_length']}" if limit is None else f"at most {limit}"
        if switch is not None:
            rows["positions"] += f", other rotary frequencies from {switch['position']}"
    if "error" in facts:
        rows["deviation"] = f"{facts['error']:.1e} over a token tree ({facts['tolerance']:.1e} is rounding)"
        rows["noise"] = f"{facts['noise']:.1e} between two ways to read the same text"
        rows["control"] = f"{facts['control']:.1e} under a wrong mask"
    verdict = "exact" if facts["reason"] is None else facts["reason"]
    rows["verdict"] = verdict if facts["supported"] else f"refused: {verdict}"
    for label, value in rows.items():
        table.add_row(label, escape(value))
    return table
