"""Continuous batched generation: a sequence that ends makes room for the next prompt, so that the batch stays full.

Shapes: B lines of the batch, T padded length, V vocabulary, F features a position (taps and last hidden state).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from heads.cache import TargetCache, causal, visible_slots
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget, TargetOutput

REFILL = 0.125  # share of idle lines at which new prompts are read, or the batch shrinks: each costs a forward or a copy of its own


class Limits(Protocol):
    """What of the recipe generation reads."""

    temperature: float
    top_p: float
    max_new_tokens: int
    batch_size: int
    seed: int


@dataclass
class Request:
    """A prompt to be continued."""

    key: tuple[str, int]
    """(conversation id, turn): names the random stream, so that an answer does not depend on its batch."""
    prompt: list[int]


@dataclass
class Answer:
    """What the target wrote after a prompt."""

    request: Request
    ids: list[int]
    """The stop id included."""
    taps: torch.Tensor | None = None
    """[n, A*H] on the CPU, of every position but the last id's, where they were asked for."""
    hidden: torch.Tensor | None = None
    """[n, H], likewise."""


@dataclass
class _Line:
    request: Request
    stream: np.random.Generator
    limit: int
    ids: list[int] = field(default_factory=list)
    states: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def random_stream(seed: int, key: tuple[str, int]) -> np.random.Generator:
    """The random numbers of one answer."""
    digest = hashlib.sha256(f"{seed}/{key[0]}/{key[1]}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def generate(
    target: FrozenTarget,
    queue: deque[Request],
    stop_ids: frozenset[int],
    config: Limits,
    max_length: int,
    keep_states: bool = False,
) -> Iterator[Answer]:
    """Continue every request of the queue, in any order; the caller may add to the queue while it takes answers.

    Args:
        max_length: most ids of prompt and answer together.
        keep_states: bring taps and hidden states along with each answer.
    """
    batch = _Batch(target, stop_ids, config, max_length, keep_states)
    while queue or batch.busy:
        idle = config.batch_size - batch.busy
        if queue and (idle >= max(1, REFILL * config.batch_size) or not batch.busy):
            yield from batch.admit([queue.popleft() for _ in range(min(len(queue), idle))])
        elif batch.busy:
            yield from batch.step()


class _Batch:
    def __init__(self, target: FrozenTarget, stop_ids: frozenset[int], config: Limits, max_length: int, keep_states: bool) -> None:
        self.target, self.stop_ids, self.config, self.max_length, self.keep_states = target, stop_ids, config, max_length, keep_states
        self.sampling = Sampling(config.temperature, config.top_p)
        self.lines: list[_Line | None] = []
        self.cache = TargetCache()

    @property
    def busy(self) -> int:
        return sum(line is not None for line in self.lines)

    @torch.no_grad()
    def admit(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Read new prompts, in one padded forward, and give them lines."""
        lengths = [len(r.prompt) for r in requests]
        width, device = max(lengths), self.target.device
        ids = torch.tensor([r.prompt + [0] * (width - len(r.prompt)) for r in requests], device=device)
        cache = TargetCache()
        position = torch.arange(width, device=device).expand(len(requests), -1)
        visible = causal(len(requests), width, device) if min(lengths) < width else None
        output = self.target.forward(ids, cache=cache, position=position, visible=visible, taps=self.keep_states)
        cache.commit([range(n) for n in lengths])
        fresh = [
            _Line(r, random_stream(self.config.seed, r.key), min(self.config.max_new_tokens, self.max_length - len(r.prompt)))
            for r in requests
        ]
        if self.keep_states:
            for b, (line, n) in enumerate(zip(fresh, lengths, strict=True)):
                line.states.append(_cpu(output, b, slice(0, n)))
        last = torch.tensor(lengths, device=device) - 1
        self._place(fresh, cache)
        yield from self._take(fresh, output.hidden[torch.arange(len(fresh), device=device), last])

    def _place(self, fresh: Sequence[_Line], cache: TargetCache) -> None:
        free = [b for b, line in enumerate(self.lines) if line is None][: len(fresh)]
        if free:
            self.cache.adopt(free, cache, range(len(free)))
            for b, line in zip(free, fresh):
                self.lines[b] = line
        if len(fresh) > len(free):
            self.cache.append(cache, range(len(free), len(fresh)))
            self.lines += fresh[len(free) :]

    @torch.no_grad()
    def step(self) -> Iterator[Answer]:
        """One token for every line."""
        busy = [b for b, line in enumerate(self.lines) if line is not None]
        if len(busy) <= (1 - REFILL) * len(self.lines):  # nobody is waiting for the idle lines, or they would be taken
            self.cache.select(busy)
            self.lines = [self.lines[b] for b in busy]
            busy = list(range(len(busy)))
        device = self.target.device
        ids = torch.tensor([[line.ids[-1] if line else 0] for line in self.lines], device=device)
        lengths = torch.tensor(self.cache.lengths, device=device)
        position, visible = lengths.unsqueeze(1), None
        if not self.cache.lines.even:
            own = torch.ones(len(self.lines), 1, 1, dtype=torch.bool, device=device)
            visible = visible_slots(lengths, own, self.cache.used + 1)
        output = self.target.forward(ids, cache=self.cache, position=position, visible=visible, taps=self.keep_states)
        self.cache.commit([range(line is not None) for line in self.lines])
        lines = [line for line in self.lines if line is not None]
        if self.keep_states:
            states = _cpu(output, slice(None), 0)
            for b, line in zip(busy, lines, strict=True):
                line.states.append((states[0][b : b + 1], states[1][b : b + 1]))
        yield from self._take(lines, output.hidden[busy, 0])

    def _take(self, lines: Sequence[_Line], hidden: torch.Tensor) -> Iterator[Answer]:
        """Choose the next id of each line from its last hidden state [n, H]; hand out those that end."""
        for line, token in zip(lines, self._choose(self.target.logits(hidden), [line.stream for line in lines]), strict=True):
            line.ids.append(token)
            if token in self.stop_ids or len(line.ids) >= line.limit:
                self.lines[next(b for b, other in enumerate(self.lines) if other is line)] = None
                taps, last = (torch.cat(parts) for parts in zip(*line.states, strict=True)) if self.keep_states else (None, None)
                yield Answer(line.request, line.ids, taps, last)

    def _choose(self, logits: torch.Tensor, streams: Sequence[np.random.Generator]) -> list[int]:
        """One next id a line. logits [n, V]."""
        if self.sampling.greedy:
            return [int(i) for i in logits.argmax(-1)]
        cumulative = probabilities(logits, self.sampling).cumsum(-1)
        draws = torch.tensor([[s.random()] for s in streams], dtype=cumulative.dtype, device=cumulative.device) * cumulative[:, -1:]
        return [int(i) for i in torch.searchsorted(cumulative, draws, right=True).clamp_max(logits.shape[-1] - 1)]


def _cpu(output: TargetOutput, row: int | slice, column: int | slice) -> tuple[torch.Tensor, torch.Tensor]:
    assert output.taps is not None
    return output.taps[row, column].cpu(), output.hidden[row, column].cpu()
