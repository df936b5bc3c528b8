"""How far a changed target is from the original: what Medusa-2's speed costs (ALGORITHMS 7.2)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from eval.records import PromptRecord
from eval.statistics import Quality, by_prompt, interval_of_mean
from heads.target import FrozenTarget


class Switch(Protocol):
    """What changes the target while it is entered."""

    def on(self) -> AbstractContextManager[None]: ...


@torch.no_grad()
def distance(target: FrozenTarget, change: Switch, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, int]:
    """Over an answer's tokens: the sum of KL(original || changed) in nats, and how often both have the same most likely token."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=target.device)

    def log_law() -> torch.Tensor:
        hidden = target.forward(ids, taps=False).hidden[0, len(prompt) - 1 :]
        return torch.log_softmax(target.logits(hidden).float(), dim=-1)

    original = log_law()
    with change.on():
        changed = log_law()
    kl = (original.exp() * (original - changed)).sum(-1)
    return float(kl.double().sum()), int((original.argmax(-1) == changed.argmax(-1)).sum())


def measure_quality(target: FrozenTarget, change: Switch, records: Sequence[PromptRecord], *, bootstrap: int, seed: int) -> Quality:
    """KL and top-1 agreement on answers that the original target wrote, with intervals over prompts.

    Args:
        records: plain decodings by the original target.
    """
    found = [distance(target, change, r.context, r.output) for r in records]
    sums = by_prompt(records, [(kl, agree, len(r.output)) for (kl, agree), r in zip(found, records, strict=True)])
    tokens = sums[:, 2].sum()
    return Quality(
        prompts=len(sums),
        tokens=int(tokens),
        kl=float(sums[:, 0].sum() / tokens),
        kl_interval=interval_of_mean(sums[:, [0, 2]], bootstrap=bootstrap, seed=seed),
        agreement=float(sums[:, 1].sum() / tokens),
        agreement_interval=interval_of_mean(sums[:, [1, 2]], bootstrap=bootstrap, seed=seed),
    )
