"""What the learners of all draft heads have in common: they share the target's LM head and imitate it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from treedec.heads.checkpoint import METHODS, save_heads
from treedec.heads.formats import detect, read
from treedec.heads.sequential import embedding_table
from treedec.models import Fingerprint
from treedec.training.contracts import Batch, Learner, Losses
from treedec.training.losses import DraftHead, distillation, text_ranks

#: What drafts are fitted to: the target's whole distribution, or the tokens of the text.
LABELS = ("soft", "hard")


class _Frozen:
    """What a learner reads of the target. It is no module, so that nothing trains, moves, counts or stores it.

    Attributes:
        fingerprint: of the target.
        head: its LM head over the draft vocabulary.
        places: `[V]` int64, the place of each token in the draft vocabulary, −1 if it has none.
        embeddings: `[V, H]` its table, None for learners that do not read tokens.
    """

    def __init__(self, model: PreTrainedModel, draft_ids: Tensor, embeddings: bool):
        weight = model.get_output_embeddings().weight
        self.fingerprint = Fingerprint.of(model)
        self.head = DraftHead.of(model, draft_ids)
        self.places = torch.full((weight.shape[0],), -1, device=weight.device)
        self.places[draft_ids.to(weight.device)] = torch.arange(len(draft_ids), device=weight.device)
        self.embeddings = embedding_table(model, weight.shape[1]) if embeddings else None


class HeadLearner(Learner):
    """Trains heads of one of `treedec.heads.checkpoint.METHODS`.

    Args:
        heads: the trainable module, with a `config` and the buffer `draft_ids`.
        model: the target.
        depths: see `Learner`.
        labels: one of `LABELS`.
        embeddings: the heads read the embeddings of tokens.

    Raises:
        ValueError: unknown labels, or embeddings that are not as wide as the hidden states.
    """

    def __init__(self, heads: Any, model: PreTrainedModel, depths: int, labels: str, embeddings: bool):
        super().__init__()
        if labels not in LABELS:
            raise ValueError(f"labels must be one of {', '.join(LABELS)}, not {labels!r}")
        weight = model.get_output_embeddings().weight
        self.heads = heads.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        self.draft_ids = self.heads.draft_ids
        self.depths, self.labels = depths, labels
        self._frozen = _Frozen(model, self.draft_ids, embeddings)

    @torch.no_grad()
    def go_on_from(self, folder: Path, model: PreTrainedModel) -> None:
        """Take over the weights of heads that were trained before, for this target or a relative of it.

        The tokens that are drafted stay those of this learner: weights know of them through the LM head alone.

        Raises:
            FileNotFoundError: there are no heads in the folder.
            ValueError: they cannot be read, or are of another method or shape; says which.
        """
        if detect(folder) is None:
            raise FileNotFoundError(f"initial_heads: there are no heads in {folder}; `treedec train` writes OUT/heads")
        stored = read(folder, model)
        if not isinstance(self.heads, METHODS[stored.method].heads):
            raise ValueError(f"initial_heads: {folder} holds {stored.method} heads, not those of {self.method}")
        mine, theirs = ({**vars(one), "draft_vocab_size": None} for one in (self.heads.config, stored.config))
        if differing := [f"{name} {theirs[name]}, not {mine[name]}" for name in mine if mine[name] != theirs[name]]:
            raise ValueError(
                f"initial_heads: those in {folder} have {'; '.join(differing)}; give the options that they were "
                "trained with"
            )
        self.heads.load_state_dict({**stored.tensors, "draft_ids": self.draft_ids})

    @abstractmethod
    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        """What the LM head is to read at every depth, given the text's own tokens.

        Args:
            batch: the pack.
            rows: `[T]` int64, the positions wanted of the flattened batch, ascending.

        Returns:
            `[D, T, H]`.
        """

    def forward(self, batch: Batch) -> Losses:
        rows = self.rows(batch)
        return self.losses(batch, rows, self.unroll(batch, rows))

    def losses(self, batch: Batch, rows: Tensor, states: Tensor) -> Losses:
        """Those of `[D, T, H]` states that the LM head is to read at the positions `rows`."""
        text = self.text(batch) if self.labels == "hard" else None
        return distillation(states, rows, batch, self._frozen.head, offset=self.offset, text=text)

    @torch.no_grad()
    def ranks(self, batch: Batch, top: int) -> Tensor:
        rows = self.rows(batch)
        return text_ranks(
            self.unroll(batch, rows), rows, batch, self._frozen.head, self.text(batch), top, offset=self.offset
        )

    def save(self, folder: str | os.PathLike[str], training: Mapping[str, object], overwrite: bool = False) -> None:
        save_heads(folder, self.heads, self._frozen.fingerprint, training, overwrite=overwrite)

    def rows(self, batch: Batch) -> Tensor:
        """`[T]` int64 positions of the flattened batch at which anything is supervised."""
        return batch.supervised(self.offset).flatten().nonzero()[:, 0]

    def text(self, batch: Batch) -> Tensor:
        """`[B L]` int64, the place in the draft vocabulary of the token after each position."""
        return self._frozen.places[ahead(batch.input_ids, 1)].flatten()

    def embed(self, tokens: Tensor) -> Tensor:
        """`[*]` int64 ids to `[*, H]`, for learners that were made to read embeddings."""
        assert self._frozen.embeddings is not None
        return F.embedding(tokens, self._frozen.embeddings)


def ahead(tokens: Tensor, steps: int) -> Tensor:
    """`[B, L]` ids to those `steps` places later; 0 where there are none."""
    steps = min(steps, tokens.shape[1])
    return F.pad(tokens[:, steps:], (0, steps))


def hidden_and_vocab(model: PreTrainedModel) -> tuple[int, int]:
    """H and V, the width of the LM head and its rows."""
    vocab, hidden = model.get_output_embeddings().weight.shape
    return hidden, vocab


def initialise(module: nn.Module, std: float) -> None:
    """Draw the matrices of all linear layers from a normal distribution, as language models do."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
