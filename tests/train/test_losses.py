"""The chunked soft cross-entropy against plain autograd on full tensors, and its metrics against direct computation."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from train.losses import DraftLayer, Labels, LossConfig, PairMetrics, distillation_loss

VOCAB, WIDTH, POSITIONS, PAIRS = 23, 8, 11, 30
DRAFT = torch.tensor([0, 2, 3, 7, 8, 11, 15, 16, 22])


def inputs(softcap: float | None, full: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    draft = torch.arange(VOCAB) if full else DRAFT
    labels = Labels(random(POSITIONS, WIDTH), random(VOCAB, WIDTH, scale=1.5), draft, softcap)
    index = torch.randint(0, POSITIONS, (PAIRS,), generator=generator)  # unordered, with repeats, position 4 never
    index[index == 4] = 5
    outputs = random(PAIRS, WIDTH).requires_grad_()
    # close to the target's rows, so that agreement is neither 0 nor 1
    head = (labels.lm_head[draft] + random(len(draft), WIDTH, scale=0.3)).requires_grad_()
    with torch.no_grad():
        outputs[::2] = labels.hidden[index[::2]] + random(len(outputs[::2]), WIDTH, scale=0.3)
    return {"outputs": outputs, "head": head, "labels": labels, "index": index, "weight": torch.rand(PAIRS, generator=generator)}


def soft_cross_entropy(*, head: torch.Tensor, oov: Literal["weight", "drop"], chunk: int = 256, **case: Any) -> Any:
    return distillation_loss(layer=DraftLayer(head), config=LossConfig(oov_policy=oov, chunk=chunk), **case)


def direct(case: dict[str, Any], oov: str) -> tuple[torch.Tensor, PairMetrics]:
    """The same from whole tensors, in float64."""
    labels: Labels = case["labels"]
    full = labels.hidden.double() @ labels.lm_head.double().T
    if labels.softcap is not None:
        full = labels.softcap * torch.tanh(full / labels.softcap)
    p = torch.softmax(full, dim=-1)[case["index"]]
    inside = p[:, labels.draft_ids]
    mass = inside.sum(-1)
    log_q = torch.log_softmax(case["outputs"].double() @ case["head"].double().T, dim=-1)
    ce = -(inside / mass[:, None] * log_q).sum(-1)
    best = p.argmax(-1)
    in_vocab = torch.isin(best, labels.draft_ids).double()
    w = case["weight"].double() * (mass if oov == "weight" else in_vocab)
    agree = (labels.draft_ids[log_q.argmax(-1)] == best).double()
    alpha = torch.minimum(inside, log_q.exp()).sum(-1)
    return (w * ce).sum(), PairMetrics(ce, agree, alpha, mass, in_vocab)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("oov", ["weight", "drop"])
@pytest.mark.parametrize("chunk", [1, 3, 11, 256])
def test_value_gradients_and_metrics(chunk: int, oov: Literal["weight", "drop"], softcap: float | None) -> None:
    case, again = inputs(softcap), inputs(softcap)
    loss, metrics = soft_cross_entropy(**case, oov=oov, chunk=chunk)
    expected, expected_metrics = direct(again, oov)
    (loss * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case["outputs"].grad, again["outputs"].grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case["head"].grad, again["head"].grad, atol=1e-5, rtol=1e-5)
    for name in ("loss", "agree", "alpha", "mass", "in_vocab"):
        value = getattr(metrics, name)
        assert value.dtype == torch.float32 and not value.requires_grad
        torch.testing.assert_close(value, getattr(expected_metrics, name).detach().float(), atol=1e-5, rtol=1e-5, msg=name)
    # the case is worth something: both kinds of pairs occur
    assert 0 < metrics.agree.mean() < 1 and 0 < metrics.in_vocab.mean() < 1


def test_out_of_vocabulary_policies() -> None:
    weighted, _ = soft_cross_entropy(**inputs(None), oov="weight")
    case = inputs(None)
    dropped, metrics = soft_cross_entropy(**case, oov="drop")
    assert abs(float(weighted.detach() - dropped.detach())) > 1e-3
    dropped.backward()
    zero = case["outputs"].grad.abs().sum(-1) == 0
    assert torch.equal(zero, metrics.in_vocab == 0)
    assert torch.all(metrics.agree <= metrics.in_vocab)  # an argmax outside counts as wrong


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_full_vocabulary_has_mass_one_exactly(softcap: float | None) -> None:
    case = inputs(softcap, full=True)
    loss, metrics = soft_cross_entropy(**case, oov="weight")
    dropped, _ = soft_cross_entropy(**case, oov="drop")
    assert torch.equal(metrics.mass, torch.ones(PAIRS))
    assert torch.equal(metrics.in_vocab, torch.ones(PAIRS))
    assert torch.equal(loss, dropped)


def test_perfect_head_has_alpha_equal_to_the_mass() -> None:
    case = inputs(None)
    labels: Labels = case["labels"]
    perfect = case | {"outputs": labels.hidden[case["index"]], "head": labels.lm_head[labels.draft_ids]}
    _, metrics = soft_cross_entropy(**perfect, oov="weight")
    torch.testing.assert_close(metrics.alpha, metrics.mass, atol=1e-6, rtol=1e-6)
    assert torch.equal(metrics.agree, metrics.in_vocab)
    assert metrics.mass.max() < 1


def test_frozen_head_gets_no_gradient_and_changes_nothing_else() -> None:
    free, frozen = inputs(None), inputs(None)
    frozen["head"].requires_grad_(False)
    free_loss, _ = soft_cross_entropy(**free, oov="weight", chunk=4)
    frozen_loss, _ = soft_cross_entropy(**frozen, oov="weight", chunk=4)
    free_loss.backward()
    frozen_loss.backward()
    assert torch.equal(free_loss, frozen_loss)
    assert frozen["head"].grad is None and free["head"].grad.abs().sum() > 0
    assert torch.equal(free["outputs"].grad, frozen["outputs"].grad)
