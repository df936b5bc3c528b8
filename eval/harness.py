"""Prompts x drafter -> records: plain decoding and speculative decoding, interleaved in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from tqdm import tqdm

from data.prompts import Conversation, PromptsConfig
from data.template import ChatTemplate, Message, check_fit, opening
from eval.acceptance import RandomDraws
from eval.decoder import DecodeSettings, Generation, decode
from eval.drafters.base import Drafter
from eval.drafters.build import DrafterConfig
from eval.drafters.simple import NoneDrafter
from eval.records import Divergence, PromptRecord, acceptance_length
from eval.stopping import StopRule
from heads.config import Config
from heads.sampling import Sampling
from heads.target import FrozenTarget

WARM_UP_TOKENS = 8


class EvaluateConfig(Config):
    """How acceptance is measured."""

    prompts: PromptsConfig = PromptsConfig(source="bundled:heldout")
    """Held-out prompts."""
    per_category: int | None = Field(default=None, ge=1)
    """Only the first so many prompts of each category; None: all."""
    drafter: DrafterConfig = DrafterConfig()
    """Who drafts; a plain name is short for drafter.kind."""
    draft_length: int = Field(default=5, ge=1, le=64)
    """K: drafted tokens a cycle; of a tree, its depth."""
    max_new_tokens: int = Field(default=256, ge=2)
    """Longest answer."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts decoded at once."""
    timed_batch_size: int | None = Field(default=None, ge=1)
    """Likewise of the prompts that the target also decodes alone, to compare speeds; None: batch_size."""
    temperature: float = Field(default=0.0, ge=0.0, le=5.0)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus of the target's sampling, and of the drafter's where proposals are sampled."""
    top_k: int = Field(default=0, ge=0)
    """Likewise the most likely so many tokens; 0: all."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    """Of the target's sampling, over prompt and output; 1: none."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, besides the target's end-of-turn tokens."""
    proposals: Literal["greedy", "sampled"] = "sampled"
    """At temperature above 0: draw drafts from the drafter (rules 2.2, 2.5) or take its most likely ones (2.3, 2.4). At 0 the latter."""
    acceptance: Literal["exact", "typical"] = "exact"
    """exact: the output has the target's law. typical: rule 2.6 (Medusa), longer accepted drafts, NOT lossless."""
    seed: int = 0
    plain_prompts: int | None = Field(default=None, ge=0)
    """Prompts that the target also decodes alone, spread over the set, to compare speeds; None: all. The output of every other greedy
    prompt is still checked, by one forward of the target over it."""
    bootstrap: int = Field(default=10000, ge=100)
    """Resamples behind each interval."""
    label: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The report lies in runs/NAME/report-LABEL; None: in report, or report-KIND for other drafters than the head."""
    checkpoint: str = "best"
    """best, last, or the name of a folder under checkpoints/."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.repetition_penalty)

    @property
    def lossless(self) -> bool:
        return self.acceptance == "exact"

    def settings(self, template: ChatTemplate) -> DecodeSettings:
        """How the decoder is to run."""
        stop = StopRule(template.stop_ids, self.stop, template.decode)
        return DecodeSettings(self.draft_length, self.max_new_tokens, stop, self.sampling, self.acceptance == "typical")


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


@dataclass
class _Talk:
    """A conversation on its way."""

    number: int
    conversation: Conversation
    messages: list[Message]
    rendered: str
    ids: list[int]


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
    settings = config.settings(template)
    if timed:
        warm = template.encode(template.render(opening(conversations[0])))[:64]
        warm_up(target, warm, drafter, settings)
    # Timed and untimed prompts never share a batch, so that batches of both kinds are full and alike.
    order = sorted(range(len(conversations)), key=lambda i: i not in timed)
    groups = _cut(order[: len(timed)], config.timed_batch_size or config.batch_size) + _cut(order[len(timed) :], config.batch_size)
    found: dict[int, list[PromptRecord]] = {}
    with tqdm(total=len(conversations), unit="prompt", desc="decoding", disable=not progress, leave=progress) as bar:
        for number, group in enumerate(groups):
            talks = [_start(i, conversations[i], template) for i in group]
            turn = 0
            while talks:
                records = _decode_turn(
                    target, drafter, talks, turn, config, settings, group[0] in timed, baseline, bool((number + turn) % 2)
                )
                for talk, (record, _) in zip(talks, records, strict=True):
                    found.setdefault(talk.number, []).append(record)
                talks = [t for t, (_, answer) in zip(talks, records, strict=True) if _goes_on(t, answer, turn, template, target.max_length)]
                turn += 1
            bar.update(len(group))
            cycles = [c for records_of in found.values() for r in records_of for c in r.cycles]
            bar.set_postfix_str(f"acceptance length {acceptance_length(cycles):.2f}")
    return [record for i in range(len(conversations)) for record in found[i]]


