"""Prompts x drafter -> records: plain decoding and speculative decoding, interleaved in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from tqdm import tqdm

from data.prompts import Conversation, PromptsConfig
from data.template import ChatTemplate, check_fit, opening
from eval.acceptance import RandomDraws
from eval.decoder import Generation, decode
from eval.drafters.base import Drafter
from eval.drafters.simple import NoneDrafter
from eval.records import Divergence, PromptRecord
from heads.config import Config
from heads.sampling import Sampling
from heads.target import FrozenTarget


class EvaluateConfig(Config):
    """How acceptance is measured."""

    prompts: PromptsConfig = PromptsConfig(source="bundled:heldout")
    """Held-out prompts."""
    per_category: int | None = Field(default=None, ge=1)
    """Only the first so many prompts of each category; None: all."""
    draft_length: int = Field(default=5, ge=1, le=64)
    """K: drafted tokens a cycle."""
    max_new_tokens: int = Field(default=256, ge=2)
    """Longest answer."""
    temperature: float = Field(default=0.0, ge=0.0, le=5.0)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus of the target's sampling, and of the head's where proposals are sampled."""
    proposals: Literal["greedy", "sampled"] = "sampled"
    """At temperature above 0: draw drafts from the head (rule 2.2) or take its argmax (rule 2.3). At 0 they are argmax."""
    seed: int = 0
    plain_prompts: int | None = Field(default=None, ge=0)
    """Prompts that the target also decodes alone, spread over the set, to compare speeds; None: all. The output of every other greedy
    prompt is still checked, by one forward of the target over it."""
    bootstrap: int = Field(default=10000, ge=100)
    """Resamples behind each interval."""
    checkpoint: str = "best"
    """best, last, or the name of a folder under checkpoints/."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p)


def spread(count: int, chosen: int | None) -> frozenset[int]:
    """``chosen`` of the numbers 0..count-1 at even distances; None: all."""
    if chosen is None or chosen >= count:
        return frozenset(range(count))
    return frozenset(int((i + 0.5) * count / chosen) for i in range(chosen))


def choose(conversations: Sequence[Conversation], per_category: int | None) -> list[Conversation]:
    """The first ``per_category`` conversations of each category, in their order."""
    seen: dict[str, int] = {}
    chosen = []
    for conversation in conversations:
        seen[conversation.category] = seen.get(conversation.category, 0) + 1
        if per_category is None or seen[conversation.category] <= per_category:
            chosen.append(conversation)
    return chosen


Decode = Callable[[list[int], Drafter, int], Generation]


def evaluate(
    target: FrozenTarget,
    template: ChatTemplate,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    config: EvaluateConfig,
    *,
    baseline: bool = True,
    progress: bool = True,
) -> list[PromptRecord]:
    """Decode every turn of every conversation with the drafter, and (baseline) config.plain_prompts of them with the target alone too.

    The two take turns in going first, so that drift of the machine's speed falls on both. The second turn of a conversation follows the
    speculative answer of the first. Without a baseline nothing is compared or checked, and its fields are 0.
    """
    check_fit(conversations, template, target.max_length)
    timed = spread(len(conversations), config.plain_prompts) if baseline else frozenset()

    def run(ids: list[int], by: Drafter, seed: int) -> Generation:
        return decode(
            target, ids, by, draft_length=config.draft_length, max_new_tokens=config.max_new_tokens,
            stop_ids=template.stop_ids, sampling=config.sampling, draws=RandomDraws(seed),
        )  # fmt: skip

    if timed:
        _warm_up(run, template, drafter, conversations[0])
    records: list[PromptRecord] = []
    with tqdm(conversations, unit="prompt", desc="decoding", disable=not progress, leave=progress) as bar:
        for index, conversation in enumerate(bar):
            records += _conversation(target, template, drafter, conversation, config, run, index in timed, baseline, len(records))
            cycles = sum(len(r.cycles) for r in records)
            accepted = sum(c.accepted for r in records for c in r.cycles)
            bar.set_postfix_str(f"acceptance length {1 + accepted / max(cycles, 1):.2f}")
    return records


def _warm_up(run: Decode, template: ChatTemplate, drafter: Drafter, conversation: Conversation) -> None:
    ids = template.encode(template.render(opening(conversation)))[:64]
    run(ids, drafter, 0)


def _conversation(
    target: FrozenTarget,
    template: ChatTemplate,
    drafter: Drafter,
    conversation: Conversation,
    config: EvaluateConfig,
    run: Decode,
    timed: bool,
    check: bool,
    number: int,
) -> list[PromptRecord]:
    messages = opening(conversation)
    rendered = template.render(messages)
    ids = template.encode(rendered)
    records = []
    for turn in range(len(conversation.turns)):
        seed = config.seed + number + turn
        plain: Generation | None = None
        if timed and (number + turn) % 2:
            plain = run(ids, NoneDrafter(), seed)
        fast = run(ids, drafter, seed)
        if timed and plain is None:
            plain = run(ids, NoneDrafter(), seed)
        checked = check and config.sampling.greedy
        divergence = None
        if checked and plain:
            divergence = first_divergence(target, ids, plain.tokens, fast.tokens)
        elif checked:
            divergence = first_departure(target, ids, fast.tokens)
        records.append(_record(conversation, turn, len(ids), fast, plain, checked, divergence))
        if turn + 1 < len(conversation.turns):
            messages += [
                {"role": "assistant", "content": template.answer_text(fast.tokens)},
                {"role": "user", "content": conversation.turns[turn + 1]},
            ]
            ids, rendered, _ = template.continue_ids([*ids, *fast.tokens], rendered, fast.tokens, messages)
            if len(ids) >= target.max_length:
                break
    return records


def _record(
    conversation: Conversation,
    turn: int,
    prompt: int,
    fast: Generation,
    plain: Generation | None,
    checked: bool,
    divergence: Divergence | None,
) -> PromptRecord:
    return PromptRecord(
        prompt_id=conversation.id,
        category=conversation.category,
        turn=turn,
        prompt_tokens=prompt,
        output_tokens=len(fast.tokens),
        cycles=tuple(fast.cycles),
        finish=fast.finish,
        plain_tokens=len(plain.tokens) if plain else 0,
        plain_seconds=plain.seconds if plain else 0.0,
        speculative_seconds=fast.seconds,
        plain_cpu_seconds=plain.cpu_seconds if plain else 0.0,
        speculative_cpu_seconds=fast.cpu_seconds,
        draft_seconds=fast.draft_seconds,
        verify_seconds=fast.verify_seconds,
        checked=checked,
        divergence=divergence,
    )


@torch.no_grad()
def first_divergence(target: FrozenTarget, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> Divergence | None:
    """Where two greedy outputs part, with the target's top-2 logit gap there; None where they are equal."""
    if list(expected) == list(got):
        return None
    shared = min(len(expected), len(got))
    at = next((i for i in range(shared) if expected[i] != got[i]), shared)
    ids = torch.tensor([[*prompt, *expected[:at]]], device=target.device)
    top = target.logits(target.forward(ids, taps=False).hidden[0, -1]).float().topk(2).values
    end = -1  # one output ended where the other went on
    return Divergence(at, expected[at] if at < len(expected) else end, got[at] if at < len(got) else end, float(top[0] - top[1]))


@torch.no_grad()
def first_departure(target: FrozenTarget, prompt: Sequence[int], got: Sequence[int]) -> Divergence | None:
    """The first token of a greedy output that is not the target's argmax after all before it, by one forward over prompt and output.

    None where there is none: then the output is the target's own, as far as it goes.
    """
    ids = torch.tensor([[*prompt, *got[:-1]]], device=target.device)
    logits = target.logits(target.forward(ids, taps=False).hidden[0, len(prompt) - 1 :])
    best = logits.argmax(-1).tolist()
    for at, (expected, token) in enumerate(zip(best, got, strict=True)):
        if expected != token:
            top = logits[at].float().topk(2).values
            return Divergence(at, expected, token, float(top[0] - top[1]))
    return None
