"""The bundled prompt set: size, balance, no leak from held-out to training, and the same list every time."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from data import bundled_prompts as module
from data.bundled_prompts import Template, bundled_prompts, load_templates
from data.prompts import Conversation

ROOT = Path(__file__).parents[2]
GRAM = 8
SPLITS: tuple[module.Split, ...] = ("train", "heldout")


@pytest.fixture(scope="module")
def train() -> list[Conversation]:
    return bundled_prompts("train")


@pytest.fixture(scope="module")
def heldout() -> list[Conversation]:
    return bundled_prompts("heldout")


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(conversation: Conversation) -> set[tuple[str, ...]]:
    """Word-level 8-grams over all turns; a shorter prompt is one gram by itself."""
    tokens = words(" ".join(conversation.turns))
    return {tuple(tokens[start : start + GRAM]) for start in range(max(1, len(tokens) - GRAM + 1))}


def overlap(conversation: Conversation, known: set[tuple[str, ...]]) -> float:
    """Share of the conversation's grams that are in ``known``."""
    own = grams(conversation)
    return len(own & known) / len(own)


def slot_values(split: module.Split) -> set[str]:
    """All slot values that carry meaning: a bare number is no topic, and an empty value leaves an option out."""
    values = {
        value.strip().lower()
        for templates in load_templates(split).values()
        for template in templates
        for slot in template.slots.values()
        for value in slot
    }
    return {value for value in values if re.search(r"[^\W\d]", value)}


def turn_texts(split: module.Split) -> set[str]:
    return {" ".join(words(turn)) for templates in load_templates(split).values() for template in templates for turn in template.turns}


def test_train_has_enough_prompts_over_enough_categories(train: list[Conversation]) -> None:
    counts = Counter(conversation.category for conversation in train)
    assert len(train) >= 1200
    assert len(counts) >= 12
    assert len(set(counts.values())) == 1


def test_heldout_has_120_prompts_with_ten_a_category(heldout: list[Conversation], train: list[Conversation]) -> None:
    counts = Counter(conversation.category for conversation in heldout)
    assert len(heldout) == 120
    assert min(counts.values()) >= 10
    assert set(counts) == {conversation.category for conversation in train}


def test_no_duplicates_within_or_across_splits(train: list[Conversation], heldout: list[Conversation]) -> None:
    every = [*train, *heldout]
    assert len({conversation.id for conversation in every}) == len(every)
    normalised = {tuple(" ".join(words(turn)) for turn in conversation.turns) for conversation in every}
    # Words alone do not tell "2 + 5" from "2 - 5", so this is allowed to be a little smaller.
    assert len(normalised) >= 0.99 * len(every)


def test_splits_share_no_template_text_and_no_slot_value() -> None:
    assert turn_texts("train") & turn_texts("heldout") == set()
    assert slot_values("train") & slot_values("heldout") == set()


def test_no_heldout_prompt_is_close_to_training(train: list[Conversation], heldout: list[Conversation]) -> None:
    known = set().union(*(grams(conversation) for conversation in train))
    close = [conversation.turns for conversation in heldout if overlap(conversation, known) > 0.1]
    assert not close


def test_overlap_finds_a_near_duplicate(train: list[Conversation]) -> None:
    original = next(conversation for conversation in train if len(words(conversation.turns[0])) > 40)
    edited = Conversation.make(turns=(original.turns[0] + " Please answer soon.",))
    assert overlap(edited, grams(original)) > 0.5


@pytest.mark.parametrize("split", SPLITS)
def test_some_prompts_have_two_turns(split: module.Split) -> None:
    prompts = bundled_prompts(split)
    two = sum(len(conversation.turns) == 2 for conversation in prompts)
    assert 0.05 < two / len(prompts) < 0.2
    assert all(len(conversation.turns) in (1, 2) for conversation in prompts)


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_are_complete_and_of_reasonable_length(split: module.Split) -> None:
    for conversation in bundled_prompts(split):
        assert all(turn == turn.strip() and turn for turn in conversation.turns), conversation
        assert not any(re.search(r"\{[a-z0-9_]+\}", turn) for turn in conversation.turns), conversation
        assert 3 <= len(words(conversation.turns[0])) <= 130, conversation
        assert conversation.system is None
        assert conversation.source.startswith(f"bundled:{split}/")


@pytest.mark.parametrize("split", SPLITS)
def test_templates_of_a_category_are_used_about_equally(split: module.Split) -> None:
    counts = Counter(conversation.source for conversation in bundled_prompts(split))
    for templates in load_templates(split).values():
        uses = [counts[f"bundled:{split}/{template.id}"] for template in templates]
        assert max(uses) - min(uses) <= 1, (templates[0].id, uses)


@pytest.mark.parametrize("count", [12, 120])
def test_first_prompts_are_a_balanced_sample(train: list[Conversation], count: int) -> None:
    counts = Counter(conversation.category for conversation in train[:count])
    assert set(counts.values()) == {count // 12}


@pytest.mark.parametrize("split", SPLITS)
def test_expansion_is_the_same_once_reloaded(split: module.Split) -> None:
    first = bundled_prompts(split)
    load_templates.cache_clear()
    assert bundled_prompts(split) == first


def test_expansion_is_the_same_in_a_fresh_process(train: list[Conversation]) -> None:
    # Another hash seed, so that an order taken from a set or from hash() would show.
    code = (
        "import hashlib; from data.bundled_prompts import bundled_prompts;"
        "print(hashlib.sha256(repr(bundled_prompts('train')).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == hashlib.sha256(repr(train).encode()).hexdigest()


def test_a_caller_cannot_change_the_next_callers_list() -> None:
    bundled_prompts("heldout").clear()
    assert len(bundled_prompts("heldout")) == 120


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"id": "a", "turns": ["Say {word}."], "slots": {}}, "no slot for"),
        ({"id": "a", "turns": ["Say it."], "slots": {"word": ["yes"]}}, "not used"),
        ({"id": "a", "turns": ["Say {word}."], "slots": {"word": [12]}}, "not text"),
        ({"id": "a", "turns": ["Say {word}."], "slots": {"word": ["b", "b"]}}, "twice"),
        ({"id": "a", "turns": ["Say {word}."], "slots": {"word": ["a {word}"]}}, "a placeholder in"),
        ({"id": "a", "turns": [], "slots": {}}, "0 turns"),
        ({"id": "a", "turns": ["Say it."]}, "keys of a template"),
    ],
)
def test_malformed_templates_fail_an_assertion(entry: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        module._parse(entry)


def test_too_few_expansions_fail_an_assertion() -> None:
    template = Template("a", ("Say {word}.",), {"word": ("this", "that")})
    with pytest.raises(AssertionError, match="only 2 expansions"):
        module._expand("train", "writing", [template], 3)


def test_expansions_give_every_combination_once_and_every_value_early() -> None:
    slots = {"a": tuple("xyz"), "b": tuple("pqrs"), "c": tuple("mn")}
    every = list(Template("t", ("{a}{b}", "{c}"), slots).expansions(Random(0)))
    assert len(every) == len(set(every)) == 24
    early = ["".join(turns) for turns in every[:8]]
    assert all(any(value in text for text in early) for values in slots.values() for value in values)


def test_braces_that_are_no_placeholder_stay() -> None:
    template = Template("t", ('Run {code} and print("{}")',), {"code": ("fn main() {}",)})
    assert list(template.expansions(Random(0))) == [('Run fn main() {} and print("{}")',)]
