"""Answers by the target itself, in process: batched, with its KV cache, at the recipe's sampling (ALGORITHMS 12.1, 12.2).

Shapes: B rows of a batch, T padded length, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from tqdm import tqdm

from data.corpus import Document, Dropped, TokenCorpus
from data.prompts import Conversation
from data.template import ChatTemplate, Message, check_fit, opening
from heads.cache import TargetCache
from heads.config import Config
from heads.errors import UserError
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget


class RegenerateConfig(Config):
    """How the target answers the prompts: as it will be served."""

    temperature: float = Field(default=0.0, ge=0.0, le=5.0)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus; 1 keeps all."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest answer; longer ones are cut and recorded as finish: length."""
    batch_size: int = Field(default=32, ge=1)
    """Conversations answered at once."""
    seed: int = 0
    """Of the sampling; each conversation and turn has a stream of its own."""


@dataclass
class _Row:
    """A conversation on its way."""

    conversation: Conversation
    messages: list[Message]
    rendered: str
    ids: list[int]
    mask: list[int]
    finish: list[str]
    documents: list[Document]

    def document(self) -> Document:
        c = self.conversation
        return Document(
            c.id,
            c.category,
            len(self.finish),
            tuple(self.finish),
            np.array(self.ids, np.int32),
            np.array(self.mask, np.uint8),
        )


def degenerate(answer: Sequence[int], window: int = 96) -> bool:
    """Whether the end of an answer only repeats itself: fewer than a third of its 4-grams are distinct."""
    tail = list(answer[-window:])
    grams = [tuple(tail[i : i + 4]) for i in range(len(tail) - 3)]
    return len(grams) >= 24 and len(set(grams)) < len(grams) / 3


def regenerate(
    conversations: Sequence[Conversation],
    target: FrozenTarget,
    template: ChatTemplate,
    corpus: TokenCorpus,
    config: RegenerateConfig,
    max_length: int,
) -> None:
    """Answer every conversation that the corpus does not hold yet; one shard a batch.

    Args:
        max_length: longest document in tokens; a turn whose prompt leaves no room is an error before anything is generated.
    """
    check_fit(conversations, template, max_length)
    done = corpus.answered()
    rows = [_start(c, template) for c in conversations if c.id not in done]
    # Like lengths together: less padding. The order is a function of the prompts alone.
    rows.sort(key=lambda row: (len(row.conversation.turns), len(row.ids), row.conversation.id))
    with tqdm(total=len(conversations), initial=len(conversations) - len(rows), unit="prompt", desc="answers by the target") as bar:
        tokens = 0
        for first in range(0, len(rows), config.batch_size):
            batch = rows[first : first + config.batch_size]
            dropped: list[Dropped] = []
            active = batch
            turn = 0
            while active:
                answers = generate_batch(
                    target,
                    [r.ids for r in active],
                    template.stop_ids,
                    config,
                    [(r.conversation.id, turn) for r in active],
                    max_length,
                    bar,
                )
                tokens += sum(map(len, answers))
                active = [r for r, a in zip(active, answers, strict=True) if _take(r, a, turn, template, dropped, max_length)]
                turn += 1
            corpus.append([d for r in batch for d in r.documents], dropped)
            bar.update(len(batch))
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s")


def _start(conversation: Conversation, template: ChatTemplate) -> _Row:
    messages = opening(conversation)
    rendered = template.render(messages)
    ids = template.encode(rendered)
    return _Row(conversation, messages, rendered, ids, [0] * len(ids), [], [])


def _take(row: _Row, answer: list[int], turn: int, template: ChatTemplate, dropped: list[Dropped], max_length: int) -> bool:
    """Add an answer to its row; True where another turn follows."""
    stopped = bool(answer) and answer[-1] in template.stop_ids
    reason = "empty" if not template.answer_text(answer).strip() else "degenerate" if degenerate(answer) else None
    if reason:
        # What came before the bad answer is good; a first bad answer drops the conversation.
        if row.finish:
            row.documents.append(_without_open_prompt(row))
        elif not row.documents:
            dropped.append(Dropped(row.conversation.id, reason))
        return False
    row.ids += answer
    row.mask += [1] * len(answer)
    row.finish.append("stop" if stopped else "length")
    turns = row.conversation.turns
    if turn + 1 < len(turns) and stopped:
        row.messages += [
            {"role": "assistant", "content": template.answer_text(answer)},
            {"role": "user", "content": turns[turn + 1]},
        ]
        ids, rendered, continues = template.continue_ids(row.ids, row.rendered, answer, row.messages)
        if len(ids) < max_length:
            if not continues:
                row.documents.append(row.document())
                row.mask, row.finish = [], []
            row.mask += [0] * (len(ids) - len(row.mask))
            row.ids, row.rendered = ids, rendered
            return True
    row.documents.append(row.document())
    return False


