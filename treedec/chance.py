"""Random numbers: the exponential noise of a sampled step, and the draws of accept/reject rules.

`torch.multinomial(p, 1)` is an exponential race: it draws `e = empty_like(p).exponential_()` and returns `argmax(p /
e)`. So the noise of every future position can be drawn first, in the order in which `model.generate` would draw it, and
a sampled step becomes a function of (noise, target).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class ExponentialNoise:
    """The noise of `model.generate(do_sample=True)`: one `[B, V]` draw per generated position, in order.

    It is drawn ahead of time from a copy of the generator, whose own state changes only in `settle`. Used as a function
    of the position, it is the same for every drafter, every tree and none.

    Args:
        batch, vocab_size: shape of the probabilities that `generate` would hand to `torch.multinomial`.
        device: device of those probabilities.
        generator: where the noise comes from; by default the device's own generator, which `torch.manual_seed` seeds.
    """

    def __init__(self, batch: int, vocab_size: int, device: torch.device, generator: torch.Generator | None = None):
        self._shape, self._device, self._source = (batch, vocab_size), device, generator
        self._generator = torch.Generator(device)
        self._drawn: dict[int, Tensor] = {}
        self._left_at = 0
        self._states = {0: self._source_state()}  # the generator before a position is drawn
        self._generator.set_state(self._states[0])

    def at(self, step: int) -> Tensor:
        """`[B, V]` float32: the noise of generated position `step` (0 is the first new token)."""
        while (following := max(self._states)) <= step:
            # `generate` samples from a float32 softmax whatever the dtype of the model.
            noise = torch.empty(self._shape, dtype=torch.float32, device=self._device).exponential_(
                1, generator=self._generator
            )
            self._drawn[following] = noise
            self._states[following + 1] = self._generator.get_state()
        return self._drawn[step]

    def forget(self, before: int) -> None:
        """Free the noise of positions that every row has passed."""
        self._drawn = {step: noise for step, noise in self._drawn.items() if step >= before}

    def settle(self, steps: int) -> None:
        """Leave the generator where `generate` would have left it after `steps` positions."""
        self._left_at = steps
        self._states = {step: state for step, state in self._states.items() if step >= steps}
        state = self._states[steps]
        if self._source is not None:
            self._source.set_state(state)
        elif self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self._device).set_rng_state(state, self._device)

    def follow(self) -> None:
        """Take up what happened to the generator since `settle`: a new seed, or draws of somebody else."""
        state = self._source_state()
        if not torch.equal(state, self._states[self._left_at]):
            self._generator.set_state(state)
            self._states = {self._left_at: state}
            self._drawn = {step: noise for step, noise in self._drawn.items() if step < self._left_at}

    def _source_state(self) -> Tensor:
        if self._source is not None:
            return self._source.get_state()
        if self._device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self._device).get_rng_state(self._device)


class Chance(Protocol):
    """The random decisions of accept/reject rules and sampled drafts (exhaustively enumerable in tests)."""

    def accept(self, probability: Tensor) -> bool:
        """True with the given probability (a scalar tensor; values above 1 count as 1)."""
        ...

    def sample(self, probabilities: Tensor) -> int:
        """An index drawn from `[V]` unnormalised probabilities."""
        ...


class TorchChance:
    """`Chance` from a generator; by default that of the tensors' device, so that `torch.manual_seed` governs it."""

    def __init__(self, generator: torch.Generator | None = None):
        self._generator = generator

    def accept(self, probability: Tensor) -> bool:
        drawn = torch.rand((), dtype=torch.float64, device=probability.device, generator=self._generator)
        return bool(drawn < probability)

    def sample(self, probabilities: Tensor) -> int:
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
