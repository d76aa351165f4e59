"""What a run would take, before it is begun: how many steps, how much memory and disk, about how long.

Everything that can be counted is counted. Time is measured on one pack, the largest, because what does not fit shows
there; nothing is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.target import Target
from treedec.training.config import TrainConfig
from treedec.training.contracts import Batch, Corpus, Learner, Packs
from treedec.training.features import OnlineFeatures
from treedec.training.loop import trained
from treedec.training.packs import pack, supervised_counts
from treedec.training.processes import seeded
from treedec.training.trainer import build_learner
from treedec.training.vocabulary import coverage, response_tokens


def plan(
    model: PreTrainedModel,
    corpus: Corpus,
    config: TrainConfig,
    processes: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, Any]:
    """What `train` with the same arguments would do and need.

    Args:
        model, tokenizer, corpus, config: as of `train`.
        processes: processes that would share the work.

    Returns:
        Of the data: `conversations`, `idle_conversations`, `skipped_samples`, `train_packs`, `heldout_packs`, `tokens`
        (in packs), `padded_tokens` (what is computed), `positions` and `heldout_positions` (supervised at depth 0).
        Of the run: `steps_per_epoch`, `steps`, `evaluations`, `draft_vocabulary`, `coverage`, `parameters` (trained).
        In bytes, of each process: `target_bytes`, `learner_bytes` (weights, gradients and AdamW's two moments),
        `activation_bytes` (of the largest pack: its states and what is kept for the backward pass; on CUDA the peak,
        which also holds logits); and `feature_bytes`, on the disk.
        In seconds: `feature_seconds` (all captures or recomputations), `step_seconds` (forward and backward passes of
        the heads) and `seconds`, both together.

    Raises:
        ValueError: what `train` would refuse before it computes anything.
    """
    if config.packs_per_step % processes:
        raise ValueError(
            f"packs_per_step {config.packs_per_step} is not a multiple of the {processes} processes that share them"
        )
    packs = pack(corpus, config.pack_tokens, config.holdout, config.seed)
    learner = build_learner(model, tokenizer, corpus, packs, config)
    counts = supervised_counts(corpus, packs, learner.depths, learner.offset)[:, 0]
    padded = np.array([len(members) * int(corpus.lengths[list(members)].max()) for members in packs.members])
    rows = int(sum(corpus.lengths[list(members)].sum() for members in packs.members))
    per_epoch = -(-packs.train // config.packs_per_step)
    steps = config.epochs * per_epoch
    steps = steps if config.max_steps is None else min(steps, config.max_steps)
    evaluations = -(-steps // (config.eval_every or per_epoch))
    measured = _measure(Target(model), corpus, packs, learner, config, int(padded[: packs.train].argmax()))

    largest = float(padded[: packs.train].max())
    trained_tokens = float(padded[: packs.train].sum()) * steps / per_epoch
    heldout_tokens = float(padded[packs.train :].sum()) * evaluations
    passes = float(padded.sum()) if config.features == "stored" else (trained_tokens + heldout_tokens) / processes
    feature_seconds = measured["feature_seconds"] * passes / largest
    # An evaluation takes two forward passes of the heads, a step one and a backward pass: about the same.
    step_seconds = measured["step_seconds"] * (trained_tokens + heldout_tokens) / largest / processes
    weights = trained(learner).values()
    return {
        "conversations": len(corpus),
        "idle_conversations": packs.idle,
        "skipped_samples": corpus.skipped,
        "train_packs": packs.train,
        "heldout_packs": len(packs.heldout),
        "tokens": rows,
        "padded_tokens": int(padded.sum()),
        "positions": int(counts[: packs.train].sum()),
        "heldout_positions": int(counts[packs.train :].sum()),
        "steps_per_epoch": per_epoch,
        "steps": steps,
        "evaluations": evaluations,
        "draft_vocabulary": len(learner.draft_ids),
        "coverage": coverage(response_tokens(corpus, packs, packs.heldout), learner.draft_ids),
        "parameters": sum(one.numel() for one in weights),
        "target_bytes": _bytes(*model.parameters(), *model.buffers()),
        "learner_bytes": 4 * _bytes(*weights),
        "activation_bytes": measured["activation_bytes"],
        "feature_bytes": rows * measured["row_bytes"] if config.features == "stored" else 0,
        "feature_seconds": feature_seconds,
        "step_seconds": step_seconds,
        "seconds": feature_seconds + step_seconds,
    }


def render(planned: dict[str, Any]) -> Table:
    """What `plan` returns, to be read."""
    table = Table.grid(padding=(0, 2))
    rows = {
        "conversations": f"{planned['conversations']:,}, of which {planned['idle_conversations']:,} supervise nothing; "
        f"{planned['skipped_samples']:,} samples were left out",
        "packs": f"{planned['train_packs']:,} to train on and {planned['heldout_packs']:,} held out, "
        f"{planned['tokens']:,} tokens ({planned['padded_tokens']:,} with padding)",
        "supervised": f"{planned['positions']:,} positions, {planned['heldout_positions']:,} held out",
        "steps": f"{planned['steps']:,} ({planned['steps_per_epoch']:,} an epoch), "
        f"{planned['evaluations']:,} evaluations",
        "trained": f"{planned['parameters']:,} parameters",
        "draft vocabulary": f"{planned['draft_vocabulary']:,} tokens, {planned['coverage']:.1%} of the held-out text",
        "memory": f"target {_size(planned['target_bytes'])}, heads with optimiser {_size(planned['learner_bytes'])}, "
        f"activations {_size(planned['activation_bytes'])}",
        "disk": f"features {_size(planned['feature_bytes'])}",
        "time": f"about {_duration(planned['seconds'])}: features {_duration(planned['feature_seconds'])}, "
        f"steps {_duration(planned['step_seconds'])}",
    }
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def _measure(
    target: Target, corpus: Corpus, packs: Packs, learner: Learner, config: TrainConfig, number: int
) -> dict[str, Any]:
    """Seconds and bytes of one pack."""
    source = OnlineFeatures(target, corpus, packs, learner.layers)
    device, dtype = target.device, config.autocast_dtype(target.model.dtype)
    held: list[Batch] = []
    kept: dict[int, int] = {}  # bytes of the storages that the backward pass needs, by address

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def compute() -> None:
        held[:] = [source.batch(number)]

    def learn() -> None:
        kept.clear()
        with seeded(device, config.seed, 0):
            with (
                torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None),
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            ):
                losses = learner(held[0])
            loss = losses.sums.sum() / losses.counts.sum().clamp(min=1)
            (loss if losses.extra is None else loss + losses.extra).backward()
        learner.zero_grad(set_to_none=True)

    counted = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if counted else 0
    if counted:
        torch.cuda.reset_peak_memory_stats(device)
    learner.at(math.nextafter(1, 0))  # what is trained later is trained besides
    feature_seconds, step_seconds = _timed(compute, device), _timed(learn, device)
    batch = held[0]
    states = [batch.hidden] if batch.features is None else [batch.hidden, batch.features]
    for weight in learner.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    needed = sum(({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in states} | kept).values())
    return {
        "feature_seconds": feature_seconds,
        "step_seconds": step_seconds,
        "activation_bytes": torch.cuda.max_memory_allocated(device) - before if counted else needed,
        "row_bytes": sum(one.shape[-1] * one.element_size() for one in states),
    }


def _timed(act: Callable[[], None], device: torch.device) -> float:
    """Seconds of the second call: the first also pays for what is set up once."""
    for _ in range(2):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _bytes(*tensors: Tensor) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
