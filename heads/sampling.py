"""Sampling settings -> probabilities. One definition for regeneration, drafting and verification: rules that compare p and q need the same.

Lowest room on purpose: data/ samples with it, eval/ verifies with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How next tokens are drawn from logits."""

    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    """Nucleus: the smallest set of most likely tokens that holds at least this mass; 1 keeps all."""
    top_k: int = 0
    """0 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that occur in prompt or output are divided by it where positive, multiplied where negative; 1 changes nothing."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def penalise(logits: torch.Tensor, sampling: Sampling, seen: Sequence[int]) -> torch.Tensor:
    """Apply the repetition penalty to logits [V] whose prefix holds the tokens ``seen`` (Keskar et al. 2019, section 4.1)."""
    if sampling.repetition_penalty == 1.0:
        return logits
    ids = torch.tensor(sorted(set(seen)), dtype=torch.int64, device=logits.device)
    old = logits[ids]
    penalty = sampling.repetition_penalty
    return logits.index_put((ids,), torch.where(old > 0, old / penalty, old * penalty))


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Warped distribution of logits [..., V], in float32 at least; a point mass on the argmax where temperature is 0."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        return torch.zeros_like(precise).scatter_(-1, precise.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(precise / sampling.temperature, dim=-1)
    if sampling.top_k:
        kth = p.topk(min(sampling.top_k, p.shape[-1]), dim=-1).values[..., -1:]
        p = p.where(p >= kth, 0.0)
        p = p / p.sum(-1, keepdim=True)
    if sampling.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        # A token stays while the mass before it has not reached top_p; the most likely always stays.
        cut = (ordered.cumsum(-1) - ordered) >= sampling.top_p
        p = p.scatter(-1, index, ordered.masked_fill(cut, 0.0))
        p = p / p.sum(-1, keepdim=True)
    return p
