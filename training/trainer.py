"""Fits draft heads to a frozen target.

The loop owns what may be lost when a machine dies: heads, optimiser, place in the data, best heads so far. All of it
goes into one file that is replaced as a whole, and the order of the data and the learning rate are functions of the
place in the run, so a resumed run is the run that was not interrupted.

This file knows nothing of losses (`losses`), of where hidden states come from (`features`) or of what else may be in
the folder of a run (`runs`).
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.heads.checkpoint import METHODS, save_heads
from treedec.heads.medusa import MedusaConfig
from treedec.models import Fingerprint
from treedec.training.features import Features, capture_features, draft_vocabulary, split_conversations
from treedec.training.losses import DraftHead, agreement, medusa_loss
from treedec.training.runs import (
    FEATURES_FOLDER,
    HEADS_FOLDER,
    METRICS_FILE,
    STATE_FILE,
    HeldInterrupt,
    prepare,
    read_state,
)

_TRAINED = ("medusa",)  # of the methods that can draft
_TOP = 5
# What may change when a run is resumed: it decides when something is written, not what is trained.
_MAY_CHANGE = ("checkpoint_every", "log_every")


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped with Ctrl-C; the message says what was kept and how to go on."""


class TrainingDiverged(RuntimeError):
    """The loss or its gradient is no longer finite; the last checkpoint is from before that."""


@dataclass(frozen=True)
class TrainConfig:
    """How heads are trained.

    Attributes:
        method: which heads; only Medusa's are trained so far.
        heads, blocks: as in `MedusaConfig`.
        draft_vocab_size: tokens that can be drafted; a target with fewer has all of them drafted.
        epochs: passes over the training split.
        batch_positions: hidden states per step, about: responses are not cut.
        learning_rate: at the end of the warm-up; a cosine takes it from there to zero.
        warmup: fraction of the steps over which the learning rate rises.
        weight_decay: decoupled, on matrices only.
        clip: the largest norm of a gradient.
        head_weights: weight of each head in the loss; None for 1 each. Medusa decays them as 0.8^k, which matters where
            heads share trained parameters; here they share none and Adam does not see the scale of a loss.
        holdout: fraction of the conversations, the last ones, kept for evaluation.
        seed: of the data order.
        checkpoint_every, log_every: steps between checkpoints, and between entries of the history.
    """

    method: str = "medusa"
    heads: int = 4
    blocks: int = 1
    draft_vocab_size: int = 8192
    epochs: int = 4
    batch_positions: int = 4096
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    head_weights: tuple[float, ...] | None = None
    holdout: float = 0.03
    seed: int = 0
    checkpoint_every: int = 50
    log_every: int = 10

    def __post_init__(self) -> None:
        if self.method not in _TRAINED:
            raise ValueError(f"method must be one of {', '.join(_TRAINED)}, not {self.method!r}")
        for name in (
            "heads",
            "blocks",
            "draft_vocab_size",
            "epochs",
            "batch_positions",
            "checkpoint_every",
            "log_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a fraction in [0, 1), not {self.warmup}")
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout must be a fraction in (0, 1), not {self.holdout}")
        weights = self.head_weights
        if weights is not None and (len(weights) != self.heads or min(weights) < 0 or max(weights) == 0):
            raise ValueError(
                f"head_weights must be {self.heads} numbers, none negative and not all zero, not {weights}"
            )

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON and `torch.load(weights_only=True)` give them back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: TrainConfig,
    *,
    resume: bool = True,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, object]:
    """Train heads for a target on conversations, and write them to `out/heads`.

    Args:
        model: the target; it is not changed.
        tokenizer: names further tokens that end a text, which can then always be drafted; may be None.
        data: JSONL as `read_samples` reads it.
        out: folder of the run: `features/`, `state.pt` (checkpoint), `metrics.json`, `heads/` (the best, float16).
        config: see `TrainConfig`.
        resume: go on where an interrupted run in `out` stopped; only `checkpoint_every` and `log_every` may be others.
        overwrite: start again where a run in `out` exists; features that fit are kept. The old run goes when the new
            one can begin, its heads when there are new ones.
        console: where progress is shown; None for standard error.

    Returns:
        What was measured on the held-out conversations with the heads that were written: `top1` and `top5` (lists over
        heads: agreement with the target's greedy token over its full vocabulary), `kl` (list, nats), `mean_top1`,
        `mean_kl`, `coverage`, `positions` and the like.

    Raises:
        FileExistsError: `out` holds something that is not to be continued.
        ValueError: nothing to learn from, or `out` was begun with another config, other data, another target or a
            tokenizer that ends texts otherwise.
        TrainingInterrupted: Ctrl-C; a checkpoint was written.
        TrainingDiverged: a loss that is not finite.
    """
    out = Path(out)
    console = console or Console(stderr=True)
    prepare(out, resume, overwrite)
    fixed = {name: value for name, value in config.to_dict().items() if name not in _MAY_CHANGE}
    saved = None if overwrite else read_state(out / STATE_FILE, fixed)
    try:
        features = capture_features(model, data, out / FEATURES_FOLDER, overwrite=overwrite, console=console)
    except KeyboardInterrupt as error:
        raise TrainingInterrupted(
            f"interrupted while capturing features; what there is stays in {out / FEATURES_FOLDER}: run the same "
            "again to go on"
        ) from error
    run = Run(model, tokenizer, features, config, out / STATE_FILE)
    if saved is not None:
        run.restore(saved)
    if overwrite:
        for name in (STATE_FILE, METRICS_FILE):
            (out / name).unlink(missing_ok=True)
    try:
        run.loop(console)
    except KeyboardInterrupt as error:
        run.checkpoint()
        raise TrainingInterrupted(
            f"interrupted after step {run.step} of {run.steps}; the checkpoint is {run.path}: run the same again"
            f"{' without overwrite' if overwrite else ''} to go on"
        ) from error
    return _finish(run, Fingerprint.of(model), out)


