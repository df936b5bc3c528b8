"""Accuracies by depth and rank against a loop over slots, the tree they give, and the drafter that uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.corpus import Document
from data.packing import PackedRows, PackingConfig
from eval.drafters.base import Committed
from eval.drafters.build import head_drafter
from eval.drafters.shape import ShapeConfig
from eval.records import PromptRecord
from eval.tree import static_tree
from heads.sampling import Sampling
from heads.vocab import DraftVocab
from tests.train.runs import KINDS, VOCAB, document, kind_run, random_documents
from tests.train.test_loop import Recorder
from train.loop import Measured
from train.objectives import Moment, run_target
from train.ranks import accuracies, held_out_documents, rank_counts
from train.state import load_head


def loop_counts(run: Any, documents: list[Document], ranks: int) -> list[list[float]]:
    """Straight from the definition: at slot t, depth i, the rank of x_{t+2+i} among the head's tokens."""
    found = [[0.0] * (ranks + 1) for _ in range(run.objective.depths)]
    objective = run.objective.eval()
    for one in documents:
        ids = torch.tensor(one.ids.astype(np.int64))[None]
        row = PackedRows([one], PackingConfig(max_length=64, pack=False)).batch([0])
        features = run_target(run.target, row)
        plan = objective.plan(row, Moment())
        with torch.no_grad():
            outputs = objective.outputs(plan, row, features, run.target.embedding, Moment())
        for number, (step, _, column) in enumerate(plan.valid.nonzero().tolist()):
            slot = int(plan.slots[0, column])
            assert all(one.mask[slot + 1 + i] for i in range(step + 2))
            layer = objective.layer(step, run.target.lm_head, None)
            order = run.head.vocab.target_ids[(outputs[number] @ layer.weight.T).argsort(descending=True, stable=True)].tolist()
            found[step][0] += 1
            true = int(ids[0, slot + 2 + step])
            if true in order[:ranks]:
                found[step][1 + order.index(true)] += 1
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_counts_by_a_loop(kind: str, tmp_path: Path) -> None:
    vocab = DraftVocab(torch.arange(0, VOCAB, 2), VOCAB) if kind in ("eagle3", "peagle") else None
    run = kind_run(kind, tmp_path, vocab=vocab, steps=3)
    run.train()
    documents = random_documents(5, seed=7)
    assert run.objective.training
    counts = rank_counts(run.objective, run.target, documents, ranks=4)
    assert run.objective.training
    assert counts.tolist() == loop_counts(run, documents, 4)
    assert counts[:, 0].min() > 0 and 0 < counts[:, 1:].sum() < counts[:, 0].sum()


def record(name: str, context: list[int], output: list[int]) -> PromptRecord:
    return PromptRecord(
        name, "chat", 0, len(context), len(output), (), "stop", 0, 0, 0, 0, 0, 0, 0, False, None, tuple(context), tuple(output)
    )


def test_records_become_documents() -> None:
    made = held_out_documents([record("a", [5, 6, 7], [8, 9]), record("b", [5], [3])])
    assert [d.ids.tolist() for d in made] == [[5, 6, 7, 8, 9], [5, 3]]
    assert [d.mask.tolist() for d in made] == [[0, 0, 0, 1, 1], [0, 1]]


def test_answers_too_short_for_a_depth_leave_it_out(tmp_path: Path) -> None:
    run = kind_run("medusa", tmp_path)
    short = [document([5, 6, 7, 8, 9], [0, 0, 1, 1, 1])]  # two pairs at depth 0, one at depth 1, none at depth 2
    counts = rank_counts(run.objective, run.target, short)
    assert counts[:, 0].tolist() == [2, 1, 0] and len(accuracies(counts)) == 2
    assert rank_counts(run.objective, run.target, [document([5, 6, 7], [0, 0, 1])]).sum() == 0
    assert rank_counts(run.objective, run.target, []).sum() == 0
    assert accuracies(torch.tensor([[4.0, 2, 1], [0, 0, 0]])) == [[0.5, 0.25]]


def test_the_tree_goes_with_the_checkpoint_and_to_the_drafter(tmp_path: Path) -> None:
    shares = [[0.6, 0.2, 0.1], [0.4, 0.3, 0.05], [0.3, 0.1, 0.05]]
    paths = static_tree(shares, 9, 3)
    tree = {"accuracies": shares, "nodes": 8, "paths": [list(p) for p in paths]}
    run = kind_run("medusa", tmp_path, steps=2, save_every=1, tracker=Recorder())
    run.measure = lambda: Measured(1.5, tree)
    run.train()
    best = tmp_path / "checkpoints/best"
    assert json.loads((best / "tree.json").read_text()) == tree
    assert "tree.json" in json.loads((best / "manifest.json").read_text())
    assert not (tmp_path / "checkpoints/step-000001/tree.json").exists()  # saved without having been measured
    head = load_head(best)
    assert head.accuracies == shares
    drafter: Any = head_drafter(head, run.target, Sampling(), False, ShapeConfig(kind="static", nodes=8, beam=3))
    hidden = torch.randn(1, 1, run.target.hidden_size)
    drafter.start([[1, 2]])
    drafter.observe(Committed(hidden, None, [[3]]))
    proposed = drafter.propose([3], [])[0]
    number: dict[tuple[int, ...], int] = {(): 0} | {p: i for i, p in enumerate(paths, start=1)}
    assert proposed.parents == tuple(number[p[:-1]] for p in paths)
