"""Drafters without a model: none (plain decoding) and the test drafters oracle and adversary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eval.acceptance import Draws
from eval.drafters.base import Proposal
from heads.target import TargetOutput


class NoneDrafter:
    """Proposes nothing: the loop degrades to plain decoding, acceptance length 1."""

    name = "none"
    needs_taps = False

    def start(self) -> None:
        pass

    def observe(self, output: TargetOutput, tokens: Sequence[int]) -> None:
        pass

    def propose(self, count: int, draws: Draws) -> Proposal:
        return Proposal(())


class ScriptedDrafter:
    """Proposes from a known continuation: the oracle (as it is), or an adversary (every token changed). For tests."""

    needs_taps = False

    def __init__(self, name: str, continuation: Sequence[int], change: Callable[[int], int] = lambda token: token) -> None:
        """continuation: the target's own output, the prefill token first."""
        self.name = name
        self._continuation, self._change = list(continuation), change
        self._emitted = 0

    def start(self) -> None:
        self._emitted = 0

    def observe(self, output: TargetOutput, tokens: Sequence[int]) -> None:
        # The prompt's observation ends with the prefill token, which is the first token emitted.
        self._emitted += len(tokens) if self._emitted else 1

    def propose(self, count: int, draws: Draws) -> Proposal:
        ahead = self._continuation[self._emitted : self._emitted + count]
        return Proposal(tuple(self._change(token) for token in ahead))
