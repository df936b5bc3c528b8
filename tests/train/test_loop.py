"""The training loop on a tiny target: what moves, accumulation, resuming bit for bit, damage, refusals, and a language to learn."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heads.cache import LineCache
from heads.errors import UserError
from heads.target import TargetOutput
from heads.vocab import DraftVocab
from tests.tiny import chain_visible, tiny_head
from tests.train.runs import COUNT, VOCAB, counting_rows, counting_target, small_run, small_target, weights
from train.loop import TrainConfig, learning_rate
from train.objectives import run_target
from train.state import newest_whole


class Recorder:
    """Keeps what is logged; raises at a step, as a kill would."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step == self.stop_at:
            raise KeyboardInterrupt
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        pass


def files(directory: Path) -> set[str]:
    return {p.name for p in (directory / "checkpoints").iterdir()}


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("variant", ["classic", "3.1"])
def test_every_trainable_parameter_moves_and_no_frozen_one(tmp_path: Path, variant: str, freeze: bool) -> None:
    target = small_target()
    before_target = {n: p.detach().clone() for n, p in target.model.named_parameters()}
    run = small_run(tmp_path, target=target, head={"variant": variant, "layers": 2, "train_lm_head": not freeze}, steps=2)
    before = weights(run)
    run.train()
    after = weights(run)
    frozen = {"d2t", "t2d"} | ({"lm_head.weight"} if freeze else set())
    assert frozen <= before.keys()
    for name in before:
        moved = not torch.equal(before[name], after[name])
        assert moved == (name not in frozen), f"{name} {'moved' if moved else 'did not move'}"
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, before_target[name]), f"{name} of the target moved"
        assert parameter.grad is None, f"{name} of the target has a gradient"


@pytest.mark.parametrize("pack", [True, False])
def test_accumulated_steps_equal_one_large_step(tmp_path: Path, pack: bool) -> None:
    found = []
    for micro in (1, 2, 4):
        tracker = Recorder()
        run = small_run(tmp_path / str(micro), micro_batch_size=micro, steps=3, pack=pack, tracker=tracker)
        run.train()
        found.append((weights(run), [values["loss"] for _, values in tracker.lines if "loss" in values]))
    for other, losses in found[:2]:
        assert losses == pytest.approx(found[2][1], abs=1e-5)
        for name, value in found[2][0].items():
            torch.testing.assert_close(other[name], value, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("cache", [0.0, 1.0, 2e-5], ids=["online", "kept", "partly-kept"])
def test_interrupted_equals_uninterrupted_bit_for_bit(tmp_path: Path, cache: float) -> None:
    settings: dict[str, Any] = {"save_every": 3, "feature_cache_gib": cache}
    small_run(tmp_path / "whole", **settings).train()
    killed = small_run(tmp_path / "cut", tracker=Recorder(stop_at=5), **settings)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert files(tmp_path / "cut") == {"step-000003", "last"}
    resumed = small_run(tmp_path / "cut", **settings)
    with torch.no_grad():
        for parameter in resumed.head.parameters():
            parameter.zero_()  # nothing may be left of what it started with
    assert resumed.resume()
    assert resumed.progress.step == 3
    resumed.train()
    for name in ("head.safetensors", "optimizer.safetensors"):
        one, two = (load_file(tmp_path / which / "checkpoints/step-000006" / name) for which in ("whole", "cut"))
        assert one.keys() == two.keys() and len(one) > 5
        for key, value in one.items():
            assert torch.equal(value, two[key]), f"{name} {key}"
    third, sixth = (load_file(tmp_path / f"whole/checkpoints/step-00000{step}/head.safetensors") for step in (3, 6))
    assert not torch.equal(third["fc.weight"], sixth["fc.weight"])
    assert (tmp_path / "whole/checkpoints/step-000006/progress.json").read_text() == (
        tmp_path / "cut/checkpoints/step-000006/progress.json"
    ).read_text()


def test_kept_features_skip_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path, feature_cache_gib=1.0, steps=20)
    calls: list[int] = []
    monkeypatch.setattr("train.features.run_target", lambda target, batch: (calls.append(batch.rows[0]), run_target(target, batch))[1])
    run.train()
    assert sorted(calls) == list(range(len(run.rows)))  # each row once, in many epochs
    batch = run.rows.batch([2, 0])
    (kept, statistics), fresh = run.features(batch), run_target(run.target, batch)
    used = batch.ids > 0
    assert kept.taps is not None and fresh.taps is not None
    torch.testing.assert_close(kept.hidden[used], fresh.hidden[used], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept.taps[used], fresh.taps[used], atol=1e-5, rtol=1e-5)
    assert statistics is not None
    log_p = run.target.logits(fresh.hidden).log_softmax(-1)
    inside = log_p[..., run.head.vocab.target_ids].logsumexp(-1)
    labels = batch.mask  # nothing else is ever a label
    torch.testing.assert_close(statistics.log_mass[labels], inside[labels], atol=1e-5, rtol=1e-5)
    assert torch.equal(statistics.best[labels], log_p.argmax(-1)[labels])


