"""Answers by the target: batches do not matter, bad answers are dropped and counted, unfit prompts are refused, states are kept."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import data.regenerate
from data.corpus import Document, TokenCorpus
from data.features import FeatureStore
from data.generation import Answer
from data.prompts import Conversation
from data.regenerate import RegenerateConfig, degenerate, held_back, regenerate
from data.template import ChatTemplate
from heads.errors import UserError
from heads.target import FrozenTarget
from tests.tiny import scripted_generate, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_model(vocab=259, scale=2.0))


def written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turns: tuple[str, ...], answers: list[list[int]], max_length: int = 300
) -> tuple[list[Document], dict[str, Any], list[int]]:
    """Documents and summary where the target "writes" these answers, and the lengths of the prompts it was given."""
    prompts: list[list[int]] = []
    monkeypatch.setattr(data.regenerate, "generate", scripted_generate(answers, prompts))
    nobody: Any = None
    corpus = TokenCorpus(tmp_path, {})
    template = ChatTemplate(tiny_tokenizer())
    regenerate([Conversation.make(turns=turns)], nobody, template, corpus, RegenerateConfig(), max_length)
    return list(corpus.documents()), corpus.seal(259), [len(p) for p in prompts]


def content(corpus: TokenCorpus) -> Counter[Any]:
    """What a corpus holds, whatever the order."""
    documents = [(d.conversation, d.category, d.turns, d.finish, tuple(d.ids.tolist()), tuple(d.mask.tolist())) for d in corpus.documents()]
    return Counter([*documents, *((d.conversation, d.reason) for d in corpus.dropped())])


@pytest.mark.parametrize("count", [9, 8])
def test_a_corpus_does_not_depend_on_the_batch_size(target: FrozenTarget, tmp_path: Path, count: int) -> None:
    conversations = [Conversation.make(turns=("x" * (3 + 5 * i), "and?")[: 1 + i % 2]) for i in range(count)]
    found = []
    for size in (1, 4, 32):
        corpus = TokenCorpus(tmp_path / str(size), {})
        config = RegenerateConfig(temperature=1.0, max_new_tokens=16, batch_size=size)
        regenerate(conversations, target, ChatTemplate(tiny_tokenizer()), corpus, config, 200)
        found.append(content(corpus))
        assert len(corpus.shards) == -(-count // size)
        assert corpus.answered() == {c.id for c in conversations}
    assert found[0] == found[1] == found[2] and len({d[0] for d in found[0]}) == count


class Talkative:
    """Conversations of one to three turns with a target whose turns end soon: by the template's own end of turn, after which ids go on,
    by other stop ids, after which the template rewrites history, or by their limit. Some are empty."""

    def __init__(self) -> None:
        self.template = ChatTemplate(tiny_tokenizer(), range(20, 40))
        model = tiny_model(vocab=len(self.template.tokenizer), scale=1.0)
        model.lm_head.weight.data[2] *= 4
        self.target = FrozenTarget(model)
        self.conversations = [Conversation.make(turns=(f"say {i}", "again", "once more")[: 1 + i % 3]) for i in range(20)]
        self.config = RegenerateConfig(temperature=4.0, max_new_tokens=14, batch_size=4, keep_features=True)
        self.identity = {"taps": list(self.target.taps)}
        self.whole: Counter[Any] = Counter()
        """What an uninterrupted run writes."""

    def store(self, directory: Path) -> FeatureStore:
        return FeatureStore(directory / "features", self.identity)

    def run(self, directory: Path, features: bool = True) -> tuple[TokenCorpus, FeatureStore]:
        corpus, store = TokenCorpus(directory / "corpus", {}), self.store(directory)
        regenerate(self.conversations, self.target, self.template, corpus, self.config, 200, store if features else None)
        return corpus, store

    def check(self, corpus: TokenCorpus, store: FeatureStore) -> None:
        """Every document's features are there, and are those of the document run alone."""
        documents = list(corpus.documents())
        for document in documents:
            assert document.ids in store
            taps, hidden = store.read(document.ids)
            alone = self.target.forward(torch.from_numpy(document.ids.astype(np.int64))[None])
            assert alone.taps is not None
            torch.testing.assert_close(taps, alone.taps[0, :-1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(hidden, alone.hidden[0, :-1], atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Talkative:
    made = Talkative()
    made.whole = content(made.run(tmp_path_factory.mktemp("whole"))[0])
    return made


def test_features_are_those_of_the_documents(talkative: Talkative, tmp_path: Path) -> None:
    corpus, store = talkative.run(tmp_path)
    talkative.check(corpus, store)
    documents = list(corpus.documents())
    turns = Counter(d.conversation for d in documents for _ in range(d.turns))
    wanted = {c.id: len(c.turns) for c in talkative.conversations}
    # All fates occur: turns in one document, histories rewritten, answers cut, second answers that were bad.
    assert max(d.turns for d in documents) > 1
    assert max(Counter(d.conversation for d in documents).values()) > 1
    assert {f for d in documents for f in d.finish} == {"stop", "length"}
    assert any(turns[d.conversation] < wanted[d.conversation] and set(d.finish) == {"stop"} for d in documents)
    assert any(corpus.dropped())
    assert len(store) == len({tuple(d.ids.tolist()) for d in documents})
    assert len(list(store.directory.glob("features-*"))) == len(corpus.shards) == 5
    plain, empty = talkative.run(tmp_path / "without", features=False)
    assert content(plain) == content(corpus) and len(empty) == 0


def test_killed_between_features_and_shard(talkative: Talkative, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features come first: after a kill between the two, the answers are given again, and no document is without features."""
    original, calls = TokenCorpus.append, [0]

    def append(self: TokenCorpus, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        original(self, *args)

    monkeypatch.setattr(TokenCorpus, "append", append)
    with pytest.raises(KeyboardInterrupt):
        talkative.run(tmp_path / "cut")
    store = talkative.store(tmp_path / "cut")
    cut = TokenCorpus(tmp_path / "cut/corpus", {})
    assert len(cut.shards) == 2 and len(list(store.directory.glob("features-*"))) == 3
    assert len(store) > len({tuple(d.ids.tolist()) for d in cut.documents()})  # written ahead, of nobody yet
    calls[0] = 3
    corpus, store = talkative.run(tmp_path / "cut")
    assert content(corpus) == talkative.whole
    assert len(corpus.answered()) == len(talkative.conversations)
    talkative.check(corpus, store)


@pytest.mark.parametrize("after", [1, 9, 25])
def test_killed_while_answering(talkative: Talkative, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    real = data.regenerate.generate

    def killed(*args: Any) -> Iterator[Answer]:
        for index, answer in enumerate(real(*args)):
            if index == after:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(data.regenerate, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        talkative.run(tmp_path / "cut")
    monkeypatch.undo()
    before = {p.name: p.read_bytes() for p in TokenCorpus(tmp_path / "cut/corpus", {}).shards}
    corpus, store = talkative.run(tmp_path / "cut")
    assert content(corpus) == talkative.whole
    assert all((corpus.directory / name).read_bytes() == text for name, text in before.items())
    talkative.check(corpus, store)
    again = {p.name for p in corpus.shards}
    talkative.run(tmp_path / "cut")  # nothing is left to do
    assert {p.name for p in corpus.shards} == again


def test_a_conversation_is_finished_before_a_new_one_is_begun(
    talkative: Talkative, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that shards are written as soon as can be: at no time are more than a batch of conversations open."""
    opened: list[str] = []
    closed: set[str] = set()
    most = [0]
    real = data.regenerate.generate
    taken = data.regenerate._take

    def noting(target: Any, queue: Any, *rest: Any) -> Iterator[Answer]:
        for answer in real(target, queue, *rest):
            waiting = {r.key[0] for r in queue if r.key[1] == 0}
            most[0] = max(most[0], len({c.id for c in talkative.conversations} - waiting - closed))
            opened.append(answer.request.key[0])
            yield answer

    def noted(row: Any, *args: Any) -> bool:
        goes_on = taken(row, *args)
        if not goes_on:
            closed.add(row.conversation.id)
        return goes_on

    monkeypatch.setattr(data.regenerate, "generate", noting)
    monkeypatch.setattr(data.regenerate, "_take", noted)
    talkative.run(tmp_path)
    assert closed == {c.id for c in talkative.conversations} == set(opened)
    assert most[0] <= talkative.config.batch_size


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
