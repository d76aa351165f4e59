"""Target: a Hugging Face causal LM as the decode loop sees it.

Nothing is stored on the user's model or patched into it. A pass hands the model explicit positions, a ready-made
attention mask and a `SlotCache`; the one hook it needs (the exact input of the LM head) lives for the length of the
pass.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from treedec.cache import SlotCache
from treedec.tree import TokenTree

# Masks that reach the attention function untouched, and in which form it wants them. Flash and flex attention build
# their own masks and have no way to take a tree.
_BOOLEAN_MASK, _ADDITIVE_MASK = "bool", "additive"
_MASK_OF_ATTENTION = {"sdpa": _BOOLEAN_MASK, "eager": _ADDITIVE_MASK}

# Layer kinds whose state is keys and values only, and what their mask adds to plain causality.
_WINDOWED = "sliding_attention"
_KNOWN_LAYERS = frozenset({"full_attention", _WINDOWED})

# What shows in a configuration that attention depends on more than the mask and the position of each key.
_UNFIT_CONFIGURATIONS = {
    "alibi": "biases attention by the distance between slots (ALiBi), which on a tree is not that between tokens",
    "attention_layers": "masks attention by slot instead of position (GPT-Neo)",
}


def logit_factor(config: PretrainedConfig) -> float:
    """What the LM head's output is multiplied by: mostly 1; `logit_scale` (cohere), `1 / logits_scaling` (granite)."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def finish_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """From the LM head's output to the model's logits: scaled and soft-capped (gemma 2), as its config says."""
    # Multiplied and divided one after the other, as the models do: a product with 1 / s rounds differently.
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


class UnsupportedModel(ValueError):
    """The model, as configured, cannot be decoded with token trees; the message says why and what to do."""


@dataclass(frozen=True)
class Verified:
    """What one pass over a tree yields.

    Attributes:
        logits: `[B, N, V]` in the model's dtype: the target's raw next-token scores after each node.
        hidden: `[B, N, H]`: the exact input of the LM head at each node (what Medusa heads read).
    """

    logits: Tensor
    hidden: Tensor


