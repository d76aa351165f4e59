"""The peers of one run: the target written for them, a process each, and their answers as a method's."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.benchmarks.peers.export import export_folder, export_gguf
from treedec.benchmarks.peers.names import PEERS, PREFIX, check_installed, interpreter
from treedec.benchmarks.peers.process import Answer, PeerError, Worker

WORKER = Path(__file__).with_name("worker.py")
_MOST_CONTEXT = 8192
# What of a generation configuration peers are told, or what is set otherwise for all methods.
_TOLD = {
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache",
    "do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens",
}  # fmt: skip
# The threads of whoever decoded before may spin for some milliseconds after their last work.
_SETTLE_SECONDS = 0.02
# What may lie between our clock and a peer's, as a share and in seconds: messages, and a machine that is busy.
_CLOCK_SHARE, _CLOCK_SECONDS = 0.1, 0.5


class Peers:
    """Processes that decode as a target does, started when first asked for.

    Args:
        folder: holds the environments; models, jobs and logs go there, too.
        model, tokenizer: the target, which has to be on the CPU.
        max_new_tokens: per prompt.
        eos: ids that end a text.
        draft_model: for peers that decode with one.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        eos: Collection[int],
        draft_model: PreTrainedModel | None = None,
    ):
        self._folder, self._model, self._tokenizer, self._draft_model = folder, model, tokenizer, draft_model
        self._max_new_tokens, self._eos = max_new_tokens, list(eos)
        self._workers: dict[str, Worker] = {}

    @property
    def versions(self) -> dict[str, str]:
        """Of what runs, by the name of the method."""
        return {
            PREFIX + name: ", ".join(f"{package} {version}" for package, version in worker.versions.items())
            for name, worker in self._workers.items()
        }

    def start(self, name: str) -> None:
        """Start a peer, unless it runs already.

        Raises:
            FileNotFoundError: its environment is missing.
            ValueError: it cannot decode this target; the message quotes its log, or the setting that it does not know.
        """
        if name in self._workers:
            return
        check_installed(self._folder, [name])
        if self._model.device.type != "cpu":
            raise ValueError(f"peers decode on the CPU, and the target is on {self._model.device}: give --device cpu")
        if settings := _unknown_settings(self._model):
            raise ValueError(
                f"method '{PREFIX}{name}': the target's generation configuration sets {', '.join(settings)}, which "
                "peers are not told: their texts would be others"
            )
        folder = self._folder.absolute()
        jobs = folder / "jobs"
        jobs.mkdir(parents=True, exist_ok=True)
        job = jobs / f"{name}-{os.getpid()}.json"
        job.write_text(json.dumps(self._job(name, folder / "models")), encoding="utf-8")
        command = [str(interpreter(self._folder, name)), "-I", str(WORKER), str(job)]
        try:
            self._workers[name] = Worker(name, command, self._folder / "logs", environment=_environment())
        except PeerError as error:
            raise ValueError(f"method '{PREFIX}{name}': {error}") from error
        finally:
            job.unlink()

    def decode(self, name: str, ids: Sequence[int], temperature: float, seed: int) -> Answer:
        """Have a started peer decode a prompt, while nothing else computes.

        Raises:
            PeerError, PeerGone: see `Worker.ask`; also if its times and our clock do not agree.
        """
        time.sleep(_SETTLE_SECONDS)
        started = time.perf_counter()
        answer = self._workers[name].ask(ids, temperature, seed)
        took, own = time.perf_counter() - started, answer.prefill_seconds + answer.decode_seconds
        if not own <= took <= own * (1 + _CLOCK_SHARE) + _CLOCK_SECONDS:
            raise PeerError(f"{name} says that it took {own:.3f} seconds, and its answer came after {took:.3f}")
        time.sleep(_SETTLE_SECONDS)
        return answer

    def close(self) -> None:
        """End all processes."""
        try:
            while self._workers:
                _, worker = self._workers.popitem()
                worker.close()
        finally:
            if self._workers:  # interrupted while one was being ended
                self.close()

    def _job(self, name: str, models: Path) -> dict[str, Any]:
        peer, draft_model = PEERS[name], None
        model = export_gguf(self._model, models) if peer.gguf else export_folder(self._model, self._tokenizer, models)
        if peer.drafts and self._draft_model is not None:
            draft_model = str(export_folder(self._draft_model, None, models))
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return {
            "peer": name,
            "model": str(model),
            "draft_model": draft_model,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "eos": self._eos,
            "max_new_tokens": self._max_new_tokens,
            "context": min(context or _MOST_CONTEXT, _MOST_CONTEXT),
        }


def _unknown_settings(model: PreTrainedModel) -> list[str]:
    """What a target's generation configuration says beyond what peers are told."""
    config = model.generation_config
    told = {} if config is None else config.to_diff_dict()
    # Penalties of 1, lengths of 0 and switches change nothing.
    return sorted(key for key, value in told.items() if key not in _TOLD and value not in (None, 0, 1))


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
