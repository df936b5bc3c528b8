"""What decoding leaves behind: one record a cycle, one record a prompt turn. All statistics are computed from these.

Conventions (ALGORITHMS 1.2 and 13, coded once here): a cycle is one verification by the target; the token that prefill
yields belongs to no cycle; ``accepted`` counts draft tokens only, the bonus or correction token comes on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Cycle:
    """One draft-verify-accept-commit round."""

    proposed: int
    """K_c: depth of what was put before the target: draft tokens of a chain, the longest path of a tree."""
    accepted: int
    """a_c: draft tokens that the acceptance rule took (before truncation at a stop)."""
    emitted: int
    """Tokens that reached the output: accepted + 1, less where an end-of-turn token or the length limit cut the cycle."""
    limit: int | None = None
    """Draft tokens that could still have counted when the cycle began (tokens left until max_new_tokens, less one for the
    bonus token); None where the length limit did not bind."""
    nodes: int = 0
    """Draft tokens put before the target, all branches together."""
    draft_seconds: float = 0.0
    """Wall seconds of drafting, model and bookkeeping; times of a batch's cycle are shared out evenly over its sequences."""
    forward_seconds: float = 0.0
    """Of these, in forwards of the draft model."""
    verify_seconds: float = 0.0
    """Wall seconds in the target's forward and LM head."""
    commit_seconds: float = 0.0
    """Wall seconds of everything else: masks, acceptance, cache, observation."""


def acceptance_length(cycles: Sequence[Cycle]) -> float:
    """1 + mean a_c; 1 where there is no cycle."""
    return 1 + sum(c.accepted for c in cycles) / max(len(cycles), 1)


@dataclass(frozen=True)
class Divergence:
    """The first place where greedy speculative output left the target's own greedy output."""

    position: int
    """Index into the output tokens (0 = the prefill token)."""
    expected: int
    got: int
    gap: float
    """Difference of the target's two highest logits there, in nats: a near tie (rounding) or a real error."""


@dataclass(frozen=True)
class PromptRecord:
    """One turn of one prompt, decoded speculatively, and by the target alone where speeds are compared."""

    prompt_id: str
    category: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    """Tokens of the speculative output, the prefill token included: 1 + sum of the cycles' emitted."""
    cycles: tuple[Cycle, ...]
    finish: Finish
    plain_tokens: int
    """Tokens of plain decoding; 0 where the prompt was not decoded by the target alone."""
    plain_seconds: float
    """Wall seconds of plain decoding, prefill included."""
    speculative_seconds: float
    """Wall seconds of speculative decoding, prefill included."""
    plain_cpu_seconds: float
    speculative_cpu_seconds: float
    draft_seconds: float
    """Wall seconds of the speculative run spent in the drafter."""
    verify_seconds: float
    """Wall seconds of the speculative run spent in the target's verification forwards."""
    checked: bool
    """Whether the output was compared with the target's own greedy choice, token by token."""
    divergence: Divergence | None
    """None where the outputs are equal, or where sampling makes the comparison meaningless."""
    context: tuple[int, ...] = ()
    """Ids before the output."""
    output: tuple[int, ...] = ()
    """Ids of the speculative output."""
