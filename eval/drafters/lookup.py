"""Prompt lookup: the text so far is the draft model (Saxena 2023; ALGORITHMS 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from eval.acceptance import Draws
from eval.drafters.base import Committed, Drafter
from eval.tree import DraftTree

Match = Literal["recent", "earliest"]


class NgramIndex:
    """Where n-grams of a growing sequence were followed by something; updated in O(n) a token."""

    def __init__(self, longest: int, match: Match) -> None:
        self.tokens: list[int] = []
        self._longest, self._match = longest, match
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def append(self, token: int) -> None:
        # The n-grams that END before this token have a continuation now; the trailing ones are not in the index, so never match themselves.
        at = len(self.tokens)
        for n in range(1, min(self._longest, at) + 1):
            key, table = tuple(self.tokens[at - n :]), self._next[n - 1]
            if self._match == "recent" or key not in table:
                table[key] = at
        self.tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed an earlier occurrence of the sequence's end; the longest n-gram wins."""
        for n in range(min(self._longest, len(self.tokens)), 0, -1):
            at = self._next[n - 1].get(tuple(self.tokens[-n:]))
            if at is not None:
                return self.tokens[at : at + count]
        return []


class LookupDrafter(Drafter):
    """Proposes what followed the last tokens when they occurred before."""

    name = "lookup"

    def __init__(self, longest: int = 3, match: Match = "recent", stop_ids: frozenset[int] = frozenset()) -> None:
        """
        Args:
            longest: longest n-gram that is matched, in tokens.
            stop_ids: a proposal is cut before the first of these.
        """
        super().__init__()
        self._longest, self._match, self._stop_ids = longest, match, stop_ids
        self._index: list[NgramIndex] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._index = []
        for prompt in prompts:
            index = NgramIndex(self._longest, self._match)
            for token in prompt:
                index.append(token)
            self._index.append(index)
        self._fresh = True

    def select(self, rows: Sequence[int]) -> None:
        self._index = [self._index[r] for r in rows]

    def observe(self, committed: Committed) -> None:
        for index, new in zip(self._index, committed.tokens, strict=True):
            for token in new[-1:] if self._fresh else new:  # the first observation repeats the prompt
                index.append(token)
        self._fresh = False

    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        trees = []
        for index, count in zip(self._index, counts, strict=True):
            tokens = index.continuation(count) if count > 0 else []
            end = next((i for i, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
            trees.append(DraftTree.chain(tokens[:end]))
        return trees
