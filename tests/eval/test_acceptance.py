"""Exactness of the acceptance rules by enumeration of all draws (ALGORITHMS 16.1), and the random draws themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from eval.acceptance import DELTA, EPSILON, RandomDraws, Verdict, accept_compared, accept_sampled, accept_typical
from eval.tree import DraftTree
from tests.tiny import EnumeratedDraws, every_path

V = 5
Run = Callable[[EnumeratedDraws], list[int]]


class Tables:
    """Distributions that depend on the prefix: level k is [V, ..., V, V] with k prefix axes."""

    def __init__(self, seed: int, kind: str = "dense") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.levels = []
        for depth in range(3):
            weights = torch.rand(*[V] * (depth + 1), generator=generator, dtype=torch.float64) ** 3 + 1e-3
            if kind == "zeros":
                kept = torch.rand(weights.shape, generator=generator) < 0.5
                kept[..., int(torch.randint(V, (), generator=generator))] = True
                weights = weights * kept
            elif kind in ("low", "high"):
                weights[..., slice(3, None) if kind == "low" else slice(None, 3)] = 0.0
            self.levels.append(weights / weights.sum(-1, keepdim=True))

    def __call__(self, *prefix: int) -> torch.Tensor:
        return self.levels[len(prefix)][prefix]

    def law(self, node: int, path: Sequence[int]) -> torch.Tensor:
        """As the acceptance rules ask for it."""
        return self(*path)

    def joint(self) -> torch.Tensor:
        """[V, V, V]"""
        first, second, third = self.levels
        return first[:, None, None] * second[:, :, None] * third


def joint_law(p: Tables, run: Run) -> torch.Tensor:
    """Law of the first three tokens, extended by the target where a path gave fewer. run returns 1 to 3 tokens."""
    law = torch.zeros(V, V, V, dtype=torch.float64)
    for tokens, probability in every_path(run):
        assert 1 <= len(tokens) <= 3
        if len(tokens) == 1:
            law[tokens[0]] += probability * p(*tokens)[:, None] * p.levels[2][tokens[0]]
        elif len(tokens) == 2:
            law[tokens[0], tokens[1]] += probability * p(*tokens)
        else:
            law[tuple(tokens)] += probability
    return law


def output(tree: DraftTree, verdict: Verdict) -> list[int]:
    """The tokens a cycle emits; checks that the verdict is a path from the root that ends where it says."""
    node = 0
    for step in verdict.path:
        assert tree.parents[step - 1] == node
        node = step
    assert verdict.refused == bool(tree.children[node])
    return [*(tree.tokens[n - 1] for n in verdict.path), verdict.extra]


def drawn_tree(q: Tables, parents: Sequence[int], draws: EnumeratedDraws, replacement: bool = False) -> DraftTree:
    """A tree of this shape whose siblings are drawn from q in the order of their numbers."""
    tokens: list[int] = []
    prefixes: dict[int, list[int]] = {0: []}
    left: dict[int, torch.Tensor] = {}
    for node, parent in enumerate(parents, start=1):
        weights = left.setdefault(parent, q(*prefixes[parent]).clone())
        token = draws.pick(weights)
        if not replacement:
            weights[token] = 0
        tokens.append(token)
        prefixes[node] = [*prefixes[parent], token]
    return DraftTree(tuple(tokens), tuple(parents), {n: q(*prefixes[n]) for n in set(parents)}, replacement)


def sampled(p: Tables, q: Tables, parents: Sequence[int], replacement: bool = False) -> Run:
    def run(draws: EnumeratedDraws) -> list[int]:
        tree = drawn_tree(q, parents, draws, replacement)
        return output(tree, accept_sampled(tree, p.law, draws))

    return run


def compared(p: Tables, tree: DraftTree) -> Run:
    return lambda draws: output(tree, accept_compared(tree, lambda node, path: draws.pick(p(*path))))


def assert_same_law(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert abs(float(got.sum()) - 1) < 1e-12
    assert float((got.sum(-1) - expected.sum(-1)).abs().max()) < 1e-12
    assert float((got - expected).abs().max()) < 1e-12


KINDS = [
    ("dense", "dense"),
    ("dense", "zeros"),
    ("zeros", "dense"),
    ("zeros", "zeros"),
    ("low", "high"),
    ("low", "dense"),
    ("dense", "high"),
]
CHAINS = [(), (0,), (0, 1)]

# --- candidates drawn from q: rules 2.2 and 2.5 ---


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(("p_kind", "q_kind"), KINDS)
def test_sampled_chains_have_the_law_of_the_target(p_kind: str, q_kind: str, length: int) -> None:
    for seed in range(2):
        p, q = Tables(seed, p_kind), Tables(seed + 100, q_kind)
        assert_same_law(joint_law(p, sampled(p, q, CHAINS[length])), p.joint())


@pytest.mark.parametrize(
    ("parents", "p_kind", "q_kind"),
    [
        ((0, 0), "dense", "dense"),
        ((0, 0), "zeros", "dense"),
        ((0, 0, 0), "dense", "dense"),
        ((0, 0), "dense", "high"),  # the second child exhausts q
        ((0, 0, 0), "low", "dense"),
        ((0, 0, 1, 1), "dense", "high"),
        ((0, 0, 2, 2), "zeros", "dense"),
        ((0, 1, 0, 1), "dense", "high"),  # siblings whose numbers are not neighbours
        ((0, 0, 1, 2), "dense", "dense"),
    ],
)
def test_sampled_trees_have_the_law_of_the_target(parents: tuple[int, ...], p_kind: str, q_kind: str) -> None:
    p, q = Tables(20, p_kind), Tables(21, q_kind)
    run = sampled(p, q, parents)
    assert_same_law(joint_law(p, run), p.joint())
    deepest = 1 + max(DraftTree((0,) * len(parents), parents).depths)
    assert {len(tokens) for tokens, _ in every_path(run)} == set(range(1, deepest + 1))


@pytest.mark.parametrize(("parents", "kind"), [((0, 0), "dense"), ((0, 0, 0), "dense"), ((0, 0, 2, 2), "high")])
def test_siblings_drawn_with_replacement_have_the_law_of_the_target(parents: tuple[int, ...], kind: str) -> None:
    p, q = Tables(22), Tables(23, kind)
    assert_same_law(joint_law(p, sampled(p, q, parents, replacement=True)), p.joint())


def test_more_children_are_accepted_more_often() -> None:
    """And one child with 1 - TV(p, q)."""
    p, q = Tables(4), Tables(5)
    rates = [sum(chance for tokens, chance in every_path(sampled(p, q, (0,) * n)) if len(tokens) == 2) for n in (1, 2, 3)]
    assert rates[0] == pytest.approx(float(torch.minimum(p(), q()).sum()), abs=1e-12)
    assert rates[0] < rates[1] < rates[2]


def test_q_equal_to_p_accepts_everything() -> None:
    p = Tables(3)
    assert {len(tokens) for tokens, _ in every_path(sampled(p, p, CHAINS[2]))} == {3}
    assert_same_law(joint_law(p, sampled(p, p, CHAINS[2])), p.joint())


def test_disjoint_supports_never_accept() -> None:
    p, q = Tables(6, "low"), Tables(7, "high")
    for parents in (CHAINS[2], (0, 0)):
        assert {len(tokens) for tokens, _ in every_path(sampled(p, q, parents))} == {1}


def always(tree: DraftTree, law: Any, draws: Any) -> Verdict:
    """Takes the first child whatever it is."""
    return Verdict((1,), draws.pick(law(1, [tree.tokens[0]])), False)


def no_residual(tree: DraftTree, law: Any, draws: Any) -> Verdict:
    """Draws from p where it should from what is left of it."""
    verdict = accept_sampled(tree, law, draws)
    return verdict if verdict.path else Verdict((), draws.pick(law(0, [])), True)


def other_replacement(tree: DraftTree, law: Any, draws: Any) -> Verdict:
    return accept_sampled(DraftTree(tree.tokens, tree.parents, tree.q, not tree.replacement), law, draws)


def other_order(tree: DraftTree, law: Any, draws: Any) -> Verdict:
    """Tries the children from the last to the first."""
    verdict = accept_sampled(DraftTree(tree.tokens[::-1], tree.parents, tree.q, tree.replacement), law, draws)
    return Verdict(tuple(len(tree.tokens) + 1 - n for n in verdict.path), verdict.extra, verdict.refused)


@pytest.mark.parametrize(
    ("rule", "parents", "replacement"),
    [
        (always, (0,), False),
        (always, (0, 0), False),
        (no_residual, (0,), False),
        (no_residual, (0, 0), False),
        (other_replacement, (0, 0), False),
        (other_order, (0, 0), False),
    ],
)
def test_wrong_rules_are_seen_by_the_enumeration(rule: Callable[..., Verdict], parents: tuple[int, ...], replacement: bool) -> None:
    p, q = Tables(10), Tables(11)
    assert_same_law(joint_law(p, sampled(p, q, parents, replacement=replacement)), p.joint())

    def run(draws: EnumeratedDraws) -> list[int]:
        tree = drawn_tree(q, parents, draws, replacement)
        verdict = rule(tree, p.law, draws)
        return [*(tree.tokens[n - 1] for n in verdict.path), verdict.extra]

    assert float((joint_law(p, run) - p.joint()).abs().sum()) > 1e-2


class Refuse(EnumeratedDraws):
    """Accepts nothing, as rounding at p = q might."""

    asked = 0

    def accept(self, p: float, q: float) -> bool:
        self.asked += 1
        return False


def test_a_residual_that_vanishes_by_rounding_falls_back_to_p() -> None:
    p = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    for tree in (DraftTree.chain([0], [p]), DraftTree((0, 1), (0, 0), {0: p})):
        for script in ([0], [1]):
            draws = Refuse(script)
            assert accept_sampled(tree, lambda node, path: p, draws) == Verdict((), script[0], True)
            assert draws.probability == p[script[0]] and draws.asked == 1


def test_an_exhausted_q_ends_the_trying_and_keeps_the_residual() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    only = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    draws = Refuse([2])
    assert accept_sampled(DraftTree((0, 1), (0, 0), {0: only}), lambda node, path: p, draws) == Verdict((), 2, True)
    assert draws.asked == 1 and draws.probability == pytest.approx(0.4, abs=1e-12)


# --- candidates chosen deterministically: rules 2.1, 2.3 and 2.4 ---


@pytest.mark.parametrize("kind", ["dense", "zeros"])
def test_compared_chains_have_the_law_of_the_target(kind: str) -> None:
    p = Tables(8, kind)
    for drafts in [(), *((d,) for d in range(V)), *itertools.product(range(V), repeat=2)]:
        assert_same_law(joint_law(p, compared(p, DraftTree.chain(drafts))), p.joint())


TREES = [
    ((1, 3), (0, 0)),
    ((4, 0, 2), (0, 0, 0)),
    ((2, 1, 2, 0), (0, 0, 1, 1)),
    ((0, 3, 3, 1, 4), (0, 0, 1, 2, 2)),
    ((0, 3, 4, 1, 2), (0, 1, 0, 3, 1)),
    ((0, 1, 2, 3, 4), (0, 0, 0, 0, 0)),
]


@pytest.mark.parametrize("kind", ["dense", "zeros"])
@pytest.mark.parametrize(("tokens", "parents"), TREES)
def test_compared_trees_have_the_law_of_the_target(tokens: tuple[int, ...], parents: tuple[int, ...], kind: str) -> None:
    p = Tables(9, kind)
    tree = DraftTree(tokens, parents)
    assert_same_law(joint_law(p, compared(p, tree)), p.joint())
    descends = sum(chance for out, chance in every_path(compared(p, tree)) if len(out) > 1)
    assert descends == pytest.approx(float(sum(p()[tokens[c - 1]] for c in tree.children[0])), abs=1e-12)


def outputs(run: Callable[[EnumeratedDraws], Any]) -> dict[Any, float]:
    law: dict[Any, float] = {}
    for out, chance in every_path(run):
        law[tuple(out)] = law.get(tuple(out), 0.0) + chance
    return law


def test_the_order_of_the_children_does_not_matter() -> None:
    """And comparing is the sequential form: accept a child with p(x), else set p(x) = 0, renormalise, go on."""
    p = Tables(12)

    def sequential(tree: DraftTree, draws: EnumeratedDraws) -> list[int]:
        node, tokens = 0, []
        while True:
            r, taken = p(*tokens).clone(), None
            for child in tree.children[node]:
                token = tree.tokens[child - 1]
                if draws.accept(float(r[token]), 1.0):
                    taken = child
                    break
                r[token] = 0
                r = r / r.sum()
            if taken is None:
                return [*tokens, draws.pick(r)]
            node = taken
            tokens.append(tree.tokens[node - 1])

    for first, second, third in itertools.permutations((0, 2, 3)):
        below = {0: 1 + (first, second, third).index(0), 3: 1 + (first, second, third).index(3)}
        tree = DraftTree((first, second, third, 4, 1), (0, 0, 0, below[0], below[3]))
        found = outputs(compared(p, tree))
        if (first, second, third) == (0, 2, 3):
            expected = found
        one_by_one = outputs(lambda draws, tree=tree: sequential(tree, draws))
        assert found.keys() == expected.keys() == one_by_one.keys()
        for out, chance in expected.items():
            assert found[out] == pytest.approx(chance, abs=1e-12) and one_by_one[out] == pytest.approx(chance, abs=1e-12)


def test_greedy_takes_the_matching_prefix() -> None:
    best = [3, 1, 4, 1]
    for drafts in itertools.product(range(V), repeat=3):
        matching = next((k for k in range(3) if drafts[k] != best[k]), 3)
        verdict = accept_compared(DraftTree.chain(drafts), lambda node, path: best[node])
        assert verdict == Verdict(tuple(range(1, matching + 1)), best[matching], matching < 3)
    assert accept_compared(DraftTree(), lambda node, path: 2) == Verdict((), 2, False)


# --- typical acceptance: rule 2.6, not lossless ---


def test_typical_acceptance_by_hand() -> None:
    flat = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04], dtype=torch.float64)  # exp(-H) = 0.2907: the threshold is 0.0872
    sharp = torch.tensor([0.9, 0.08, 0.02, 0.0, 0.0], dtype=torch.float64)  # exp(-H) = 0.687: the threshold is epsilon, 0.09
    uniform = torch.full((V,), 0.2, dtype=torch.float64)  # exp(-H) = 0.2: the threshold is 0.06
    assert (EPSILON, DELTA) == (0.09, 0.3)

    def path(tree: DraftTree, *laws: torch.Tensor) -> Verdict:
        return accept_typical(tree, lambda node, tokens: laws[min(len(tokens), len(laws) - 1)], EnumeratedDraws([4]))

    for p, passing in ((flat, {0, 1, 2}), (sharp, {0}), (uniform, {0, 1, 2, 3, 4})):
        for token in range(V):
            assert (path(DraftTree.chain([token]), p, uniform).path == (1,)) == (token in passing), (p, token)
    # Of two children that pass the likelier wins; a deeper path wins over it; what hangs below a refused child does not count.
    assert path(DraftTree((1, 0, 2), (0, 0, 0)), flat, uniform) == Verdict((2,), 4, False)
    assert path(DraftTree((1, 0, 2, 3), (0, 0, 0, 3)), flat, uniform) == Verdict((3, 4), 4, False)
    assert path(DraftTree((3, 0, 1, 1), (0, 0, 1, 1)), flat, uniform) == Verdict((2,), 4, False)
    # Among equally long ones the sum of log p decides, not the first step: 0.3 * 0.9 > 0.5 * 0.2.
    split = DraftTree((0, 1, 0, 0), (0, 0, 1, 2))
    laws = {(): flat, (0,): uniform, (1,): sharp}
    assert accept_typical(split, lambda node, tokens: laws.get(tuple(tokens), uniform), EnumeratedDraws([4])).path == (2, 4)
    assert path(DraftTree.chain([3]), flat) == Verdict((), 4, True)


def test_typical_acceptance_has_not_the_law_of_the_target() -> None:
    p = Tables(13)
    tree = DraftTree((int(p().argmax()),), (0,))
    law = joint_law(p, lambda draws: output(tree, accept_typical(tree, p.law, draws)))
    assert float((law - p.joint()).abs().sum()) > 0.1


# --- the random draws ---


def test_a_token_of_probability_zero_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = RandomDraws(0)
    monkeypatch.setattr(draws, "_uniform", lambda: 0.0)
    assert not draws.accept(0.0, 0.5)
    assert not draws.accept(0.0, 0.0)
    assert draws.accept(1e-30, 1.0)


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.6), (0.25, 1.0), (0.9, 0.3), (0.5, 0.5)])
def test_accept_passes_min_one_p_over_q_of_the_draws(p: float, q: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = RandomDraws(0)
    grid = iter((i + 0.5) / 1000 for i in range(1000))
    monkeypatch.setattr(draws, "_uniform", lambda: next(grid))
    assert sum(draws.accept(p, q) for _ in range(1000)) == round(1000 * min(1.0, p / q))


@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 0.999999999, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("weights", [[0.0, 0.0, 1.0, 0.0, 3.0, 0.0], [0.0, 0.1, 0.0], [1.0, 0.0], [0.0, 0.0, 0.3, 0.3, 0.3, 0.0]])
def test_pick_never_picks_weight_zero(weights: list[float], u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = RandomDraws(0)
    monkeypatch.setattr(draws, "_uniform", lambda: u)
    for dtype in (torch.float32, torch.float64):
        assert weights[draws.pick(torch.tensor(weights, dtype=dtype))] > 0


def test_pick_at_the_top_of_an_unnormalised_sum_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = RandomDraws(0)
    monkeypatch.setattr(draws, "_uniform", lambda: 1.0)  # what rounding of the product could give
    assert draws.pick(torch.tensor([0.1, 0.2, 0.7, 0.0, 0.0])) == 2


def test_pick_is_proportional_to_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = RandomDraws(0)
    grid = iter((i + 0.5) / 1000 for i in range(1000))
    monkeypatch.setattr(draws, "_uniform", lambda: next(grid))
    counts = [0] * 4
    for _ in range(1000):
        counts[draws.pick(torch.tensor([2.0, 0.0, 5.0, 3.0]))] += 1
    assert counts == [200, 0, 500, 300]


def test_seed_decides_the_draws() -> None:
    def stream(seed: int) -> list[float]:
        draws, weights = RandomDraws(seed), torch.ones(1000)
        return [*(draws.pick(weights) for _ in range(20)), *(draws.accept(0.5, 1.0) for _ in range(20))]

    assert stream(7) == stream(7)
    assert stream(7) != stream(8)
