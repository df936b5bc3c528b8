"""Small training runs that the tests of the loop share: random documents, a tiny target, a tiny head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from data.corpus import Document
from data.packing import PackedRows, PackingConfig
from heads.adapter import AdapterConfig, TargetAdapter
from heads.config import HeadConfig
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.medusa import MedusaConfig
from heads.peagle import PEagleConfig
from heads.registry import new_head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.tiny import tiny_head, tiny_model, tiny_target
from train.kinds import TrainingTimeTest, make_objective
from train.loop import Measured, Run, TrainConfig
from train.objective_config import DropTerms, EagleTerms, JointTerms, ObjectiveConfig
from train.objectives import Objective
from train.trackers import NullTracker, Tracker

VOCAB = 40


def document(ids: Any, mask: Any, name: str = "c0") -> Document:
    return Document(name, "chat", 1, ("stop",), np.asarray(ids, np.int32), np.asarray(mask, np.uint8))


def random_documents(count: int, seed: int = 0, vocab: int = VOCAB) -> list[Document]:
    """Prompts of 3-6 tokens and answers of 4-12, every third with a second turn."""
    rng = np.random.default_rng(seed)
    documents = []
    for index in range(count):
        mask: list[int] = []
        for _ in range(2 if index % 3 == 0 else 1):
            mask += [0] * int(rng.integers(3, 7)) + [1] * int(rng.integers(4, 13))
        documents.append(document(rng.integers(3, vocab, len(mask)), mask, f"c{index}"))
    return documents


def small_target() -> FrozenTarget:
    return tiny_target("llama", vocab=VOCAB, hidden=16, layers=3, scale=4.0)


KINDS: dict[str, tuple[HeadConfig, ObjectiveConfig]] = {
    "eagle3": (Eagle3Config(layers=2), ObjectiveConfig(depths=3)),
    "eagle1": (EagleConfig(layers=2), ObjectiveConfig()),
    "hass": (EagleConfig(), ObjectiveConfig(eagle=EagleTerms(align_passes=3, top=4, top_weight=1.0))),
    "medusa": (MedusaConfig(heads=3), ObjectiveConfig()),
    "medusa2": (MedusaConfig(heads=3, adapter=AdapterConfig(rank=4, alpha=8)), ObjectiveConfig(joint=JointTerms(learning_rate=1e-3))),
    "medusa-own": (MedusaConfig(heads=2, blocks=2, share_lm_head=False), ObjectiveConfig(loss="lk", lk_eta=10.0)),
    "peagle": (PEagleConfig(layers=2, depths=4), ObjectiveConfig(peagle=DropTerms(keep=0.6, keep_least=0.2))),
    "peagle-table": (PEagleConfig(layers=1, depths=3, train_embedding=True), ObjectiveConfig(depth_weights="dpace")),
}
"""Every kind of head, with the options that change what is trained."""


def kind_run(kind: str, directory: Path, *, target: FrozenTarget | None = None, vocab: DraftVocab | None = None, **more: Any) -> Run:
    """A small run of a head of ``KINDS``."""
    target = target or small_target()
    config, objective = KINDS[kind]
    head = new_head(config, target, vocab or DraftVocab.full(target.vocab_size), seed=1).train()
    adapter = TargetAdapter.fresh(target, config.adapter, "tiny", seed=1) if isinstance(config, MedusaConfig) and config.adapter else None
    return small_run(directory, target=target, objective=make_objective(head, objective, target, adapter), **more)


def small_run(
    directory: Path,
    *,
    accelerator: Accelerator | None = None,
    target: FrozenTarget | None = None,
    vocab: DraftVocab | None = None,
    head: dict[str, Any] | None = None,
    depths: int = 3,
    pack: bool = True,
    tracker: Tracker | None = None,
    measure: Callable[[], float] = lambda: 1.0,
    objective: Objective | None = None,
    rows: PackedRows | None = None,
    **config: Any,
) -> Run:
    """A run over sixteen documents; ``config`` overrides the training numbers."""
    target = target or small_target()
    if objective is None:
        objective = TrainingTimeTest(tiny_head(target, vocab=vocab, **(head or {})).train(), ObjectiveConfig(depths=depths))
    settings: dict[str, Any] = {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3, "log_every": 1}
    return Run(
        accelerator=accelerator or Accelerator(cpu=True),
        target=target,
        objective=objective,
        rows=rows or PackedRows(random_documents(16), PackingConfig(max_length=32, pack=pack)),
        config=TrainConfig(**(settings | config)),
        checkpoints=directory / "checkpoints",
        tracker=tracker or NullTracker(),
        measure=lambda: Measured(measure()),
        provenance={"recipe.yaml": "name: test\n"},
    )


COUNT = 24  # tokens of the counting language


def counting_target() -> FrozenTarget:
    """x_{t+1} = x_t + 1 mod COUNT, whatever came before: one-hot embeddings pass through untouched layers to a shifted LM head."""
    model = tiny_model("llama", vocab=COUNT, hidden=32, layers=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.eye(32)[:COUNT]
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight.copy_(3 * rows.roll(1, dims=0))  # row x + 1 answers the embedding of x
    target = FrozenTarget(model)
    ids = torch.arange(COUNT)[None]
    assert torch.equal(target.logits(target.forward(ids).hidden).argmax(-1), (ids + 1) % COUNT)
    return target


def counting_rows() -> PackedRows:
    """Documents of the counting language."""
    rng = np.random.default_rng(0)
    documents = []
    for index in range(160):
        start, prompt, answer = (int(rng.integers(low, high)) for low, high in ((0, COUNT), (1, 5), (5, 14)))
        documents.append(document((start + np.arange(prompt + answer)) % COUNT, [0] * prompt + [1] * answer, f"c{index}"))
    return PackedRows(documents, PackingConfig(max_length=48))


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Of the head, and of the adapter where there is one."""
    values = run.head.state_dict() | (run.adapter.values if run.adapter is not None else {})
    return {name: value.detach().clone() for name, value in values.items()}
