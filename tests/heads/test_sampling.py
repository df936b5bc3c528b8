"""Sampling settings -> probabilities, against an oracle that walks over the tokens."""

from __future__ import annotations

import math

import pytest
import torch

from heads.sampling import Sampling, probabilities


def oracle(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Softmax, the k most likely, then the smallest most likely set that holds top_p; renormalised after each."""
    top = max(logits)
    weights = [math.exp((z - top) / temperature) for z in logits]
    p = [w / sum(weights) for w in weights]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        kept = set(order[:top_k])
        p = [x if i in kept else 0.0 for i, x in enumerate(p)]
        p = [x / sum(p) for x in p]
    if top_p < 1:
        kept, mass = set(), 0.0
        for i in order:
            if mass >= top_p:
                break
            kept.add(i)
            mass += p[i]
        p = [x if i in kept else 0.0 for i, x in enumerate(p)]
        p = [x / sum(p) for x in p]
    return p


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_matches_the_oracle(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(4, 3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    got = probabilities(logits, Sampling(temperature, top_p, top_k))
    assert got.shape == logits.shape and got.dtype == torch.float64
    for row, p in zip(logits.reshape(-1, 11), got.reshape(-1, 11)):
        expected = oracle(row.tolist(), temperature, top_k, top_p)
        assert p.tolist() == pytest.approx(expected, abs=1e-12)
        assert [x > 0 for x in p.tolist()] == [x > 0 for x in expected]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(1.0, 0.8), Sampling(1.0, 1.0, 2), Sampling(2.0, 0.6, 5)])
def test_sums_to_one_in_float32_whatever_comes_in(sampling: Sampling) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p = probabilities(torch.randn(6, 500, generator=torch.Generator().manual_seed(1)).to(dtype) * 3, sampling)
        assert p.dtype == torch.float32
        assert torch.allclose(p.sum(-1), torch.ones(6), atol=1e-5)
        assert float(p.min()) >= 0


def test_temperature_zero_is_a_point_mass_on_the_argmax() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    for sampling in (Sampling(), Sampling(0.0, 0.5, 3)):
        p = probabilities(logits, sampling)
        assert p.sum() == 5 and torch.equal(p.argmax(-1), logits.argmax(-1)) and set(p.unique().tolist()) == {0.0, 1.0}


def test_temperature_zero_with_a_tie_keeps_one_token() -> None:
    p = probabilities(torch.tensor([1.0, 3.0, 3.0, 0.0]), Sampling())
    assert p.sum() == 1 and int((p > 0).sum()) == 1 and int(p.argmax()) in (1, 2)


def test_nucleus_by_hand() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64).log()
    assert probabilities(logits, Sampling(1.0, 0.49)).tolist() == pytest.approx([0, 1, 0, 0])
    assert probabilities(logits, Sampling(1.0, 0.51)).tolist() == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert probabilities(logits, Sampling(1.0, 0.8)).tolist() == pytest.approx([0, 5 / 9, 1.5 / 9, 2.5 / 9])
    # top_k first: of the two that are left the larger holds 2/3.
    assert probabilities(logits, Sampling(1.0, 0.6, 2)).tolist() == pytest.approx([0, 1, 0, 0])


def test_only_temperature_zero_is_greedy() -> None:
    assert Sampling().greedy and not Sampling(1e-3).greedy
