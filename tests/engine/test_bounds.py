"""Expected acceptance of one node's children: against enumeration, brute force and plain simulation."""

from itertools import combinations

import pytest
import torch
from enumeration import Tables, levels, mean_length
from hypothesis import given
from hypothesis import strategies as st

from treedec.acceptance import Residual, Traversal
from treedec.bounds import _all_before, acceptance_bounds

NAMES = ("coupled", "residual", "top", "hu", "optimum")

# Of a vocabulary of 2 to 5 tokens, p and q exclude up to one.
tables = st.builds(Tables, st.integers(2, 5), st.integers(0, 10**6), st.integers(0, 1))


def enumerated(tables, rule, scheme, children):
    """Exact acceptance by the rule itself, children one by one."""
    accepted = [mean_length(rule, tables, levels((n, scheme))) - 1 for n in range(1, children + 1)]
    return torch.tensor(accepted, dtype=torch.float64)


def coupled_by_quadrature(p, q, children):
    """Exact acceptance of the coupled rule: for every winner y, the clocks that would have to ring before it."""
    total = torch.zeros(children, dtype=torch.float64)
    for p_y, q_y in zip(p, q, strict=True):
        if p_y > 0 and q_y > 0:
            rates = (p_y / q_y * q - p).clamp(min=0)
            total += p_y * (1 - _all_before(rates, torch.ones_like(p), children)[:, -1])
    return total


