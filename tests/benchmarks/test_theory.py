"""Expected acceptance and predicted speed: against enumeration and plain simulation on tiny vocabularies."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch

from treedec import CostCurve
from treedec.benchmarks import theory
from treedec.benchmarks.theory import expected_acceptance, predict
from treedec.bounds import acceptance_bounds
from treedec.reference import speculative_step_verification


def tables(nodes, vocab, seed, sharpness=2.0, missing=False):
    """`[n, V]` float64 p and q; each excludes a token of its own if asked."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (sharpness * torch.randn(2, nodes, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    if missing:
        p[:, seed % vocab] = 0
        q[:, (seed + 1) % vocab] = 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


CASES = [(seed, vocab, missing) for seed, vocab in enumerate((2, 3, 4, 5, 6)) for missing in (False, True)]


@pytest.mark.parametrize(("seed", "vocab", "missing"), CASES)
def test_one_coupled_draft_is_the_double_sum(seed, vocab, missing):
    p, q = tables(4, vocab, seed, missing=missing)
    for p_row, q_row, found in zip(p, q, theory.coupled_single(p, q), strict=True):
        both = [i for i in range(vocab) if p_row[i] > 0 and q_row[i] > 0]
        slowly = sum(1 / float(torch.maximum(p_row / p_row[i], q_row / q_row[i]).sum()) for i in both)
        assert float(found) == pytest.approx(slowly, abs=1e-12)


def test_one_coupled_draft_is_what_a_simulated_race_gives():
    p, q = tables(1, 50, seed=3)
    noise = torch.empty(40_000, 50, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0))
    met = ((p / noise).argmax(1) == (q / noise).argmax(1)).double().mean()
    assert float(met) == pytest.approx(float(theory.coupled_single(p, q)), abs=4 * 0.5 / 40_000**0.5)


def test_the_same_distributions_are_always_accepted():
    p, _ = tables(3, 5, seed=0, missing=True)
    for expected in expected_acceptance(p, p, drafts=(1, 2)):
        if expected.rule in ("coupled", "residual", "optimum", "optimum_iid"):
            assert expected.acceptance == pytest.approx(1, abs=1e-6), expected
    one, other = torch.eye(4, dtype=torch.float64)[:2, None]
    assert all(expected.acceptance == pytest.approx(0, abs=1e-9) for expected in expected_acceptance(one, other))


def test_one_residual_draft_is_what_the_reference_accepts():
    p, q = tables(1, 4, seed=8)
    generator = np.random.default_rng(0)
    drafts = generator.choice(4, size=20_000, p=q[0].numpy())
    accepted = [
        # Given a bonus row, two tokens come back if, and only if, the draft was accepted.
        len(speculative_step_verification([draft], p.numpy().repeat(2, 0), q.numpy(), generator)) == 2
        for draft in drafts
    ]
    assert np.mean(accepted) == pytest.approx(float(theory.residual_single(p, q)), abs=4 * 0.5 / 20_000**0.5)


def enumerated_residual(p, q, k):
    """Exact acceptance of recursive rejection of k drafts without replacement, child by child."""
    if k == 0 or q.sum() == 0:
        return 0.0
    total = 0.0
    for x in range(len(q)):
        if q[x] == 0:
            continue
        accept = min(1.0, p[x] / q[x])
        left = np.maximum(p - q, 0)
        later = np.where(np.arange(len(q)) == x, 0, q)
        if accept < 1:
            after = enumerated_residual(left / left.sum(), later / max(later.sum(), 1e-300), k - 1)
            total += q[x] * (accept + (1 - accept) * after)
        else:
            total += q[x]
    return total


