"""The acceptance rules, on trees; a chain is a tree (ALGORITHMS 2). All but ``accept_typical`` give each output token the target's law,
whatever the drafter.

Shapes: V vocabulary. ``law(node, path)`` is the target's distribution [V] after the prefix and the tokens on the path to the node;
``choose(node, path)`` is the target's own token there (argmax, or drawn from the law).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eval.tree import DraftTree

Law = Callable[[int, Sequence[int]], torch.Tensor]
Choice = Callable[[int, Sequence[int]], int]


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


@dataclass(frozen=True)
class Verdict:
    """What verification takes from a draft tree."""

    path: tuple[int, ...]
    """Node numbers of the accepted drafts, from the root down."""
    extra: int
    """The token emitted after them: bonus where nothing was refused, correction otherwise."""
    refused: bool
    """Whether there were candidates at the last accepted node, and none was taken."""


def accept_compared(tree: DraftTree, choose: Choice) -> Verdict:
    """Rules 2.1, 2.3 and 2.4, for candidates chosen deterministically: take the target's own token and see whether it was proposed."""
    node, path, tokens = 0, list[int](), list[int]()
    while True:
        token = choose(node, tokens)
        child = next((c for c in tree.children[node] if tree.tokens[c - 1] == token), None)
        if child is None:
            return Verdict(tuple(path), token, bool(tree.children[node]))
        node = child
        path.append(node)
        tokens.append(token)


def accept_sampled(tree: DraftTree, law: Law, draws: Draws) -> Verdict:
    """Rules 2.2 (one child a node) and 2.5 (several), for candidates drawn from ``tree.q``."""
    assert tree.q is not None
    node, path, tokens = 0, list[int](), list[int]()
    while True:
        r = law(node, tokens)
        taken = None
        if tree.children[node]:
            taken, r = _try_children(tree, node, r, tree.q[node], draws)
        if taken is None:
            return Verdict(tuple(path), draws.pick(r), bool(tree.children[node]))
        node = taken
        path.append(node)
        tokens.append(tree.tokens[node - 1])


def _try_children(tree: DraftTree, node: int, r: torch.Tensor, s: torch.Tensor, draws: Draws) -> tuple[int | None, torch.Tensor]:
    """The child that is taken, or None and the law of the token that takes its place."""
    for child in tree.children[node]:
        token = tree.tokens[child - 1]
        if draws.accept(float(r[token]), float(s[token])):
            return child, r
        # Both updates use this round's s; the drawing order is the children's order.
        residual = (r - s).clamp_min(0)
        mass = float(residual.sum())
        if mass <= 0:  # only by rounding, where r and s are equal: then r is the law
            return None, r
        r = residual / mass
        if not tree.replacement:
            s = s.clone()
            s[token] = 0
            left = float(s.sum())
            if left <= 0:
                return None, r
            s = s / left
    return None, r


EPSILON, DELTA = 0.09, 0.3


def accept_typical(tree: DraftTree, law: Law, draws: Draws, epsilon: float = EPSILON, delta: float = DELTA) -> Verdict:
    """Rule 2.6 (Medusa, section 3.3.1): NOT lossless. A candidate passes where p(x) > min(epsilon, delta exp(-H(p))).

    Of the longest accepted prefixes the one with the largest log-probability wins; the token after it is drawn from the target.
    """
    best: tuple[int, float, tuple[int, ...], list[int]] = (0, 0.0, (), [])
    open_nodes: list[tuple[int, float, tuple[int, ...], list[int]]] = [(0, 0.0, (), [])]
    while open_nodes:
        node, score, path, tokens = open_nodes.pop()
        if (len(path), score) > (len(best[2]), best[1]):
            best = (node, score, path, tokens)
        if not tree.children[node]:
            continue
        p = law(node, tokens)
        entropy = float(-torch.xlogy(p, p).sum())
        threshold = min(epsilon, delta * float(torch.exp(torch.tensor(-entropy, dtype=torch.float64))))
        for child in tree.children[node]:
            token = tree.tokens[child - 1]
            if float(p[token]) > threshold:
                open_nodes.append((child, score + float(p[token].log()), (*path, child), [*tokens, token]))
    node, _, path, tokens = best
    return Verdict(path, draws.pick(law(node, tokens)), bool(tree.children[node]))
