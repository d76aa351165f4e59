"""Which peers there are, and where their environments lie. Light: the command line imports it to check names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "peer:"
PEERS_FOLDER = Path("build") / "peers"


@dataclass(frozen=True)
class Peer:
    """What treedec has to know of a peer; the rest is in `worker.py`.

    Attributes:
        name: the method is called `peer:` and this.
        gguf: whether it loads a GGUF file rather than a folder of Hugging Face's.
        drafts: whether it decodes with the run's draft model, if there is one.
    """

    name: str
    gguf: bool = False
    drafts: bool = False


PEERS = {peer.name: peer for peer in (Peer("llama.cpp", gguf=True), Peer("vllm"), Peer("flashspec", drafts=True))}


def interpreter(folder: Path, name: str) -> Path:
    """The Python of a peer's environment; not resolved, because a link to it is what tells it where it is."""
    return (folder / name / "bin" / "python").absolute()


def check_installed(folder: Path, names: Iterable[str]) -> None:
    """Refuse peers whose environment is not there.

    Args:
        folder: where the environments lie.
        names: keys of `PEERS`.

    Raises:
        FileNotFoundError: one is missing; the message says how to make it.
    """
    for name in names:
        if not interpreter(folder, name).is_file():
            raise FileNotFoundError(
                f"method '{PREFIX}{name}' needs an environment of its own, and {folder / name} is none: run "
                "`make bench-peers`, or give its --peers-folder"
            )
