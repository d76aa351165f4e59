"""Which tokens are worth drafting: heads score these only, which costs a fraction of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treedec.training.contracts import Corpus, Packs


def draft_vocabulary(tokens: Tensor | np.ndarray, vocab_size: int, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The tokens worth drafting: `always`, then the most frequent, ties and the rest by ascending id.

    Args:
        tokens: `[T]` integers, response tokens of the training split.
        vocab_size, size: of the target's vocabulary and of the draft vocabulary.
        always: ids that are always in it.

    Returns:
        `[size]` int64, ascending.

    Raises:
        ValueError: `always` does not fit.
    """
    if len(always) > size:
        raise ValueError(
            f"draft_vocab_size {size} has no room for the {len(always)} tokens that end a text; use a larger one"
        )
    counts = torch.bincount(torch.as_tensor(tokens).long(), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def coverage(tokens: Tensor | np.ndarray, draft_ids: Tensor) -> float:
    """The share of `[T]` tokens that can be drafted, 0 where there are none."""
    tokens = torch.as_tensor(tokens).long()
    return float(torch.isin(tokens, draft_ids.cpu()).double().mean()) if len(tokens) else 0.0


def response_tokens(corpus: Corpus, packs: Packs, numbers: Iterable[int]) -> np.ndarray:
    """`[T]` int32, all that the assistant wrote in the conversations of some packs."""
    return corpus.response_tokens(
        np.array([one for number in numbers for one in packs.members[number]], dtype=np.int64)
    )


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token that ends a text, wherever it is declared, ascending."""
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    vocab = model.get_output_embeddings().weight.shape[0]
    return tuple(sorted(id_ for id_ in found if id_ < vocab))
