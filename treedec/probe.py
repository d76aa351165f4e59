"""The probe: does this model score a token tree like its branches one by one?

Whether attention depends on nothing but the mask and the positions it is given cannot be told from a configuration, and
where it depends on more, trees would be decoded wrongly without any sign of it. So before the first tree a small one is
measured against the model's own decoding of its branches, token by token. Two more figures say what that measurement
is worth: how far the model is from itself when it reads whole branches at once, which is its rounding, and how far a
deliberately wrong mask moves its scores.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treedec.limits import UnsupportedModel
from treedec.target import Target
from treedec.tree import TokenTree

# Two trees of this shape, the second one below a leaf of the first: branches that split twice, all equally deep, and
# siblings in an order that mixes the branches. The accepted leaf is not on the first branch, so that the second tree
# finds its slots with gaps and out of order.
_PARENTS = (-1, 0, 0, 1, 2, 1, 3, 4, 5)
_BRANCHES = ((0, 1, 3, 6), (0, 2, 4, 7), (0, 1, 5, 8))
_ACCEPTED = 1
_NODES, _LEVELS = len(_PARENTS), len(_BRANCHES[0])
# A branch that holds each node, and the node's place on it.
_PLACES = [next((i, branch.index(n)) for i, branch in enumerate(_BRANCHES) if n in branch) for n in range(_NODES)]

_PROMPT = 16
_SHORT_WINDOW = 128  # a prompt that fills it costs little more than a short one: a pass reads all weights anyway

# A deviation counts as rounding up to this multiple of the model's own, and up to this multiple of the dtype's epsilon.
# Wrong masks are far beyond: see `control`.
_TIMES_NOISE, _TIMES_EPSILON = 6.0, 6.0
# Whatever the dtype, models take softmax, rotary angles or expert weights in float32.
_FLOAT32_ROUNDING = 1e-4
# More than this is no rounding: a model that far from itself reads whole texts by other rules than it decodes them.
_LARGEST_ROUNDING, _LARGEST_ROUNDING_IN_16_BITS = 0.01, 0.5


@dataclass(frozen=True)
class ModelCheck:
    """What the probe measured. Deviations are root mean squares over the vocabulary, relative to those of the logits
    themselves, both centred; over the nodes of the trees the largest counts, in 16-bit arithmetic the median.

    Attributes:
        error: deviation of the trees' logits from those of the model's own decoding, token by token with its own cache.
        noise: deviation of the model's own forward over whole branches from the same.
        control: deviation under a wrong mask, in which nodes also see other branches.
        tolerance: the largest error that counts as rounding.
        prompt_length: tokens before the tree.
        exact: the error is within the tolerance.
        conclusive: the wrong mask is not, so an error would have shown.
        reason: what is the matter and what to do; None if exact and conclusive.
    """

    error: float
    noise: float
    control: float
    tolerance: float
    prompt_length: int
    exact: bool
    conclusive: bool
    reason: str | None


def check_model(model: PreTrainedModel | Target, *, thorough: bool = False) -> ModelCheck:
    """Measure a small token tree against the model's own passes, on its device and in its dtype.

    Nothing is changed or left on the model, and no random numbers are drawn from the global generators.

    Args:
        model: a causal LM, or a `Target` around one.
        thorough: put a prompt longer than the model's sliding window before the tree, if its context allows; otherwise
            only a window of at most 128 tokens is filled.

    Raises:
        UnsupportedModel: the configuration already rules trees out (see `treedec.limits`), dropout makes the model
            random, its context is too short to probe, it keeps no cache, or a pass over a tree fails.
    """
    target = Target(model.model if isinstance(model, Target) else model)
    text = _Text.of(target, thorough)
    # Only a model in training draws random numbers.
    with torch.no_grad(), torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        whole = _whole_branches(target, text)
        if target.model.training and not torch.equal(whole, _whole_branches(target, text)):
            raise UnsupportedModel("the model is in training mode, where dropout makes it random: call model.eval()")
        expected = _token_by_token(target, text)
        try:
            tree, wrong = _as_trees(target, text)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as failure:
            raise UnsupportedModel(
                f"{type(target.model).__name__} runs, but not over a token tree ({type(failure).__name__}: {failure}): "
                "use model.generate"
            ) from failure
    dtype = target.model.dtype
    error, noise = _deviation(tree, expected, dtype), _deviation(whole, expected, dtype)
    # The root sees nothing wrong, and neither does the first node below it.
    control = _deviation(wrong[2:], expected[2:_NODES], dtype)
    return _judge(target.model, error, noise, control, text.prompt_length)


def ensure_exact(model: PreTrainedModel | Target) -> None:
    """Probe a model before its first tree; warn where the probe is not conclusive.

    The result is remembered for as long as the model lives, and found anew when what it depends on has changed.

    Raises:
        UnsupportedModel: as `check_model`, or the model deviates on a tree.
    """
    target = model if isinstance(model, Target) else Target(model)
    model = target.model
    backend = target.config._attn_implementation
    signature = (type(model), model.dtype, model.device, model.training, backend, target.window)
    known, check = _CHECKS.get(model, (None, None))
    if check is None or known != signature:
        check = check_model(target)
        _CHECKS[model] = signature, check
        if check.exact and not check.conclusive:
            warnings.warn(str(check.reason), stacklevel=2)
    if not check.exact:
        raise UnsupportedModel(check.reason)


def report(model: PreTrainedModel) -> dict[str, Any]:
    """What there is to say about a model before it is decoded with trees, in plain values; never raises a refusal.

    Returns:
        `model`, `dtype`, `device`, `attention`, `supported` and `reason`; unless the configuration already rules it
        out, `window`, `context_length`, `max_positions` and `rope_switch`, see `Target`; and if it could be measured
        the fields of `ModelCheck` (thorough).
    """
    facts: dict[str, Any] = {
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.config.get_text_config()._attn_implementation,
    }
    try:
        target = Target(model)
        switch = target.rope_switch
        facts |= {
            "window": target.window,
            "context_length": target.context_length,
            "max_positions": target.max_positions,
            "rope_switch": None if switch is None else asdict(switch),
        }
        check = check_model(target, thorough=True)
    except UnsupportedModel as error:
        return facts | {"supported": False, "reason": str(error)}
    return facts | {"supported": check.exact} | asdict(check)


# The one piece of state outside any object: a model must be probed once, however many calls and targets it goes
# through, and nothing may be stored on it.
_CHECKS: WeakKeyDictionary[PreTrainedModel, tuple[tuple[Any, ...], ModelCheck]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Text:
    """A prompt of P tokens with two trees below it.

    Attributes:
        rows: `[2 · branches, P + 2 · levels]` int64, on the model's device: every branch as a whole text. Those of the
            first tree go on with tokens of the second, which come too late to matter.
        trees: the trees.
        prompt_length: P.
    """

    rows: Tensor
    trees: tuple[TokenTree, TokenTree]
    prompt_length: int

    @classmethod
    def of(cls, target: Target, thorough: bool) -> _Text:
        length = _PROMPT
        if target.window is not None and (thorough or target.window <= _SHORT_WINDOW):
            length = max(length, target.window + 2 * _LEVELS)
        switch = target.rope_switch
        limits = [target.context_length, None if switch is None else switch.position]
        length = min([length, *(limit - 2 * _LEVELS for limit in limits if limit is not None)])
        if length < 1:
            raise UnsupportedModel(
                f"{type(target.model).__name__} has a context of fewer than {2 * _LEVELS + 1} tokens"
            )
        # Some models pad the LM head beyond the vocabulary that they embed.
        vocab = getattr(target.model.get_input_embeddings(), "num_embeddings", target.vocab_size)
        needed = length + 2 * _NODES
        # Different tokens as far as there are any, since siblings must differ.
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0)).repeat(-(-needed // vocab))[:needed]
        prompt, first, second = ids.split([length, _NODES, _NODES])
        branches = [list(branch) for branch in _BRANCHES]
        rows = [torch.cat([prompt, first[branch], second[branches[0]]]) for branch in branches]
        rows += [torch.cat([prompt, first[branches[_ACCEPTED]], second[branch]]) for branch in branches]
        trees = [TokenTree.from_rows([(tokens.tolist(), _PARENTS)]) for tokens in (first, second)]
        return cls(torch.stack(rows).to(target.device), (trees[0], trees[1]), length)


def _token_by_token(target: Target, text: _Text) -> Tensor:
    """`[2 · nodes, V]`: logits of the model's own decoding, prompt first, then one token of every branch at a time."""
    cache, logits, start = DynamicCache(config=target.config), [], 0
    for end in range(text.prompt_length, text.rows.shape[1] + 1):
        arguments = {"use_cache": True, target.cache_argument: cache}
        logits.append(_own_forward(target, text.rows[:, :end], start, arguments)[:, -1:])
        start = end
        if cache.get_seq_length() != end:
            raise UnsupportedModel(
                f"{type(target.model).__name__} does not fill its cache; if it is in training mode, call model.eval()"
            )
    return _of_nodes(torch.cat(logits[1:], 1))


