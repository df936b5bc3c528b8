"""The loop: prefill, then draft, verify, accept, commit until a stop (ALGORITHMS 1.2). One sequence, chains.

State at the start of a cycle with n committed tokens: the KV cache holds x_0..x_{n-2}; x_{n-1} is committed and pending.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from eval.acceptance import Draws, RandomDraws, accept_delta, accept_greedy, accept_sampled
from eval.drafters.base import Drafter, Proposal
from eval.records import Cycle, Finish
from heads.cache import TargetCache
from heads.errors import UserError
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget, TargetOutput


@dataclass
class Generation:
    """What decoding one prompt gave."""

    tokens: list[int]
    """Output ids, the end-of-turn token included."""
    cycles: list[Cycle] = field(default_factory=list)
    finish: Finish = "length"
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    first_token_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


def verify(proposal: Proposal, logits: torch.Tensor, sampling: Sampling, draws: Draws) -> tuple[int, int]:
    """Apply the acceptance rule that fits how the candidates were proposed. logits: [K+1, V]. Returns (accepted, extra token)."""
    if sampling.greedy:
        return accept_greedy(logits.argmax(-1).tolist(), proposal.tokens)
    p = probabilities(logits, sampling).cpu()
    if proposal.q is None:
        return accept_delta(p, proposal.tokens, draws)
    return accept_sampled(p, proposal.q.cpu(), proposal.tokens, draws)


@torch.no_grad()
def decode(
    target: FrozenTarget,
    prompt: Sequence[int],
    drafter: Drafter,
    *,
    draft_length: int,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    sampling: Sampling | None = None,
    draws: Draws | None = None,
) -> Generation:
    """Decode speculatively. Greedy output equals the target's own; sampled output has the target's law, for every drafter.

    Args:
        draft_length: K, candidates a cycle (fewer near max_new_tokens, where they could not be emitted).
        max_new_tokens: at least 1; the prefill token counts.

    Raises:
        UserError: the prompt leaves no room in the target's context.
    """
    sampling = sampling or Sampling()
    draws = draws or RandomDraws(0)
    room = target.max_length - len(prompt)
    if room < 1:
        raise UserError(f"a prompt of {len(prompt)} tokens fills the target's context of {target.max_length}; shorten it")
    limit = min(max_new_tokens, room)
    start, cpu = time.perf_counter(), time.process_time()
    drafter.start()
    cache = TargetCache()
    ids = torch.tensor([list(prompt)], device=target.device)
    output = target.forward(ids, cache=cache, taps=drafter.needs_taps)
    first = verify(Proposal(()), target.logits(output.hidden[0, -1:]), sampling, draws)[1]
    result = Generation([first], first_token_seconds=time.perf_counter() - start)
    drafter.observe(output, [*prompt[1:], first])
    while result.tokens[-1] not in stop_ids and len(result.tokens) < limit:
        _cycle(target, drafter, cache, result, draft_length, limit, stop_ids, sampling, draws)
    result.finish = "stop" if result.tokens[-1] in stop_ids else "length"
    result.seconds, result.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return result


def _cycle(
    target: FrozenTarget,
    drafter: Drafter,
    cache: TargetCache,
    result: Generation,
    draft_length: int,
    limit: int,
    stop_ids: frozenset[int],
    sampling: Sampling,
    draws: Draws,
) -> None:
    left = limit - len(result.tokens)
    began = time.perf_counter()
    proposal = drafter.propose(min(draft_length, left - 1), draws)
    drafted = time.perf_counter()
    committed = cache.length
    ids = torch.tensor([[result.tokens[-1], *proposal.tokens]], device=target.device)
    output = target.forward(ids, cache=cache, taps=drafter.needs_taps)
    accepted, extra = verify(proposal, target.logits(output.hidden[0]), sampling, draws)
    result.verify_seconds += time.perf_counter() - drafted
    new = [*proposal.tokens[:accepted], extra]
    cache.keep(committed + accepted + 1)
    emitted = next((i + 1 for i, token in enumerate(new) if token in stop_ids), len(new))
    result.tokens += new[:emitted]
    kept = accepted + 1
    observed = TargetOutput(output.hidden[:, :kept], output.taps[:, :kept] if output.taps is not None else None)
    drafter.observe(observed, new)
    result.draft_seconds += drafted - began
    binding = left - 1 if left - 1 < draft_length else None
    result.cycles.append(Cycle(len(proposal.tokens), accepted, emitted, binding))
