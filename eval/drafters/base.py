"""What every drafter does. It only proposes; the decoder alone decides what is emitted, so no drafter can change the output's law.

Shapes: B sequences, n newly committed positions (padded to the most of any sequence), H target hidden width, A taps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from eval.acceptance import Draws
from eval.tree import DraftTree


@dataclass(frozen=True)
class Committed:
    """Positions that the target has read and the decoder has kept since the last observation."""

    hidden: torch.Tensor
    """[B, n, H] last hidden states; sequence b has len(tokens[b]) of them, padding follows."""
    taps: torch.Tensor | None
    """[B, n, A*H], where the drafter needs them."""
    tokens: list[list[int]]
    """tokens[b][i] is the committed token that FOLLOWS position i; the last is the pending token."""


class Drafter(ABC):
    """Drafts for a batch of sequences. A drafter that proposes nothing makes the cycle plain decoding."""

    name: str
    needs_taps: bool = False

    def __init__(self) -> None:
        self.forward_seconds = 0.0
        """Wall seconds spent in forwards of the drafter's own model, in all."""

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Counts the time inside as model forward; the rest of drafting is overhead."""
        began = time.perf_counter()
        yield
        self.forward_seconds += time.perf_counter() - began

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget everything; new sequences begin."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Keep these sequences, in this order; the others are finished."""

    def observe(self, committed: Committed) -> None:  # noqa: B027
        """Take note of newly committed positions (after prefill: those of the prompt)."""

    @abstractmethod
    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        """Candidates that continue each sequence's pending token.

        Args:
            counts: [B] deepest draft that could still be emitted (0: propose nothing).
            draws: [B] each sequence's own randomness.
        """


def merge(waiting: Sequence[Committed], features: str) -> tuple[torch.Tensor, list[list[int]]]:
    """Several observations as one: features [B, n, F] (padded on the right) and the tokens that follow."""

    def of(committed: Committed) -> torch.Tensor:
        found = committed.taps if features == "taps" else committed.hidden
        assert found is not None
        return found

    if len(waiting) == 1:
        return of(waiting[0]), waiting[0].tokens
    sequences = range(len(waiting[0].tokens))
    parts = [torch.cat([of(w)[b, : len(w.tokens[b])] for w in waiting]) for b in sequences]
    return pad_sequence(parts, batch_first=True), [[t for w in waiting for t in w.tokens[b]] for b in sequences]


def keep_rows(waiting: Sequence[Committed], rows: Sequence[int]) -> list[Committed]:
    """Observations of these sequences only, in this order."""
    return [Committed(w.hidden[list(rows)], None if w.taps is None else w.taps[list(rows)], [w.tokens[r] for r in rows]) for w in waiting]
