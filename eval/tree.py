"""Draft trees: what a drafter proposes, and how trees are chosen (ALGORITHMS 3).

Node 0 is the pending token; draft nodes are 1..M in topological order. A chain is the tree whose node i has parent i - 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class DraftTree:
    """Candidates after the pending token, and how each was proposed."""

    tokens: tuple[int, ...] = ()
    """[M] target ids of nodes 1..M; none makes the cycle plain decoding."""
    parents: tuple[int, ...] = ()
    """[M] node number of each node's parent, less than its own."""
    q: Mapping[int, torch.Tensor] | None = None
    """Node -> [V], the distribution its children were drawn from, in the order of their numbers; None: chosen deterministically."""
    replacement: bool = False
    """Whether siblings were drawn with replacement."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) and all(0 <= p <= i for i, p in enumerate(self.parents))

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Sequence[torch.Tensor] | None = None) -> DraftTree:
        """One candidate after the other; q[k]: [V] is the distribution tokens[k] was drawn from."""
        return cls(tuple(tokens), tuple(range(len(tokens))), None if q is None else dict(enumerate(q)))

    @property
    def size(self) -> int:
        """Nodes, the pending token included."""
        return len(self.tokens) + 1

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.tokens)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[M + 1] distance from the pending token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[M + 1] node numbers of each node's children, in order."""
        children: list[list[int]] = [[] for _ in range(self.size)]
        for node, parent in enumerate(self.parents, start=1):
            children[parent].append(node)
        return tuple(tuple(c) for c in children)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """[M + 1, M + 1] bool: [i, j] iff j is i or an ancestor of i."""
        if self.is_chain:
            return torch.ones(self.size, self.size, dtype=torch.bool).tril()
        matrix = torch.eye(self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parents, start=1):
            matrix[node] |= matrix[parent]
        return matrix

    def cut(self, depth: int) -> DraftTree:
        """The nodes down to ``depth``."""
        if max(self.depths) <= depth:
            return self
        kept = [0] + [n for n in range(1, self.size) if self.depths[n] <= depth]
        number = {node: new for new, node in enumerate(kept)}
        q = None if self.q is None else {number[n]: d for n, d in self.q.items() if n in number and self.depths[n] < depth}
        tokens = tuple(self.tokens[n - 1] for n in kept[1:])
        return DraftTree(tokens, tuple(number[self.parents[n - 1]] for n in kept[1:]), q, self.replacement)


def best_first(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], count: int) -> DraftTree:
    """The ``count`` best of many candidate nodes (EAGLE-2, ALGORITHMS 3.4).

    Candidates are numbered from 1 in topological order; a score never exceeds the parent's. Equal scores go to the smaller depth, then
    the smaller number, so that a child of probability 1 never displaces its parent and the chosen set is connected.

    Args:
        scores: sum of log confidences from the root.
    """
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    order = sorted(range(1, len(tokens) + 1), key=lambda n: (-scores[n - 1], depths[n], n))[:count]
    number = {0: 0} | {node: new for new, node in enumerate(sorted(order), start=1)}
    kept = sorted(order)
    assert all(parents[n - 1] in number for n in kept), "a node was chosen without its parent: its score exceeds the parent's"
    return DraftTree(tuple(tokens[n - 1] for n in kept), tuple(number[parents[n - 1]] for n in kept))


Ranks = tuple[int, ...]


def static_tree(accuracies: Sequence[Sequence[float]], nodes: int, children: int = 10) -> tuple[Ranks, ...]:
    """The tree of largest expected accepted length (Medusa; ALGORITHMS 3.3).

    Args:
        accuracies: [depths][ranks]; how often the token of that rank at that depth is the true one, depths taken as independent.
        nodes: budget, the root included.
        children: most children of a node.

    Returns:
        The nodes as paths of ranks (0 = most likely), topologically ordered; the root is left out.
    """
    # A path's value is the product of its accuracies. Parents and better-ranked siblings are never worth less (ranks are made to fall),
    # so taking the best of what is open is optimal.
    falling = [_falling(a[:children]) for a in accuracies]
    open_nodes: list[tuple[float, int, Ranks]] = [(-falling[0][0], 1, (0,))] if falling and falling[0] else []
    chosen: list[Ranks] = []
    while open_nodes and len(chosen) < nodes - 1:
        value, _, path = heapq.heappop(open_nodes)
        chosen.append(path)
        depth, rank = len(path), path[-1]
        here = falling[depth - 1]
        if rank + 1 < len(here):
            above = value / here[rank] if here[rank] else 0.0
            heapq.heappush(open_nodes, (above * here[rank + 1], depth, (*path[:-1], rank + 1)))
        if depth < len(falling) and falling[depth]:
            heapq.heappush(open_nodes, (value * falling[depth][0], depth + 1, (*path, 0)))
    return tuple(sorted(chosen, key=lambda p: (len(p), p)))


def _falling(values: Sequence[float]) -> list[float]:
    """Values that never rise with the rank (measured ones may, by noise)."""
    result: list[float] = []
    for value in values:
        result.append(min(value, result[-1]) if result else value)
    return result


def expected_accepted(paths: Sequence[Ranks], accuracies: Sequence[Sequence[float]]) -> float:
    """Sum of the nodes' values: expected accepted draft tokens a cycle."""
    total = 0.0
    for path in paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= accuracies[depth][rank]
        total += value
    return total


def parents_of(paths: Sequence[Ranks]) -> tuple[int, ...]:
    """Node numbers of the parents of rank paths in topological order."""
    number: dict[Ranks, int] = {(): 0} | {path: i for i, path in enumerate(paths, start=1)}
    return tuple(number[path[:-1]] for path in paths)


def tree_of_marginals(log_q: torch.Tensor, ids: torch.Tensor, count: int) -> DraftTree:
    """The ``count`` most probable nodes where depths are independent: product of marginals (Medusa, P-EAGLE; ALGORITHMS 7.3, 10.3).

    Args:
        log_q: [K, R] log-probabilities of the best R tokens of each depth, falling.
        ids: [K, R] their target ids.
    """
    depths, ranks = log_q.shape
    values, tokens = log_q.double().tolist(), ids.tolist()
    open_nodes: list[tuple[float, int, Ranks, int]] = [(-values[0][0], 1, (0,), 0)]
    chosen: list[tuple[int, int]] = []  # (token, parent number)
    while open_nodes and len(chosen) < count:
        score, depth, path, parent = heapq.heappop(open_nodes)
        rank = path[-1]
        chosen.append((tokens[depth - 1][rank], parent))
        number = len(chosen)
        if rank + 1 < ranks:
            sibling = score + values[depth - 1][rank] - values[depth - 1][rank + 1]
            heapq.heappush(open_nodes, (sibling, depth, (*path[:-1], rank + 1), parent))
        if depth < depths:
            heapq.heappush(open_nodes, (score - values[depth][0], depth + 1, (*path, 0), number))
    return DraftTree(tuple(t for t, _ in chosen), tuple(p for _, p in chosen))