class Target:
    """Prefill and tree verification for an unmodified causal LM.

    Args:
        model: any decoder-only `PreTrainedModel` with an LM head whose layers are full or sliding attention.
        compile: verify trees with a `torch.compile`d copy of the forward pass (minutes of compilation at first). Keep
            the `Target` and hand it to `generate` in place of the model, or every call compiles anew. On the CPU the
            copy also packs the weights for oneDNN, which takes their memory once more and reads them as they are now.

    Raises:
        UnsupportedModel: encoder-decoder or recurrent model, or an attention backend that cannot take a tree mask; with
            `compile`, a head path that cannot be told from the configuration.
    """

    def __init__(self, model: PreTrainedModel, compile: bool = False):
        self.model = model
        self.config = model.config.get_text_config()
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModel(
                f"{type(model).__name__} is an encoder-decoder model; treedec decodes decoder-only models"
            )
        if not isinstance(model.get_output_embeddings(), nn.Module):
            raise UnsupportedModel(f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
        attention = self.config._attn_implementation
        if attention not in _MASK_OF_ATTENTION:
            raise UnsupportedModel(
                f"attention backend {attention!r} cannot take a tree mask; load the model with attn_implementation="
                + " or ".join(repr(name) for name in _MASK_OF_ATTENTION)
            )
        self._layer_kinds: list[str] | None = getattr(self.config, "layer_types", None)
        unknown = set(self._layer_kinds or ()) - _KNOWN_LAYERS
        if unknown or getattr(self.config, "attention_chunk_size", None):
            kinds = sorted(unknown) or ["chunked_attention"]
            raise UnsupportedModel(
                f"{type(model).__name__} has layers of kind {kinds}; slots hold only full and sliding attention"
            )
        for attribute, reason in _UNFIT_CONFIGURATIONS.items():
            if getattr(self.config, attribute, None):
                raise UnsupportedModel(f"{type(model).__name__} {reason}")
        if len({parameter.device for parameter in model.parameters()}) > 1:
            raise UnsupportedModel(f"{type(model).__name__} is spread over several devices; load it on one")
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        if self._cache_argument not in parameters or "position_ids" not in parameters:
            raise UnsupportedModel(
                f"{type(model).__name__}.forward takes no cache or no position_ids, which a tree needs"
            )
        self._keeps_logits = "logits_to_keep" in parameters
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        if compile:
            self._check_head()
            self._compiled = torch.compile(self._decode, dynamic=True)
            # Makes constants of the weights, and packs them. It is asked for while tracing, which the `options` of
            # torch.compile do not reach; without it the matrix products stay as they were (19 ms a pass became 23).
            inductor = importlib.import_module("torch._inductor.config")
            self._freezing = inductor.patch(freezing=self.device.type == "cpu")

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head: the width of the logits, including rows that pad the tokenizer's vocabulary."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the LM head's input."""
        return self.model.get_output_embeddings().weight.shape[1]

    @property
    def max_positions(self) -> int | None:
        """Number of positions the model knows, or None where the configuration names none."""
        return getattr(self.config, "max_position_embeddings", None)

    def head(self, hidden: Tensor) -> Tensor:
        """`[…, H]` LM-head inputs to `[…, V]` logits, scaled and soft-capped as in the model's own forward."""
        return finish_logits(self.model.get_output_embeddings()(hidden), self.config)

    def allocate(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache of `capacity` slots for each of `batch` rows."""
        return SlotCache(self.config.num_hidden_layers, batch, capacity, self.device)

    def prefill(
        self, cache: SlotCache, input_ids: Tensor, attention_mask: Tensor | None = None, chunk: int = 512
    ) -> Verified:
        """Cache more text of each row, `chunk` columns at a time, so that the memory peak does not grow with it.

        Args:
            cache: holds the text so far, usually none.
            input_ids: `[B, L]` int64, L at least 1: what follows it.
            attention_mask: `[B, L]`, 0 for (left) padding; None means no padding.
            chunk: columns per pass; bounds activations at `[B, chunk, ·]`.

        Returns:
            Logits `[B, 1, V]` and LM-head input `[B, 1, H]` after the last column.
        """
        length = input_ids.shape[1]
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        before = torch.tensor(cache.lengths, device=real.device)[:, None]
        positions = (real.long().cumsum(1) - 1).clamp(min=0) + torch.where(real.any(1, keepdim=True), before, 0)
        for start in range(0, length, chunk):
            part = slice(start, min(start + chunk, length))
            width = part.stop - part.start
            here = real[:, part]
            causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
            # A padded column sees only itself: a row of the mask with nothing visible would make the softmax NaN.
            sees = (causal & here[:, None, :]) | torch.eye(width, dtype=torch.bool, device=self.device)
            verified = self._pass(cache, input_ids[:, part], positions[:, part], sees, keep=1)
            cache.commit(here.cpu())
        # A model whose forward takes no logits_to_keep returns them all.
        return Verified(verified.logits[:, -1:], verified.hidden[:, -1:])

    def verify(self, cache: SlotCache, tree: TokenTree) -> Verified:
        """Score every node of a tree in one pass; nothing is committed.

        Args:
            cache: holds every committed token of each row except the last, which is the root of its tree.
            tree: `B` rows of N nodes.
        """
        # Padding is placed at its row's root, and at 0 in rows that have none: a full row has no position to spare.
        roots = (torch.tensor(cache.lengths) * (tree.counts > 0))[:, None]
        if self._compiled is None:
            positions = (roots + tree.depths).to(self.device, non_blocking=True)
            return self._pass(cache, tree.tokens.to(self.device), positions, tree.ancestors.to(self.device), keep=0)
        # A dimension of size 1 would be compiled as a special case of its own.
        tree = tree.padded(2)
        positions = (roots + tree.depths).to(self.device, non_blocking=True)
        cache.reserve(positions)
        mask = self._mask(cache, positions, tree.ancestors.to(self.device))
        with torch.no_grad(), self._freezing:
            logits, hidden = self._compiled(tree.tokens.to(self.device), positions, mask, cache)
        return Verified(logits, hidden)

    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`[B, L, H]` LM-head inputs of whole sequences, without a cache or `[B, L, V]` logits (for training)."""
        with self._head_input(last_only=True) as captured, torch.no_grad():
            self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return captured[0]

    def _pass(self, cache: SlotCache, tokens: Tensor, positions: Tensor, sees: Tensor, keep: int) -> Verified:
        """One forward pass over `[B, N]` nodes; `sees` is `[B, N, N]`; `keep=1` keeps the last node's logits only."""
        cache.reserve(positions)
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self._mask(cache, positions, sees),
            self._cache_argument: cache,
            "use_cache": True,
        }
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        with self._head_input() as captured, torch.no_grad():
            logits = self.model(**arguments).logits
        return Verified(logits, captured[0])

    def _decode(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor], cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """The pass without hooks, which a compiler could not see through: decoder, then head."""
        arguments = {"position_ids": positions, "attention_mask": mask, self._cache_argument: cache, "use_cache": True}
        hidden = self.model.base_model(input_ids=tokens, **arguments).last_hidden_state
        return self.head(hidden), hidden

    def _check_head(self) -> None:
        """Compare `_decode` with the model's own forward: an unknown head path is refused, not guessed."""
        tree = TokenTree.chains([[0, 1, 2]])
        own = self.verify(self.allocate(1, 3), tree)
        cache = self.allocate(1, 3)
        positions = tree.depths.to(self.device)
        cache.reserve(positions)
        mask = self._mask(cache, positions, tree.ancestors.to(self.device))
        with torch.no_grad():
            logits, hidden = self._decode(tree.tokens.to(self.device), positions, mask, cache)
        if not torch.equal(hidden, own.hidden) or not torch.equal(logits, own.logits):
            raise UnsupportedModel(
                f"{type(self.model).__name__} has a head path that treedec does not know: use compile=False"
            )

    def _mask(self, cache: SlotCache, positions: Tensor, sees: Tensor) -> Tensor | dict[str, Tensor]:
        """The attention mask of a pass: committed slots, plus the node's ancestors among the slots of this pass.

        Returns `[B, 1, N, high_water]` (or one per kind of layer), boolean or additive as the backend wants it.
        """
        batch, nodes = positions.shape
        high = cache.high_water
        allowed = cache.visible[:, None, :high].repeat(1, nodes, 1)
        allowed.scatter_(2, cache.slots[:, None, :].expand(batch, nodes, nodes), sees)

        def finish(mask: Tensor) -> Tensor:
            mask = mask[:, None]
            if _MASK_OF_ATTENTION[self.config._attn_implementation] == _BOOLEAN_MASK:
                return mask
            # Eager attention adds the mask to the scores: a boolean mask would be added as 0 and 1, silently wrong.
            lowest = torch.finfo(self.model.dtype).min
            return torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device).masked_fill_(~mask, lowest)

        def windowed() -> Tensor:
            distance = positions[:, :, None] - cache.positions[:, None, :high]
            return allowed & (distance < self.config.sliding_window)

        if self._layer_kinds is not None:
            return {kind: finish(windowed() if kind == _WINDOWED else allowed) for kind in set(self._layer_kinds)}
        return finish(windowed() if getattr(self.config, "sliding_window", None) is not None else allowed)

    @contextmanager
    def _head_input(self, last_only: bool = False) -> Iterator[list[Tensor]]:
        """Capture the LM head's input; with `last_only` the head itself then sees only the last position."""
        captured: list[Tensor] = []

        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            captured.append(arguments[0])
            return (arguments[0][:, -1:], *arguments[1:]) if last_only else None

        handle = self.model.get_output_embeddings().register_forward_pre_hook(hook)
        try:
            yield captured
        finally:
            handle.remove()