def enumerated_cut(p, q, k, replacement):
    """1 + min over ALL sets H of P(H) − P(all k drafts in H), the drafts enumerated one sequence at a time."""
    vocab = range(len(q))
    chances = {}
    for drafts in product(vocab, repeat=k):
        chance, left = 1.0, 1.0
        for place, x in enumerate(drafts):
            if not replacement and x in drafts[:place]:
                chance = 0.0
                break
            chance *= q[x] / left if left > 0 else 0.0
            left -= 0 if replacement else q[x]
        chances[frozenset(drafts)] = chances.get(frozenset(drafts), 0.0) + chance
    subsets = [set(chosen) for size in range(len(q) + 1) for chosen in combinations(vocab, size)]
    return 1 + min(
        sum(p[x] for x in chosen) - sum(chance for drafts, chance in chances.items() if drafts <= chosen)
        for chosen in subsets
    )


@pytest.mark.parametrize(("seed", "vocab", "missing"), [case for case in CASES if case[1] > 3])
def test_every_rule_against_enumeration(seed, vocab, missing):
    p, q = tables(1, vocab, seed, missing=missing)
    p_row, q_row = p[0].numpy(), q[0].numpy()
    drafts = (1, 2, 3)
    found = {(each.rule, each.drafts): each.acceptance for each in expected_acceptance(p, q, drafts, 4_000, seed)}
    bounds = acceptance_bounds(p[0], q[0], 3, 4_000, seed)
    best = np.sort(p_row[np.argsort(-q_row)[: int((q_row > 0).sum())]][:3])
    for k in drafts:
        assert found["residual", k] == pytest.approx(
            enumerated_residual(p_row, q_row, k), abs=4.5 * float(bounds.residual_error[k - 1]) + 1e-9
        )
        assert found["optimum", k] == pytest.approx(enumerated_cut(p_row, q_row, k, replacement=False), abs=1e-6)
        assert found["optimum_iid", k] == pytest.approx(enumerated_cut(p_row, q_row, k, replacement=True), abs=1e-9)
        assert found["top", k] == pytest.approx(p_row[np.argsort(-q_row)[:k]][q_row[np.argsort(-q_row)[:k]] > 0].sum())
        assert found["coupled", k] <= found["optimum", k] + 4.5 * float(bounds.coupled_error[k - 1]) + 1e-6
    assert found["top", 3] == pytest.approx(best.sum())
    one = 1 - np.abs(p_row - q_row).sum() / 2
    for rule in ("residual", "optimum", "optimum_iid", "hu"):
        assert found[rule, 1] == pytest.approx(one, abs=1e-6), rule


def test_several_coupled_drafts_are_what_a_simulated_race_gives():
    p, q = tables(1, 30, seed=5)
    noise = torch.empty(40_000, 30, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    winner, ranked = (p / noise).argmax(1), (q / noise).topk(4).indices
    simulated = (ranked == winner[:, None]).cumsum(1).double().mean(0)
    for expected in expected_acceptance(p, q, (1, 2, 4), draws=20_000):
        if expected.rule == "coupled":
            assert expected.acceptance == pytest.approx(float(simulated[expected.drafts - 1]), abs=0.015)


def test_figures_are_means_over_nodes_with_their_errors():
    p, q = tables(6, 5, seed=2)
    found = {
        (each.rule, each.drafts): each for each in expected_acceptance(p.float().numpy(), q.float().numpy(), (1, 3))
    }
    assert set(found) == {(rule, k) for rule in theory.RULES for k in (1, 3)}
    each = torch.minimum(p, q).sum(-1)
    assert found["residual", 1].acceptance == pytest.approx(float(each.mean()), abs=1e-6)
    assert found["residual", 1].error == pytest.approx(float(each.std()) / 6**0.5, abs=1e-6)
    assert all(entry.error is None for entry in expected_acceptance(p[:1], q[:1], (1,)))
    # Nodes that come three times in one text tell no more than once.
    thrice = (each.repeat_interleave(3, 0) for each in (p, q))
    texts = [node // 3 for node in range(3 * len(p))]
    exact = ("top", "hu", "optimum", "optimum_iid")
    for one, again in zip(
        expected_acceptance(p, q, (1, 3)), expected_acceptance(*thrice, (1, 3), texts=texts), strict=True
    ):
        if one.rule in exact:
            assert (again.acceptance, again.error) == pytest.approx((one.acceptance, one.error))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p, q: (p[:0], q[:0], (1,)), "at least one row"),
        (lambda p, q: (p[0], q[0], (1,)), r"\[n, V\]"),
        (lambda p, q: (p, q[:, :3], (1,)), r"p and q must both be"),
        (lambda p, q: (p, 2 * q, (1,)), "q must hold probabilities"),
        (lambda p, q: (p * float("nan"), q, (1,)), "p must hold probabilities"),
        (lambda p, q: (p, q, ()), "numbers from 1 on"),
        (lambda p, q: (p, q, (0, 1)), "numbers from 1 on"),
    ],
)
def test_what_is_no_distribution_is_refused(change, said):
    p, q, drafts = change(*tables(2, 4, seed=0))
    with pytest.raises(ValueError, match=said):
        expected_acceptance(p, q, drafts)


