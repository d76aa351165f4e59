"""What every benchmark writes: its figures, and what they were measured with."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import treedec


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


def write_record(out: Path, name: str, prompts: Path, device: torch.device, figures: dict[str, object]) -> None:
    """Write figures as JSON, with the command, the machine and the versions, all at once or not at all.

    Args:
        out: the file.
        name: what the command goes by; its arguments are those of the process.
        prompts: an argument of which the record keeps the name only: where the file lies is nobody else's business.
        device: of the target.
        figures: further entries; no NaN, which is not JSON.
    """
    record = {
        "schema": 1,
        "command": " ".join([name, *(prompts.name if Path(part) == prompts else part for part in sys.argv[1:])]),
        "machine": {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "system": platform.platform(),
        },
        "versions": {
            "treedec": treedec.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **figures,
    }
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
    os.replace(partial, out)


def processor() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
