"""Drafters without a model: none (plain decoding) and the test drafters oracle and adversary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eval.acceptance import Draws
from eval.drafters.base import Committed, Drafter
from eval.tree import DraftTree


class NoneDrafter(Drafter):
    """Proposes nothing: the loop degrades to plain decoding, acceptance length 1."""

    name = "none"

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        pass

    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        return [DraftTree() for _ in counts]


class ScriptedDrafter(Drafter):
    """Proposes from known continuations: the oracle (as they are), or an adversary (every token changed). For tests."""

    def __init__(self, name: str, continuations: Sequence[Sequence[int]], change: Callable[[int], int] = lambda token: token) -> None:
        """continuations: the target's own output for each prompt, the prefill token first."""
        super().__init__()
        self.name = name
        self._continuations, self._change = [list(c) for c in continuations], change
        self._emitted: list[int] = []
        self._rows: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        assert len(prompts) == len(self._continuations)
        self._rows, self._emitted = list(range(len(prompts))), [0] * len(prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._rows, self._emitted = [self._rows[r] for r in rows], [self._emitted[r] for r in rows]

    def observe(self, committed: Committed) -> None:
        # The prompt's observation ends with the prefill token, which is the first token emitted.
        self._emitted = [n + len(new) if n else 1 for n, new in zip(self._emitted, committed.tokens, strict=True)]

    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        ahead = [self._continuations[r][n : n + count] for r, n, count in zip(self._rows, self._emitted, counts, strict=True)]
        return [DraftTree.chain([self._change(token) for token in tokens]) for tokens in ahead]
