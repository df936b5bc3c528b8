"""The doctor: what is wrong with a corpus, or odd about it, found in every row before anything is trained on it (ALGORITHMS 12.2, 12.5).

Hard faults make heads that look trained and are accepted 1.1 tokens at a time in serving; they stop the run. Others are counted and said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from data.corpus import Document
from data.template import ChatTemplate, Message

SHOWN = 8  # row numbers kept of each finding


@dataclass
class Finding:
    """One thing found, and in which rows."""

    name: str
    hard: bool
    means: str
    """What it is and what to do about it, a sentence."""
    count: int = 0
    rows: list[int] = field(default_factory=list)
    """Numbers of the first documents it was found in, in the corpus's order."""

    def add(self, row: int) -> None:
        self.count += 1
        if len(self.rows) < SHOWN:
            self.rows.append(row)


def answers(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of every stretch of ones in mask [n]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _kinds() -> dict[str, Finding]:
    found = [
        Finding("empty mask", True, "no token of the row is an answer, so it trains nothing; prepare the corpus again"),
        Finding("answer without prompt", True, "the row begins with an answer, which serving never does; prepare the corpus again"),
        Finding(
            "answers and finish reasons differ", True, "the mask has another number of answers than were recorded; prepare the corpus again"
        ),
        Finding(
            "end of turn missing",
            True,
            "an answer that ended by itself lacks its end-of-turn token, so the head would never learn to end a turn; check the target's "
            "end-of-turn ids (generation_config.json)",
        ),
        Finding(
            "answer behind its end of turn",
            True,
            "an end-of-turn token stands in the middle of an answer, where serving stops; prepare the corpus again",
        ),
        Finding("cut answer", False, "the answer reached regenerate.max_new_tokens; where there are many, raise it"),
        Finding("answer of one token", False, "too short to carry loss: two answer tokens in a row are needed; the row is left out"),
        Finding("longer than a row", False, "cut at packing.max_length in training; raise it to keep the rest"),
        Finding(
            "history rewritten",
            False,
            "the chat template changes earlier turns (drops reasoning, trims blanks), so each turn became a row of its own, as in serving",
        ),
    ]
    return {f.name: f for f in found}


def examine(documents: Iterable[Document], stop_ids: frozenset[int], max_length: int) -> tuple[list[Finding], int]:
    """Check every document.

    Args:
        max_length: packing.max_length.

    Returns:
        What was found (hard faults first), and how many documents there are.
    """
    kinds = _kinds()
    stops = np.array(sorted(stop_ids), np.int64)
    seen: set[str] = set()
    total = 0
    for row, document in enumerate(documents):
        total += 1
        for name in _odd(document, stops, max_length):
            kinds[name].add(row)
        if document.conversation in seen:
            kinds["history rewritten"].add(row)
        seen.add(document.conversation)
    return [f for f in kinds.values() if f.count], total


def _odd(document: Document, stops: np.ndarray, max_length: int) -> Iterator[str]:
    """Names of what is odd about one document, each at most once."""
    ids, mask = document.ids, document.mask
    spans = answers(mask)
    if not spans:
        yield "empty mask"
        return
    if spans[0][0] == 0:
        yield "answer without prompt"
    if len(spans) != len(document.finish):
        yield "answers and finish reasons differ"
    ends = np.isin(ids, stops)
    if any(f == "stop" and not ends[b - 1] for (_, b), f in zip(spans, document.finish)):
        yield "end of turn missing"
    if any(ends[a : b - 1].any() for a, b in spans):
        yield "answer behind its end of turn"
    if "length" in document.finish:
        yield "cut answer"
    if all(b - a < 2 for a, b in spans):
        yield "answer of one token"
    if len(ids) > max_length:
        yield "longer than a row"


@dataclass(frozen=True)
class TemplateCheck:
    """What a chat template does with a conversation of two turns."""

    prefix_stable: bool
    """Whether the text of the first turn is the beginning of that of both."""
    generation_prompt: str
    """What opens an answer; "" where the template opens none."""
    system: str
    """kept, folded into the first turn, or refused."""


def check_template(template: ChatTemplate) -> TemplateCheck:
    """Render made-up turns and look."""
    talk: list[Message] = [{"role": "user", "content": "Name a color."}]
    first = template.render(talk)
    bare = template.render(talk, generation_prompt=False)
    talk += [{"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Another."}]
    whole = template.render(talk)
    marker = "Answer in one word."
    try:
        system = "kept" if marker in template.render([{"role": "system", "content": marker}, *talk[:1]]) else "left out"
    except Exception:  # whatever the template raises
        system = "refused"
    opened = first[len(bare) :] if first.startswith(bare) else ""
    return TemplateCheck(whole.startswith(first + "Blue."), opened, system)


def first_difference(trained: str, served: str) -> str | None:
    """Where two rendered prompts part, with a little of both; None where they are equal."""
    if trained == served:
        return None
    at = next((i for i, (a, b) in enumerate(zip(trained, served)) if a != b), min(len(trained), len(served)))
    return f"at character {at}: {trained[at : at + 40]!r} in training, {served[at : at + 40]!r} in serving"


def pieces(document: Document, template: ChatTemplate) -> list[tuple[str, str]]:
    """A document as (kind, text) pieces for showing: prompt, answer, end (an end-of-turn token that the target wrote)."""
    spans = answers(document.mask)
    cuts = sorted({0, len(document.ids), *(edge for span in spans for edge in span)})
    shown: list[tuple[str, str]] = []
    for low, high in pairwise(cuts):
        ids = document.ids[low:high].tolist()
        if not document.mask[low]:
            shown.append(("prompt", template.decode(ids)))
            continue
        ended = ids[-1] in template.stop_ids
        shown.append(("answer", template.decode(ids[:-1] if ended else ids)))
        if ended:
            shown.append(("end", template.decode(ids[-1:])))
    return shown


def as_rows(findings: Sequence[Finding], total: int) -> list[dict[str, Any]]:
    """Findings as JSON."""
    return [
        {"finding": f.name, "hard": f.hard, "rows": f.count, "share": f.count / max(total, 1), "first rows": f.rows, "means": f.means}
        for f in findings
    ]
