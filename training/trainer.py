"""Trains draft heads for a frozen target, from conversations to a folder that can be used.

This file brings the parts together and decides what may be continued; the steps are taken in `loop`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.models import Fingerprint
from treedec.target import Target
from treedec.training import processes
from treedec.training.config import TrainConfig
from treedec.training.contracts import Corpus, FeatureSource, Learner, Packs
from treedec.training.loop import Run
from treedec.training.packs import pack
from treedec.training.runs import (
    FEATURES_FOLDER,
    LOGS_FOLDER,
    STATE_FILE,
    TrainingInterrupted,
    prepare,
    read_state,
)
from treedec.training.vocabulary import draft_vocabulary, eos_ids, response_tokens


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    corpus: Corpus,
    out: str | os.PathLike[str],
    config: TrainConfig,
    *,
    resume: bool = True,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train heads for a target on conversations, and write the best of them to `out/heads`.

    Several processes (`torchrun`, `accelerate launch`) call this alike, each with the target on a device of its own;
    `out` must be a folder that all of them see.

    Args:
        model: the target, in evaluation mode; it is not changed, unless `config.shard_target` asks for that.
        tokenizer: names further tokens that end a text, which can then always be drafted; may be None.
        corpus: the conversations, of which the last ones are held out.
        out: folder of the run: `config.yaml`, `features/`, `state.pt` (the last state), `metrics.json`, `logs/`, and
            `heads/`: after each evaluation, the heads that have accepted most so far.
        config: see `TrainConfig`.
        resume: go on where an interrupted run in `out` stopped; only what decides when something is written may have
            changed, and whether features are stored.
        overwrite: start again where a run in `out` exists; features that fit are kept. The old run goes when the new
            one can begin, its heads when there are new ones.
        console: where progress is shown; None for standard error.

    Returns:
        What was measured with the heads that were written (`Evaluator.measure`), and of the run: `step` (at which they
        were measured), `steps`, `coverage` (share of the held-out response tokens that can be drafted), `positions` and
        `heldout_positions` (supervised at depth 0), `parameters` (trained), `idle_conversations`, `skipped_samples`.

    Raises:
        FileExistsError: `out` holds something that is not to be continued.
        ValueError: nothing to learn from; a target in training mode; or `out` was begun with another config, other
            data, another target or a tokenizer that ends texts otherwise.
        OSError: a file cannot be written; the last checkpoint is untouched.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was written.
        TrainingDiverged: a loss that is not finite.
    """
    out = Path(out)
    if model.training:
        raise ValueError("the target is in training mode, where dropout would blur its states; call model.eval() first")
    prepare(out, resume, overwrite)
    saved = None if overwrite else read_state(out / STATE_FILE, config.fixed())
    logs = config.tensorboard and find_spec("tensorboard") is not None
    accelerator = processes.join(model, config.shard_target, str(out / LOGS_FOLDER) if logs else None)
    console = (console or Console(stderr=True)) if accelerator.is_main_process else Console(quiet=True)
    if config.packs_per_step % accelerator.num_processes:
        raise ValueError(
            f"packs_per_step {config.packs_per_step} is not a multiple of the {accelerator.num_processes} processes "
            "that share them"
        )
    accelerator.wait_for_everyone()  # all have looked at the folder before any writes to it
    packs = pack(corpus, config.pack_tokens, config.holdout, config.seed)
    identity = _identity(model, corpus)
    if config.shard_target:
        processes.shard(model, accelerator)
    learner = build_learner(model, tokenizer, corpus, packs, config, begin=saved is None)
    if saved is not None:
        _check_identity(saved, identity, learner, out)
    try:
        source = _features(Target(model), corpus, packs, learner.layers, out, config, accelerator, overwrite, console)
    except KeyboardInterrupt as error:
        raise TrainingInterrupted(
            f"interrupted while capturing features; what there is stays in "
            f"{config.features_folder or out / FEATURES_FOLDER}: run the same "
            "again to go on"
        ) from error
    run = Run(Target(model), source, learner, config, accelerator, out, identity)
    run.begin(saved)
    try:
        run.loop(console)
    except KeyboardInterrupt as error:
        run.checkpoint()
        raise TrainingInterrupted(
            f"interrupted after step {run.step} of {run.steps}; the checkpoint is {out / STATE_FILE}: run the same "
            f"again{' without overwrite' if overwrite else ''} to go on"
        ) from error
    finally:
        for tracker in accelerator.trackers:  # `end_training` would also end the process group, which is the caller's
            tracker.finish()
    return run.final()


