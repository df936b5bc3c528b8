"""Answers by the target itself, in process: batched, with its KV cache, at the recipe's sampling (ALGORITHMS 12.1, 12.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field
from tqdm import tqdm

from data.corpus import Document, Dropped, TokenCorpus
from data.features import FeatureStore, States
from data.generation import Answer, Request, generate
from data.prompts import Conversation
from data.template import ChatTemplate, Message, check_fit, opening
from heads.config import Config
from heads.errors import UserError
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
    """Conversations answered at once; one that ends makes room for the next."""
    seed: int = 0
    """Of the sampling; each conversation and turn has a stream of its own."""
    keep_features: bool = False
    """Keep the states the target has while it writes (4 (A + 1) H bytes a token in float32), so that training need not run it again."""


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
    latest: States | None = None
    """The target's states over the ids up to the last answer, less one."""
    states: list[States] = field(default_factory=list)
    """Of each document, where they are kept."""

    def close(self, without_open_prompt: bool = False) -> None:
        """Make a document of what there is, less the prompt of a turn that got no answer."""
        end = len(self.mask) - self.mask[::-1].index(1) if without_open_prompt else len(self.ids)
        c = self.conversation
        ids, mask = np.array(self.ids[:end], np.int32), np.array(self.mask[:end], np.uint8)
        self.documents.append(Document(c.id, c.category, len(self.finish), tuple(self.finish), ids, mask))
        if self.latest is not None:
            self.states.append((self.latest[0][: end - 1], self.latest[1][: end - 1]))


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
    features: FeatureStore | None = None,
) -> None:
    """Answer every conversation that the corpus does not hold yet; a shard is written whenever a batch of them is done.

    Args:
        max_length: longest document in tokens; a turn whose prompt leaves no room is an error before anything is generated.
        features: where the target's states are kept, if they are.
    """
    check_fit(conversations, template, max_length)
    done = corpus.answered()
    rows = {c.id: _start(c, template) for c in conversations if c.id not in done}
    # Like lengths together: less padding. The order is a function of the prompts alone.
    order = sorted(rows.values(), key=lambda row: (-len(row.conversation.turns), len(row.ids), row.conversation.id))
    queue = deque(Request((row.conversation.id, 0), row.ids) for row in order)
    writer = _Writer(corpus, features, config.batch_size)
    with tqdm(total=len(conversations), initial=len(conversations) - len(rows), unit="prompt", desc="answers by the target") as bar:
        tokens = 0
        for answer in generate(target, queue, template.stop_ids, config, max_length, features is not None):
            row, turn = rows[answer.request.key[0]], answer.request.key[1]
            tokens += len(answer.ids)
            if _take(row, answer, turn, template, writer.dropped, max_length):
                # First in the queue: a conversation is finished before a new one is begun.
                queue.appendleft(Request((row.conversation.id, turn + 1), row.ids))
                continue
            writer.add(row)
            bar.update(1)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s")
        writer.flush()


class _Writer:
    """Gathers finished conversations and writes them by the batch, features first: a document in the corpus has its features."""

    def __init__(self, corpus: TokenCorpus, features: FeatureStore | None, size: int) -> None:
        self._corpus, self._features, self._size = corpus, features, size
        self._rows: list[_Row] = []
        self.dropped: list[Dropped] = []

    def add(self, row: _Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= self._size:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        if self._features is not None:
            self._features.append([(d.ids, s) for r in self._rows for d, s in zip(r.documents, r.states, strict=True)])
        self._corpus.append([d for r in self._rows for d in r.documents], self.dropped)
        self._rows, self.dropped = [], []


def _start(conversation: Conversation, template: ChatTemplate) -> _Row:
    messages = opening(conversation)
    rendered = template.render(messages)
    ids = template.encode(rendered)
    return _Row(conversation, messages, rendered, ids, [0] * len(ids), [], [])


def _take(row: _Row, answer: Answer, turn: int, template: ChatTemplate, dropped: list[Dropped], max_length: int) -> bool:
    """Add an answer to its row; True where another turn follows."""
    ids = answer.ids
    stopped = bool(ids) and ids[-1] in template.stop_ids
    reason = "empty" if not template.answer_text(ids).strip() else "degenerate" if degenerate(ids) else None
    if reason:
        # What came before the bad answer is good; a first bad answer drops the conversation.
        if row.finish:
            row.close(without_open_prompt=True)
        elif not row.documents:
            dropped.append(Dropped(row.conversation.id, reason))
        return False
    row.ids = row.ids + ids
    row.mask += [1] * len(ids)
    row.finish.append("stop" if stopped else "length")
    if answer.taps is not None and answer.hidden is not None:
        row.latest = answer.taps, answer.hidden
    turns = row.conversation.turns
    if turn + 1 < len(turns) and stopped:
        row.messages += [
            {"role": "assistant", "content": template.answer_text(ids)},
            {"role": "user", "content": turns[turn + 1]},
        ]
        longer, rendered, continues = template.continue_ids(row.ids, row.rendered, ids, row.messages)
        if len(longer) < max_length:
            if not continues:
                row.close()
                row.mask, row.finish = [], []
            row.mask += [0] * (len(longer) - len(row.mask))
            row.ids, row.rendered = longer, rendered
            return True
    row.close()
    return False


def held_back(conversations: Sequence[Conversation], count: int) -> tuple[list[Conversation], list[Conversation]]:
    """Split off ``count`` conversations, spread evenly, that training never sees: (training, validation)."""
    if count >= len(conversations):
        raise UserError(f"validation is {count}, and there are only {len(conversations)} prompts; hold back fewer")
    step = len(conversations) / max(count, 1)
    chosen = {int(step * i + step / 2) for i in range(count)}
    train = [c for i, c in enumerate(conversations) if i not in chosen]
    return train, [c for i, c in enumerate(conversations) if i in chosen]