CURVE = CostCurve((1, 2, 4, 8), (0.010, 0.011, 0.015, 0.031))


def test_costs_are_linear_between_what_was_measured():
    assert CostCurve.of({"nodes": [1, 2, 4, 8], "seconds": [0.010, 0.011, 0.015, 0.031], "context": 64}) == CURVE
    assert [CURVE.at(nodes) for nodes in (1, 3, 4, 5)] == pytest.approx([0.010, 0.013, 0.015, 0.019])


@pytest.mark.parametrize("nodes", [0, 0.5, 9, float("nan")])
def test_costs_are_never_extrapolated(nodes):
    with pytest.raises(ValueError, match="outside the measured 1 to 8"):
        CURVE.at(nodes)


@pytest.mark.parametrize(
    ("nodes", "seconds", "said"),
    [
        ((), (), "as many"), ((1, 2), (0.1,), "as many"), ((2, 1), (0.1, 0.2), "rising"),
        ((0, 1), (0.1, 0.2), "rising"), ((1, 1), (0.1, 0.2), "rising"), ((1, 2), (0.1, 0.0), "above 0"),
        ((1,), (float("nan"),), "above 0"),
    ],
)  # fmt: skip
def test_what_is_no_curve_is_refused(nodes, seconds, said):
    with pytest.raises(ValueError, match=said):
        CostCurve(nodes, seconds)


def test_a_prediction_is_costs_over_tokens():
    found = predict(CURVE, 4, mean_accepted_length=2.5, draft_seconds=0.005)
    assert found.seconds_per_token == pytest.approx(0.020 / 2.5)
    assert found.tokens_per_second == pytest.approx(125)
    assert found.speedup == pytest.approx(0.010 * 2.5 / 0.020)
    assert predict(CURVE, 1, 1.0).speedup == 1
    # A chain of γ drafts of which each is accepted with probability α: theorem 3.8 of Leviathan et al., costs flat.
    flat, alpha, gamma, cost = CostCurve((1, 6), (1.0, 1.0)), 0.8, 5, 0.1
    tau = sum(alpha**depth for depth in range(gamma + 1))
    closed = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost + 1))
    assert predict(flat, gamma + 1, tau, gamma * cost).speedup == pytest.approx(closed)


@pytest.mark.parametrize(("tau", "draft", "said"), [(0.9, 0.0, "at least one token"), (2.0, -1.0, "-1.0 seconds")])
def test_impossible_measurements_are_refused(tau, draft, said):
    with pytest.raises(ValueError, match=said):
        predict(CURVE, 2, tau, draft)


@pytest.mark.parametrize(
    ("method", "nodes"),
    [("recurrent@32", 32), ("runs/a@home@8", 8), ("ar", 1), ("recurrent", None), ("runs/a@home", None), ("@", None)],
)
def test_the_name_of_a_method_says_how_large_its_trees_are(method, nodes):
    assert theory.tree_nodes(method) == nodes