def _without_open_prompt(row: _Row) -> Document:
    """The row's document less the prompt of the turn that got no answer."""
    end = len(row.mask) - row.mask[::-1].index(1)
    row.ids, row.mask = row.ids[:end], row.mask[:end]
    return row.document()


def _stream(seed: int, key: tuple[str, int]) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{key[0]}/{key[1]}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


@torch.no_grad()
def generate_batch(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    config: RegenerateConfig,
    keys: Sequence[tuple[str, int]],
    max_length: int,
    bar: tqdm | None = None,  # type: ignore[type-arg]
) -> list[list[int]]:
    """Continue left-padded prompts until each has written a stop id or its limit; rows that are done leave the batch.

    Args:
        keys: one a row; with config.seed they name the row's own random stream, whatever batch it runs in.

    Returns:
        The new ids of each row, the stop id included.
    """
    device = target.device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    seen = torch.zeros(len(prompts), width, dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        ids[index, width - len(prompt) :] = torch.tensor(prompt)
        seen[index, width - len(prompt) :] = 1
    ids, seen = ids.to(device), seen.to(device)
    streams = [_stream(config.seed, key) for key in keys]
    sampling = Sampling(temperature=config.temperature, top_p=config.top_p)
    limits = [min(config.max_new_tokens, max_length - len(p)) for p in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    cache = TargetCache()
    position = (seen.cumsum(1) - 1).clamp_min(0)
    hidden = target.forward(ids, cache=cache, position=position, attention_mask=seen, taps=False).hidden[:, -1]
    position = position[:, -1:]
    while True:
        next_ids = _choose(target.logits(hidden), sampling, [streams[i] for i in live])
        keep = []
        for row, (index, token) in enumerate(zip(live, next_ids, strict=True)):
            answers[index].append(token)
            if token not in stop_ids and len(answers[index]) < limits[index]:
                keep.append(row)
        if not keep:
            return answers
        if len(keep) < len(live):
            rows = torch.tensor(keep, device=device)
            cache.select(rows)
            seen, position = seen[rows], position[rows]
            next_ids, live = [next_ids[r] for r in keep], [live[r] for r in keep]
        if bar is not None and cache.length % 16 == 0:
            bar.refresh()
        position = position + 1
        seen = torch.cat((seen, seen.new_ones(len(live), 1)), dim=1)
        column = torch.tensor(next_ids, device=device).unsqueeze(1)
        hidden = target.forward(column, cache=cache, position=position, attention_mask=seen, taps=False).hidden[:, -1]


def _choose(logits: torch.Tensor, sampling: Sampling, streams: Sequence[np.random.Generator]) -> list[int]:
    """One next id a row. logits [B, V]."""
    if sampling.temperature == 0:
        return [int(i) for i in logits.argmax(-1)]
    cumulative = probabilities(logits, sampling).cumsum(-1)
    draws = torch.tensor([[s.random()] for s in streams], dtype=cumulative.dtype, device=cumulative.device) * cumulative[:, -1:]
    return [int(i) for i in torch.searchsorted(cumulative, draws, right=True).clamp_max(logits.shape[-1] - 1)]


def held_back(conversations: Sequence[Conversation], count: int) -> tuple[list[Conversation], list[Conversation]]:
    """Split off ``count`` conversations, spread evenly, that training never sees: (training, validation)."""
    if count >= len(conversations):
        raise UserError(f"validation is {count}, and there are only {len(conversations)} prompts; hold back fewer")
    step = len(conversations) / max(count, 1)
    chosen = {int(step * i + step / 2) for i in range(count)}
    train = [c for i, c in enumerate(conversations) if i not in chosen]
    return train, [c for i, c in enumerate(conversations) if i in chosen]
