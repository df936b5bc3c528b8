"""Every kind of head under the one loop: what moves, splitting an update, resuming, a language to learn, bookkeeping."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.packing import Batch, PackedRows, PackingConfig
from eval.acceptance import RandomDraws
from eval.decoder import DecodeSettings, decode
from eval.drafters.build import head_drafter
from eval.drafters.shape import ShapeConfig
from heads.sampling import Sampling
from heads.vocab import DraftVocab
from tests.heads.parity import batch_of
from tests.train.runs import COUNT, KINDS, VOCAB, counting_rows, counting_target, kind_run, random_documents, small_target, weights
from tests.train.test_loop import Recorder
from train.kinds import group_visibility, kept_groups, noise
from train.objectives import Moment, run_target
from train.pairs import plan_unroll

FROZEN = ("d2t", "t2d")


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainable_parameter_moves_and_no_frozen_one(tmp_path: Path, kind: str) -> None:
    target = small_target()
    before_target = {n: p.detach().clone() for n, p in target.model.named_parameters()}
    run = kind_run(kind, tmp_path, target=target, steps=4)
    before = weights(run)
    run.train()
    for name, value in weights(run).items():
        moved = not torch.equal(before[name], value)
        assert moved == (name.split(".")[-1] not in FROZEN), f"{name} {'moved' if moved else 'did not move'}"
    for name, parameter in target.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, before_target[name.replace(".base_layer", "")]) and parameter.grad is None, name


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_steps_equal_one_large_step(tmp_path: Path, kind: str) -> None:
    found = []
    for micro in (1, 2, 4):
        tracker = Recorder()
        run = kind_run(kind, tmp_path / str(micro), micro_batch_size=micro, steps=3, tracker=tracker)
        run.train()
        found.append((weights(run), [values["loss"] for _, values in tracker.lines if "loss" in values]))
    for other, losses in found[:2]:
        assert losses == pytest.approx(found[2][1], abs=1e-5)
        for name, value in found[2][0].items():
            torch.testing.assert_close(other[name], value, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_equals_uninterrupted_bit_for_bit(tmp_path: Path, kind: str) -> None:
    kind_run(kind, tmp_path / "whole", save_every=3).train()
    killed = kind_run(kind, tmp_path / "cut", tracker=Recorder(stop_at=5), save_every=3)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = kind_run(kind, tmp_path / "cut", save_every=3)
    with torch.no_grad():
        for parameter in resumed.objective.parameters():
            parameter.zero_()
    assert resumed.resume() and resumed.progress.step == 3
    resumed.train()
    for name in ("head.safetensors", "optimizer.safetensors", *(["adapter_model.safetensors"] if resumed.adapter is not None else [])):
        one, two = (load_file(tmp_path / which / "checkpoints/step-000006" / name) for which in ("whole", "cut"))
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[key]) for key, value in one.items())


@pytest.mark.parametrize("kind", KINDS)
def test_counting_language_is_learnt_at_every_depth_and_drafted(tmp_path: Path, kind: str) -> None:
    """An index off by one anywhere, in training or in drafting, and the head would skip or repeat."""
    target = counting_target()
    tracker = Recorder()
    steps = 400 if kind.startswith("peagle") else 250  # its deep slots are thinned out
    run = kind_run(
        kind, tmp_path, target=target, rows=counting_rows(), tracker=tracker, steps=steps, learning_rate=1e-2, log_every=50, save_every=1000
    )
    run.train()
    last = [values for _, values in tracker.lines if "loss" in values][-1]
    for depth in range(run.objective.depths):
        assert last[f"agree/{depth}"] > 0.999, last
    K = run.objective.depths
    drafter = head_drafter(run.head.eval(), target, Sampling(), False, ShapeConfig())
    settings = DecodeSettings(draft_length=K, max_new_tokens=2 * (K + 1) + 1)  # about as far as the training documents go
    prompts = [[(start + i) % COUNT for i in range(5)] for start in range(COUNT)]
    with run.adapter.on() if run.adapter is not None else nullcontext():
        results = decode(target, prompts, drafter, settings, [RandomDraws(0) for _ in prompts])
    for start, result in enumerate(results):
        assert result.tokens == [(start + 5 + i) % COUNT for i in range(2 * (K + 1) + 1)]
        assert [cycle.accepted for cycle in result.cycles] == [K] * 2


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_zero_outside_the_mask(kind: str, pack: bool, tmp_path: Path) -> None:
    """States of positions behind every pair's slot and label change neither loss nor gradient."""
    target = small_target()
    run = kind_run(kind, tmp_path, target=target, pack=pack)
    rows = PackedRows(random_documents(6, vocab=VOCAB), PackingConfig(max_length=48, pack=pack))
    batch = rows.batch(range(len(rows)))
    features = run_target(target, batch)
    total = rows.totals(range(len(rows)))

    def loss(hidden: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        states = type(features)(hidden, taps)
        moment = Moment(3, 1, steps=100)
        found: torch.Tensor = run.objective(batch, states, target.embedding, target.lm_head, target.softcap, total, None, moment)[0]
        return found

    assert features.taps is not None
    hidden, taps = features.hidden.clone().requires_grad_(), features.taps.clone().requires_grad_()
    whole = loss(hidden, taps)
    whole.backward()
    read = hidden.grad if run.objective.features == "hidden" else taps.grad
    assert read is not None
    plan = plan_unroll(batch, run.objective.depths)
    needed = reachable(batch, plan.slots, plan.valid[0], alone=kind.startswith("medusa"))
    assert torch.all(read[~needed] == 0) and (~needed).sum() > 10
    assert (read[needed].abs().sum(-1) > 0).float().mean() > 0.8
    labels = torch.zeros_like(batch.mask)
    step, row, column = plan.valid.nonzero(as_tuple=True)
    labels[row, plan.label[step, row, column]] = True
    noisy = ~(needed | labels)
    with torch.no_grad():
        other_hidden, other_taps = features.hidden.clone(), features.taps.clone()
        other_hidden[noisy] += 5
        other_taps[noisy] -= 5
        torch.testing.assert_close(loss(other_hidden, other_taps), whole.detach(), atol=1e-6, rtol=1e-6)


def reachable(batch: Batch, slots: torch.Tensor, alive: torch.Tensor, alone: bool) -> torch.Tensor:
    """[B, T] positions that some pair's slot is at, or (heads with attention) that lie before one in its document."""
    found = torch.zeros_like(batch.mask)
    for row, column in alive.nonzero().tolist():
        slot = int(slots[row, column])
        start = slot if alone else 0
        found[row, start : slot + 1] |= batch.document[row, start : slot + 1] == batch.document[row, slot]
    return found


@pytest.mark.parametrize("kind", ["medusa", "medusa-own"])
def test_medusa_starts_as_the_lm_head(tmp_path: Path, kind: str) -> None:
    run = kind_run(kind, tmp_path)
    batch = run.rows.batch([0, 1])
    features = run_target(run.target, batch)
    plan = run.objective.plan(batch, Moment())
    outputs = run.objective.outputs(plan, batch, features, run.target.embedding, Moment())
    step, row, column = plan.valid.nonzero(as_tuple=True)
    expected = run.target.logits(features.hidden[row, plan.slots[row, column]])
    for depth in range(run.objective.depths):
        layer = run.objective.layer(depth, run.target.lm_head, run.target.softcap)
        assert torch.equal(outputs[step == depth] @ layer.weight.T, expected[step == depth])


def test_noise_is_a_function_of_seed_step_and_row() -> None:
    rows = PackedRows(random_documents(9), PackingConfig(max_length=40))
    whole = rows.batch([2, 0, 1])
    drawn = noise(whole, 8, 0.1, Moment(1, 5))
    for line, row in enumerate(whole.rows):
        alone = rows.batch([row])
        assert torch.equal(noise(alone, 8, 0.1, Moment(1, 5))[0], drawn[line, : alone.ids.shape[1]])
    assert not torch.equal(drawn, noise(whole, 8, 0.1, Moment(1, 6))) and not torch.equal(drawn, noise(whole, 8, 0.1, Moment(2, 5)))
    for number in whole.document.unique().tolist():
        there = whole.document == number
        half = 0.1 * 512 / int(there.sum())
        assert 0.8 * half < float(drawn[there].abs().max()) <= half


def test_noise_is_of_training_alone(tmp_path: Path) -> None:
    run = kind_run("eagle1", tmp_path)
    batch = run.rows.batch([0])
    features = run_target(run.target, batch)
    plan = run.objective.plan(batch, Moment())

    def outputs(moment: Moment) -> Any:
        return run.objective.outputs(plan, batch, features, run.target.embedding, moment)

    assert not torch.equal(outputs(Moment(0, 1)), outputs(Moment(0, 2)))
    run.objective.eval()
    assert torch.equal(outputs(Moment(0, 1)), outputs(Moment(0, 2)))


def test_kept_groups_are_nested_prefixes_of_the_right_size() -> None:
    objective = KINDS["peagle"][1]
    rows = PackedRows(random_documents(12), PackingConfig(max_length=60))
    batch = rows.batch(range(len(rows)))
    plan = plan_unroll(batch, 6)
    kept = kept_groups(plan, batch, objective, Moment(0, 3))
    anchors = plan.valid[0].sum(1)
    for depth in range(6):
        share = max(0.6**depth, 0.2)
        assert kept[depth].sum(1).tolist() == [max(1, round(share * n)) for n in anchors.tolist()]
        assert torch.all(kept[depth] <= (kept[depth - 1] if depth else plan.valid[0]))
    assert not torch.equal(kept, kept_groups(plan, batch, objective, Moment(0, 4)))
    for line, row in enumerate(batch.rows):
        single = rows.batch([row])
        alone = kept_groups(plan_unroll(single, 6), single, objective, Moment(0, 3))
        assert torch.equal(alone[:, 0], kept[:, line, : alone.shape[2]])


def test_group_visibility_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    document = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [3] * 8 + [4] * 4])
    anchor = torch.randint(0, 12, (2, 30), generator=generator)
    depth = torch.randint(0, 4, (2, 30), generator=generator)
    alive = torch.rand(2, 30, generator=generator) < 0.8
    seen = group_visibility(document, anchor, depth, alive)
    for b in range(2):
        for q in range(30):
            for k in range(30):
                qa, ka, qd, kd = int(anchor[b, q]), int(anchor[b, k]), int(depth[b, q]), int(depth[b, k])
                rule = document[b, qa] == document[b, ka] and ((kd == 0 and ka <= qa) or (ka == qa and kd <= qd))
                assert bool(seen[b, q, k]) == ((rule and bool(alive[b, k])) or q == k)


