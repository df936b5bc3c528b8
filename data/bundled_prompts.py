"""The bundled prompt set: templates with slots (data/prompt_templates/) expanded to the same list everywhere.

The held-out prompts come from templates and slot values of their own, so a draft head cannot have met them in training.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from data.prompts import Conversation

Split = Literal["train", "heldout"]

SEED = "draftsmith-prompts-1"
"""Another seed makes another prompt set: results measured on the two do not compare."""

PER_CATEGORY: dict[Split, int] = {"train": 140, "heldout": 10}
"""Prompts in each category."""

DIRECTORY = Path(__file__).parent / "prompt_templates"

# Not str.format: prompts about code hold braces of their own.
PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")


@dataclass(frozen=True)
class Template:
    """User turns with ``{name}`` placeholders, and the values each name can take."""

    id: str
    turns: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]

    def expansions(self, rng: Random) -> Iterator[tuple[str, ...]]:
        """Every combination of slot values once, in an order of ``rng``'s in which each slot's values take turns."""
        decks = {name: _deal(values, rng) for name, values in self.slots.items()}
        total = prod(len(values) for values in self.slots.values())
        seen: set[tuple[str, ...]] = set()
        while len(seen) < total:
            chosen = {name: next(deck) for name, deck in decks.items()}
            combination = tuple(chosen.values())
            if combination in seen:
                continue
            seen.add(combination)
            yield tuple(_fill(turn, chosen) for turn in self.turns)


def bundled_prompts(split: Split) -> list[Conversation]:
    """The bundled conversations of a split, categories taking turns: the first N are a balanced sample for any N.

    The list is the same on every call and machine. It holds no duplicates.
    """
    columns = [_expand(split, category, templates, PER_CATEGORY[split]) for category, templates in load_templates(split).items()]
    return list(chain.from_iterable(zip(*columns, strict=True)))


@cache
def load_templates(split: Split) -> dict[str, tuple[Template, ...]]:
    """The templates of a split by category, in the order of the file. A malformed file fails an assertion."""
    raw = yaml.safe_load((DIRECTORY / f"{split}.yaml").read_text(encoding="utf-8"))
    by_category = {category: tuple(_parse(entry) for entry in entries) for category, entries in raw.items()}
    ids = [template.id for template in chain.from_iterable(by_category.values())]
    assert len(ids) == len(set(ids)), f"{split}.yaml: an id is used twice"
    return by_category


def _expand(split: Split, category: str, templates: Sequence[Template], wanted: int) -> list[Conversation]:
    """``wanted`` distinct conversations; the templates take turns, and one that has run out leaves the round."""
    rng = Random(SEED + category)
    round_robin = deque((template, template.expansions(rng)) for template in templates)
    found: dict[tuple[str, ...], Conversation] = {}
    while len(found) < wanted:
        assert round_robin, f"{split}.yaml: {category} has only {len(found)} expansions, not {wanted}"
        template, expansions = round_robin.popleft()
        turns = next((turns for turns in expansions if turns not in found), None)
        if turns is None:
            continue
        source = f"bundled:{split}/{template.id}"
        found[turns] = Conversation.make(category=category, system=None, turns=turns, source=source)
        round_robin.append((template, expansions))
    return list(found.values())


def _fill(turn: str, chosen: dict[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: chosen[match[1]], turn)


def _deal(values: Sequence[str], rng: Random) -> Iterator[str]:
    """The values without end: all of them in a random order, then all of them in another.

    Drawing each value by itself would leave some out of the few expansions that are taken of a template.
    """
    while True:
        yield from rng.sample(values, len(values))


def _parse(entry: dict[str, Any]) -> Template:
    assert set(entry) == {"id", "turns", "slots"}, f"keys of a template: {sorted(entry)}"
    template = Template(
        id=entry["id"],
        turns=tuple(entry["turns"]),
        slots={name: tuple(values) for name, values in entry["slots"].items()},
    )
    _check(template)
    return template


def _check(template: Template) -> None:
    used = {name for turn in template.turns for name in PLACEHOLDER.findall(turn)}
    assert used <= set(template.slots), f"{template.id}: no slot for {sorted(used - set(template.slots))}"
    assert used >= set(template.slots), f"{template.id}: slots not used: {sorted(set(template.slots) - used)}"
    assert 1 <= len(template.turns) <= 2, f"{template.id}: {len(template.turns)} turns"
    for name, values in template.slots.items():
        # YAML reads an unquoted 12, 10:30 or yes as something other than text.
        assert all(isinstance(value, str) for value in values), f"{template.id}: a value of {name} is not text"
        assert len(values) == len(set(values)) > 0, f"{template.id}: {name} has no values or one value twice"
        assert not any(PLACEHOLDER.search(value) for value in values), f"{template.id}: a placeholder in {name}"
