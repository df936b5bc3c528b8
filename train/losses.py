"""Distillation losses over draft logits, computed in chunks so that no [slots, vocabulary] tensor outlives its chunk.

Shapes: P label positions, M pairs (depth, slot), H hidden width, V vocabulary, V_d draft vocabulary, C pairs of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from heads.config import Config

OovPolicy = Literal["weight", "drop"]


class LossConfig(Config):
    """How a draft distribution is compared with the target's."""

    loss: Literal["ce", "lk", "tv"] = "ce"
    """ce: soft cross-entropy. lk: from cross-entropy to 1 - acceptance as a slot's acceptance grows. tv: 1 - acceptance alone, which
    learns next to nothing from a cold start."""
    lk_eta: float = Field(default=3.0, ge=0.0)
    """lk: the share of cross-entropy is exp(-lk_eta * acceptance); 10 for weak heads such as Medusa."""
    labels: Literal["soft", "hard"] = "soft"
    """soft: the target's distribution. hard: the token the target wrote."""
    oov_policy: OovPolicy = "weight"
    """weight: every slot by the target's mass inside the draft vocabulary. drop: slots whose target argmax is outside (the paper)."""
    chunk: int = Field(default=256, ge=1)
    """Label positions whose logits are alive at a time."""


@dataclass(frozen=True)
class Labels:
    """What the target says at the label positions; independent of the depth, so held once for all of them."""

    hidden: torch.Tensor
    """[P, H] last hidden states (after the final norm)."""
    lm_head: torch.Tensor
    """[V, H], frozen."""
    draft_ids: torch.Tensor
    """[V_d] target ids of the draft vocabulary, ascending."""
    softcap: float | None = None
    next_ids: torch.Tensor | None = None
    """[P] int64, the token that follows each position; hard labels need it."""

    @property
    def full(self) -> bool:
        """Whether the draft vocabulary is the target's."""
        return len(self.draft_ids) == len(self.lm_head)


@dataclass(frozen=True)
class LabelStatistics:
    """What a label says of the whole vocabulary V."""

    log_mass: torch.Tensor
    """[P] float32: log of the target's mass inside the draft vocabulary."""
    best: torch.Tensor
    """[P] int64: the target's argmax over V."""


@dataclass(frozen=True)
class DraftLayer:
    """What turns a head's outputs into draft logits."""

    weight: torch.Tensor
    """[V_d, H], trained or frozen."""
    softcap: float | None = None
    """Where the head speaks through the target's LM head and its soft cap."""


@dataclass(frozen=True)
class Emphasis:
    """Extra cross-entropy on the target's most likely tokens (HASS, ALGORITHMS 8.4): -sum_{x in top k of p} p(x) log q(x)."""

    top: int
    weight: float


@dataclass(frozen=True)
class PairMetrics:
    """Per (depth, slot) pair, [M] float32, no gradient."""

    loss: torch.Tensor
    """Cross-entropy, unweighted, in nats."""
    agree: torch.Tensor
    """1 where the head's argmax is the target's argmax over its whole vocabulary."""
    alpha: torch.Tensor
    """sum_x min(p, q) with p NOT renormalised: the target's mass outside the draft vocabulary counts as lost."""
    mass: torch.Tensor
    """The target's mass inside the draft vocabulary."""
    in_vocab: torch.Tensor
    """1 where the target's argmax is in the draft vocabulary."""


def distillation_loss(
    outputs: torch.Tensor,
    layer: DraftLayer,
    labels: Labels,
    index: torch.Tensor,
    weight: torch.Tensor,
    config: LossConfig,
    statistics: LabelStatistics | None = None,
    emphasis: Emphasis | None = None,
) -> tuple[torch.Tensor, PairMetrics]:
    """sum_m w_m L(p_m, q_m).

    With p~ the target renormalised over the draft vocabulary S, p the target as it is and alpha = sum_S min(p, q):

    * ce: L = c CE(p~, q) (ALGORITHMS 9.5), c the target's mass in S, or 1 / 0 as its argmax is in S or not (oov_policy);
    * tv: L = 1 - alpha; lk: L = lambda c KL(p~ || q) + (1 - lambda) (1 - alpha), lambda = exp(-eta alpha) without gradient (11.3);
    * hard labels: p~ is the written token, c whether it lies in S.

    Args:
        outputs: [M, H] normed head outputs, with gradient.
        index: [M] int64, which label position each pair is compared with.
        weight: [M] float32; normaliser and depth weights are in it.
        statistics: of the labels, where they were kept; computed here otherwise.

    Returns:
        The scalar loss (differentiable in outputs and layer.weight), and the pairs' metrics.
    """
    assert config.labels == "soft" or labels.next_ids is not None
    case = _Case(layer.softcap, labels, index, weight, config, statistics or label_statistics(labels, config.chunk), emphasis)
    loss, *metrics = _Chunked.apply(outputs, layer.weight, case)
    return loss, PairMetrics(*metrics)


@dataclass(frozen=True)
class _Case:
    """All of a call that has no gradient."""

    softcap: float | None
    labels: Labels
    index: torch.Tensor
    weight: torch.Tensor
    config: LossConfig
    statistics: LabelStatistics
    emphasis: Emphasis | None