def build_learner(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    corpus: Corpus,
    packs: Packs,
    config: TrainConfig,
    begin: bool = True,
) -> Learner:
    """What is trained, on the target's device, with its initial weights: those that the seed or `initial_heads` give.

    Args:
        model, tokenizer, corpus, packs, config: as in `train`.
        begin: whether the run begins; one that is resumed no longer needs its initial heads.

    Raises:
        FileNotFoundError: there are no initial heads in their folder.
        ValueError: the draft vocabulary cannot hold what ends a text; other weights than depths; what the method
            refuses, or a precision in which it cannot be trained; or initial heads of another method or size.
        ImportError: the method needs a library that is not there.
    """
    from treedec.training.learners import LEARNERS
    from treedec.training.learners.base import HeadLearner

    config.autocast_dtype(model.dtype)
    vocab = model.get_output_embeddings().weight.shape[0]
    written = response_tokens(corpus, packs, range(packs.train))
    draft_ids = draft_vocabulary(written, vocab, min(config.draft_vocab_size, vocab), eos_ids(model, tokenizer))
    with processes.seeded(model.device, config.seed):
        learner: Learner = LEARNERS[config.method].build(
            model, config.method_options(), draft_ids, labels=config.labels
        )
    if config.depth_weights is not None and len(config.depth_weights) != learner.depths:
        raise ValueError(
            f"depth_weights has {len(config.depth_weights)} weights, but with these options {config.method} has "
            f"{learner.depths} depths; give one for each"
        )
    if begin and config.initial_heads is not None:
        if not isinstance(learner, HeadLearner):
            raise ValueError(f"initial_heads is for heads, not for {config.method}; there is its option 'model'")
        learner.go_on_from(Path(config.initial_heads), model)
    return learner.to(model.device)


def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: TrainConfig) -> None:
    """Raise what `build_learner` does, whatever the data: before any is written for hours."""
    nothing = Corpus(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64), np.zeros((0, 3), dtype=np.int64))
    build_learner(model, tokenizer, nothing, Packs((), 0, 0), config)


def _features(
    target: Target,
    corpus: Corpus,
    packs: Packs,
    layers: tuple[int, ...],
    out: Path,
    config: TrainConfig,
    accelerator: Accelerator,
    overwrite: bool,
    console: Console,
) -> FeatureSource:
    """Where hidden states come from; if they are stored, the main process computes them while the others wait."""
    from treedec.training.features import OnlineFeatures, StoredFeatures

    if config.features == "online":
        return OnlineFeatures(target, corpus, packs, layers)
    with accelerator.main_process_first():
        return StoredFeatures.capture(
            target,
            corpus,
            packs,
            layers,
            Path(config.features_folder or out / FEATURES_FOLDER),
            max_bytes=config.max_feature_bytes,
            overwrite=overwrite and accelerator.is_main_process,
            console=console,
        )


def _identity(model: PreTrainedModel, corpus: Corpus) -> dict[str, Any]:
    """What a run is about, besides its config."""
    from treedec.training.features import weights_digest

    return {
        "corpus": corpus.digest,
        "dtype": str(model.dtype),
        "target": Fingerprint.of(model).to_dict(),
        "weights": weights_digest(model),  # a fine-tune may have the same LM head
    }


def _check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any], learner: Learner, out: Path) -> None:
    """Refuse to go on with other data, another target or heads that draft other tokens."""
    for field, value in identity.items():
        if _plain(saved["identity"].get(field)) != _plain(value):
            raise ValueError(
                f"{out / STATE_FILE} was trained on something else: its {field} differs from what was given; give the "
                "same data and target, or overwrite=True (--overwrite)"
            )
    if not torch.equal(saved["draft_ids"], learner.draft_ids.cpu()):
        raise ValueError(
            f"{out / STATE_FILE} has heads that draft other tokens (its draft_ids) than data and tokenizer call for "
            "now; give the tokenizer it was begun with, or overwrite=True (--overwrite)"
        )


def _plain(value: object) -> object:
    """A value as JSON has it: tuples become lists."""
    return json.loads(json.dumps(value))
