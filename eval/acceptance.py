"""The acceptance rules: pure functions on probabilities (ALGORITHMS 2.1-2.3). Each output token has the target's law, whatever the drafter.

Shapes: K drafted tokens, V vocabulary. p[k] is the target's distribution after the prefix and the first k drafts; q[k] the one draft k
was sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Draws(Protocol):
    """Where randomness comes from. Tests enumerate it; decoding draws it."""

    def accept(self, p: float, q: float) -> bool:
        """True with probability min(1, p / q)."""
        ...

    def pick(self, weights: torch.Tensor) -> int:
        """An index with probability proportional to weights [V]."""
        ...


class RandomDraws:
    """Draws from a seeded generator, in float64."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def accept(self, p: float, q: float) -> bool:
        # Multiplied, not divided: no 0/0. Strictly less: u may be exactly 0, and a token of probability 0 must never pass.
        return self._uniform() * q < p

    def pick(self, weights: torch.Tensor) -> int:
        cumulative = weights.double().cumsum(-1)
        drawn = torch.searchsorted(cumulative, self._uniform() * float(cumulative[-1]), right=True)
        # Rounding may land on the end; the last token with weight is the right one then.
        return int(min(int(drawn), int(weights.nonzero()[-1])))


def accept_greedy(best: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """Rule 2.1. best: [K+1] the target's argmax after each prefix. Returns (accepted, extra token)."""
    for k, draft in enumerate(drafts):
        if draft != best[k]:
            return k, best[k]
    return len(drafts), best[len(drafts)]


def accept_delta(p: torch.Tensor, drafts: Sequence[int], draws: Draws) -> tuple[int, int]:
    """Rule 2.3, for drafts chosen deterministically: sample from the target and compare. p: [K+1, V]."""
    for k, draft in enumerate(drafts):
        token = draws.pick(p[k])
        if token != draft:
            return k, token
    return len(drafts), draws.pick(p[len(drafts)])


def accept_sampled(p: torch.Tensor, q: torch.Tensor, drafts: Sequence[int], draws: Draws) -> tuple[int, int]:
    """Rule 2.2, for drafts sampled from q. p: [K+1, V], q: [K, V], q[k] the very tensor draft k was drawn from."""
    for k, draft in enumerate(drafts):
        if not draws.accept(float(p[k, draft]), float(q[k, draft])):
            residual = (p[k] - q[k]).clamp_min(0)
            # All zero only by rounding, where p and q are equal: then p is the law.
            return k, draws.pick(residual if float(residual.sum()) > 0 else p[k])
    return len(drafts), draws.pick(p[len(drafts)])
