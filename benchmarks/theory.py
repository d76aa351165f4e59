"""What acceptance and speed are to be expected: from the distributions, and from the costs of the machine.

Two questions that need no decoding. How often does each acceptance rule accept a child of a node, given what the target
and the drafter say there? And how fast is decoding with trees, given how many tokens a pass yields and what passes cost
on this machine? Beside measured figures, the answers tell whether time is lost in the drafts, in the rule, or between
the passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treedec.benchmarks.methods import COMPILED
from treedec.benchmarks.statistics import Summary
from treedec.bounds import AcceptanceBounds, acceptance_bounds
from treedec.costs import CostCurve

RULES = {
    "coupled": "coupled (exponential races of p and q with the same noise)",
    "residual": "residual (recursive rejection, drafts without replacement)",
    "top": "top-k of q, deterministic",
    "hu": "top-(k − 1) of q and one drawn",
    "optimum": "optimal transport, drafts without replacement",
    "optimum_iid": "optimal transport, independent drafts",
}


@dataclass(frozen=True)
class Expected:
    """How often a child of a node is accepted.

    Attributes:
        rule: a key of `RULES`; the two optima are what no rule can exceed that drafts as they say.
        drafts: k, children of the node.
        acceptance: expected probability, mean over the nodes.
        error: its standard error, which holds that of the Monte Carlo estimates; None for one text.
    """

    rule: str
    drafts: int
    acceptance: float
    error: float | None


@dataclass(frozen=True)
class Prediction:
    """Decoding with trees beside decoding without.

    Attributes:
        seconds_per_token: (cost(nodes) + draft) / τ.
        plain_seconds_per_token: cost(1).
    """

    seconds_per_token: float
    plain_seconds_per_token: float

    @property
    def speedup(self) -> float:
        return self.plain_seconds_per_token / self.seconds_per_token

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token


def tree_nodes(method: str) -> int | None:
    """Nodes per tree of a method such as `recurrent@32`, root included; 1 for `ar`, None if the name does not say."""
    if method == "ar":
        return 1
    _, at, nodes = method.rpartition("@")
    return int(nodes) if at and nodes.isdecimal() else None


def predict(curve: CostCurve, nodes: float, mean_accepted_length: float, draft_seconds: float = 0.0) -> Prediction:
    """How fast trees should be (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8, with the costs of this machine).

    A pass over the tree and a round of drafting yield τ tokens. Nothing else is counted, so that what is measured stays
    below by what sampling, acceptance and bookkeeping cost.

    Args:
        curve: seconds of a pass by nodes.
        nodes: size of the tree, the root included; the mean, where it varies.
        mean_accepted_length: τ, tokens per pass.
        draft_seconds: of one round of drafting.

    Raises:
        ValueError: a size that the curve does not cover, τ below 1, or negative seconds.
    """
    if not mean_accepted_length >= 1:
        raise ValueError(f"a pass yields at least one token, not {mean_accepted_length}")
    if not draft_seconds >= 0:
        raise ValueError(f"drafting cannot take {draft_seconds} seconds")
    return Prediction((curve.at(nodes) + draft_seconds) / mean_accepted_length, curve.at(1))


def predictions(summary: Summary) -> dict[int, Prediction]:
    """Predicted speed of the conditions of ours that decode one prompt at a time with trees of a known size, by index.

    Args:
        summary: of a run; without costs there are none.

    Raises:
        ValueError: costs that are no curve.
    """
    if summary.result.costs is None:
        return {}
    curve, found = CostCurve.of(summary.result.costs), {}
    for index, condition in enumerate(summary.conditions):
        nodes, figures = condition_nodes(summary, index), summary.figures(index)
        tau, passes, draft = figures.mean_accepted_length, figures.passes, figures.draft_seconds
        if (
            condition.acceptance is None
            or condition.batch > 1
            or nodes is None
            or tau is None
            or not passes
            or draft is None
        ):
            continue
        if curve.covers(nodes) and curve.covers(1):
            found[index] = predict(curve, nodes, tau, draft / passes)
    return found


def condition_nodes(summary: Summary, index: int) -> float | None:
    """Nodes of the trees of a condition: the mean if rows tell, else what its name or the settings say.

    None if neither does, or if its passes were compiled, which the measured costs are not.
    """
    method, drafts = summary.conditions[index].method, summary.result.settings.get("draft_tokens")
    figures = summary.figures(index)
    if method.startswith(COMPILED):
        return None
    if figures.nodes is not None and figures.passes:
        return figures.nodes / figures.passes
    return drafts + 1 if method == "vanilla" and drafts is not None else tree_nodes(method)


def expected_acceptance(
    p: Tensor | np.ndarray,
    q: Tensor | np.ndarray,
    drafts: Sequence[int] = (1, 2, 4, 8),
    draws: int = 64,
    seed: int = 0,
    texts: Sequence[int] | None = None,
) -> tuple[Expected, ...]:
    """Expected acceptance of one step by every rule of `RULES`, for several numbers of drafts.

    All are exact but `coupled` and `residual` of more than one draft, which are Monte Carlo estimates.

    Args:
        p, q: `[n, V]` probabilities of the target and of the drafter at n nodes.
        drafts: numbers of children.
        draws: Monte Carlo draws per node.
        seed: of these.
        texts: for each node which text it is from, for standard errors: nodes of one text are no independent ones. None
            takes each for a text of its own.

    Raises:
        ValueError: no nodes, other shapes, rows that are no probabilities, or fewer than one draft.
    """
    p, q = torch.as_tensor(p).double(), torch.as_tensor(q).double()
    if p.dim() != 2 or not len(p):
        raise ValueError(f"p must be [n, V] with at least one row, not {list(p.shape)}")
    if not drafts or min(drafts) < 1:
        raise ValueError(f"drafts must be numbers from 1 on, not {list(drafts)}")
    bounds = acceptance_bounds(p, q, max(drafts), draws, seed)
    ways = {rule: getattr(bounds, rule) for rule in RULES if rule in AcceptanceBounds.__dataclass_fields__}
    ways["coupled"] = torch.cat([coupled_single(p, q)[:, None], ways["coupled"][:, 1:]], 1)
    ways["residual"] = torch.cat([residual_single(p, q)[:, None], ways["residual"][:, 1:]], 1)
    ways["optimum_iid"] = optimum_iid(p, q, max(drafts))
    groups = torch.arange(len(p)) if texts is None else torch.tensor(texts)
    return tuple(_expected(rule, k, ways[rule][:, k - 1], groups) for rule in RULES for k in drafts)


def residual_single(p: Tensor, q: Tensor) -> Tensor:
    """`[n]` acceptance of one token drawn from q: Σ min(p, q) = 1 − TV(p, q). p and q are `[n, V]`, as everywhere here.

    No rule accepts a token of that distribution more often.
    """
    return torch.minimum(p, q).sum(-1)


def coupled_single(p: Tensor, q: Tensor) -> Tensor:
    """`[n]` P(argmax p/e = argmax q/e), e being one exponential noise (Daliri et al. 2024, arXiv:2408.07978).

    It is Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i). In the order of falling p / q, the maximum is p_j / p_i up to j = i and
    q_j / q_i from there on, so that two cumulative sums replace V² terms.
    """
    odds = torch.where(q > 0, p / torch.where(q > 0, q, 1), torch.where(p > 0, math.inf, 0.0))
    order = odds.argsort(dim=-1, descending=True, stable=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    # Summed from the far end, not as 1 − cumsum: exact where little is left.
    after = torch.cat([q.flip(-1).cumsum(-1).flip(-1)[..., 1:], torch.zeros_like(q[..., :1])], -1)
    both = (p > 0) & (q > 0)
    rates = p.cumsum(-1) / torch.where(both, p, 1) + after / torch.where(both, q, 1)
    return torch.where(both, 1 / rates, 0).sum(-1)


def optimum_iid(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """`[n, drafts]` the most that any rule accepts of 1, 2, … tokens drawn independently from q, by optimal transport.

    It is 1 + min_H [P(H) − Q(H)^k] over sets of tokens H, all k drafts lying in H with probability Q(H)^k (Sun et al.
    2023, arXiv:2310.15141; Hu et al. 2025, arXiv:2502.18779). x − y^k is concave, so that its minimum over all
    (P(H), Q(H)) is at a corner of their convex hull, and the corners are the sets of the tokens with the largest q / p.
    """
    odds = torch.where(p > 0, q / torch.where(p > 0, p, 1), torch.where(q > 0, math.inf, 0.0))
    order = odds.argsort(dim=-1, descending=True, stable=True)
    inside_p, inside_q = p.gather(-1, order).cumsum(-1), q.gather(-1, order).cumsum(-1)
    return torch.stack([1 + (inside_p - inside_q**k).amin(-1).clamp(max=0) for k in range(1, drafts + 1)], -1)


def _expected(rule: str, drafts: int, accepted: Tensor, groups: Tensor) -> Expected:
    """The mean over all nodes and its standard error, by the sums of what each group is off (clustered)."""
    mean = accepted.mean()
    _, places = groups.unique(return_inverse=True)
    count = int(places.max()) + 1
    off = accepted.new_zeros(count).index_add_(0, places.to(accepted.device), accepted - mean)
    error = float(off.square().sum() * count / (count - 1)) ** 0.5 / len(accepted) if count > 1 else None
    return Expected(rule, drafts, float(mean), error)
