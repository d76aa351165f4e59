"""The learner of a draft model: a small causal LM that imitates the target's whole distribution (as Zhou et al. 2024,
arXiv:2310.08461, do for speculative decoding).

By default it starts as the target without most of its layers. Those that stay are spread evenly, the first and the last
among them: students start best so for their size (Shleifer and Rush 2020, arXiv:2010.13002), down to the two decoder
layers, first and last, of a draft model (Gandhi et al. 2023, arXiv:2311.00430); and of what lies between, neighbours
are the most alike (Gromov et al. 2024, arXiv:2403.17887).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from treedec.heads import load_draft_model
from treedec.heads.checkpoint import replacing
from treedec.models import Fingerprint, on_device
from treedec.target import Target, finish_logits
from treedec.training.contracts import Batch, Learner, Losses
from treedec.training.learners.base import LABELS, ahead, hidden_and_vocab
from treedec.training.losses import DraftHead, distillation, draft_logits, text_ranks

#: Says in the folder of a draft model that it was trained here, what for, and how.
TRAINING_FILE = "treedec_training.json"
_OURS = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", TRAINING_FILE)
_BLOCK = 256  # rows of logits alive at a time


@dataclass(frozen=True)
class DraftModelOptions:
    """Attributes:
    layers: how many of the target's layers are kept, all if it has no more; see the module for which.
    layers_kept: the layers that are kept, ascending; None for those that `layers` leads to.
    model: folder of a small causal LM with the target's tokenizer and as many rows in its LM head, to go on from
        instead of a copy of the target.
    train_embeddings: embeddings and LM head are trained too, which takes more time and memory: most of a small model.
    """

    layers: int = 4
    layers_kept: tuple[int, ...] | None = None
    model: str | None = None
    train_embeddings: bool = False


class DraftModelLearner(Learner):
    """Trains a causal LM to say what the target says after every token of the assistant's.

    It drafts the whole vocabulary, whatever draft vocabulary others would have.

    Args:
        student: the draft model, in the dtype of the masters.
        model: the target.
        labels: one of `LABELS`.
        train_embeddings: see `DraftModelOptions`.
        own_head: the student's LM head is or will be another than the target's.

    Raises:
        ValueError: unknown labels, or LM heads of different sizes.
        UnsupportedModel: a student that cannot draft, see `Target`.
    """

    method = "draft-model"
    depths, offset = 1, 0

    def __init__(
        self, student: PreTrainedModel, model: PreTrainedModel, labels: str, train_embeddings: bool, own_head: bool
    ):
        super().__init__()
        if labels not in LABELS:
            raise ValueError(f"labels must be one of {', '.join(LABELS)}, not {labels!r}")
        (_, ours), (_, theirs) = hidden_and_vocab(student), hidden_and_vocab(model)
        if ours != theirs:
            raise ValueError(
                f"the draft model's LM head has {ours} rows and the target's {theirs}: to imitate its distribution it "
                "must have as many; give a model that shares the target's tokenizer"
            )
        self.student, self.labels = student, labels
        if not train_embeddings:
            for part in (student.get_input_embeddings(), student.get_output_embeddings()):
                part.requires_grad_(False)
        self.draft_ids = torch.arange(theirs, device=model.get_output_embeddings().weight.device)
        self._fingerprint, self._dtype = Fingerprint.of(model), model.dtype
        self._head, self._own_head = DraftHead.of(model, self.draft_ids), own_head
        self._reader = Target(student)

    @classmethod
    def build(
        cls, model: PreTrainedModel, options: DraftModelOptions, draft_ids: Tensor, *, labels: str = "soft"
    ) -> DraftModelLearner:
        """See `DraftModelOptions`; `draft_ids` is for the heads of other methods.

        Raises:
            ValueError: options that contradict each other, a target that cannot be pruned (see `prune`), or a `model`
                that cannot be loaded or has another vocabulary.
            FileNotFoundError: there is no model in the folder `model`.
        """
        weight = model.get_output_embeddings().weight
        master = torch.promote_types(weight.dtype, torch.float32)
        if options.model is None:
            layers = model.config.get_text_config().num_hidden_layers
            kept = spread(layers, options.layers) if options.layers_kept is None else tuple(options.layers_kept)
            student = prune(model, kept, master)
        elif options.layers_kept is not None:
            raise ValueError(
                "give either layers_kept, the target's layers to start from, or model, what else to start from"
            )
        else:
            student = load_draft_model(Path(options.model), master)
        own_head = options.model is not None or options.train_embeddings
        return cls(on_device(student, weight.device).train(), model, labels, options.train_embeddings, own_head)

    def forward(self, batch: Batch) -> Losses:
        rows, states = self._read(batch)
        text = ahead(batch.input_ids, 1).flatten() if self.labels == "hard" else None
        if not self._own_head:
            return distillation(states[None], rows, batch, self._head, offset=self.offset, text=text)
        hidden, sums, hits = batch.hidden.flatten(0, 1), [], []
        for mine, place in zip(states.split(_BLOCK), rows.split(_BLOCK), strict=True):
            labels = None if text is None else text[place]
            # Logits are computed again for the gradient: those of all rows would be by far the largest thing here.
            loss, hit = checkpoint(self._imitate, mine, hidden[place], labels, use_reentrant=False)
            sums.append(loss)
            hits.append(hit)
        return Losses(torch.stack(sums).sum(0)[None], torch.stack(hits).sum(0)[None], rows.new_full((1,), len(rows)))

    @torch.no_grad()
    def ranks(self, batch: Batch, top: int) -> Tensor:
        rows, states = self._read(batch)
        head = DraftHead.of(self.student, self.draft_ids) if self._own_head else self._head
        text = ahead(batch.input_ids, 1).flatten()
        return text_ranks(states[None], rows, batch, head, text, top, offset=self.offset)

    def save(self, folder: str | os.PathLike[str], training: Mapping[str, object], overwrite: bool = False) -> None:
        """Write the draft model in the target's dtype, as `from_pretrained` reads it; it brings no tokenizer.

        Whatever else lies in a folder that is replaced stays in it.

        Raises:
            FileExistsError: `folder` exists and `overwrite` is False, or is no draft model that was trained here.
            ValueError: a weight is not finite in the target's dtype.
        """
        folder = Path(folder)
        if folder.exists() and not overwrite:
            raise FileExistsError(f"{folder} already exists; give another folder, or overwrite=True to replace it")
        ours = (folder / TRAINING_FILE).is_file()
        if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} has no {TRAINING_FILE}: it is no draft model of treedec's training, so it is not replaced; "
                "give another folder"
            )
        stored: Any = copy.deepcopy(self.student)
        stored = stored.to(device="cpu", dtype=self._dtype)
        for key, value in stored.state_dict().items():
            if not bool(value.isfinite().all()):
                raise ValueError(
                    f"{key!r} holds values that are not finite in {self._dtype}, so the draft model is not saved; load "
                    "the target in a wider dtype or train again"
                )
        described = {
            "method": self.method,
            "target": self._fingerprint.to_dict(),
            "training": dict(training),
        }
        with replacing(folder, _OURS) as fresh, _no_bars():
            stored.save_pretrained(fresh)
            (fresh / TRAINING_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    def _read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`[T]` the supervised positions of the flattened batch, and `[T, h]` what the student's LM head is to read."""
        rows = batch.supervised(self.offset).flatten().nonzero()[:, 0]
        return rows, self._reader.states(batch.input_ids).flatten(0, 1)[rows]

    def _imitate(self, states: Tensor, hidden: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss of one block with the student's own LM head.

        Args:
            states: `[n, h]` what it reads.
            hidden: `[n, H]` what the target's reads.
            labels: `[n]` the tokens of the text, or None to imitate the target.

        Returns:
            The sum of the losses, and how often the best drafts agree.
        """
        head = self.student.get_output_embeddings()
        with torch.autocast(states.device.type, enabled=False):  # as in `distillation`
            taught = draft_logits(hidden, self._head)
            z = finish_logits(head(states.to(head.weight.dtype)), self._reader.config)
            q = z.log_softmax(-1)
            if labels is None:
                loss = F.kl_div(q, taught.log_softmax(-1), reduction="sum", log_target=True)
            else:
                loss = F.nll_loss(q, labels, reduction="sum")
            hits = z.gather(1, taught.argmax(-1, keepdim=True))[:, 0] >= z.amax(-1)
        return loss, hits.sum()


def spread(layers: int, kept: int) -> tuple[int, ...]:
    """Which of `layers` layers stay if there are to be `kept`: evenly spread from the first to the last.

    Raises:
        ValueError: `kept` is below 1.
    """
    if kept < 1:
        raise ValueError(f"a draft model needs at least 1 layer, not {kept}")
    kept = min(kept, layers)
    return tuple(round(place * (layers - 1) / max(kept - 1, 1)) for place in range(kept))


def prune(model: PreTrainedModel, kept: tuple[int, ...], dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model with some of its layers only, on the CPU; the model is not changed.

    The copy is what its configuration alone leads to, so that it is the same when it is loaded from disk.

    Args:
        model: any causal LM whose decoder layers are one `nn.ModuleList`.
        kept: the layers that stay, ascending.
        dtype: of the copy.

    Raises:
        ValueError: no such layers, or a model whose layers cannot be told or cannot stand at other places.
    """
    name, config = type(model).__name__, copy.deepcopy(model.config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < layers:
        raise ValueError(f"layers_kept must be some of 0 to {layers - 1}, ascending, not {kept}")
    prefix = _layer_list(model, layers) + "."
    _keep(text, kept)
    try:
        student = type(model)._from_config(config, dtype=dtype)
        student.load_state_dict(
            {ours: value for key, value in model.state_dict().items() if (ours := _renamed(key, prefix, kept))}
        )
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{name} cannot be cut down to the layers {kept}: with that many, its configuration leads to another model "
            f"({error}); choose other layers_kept, or give model, a small causal LM with the same tokenizer"
        ) from error
    for new, old in enumerate(kept):
        before, after = model.get_submodule(prefix + str(old)), student.get_submodule(prefix + str(new))
        for (path, one), (_, other) in zip(before.named_modules(), after.named_modules(), strict=True):
            if (attribute := _difference(one, other, old, new)) is not None:
                raise ValueError(
                    f"layer {old} of {name} cannot become layer {new}: there its {path or 'layer'} has another "
                    f"{attribute}; choose other layers_kept, or give model, a small causal LM with the same tokenizer"
                )
    student.generation_config = _generation_config(model, student)
    return student


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars into that of the training."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _layer_list(model: PreTrainedModel, layers: int) -> str:
    """The name of the one list of decoder layers."""
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == layers]
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if len(outer) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(outer)} lists of {layers} modules, so that its decoder layers cannot be "
            "told: only a model with one can be cut down; give model, a small causal LM with the same tokenizer"
        )
    return outer[0]


