"""The coverage curve against counting by hand, and what is left of it in the corpus's directory."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

from data.corpus import Document, TokenCorpus
from data.coverage import coverage_curve, half_counts, sizes_for
from data.features import FeatureStore
from data.template import ChatTemplate
from scripts.inspection import sampled_states, show_coverage
from tests.tiny import tiny_target, tiny_tokenizer

VOCAB = 300


def documents(count: int = 12) -> list[Document]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        ids = (rng.zipf(1.3, 40) % VOCAB).astype(np.int32)
        mask = np.array([0] * 10 + [1] * 30, np.uint8)
        made.append(Document(f"c{number}", "chat", 1, ("stop",), ids, mask))
    return made


def test_curve_by_counting() -> None:
    made, stops = documents(), frozenset({2})
    target = tiny_target("llama", vocab=VOCAB)
    hidden = torch.randn(70, target.hidden_size, generator=torch.Generator().manual_seed(0))
    halves = half_counts(made, VOCAB)
    points = coverage_curve(halves, [8, 32, VOCAB], stops, target.hidden_size, hidden, target)

    def chosen(tokens: list[int], size: int) -> set[int]:
        order = sorted(range(VOCAB), key=lambda t: (t not in stops, -tokens.count(t), t))
        return set(order[:size])

    written = [[int(i) for i, m in zip(d.ids, d.mask, strict=True) if m] for d in made]
    even, odd = ([t for tokens in written[k::2] for t in tokens] for k in (0, 1))
    whole = even + odd
    p = torch.softmax(target.logits(hidden), -1)
    for point in points:
        inside = chosen(whole, point.size)
        assert point.seen == pytest.approx(sum(t in inside for t in whole) / len(whole))
        crossed = sum(t in chosen(even, point.size) for t in odd) + sum(t in chosen(odd, point.size) for t in even)
        assert point.unseen == pytest.approx(crossed / len(whole))
        assert point.mass == pytest.approx(float(p[:, sorted(inside)].sum(-1).mean()), abs=1e-5)
        assert point.head_parameters == point.size * target.hidden_size
    assert points[0].unseen < points[0].seen < points[1].seen < points[2].seen == points[2].unseen == 1


def test_sizes() -> None:
    assert sizes_for(49152, 8192) == [1024, 2048, 4096, 8192, 16384, 32768, 49152]
    assert sizes_for(3000, 500) == [500, 1024, 2048, 3000]
    assert sizes_for(300, 300) == [300]


def test_table_and_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, store = TokenCorpus(tmp_path / "corpus", {}), FeatureStore(tmp_path / "features", {})
    made = documents()
    corpus.append(made, [])
    target, template = tiny_target("llama", vocab=VOCAB), ChatTemplate(tiny_tokenizer())
    show_coverage(corpus, template, target, 64)
    assert "- " in capsys.readouterr().out
    assert sampled_states(corpus, store) is None
    states = [(d.ids, (torch.zeros(39, 3 * target.hidden_size), torch.randn(39, target.hidden_size))) for d in made[:5]]
    store.append(states)
    sampled = sampled_states(corpus, store, positions=40)
    assert sampled is not None and sampled.shape == (40, target.hidden_size)
    answers = torch.cat([hidden[9:] for _, (_, hidden) in states])  # position 9 wrote the first answer token
    assert all(bool((answers == row).all(-1).any()) for row in sampled)
    show_coverage(corpus, template, target, 64, store)
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["64", "300"] and rows[1][1:4] == ["100.00%"] * 3
    assert ElementTree.parse(tmp_path / "corpus/coverage.svg").getroot().tag.endswith("svg")
    assert not list((tmp_path / "corpus").glob(".*tmp*"))