class Run:
    """One training run: its state, and the steps that advance it.

    Attributes:
        split, coverage: of the data; `coverage` is the share of held-out response tokens that can be drafted.
        heads: float32 whatever the target's dtype (float64 for a float64 target).
        step, epoch, batch: the place in the run; `batch` counts within the epoch.
        steps: of the whole run.
        history, evaluations: what was measured, in the order of the steps.
        best: state of the heads with the highest mean top-1 agreement so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        features: Features,
        config: TrainConfig,
        path: Path,
    ):
        self.config, self.features, self.path = config, features, path
        self.split = split_conversations(features, config.heads, config.holdout)
        vocab, hidden = model.get_output_embeddings().weight.shape
        drafted = min(config.draft_vocab_size, vocab)
        shape = MedusaConfig(hidden, vocab, config.heads, config.blocks, drafted)
        draft_ids = draft_vocabulary(self._tokens(self.split.train), vocab, drafted, _eos_ids(model, tokenizer))
        self.coverage = float(torch.isin(self._tokens(self.split.heldout), draft_ids).double().mean())
        self.device = model.get_output_embeddings().weight.device
        master = torch.promote_types(model.dtype, torch.float32)
        self.heads = METHODS[config.method].heads(shape, draft_ids).to(self.device, master)
        self.draft_head = DraftHead.of(model, self.heads.draft_ids)
        self.loss_weights = torch.tensor(config.head_weights or [1.0] * config.heads, device=self.device)
        decayed, plain = [self.heads.weight], [self.heads.bias]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate)
        self.model = model
        self.step = self.epoch = self.batch = 0
        self.steps = sum(len(self._order(epoch)) for epoch in range(config.epochs))
        self.history: list[dict[str, object]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.window = self._empty_window()
        self.best: dict[str, Tensor] = {}
        self._greedy: list[Tensor] = []
        self._signal = HeldInterrupt()

    def loop(self, console: Console) -> None:
        """Train to the end of the last epoch, from wherever the run stands."""
        with self._signal, _progress(console, self) as progress:
            task = progress.add_task("", total=self.steps, completed=self.step, measured="")
            while self.epoch < self.config.epochs:
                batches = self._order(self.epoch)
                while self.batch < len(batches):
                    with self._signal.held():
                        measured = self.advance(batches[self.batch])
                        if self.step % self.config.checkpoint_every == 0:
                            self.checkpoint()
                    progress.update(task, completed=self.step, measured=measured)
                evaluation = self.evaluate()
                with self._signal.held():
                    self._close_epoch(evaluation)
                    self.checkpoint()

    def advance(self, runs: Tensor) -> str:
        """One step on some runs of positions (`[n]` indices into `Features.runs`); says how it went."""
        began = time.monotonic()
        hidden, starts = self._batch(runs)
        losses = medusa_loss(self._states(hidden), hidden, starts, self.draft_head)
        loss = losses.total(self.loss_weights)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.heads.parameters(), self.config.clip)
        if not math.isfinite(loss.item() + norm.item()):
            raise TrainingDiverged(
                f"step {self.step + 1}: the loss is {loss.item()} and the norm of its gradient {norm.item()}; start "
                f"again with a learning_rate below {self.config.learning_rate}; {self.path}, if there, is from before"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.config)
        self.optimizer.step()
        self.step, self.batch = self.step + 1, self.batch + 1
        self._record(losses.kl.detach(), losses.hits, losses.counts)
        accuracy = " ".join(f"{share:.2f}" for share in (losses.hits / losses.counts.clamp(min=1)).tolist())
        return (
            f"loss {loss.item():.3f}  accuracy {accuracy}  {len(hidden) / (time.monotonic() - began):.0f} positions/s"
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Agreement and divergence on the held-out conversations."""
        heads, top = self.config.heads, min(_TOP, len(self.heads.draft_ids))
        ranks = torch.zeros(heads, top, dtype=torch.long, device=self.device)
        counts, kl = ranks.new_zeros(heads), torch.zeros(heads, dtype=torch.float64, device=self.device)
        for number, runs in enumerate(self._pack(self.split.heldout)):
            hidden, starts = self._batch(runs)
            if number == len(self._greedy):  # the target does not change: its choices are computed once
                self._greedy.append(_greedy_tokens(self.model, hidden))
            states = self._states(hidden)
            losses = medusa_loss(states, hidden, starts, self.draft_head)
            found, seen = agreement(states, starts, self._greedy[number], self.heads.draft_ids, self.draft_head, top)
            ranks, counts, kl = ranks + found, counts + seen, kl + losses.kl * losses.counts
        cumulative = (ranks.cumsum(1) / counts.clamp(min=1)[:, None]).tolist()
        per_head = (kl / counts.clamp(min=1)).tolist()
        return {
            "step": self.step,
            "top1": [row[0] for row in cumulative],
            f"top{_TOP}": [row[-1] for row in cumulative],
            "kl": per_head,
            "mean_top1": sum(row[0] for row in cumulative) / heads,
            "mean_kl": float(kl.sum() / counts.sum().clamp(min=1)),
            "counts": counts.tolist(),
        }

    def checkpoint(self) -> None:
        """Replace the checkpoint file by the present state."""
        state = {
            "config": self.config.to_dict(),
            "identity": self.features.identity,
            "heads": self.heads.state_dict(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "place": {"step": self.step, "epoch": self.epoch, "batch": self.batch},
            "window": self.window,
            "history": self.history,
            "evaluations": self.evaluations,
        }
        scratch = self.path.with_suffix(".tmp")
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.path)

    def restore(self, state: dict[str, Any]) -> None:
        """Take up the state of a checkpoint of this config.

        Raises:
            ValueError: it was trained on other data, for another target or to draft other tokens.
        """
        for field, value in self.features.identity.items():
            if _plain(state["identity"].get(field)) != _plain(value):
                raise ValueError(
                    f"{self.path} was trained on something else: its {field} differs from that of the features; give "
                    "the same data and target, or overwrite=True"
                )
        if not torch.equal(state["heads"]["draft_ids"], self.heads.draft_ids.cpu()):
            raise ValueError(
                f"{self.path} has heads that draft other tokens (its draft_ids) than data and tokenizer call for now; "
                "give the tokenizer it was begun with, or overwrite=True"
            )
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.batch = (state["place"][name] for name in ("step", "epoch", "batch"))
        self.best, self.window = state["best"], state["window"]
        self.history, self.evaluations = state["history"], state["evaluations"]

    def _states(self, hidden: Tensor) -> Tensor:
        """`[K, T, H]`: for a bfloat16 target the heads' matrix products run in bfloat16, else in the heads' dtype."""
        # Not in float16: the gradient of a mean over thousands of rows lies below its smallest numbers, and would be
        # zero without loss scaling.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=hidden.dtype == torch.bfloat16):
            return self.heads(hidden)

    def _batch(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        hidden, starts = self.features.batch(runs)
        return hidden.to(self.device), starts.to(self.device)

    def _tokens(self, runs: Tensor) -> Tensor:
        """`[T]` int64 response tokens of some runs."""
        return torch.cat(
            [self.features.following[first : first + count] for _, first, count in self.features.runs[runs].tolist()]
        ).long()

    def _order(self, epoch: int) -> list[Tensor]:
        """The batches of an epoch: a function of seed and epoch alone."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        return self._pack(self.split.train[torch.randperm(len(self.split.train), generator=generator)])

    def _pack(self, runs: Tensor) -> list[Tensor]:
        """Consecutive runs in batches of about `batch_positions`, all alike: no step should rest on a remainder."""
        sizes = self.features.runs[runs, 2]
        total = int(sizes.sum())
        number = -(-total // self.config.batch_positions)
        batch = (sizes.cumsum(0) - sizes) * number // total
        return list(runs.split(batch.unique_consecutive(return_counts=True)[1].tolist()))

    def _empty_window(self) -> dict[str, Tensor]:
        zeros = torch.zeros(self.config.heads, dtype=torch.float64)
        return {"kl": zeros.clone(), "hits": zeros.clone(), "counts": zeros.clone()}

    def _record(self, kl: Tensor, hits: Tensor, counts: Tensor) -> None:
        """Add a step to the window, and close the window as an entry of the history when it is full."""
        for name, value in (("kl", kl * counts), ("hits", hits), ("counts", counts)):
            self.window[name] += value.double().cpu()
        if self.step % self.config.log_every == 0 or self.step == self.steps:
            seen = self.window["counts"].clamp(min=1)
            means = (self.window["kl"] / seen).tolist()
            weighted = sum(weight * mean for weight, mean in zip(self.loss_weights.tolist(), means, strict=True))
            rate = self.optimizer.param_groups[0]["lr"]
            self.history.append(
                {
                    "step": self.step,
                    "loss": weighted,
                    "kl": means,
                    "accuracy": (self.window["hits"] / seen).tolist(),
                    "learning_rate": rate,
                }
            )
            self.window = self._empty_window()

    def _close_epoch(self, measured: dict[str, Any]) -> None:
        if all(measured["mean_top1"] > earlier["mean_top1"] for earlier in self.evaluations):
            self.best = {name: value.detach().clone() for name, value in self.heads.state_dict().items()}
        self.evaluations.append(measured)
        self.epoch, self.batch = self.epoch + 1, 0


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine that reaches zero after the last of `steps` steps."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def _finish(run: Run, target: Fingerprint, out: Path) -> dict[str, object]:
    """Write the best heads and everything that was measured."""
    measured = max(run.evaluations, key=lambda evaluation: evaluation["mean_top1"])
    final = {
        **measured,
        "steps": run.steps,
        "coverage": run.coverage,
        "positions": int(run.features.runs[run.split.train, 2].sum()),
        "heldout_positions": int(run.features.runs[run.split.heldout, 2].sum()),
        "skipped_conversations": run.split.skipped,
    }
    best = METHODS[run.config.method].heads(run.heads.config, run.heads.draft_ids.cpu())
    best.load_state_dict(run.best)
    about = {"config": run.config.to_dict(), "data_sha256": run.features.identity["data_sha256"], "metrics": final}
    save_heads(out / HEADS_FOLDER, best, target, about, overwrite=True)
    metrics = {"final": final, "config": run.config.to_dict(), "evaluations": run.evaluations, "history": run.history}
    scratch = out / f"{METRICS_FILE}.tmp"
    scratch.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    scratch.replace(out / METRICS_FILE)
    return final


@torch.no_grad()
def _greedy_tokens(model: PreTrainedModel, hidden: Tensor, block: int = 256) -> Tensor:
    """`[T]` int64: the target's first choice after each of `[T, H]` states, over its full vocabulary."""
    head = model.get_output_embeddings()
    return torch.cat([head(part).argmax(-1) for part in hidden.split(block)])


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token that ends a text, wherever it is declared."""
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    vocab = model.get_output_embeddings().weight.shape[0]
    return tuple(sorted(id_ for id_ in found if id_ < vocab))


def _plain(value: object) -> object:
    """A value as JSON has it: tuples become lists."""
    return json.loads(json.dumps(value))


def _progress(console: Console, run: Run) -> Progress:
    return Progress(
        TextColumn(f"training {run.config.heads} heads"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[measured]}"),
        TimeRemainingColumn(),
        console=console,
    )