def _keep(config: PretrainedConfig, kept: tuple[int, ...]) -> None:
    """Make a configuration speak of some of its layers only: their number, and every list of one value per layer."""
    layers = config.num_hidden_layers
    per_layer = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    config.num_hidden_layers = len(kept)
    for name, value in per_layer.items():
        if len(value) == layers:
            setattr(config, name, type(value)(value[layer] for layer in kept))


def _renamed(key: str, prefix: str, kept: tuple[int, ...]) -> str | None:
    """What a tensor of the target is called in the copy; None if it is not in it."""
    if not key.startswith(prefix):
        return key
    layer, _, rest = key.removeprefix(prefix).partition(".")
    return f"{prefix}{kept.index(int(layer))}.{rest}" if int(layer) in kept else None


def _difference(one: nn.Module, other: nn.Module, old: int, new: int) -> str | None:
    """An attribute by which two modules with the same tensors compute differently: a window, say, or no rotation.

    The place of the layer itself, of which each knows its own, is none.
    """
    for name, value in vars(one).items():
        plain = isinstance(value, bool | int | float | str) and name != "training"
        now = getattr(other, name, None)
        if plain and value != now and (value, now) != (old, new):
            return name
    return None


def _generation_config(model: PreTrainedModel, student: PreTrainedModel) -> object:
    """A copy of the model's; the student's own if that is one that transformers refuses to write."""
    found = copy.deepcopy(model.generation_config)
    try:
        found.validate(strict=True)
    except ValueError:
        return student.generation_config
    return found
