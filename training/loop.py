"""The loop that trains: steps, evaluations, checkpoints.

It owns what may be lost when a machine dies: weights, optimiser, place in the data. All of it goes into one file that
is replaced as a whole. The order of the data, the learning rate and every random number are functions of the place in
the run, so a resumed run is the run that was not interrupted, and a run on several processes is that on one.

This file knows nothing of losses (`losses`, `learners`), of where hidden states come from (`features`) or of how heads
are measured (`evaluation`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from treedec.target import Target
from treedec.training import processes
from treedec.training.config import TrainConfig
from treedec.training.contracts import FeatureSource, Learner
from treedec.training.evaluation import Evaluator, better
from treedec.training.packs import supervised_counts
from treedec.training.runs import (
    CONFIG_FILE,
    HEADS_FOLDER,
    METRICS_FILE,
    STATE_FILE,
    HeldInterrupt,
    TrainingDiverged,
    write_file,
    writing,
)
from treedec.training.vocabulary import coverage, response_tokens


class Run:
    """One training run: its state, and the steps that advance it.

    Attributes:
        step, steps: done so far, and of the whole run.
        history, evaluations: what was measured, in the order of the steps.
    """

    def __init__(
        self,
        target: Target,
        source: FeatureSource,
        learner: Learner,
        config: TrainConfig,
        accelerator: Accelerator,
        out: Path,
        identity: Mapping[str, Any],
    ):
        self.source, self.learner, self.config, self.accelerator = source, learner, config, accelerator
        self.out, self.identity, self.device = out, identity, target.device
        self.autocast = config.autocast_dtype(target.model.dtype)
        self.evaluator = Evaluator(target, source, config.eval_nodes, accelerator, self.autocast)
        self.counts = supervised_counts(source.corpus, source.packs, learner.depths, learner.offset)
        self.weights = np.array(config.depth_weights or [1.0] * learner.depths)
        self.optimizer = _optimizer(learner, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.autocast == torch.float16)
        self.module = accelerator.prepare_model(learner, device_placement=False)
        self.per_epoch = -(-source.packs.train // config.packs_per_step)
        steps = config.epochs * self.per_epoch
        self.steps = steps if config.max_steps is None else min(steps, config.max_steps)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.window = torch.zeros(3 * learner.depths + 1, dtype=torch.float64)
        self._signal = HeldInterrupt()
        self._stop = False

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Take up a checkpoint, or write the first one: from then on the folder holds a run that can be resumed."""
        if saved is not None:
            self._restore(saved)
        elif self.accelerator.is_main_process:
            (self.out / METRICS_FILE).unlink(missing_ok=True)
            self.checkpoint()
        if self.accelerator.is_main_process:
            write_file(self.out / CONFIG_FILE, lambda file: file.write(self.config.to_yaml().encode()))
        if self.accelerator.log_with:
            self.accelerator.init_trackers("")

    def loop(self, console: Console) -> None:
        """Train to the last step, from wherever the run stands."""
        # Of several processes none may stop alone: they agree on it in each step (`_reduced`).
        together = self._signal.held() if self.accelerator.num_processes > 1 else nullcontext()
        with self._signal, together, _progress(console, self) as progress:
            task = progress.add_task("", total=self.steps, completed=self.step, measured="")
            while True:
                if self._evaluation_is_due():
                    measured = {"step": self.step, **self.evaluator.measure(self.learner)}
                    with self._signal.held():
                        self._evaluated(measured)
                        self.checkpoint()
                    progress.console.print(
                        f"step {self.step}: mean accepted length {measured['accepted_length']:.2f}, "
                        f"loss {measured['mean_loss']:.3f} on held-out text",
                        highlight=False,
                    )
                if self.step == self.steps:
                    return
                with self._signal.held():
                    went = self.advance()
                    if self.step % self.config.checkpoint_every == 0:
                        self.checkpoint()
                progress.update(task, completed=self.step, measured=went)
                if self._stop:
                    raise KeyboardInterrupt

    def advance(self) -> str:
        """One step; says how it went."""
        began = time.monotonic()
        packs = self._packs_of_step()
        total = np.maximum(self.counts[packs].sum(0), 1)
        self.module.train()
        self.learner.at(self.step / self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        measured = torch.zeros_like(self.window)
        mine = processes.shares(len(packs), self.accelerator)
        for number, (place, valid) in enumerate(mine):
            with nullcontext() if number == len(mine) - 1 else self.accelerator.no_sync(self.module):
                measured += self._backward(packs[place], place, total, float(valid))
        measured = self._reduced(measured)
        self._update(float(measured[0]))
        self.step += 1
        self._record(measured)
        _, hits, counts = measured[1:].chunk(3)
        accuracy = " ".join(f"{share:.2f}" for share in (hits / counts.clamp(min=1)).tolist())
        speed = float(counts[0]) / (time.monotonic() - began)
        return f"loss {float(measured[0]):.3f}  accuracy {accuracy}  {speed:.0f} positions/s"

    def checkpoint(self) -> None:
        """Replace the checkpoint file by the present state; the main process does.

        Raises:
            OSError: it cannot be written; the one before is untouched.
        """
        if not self.accelerator.is_main_process:
            return
        state = {
            "config": self.config.to_dict(),
            "identity": self.identity,
            "draft_ids": self.learner.draft_ids.cpu(),
            "weights": {name: one.detach() for name, one in trained(self.learner).items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "window": self.window,
            "history": self.history,
            "evaluations": self.evaluations,
        }
        write_file(self.out / STATE_FILE, lambda file: torch.save(state, file))

    def final(self) -> dict[str, Any]:
        """What was measured of the heads that are written, and what the run rests on."""
        packs, corpus = self.source.packs, self.source.corpus
        heldout = response_tokens(corpus, packs, packs.heldout)
        return {
            **self._best(),
            "steps": self.steps,
            "coverage": coverage(heldout, self.learner.draft_ids),
            "positions": int(self.counts[: packs.train, 0].sum()),
            "heldout_positions": int(self.counts[packs.train :, 0].sum()),
            "parameters": sum(one.numel() for one in trained(self.learner).values()),
            "idle_conversations": packs.idle,
            "skipped_samples": corpus.skipped,
        }

    def _packs_of_step(self) -> np.ndarray:
        """`[n]` int64: the packs of the next step, from an order that seed and epoch alone decide."""
        epoch, place = divmod(self.step, self.per_epoch)
        order = np.random.default_rng([self.config.seed, epoch]).permutation(self.source.packs.train)
        return order[place * self.config.packs_per_step :][: self.config.packs_per_step]

    def _backward(self, index: int, place: int, total: np.ndarray, weight: float) -> Tensor:
        """Add the gradient of one pack of the step.

        Args:
            index, place: the pack, and its place in the step.
            total: `[D]` positions that the whole step supervises.
            weight: of the pack, 1 or 0.

        Each depth is averaged over all that the step supervises, also where a hard label cannot be drafted and so
        counts for nothing: then every position weighs the same in all steps, whatever share of theirs has a label.

        Returns:
            `[3 D + 1]` float64 on the CPU, as not all devices have it: its part of the loss of the step; its sums,
            hits and counts.
        """
        batch = self.source.batch(index)
        with processes.seeded(self.device, self.config.seed, self.step, place):
            with torch.autocast(self.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                losses = self.module(batch)
            loss = (losses.sums * losses.sums.new_tensor(weight * self.weights / total)).sum()
            if losses.extra is not None:
                loss = loss + losses.extra * (weight / int(total[0]))
            # Of several processes, DDP takes the mean of the gradients where the sum is wanted.
            self.scaler.scale(loss * self.accelerator.num_processes).backward()
        parts = [loss.detach()[None], *(weight * one.detach() for one in (losses.sums, losses.hits, losses.counts))]
        return torch.cat([part.cpu().double() for part in parts])

    def _reduced(self, measured: Tensor) -> Tensor:
        """The sum over all processes; and here they agree on whether one of them was told to stop."""
        if self.accelerator.num_processes > 1:
            pending = measured.new_tensor([float(self._signal.pending)])
            reduced: Tensor = self.accelerator.reduce(torch.cat([measured, pending]).to(self.device)).cpu()
            measured, self._stop = reduced[:-1], bool(reduced[-1] > 0)
        return measured

    def _update(self, loss: float) -> None:
        """A step of the optimiser along the gradients.

        Raises:
            TrainingDiverged: the loss or the gradients are not finite.
        """
        self.scaler.unscale_(self.optimizer)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip)
        # With loss scaling, gradients overflow now and then: that step is left out and the scale lowered.
        overflowed = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or overflowed):
            raise TrainingDiverged(
                f"step {self.step + 1}: the loss is {loss} and the norm of its gradient {float(norm)}; start "
                f"again with a learning_rate below {self.config.learning_rate}; {self.out / STATE_FILE} is from before"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step, self.steps)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _record(self, measured: Tensor) -> None:
        """Add a step to the window, and close the window as an entry of the history when it is full."""
        self.window += measured
        if self.step % self.config.log_every and self.step != self.steps:
            return
        since = self.history[-1]["step"] if self.history else 0
        sums, hits, counts = self.window[1:].chunk(3)
        seen = counts.clamp(min=1)
        entry = {
            "step": self.step,
            "loss": float(self.window[0]) / (self.step - since),
            "losses": (sums / seen).tolist(),
            "accuracy": (hits / seen).tolist(),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        self.history.append(entry)
        self.window.zero_()
        self._log("train", entry)

    def _evaluation_is_due(self) -> bool:
        if self.step == 0 or (self.evaluations and self.evaluations[-1]["step"] == self.step):
            return False
        return self.step == self.steps or self.step % (self.config.eval_every or self.per_epoch) == 0

    def _evaluated(self, measured: dict[str, Any]) -> None:
        """Note what was measured; if nothing was better before, these heads are written."""
        self.evaluations.append(measured)
        self._log("heldout", measured)
        if not self.accelerator.is_main_process:
            return
        if self._best() is measured:
            about = {
                "config": self.config.to_dict(),
                "data_sha256": self.source.corpus.digest,
                "metrics": self.final(),
            }
            with writing(self.out / HEADS_FOLDER):
                self.learner.save(self.out / HEADS_FOLDER, about, overwrite=True)
        metrics = {
            "final": self.final(),
            "config": self.config.to_dict(),
            "evaluations": self.evaluations,
            "history": self.history,
        }
        text = json.dumps(metrics, indent=2) + "\n"
        write_file(self.out / METRICS_FILE, lambda file: file.write(text.encode()))

    def _best(self) -> dict[str, Any]:
        """The evaluation of the heads that are written: of equally good ones, the first."""
        best = self.evaluations[0]
        for measured in self.evaluations[1:]:
            best = measured if better(measured, best) else best
        return best

    def _restore(self, state: dict[str, Any]) -> None:
        """Take up the state of a checkpoint of this config, data and target."""
        weights = state["weights"]
        with torch.no_grad():
            for name, parameter in trained(self.learner).items():
                parameter.copy_(weights[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.window = state["step"], state["window"]
        self.history, self.evaluations = state["history"], state["evaluations"]
        if self.evaluations and not (self.out / HEADS_FOLDER).is_dir():
            raise FileNotFoundError(
                f"{self.out / HEADS_FOLDER} is gone, which held the best heads of this run so far; put it back, or "
                "start again with overwrite=True (--overwrite)"
            )

    def _log(self, kind: str, values: Mapping[str, Any]) -> None:
        """To tensorboard, if that is on: numbers as they are, lists one curve for each depth."""
        flat: dict[str, float] = {}
        for name, value in values.items():
            for depth, one in enumerate(value if isinstance(value, list) else [value]):
                if one is not None:
                    flat[f"{kind}/{name}" + (f"/{depth}" if isinstance(value, list) else "")] = one
        self.accelerator.log(flat, step=self.step)


def _optimizer(learner: Learner, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW on all that is trained; only matrices decay."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in trained(learner).items():
        # Heads that are computed together keep their biases as one tensor, with more than one dimension.
        (plain if parameter.dim() < 2 or name.endswith("bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0)  # set in each step


def trained(learner: Learner) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: one for name, one in learner.named_parameters() if one.requires_grad}


def _progress(console: Console, run: Run) -> Progress:
    return Progress(
        TextColumn(f"training {run.config.method}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[measured]}"),
        TimeRemainingColumn(),
        console=console,
    )