def _whole_branches(target: Target, text: _Text) -> Tensor:
    """`[2 · nodes, V]`: the same logits from one forward over whole branches, without a cache."""
    return _of_nodes(_own_forward(target, text.rows, 0, {"use_cache": False})[:, -2 * _LEVELS :])


def _own_forward(target: Target, rows: Tensor, start: int, cache: dict[str, Any]) -> Tensor:
    """`[B, ·, V]` logits, of the last columns at least, for `[B, L]` ids of which `start` are cached.

    Mask and positions are given as `generate` gives them.
    """
    arguments: dict[str, Any] = {"logits_to_keep": 2 * _LEVELS} if target.keeps_logits else {}
    positions = torch.arange(start, rows.shape[1], device=rows.device).expand(len(rows), -1)
    arguments |= {"attention_mask": torch.ones_like(rows), "position_ids": positions, **cache}
    return target.model(input_ids=rows[:, start:], **arguments).logits


def _as_trees(target: Target, text: _Text) -> tuple[Tensor, Tensor]:
    """`[2 · nodes, V]` logits of both trees, and `[nodes, V]` of the first one under the wrong mask."""
    first, second = text.trees
    cache = target.allocate(1, text.prompt_length + 2 * _NODES)
    target.prefill(cache, text.rows[:1, : text.prompt_length])
    # Every node sees all nodes before it, those of other branches included.
    everything = torch.ones(1, _NODES, _NODES, dtype=torch.bool, device=target.device).tril()
    positions = (cache.lengths[0] + first.depths).to(target.device)
    wrong = target.score(cache, first.tokens.to(target.device), positions, everything, keep=0).logits
    above = target.verify(cache, first).logits
    accepted = torch.zeros(1, _NODES, dtype=torch.bool)
    accepted[0, list(_BRANCHES[_ACCEPTED])] = True
    cache.commit(accepted)
    below = target.verify(cache, second).logits
    return torch.cat([above[0], below[0]]), wrong[0]


