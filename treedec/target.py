"""Target: a Hugging Face causal LM as the decode loop sees it.

Nothing is stored on the user's model or patched into it. A pass hands the model explicit positions, a ready-made
attention mask and a `SlotCache`; the one hook it needs (the exact input of the LM head) lives for the length of the
pass.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from treedec.cache import SlotCache
from treedec.compilation import Compiled
from treedec.costs import CostCurve, typical_costs
from treedec.limits import BACKENDS, SLIDING_ATTENTION, UnsupportedModel, check_configuration
from treedec.tree import TokenTree

_CHUNK = 512  # columns of a prompt in one pass


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


@dataclass(frozen=True)
class RopeSwitch:
    """Where the frequencies of a rotary embedding begin to depend on the largest position in the pass.

    All tokens of a pass are rotated with the frequencies of its largest position (`dynamic_rope_update` in
    transformers' `modeling_rope_utils`), and keys are cached as they were rotated. To equal token-by-token decoding, a
    pass must hold no position for which that would have been done with other frequencies.

    Attributes:
        position: the first position that changes the frequencies (0-based).
        every_position: every further position changes them again (dynamic NTK), instead of that one only (LongRoPE).
        restarts: `model.generate` drops its cache before the pass that reaches `position` and computes the whole text
            anew, with the frequencies that hold from there on (phi3).
    """

    position: int
    every_position: bool
    restarts: bool

    def levels_below(self, root: int) -> int | None:
        """How many levels of candidates fit below a root at that position; None if any number does."""
        if root < self.position:
            return self.position - 1 - root
        return 0 if self.every_position else None


@dataclass(frozen=True)
class Verified:
    """What one pass over a tree yields.

    Attributes:
        logits: `[B, N, V]` in the model's dtype: the target's raw next-token scores after each node.
        hidden: `[B, N, H]`: the exact input of the LM head at each node (what Medusa heads read).
        features: `[B, N, F]` if asked for, see `Drafter.features`; of all columns of a prefill.
    """

    logits: Tensor
    hidden: Tensor
    features: Tensor | None = None


def _features(head_input: Tensor, out: Any, layers: tuple[int, ...] | None) -> Tensor | None:
    """`[B, N, F]` of what a pass returned: the LM-head input, or the hidden states of some layers side by side."""
    if not layers:
        return None if layers is None else head_input
    found = [out.hidden_states[layer] for layer in layers]
    if any(states.dim() != 3 for states in found):
        raise UnsupportedModel(
            f"the drafter reads hidden states, which this model has several of per token ({list(found[0].shape)}): use "
            "a drafter that reads none, or the LM-head input only"
        )
    return torch.cat(found, dim=-1)


class Target:
    """Prefill and tree verification for an unmodified causal LM.

    Args:
        model: any decoder-only `PreTrainedModel` with an LM head whose layers are full or sliding attention.
        compile: verify trees with a `torch.compile`d copy of the forward pass, and draft with compiled steps of EAGLE
            heads (minutes of compilation at first). Keep the `Target` and hand it to `generate` in place of the model,
            or every call compiles anew. The copy is of the model as it is now: if weights, adapters or hooks change, it
            is refused at the next text (but a write through `.data` shows nowhere). On the CPU it also packs the
            weights for oneDNN, which takes their memory once more, and again if both single rows and batches are
            decoded (not those in 16 bits on a processor without instructions for them).

    Raises:
        UnsupportedModel: what `treedec.limits.check_configuration` refuses; with `compile`, a head path that cannot be
            told from the configuration.

    Attributes:
        model: the model.
        config: its text configuration.
        cache_argument: the name under which its forward takes a cache.
        keeps_logits: its forward takes `logits_to_keep`.
        costs: what a pass costs by its size, by which drafters leave out nodes that do not pay: `typical_costs`, until
            `target.costs = treedec.measure_costs(target)`.
    """

    def __init__(self, model: PreTrainedModel, compile: bool = False):
        check_configuration(model)
        self.costs: CostCurve = typical_costs(model.device, model.dtype, compile)
        self.model = model
        self.config = model.config.get_text_config()
        self._layer_kinds: list[str] | None = getattr(self.config, "layer_types", None)
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument.
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.keeps_logits = "logits_to_keep" in parameters
        self._compiled: Compiled | None = None
        self._compiled_parts: dict[nn.Module, Compiled] = {}
        if compile:
            self._check_head()
            head, rotary = model.get_output_embeddings(), self.rope_switch is not None
            self._compiled = Compiled(self._decode, model, self.device, changes_itself=rotary, hooked=head)

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
    def context_length(self) -> int | None:
        """Number of positions the model was made for, or None where the configuration names none."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def max_positions(self) -> int | None:
        """Number of positions the model can embed, or None where they are computed and there is no such number.

        Learned and tabulated positions end with their table. Rotary embeddings go on beyond the context length, and so
        does `model.generate`, with a warning.
        """
        return None if _rope_parameters(self.config) else self.context_length

    @property
    def window(self) -> int | None:
        """The sliding window of those layers that have one, in tokens; None if every layer sees the whole text."""
        has_one = self._layer_kinds is None or SLIDING_ATTENTION in self._layer_kinds
        return getattr(self.config, "sliding_window", None) if has_one else None

    @cached_property
    def rope_switch(self) -> RopeSwitch | None:
        """Where rotary frequencies begin to depend on the largest position in the pass; None if they never do."""
        switches = []
        for parameters in _rope_parameters(self.config):
            kind = parameters.get("rope_type", "default")
            if "dynamic" in kind:
                switches.append(RopeSwitch(self.config.max_position_embeddings, every_position=True, restarts=False))
            elif kind == "longrope":
                position = parameters["original_max_position_embeddings"]
                switches.append(RopeSwitch(position, every_position=False, restarts=self._restarts_at(position)))
        return min(switches, key=lambda switch: switch.position, default=None)

    def _restarts_at(self, position: int) -> bool:
        """Whether `generate` drops the cache before the pass that holds `position`: the model's own code knows."""
        cache = self.allocate(1, 1)
        cache.lengths = [position]
        ids = torch.zeros(1, position + 1, dtype=torch.long, device=self.device)
        model: Any = self.model  # causal LMs are `GenerationMixin`s, which `PreTrainedModel` does not say
        inputs = model.prepare_inputs_for_generation(
            ids, attention_mask=torch.ones_like(ids), next_sequence_length=1, **{self.cache_argument: cache}
        )
        return inputs.get(self.cache_argument) is None

    @property
    def least_rows(self) -> int:
        """How many rows of a batch are worth keeping when the others have finished: compiled, a single row is a case of
        its own."""
        return 1 if self._compiled is None else 2

    def head(self, hidden: Tensor) -> Tensor:
        """`[…, H]` LM-head inputs to `[…, V]` logits, scaled and soft-capped as in the model's own forward."""
        return finish_logits(self.model.get_output_embeddings()(hidden), self.config)

    def compiled(self, part: nn.Module) -> Callable[..., Any]:
        """The forward of a part of a drafter, compiled if the passes of this target are; else the part itself.

        What is compiled is kept as long as this target, and made anew if the part has changed since.
        """
        if self._compiled is None:
            return part
        known = self._compiled_parts.get(part)
        if known is None or known.changes():
            known = self._compiled_parts[part] = Compiled(part.forward, part, self.device)
        return known

    def allocate(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache of `capacity` slots for each of `batch` rows.

        Raises:
            RuntimeError: the passes over trees are compiled, and the model has changed since.
        """
        self._check_unchanged()
        return SlotCache(self.config.num_hidden_layers, batch, capacity, self.device)

    def prefill(
        self,
        cache: SlotCache,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        chunk: int | None = None,
        features: tuple[int, ...] | None = None,
    ) -> Verified:
        """Cache more text of each row, `chunk` columns at a time, so that the memory peak does not grow with it.

        Args:
            cache: holds the text so far, usually none.
            input_ids: `[B, L]` int64, L at least 1: what follows it.
            attention_mask: `[B, L]`, 0 for (left) padding; None means no padding.
            chunk: columns per pass; bounds activations at `[B, chunk, ·]`. None for 512, or for all where the text
                reaches beyond the `rope_switch`: undivided, as `generate` reads it.
            features: which hidden states to return of all columns, see `Drafter.features`.

        Returns:
            Logits `[B, 1, V]` and LM-head input `[B, 1, H]` after the last column, features `[B, L, F]` of all.
        """
        length = input_ids.shape[1]
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        before = torch.tensor(cache.lengths, device=real.device)[:, None]
        positions = (real.long().cumsum(1) - 1).clamp(min=0) + torch.where(real.any(1, keepdim=True), before, 0)
        if chunk is None:
            # There all of the prompt is rotated with the frequencies of its longest row's last position.
            switch = self.rope_switch
            chunk = length if switch is not None and int(positions.max()) >= switch.position else _CHUNK
        parts = []
        for start in range(0, length, chunk):
            part = slice(start, min(start + chunk, length))
            width = part.stop - part.start
            here = real[:, part]
            causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
            # A padded column sees only itself: a row of the mask with nothing visible would make the softmax NaN.
            sees = (causal & here[:, None, :]) | torch.eye(width, dtype=torch.bool, device=self.device)
            verified = self.score(cache, input_ids[:, part], positions[:, part], sees, keep=1, features=features)
            parts.append(verified.features)
            cache.commit(here.cpu())
        # A model whose forward takes no logits_to_keep returns them all.
        whole = None if features is None else torch.cat([part for part in parts if part is not None], dim=1)
        return Verified(verified.logits[:, -1:], verified.hidden[:, -1:], whole)

    def verify(self, cache: SlotCache, tree: TokenTree, features: tuple[int, ...] | None = None) -> Verified:
        """Score every node of a tree in one pass; nothing is committed.

        Args:
            cache: holds every committed token of each row except the last, which is the root of its tree.
            tree: `B` rows of N nodes.
            features: which hidden states to return, see `Drafter.features`.
        """
        # Padding is placed at its row's root, and at 0 in rows that have none: a full row has no position to spare.
        roots = (torch.tensor(cache.lengths, device="cpu") * (tree.counts > 0))[:, None]
        if self._compiled is None:
            positions = (roots + tree.depths).to(self.device, non_blocking=True)
            sees = tree.ancestors.to(self.device)
            return self.score(cache, tree.tokens.to(self.device), positions, sees, keep=0, features=features)
        # A dimension of size 1 would be compiled as a special case of its own.
        tree = tree.padded(2)
        positions = (roots + tree.depths).to(self.device, non_blocking=True)
        cache.reserve(positions)
        mask = self._mask(cache, positions, tree.ancestors.to(self.device))
        return Verified(*self._compiled(tree.tokens.to(self.device), positions, mask, cache, features))

    @overload
    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, layers: None = None) -> Tensor: ...
    @overload
    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]: ...
    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, layers: tuple[int, ...] | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """What training reads of whole sequences, without a cache or `[B, L, V]` logits.

        Args:
            input_ids: `[B, L]` int64.
            attention_mask: `[B, L]`, 0 for padding; None means no padding, or padding on the right, where causal
                attention never looks.
            layers: indices into transformers' `hidden_states`, as in `Drafter.features`.

        Returns:
            The LM-head inputs `[B, L, H]`. If `layers` were given, a pair of these and of the hidden states of those
            layers side by side, `[B, L, F]`, or None where `layers` is empty.

        Raises:
            UnsupportedModel: layers of a model that has several hidden states per token.
        """
        # The model keeps the states of all layers until the pass is over. Given a list it would keep those in it only,
        # but transformers 5.21 counts otherwise in such lists than 5.24, and neither counts layers that run repeatedly.
        asked: dict[str, Any] = {"output_hidden_states": True} if layers else {}
        with self._head_input(last_only=True) as captured, torch.no_grad():
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **asked)
        if layers is None:
            return captured[0]
        return captured[0], _features(captured[0], out, layers or None)

    def states(self, input_ids: Tensor) -> Tensor:
        """`[B, L, H]` LM-head inputs of whole sequences, padded on the right if at all.

        Unlike `features`, with gradients where these are enabled: for training the model itself.
        """
        with self._head_input(last_only=True) as captured:
            self.model(input_ids=input_ids, use_cache=False)
        return captured[0]

    def score(
        self,
        cache: SlotCache,
        tokens: Tensor,
        positions: Tensor,
        sees: Tensor,
        keep: int,
        features: tuple[int, ...] | None = None,
    ) -> Verified:
        """One forward pass over nodes, which prefill and verify are made of; nothing is committed.

        Args:
            cache: holds what all nodes see.
            tokens: `[B, N]` int64 ids.
            positions: `[B, N]` int64.
            sees: `[B, N, N]` or `[1, N, N]` bool: which nodes of this pass each node sees.
            keep: 1 for the logits of the last node only, where the model can; 0 for those of all.
            features: which hidden states to return of all nodes, see `Drafter.features`.
        """
        cache.reserve(positions)
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self._mask(cache, positions, sees),
            self.cache_argument: cache,
            "use_cache": True,
        }
        # For the features of all nodes, the head is reached with all of them, and kept from the others by its hook.
        last_only = keep == 1 and features is not None
        if self.keeps_logits and not last_only:
            arguments["logits_to_keep"] = keep
        if features:
            arguments["output_hidden_states"] = True
        with self._head_input(last_only) as captured, torch.no_grad():
            out = self.model(**arguments)
        return Verified(out.logits, captured[0], _features(captured[0], out, features))

    def _decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor],
        cache: SlotCache,
        features: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The pass without hooks, which a compiler could not see through: decoder, then head."""
        arguments = {"position_ids": positions, "attention_mask": mask, self.cache_argument: cache, "use_cache": True}
        if features:
            arguments["output_hidden_states"] = True
        out = self.model.base_model(input_ids=tokens, **arguments)
        hidden = out.last_hidden_state
        return self.head(hidden), hidden, _features(hidden, out, features)

    def _check_head(self) -> None:
        """Compare `_decode` with the model's own forward: an unknown head path is refused, not guessed."""
        tree = TokenTree.chains([[0, 1, 2]])
        own = self.verify(self.allocate(1, 3), tree)
        cache = self.allocate(1, 3)
        positions = tree.depths.to(self.device)
        cache.reserve(positions)
        mask = self._mask(cache, positions, tree.ancestors.to(self.device))
        with torch.no_grad():
            logits, hidden, _ = self._decode(tree.tokens.to(self.device), positions, mask, cache)
        if not torch.equal(hidden, own.hidden) or not torch.equal(logits, own.logits):
            raise UnsupportedModel(
                f"{type(self.model).__name__} has a head path that treedec does not know: use compile=False"
            )

    def _check_unchanged(self) -> None:
        """Raise `RuntimeError` if the compiled copy is of another state of the model than this."""
        if self._compiled is not None and (changed := self._compiled.changes()):
            raise RuntimeError(
                f"the model has changed since its passes were compiled ({changed[0]}"
                + (f" and {len(changed) - 1} more" if changed[1:] else "")
                + "): make a new Target(model, compile=True)"
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
            if BACKENDS[self.config._attn_implementation] == "boolean":
                return mask
            # Eager attention adds the mask to the scores: a boolean mask would be added as 0 and 1, silently wrong.
            lowest = torch.finfo(self.model.dtype).min
            return torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device).masked_fill_(~mask, lowest)

        windowed = allowed
        if self.window is not None:
            distance = positions[:, :, None] - cache.positions[:, None, :high]
            windowed = allowed & (distance < self.window)
        if self._layer_kinds is None:
            return finish(windowed)
        kinds = set(self._layer_kinds)
        return {kind: finish(windowed if kind == SLIDING_ATTENTION else allowed) for kind in kinds}

    @contextmanager
    def _head_input(self, last_only: bool = False) -> Iterator[list[Tensor]]:
        """Capture the LM head's input; with `last_only` the head itself then sees only the last position."""
        captured: list[Tensor] = []
        own = threading.get_ident()

        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if threading.get_ident() != own:
                return None  # a pass of another thread over the same model
            captured.append(arguments[0])
            return (arguments[0][:, -1:], *arguments[1:]) if last_only else None

        handle = self.model.get_output_embeddings().register_forward_pre_hook(hook)
        try:
            yield captured
        finally:
            handle.remove()


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The parameters of each rotary embedding of a model, one per kind of layer where these differ; [] without any."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in parameters.values() if isinstance(part, dict)]
    return parts or ([parameters] if parameters else [])