def skewed(vocab, seed, distance=1.0):
    """p and q that resemble each other, `[V]` float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(vocab, generator=generator, dtype=torch.float64)
    other = logits + distance * torch.randn(vocab, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), other.softmax(-1)


@given(tables)
def test_closed_forms_are_what_the_rules_accept(tables):
    found = acceptance_bounds(tables.p(()), tables.q(()), children=3, draws=2)
    torch.testing.assert_close(found.top, enumerated(tables, Residual(), "top", 3), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.hu, enumerated(tables, Residual(), "hu", 3), atol=1e-12, rtol=0)
    assert float(found.residual[0]) == pytest.approx(float(torch.minimum(tables.p(()), tables.q(())).sum()), abs=1e-12)
    assert float(found.residual_error[0]) < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_estimates_are_what_the_rules_accept(seed):
    tables = Tables(5, seed, missing=seed % 2)
    p, q = tables.p(()), tables.q(())
    found = acceptance_bounds(p, q, children=3, draws=4_000, seed=seed)
    exact = enumerated(tables, Residual(), "drawn", 3)
    torch.testing.assert_close(exact, enumerated(tables, Traversal(), "drawn", 3), atol=1e-12, rtol=0)
    assert ((found.residual - exact).abs() <= 4.5 * found.residual_error + 1e-9).all()
    exact = coupled_by_quadrature(p, q, 3)
    assert ((found.coupled - exact).abs() <= 4.5 * found.coupled_error + 1e-7).all()


@given(tables)
def test_quadrature_of_one_coupled_child_is_the_closed_form(tables):
    p, q = tables.p(()), tables.q(())
    both = [i for i in range(len(p)) if p[i] > 0 and q[i] > 0]
    closed = sum(1 / float(torch.maximum(p / p[i], q / q[i]).sum()) for i in both)
    assert float(coupled_by_quadrature(p, q, 1)) == pytest.approx(closed, abs=1e-6)


def test_coupled_is_what_a_simulated_race_gives():
    p, q = skewed(200, seed=0)
    noise = torch.empty(20_000, 200, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    winner, ranked = (p / noise).argmax(1), (q / noise).topk(4).indices
    simulated = (ranked == winner[:, None]).cumsum(1).double().mean(0)
    exact = coupled_by_quadrature(p, q, 4)
    assert (simulated - exact).abs().max() < 4 * 0.5 / 20_000**0.5
    found = acceptance_bounds(p, q, 4, draws=4_000)
    assert ((found.coupled - exact).abs() < 4.5 * found.coupled_error).all()


def all_inside(q, allowed, draws):
    """Probability that so many draws from q without replacement stay among the allowed tokens; q may run out."""
    if draws == 0 or sum(q) == 0:
        return 1.0
    each = [(i, q[i] / sum(q)) for i in allowed if q[i] > 0]
    return sum(share * all_inside([*q[:i], 0.0, *q[i + 1 :]], allowed, draws - 1) for i, share in each)


def test_optimum_is_the_smallest_cut():
    """Over all sets of tokens, not only those that the search tries; very uneven q among them."""
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        vocab, sharpness = 2 + seed % 5, (1, 3, 12)[seed % 3]
        p, q = (sharpness * torch.randn(2, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
        if seed % 4 == 0:
            q = torch.nn.functional.one_hot(q.argmax(), vocab).double() * 0.5 + q * (q > q.min()) / 2
            q = q / q.sum()
        subsets = [chosen for size in range(vocab + 1) for chosen in combinations(range(vocab), size)]
        cut = [
            1 + min(float(p[list(chosen)].sum()) - all_inside(q.tolist(), chosen, n) for chosen in subsets)
            for n in (1, 2, 3)
        ]
        found = acceptance_bounds(p, q, children=3, draws=2).optimum
        assert found.tolist() == pytest.approx(cut, abs=1e-6), seed


@pytest.mark.parametrize(("distance", "better"), [(1.0, True), (5.0, False)], ids=["good drafter", "poor drafter"])
def test_the_order_of_what_is_accepted(distance, better):
    """One coupled child is accepted less than one drawn child; several are accepted more only of a good drafter."""
    p, q = skewed(200, seed=3, distance=distance)
    found = acceptance_bounds(p, q, 8, draws=2_000)
    exact = coupled_by_quadrature(p, q, 8)
    assert exact[0] < found.residual[0] == pytest.approx(float(found.optimum[0]), abs=1e-6)
    assert (exact[3:] > found.residual[3:]).all() if better else (exact < found.residual).all()
    assert (exact <= found.optimum + 1e-6).all()
    assert (found.residual <= found.optimum + 4 * found.residual_error + 1e-6).all()
    for name in NAMES:
        values = getattr(found, name)
        assert (values.diff() > -1e-9).all() or name == "coupled", name
        assert ((values >= 0) & (values <= 1 + 1e-9)).all()


def test_more_children_than_tokens_add_nothing():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.4, 0.0])
    found = acceptance_bounds(p, q, children=5, draws=50)
    for name in NAMES:
        values = getattr(found, name)[1:]
        assert values.tolist() == pytest.approx([0.8] * 4, abs=1e-6 if name != "coupled" else 0.3), name
    assert (found.coupled[1:] == found.coupled[1]).all()


def test_equal_distributions_are_accepted_always_and_disjoint_ones_never():
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]])
    found = acceptance_bounds(p, q, children=2)
    for name in ("coupled", "residual", "optimum"):
        assert getattr(found, name).tolist() == [pytest.approx([1, 1], abs=1e-6), pytest.approx([0, 0], abs=1e-6)]


def test_rows_are_nodes_and_the_seed_decides_and_the_global_generator_stays():
    p, q = (torch.stack(rows) for rows in zip(*(skewed(30, seed) for seed in range(3)), strict=True))
    state = torch.get_rng_state()
    found, again = (acceptance_bounds(p.float(), q.float(), 4, draws=8, seed=5) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for name in (*NAMES, "coupled_error", "residual_error"):
        assert torch.equal(getattr(found, name), getattr(again, name)) and getattr(found, name).shape == (3, 4)
    assert not torch.equal(found.coupled, acceptance_bounds(p, q, 4, draws=8, seed=6).coupled)
    torch.testing.assert_close(found.hu[1], acceptance_bounds(p[1], q[1], 4).hu, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(3) / 3}, r"p and q must both be \[V\] or \[K, V\], not \[2\] and \[3\]"),
        ({"children": 0}, "children must be at least 1"),
        ({"draws": 1}, "draws at least 2"),
        ({"p": torch.tensor([0.5, 0.6])}, "p must hold probabilities"),
        ({"q": torch.tensor([1.5, -0.5])}, "q must hold probabilities"),
        ({"q": torch.tensor([0.5, torch.nan])}, "q must hold probabilities"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        acceptance_bounds(**{"p": torch.ones(2) / 2, "q": torch.ones(2) / 2, "children": 1} | change)
