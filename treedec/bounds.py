"""How often a token is accepted: expected values of every way to draft and verify the children of one node.

They tell rules and drafts apart without decoding: from p, the target's distribution after a node, and q, the drafter's,
they give the probability that the next token is among the node's n children. `AcceptanceBounds` lists the ways.

Most of it is races of exponential clocks, one per token, which ring at rates such as q(x). The order in which they ring
is that of drawing without replacement from q, and the memory-less race makes its probabilities integrals over one
variable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class AcceptanceBounds:
    """Probabilities that the token after a node is one of its n children; entry `[…, n − 1]` is for n children.

    All are float64 `[children]`, or `[K, children]` for K nodes.

    Attributes:
        coupled: the top n of q / e, tested against argmax(p / e) with the same exponential noise e: `Coupled`.
        residual: n tokens drawn from q without replacement and recursive rejection: `Residual`. Equal for `Traversal`,
            which differs on deeper trees only.
        top: the top n of q and plain sampling from p: `Residual` with deterministic children.
        hu: the top n − 1 of q beside one drawn from the rest (arXiv:2502.18779): `Residual`.
        optimum: the most that any rule could accept of n tokens drawn from q without replacement, by optimal transport.
            It bounds `coupled` and `residual`, whose children are distributed like that; `top` and `hu` draft
            otherwise, are optimal for their own drafts, and may exceed it.
        coupled_error, residual_error: standard errors of these two, which are Monte Carlo estimates.
    """

    coupled: Tensor
    residual: Tensor
    top: Tensor
    hu: Tensor
    optimum: Tensor
    coupled_error: Tensor
    residual_error: Tensor


def acceptance_bounds(p: Tensor, q: Tensor, children: int, draws: int = 64, seed: int = 0) -> AcceptanceBounds:
    """Expected acceptance of 1 to `children` children.

    Args:
        p: `[V]` or `[K, V]` probabilities of the target, for one node or K.
        q: of the same shape; tokens that it excludes are never children.
        children: the largest n.
        draws: Monte Carlo draws per node. What can be integrated is, so a few give a standard error below 0.05, and
            averages over many nodes a far smaller one.
        seed: of the generator for these draws; the global one is left alone.

    Raises:
        ValueError: shapes that differ, `children` below 1, `draws` below 2, or rows that are no probabilities.
    """
    if p.shape != q.shape or p.dim() not in (1, 2):
        raise ValueError(f"p and q must both be [V] or [K, V], not {list(p.shape)} and {list(q.shape)}")
    if children < 1 or draws < 2:
        raise ValueError(f"children must be at least 1 and draws at least 2, not {children} and {draws}")
    for name, rows in (("p", p), ("q", q)):
        if bool((rows < 0).any()) or not bool(((rows.double().sum(-1) - 1).abs() < 1e-3).all()):
            raise ValueError(f"{name} must hold probabilities that sum to 1")
    generator = torch.Generator(p.device).manual_seed(seed)
    nodes = [
        _of_one_node(*_folded(p_row, q_row), children, draws, generator)
        for p_row, q_row in zip(p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1]), strict=True)
    ]
    shape = (*p.shape[:-1], children)
    return AcceptanceBounds(**{name: torch.stack([node[name] for node in nodes]).reshape(shape) for name in nodes[0]})


def _of_one_node(p: Tensor, q: Tensor, children: int, draws: int, generator: torch.Generator) -> dict[str, Tensor]:
    coupled = _coupled(p, q, children, draws, generator)
    residual = _residual(p, q, children, draws, generator)
    return {
        "coupled": coupled.mean(0),
        "residual": residual.mean(0),
        "top": _padded(p[:-1].cumsum(0), children),
        "hu": torch.stack([_hu(p, q, n) for n in range(1, children + 1)]),
        "optimum": _optimum(p, q, children),
        "coupled_error": coupled.std(0) / draws**0.5,
        "residual_error": residual.std(0) / draws**0.5,
    }


def _folded(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """`[W + 1]` float64 p and q of the W tokens that q allows, in the order of falling q, then all others as one token.

    No child is among those, so that they matter through their total alone, in every quantity here.
    """
    p, q = p.double() / p.double().sum(), q.double() / q.double().sum()
    order = q.argsort(descending=True, stable=True)[: int((q > 0).sum())]
    rest = p.clone()
    rest[order] = 0
    return torch.cat([p[order], rest.sum()[None]]), torch.cat([q[order], q.new_zeros(1)])


def _coupled(p: Tensor, q: Tensor, children: int, draws: int, generator: torch.Generator) -> Tensor:
    """`[draws, children]` unbiased estimates of the probability that argmax(p / e) is among the top n of q / e.

    Let y win the race of p, its clock being e_y = u · p_y; then u ~ Exp(1), independently of y ~ p. Every other token
    has e_j > u · p_j, and beats y in the race of q if e_j < u · q_j · p_y / q_y: as if a clock of rate
    [q_j · p_y / q_y − p_j]+ rang before u. So y is missed if n of these clocks ring before one of rate 1. Given the
    order in which they ring, the probability of that is Π D_k / (D_k + 1), D_k being the total rate of those left
    before the k-th: only y and the order are drawn. (For n = 1 this amounts to Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i),
    Daliri et al. 2024, arXiv:2408.07978.)
    """
    y = torch.multinomial(p, draws, replacement=True, generator=generator)
    drafted = q[y] > 0
    odds = torch.where(drafted, p[y] / torch.where(drafted, q[y], 1), 0)
    rates = (odds[:, None] * q - p).clamp(min=0)  # [draws, W + 1]
    noise = torch.empty_like(rates).exponential_(generator=generator)
    first = rates.gather(1, (rates / noise).topk(min(children, len(p))).indices)
    left = (rates.sum(1, keepdim=True) - first.cumsum(1) + first).clamp(min=0)
    missed = torch.where(drafted[:, None], (left / (left + 1)).cumprod(1), 1)
    return _padded((1 - missed).T, children).T


def _residual(p: Tensor, q: Tensor, children: int, draws: int, generator: torch.Generator) -> Tensor:
    """`[draws, children]` unbiased estimates of the probability that recursive rejection accepts one of n drawn
    children.

    A stage rejects with probability Σ[q̂ − p̂]+, whatever its child, and a rejected child is distributed like
    norm[q̂ − p̂]+: only these children are drawn, and the probabilities of rejection multiplied. Exact for n = 1.
    """
    p, q = p.expand(draws, -1), q.expand(draws, -1)
    rejected = []
    for _ in range(children):
        excess = (q - p).clamp(min=0)
        # Without a token left to draw, nothing more is accepted.
        rejected.append(torch.where(q.sum(1) > 0, excess.sum(1), 1))
        # Where nothing can be rejected, any child will do: a product with a factor 0 stays 0.
        child = torch.multinomial(excess + 1e-300, 1, generator=generator)
        p, q = _normalised((p - q).clamp(min=0)), _normalised(q.scatter(1, child, 0))
    return 1 - torch.stack(rejected, 1).cumprod(1)


def _normalised(rows: Tensor) -> Tensor:
    """`[draws, W]` rows that sum to 1, or are 0 throughout."""
    total = rows.sum(1, keepdim=True)
    return rows / torch.where(total > 0, total, 1)


def _hu(p: Tensor, q: Tensor, children: int) -> Tensor:
    """p(S) + Σ_{x ∉ S} min(p(x), q'(x)) with S the top n − 1 of q and q' = norm[q outside S], q being sorted."""
    best, left = p[:-1][: children - 1].sum(), q[children - 1 :]
    if left.sum() == 0:
        return best
    return best + torch.minimum(p[children - 1 :], left / left.sum()).sum()


def _optimum(p: Tensor, q: Tensor, children: int) -> Tensor:
    """`[children]` 1 + min_H [P(H) − Q_n(H)], Q_n(H) being the probability that all n children lie in H.

    The flow from sets of children to the tokens in them is at most its smallest cut (Hu et al. 2025, arXiv:2502.18779).
    Only the H of the tokens with the largest q / p need to be tried.
    """
    order = (q / p.clamp(min=torch.finfo(p.dtype).tiny)).argsort(descending=True, stable=True)
    p, q = p[order], q[order]
    tokens = int((q > 0).sum())
    outside = torch.cat([q.flip(0).cumsum(0).flip(0)[1:], q.new_zeros(1)])  # summed from the far end: exact when small
    inside = _all_before(q, outside, min(children, tokens))
    return _padded(1 + (p.cumsum(0) - inside).amin(1).clamp(max=0), children)


def _padded(values: Tensor, length: int) -> Tensor:
    """The first `length` rows, the last one repeated if there are fewer: more children than tokens add nothing."""
    return values[torch.arange(length, device=values.device).clamp(max=len(values) - 1)]


def _all_before(rates: Tensor, rivals: Tensor, count: int, step: float = 0.5) -> Tensor:
    """`[count, W]`: the probability that n of the first i + 1 clocks ring before the i-th rival, at `[n − 1, i]`.

    It is ∫ r exp(−r t) P(n clocks have rung by t) dt, summed at equal steps of log t, where such an integrand is so
    smooth that the sum converges exponentially: some exp(−π² / step) remain, about 1e-7. How many clocks have rung
    follows from one token to the next. (Logarithms would turn that into cumulative sums, and lose clocks beside others
    of 1e12 times their rate.)

    Args:
        rates: `[W]`, of the clocks.
        rivals: `[W]`; a rival of rate 0 never rings.
        count: the largest n.
        step: in log t.
    """
    clocks, others = rates.cpu().numpy(), rivals.cpu().numpy()
    fastest = max(clocks.sum(), others.max())
    start = -16 - np.log(fastest)
    end = np.log(40 / others.min(where=others > 0, initial=fastest))
    time = np.exp(np.arange(start, end + step, step))  # [T]
    silent = np.exp(-np.outer(clocks, time))  # [W, T]
    weights = step * np.outer(others, time) * np.exp(-np.outer(others, time))
    rung = np.zeros((count, len(time)))  # the probability that k clocks have rung, k < n
    rung[0] = 1
    result = np.zeros((count, len(clocks)))
    for place in range(len(clocks)):
        joins = rung[:-1] * (1 - silent[place])
        rung *= silent[place]
        rung[1:] += joins
        result[:, place] = (1 - rung.cumsum(0)) @ weights[place]
    enough = np.arange(1, len(clocks) + 1) >= np.arange(1, count + 1)[:, None]
    return torch.from_numpy(np.where(others > 0, result, enough)).to(rates)
