"""Where a benchmark writes, and what it was measured with."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path


def check_writable(out: Path) -> None:
    """Make the folder of a file and try to write there: not after an hour of measuring.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error}") from error


def processor() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
