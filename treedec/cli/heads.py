"""`treedec convert` and `treedec inspect`: folders of draft heads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from treedec.cli.options import Dtype, JsonOption, load, quiet_transformers
from treedec.cli.run import print_json


class Format(StrEnum):
    """Formats that heads can be written in: the keys of `treedec.heads.formats.WRITERS`."""

    treedec = "treedec"
    vllm_medusa = "vllm-medusa"
    eagle3 = "eagle3"
    speculators = "speculators"


HeadsTargetOption = Annotated[
    str | None,
    typer.Option(
        help="The model the heads are for, as for generate; needed where a format leaves something to it.",
        show_default="none",
    ),
]


def convert(
    source: Annotated[Path, typer.Argument(help="A folder of heads, in any format that is read.", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    to: Annotated[Format, typer.Option(help="The format to write.", show_default=False)],
    target: HeadsTargetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace heads that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write draft heads in another format; their weights stay as they are."""
    quiet_transformers()
    from treedec.heads.formats import detect, read, write

    model = None if target is None else load(target, Dtype.auto, "cpu", runs=False)[0]
    stored = read(source, model)
    # "demo" is no name that others know.
    write(destination, stored, to.value, model, base=None if target == "demo" else target, overwrite=overwrite)
    if as_json:
        print_json({"out": str(destination), "from": detect(source), "to": to.value, "method": stored.method})
    else:
        print(f"{destination}: {stored.method} heads as {to.value}")


def inspect(
    path: Annotated[Path, typer.Argument(help="A folder of heads.", show_default=False)],
    target: HeadsTargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a folder of draft heads holds, and which formats it can be written in."""
    quiet_transformers()
    from treedec.heads import formats

    facts = formats.inspect(path, None if target is None else load(target, Dtype.auto, "cpu", runs=False)[0])
    if as_json:
        print_json(facts)
    else:
        Console().print(_heads_table(facts), highlight=False)


def _heads_table(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    shape = {key: "the target's" if value is None else value for key, value in facts["shape"].items()}
    rows = {
        "format": facts["format"],
        "method": facts["method"],
        "shape": ", ".join(f"{key} {value}" for key, value in shape.items()),
        "target": f"{facts['base'] or 'not named'} ({facts['target'] or 'no fingerprint'})",
        "size": f"{facts['parameters']:,} parameters, {facts['bytes'] / 1e6:.1f} MB",
        **{f"as {name}": "yes" if reason is None else f"no: {reason}" for name, reason in facts["writes"].items()},
    }
    for label, value in rows.items():
        table.add_row(label, escape(value))
    return table
