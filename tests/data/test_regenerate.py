"""Answers by the target: batches do not matter, bad answers are dropped and counted, unfit prompts are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import data.regenerate
from data.corpus import Document, TokenCorpus
from data.prompts import Conversation
from data.regenerate import RegenerateConfig, degenerate, generate_batch, held_back, regenerate
from data.template import ChatTemplate
from heads.errors import UserError
from heads.target import FrozenTarget
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [[5, 9, 30], [7] * 11, [40, 41, 42, 43, 44, 45, 46], [100, 3]]
KEYS = [(f"c{i}", 0) for i in range(4)]


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_model(vocab=259, scale=2.0))


def written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turns: tuple[str, ...], answers: list[list[int]], max_length: int = 300
) -> tuple[list[Document], dict[str, Any], list[int]]:
    """Documents and summary where the target "writes" these answers, and the lengths of the prompts it was given."""
    given: list[int] = []

    def scripted(target: Any, prompts: Any, stop_ids: Any, config: Any, keys: Any, *rest: Any) -> list[list[int]]:
        given.extend(map(len, prompts))
        return [answers[turn] for _, turn in keys]

    monkeypatch.setattr(data.regenerate, "generate_batch", scripted)
    nobody: Any = None
    corpus = TokenCorpus(tmp_path, {})
    template = ChatTemplate(tiny_tokenizer())
    regenerate([Conversation.make(turns=turns)], nobody, template, corpus, RegenerateConfig(), max_length)
    return list(corpus.documents()), corpus.seal(259), given


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_greedy_rows_equal_the_library(family: str) -> None:
    model = tiny_model(family, vocab=259, scale=2.0)
    config = RegenerateConfig(max_new_tokens=12)
    rows = generate_batch(FrozenTarget(model), PROMPTS, frozenset({2}), config, KEYS, 400)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=2)
        assert row == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_end_early_leave_the_others_alone(target: FrozenTarget, temperature: float) -> None:
    config = RegenerateConfig(max_new_tokens=20, temperature=temperature)
    free = generate_batch(target, PROMPTS, frozenset(), config, KEYS, 400)
    stops = frozenset({free[1][3], free[3][8]})
    ended = generate_batch(target, PROMPTS, stops, config, KEYS, 400)
    for before, after in zip(free, ended, strict=True):
        first = next((i for i, token in enumerate(before) if token in stops), len(before) - 1)
        assert after == before[: first + 1]
    assert len({len(row) for row in ended}) > 1


def test_a_sampled_answer_does_not_depend_on_its_batch(target: FrozenTarget) -> None:
    config = RegenerateConfig(temperature=1.0, top_p=0.95, max_new_tokens=24)
    together = generate_batch(target, PROMPTS, frozenset({2}), config, KEYS, 400)
    alone = [generate_batch(target, [p], frozenset({2}), config, [k], 400)[0] for p, k in zip(PROMPTS, KEYS)]
    assert together == alone
    backwards = generate_batch(target, PROMPTS[::-1], frozenset({2}), config, KEYS[::-1], 400)
    assert backwards == alone[::-1]
    # Streams are told apart by conversation, by turn and by seed.
    prompt, stops = PROMPTS[:1], frozenset({2})
    variants = [
        generate_batch(target, prompt, stops, config, [("c0", 0)], 400)[0],
        generate_batch(target, prompt, stops, config, [("c9", 0)], 400)[0],
        generate_batch(target, prompt, stops, config, [("c0", 1)], 400)[0],
        generate_batch(target, prompt, stops, config.model_copy(update={"seed": 1}), [("c0", 0)], 400)[0],
    ]
    assert len({tuple(v) for v in variants}) == 4


def test_a_corpus_does_not_depend_on_the_batch_size(target: FrozenTarget, tmp_path: Path) -> None:
    conversations = [Conversation.make(turns=("x" * (3 + 5 * i), "and?")[: 1 + i % 2]) for i in range(9)]
    found = []
    for size in (1, 4):
        corpus = TokenCorpus(tmp_path / str(size), {})
        config = RegenerateConfig(temperature=1.0, max_new_tokens=16, batch_size=size)
        regenerate(conversations, target, ChatTemplate(tiny_tokenizer()), corpus, config, 200)
        found.append([(d.conversation, d.ids.tolist(), d.mask.tolist(), d.finish) for d in corpus.documents()])
        assert len(corpus.shards) == -(-9 // size)
    assert found[0] == found[1] and len({c for c, *_ in found[0]}) == 9


def test_nothing_longer_than_the_context(target: FrozenTarget) -> None:
    config = RegenerateConfig(max_new_tokens=50)
    rows = generate_batch(target, PROMPTS, frozenset(), config, KEYS, 13)
    assert [len(p) + len(r) for p, r in zip(PROMPTS, rows, strict=True)] == [13] * 4


def test_a_cut_answer_is_recorded_and_ends_its_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    documents, summary, given = written(monkeypatch, tmp_path, ("a", "b"), [[50, 51], [52, 2]])
    assert len(given) == 1 and documents[0].finish == ("length",)
    assert documents[0].ids[documents[0].mask == 1].tolist() == [50, 51]
    assert summary["finish"] == {"length": 1} and summary["answer_tokens"] == 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [([2], "empty"), ([0, 1, 2], "empty"), (list(range(60, 64)) * 12, "degenerate"), ([70] * 40 + [2], "degenerate")],
)
def test_bad_first_answers_drop_the_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: list[int], reason: str) -> None:
    documents, summary, _ = written(monkeypatch, tmp_path, ("a",), [bad])
    assert documents == [] and summary["dropped"] == {reason: 1} and summary["documents"] == 0
    assert reason in (tmp_path / "dropped.jsonl").read_text()


def test_a_bad_second_answer_leaves_the_first_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (document,), summary, given = written(monkeypatch, tmp_path, ("a", "b"), [[50, 2], [2]])
    assert len(given) == 2
    assert document.turns == 1 and document.ids.tolist()[-2:] == [50, 2] and len(document.ids) == given[0] + 2
    assert document.mask.tolist() == [0] * given[0] + [1, 1]
    assert summary["dropped"] == {}


def test_a_second_turn_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (document,), _, given = written(monkeypatch, tmp_path, ("a", "b" * 80), [[50, 2], [51, 2]], max_length=100)
    assert len(given) == 1 and document.turns == 1 and document.ids.tolist()[-2:] == [50, 2]


def test_degenerate() -> None:
    assert degenerate([1, 2, 3] * 20) and degenerate([*range(500), *[7] * 96])
    assert not degenerate(list(range(100)))
    assert not degenerate([1, 2] * 5)  # too short to tell
    assert not degenerate([*[7] * 200, *range(96)])  # it found its way out


def test_a_prompt_that_fills_the_context(target: FrozenTarget, tmp_path: Path) -> None:
    corpus = TokenCorpus(tmp_path, {})
    conversations = [Conversation.make(turns=("ok",), source="p.jsonl:1"), Conversation.make(turns=("x" * 90,), source="p.jsonl:2")]
    with pytest.raises(UserError, match=r"p\.jsonl:2 is \d+ tokens long.*context of 64"):
        regenerate(conversations, target, ChatTemplate(tiny_tokenizer()), corpus, RegenerateConfig(max_new_tokens=4), 64)
    assert corpus.shards == []


@pytest.mark.parametrize(("total", "count"), [(10, 1), (10, 3), (24, 8), (7, 6), (5, 0)])
def test_held_back(total: int, count: int) -> None:
    conversations = [Conversation.make(turns=(str(i),)) for i in range(total)]
    training, validation = held_back(conversations, count)
    assert len(validation) == count and len(training) == total - count
    assert {c.id for c in training} | {c.id for c in validation} == {c.id for c in conversations}
    places = [conversations.index(c) for c in validation]
    assert places == sorted(places)
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1  # spread evenly


def test_too_few_prompts_to_hold_back() -> None:
    with pytest.raises(UserError, match="only 3 prompts"):
        held_back([Conversation.make(turns=(str(i),)) for i in range(3)], 3)
