"""A peer's process: how it is started, asked and ended. See `worker.py` for what is said.

A process that dies, takes too long or says what is no answer costs the prompt it was asked; it is ended, and the next
prompt ends the run. What it wrote to standard error stays in a log, which messages name and quote.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treedec.benchmarks.counting import BenchmarkDefect
from treedec.benchmarks.results import from_json

START_SECONDS = 1800.0  # vLLM compiles when it loads
ANSWER_SECONDS = 600.0
_GRACE_SECONDS = 15.0  # to end by itself when its input has ended
_LOG_LINES = 12
_CHUNK = 1 << 16


class PeerError(Exception):
    """A prompt that a peer did not decode."""


class PeerGone(BenchmarkDefect):
    """A peer that has failed before and is ended: without it the run measures nothing that can be compared."""


@dataclass(frozen=True)
class Answer:
    """What a peer says of a prompt; see `worker.py`."""

    tokens: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    steps: tuple[int, ...] | None


class Worker:
    """A process that speaks as `worker.py` does; returns when it is ready.

    Args:
        name: of the peer, for messages.
        command: what to run.
        logs: folder for its log, which is deleted at the end if no message has named it.
        environment: its environment variables.
        start_seconds: it has to be ready by then.
        answer_seconds: an answer has to come by then.

    Attributes:
        versions: what it says of the packages it runs.

    Raises:
        PeerError: it cannot be started or is not ready in time; the message quotes its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        *,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ):
        self.name, self._answer_seconds = name, answer_seconds
        self._asked, self._buffer, self._failure = 0, b"", ""
        self._busy = True  # until it has said what it was to say: only then its end is worth waiting for
        self._closed = self._kept = False
        logs.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=logs)
        self.log = logs / Path(path).name
        with os.fdopen(handle, "wb") as log:
            try:
                # A session of its own, so that whatever it starts ends with it. Ctrl-C reaches only this process then.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                self.log.unlink()
                raise PeerError(f"{name} cannot be started: {error}") from error
        try:
            ready = self._receive(start_seconds, "to be ready")
            try:
                self.versions: dict[str, str] = from_json(dict[str, str], ready["ready"], "ready")
            except (LookupError, ValueError) as error:
                raise self._failed(f"says {_short(ready)} where it should be ready") from error
        except BaseException:
            self.close()
            raise

    def ask(self, ids: Sequence[int], temperature: float, seed: int) -> Answer:
        """Have a prompt decoded.

        Args:
            ids: the prompt.
            temperature: 0 for greedy decoding.
            seed: of sampling.

        Raises:
            PeerError: the peer raised something, or failed.
            PeerGone: it had failed before.
        """
        if self._failure:
            raise PeerGone(f"{self._failure}; without this peer the run cannot go on: start it anew to try")
        self._asked += 1
        request = {"id": self._asked, "ids": list(ids), "temperature": temperature, "seed": seed}
        self._send(json.dumps(request).encode() + b"\n")
        reply = self._receive(self._answer_seconds, "to answer")
        if reply.pop("id", None) != self._asked:
            raise self._failed(f"says {_short(reply)}, which answers another question")
        if set(reply) == {"error"}:
            self._kept = True
            raise PeerError(f"{self.name}: {reply['error']} (log: {self.log})")
        try:
            answer: Answer = from_json(Answer, reply, "")
        except ValueError as error:
            raise self._failed(f"gives an answer that is none: {error}") from error
        if not all(0 <= seconds < math.inf for seconds in (answer.prefill_seconds, answer.decode_seconds)):
            raise self._failed(f"says that it took {answer.prefill_seconds} and {answer.decode_seconds} seconds")
        return answer

    def close(self) -> None:
        """End the process and all that it started; again does nothing."""
        if self._closed:
            return
        self._closed, process = True, self._process
        try:
            with contextlib.suppress(OSError):  # what was being written when it died
                assert process.stdin is not None
                process.stdin.close()
            if not self._busy:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
        finally:
            # Also what it left behind: the group is its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if not self._failure and not self._kept:
            self.log.unlink(missing_ok=True)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(self._ended()) from error

    def _receive(self, seconds: float, what: str) -> dict[str, Any]:
        """The next line, which has to be a JSON object."""
        self._busy = True
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise self._failed(f"took more than {seconds:g} seconds {what}")
            chunk = os.read(descriptor, _CHUNK)
            if not chunk:
                raise self._failed(self._ended())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are such
            raise self._failed(f"says what is no JSON: {_short(line.decode(errors='replace'))}") from error
        if not isinstance(message, dict):
            raise self._failed(f"says {_short(message)} where it should {what.removeprefix('to ')}")
        self._busy = False
        return message

    def _ended(self) -> str:
        try:
            code = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _failed(self, reason: str) -> PeerError:
        """The error to raise; whatever it is, the process ends here."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = " | ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())
        self._busy = True
        self._failure = f"{self.name} {reason}; its log {self.log} ends with: {tail or '(nothing)'}"
        self.close()
        return PeerError(self._failure)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"