def warm_up(target: FrozenTarget, prompt: list[int], drafter: Drafter, settings: DecodeSettings) -> None:
    """What only the first call pays for (kernels chosen, a cross drafter's calibration) happens here, outside measured ones."""
    decode(target, [prompt], drafter, dataclasses.replace(settings, max_new_tokens=WARM_UP_TOKENS))


def _cut(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def _start(number: int, conversation: Conversation, template: ChatTemplate) -> _Talk:
    messages = opening(conversation)
    rendered = template.render(messages)
    return _Talk(number, conversation, messages, rendered, template.encode(rendered))


def _decode_turn(
    target: FrozenTarget,
    drafter: Drafter,
    talks: Sequence[_Talk],
    turn: int,
    config: EvaluateConfig,
    settings: DecodeSettings,
    timed: bool,
    baseline: bool,
    plain_first: bool,
) -> list[tuple[PromptRecord, list[int]]]:
    """One turn of a batch of conversations: its records and answers."""
    prompts = [t.ids for t in talks]

    def run(by: Drafter) -> list[Generation]:
        return decode(target, prompts, by, settings, [RandomDraws(config.seed + 1000 * t.number + turn) for t in talks])

    plain: Sequence[Generation | None] = [None] * len(talks)
    if timed and plain_first:
        plain = run(NoneDrafter())
    fast = run(drafter)
    if timed and not plain_first:
        plain = run(NoneDrafter())
    speeds = _share(fast), _share([p for p in plain if p is not None])
    records = []
    for talk, f, p in zip(talks, fast, plain, strict=True):
        checked = baseline and settings.sampling.greedy and config.lossless and (p is not None or settings.sampling.repetition_penalty == 1)
        divergence = None
        if checked and p is not None:
            divergence = first_divergence(target, talk.ids, p.tokens, f.tokens)
        elif checked:
            divergence = first_departure(target, talk.ids, f.tokens)
        records.append((_record(talk, turn, f, p, speeds, checked, divergence), f.tokens))
    return records


def _goes_on(talk: _Talk, answer: list[int], turn: int, template: ChatTemplate, max_length: int) -> bool:
    """Add an answer and the next user turn to the conversation; False where there is none, or no room."""
    turns = talk.conversation.turns
    if turn + 1 >= len(turns):
        return False
    talk.messages += [
        {"role": "assistant", "content": template.answer_text(answer)},
        {"role": "user", "content": turns[turn + 1]},
    ]
    talk.ids, talk.rendered, _ = template.continue_ids([*talk.ids, *answer], talk.rendered, answer, talk.messages)
    return len(talk.ids) < max_length


def _share(batch: Sequence[Generation]) -> tuple[float, float]:
    """Wall and CPU seconds of a batch, shared out evenly over its sequences."""
    if not batch:
        return 0.0, 0.0
    return max(g.seconds for g in batch) / len(batch), max(g.cpu_seconds for g in batch) / len(batch)


def _record(
    talk: _Talk,
    turn: int,
    fast: Generation,
    plain: Generation | None,
    speeds: tuple[tuple[float, float], tuple[float, float]],
    checked: bool,
    divergence: Divergence | None,
) -> PromptRecord:
    (seconds, cpu_seconds), (plain_seconds, plain_cpu_seconds) = speeds
    return PromptRecord(
        prompt_id=talk.conversation.id,
        category=talk.conversation.category,
        turn=turn,
        prompt_tokens=len(talk.ids),
        output_tokens=len(fast.tokens),
        cycles=tuple(fast.cycles),
        finish=fast.finish,
        plain_tokens=len(plain.tokens) if plain else 0,
        plain_seconds=plain_seconds,
        speculative_seconds=seconds,
        plain_cpu_seconds=plain_cpu_seconds,
        speculative_cpu_seconds=cpu_seconds,
        draft_seconds=fast.draft_seconds,
        verify_seconds=fast.verify_seconds,
        checked=checked,
        divergence=divergence,
        context=tuple(talk.ids),
        output=tuple(fast.tokens),
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
