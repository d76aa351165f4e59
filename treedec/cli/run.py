"""Exit codes, and how errors are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer

REFUSED = 1
BAD_INPUT = 2
INTERRUPTED = 130
# Mistakes of the caller, from which the library's own exceptions derive, and what a disk or a network refuses.
_USER_ERRORS = (ValueError, OSError)
# click's UsageError, or that of the copy of click inside newer versions of typer: every mistyped option is one.
_UsageError: Any = typer.BadParameter.__base__


class Interrupted(Exception):
    """Ctrl-C where there is something to say about what was kept."""


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line that goes by a name, with the exit codes and one-line errors of `treedec.cli`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(list(arguments) or ["--help"], prog_name=name, standalone_mode=False) or 0
    except _UsageError as error:
        return _say(f"error: {error.format_message()}", BAD_INPUT)
    except _USER_ERRORS as error:
        return _say(f"error: {error}", BAD_INPUT)
    except Interrupted as error:
        return _say(str(error), INTERRUPTED)
    except typer.Abort:  # how older versions of typer tell of Ctrl-C; newer ones return the exit code
        code = INTERRUPTED
    return _say("interrupted", INTERRUPTED) if code == INTERRUPTED else code


def _say(message: str, code: int) -> int:
    """Print one line, whatever line breaks the message has, and return the exit code."""
    print("treedec:", " ".join(message.split()), file=sys.stderr)
    return code


def print_json(result: dict[str, Any]) -> None:
    """Print what a command found as one line of standard output."""
    print(json.dumps(result, ensure_ascii=False))
