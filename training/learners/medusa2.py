"""The learner of Medusa-2 (Cai et al. 2024, arXiv:2401.10774, section 2.2.2): heads, and a target that is adapted to
them by LoRA (Hu et al. 2021, arXiv:2106.09685).

First only the heads are trained, so that their large gradients do not spoil the target; then both together, on
`L_LM + λ0 L_heads` (equation 2). The teacher of both is the target as it was (self-distillation, section 2.3.2): the
adapted one is to say the same, but from hidden states that heads can read.

What comes out drafts for the adapted target, and decoding is lossless with respect to that one.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from treedec.heads.checkpoint import save_heads
from treedec.heads.medusa import MedusaConfig, MedusaHeads
from treedec.target import Target
from treedec.training.contracts import Batch, Losses
from treedec.training.learners.base import HeadLearner, hidden_and_vocab
from treedec.training.losses import DraftHead, distillation

#: Where the adapter lies in the folder of the heads.
ADAPTER_FOLDER = "adapter"
_NOTE = (
    f"these heads draft for the target with the LoRA adapter in {ADAPTER_FOLDER}/ merged into it (peft: "
    "PeftModel.from_pretrained(model, folder).merge_and_unload()); decoding is lossless with respect to that model, "
    "not to the one that was adapted"
)


@dataclass(frozen=True)
class Medusa2Options:
    """Attributes:
    heads, blocks: as in `MedusaConfig`.
    rank, alpha, dropout: of LoRA, whose products are scaled by `alpha / rank`. Adam takes steps of the same size for
        heads and adapter: a smaller alpha makes those of the adapter smaller.
    target_modules: names of the linear layers that are adapted, as peft matches them; None for all but the LM head.
    head_weight: λ0, the weight of the heads' losses against 1 for what the adapted target says.
    warmup: fraction of the run in which only the heads are trained.
    """

    heads: int = 4
    blocks: int = 1
    rank: int = 32
    alpha: int = 16
    dropout: float = 0.05
    target_modules: tuple[str, ...] | None = None
    head_weight: float = 0.2
    warmup: float = 0.3

    def __post_init__(self) -> None:
        for name in ("rank", "alpha", "head_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("dropout", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be a fraction in [0, 1), not {getattr(self, name)}")


class _Adapted:
    """The target with an adapter, beside the user's own. It is no module, as all that learners keep of targets.

    Both hold the same weights, in the same memory; what is added is the adapter.

    Attributes:
        model: what `peft` makes of it.
        target: what is read of it.
        head: its LM head, which is the target's.
        dropouts: its modules that behave differently in training. The target's own dropout stays off: its teacher,
            which it is to agree with, had none.
    """

    def __init__(self, model: PreTrainedModel, options: Medusa2Options):
        peft = _import_peft()
        twin = _twin(model)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=_linear_layers(twin) if options.target_modules is None else list(options.target_modules),
        )
        try:
            self.model: Any = peft.get_peft_model(twin, config)
        except ValueError as error:
            raise ValueError(
                f"peft cannot adapt {type(model).__name__} like that ({error}); choose other target_modules, or "
                "dropout=0 for a mixture of experts"
            ) from error
        for part in (twin.get_output_embeddings(), twin.get_input_embeddings()):
            if any(parameter.requires_grad for parameter in part.parameters()):
                raise ValueError(
                    "target_modules must not name the LM head or the embeddings: the heads share them with the target, "
                    "as they are"
                )
        self.target = Target(twin)
        self.head = DraftHead.of(model, torch.arange(hidden_and_vocab(model)[1]))
        self.dropouts = [part for name, part in twin.named_modules() if name.endswith("lora_dropout")]

    def write(self, folder: Path) -> None:
        """As peft reads it."""
        # Otherwise peft would ask the hub whether the vocabulary has been resized.
        self.model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)


class Medusa2Learner(HeadLearner):
    """Medusa-2: heads and adapter. The target itself is not changed.

    Gradients pass through the adapted target in its own dtype: in float16 the small ones vanish without loss scaling.
    In the first stage the adapter gets none, so that what averages them over processes must look for unused parameters.

    Raises:
        ImportError: peft is not installed.
        ValueError: layers that peft cannot adapt; `target_modules` that match none, the LM head or the embeddings.
    """

    method = "medusa2"

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, options: Medusa2Options, labels: str):
        super().__init__(heads, model, options.heads, labels, embeddings=False)
        self._options, self._joint = options, False
        self._adapted = _Adapted(model, options)
        trained = [parameter for parameter in self._adapted.model.parameters() if parameter.requires_grad]
        self.adapter = nn.ParameterList(trained)
        self.train()

    @classmethod
    def build(
        cls, model: PreTrainedModel, options: Medusa2Options, draft_ids: Tensor, *, labels: str = "soft"
    ) -> Medusa2Learner:
        hidden, vocab = hidden_and_vocab(model)
        heads = MedusaHeads(MedusaConfig(hidden, vocab, options.heads, options.blocks, len(draft_ids)), draft_ids)
        return cls(heads, model, options, labels)

    def at(self, progress: float) -> None:
        self._joint = progress >= self._options.warmup

    def train(self, mode: bool = True) -> Medusa2Learner:
        super().train(mode)
        for part in self._adapted.dropouts:
            part.train(mode)
        return self

    def forward(self, batch: Batch) -> Losses:
        rows, hidden = self.rows(batch), self._hidden(batch)
        losses = self.losses(batch, rows, self.heads(hidden.flatten(0, 1)[rows]))
        if hidden is batch.hidden:
            return losses
        # Every position of a run, also the last, which says how a response ends and has no token left to draft.
        rows = batch.supervised(0).flatten().nonzero()[:, 0]
        said = distillation(hidden.flatten(0, 1)[rows][None], rows, batch, self._adapted.head, offset=0)
        # The trainer weighs the heads by 1: so this stands for L_LM / λ0 + L_heads, whose scale Adam does not see.
        return replace(losses, extra=said.sums[0] / self._options.head_weight)

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        return self.heads(self._hidden(batch).flatten(0, 1)[rows])

    def save(self, folder: str | os.PathLike[str], training: Mapping[str, object], overwrite: bool = False) -> None:
        """Write the heads as those of Medusa, and the adapter in `folder/adapter` as peft reads it.

        Raises:
            FileExistsError, ValueError: as `save_heads`; also a ValueError for an adapter that is not finite.
        """
        if not all(bool(parameter.isfinite().all()) for parameter in self.adapter):
            raise ValueError("the adapter holds values that are not finite, so nothing is saved; train again")
        described = {**training, "adapted_target": _NOTE}
        parts = {ADAPTER_FOLDER: self._adapted.write}
        save_heads(folder, self.heads, self._frozen.fingerprint, described, overwrite=overwrite, parts=parts)

    def _hidden(self, batch: Batch) -> Tensor:
        """`[B, L, H]` the LM-head inputs that heads read: the adapted target's.

        While only heads are trained, the adapter still adds nothing, and those are the target's own.
        """
        if self.training and not self._joint:
            return batch.hidden
        return self._adapted.target.states(batch.input_ids)


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second tree of modules over the very same weights, none of which requires a gradient.

    What is then added to the one is not in the other; the parameters are objects of their own because peft sets whether
    they require a gradient.
    """
    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copy.deepcopy(model, shared)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """All linear layers but the LM head.

    peft's own "all-linear" also takes the experts of a mixture, which it cannot adapt with dropout, and its routers, of
    which some are linear layers that return more than their product.
    """
    return [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear | Conv1D)
        and part is not model.get_output_embeddings()
        and "router" not in type(part).__name__.lower()
    ]


def _import_peft() -> Any:
    """peft, which nothing else here needs.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(
            f"Medusa-2 adapts the target with peft: run `pip install treedec[train]` ({error})"
        ) from error
