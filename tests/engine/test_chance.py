"""The noise that makes sampling a function: it must be `torch.multinomial`'s own, and end where that would end."""

import pytest
import torch

from treedec.chance import ExponentialNoise, TorchChance

CPU = torch.device("cpu")


def distributions(steps, batch, vocab):
    return torch.rand(steps, batch, vocab, generator=torch.Generator().manual_seed(5)).softmax(-1)


@pytest.mark.parametrize(("batch", "vocab"), [(1, 5), (1, 97), (3, 97), (2, 1000)])
def test_noise_picks_what_multinomial_picks(batch, vocab):
    p = distributions(6, batch, vocab)
    torch.manual_seed(4)
    drawn = torch.stack([torch.multinomial(step, 1).squeeze(-1) for step in p])
    torch.manual_seed(4)
    noise = ExponentialNoise(batch, vocab, CPU)
    chosen = torch.stack([(step / noise.at(t)).argmax(-1) for t, step in enumerate(p)])
    assert torch.equal(chosen, drawn) and chosen.unique().numel() > 1


def test_noise_is_a_function_of_the_position():
    torch.manual_seed(4)
    forwards, backwards = ExponentialNoise(2, 7, CPU), ExponentialNoise(2, 7, CPU)
    ahead = [forwards.at(step).clone() for step in range(4)]
    assert all(torch.equal(backwards.at(step), ahead[step]) for step in (3, 1, 0, 2))
    assert not torch.equal(ahead[0], ahead[1])


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_settle_leaves_the_generator_where_multinomial_leaves_it(steps):
    torch.manual_seed(4)
    noise = ExponentialNoise(2, 97, CPU)
    noise.at(6)  # drawn further ahead than was used
    noise.settle(steps)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    for p in distributions(steps, 2, 97):
        torch.multinomial(p, 1)
    assert torch.equal(state, torch.get_rng_state())


def test_drawing_ahead_leaves_the_default_generator_alone():
    before = torch.get_rng_state()
    ExponentialNoise(2, 97, CPU).at(5)
    assert torch.equal(before, torch.get_rng_state())


def test_forgotten_noise_is_freed_and_later_noise_is_unchanged():
    torch.manual_seed(4)
    noise, twin = ExponentialNoise(1, 7, CPU), ExponentialNoise(1, 7, CPU)
    noise.at(3)
    noise.forget(before=3)
    assert torch.equal(noise.at(3), twin.at(3)) and torch.equal(noise.at(4), twin.at(4))
    with pytest.raises(KeyError):
        noise.at(2)


def test_torch_chance_follows_the_seed_and_the_probabilities():
    chance = TorchChance()
    assert (
        chance.accept(torch.tensor(1.0)) and not chance.accept(torch.tensor(0.0)) and chance.accept(torch.tensor(3.0))
    )
    assert chance.sample(torch.tensor([0.0, 2.0, 0.0])) == 1
    torch.manual_seed(1)
    once = [chance.accept(torch.tensor(0.3)) for _ in range(2000)]
    torch.manual_seed(1)
    assert once == [chance.accept(torch.tensor(0.3)) for _ in range(2000)]
    assert 0.27 < sum(once) / 2000 < 0.33
