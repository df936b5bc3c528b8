"""Draft trees and how they are chosen, against brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from eval.tree import DraftTree, Ranks, best_first, expected_accepted, parents_of, static_tree, tree_of_marginals


def random_parents(rng: random.Random, nodes: int) -> tuple[int, ...]:
    return tuple(rng.randint(0, i) for i in range(nodes))


def way_up(tree: DraftTree, node: int) -> list[int]:
    """The node and its ancestors, the root last."""
    way = [node]
    while way[-1]:
        way.append(tree.parents[way[-1] - 1])
    return way


@pytest.mark.parametrize("seed", range(20))
def test_depths_children_and_ancestors(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(0, 12)
    tree = DraftTree(tuple(rng.randrange(9) for _ in range(nodes)), random_parents(rng, nodes))
    assert tree.size == nodes + 1 == tree.ancestors.shape[0] == tree.ancestors.shape[1]
    for node in range(tree.size):
        way = way_up(tree, node)
        assert tree.depths[node] == len(way) - 1
        assert tree.ancestors[node].nonzero().flatten().tolist() == sorted(way)
        assert list(tree.children[node]) == [c for c in range(1, tree.size) if tree.parents[c - 1] == node]


@pytest.mark.parametrize("seed", range(20))
def test_cut(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(1, 12)
    parents = random_parents(rng, nodes)
    q = {n: torch.tensor([float(n)]) for n in {0, *parents}}
    tree = DraftTree(tuple(range(100, 100 + nodes)), parents, q, replacement=bool(seed % 2))
    assert tree.cut(max(tree.depths)) is tree
    for depth in range(max(tree.depths) + 1):
        cut = tree.cut(depth)
        kept = [n for n in range(1, tree.size) if tree.depths[n] <= depth]
        assert cut.tokens == tuple(tree.tokens[n - 1] for n in kept) and cut.replacement == tree.replacement

        def path(t: DraftTree, node: int) -> list[int]:
            return [t.tokens[n - 1] for n in way_up(t, node) if n]

        assert [path(cut, n) for n in range(1, cut.size)] == [path(tree, n) for n in kept]
        # What is left of q says of every node with children what it said before.
        assert cut.q is not None
        for new, old in enumerate([0, *kept]):
            if cut.children[new]:
                assert cut.q[new] is q[old]
        assert all(cut.children[n] for n in cut.q)


def test_chain() -> None:
    chain = DraftTree.chain([7, 8, 9])
    assert (chain.tokens, chain.parents, chain.depths, chain.q) == ((7, 8, 9), (0, 1, 2), (0, 1, 2, 3), None)
    assert chain.is_chain and torch.equal(chain.ancestors, torch.ones(4, 4).tril().bool())
    q = [torch.tensor([float(k)]) for k in range(3)]
    drawn = DraftTree.chain([7, 8, 9], q)
    assert drawn.q == dict(enumerate(q))
    cut = drawn.cut(2)
    assert cut.tokens == (7, 8) and cut.q == {0: q[0], 1: q[1]} and cut.is_chain
    assert drawn.cut(0).size == 1 and not drawn.cut(0).q
    empty = DraftTree()
    assert empty.size == 1 and empty.is_chain and empty.depths == (0,) and empty.cut(0) is empty and empty.ancestors.tolist() == [[True]]
    assert not DraftTree((1, 2), (0, 0)).is_chain


@pytest.mark.parametrize(("tokens", "parents"), [((1,), ()), ((1,), (1,)), ((1, 2), (0, 2)), ((1,), (-1,))])
def test_a_parent_comes_before_its_children(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        DraftTree(tokens, parents)


# --- dynamic trees ---


def closed_subsets(parents: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """Every choice of ``count`` nodes that holds the parents of its nodes."""
    for chosen in itertools.combinations(range(1, len(parents) + 1), count):
        if all(parents[n - 1] in (0, *chosen) for n in chosen):
            yield chosen


@pytest.mark.parametrize("seed", range(15))
def test_best_first_is_the_connected_choice_of_most_confidence(seed: int) -> None:
    rng = random.Random(seed)
    parents = random_parents(rng, 9)
    scores: list[float] = []
    for parent in parents:
        own = math.log(rng.choice([1.0, 1.0, 0.5, 0.25, rng.random()]))  # ties between parents, children and strangers
        scores.append(own + (scores[parent - 1] if parent else 0.0))
    tokens = list(range(50, 59))
    for count in (1, 3, 5, 9, 12):
        tree = best_first(tokens, parents, scores, count)
        kept = [tokens.index(t) + 1 for t in tree.tokens]
        assert kept == sorted(kept) and len(kept) == min(count, 9)
        assert [(0, *kept)[p] for p in tree.parents] == [parents[n - 1] for n in kept]
        best = max(sum(math.exp(scores[n - 1]) for n in chosen) for chosen in closed_subsets(parents, len(kept)))
        assert sum(math.exp(scores[n - 1]) for n in kept) == pytest.approx(best, abs=1e-12)


def test_a_child_of_probability_one_keeps_its_parent() -> None:
    # Nodes 1 and 2 at depth 1; below node 2 a chain of certain tokens with lower and equal scores; node 1 is as good as all of them.
    parents, scores = (0, 0, 2, 3, 1), [-1.0, -1.0, -1.0, -1.0, -1.0]
    kept = [best_first((1, 2, 3, 4, 5), parents, scores, count).tokens for count in range(1, 6)]
    assert kept == [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 5), (1, 2, 3, 4, 5)]  # depth first decides, then the number


def test_a_score_above_the_parents_is_seen() -> None:
    with pytest.raises(AssertionError, match="without its parent"):
        best_first((1, 2), (0, 1), (-2.0, -1.0), 1)


# --- static trees ---


def all_paths(depths: int, ranks: int) -> list[Ranks]:
    return [p for d in range(1, depths + 1) for p in itertools.product(range(ranks), repeat=d)]


def best_value(accuracies: Sequence[Sequence[float]], count: int) -> float:
    """Largest value of any connected set of ``count`` nodes; by growing every set node by node."""
    paths = all_paths(len(accuracies), len(accuracies[0]))
    sets: set[frozenset[Ranks]] = {frozenset()}
    for _ in range(count):
        sets = {s | {p} for s in sets for p in paths if p not in s and (len(p) == 1 or p[:-1] in s)}
    return max(expected_accepted(sorted(s), accuracies) for s in sets)


@pytest.mark.parametrize("seed", range(4))
def test_static_tree_is_the_tree_of_largest_expected_length(seed: int) -> None:
    rng = random.Random(seed)
    accuracies = [sorted((rng.random() / 2 for _ in range(3)), reverse=True) for _ in range(2 + seed % 2)]
    for budget in range(2, 7):
        paths = static_tree(accuracies, budget)
        assert len(paths) == budget - 1 and list(paths) == sorted(paths, key=lambda p: (len(p), p))
        assert expected_accepted(paths, accuracies) == pytest.approx(best_value(accuracies, budget - 1), abs=1e-12)
        parents = parents_of(paths)
        for number, path in enumerate(paths, start=1):
            parent = parents[number - 1]
            assert parent < number and (paths[parent - 1] if parent else ()) == path[:-1]


def test_expected_accepted_by_hand() -> None:
    accuracies = [[0.5, 0.2], [0.4, 0.1]]
    assert expected_accepted([(0,), (1,), (0, 0), (1, 1)], accuracies) == pytest.approx(0.5 + 0.2 + 0.2 + 0.02)
    assert expected_accepted([], accuracies) == 0


def test_static_tree_limits() -> None:
    accuracies = [[0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2]]
    assert static_tree(accuracies, 1) == () and static_tree([], 9) == ()
    assert set(static_tree(accuracies, 100)) == set(all_paths(2, 4))  # no more than there are
    assert set(static_tree(accuracies, 100, children=2)) == set(all_paths(2, 2))
    assert static_tree(accuracies, 3, children=1) == ((0,), (0, 0))
    # Measured accuracies may rise with the rank, by noise, or be 0; a node still comes after its better-ranked siblings.
    for noisy in ([[0.3, 0.5, 0.1], [0.2, 0.0, 0.4]], [[0.0, 0.0], [0.0, 0.0]]):
        for budget in range(2, 14):
            paths = set(static_tree(noisy, budget))
            assert len(paths) == min(budget - 1, len(all_paths(2, len(noisy[0]))))
            assert all(len(p) == 1 or p[:-1] in paths for p in paths)
            assert all(not p[-1] or (*p[:-1], p[-1] - 1) in paths for p in paths)


# --- trees of marginals ---


@pytest.mark.parametrize("seed", range(8))
def test_tree_of_marginals_is_the_top_of_all_products(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    depths, ranks = 1 + seed % 3, 3
    log_q = torch.log_softmax(2 * torch.randn(depths, 8, generator=generator), -1)
    log_q, ids = log_q.topk(ranks)
    products = sorted((sum(float(log_q[d, r]) for d, r in enumerate(path)) for path in all_paths(depths, ranks)), reverse=True)
    for count in (1, 2, 5, 11, 60):
        tree = tree_of_marginals(log_q, ids, count)
        assert len(tree.tokens) == min(count, len(products))
        found, seen = [], set()
        for node in range(1, tree.size):
            path = [tree.tokens[n - 1] for n in way_up(tree, node)[-2::-1]]
            rank = tuple(ids[d].tolist().index(t) for d, t in enumerate(path))
            seen.add(rank)
            found.append(sum(float(log_q[d, r]) for d, r in enumerate(rank)))
        assert len(seen) == len(found)
        assert sorted(found, reverse=True) == pytest.approx(products[: len(found)], abs=1e-6)


def test_tree_of_marginals_keeps_the_parent_of_a_certain_child() -> None:
    log_q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log().clamp_min(-50)
    assert tree_of_marginals(log_q, torch.tensor([[3, 4], [5, 6]]), 1).tokens in ((3,), (4,))
    two = tree_of_marginals(log_q, torch.tensor([[3, 4], [5, 6]]), 3)
    assert (sorted(two.tokens), two.depths[1:]) == ([3, 4, 5], (1, 1, 2))
