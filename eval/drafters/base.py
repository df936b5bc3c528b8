"""What every drafter does. It only proposes; the decoder alone decides what is emitted, so no drafter can change the output's law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eval.acceptance import Draws
from heads.target import TargetOutput


@dataclass(frozen=True)
class Proposal:
    """A chain of candidates after the pending token."""

    tokens: tuple[int, ...]
    """Target ids; may be empty, which makes the cycle plain decoding."""
    q: torch.Tensor | None = None
    """[K, V] the distributions the tokens were sampled from; None where they were chosen deterministically."""


class Drafter(Protocol):
    """One drafter, decoding one sequence at a time."""

    @property
    def name(self) -> str: ...

    @property
    def needs_taps(self) -> bool:
        """Whether the target's taps must be captured."""
        ...

    def start(self) -> None:
        """Forget the last sequence."""
        ...

    def observe(self, output: TargetOutput, tokens: Sequence[int]) -> None:
        """Newly committed positions.

        Args:
            output: the target's states at n positions that were not observed before, [1, n, ...].
            tokens: n ids; tokens[i] is the committed token that FOLLOWS position i (the last is the pending token).
        """
        ...

    def propose(self, count: int, draws: Draws) -> Proposal:
        """At most ``count`` candidates that continue the pending token."""
        ...
