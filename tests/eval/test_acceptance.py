"""Exactness of the acceptance rules by enumeration of all draws (ALGORITHMS 16.1), and the random draws themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from eval.acceptance import Draws, RandomDraws, accept_delta, accept_greedy, accept_sampled

V = 5


class EnumeratedDraws:
    """Replays a script of choices; where the script ends it takes the first possible one. Keeps the probability of the path."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.path: list[tuple[int, int]] = []
        self.probability = 1.0

    def _choose(self, chances: list[float]) -> int:
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        at = len(self.path)
        choice = self.script[at] if at < len(self.script) else 0
        self.path.append((choice, len(possible)))
        self.probability *= chances[possible[choice]]
        return possible[choice]

    def accept(self, p: float, q: float) -> bool:
        assert q > 0, "a draft that q cannot give was put before the rule"
        passes = min(1.0, p / q)
        return self._choose([passes, 1 - passes]) == 0

    def pick(self, weights: torch.Tensor) -> int:
        assert float(weights.min()) >= 0 and float(weights.sum()) > 0
        return self._choose((weights / weights.sum()).tolist())


def every_path(run: Callable[[Draws], list[int]]) -> Iterator[tuple[list[int], float]]:
    """(result, probability) of every way the draws can fall out, depth first."""
    script: list[int] = []
    while True:
        draws = EnumeratedDraws(script)
        yield run(draws), draws.probability
        path = draws.path
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        script = [choice for choice, _ in path[:-1]] + [path[-1][0] + 1]


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

    def joint(self) -> torch.Tensor:
        """[V, V, V]"""
        first, second, third = self.levels
        return first[:, None, None] * second[:, :, None] * third


def joint_law(p: Tables, run: Callable[[Draws], list[int]]) -> torch.Tensor:
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


def speculate_sampled(
    p: Tables, q: Tables, length: int, rule: Callable[..., tuple[int, int]] = accept_sampled
) -> Callable[[Draws], list[int]]:
    def run(draws: Draws) -> list[int]:
        drafts: list[int] = []
        proposed = []
        for _ in range(length):
            proposed.append(q(*drafts))
            drafts.append(draws.pick(proposed[-1]))
        target = torch.stack([p(*drafts[:k]) for k in range(length + 1)])
        accepted, extra = rule(target, torch.stack(proposed), drafts, draws)
        return [*drafts[:accepted], extra]

    return run


def speculate_delta(p: Tables, drafts: tuple[int, ...]) -> Callable[[Draws], list[int]]:
    def run(draws: Draws) -> list[int]:
        target = torch.stack([p(*drafts[:k]) for k in range(len(drafts) + 1)])
        accepted, extra = accept_delta(target, drafts, draws)
        return [*drafts[:accepted], extra]

    return run


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


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(("p_kind", "q_kind"), KINDS)
def test_sampled_rule_has_the_law_of_the_target(p_kind: str, q_kind: str, length: int) -> None:
    for seed in range(2):
        p, q = Tables(seed, p_kind), Tables(seed + 100, q_kind)
        assert_same_law(joint_law(p, speculate_sampled(p, q, length)), p.joint())


def test_sampled_rule_with_q_equal_to_p_accepts_everything() -> None:
    p = Tables(3)
    paths = list(every_path(speculate_sampled(p, p, 2)))
    assert {len(tokens) for tokens, _ in paths} == {3}
    assert_same_law(joint_law(p, speculate_sampled(p, p, 2)), p.joint())


def test_sampled_rule_accepts_with_one_minus_total_variation() -> None:
    p, q = Tables(4), Tables(5)
    rate = sum(chance for tokens, chance in every_path(speculate_sampled(p, q, 1)) if len(tokens) == 2)
    assert rate == pytest.approx(float(torch.minimum(p(), q()).sum()), abs=1e-12)


def test_disjoint_supports_never_accept() -> None:
    p, q = Tables(6, "low"), Tables(7, "high")
    assert {len(tokens) for tokens, _ in every_path(speculate_sampled(p, q, 2))} == {1}


def test_residual_that_vanishes_by_rounding_falls_back_to_p() -> None:
    class Refuse(EnumeratedDraws):
        def accept(self, p: float, q: float) -> bool:
            return False

    p = torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert accept_sampled(p, p[:1], [0], Refuse([])) == (0, 0)
    assert accept_sampled(p, p[:1], [0], Refuse([1])) == (0, 1)


@pytest.mark.parametrize("kind", ["dense", "zeros"])
def test_delta_rule_has_the_law_of_the_target(kind: str) -> None:
    p = Tables(8, kind)
    chains = [(), *((d,) for d in range(V)), *itertools.product(range(V), repeat=2)]
    for drafts in chains:
        assert_same_law(joint_law(p, speculate_delta(p, drafts)), p.joint())


def test_delta_rule_accepts_with_the_probability_of_the_draft() -> None:
    p = Tables(9)
    for draft in range(V):
        rate = sum(chance for tokens, chance in every_path(speculate_delta(p, (draft,))) if len(tokens) == 2)
        assert rate == pytest.approx(float(p()[draft]), abs=1e-12)


def test_wrong_rules_are_seen_by_the_enumeration() -> None:
    p, q = Tables(10), Tables(11)

    def always(p: torch.Tensor, q: torch.Tensor, drafts: list[int], draws: Draws) -> tuple[int, int]:
        return len(drafts), draws.pick(p[len(drafts)])

    def no_residual(p: torch.Tensor, q: torch.Tensor, drafts: list[int], draws: Draws) -> tuple[int, int]:
        for k, draft in enumerate(drafts):
            if not draws.accept(float(p[k, draft]), float(q[k, draft])):
                return k, draws.pick(p[k])
        return always(p, q, drafts, draws)

    for rule in (always, no_residual):
        wrong = joint_law(p, speculate_sampled(p, q, 2, rule))
        assert float((wrong - p.joint()).abs().sum()) > 1e-2


def test_greedy_rule_accepts_the_matching_prefix() -> None:
    best = [3, 1, 4, 1]
    for drafts in itertools.product(range(V), repeat=3):
        matching = next((k for k in range(3) if drafts[k] != best[k]), 3)
        assert accept_greedy(best, drafts) == (matching, best[matching])
    assert accept_greedy([2], []) == (0, 2)


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
