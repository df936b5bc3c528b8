"""Where an output ends: token by token, exactly where plain decoding ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopRule:
    """Stop tokens and stop strings. An output ends with the token that is a stop token or completes a stop string."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids -> text; needed for strings."""

    def __post_init__(self) -> None:
        assert not self.strings or self.decode is not None

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether an output ends with its last token (it did not end before)."""
        return bool(tokens) and (tokens[-1] in self.ids or self._completes(tokens))

    def _completes(self, tokens: Sequence[int]) -> bool:
        if not self.strings:
            return False
        assert self.decode is not None
        # Every token but an empty one brings at least one byte, and a few tokens more settle characters cut at the window's left edge.
        window = max(len(s.encode()) for s in self.strings) + 8
        text = self.decode(tokens[-window:])
        before = self.decode(tokens[-window:-1])
        return any(text.count(s) > before.count(s) for s in self.strings)

    def emitted(self, tokens: Sequence[int], new: Sequence[int]) -> tuple[int, bool]:
        """How many of the ``new`` tokens after ``tokens`` are output, and whether the output ends with the last of them."""
        if not self.strings:
            at = next((i for i, token in enumerate(new) if token in self.ids), None)
            return (len(new), False) if at is None else (at + 1, True)
        line = list(tokens)
        for count, token in enumerate(new, start=1):
            line.append(token)
            if self.ends(line):
                return count, True
        return len(new), False
