"""The textbook step of speculative sampling, in NumPy: the oracle that tests hold the engine against.

It shares no code with the engine, on purpose, and is written to be read next to the paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_EPSILON = 1e-12


def speculative_step_verification(
    draft_tokens: ArrayLike,
    p_probs: ArrayLike,
    q_probs: ArrayLike,
    rng: np.random.Generator | int | None = None,
) -> list[int]:
    """One verification step for a chain of drafted tokens: algorithm 1 of Leviathan et al. 2023 (arXiv:2211.17192).

    Position by position, the token x_i drafted from q_i is accepted with probability

        min(1, p_i(x_i) / q_i(x_i)).

    The first rejection ends the step with a correction drawn from the residual distribution

        norm[p_i − q_i]+,    [z]+ = max(z, 0),    norm[z] = z / Σz.

    If all K tokens are accepted and the target was also evaluated after the last of them, a bonus token is drawn from
    p_{K+1}. Tokens drafted from q then come out distributed exactly as if drawn from p.

    Two guards keep the arithmetic finite: the ratio divides by q + 1e-12, and where rounding leaves a residual without
    mass, argmax p_i is emitted. A token with p ≥ q > 0 is accepted without the ratio, so p = q accepts everything.

    Args:
        draft_tokens: `[K]` drafted ids.
        p_probs: `[K, V]` target distributions at the drafted positions, or `[K + 1, V]` with the one that follows.
        q_probs: `[K, V]` distributions that the tokens were drafted from.
        rng: generator or seed.

    Returns:
        The accepted tokens, then the correction or (given K + 1 rows of p) the bonus token.

    Raises:
        ValueError: shapes that do not fit together, an id outside the vocabulary, a negative or non-finite probability.
    """
    tokens, p, q = _checked(draft_tokens, p_probs, q_probs)
    generator = np.random.default_rng(rng)
    accepted: list[int] = []
    for i, token in enumerate(tokens.tolist()):
        threshold = generator.random()
        surely = p[i, token] >= q[i, token] > 0
        if not surely and threshold >= p[i, token] / (q[i, token] + _EPSILON):
            return [*accepted, _draw(np.maximum(p[i] - q[i], 0.0), p[i], generator)]
        accepted.append(token)
    if len(p) > len(tokens):
        accepted.append(_draw(p[-1], p[-1], generator))
    return accepted


def _draw(weights: NDArray[np.float64], p: NDArray[np.float64], generator: np.random.Generator) -> int:
    """A token drawn in proportion to `weights [V]`, or argmax p if they are all zero."""
    total = weights.sum()
    if total <= 0:
        return int(p.argmax())
    return int(generator.choice(len(weights), p=weights / total))


def _checked(
    draft_tokens: Any, p_probs: Any, q_probs: Any
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    tokens = np.asarray(draft_tokens)
    p, q = np.asarray(p_probs, dtype=np.float64), np.asarray(q_probs, dtype=np.float64)
    if tokens.ndim != 1:
        raise ValueError(f"draft_tokens must be one-dimensional, not of shape {tokens.shape}")
    drafted = len(tokens)
    if drafted and not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"draft_tokens must be integers, not {tokens.dtype}")
    if q.ndim != 2 or len(q) != drafted:
        raise ValueError(f"q_probs must be [K, V] with K = {drafted} drafted tokens, not of shape {q.shape}")
    if p.ndim != 2 or len(p) not in (drafted, drafted + 1):
        raise ValueError(f"p_probs must be [K, V] or [K + 1, V] with K = {drafted} drafts, not of shape {p.shape}")
    if p.shape[1] != q.shape[1]:
        raise ValueError(f"p_probs has a vocabulary of {p.shape[1]}, q_probs one of {q.shape[1]}")
    for i, token in enumerate(tokens.tolist()):
        if not 0 <= token < p.shape[1]:
            raise ValueError(f"draft token {token} at position {i} is outside the vocabulary of {p.shape[1]}")
    for name, probabilities in (("p_probs", p), ("q_probs", q)):
        wrong = ~np.isfinite(probabilities) | (probabilities < 0)
        if wrong.any():
            row = int(wrong.any(1).argmax())
            raise ValueError(f"{name}, row {row}: probabilities must be finite and not negative")
    return tokens.astype(np.int64), p, q
