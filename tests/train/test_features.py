"""Features of packed rows: read from the store they are what the target gives, and training on them is the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.corpus import Document, TokenCorpus
from data.features import FeatureStore
from data.packing import Batch, PackedRows, PackingConfig
from data.prompts import Conversation
from data.regenerate import RegenerateConfig, regenerate
from data.template import ChatTemplate
from heads.target import FrozenTarget
from tests.tiny import tiny_head, tiny_model, tiny_tokenizer
from tests.train.runs import VOCAB, random_documents, small_run, small_target, weights
from train.features import Features
from train.kinds import TrainingTimeTest
from train.objective_config import ObjectiveConfig
from train.objectives import run_target

LENGTH = 24
DRAFT_IDS = torch.arange(0, VOCAB, 2)


def documents() -> list[Document]:
    """Sixteen, some of them longer than a row."""
    made = random_documents(16)
    assert sum(len(d.ids) > LENGTH for d in made) >= 2
    return made


def filled(directory: Path, target: FrozenTarget, made: list[Document]) -> FeatureStore:
    """A store with the features of these documents, each run alone."""
    store = FeatureStore(directory / "features", {})
    for document in made:
        output = target.forward(torch.from_numpy(document.ids.astype(np.int64))[None])
        assert output.taps is not None
        store.append([(document.ids, (output.taps[0, :-1], output.hidden[0, :-1]))])
    return store


def with_features(rows: PackedRows, batch: Batch) -> torch.Tensor:
    """[B, T] bool: where there are features: every position of a document but its last, the cut ones' included."""
    found = torch.zeros_like(batch.mask)
    for line, row in enumerate(batch.rows):
        start = 0
        for index in rows.rows[row]:
            size = min(len(rows.documents[index].ids), rows.length)
            found[line, start : start + size] = True
            if len(rows.documents[index].ids) <= rows.length:
                found[line, start + size - 1] = False
            start += size
    return found