@pytest.mark.parametrize("training", [True, False], ids=["thinned", "whole"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_peagle_pairs_equal_one_pass_drafting(pack: bool, training: bool, tmp_path: Path) -> None:
    """The pairs of the objective, row by row, against drafting from that slot alone."""
    from tests.heads.test_peagle import decode as draft
    from tests.heads.test_peagle import lively_head
    from tests.tiny import tiny_target
    from train.kinds import PEagleObjective

    target = tiny_target("llama", vocab=60)
    head = lively_head(target)
    objective = PEagleObjective(head, KINDS["peagle"][1]).train(training)
    batch = batch_of(pack)
    features = run_target(target, batch)
    plan = objective.plan(batch, Moment(1, 2))
    with torch.no_grad():
        outputs = head.base.logits(objective.outputs(plan, batch, features, target.embedding, Moment(1, 2)))
    assert features.taps is not None
    compared = set()
    for number, (step, row, column) in enumerate(plan.valid.nonzero().tolist()):
        slot = int(plan.slots[row, column])
        there = (batch.document[row] == batch.document[row, slot]).nonzero().squeeze(1)
        start, end = int(there[0]), int(there[-1]) + 1
        drafted = draft(head, target, batch.ids[row, start:end], features.taps[row, start:end], slot - start, step + 1)
        torch.testing.assert_close(outputs[number], drafted[step], atol=1e-5, rtol=1e-5)
        compared.add((row, slot, step))
    assert len(compared) == int(plan.valid.sum()) and {step for *_, step in compared} == set(range(objective.depths))
    everything = int(plan_unroll(batch, objective.depths).valid.sum())
    assert (len(compared) < everything) == training


def test_draft_vocabulary_of_its_own(tmp_path: Path) -> None:
    vocab = DraftVocab(torch.arange(0, VOCAB, 2), VOCAB)
    for kind in ("eagle3", "peagle"):
        tracker = Recorder()
        run = kind_run(kind, tmp_path / kind, vocab=vocab, steps=2, tracker=tracker)
        run.train()
        assert 0.2 < tracker.lines[0][1]["target_mass_in_vocab"] < 0.8