@pytest.mark.parametrize("victim", ["head.safetensors", "optimizer.safetensors", "progress.json", "manifest.json"])
def test_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, victim: str) -> None:
    small_run(tmp_path, save_every=2, keep_last=3, measure=lambda: 0.0).train()
    assert files(tmp_path) == {"step-000002", "step-000004", "step-000006", "last"}
    path = tmp_path / "checkpoints/step-000006" / victim
    path.write_bytes(path.read_bytes()[:-1])
    run = small_run(tmp_path)
    with pytest.warns(UserWarning, match="step-000006 is damaged"):
        assert run.resume()
    assert run.progress.step == 4
    saved = load_file(tmp_path / "checkpoints/step-000004/head.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in weights(run).items())


def test_nothing_to_resume(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    assert not run.resume()
    assert run.progress.step == 0
    assert newest_whole(tmp_path / "checkpoints") is None


def test_checkpoint_of_another_head_is_refused(tmp_path: Path) -> None:
    vocab = DraftVocab(torch.arange(0, VOCAB, 2), VOCAB)
    small_run(tmp_path, vocab=vocab, steps=1).train()
    assert small_run(tmp_path, vocab=vocab).resume()
    others: list[dict[str, Any]] = [
        {"vocab": DraftVocab(torch.arange(1, VOCAB, 2), VOCAB)},  # of the same size
        {"vocab": vocab, "head": {"variant": "classic"}},
        {"vocab": vocab, "head": {"layers": 2}},
    ]
    for other in others:
        run = small_run(tmp_path, **other)
        before = weights(run)
        with pytest.raises(UserError, match="checkpoints of another head"):
            run.resume()
        assert all(torch.equal(value, before[name]) for name, value in weights(run).items())


def test_indivisible_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch_size is 4; with 1 processes and train\.micro_batch_size 3 it must be a multiple of 3"):
        small_run(tmp_path, micro_batch_size=3)


def test_non_finite_loss_stops_before_the_optimizer(tmp_path: Path) -> None:
    run = small_run(tmp_path, save_every=1)
    features = run.features
    rows = run.order.update(2, 4)

    def poisoned(batch: Any) -> tuple[TargetOutput, Any]:
        output, statistics = features(batch)
        assert output.taps is not None
        bad = run.progress.step == 2 and rows[-1] in batch.rows
        return (TargetOutput(output.hidden, output.taps * float("nan")) if bad else output), statistics

    run.features = poisoned  # type: ignore[assignment]
    with pytest.raises(FloatingPointError, match="step 3 is nan") as error:
        run.train()
    inside = [run.rows.documents[i].conversation for r in rows for i in run.rows.rows[r]]
    assert inside and re.findall(r"'(c\d+)'", str(error.value)) == inside
    saved = load_file(tmp_path / "checkpoints/step-000002/head.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in weights(run).items())
    assert all(torch.isfinite(p).all() for p in run.head.parameters())
    assert {int(s["step"]) for s in run._raw_optimizer().state.values()} == {2}


def test_learning_rate_shape() -> None:
    config = TrainConfig(learning_rate=2.0e-3, warmup=0.1, final_rate=0.25)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([2e-4 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(2e-3)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(2e-3 * (0.25 + 0.75 / 2))
    assert learning_rate(config, 100, 100) == pytest.approx(5e-4)
    assert learning_rate(TrainConfig(warmup=0.0), 0, 100) == pytest.approx(1e-4)
    assert all(0 < learning_rate(TrainConfig(), 0, steps) <= 1e-4 for steps in (1, 2, 3))


def test_logged_rate_is_the_optimizers(tmp_path: Path) -> None:
    tracker = Recorder()
    run = small_run(tmp_path, tracker=tracker, warmup=0.4)
    run.train()
    logged = [values["learning_rate"] for _, values in tracker.lines if "learning_rate" in values]
    assert logged == pytest.approx([learning_rate(run.config, step, 6) for step in range(6)])
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(logged[-1])


def test_epochs_give_the_steps(tmp_path: Path) -> None:
    run = small_run(tmp_path, steps=None, epochs=2.5)
    assert run.steps == math.ceil(2.5 * len(run.rows) / 4)


def test_best_follows_the_measure_and_survives_pruning(tmp_path: Path) -> None:
    taus = iter([1.5, 2.5, 2.0, 2.5, 1.0])
    tracker = Recorder()
    run = small_run(tmp_path, steps=10, eval_every=2, save_every=1, keep_last=2, measure=lambda: next(taus), tracker=tracker)
    progress = run.train()
    assert (progress.best_tau, progress.best_step, progress.evaluations) == (2.5, 4, 5)  # an equal one later is no improvement
    assert files(tmp_path) == {"step-000004", "step-000009", "step-000010", "best", "last"}
    assert (tmp_path / "checkpoints/best").readlink() == Path("step-000004")
    assert (tmp_path / "checkpoints/last").readlink() == Path("step-000010")
    measured = [(step, values["eval/acceptance_length"]) for step, values in tracker.lines if "eval/acceptance_length" in values]
    assert measured == [(2, 1.5), (4, 2.5), (6, 2.0), (8, 2.5), (10, 1.0)]
    saved = json.loads((tmp_path / "checkpoints/best/progress.json").read_text())
    assert (saved["best_tau"], saved["best_step"]) == (2.5, 4)


def test_best_is_remembered_across_a_resume(tmp_path: Path) -> None:
    taus = iter([3.0, 1.0])
    small_run(tmp_path, steps=4, eval_every=2, save_every=2, measure=lambda: next(taus)).train()
    run = small_run(tmp_path, steps=6, eval_every=2, save_every=2, keep_last=1, measure=lambda: 2.0)
    assert run.resume()
    progress = run.train()
    assert (progress.best_tau, progress.best_step) == (3.0, 2)
    assert files(tmp_path) == {"step-000002", "step-000006", "best", "last"}


def test_counting_language_is_learnt_at_every_depth(tmp_path: Path) -> None:
    target = counting_target()
    tracker = Recorder()
    run = small_run(
        tmp_path, target=target, rows=counting_rows(), depths=4, tracker=tracker, steps=100, learning_rate=1e-2, log_every=50,
        save_every=1000, head={"init": "paper"},
    )  # fmt: skip
    run.train()
    last = tracker.lines[-2][1]
    assert tracker.lines[0][1]["agree/0"] < 0.3
    for depth in range(4):
        assert last[f"agree/{depth}"] > 0.999, last
    # Decoding goes on by itself: from every start, the head counts where an index off by one would skip or repeat.
    with torch.no_grad():
        for start in range(COUNT):
            ids = (start + torch.arange(5)[None]) % COUNT  # the slots read x_1..x_4, so the first draft token is x_5
            taps = target.forward(ids).taps
            assert taps is not None
            cache = LineCache()
            visible = chain_visible(cache, 1, 4)
            output, state = run.head.extend(taps[:, :4], None, target.embed(ids[:, 1:]), torch.arange(4)[None], cache, visible)
            cache.commit([range(4)])
            drafted = []
            state = state[:, -1:]
            for step in range(4):
                token = run.head.target_ids(run.head.logits(output[:, -1]).argmax(-1))
                drafted.append(int(token))
                where = torch.tensor([[4 + step]])
                output, state = run.head.extend(None, state, target.embed(token[:, None]), where, cache, chain_visible(cache, 1, 1))
            assert drafted == [(start + 5 + k) % COUNT for k in range(4)]


def test_head_under_a_frozen_lm_head_still_learns(tmp_path: Path) -> None:
    """The loss falls although the LM head stays: the gradient goes through it."""
    tracker = Recorder()
    run = small_run(tmp_path, tracker=tracker, steps=30, head={"train_lm_head": False}, log_every=1)
    run.train()
    losses = [values["loss"] for _, values in tracker.lines if "loss" in values]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    assert tiny_head(run.target).lm_head.weight.equal(run.head.lm_head.weight)
