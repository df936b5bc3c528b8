"""The distillation loss over draft logits, computed in chunks so that no [slots, vocabulary] tensor outlives its chunk.

Shapes: S unroll steps, P label positions, M pairs (step, slot), H hidden width, V vocabulary, V_d draft vocabulary, C pairs of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

OovPolicy = Literal["weight", "drop"]


@dataclass(frozen=True)
class Labels:
    """What the target says at the label positions; independent of the unroll step, so held once for all of them."""

    hidden: torch.Tensor
    """[P, H] last hidden states (after the final norm)."""
    lm_head: torch.Tensor
    """[V, H], frozen."""
    draft_ids: torch.Tensor
    """[V_d] target ids of the draft vocabulary."""
    softcap: float | None = None


@dataclass(frozen=True)
class LabelStatistics:
    """What a label says of the whole vocabulary V."""

    log_mass: torch.Tensor
    """[P] float32: log of the target's mass inside the draft vocabulary."""
    best: torch.Tensor
    """[P] int64: the target's argmax over V."""


@dataclass(frozen=True)
class PairMetrics:
    """Per (step, slot) pair, [M] float32, no gradient."""

    loss: torch.Tensor
    """Soft cross-entropy, unweighted, in nats."""
    agree: torch.Tensor
    """1 where the head's argmax is the target's argmax over its whole vocabulary."""
    alpha: torch.Tensor
    """sum_x min(p, q) with p NOT renormalised: the target's mass outside the draft vocabulary counts as lost."""
    mass: torch.Tensor
    """The target's mass inside the draft vocabulary."""
    in_vocab: torch.Tensor
    """1 where the target's argmax is in the draft vocabulary."""


def soft_cross_entropy(
    outputs: torch.Tensor,
    head: torch.Tensor,
    labels: Labels,
    index: torch.Tensor,
    weight: torch.Tensor,
    oov: OovPolicy,
    chunk: int = 256,
    statistics: LabelStatistics | None = None,
) -> tuple[torch.Tensor, PairMetrics]:
    """sum_m w_m c_m CE(p~_m, q_m) with p~ the target renormalised over the draft vocabulary (ALGORITHMS 9.5).

    Args:
        outputs: [M, H] normed head outputs, with gradient.
        head: [V_d, H] the draft LM head's weight.
        index: [M] int64, which label position each pair is compared with.
        weight: [M] float32; normaliser and step decay are in it.
        oov: c_m is the target's mass inside the draft vocabulary (weight), or 1 / 0 as its argmax is inside or not (drop).
        chunk: label positions held at a time.
        statistics: of the labels, where they were kept; computed here otherwise.

    Returns:
        The scalar loss (differentiable in outputs and head), and the pairs' metrics.
    """
    loss, *metrics = _Chunked.apply(outputs, head, labels, index, weight, oov, chunk, statistics or label_statistics(labels, chunk))
    return loss, PairMetrics(*metrics)


class _Chunked(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk, so that only [M, H] and [V_d, H] are kept for backward."""

    @staticmethod
    def forward(ctx: Any, outputs: Any, head: Any, labels: Any, index: Any, weight: Any, oov: Any, chunk: Any, statistics: Any) -> Any:
        needs_head = head.requires_grad
        grad_outputs = torch.zeros_like(outputs, dtype=torch.float32)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if needs_head else None
        total = outputs.new_zeros((), dtype=torch.float32)
        metrics = [torch.zeros(len(index), device=outputs.device) for _ in range(5)]
        # Pairs in the order of their label position: each label distribution is computed once, for all unroll steps that use it.
        order = torch.argsort(index, stable=True)
        ordered = index[order]
        rows = labels.lm_head[labels.draft_ids]
        member = torch.zeros(labels.lm_head.shape[0], dtype=torch.bool, device=outputs.device)
        member[labels.draft_ids] = True
        for first in range(0, labels.hidden.shape[0], chunk):
            span = torch.tensor([first, first + chunk], device=ordered.device)
            low, high = (int(i) for i in torch.searchsorted(ordered, span))
            if low == high:
                continue
            pairs = order[low:high]
            hidden = labels.hidden[first : first + chunk]
            log_mass, best = statistics.log_mass[first : first + chunk], statistics.best[first : first + chunk]
            label_logits = _cap(F.linear(hidden, rows).float(), labels.softcap)
            at = ordered[low:high] - first
            p = torch.softmax(label_logits, dim=-1)[at]
            mass, in_vocab = log_mass.exp()[at], member[best[at]].float()
            x = outputs[pairs]
            z = F.linear(x, head).float()
            log_q = torch.log_softmax(z, dim=-1)
            ce = -(p * log_q).sum(-1)
            w = weight[pairs] * (mass if oov == "weight" else in_vocab)
            total += (w * ce).sum()
            q = log_q.exp_()
            draft_best = labels.draft_ids[q.argmax(-1)]
            values = (
                ce,
                (draft_best == best[at]).float(),
                torch.minimum(p * mass.unsqueeze(1), q).sum(-1),
                mass,
                in_vocab,
            )
            for kept, value in zip(metrics, values, strict=True):
                kept[pairs] = value
            grad_z = (q.sub_(p)).mul_(w.unsqueeze(1)).to(x.dtype)  # d CE / d z = q - p~
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
        return (grad_outputs * scale, grad_head * scale if grad_head is not None else None, *(None,) * 6)


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
    # Both sums over the same logits, so that a full vocabulary has mass 1 to the last bit.
    inside = full.masked_fill(~member, float("-inf")).logsumexp(-1)
    return inside - full.logsumexp(-1), full.argmax(-1)
