"""Trackers: log.jsonl across crashes and resumes, and really run Weights & Biases (offline) and TensorBoard."""

from __future__ import annotations

import builtins
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heads.errors import UserError
from train import trackers
from train.trackers import (
    CompositeTracker,
    JsonLinesTracker,
    NullTracker,
    TrackerConfig,
    WandbTracker,
    make_tracker,
)

RECIPE: dict[str, Any] = {"train": {"steps": 3}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_flushed_and_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    tracker = JsonLinesTracker(path)
    values: dict[str, Any] = {"a": 0.5, "b": "é", "nan": math.nan, "up": math.inf, "down": -math.inf, "step": 9}
    values |= {"np": np.float32(0.25), "torch": torch.tensor(2), "np_nan": np.float32("nan")}
    tracker.log(1, values)
    assert lines(path) == [
        {"step": 1, "a": 0.5, "b": "é", "nan": "NaN", "up": "Infinity", "down": "-Infinity"} | {"np": 0.25, "torch": 2, "np_nan": "NaN"}
    ]
    tracker.close()
    tracker.close()


def test_appends_after_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xc3')
    tracker = JsonLinesTracker(path)
    tracker.log(2, {"x": 1})
    tracker.close()
    assert lines(path) == [{"step": 1}, {"step": 2, "x": 1}]


def test_truncate_after(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    JsonLinesTracker.truncate_after(path, 1)
    assert not path.exists()
    path.write_text('{"step": 1, "a": 1}\n{"step": 2}\n{"step": 2, "b": 1}\n{"step": 3}\n{"step": 2, "lo')
    JsonLinesTracker.truncate_after(path, 2)
    assert path.read_text() == '{"step": 1, "a": 1}\n{"step": 2}\n{"step": 2, "b": 1}\n'
    path.write_text('{"step": 1}\n{"step": 2}')  # whole but for its newline
    JsonLinesTracker.truncate_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    before = path.stat().st_ino
    JsonLinesTracker.truncate_after(path, 2)
    assert path.stat().st_ino == before, "nothing to drop, nothing rewritten"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    tracker = make_tracker(TrackerConfig(wandb=True, tensorboard=True), tmp_path / "run", "r", RECIPE, is_main=False)
    tracker.log(1, {"a": 1})
    tracker.close()
    assert isinstance(tracker, NullTracker) and not (tmp_path / "run").exists()


def test_make_tracker_resumes(tmp_path: Path) -> None:
    for resume in (None, 2):
        tracker = make_tracker(TrackerConfig(), tmp_path, "r", RECIPE, is_main=True, resume_step=resume)
        for step in (1, 2, 3) if resume is None else (3, 4):
            tracker.log(step, {"resumed": int(resume is not None)})
        tracker.close()
    logged = [(line["step"], line["resumed"]) for line in lines(tmp_path / "log.jsonl")]
    assert logged == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_composite_closes_every_tracker() -> None:
    closed = []

    class Failing(NullTracker):
        def close(self) -> None:
            closed.append(self)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        CompositeTracker([Failing(), Failing()]).close()
    assert len(closed) == 2


@pytest.fixture
def clean_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No account, no settings and no folders of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("HOME", str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.usefixtures("clean_wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ids = []
    for step in (1, 2):
        tracker = make_tracker(TrackerConfig(wandb=True), run_dir, "name", RECIPE, is_main=True)
        assert isinstance(tracker, CompositeTracker)
        wandb_tracker = tracker.trackers[1]
        assert isinstance(wandb_tracker, WandbTracker)
        ids.append(wandb_tracker._run.id)
        tracker.log(step, {"loss": 1.5, "nan": math.nan, "text": "x"})
        tracker.close()
        wandb_tracker.close()
    assert ids[0] == ids[1] == (run_dir / "wandb_id.txt").read_text().strip()
    files = list((run_dir / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    assert files and all(file.stat().st_size > 0 for file in files)
    assert len(lines(run_dir / "log.jsonl")) == 2


@pytest.mark.usefixtures("clean_wandb")
def test_wandb_online_without_an_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    def no_key(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", no_key)
    config = TrackerConfig(wandb=True, wandb_mode="online", tensorboard=True)
    with pytest.raises(UserError, match="mode online: No API key configured"):
        make_tracker(config, tmp_path, "name", RECIPE, is_main=True)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        make_tracker(TrackerConfig(wandb=True), tmp_path, "name", RECIPE, is_main=True)
    real_import = builtins.__import__

    def without_tensorboard(name: str, *arguments: Any) -> Any:
        if "tensorboard" in name:
            raise ModuleNotFoundError(name)
        return real_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(UserError, match=r"pip install 'draftsmith\[tensorboard\]'"):
        make_tracker(TrackerConfig(tensorboard=True), tmp_path, "name", RECIPE, is_main=True)
    assert not (tmp_path / "log.jsonl").exists()


def test_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        config = TrackerConfig(tensorboard=True)
        tracker = make_tracker(config, tmp_path, "name", RECIPE, is_main=True, resume_step=resume)
        for step in steps:
            tracker.log(step, {"loss": step / 2 + (0 if resume is None else 10), "note": "x"})
        tracker.close()
        tracker.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss")]
    assert scalars == [(1, 0.5), (2, 1.0), (3, 11.5), (4, 12.0)]
    assert "note/text_summary" in events.Tags()["tensors"] and "recipe/text_summary" in events.Tags()["tensors"]


def test_a_failing_tracker_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = []

    class Opened(NullTracker):
        def __init__(self, *_: object) -> None: ...

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(trackers, "TensorboardTracker", Opened)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError):
        make_tracker(TrackerConfig(wandb=True, tensorboard=True), tmp_path, "name", RECIPE, is_main=True)
    assert len(closed) == 1