class _Chunked(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk, so that only [M, H] and [V_d, H] are kept for backward."""

    @staticmethod
    def forward(ctx: Any, outputs: Any, head: Any, case: Any) -> Any:
        labels, index, chunk = case.labels, case.index, case.config.chunk
        grad_outputs = torch.zeros_like(outputs, dtype=torch.float32)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        total = outputs.new_zeros((), dtype=torch.float32)
        metrics = [torch.zeros(len(index), device=outputs.device) for _ in range(5)]
        # Pairs in the order of their label position: each label distribution is computed once, for all depths that use it.
        order = torch.argsort(index, stable=True)
        ordered = index[order]
        rows = labels.lm_head if labels.full else labels.lm_head[labels.draft_ids]
        member = torch.zeros(labels.lm_head.shape[0], dtype=torch.bool, device=outputs.device)
        member[labels.draft_ids] = True
        for first in range(0, labels.hidden.shape[0], chunk):
            span = torch.tensor([first, first + chunk], device=ordered.device)
            low, high = (int(i) for i in torch.searchsorted(ordered, span))
            if low == high:
                continue
            pairs = order[low:high]
            p = torch.softmax(_cap(F.linear(labels.hidden[first : first + chunk], rows).float(), labels.softcap), dim=-1)
            x = outputs[pairs].to(head.dtype)
            value, grad_z, found = _compare(x, head, p[ordered[low:high] - first], pairs, member, case)
            total += value
            for kept, one in zip(metrics, found, strict=True):
                kept[pairs] = one
            grad_z = grad_z.to(x.dtype)
            grad_outputs[pairs] = (grad_z @ head).float()
            if grad_head is not None:
                grad_head += (grad_z.T @ x).float()
        ctx.save_for_backward(grad_outputs.to(outputs.dtype), grad_head.to(head.dtype) if grad_head is not None else None)
        ctx.mark_non_differentiable(*metrics)
        return (total, *metrics)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_outputs, grad_head = ctx.saved_tensors
        scale = grads[0]
        return grad_outputs * scale, grad_head * scale if grad_head is not None else None, None


def _compare(
    x: torch.Tensor, head: torch.Tensor, p: torch.Tensor, pairs: torch.Tensor, member: torch.Tensor, case: _Case
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Loss, its gradient by the draft logits [C, V_d], and metrics of a chunk. x [C, H]; p [C, V_d], renormalised over the draft
    vocabulary; pairs [C] numbers of the pairs; member [V] bool."""
    config, at = case.config, case.index[pairs]
    mass, best = case.statistics.log_mass.exp()[at], case.statistics.best[at]
    in_vocab = member[best].float()
    capped = _cap(F.linear(x, head).float(), case.softcap)
    log_q = torch.log_softmax(capped, dim=-1)
    q = log_q.exp()
    true = p * mass.unsqueeze(1)
    alpha = torch.minimum(true, q).sum(-1)
    counts = mass if config.oov_policy == "weight" else in_vocab
    aim = p
    if config.labels == "hard":
        assert case.labels.next_ids is not None
        written = case.labels.next_ids[at]
        counts = member[written].float()
        number = torch.searchsorted(case.labels.draft_ids, written).clamp_max(p.shape[1] - 1)
        aim = torch.zeros_like(p).scatter_(1, number.unsqueeze(1), 1.0)
    ce = -(aim * log_q).sum(-1)
    value, grad = counts * ce, (q - aim) * counts.unsqueeze(1)
    if config.loss != "ce":
        lost, grad_lost = 1 - alpha, _acceptance_gradient(true, q)
        share = torch.exp(-config.lk_eta * alpha) if config.loss == "lk" else torch.zeros_like(alpha)
        entropy = -(torch.xlogy(aim, aim)).sum(-1)
        value = share * counts * (ce - entropy) + (1 - share) * lost
        grad = grad.mul_(share.unsqueeze(1)).add_(grad_lost.mul_((1 - share).unsqueeze(1)))
    if case.emphasis is not None:
        most = true.topk(min(case.emphasis.top, true.shape[1]), dim=-1)
        top = torch.zeros_like(true).scatter_(1, most.indices, most.values)
        value = value - case.emphasis.weight * (top * log_q).sum(-1)
        grad = grad + case.emphasis.weight * (q * top.sum(-1, keepdim=True) - top)
    if case.softcap is not None:
        grad = grad * (1 - (capped / case.softcap) ** 2)
    agree = (case.labels.draft_ids[q.argmax(-1)] == best).float()
    w = case.weight[pairs]
    return (w * value).sum(), grad * w.unsqueeze(1), (ce, agree, alpha, mass, in_vocab)


def _acceptance_gradient(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Gradient of 1 - sum min(p, q) by the logits of q: only where q < p does more of q help. p, q [C, V_d]."""
    short = q * (q < p)
    return q * short.sum(-1, keepdim=True) - short


def _cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@torch.no_grad()
def label_statistics(labels: Labels, chunk: int = 256) -> LabelStatistics:
    """What of the labels needs the target's whole vocabulary. Depends on target and draft vocabulary only, so it may be kept."""
    member = torch.zeros(labels.lm_head.shape[0], dtype=torch.bool, device=labels.lm_head.device)
    member[labels.draft_ids] = True
    parts = [_chunk_statistics(hidden, labels, member) for hidden in labels.hidden.split(chunk)]
    return LabelStatistics(torch.cat([mass for mass, _ in parts]), torch.cat([best for _, best in parts]))


def _chunk_statistics(hidden: torch.Tensor, labels: Labels, member: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(S) [C], argmax over V [C]."""
    full = _cap(F.linear(hidden, labels.lm_head).float(), labels.softcap)
    if labels.full:
        return torch.zeros(len(full), device=full.device), full.argmax(-1)
    # Both sums over the same logits, so that they round alike.
    inside = full.masked_fill(~member, float("-inf")).logsumexp(-1)
    return inside - full.logsumexp(-1), full.argmax(-1)