def _of_nodes(logits: Tensor) -> Tensor:
    """From `[2 · branches, 2 · levels, V]` to the nodes of both trees, `[2 · nodes, V]`."""
    above = [logits[row, place] for row, place in _PLACES]
    below = [logits[len(_BRANCHES) + row, _LEVELS + place] for row, place in _PLACES]
    return torch.stack(above + below)


def _deviation(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Deviation of `[N, V]` logits from what is expected, as `ModelCheck` defines it."""
    found, right = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (logits, expected))
    found, right = found - found.mean(-1, keepdim=True), right - right.mean(-1, keepdim=True)
    nodes = (found - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=torch.finfo(right.dtype).tiny)
    # In 16 bits, rounding may send a token to other experts: a large deviation at one node, and no fault of the mask.
    return float(nodes.max() if dtype.itemsize > 2 else nodes.median())


def _judge(model: PreTrainedModel, error: float, noise: float, control: float, prompt_length: int) -> ModelCheck:
    dtype, name = model.dtype, type(model).__name__
    floor = max(_TIMES_EPSILON * torch.finfo(dtype).eps, _FLOAT32_ROUNDING)
    ceiling = _LARGEST_ROUNDING if dtype.itemsize > 2 else _LARGEST_ROUNDING_IN_16_BITS
    tolerance = max(min(_TIMES_NOISE * noise, ceiling), floor)
    exact, conclusive, reason = error <= tolerance, control > tolerance, None
    if not math.isfinite(noise):
        exact, conclusive = True, False
        reason = f"the logits of {name} are not finite in {dtype}, whatever decodes it, so treedec can check nothing"
    elif not exact:
        reason = (
            f"{name} scores a token tree unlike its branches one by one (relative deviation {error:.1e}, against "
            f"{noise:.1e} by rounding), so its attention depends on more than masks and positions: use model.generate, "
            "or try another attn_implementation"
        )
    elif not conclusive:
        reason = (
            f"what a token sees hardly moves the logits of {name} in {dtype} (relative deviation {control:.1e} under a "
            f"wrong mask, {noise:.1e} by rounding), so treedec cannot check its token trees: try a model that is "
            "trained, or float32"
        )
    return ModelCheck(error, noise, control, tolerance, prompt_length, exact, conclusive, reason)
