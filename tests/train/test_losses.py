"""The chunked soft cross-entropy against plain autograd on full tensors, and its metrics against direct computation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch

from train.losses import DraftLayer, Emphasis, Labels, LossConfig, PairMetrics, distillation_loss

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


def whole(case: dict[str, Any], config: LossConfig, draft_cap: float | None, emphasis: Emphasis | None) -> torch.Tensor:
    """Every loss from whole tensors, in float64, by autograd."""
    labels: Labels = case["labels"]
    full = labels.hidden.double() @ labels.lm_head.double().T
    if labels.softcap is not None:
        full = labels.softcap * torch.tanh(full / labels.softcap)
    p_full = torch.softmax(full, dim=-1)[case["index"]]
    p = p_full[:, labels.draft_ids]
    mass, best = p.sum(-1), p_full.argmax(-1)
    z = case["outputs"].double() @ case["head"].double().T
    if draft_cap is not None:
        z = draft_cap * torch.tanh(z / draft_cap)
    log_q = torch.log_softmax(z, dim=-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    aim = p / mass[:, None]
    counted = mass if config.oov_policy == "weight" else torch.isin(best, labels.draft_ids).double()
    if config.labels == "hard":
        assert labels.next_ids is not None
        written = labels.next_ids[case["index"]]
        aim = (labels.draft_ids == written[:, None]).double()
        counted = aim.sum(-1)
    ce = -(aim * log_q).sum(-1)
    value = counted * ce
    if config.loss == "tv":
        value = 1 - alpha
    if config.loss == "lk":
        share = torch.exp(-config.lk_eta * alpha.detach())
        kl = (torch.xlogy(aim, aim) - aim * log_q).sum(-1)
        value = share * counted * kl + (1 - share) * (1 - alpha)
    if emphasis is not None:
        top = p.topk(emphasis.top, dim=-1)
        value = value - emphasis.weight * (top.values * log_q.gather(1, top.indices)).sum(-1)
    return (case["weight"].double() * value).sum()


def with_next_ids(case: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    written = torch.randint(0, VOCAB, (POSITIONS,), generator=generator)
    assert 0 < torch.isin(written, DRAFT).sum() < POSITIONS
    return case | {"labels": dataclasses.replace(case["labels"], next_ids=written)}


@pytest.mark.parametrize("emphasis", [None, Emphasis(3, 0.7)], ids=["", "emphasis"])
@pytest.mark.parametrize("draft_cap", [None, 1.5])
@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("oov", ["weight", "drop"])
@pytest.mark.parametrize("loss", ["ce", "lk", "tv"])
def test_every_loss_by_autograd(loss: Any, oov: Any, kind: Any, draft_cap: float | None, emphasis: Emphasis | None) -> None:
    case, again = with_next_ids(inputs(2.0)), with_next_ids(inputs(2.0))
    config = LossConfig(loss=loss, lk_eta=2.0, labels=kind, oov_policy=oov, chunk=4)
    head = case.pop("head")
    found, _ = distillation_loss(layer=DraftLayer(head, draft_cap), config=config, emphasis=emphasis, **case)
    expected = whole(again, config, draft_cap, emphasis)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case["outputs"].grad, again["outputs"].grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.grad, again["head"].grad, atol=1e-5, rtol=1e-5)
    assert float(case["outputs"].grad.abs().sum()) > 0.1


def test_the_share_of_cross_entropy_falls_from_one_to_none() -> None:
    """lk is KL at eta 0 and 1 - alpha at a large eta."""
    kl, _ = distillation_loss(**pruned(inputs(None)), config=LossConfig(loss="lk", lk_eta=0.0))
    ce, _ = distillation_loss(**pruned(inputs(None)), config=LossConfig())
    far, _ = distillation_loss(**pruned(inputs(None)), config=LossConfig(loss="lk", lk_eta=1e6))
    tv, _ = distillation_loss(**pruned(inputs(None)), config=LossConfig(loss="tv"))
    assert float(kl.detach()) < float(ce.detach())
    torch.testing.assert_close(far, tv)


def pruned(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k != "head"} | {"layer": DraftLayer(case["head"])}


def test_fitting_acceptance_ends_at_more_acceptance_than_fitting_cross_entropy() -> None:
    """A head too narrow to be right everywhere: what it gives up is what its loss counts least."""
    reached = {}
    for loss in ("ce", "lk", "tv"):
        case = inputs(None, full=True)
        free = (torch.randn(PAIRS, 2, generator=torch.Generator().manual_seed(1)) * 0.1).requires_grad_()
        head = (torch.randn(VOCAB, 2, generator=torch.Generator().manual_seed(2))).requires_grad_()
        optimizer = torch.optim.Adam([free, head], lr=0.05)
        config, metrics = LossConfig(loss=loss, oov_policy="weight"), None
        settings = {"labels": case["labels"], "index": case["index"], "weight": torch.ones(PAIRS) / PAIRS}
        for _ in range(400):
            optimizer.zero_grad()
            found, metrics = distillation_loss(free, DraftLayer(head), config=config, **settings)
            found.backward()
            optimizer.step()
        assert metrics is not None
        reached[loss] = float(metrics.alpha.mean())
    assert reached["lk"] > reached["ce"] + 0.005 and reached["tv"] > reached["ce"] + 0.005, reached
