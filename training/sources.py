"""Where text is read from besides plain files: what the `datasets` library reads, and how such sources are named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

JSON_LINES = (".jsonl", ".ndjson")
# The builder of the `datasets` library that reads a file, by the end of its name.
_BUILDERS = {
    ".parquet": "parquet", ".csv": "csv", ".json": "json",
    ".jsonl.gz": "json", ".json.gz": "json", ".jsonl.zst": "json", ".json.zst": "json",
}  # fmt: skip
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?")


def builder_of(path: Path) -> str | None:
    """What reads a file of that name; None for one that `datasets` is not needed for."""
    return next((builder for ending, builder in _BUILDERS.items() if path.name.endswith(ending)), None)


def is_file_name(path: Path) -> bool:
    """Whether what is not there would be a file: a data set is hardly called like that."""
    return path.name.endswith((".txt", *JSON_LINES, *_BUILDERS))


def rows(
    source: str | os.PathLike[str], split: str, builder: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The samples of whatever the `datasets` library reads, one at a time.

    Args:
        source: a file that `builder` reads, a folder, or a name on the hub.
        split: which split; a file has only "train".
        builder: None for a folder or a name.

    Yields:
        Where a sample is, and its fields.

    Raises:
        ValueError: `datasets` is not installed, or cannot read it.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source}: only the `datasets` library reads this: run `pip install 'treedec[train]'`"
        ) from error
    path = Path(source).expanduser()
    if path.is_dir() and not any(entry.is_file() for entry in path.rglob("*")):
        raise ValueError(f"{source}: a folder without files")
    where = f"{source}" if builder else f"{source}, split {split!r}"
    try:
        if builder:
            found = datasets.load_dataset(builder, data_files=str(path), split=split, streaming=True)
        elif (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(path))[split]
        elif (path / "state.json").is_file():
            found = datasets.load_from_disk(str(path))
        elif path.is_dir():
            found = datasets.load_dataset(str(path), split=split, streaming=True)
        else:
            name = cast(re.Match[str], HUB_NAME.fullmatch(str(source)))
            found = datasets.load_dataset(name["name"], name["config"], split=split, streaming=True)
        numbered = enumerate(found)
        while (row := next(numbered, None)) is not None:
            yield f"{where}, sample {row[0]}", row[1]
    # Downloads, file formats and schemas fail in the exceptions of as many libraries.
    except Exception as error:
        raise ValueError(f"{where}: the `datasets` library cannot read it ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