class Calls:
    """Which rows the target is run for, and which documents are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.reads = 0
        read = FeatureStore.read

        def running(target: FrozenTarget, batch: Batch) -> Any:
            self.rows += batch.rows
            return run_target(target, batch)

        def reading(store: FeatureStore, ids: np.ndarray) -> Any:
            self.reads += 1
            return read(store, ids)

        monkeypatch.setattr("train.features.run_target", running)
        monkeypatch.setattr(FeatureStore, "read", reading)


@pytest.mark.parametrize("budget", [0.0, 1.0], ids=["no memory", "kept"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_the_store_gives_what_the_target_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: bool, budget: float) -> None:
    target = small_target()
    rows = PackedRows(documents(), PackingConfig(max_length=LENGTH, pack=pack))
    assert rows.cut >= 2 and (not pack or max(map(len, rows.rows)) > 1)
    calls = Calls(monkeypatch)
    features = Features(target, rows, DRAFT_IDS, budget, filled(tmp_path, target, rows.documents))
    batch = rows.batch(range(len(rows)))
    states, statistics = features(batch)
    assert calls.rows == [] and calls.reads == len(rows.documents)
    expected = run_target(target, batch)
    there = with_features(rows, batch)
    assert states.taps is not None and expected.taps is not None and statistics is not None
    assert states.taps.shape == expected.taps.shape and states.hidden.shape == expected.hidden.shape
    torch.testing.assert_close(states.taps[there], expected.taps[there], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.hidden[there], expected.hidden[there], atol=1e-4, rtol=1e-4)
    assert not states.taps[~there].any() and not states.hidden[~there].any()
    labels = there & batch.mask
    log_p = target.logits(expected.hidden).log_softmax(-1)
    torch.testing.assert_close(statistics.log_mass[labels], log_p[..., DRAFT_IDS].logsumexp(-1)[labels], atol=1e-4, rtol=1e-4)
    assert torch.equal(statistics.best[labels], log_p.argmax(-1)[labels])
    # Asked again, in other batches: the same bits; from memory where there is some.
    before = calls.reads
    for chosen in ([2, 0], [len(rows) - 1]):
        part = rows.batch(chosen)
        again, known = features(part)
        assert again.taps is not None and known is not None
        width = part.ids.shape[1]
        assert torch.equal(again.taps, states.taps[chosen, :width]) and torch.equal(again.hidden, states.hidden[chosen, :width])
        assert torch.equal(known.log_mass, statistics.log_mass[chosen, :width])
        assert torch.equal(known.best, statistics.best[chosen, :width])
    assert (calls.reads == before) == (budget > 0) and calls.rows == []


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_a_document_missing_in_the_store_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: bool) -> None:
    target = small_target()
    rows = PackedRows(documents(), PackingConfig(max_length=LENGTH, pack=pack))
    missing = {3, 7}
    calls = Calls(monkeypatch)
    store = filled(tmp_path, target, [d for i, d in enumerate(rows.documents) if i not in missing])
    batch = rows.batch(range(len(rows)))
    states, statistics = Features(target, rows, DRAFT_IDS, 0.0, store)(batch)
    assert calls.rows == [r for r in range(len(rows)) if missing & set(rows.rows[r])] and len(calls.rows) > 0
    expected = run_target(target, batch)
    there = with_features(rows, batch)
    torch.testing.assert_close(states.hidden[there], expected.hidden[there], atol=1e-4, rtol=1e-4)
    assert states.taps is not None and expected.taps is not None and statistics is not None
    torch.testing.assert_close(states.taps[there], expected.taps[there], atol=1e-4, rtol=1e-4)
    run = torch.tensor(calls.rows)
    assert states.hidden[run][~there[run] & (batch.ids[run] > 0)].any()  # the target knows the last positions too


def test_an_empty_store_is_no_store(tmp_path: Path) -> None:
    target = small_target()
    rows = PackedRows(documents(), PackingConfig(max_length=LENGTH))
    batch = rows.batch(range(len(rows)))
    states, statistics = Features(target, rows, DRAFT_IDS, 0.0, FeatureStore(tmp_path, {}))(batch)
    used = batch.ids > 0
    torch.testing.assert_close(states.hidden[used], run_target(target, batch).hidden[used], atol=1e-5, rtol=1e-5)
    assert statistics is not None
    plain, none = Features(target, rows, DRAFT_IDS, 0.0)(batch)
    assert none is None and torch.equal(plain.hidden, run_target(target, batch).hidden)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_loss_and_gradient_do_not_tell_the_store_from_the_target(tmp_path: Path, pack: bool) -> None:
    """Nothing that is trained on lies at a position without features."""
    target = small_target()
    rows = PackedRows(documents(), PackingConfig(max_length=LENGTH, pack=pack))
    store = filled(tmp_path, target, rows.documents)
    batch = rows.batch(range(len(rows)))
    found = []
    for source in (store, None):
        head = tiny_head(target).train()
        objective = TrainingTimeTest(head, ObjectiveConfig(depths=4))
        states, statistics = Features(target, rows, head.vocab.target_ids, 0.0, source)(batch)
        total = rows.totals(range(len(rows)))
        loss, sums = objective(batch, states, target.embedding, target.lm_head, target.softcap, total, statistics)
        loss.backward()
        found.append((loss.detach(), sums, {n: p.grad for n, p in head.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-3, rtol=1e-4)
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(gradient, found[1][2][name], atol=1e-5, rtol=1e-3)


def test_a_run_on_the_store_is_the_run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = small_run(tmp_path / "online", steps=3)
    calls = Calls(monkeypatch)
    stored = small_run(tmp_path / "stored", steps=3)
    stored.store = filled(tmp_path, stored.target, stored.rows.documents)
    stored.features.store = stored.store
    online.train()
    assert calls.rows
    calls.rows.clear()
    stored.train()
    assert calls.rows == []
    after = weights(stored)
    for name, value in weights(online).items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-4)


def test_what_regeneration_kept_is_found_by_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From prompts to rows: every document of the corpus has its features, one that is longer than a row too."""
    template = ChatTemplate(tiny_tokenizer(), range(20, 40))
    target = FrozenTarget(tiny_model(vocab=259))
    corpus, store = TokenCorpus(tmp_path / "corpus", {}), FeatureStore(tmp_path / "features", {})
    conversations = [Conversation.make(turns=(f"{'say ' * (1 + i % 9)}{i}", "again")) for i in range(20)]
    config = RegenerateConfig(temperature=4.0, max_new_tokens=30, batch_size=4)
    regenerate(conversations, target, template, corpus, config, 150, store)
    rows = PackedRows(list(corpus.documents()), PackingConfig(max_length=64))
    assert rows.cut > 0 and len(rows.documents) > 10
    calls = Calls(monkeypatch)
    batch = rows.batch(range(len(rows)))
    states, _ = Features(target, rows, torch.arange(259), 0.0, FeatureStore(tmp_path / "features", {}))(batch)
    assert calls.rows == []
    expected = run_target(target, batch)
    there = with_features(rows, batch)
    assert states.taps is not None and expected.taps is not None
    torch.testing.assert_close(states.taps[there], expected.taps[there], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.hidden[there], expected.hidden[there], atol=1e-4, rtol=1e-4)
