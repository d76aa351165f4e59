"""The command line: `treedec generate | synth | train | demo | check | convert | inspect | bench`.

Knows arguments, terminals and exit codes; what the commands do lies in the modules they import. Those imports are
inside the commands, so that `--help` and a mistyped option answer at once instead of after loading torch.

Results go to standard output, everything else (progress, statistics, errors) to standard error. With `--json` the last
line of standard output is one JSON object. Exit codes: 0, 1 for a model that `check` refuses or a method that `bench`
finds to count wrongly, 2 for a mistake in the input (one line, no traceback), 130 for Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from treedec.cli import bench, check, demo, generate, heads, synth, train
from treedec.cli.options import DeviceOption, Dtype, TargetOption, load
from treedec.cli.run import run_app

__all__ = ["DeviceOption", "Dtype", "TargetOption", "app", "load", "main", "run_app"]

app = typer.Typer(
    help="Generate text faster with any Hugging Face causal LM, without changing what it says.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    generate.generate,
    synth.synth,
    train.train,
    demo.demo,
    check.check,
    heads.convert,
    heads.inspect,
):
    app.command()(_command)
app.add_typer(bench.app, name="bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `arguments` defaults to those of the process."""
    return run_app(app, "treedec", arguments)
