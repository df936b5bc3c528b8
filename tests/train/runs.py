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
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.tiny import tiny_head, tiny_target
from train.kinds import TrainingTimeTest
from train.loop import Measured, Run, TrainConfig
from train.objective_config import ObjectiveConfig
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
    **config: Any,
) -> Run:
    """A run over sixteen documents; ``config`` overrides the training numbers."""
    target = target or small_target()
    made = tiny_head(target, vocab=vocab, **(head or {})).train()
    settings: dict[str, Any] = {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3, "log_every": 1}
    return Run(
        accelerator=accelerator or Accelerator(cpu=True),
        target=target,
        objective=TrainingTimeTest(made, ObjectiveConfig(depths=depths)),
        rows=PackedRows(random_documents(16), PackingConfig(max_length=32, pack=pack)),
        config=TrainConfig(**(settings | config)),
        checkpoints=directory / "checkpoints",
        tracker=tracker or NullTracker(),
        measure=lambda: Measured(measure()),
        provenance={"recipe.yaml": "name: test\n"},
    )


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.head.state_dict().items()}
