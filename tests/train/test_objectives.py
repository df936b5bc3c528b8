"""The bookkeeping of training-time test: anchors, shifted masks, labels and weights against loops and hand-written examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data.packing import Batch, Normaliser, PackedRows, PackingConfig
from heads.medusa import MedusaConfig
from heads.registry import new_head
from heads.vocab import DraftVocab
from tests.train.runs import VOCAB, document, random_documents, small_target
from train.kinds import make_objective
from train.losses import PairMetrics
from train.objective_config import ObjectiveConfig
from train.objectives import run_target
from train.pairs import Unroll, depth_metrics, depth_sums, dpace_weights, pair_weights, plan_unroll, shifted_tokens, visible_slots


def noisy_batch(seed: int, pack: bool) -> Batch:
    """Two-turn documents, and documents whose mask is random noise."""
    rng = np.random.default_rng(seed)
    documents = random_documents(6, seed)
    for index in range(6):
        size = int(rng.integers(3, 20))
        mask = (rng.random(size) < 0.75).astype(int)
        mask[-2:] = 1  # so that it carries loss
        mask[-3] = index % 2
        documents.append(document(rng.integers(3, 40, size), mask, f"n{index}"))
    rows = PackedRows(documents, PackingConfig(max_length=48, pack=pack))
    return rows.batch(range(len(rows)))


def brute_force(batch: Batch, depths: int) -> dict[tuple[int, int, int], int]:
    """(step, row, slot) -> label position, for every pair that carries loss, straight from ALGORITHMS 9.3."""
    ids = batch.ids.tolist()
    mask, number = batch.mask.tolist(), batch.document.tolist()
    found = {}
    for row in range(len(ids)):
        length = len(ids[row])
        for slot in range(length):
            for step in range(depths):
                # reads x_{t+1} .. x_{t+1+i}, predicts x_{t+2+i}: all written by the target, all in the slot's document
                span = range(slot + 1, slot + 3 + step)
                if span[-1] < length and all(mask[row][s] and number[row][s] == number[row][slot] for s in span):
                    found[step, row, slot] = slot + 1 + step
    return found


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("depths", [1, 3, 7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plan_equals_brute_force(seed: int, depths: int, pack: bool) -> None:
    batch = noisy_batch(seed, pack)
    plan = plan_unroll(batch, depths)
    expected = brute_force(batch, depths)
    found = {}
    for step, row, column in plan.valid.nonzero().tolist():
        slot = int(plan.slots[row, column])
        key = (step, row, slot)
        assert key not in found  # no slot twice
        found[key] = int(plan.label[step, row, column])
        assert int(plan.sample[row, column]) == int(batch.document[row, slot])
    assert found == expected
    assert {step for step, _, _ in expected} == set(range(depths))
    assert int(plan.slots.min()) >= 0 and int(plan.label.max()) < batch.ids.shape[1]


def test_hand_written_shift() -> None:
    #      slot       0  1  2  3  4  5  6  7  8  9
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1]]).bool()
    number = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 0, 1]])
    batch = Batch(torch.arange(10)[None], mask, number, torch.tensor([[*range(9), 0]]), (0,))
    plan = plan_unroll(batch, 4)
    assert plan.slots.tolist() == [[1, 2, 3, 6]]
    assert plan.valid[:, 0].tolist() == [
        [True, True, True, True],  # labels 2 3 4 7
        [True, True, False, False],  # labels 3 4: x_6 is of the next prompt, x_9 of the next document
        [True, False, False, False],  # label 4
        [False, False, False, False],
    ]
    assert plan.label[:, 0, 0].tolist() == [2, 3, 4, 5]
    assert plan.label[0, 0].tolist() == [2, 3, 4, 7]
    tokens = shifted_tokens(batch.ids, 4)
    assert tokens[:, 0, 1].tolist() == [2, 3, 4, 5]
    assert tokens[:, 0, 8].tolist() == [9, 9, 9, 9]
    # the token a step predicts is the one the next step reads
    assert torch.equal(tokens[1:, 0, :5], tokens[:-1, 0, :5] + 1)


def test_visible_slots() -> None:
    number = torch.tensor([[0, 0, 1, 1, 2], [3, 4, 4, 4, 5]])
    zeros = torch.zeros_like(number)
    seen = visible_slots(Batch(zeros, zeros.bool(), number, zeros, (0, 1)))
    for row in range(2):
        for q in range(5):
            for k in range(5):
                assert bool(seen[row, q, k]) == (k <= q and bool(number[row, q] == number[row, k]))


def test_row_without_answers_is_planned_without_weight() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]]).bool()
    number = torch.tensor([[0] * 4, [1] * 4])
    plan = plan_unroll(Batch(torch.ones(2, 4, dtype=torch.int64), mask, number, torch.arange(4).expand(2, 4), (0, 1)), 2)
    assert plan.valid[:, 1].sum() == 0 and plan.valid[0, 0].all()
    empty = plan_unroll(Batch(torch.ones(1, 4, dtype=torch.int64), mask[1:], number[1:], torch.arange(4)[None], (1,)), 2)
    assert empty.valid.shape == (2, 1, 1) and not empty.valid.any()


@pytest.mark.parametrize("pack", [True, False])
def test_sample_weights_are_means_over_documents(pack: bool) -> None:
    depths, decay = 5, 0.7
    rows = PackedRows(random_documents(9, 3), PackingConfig(max_length=40, pack=pack))
    batch = rows.batch(range(len(rows)))
    plan = plan_unroll(batch, depths)
    total = rows.totals(range(len(rows)))
    weight = pair_weights(plan, ObjectiveConfig(depths=depths, depth_decay=decay), total)
    expected = brute_force(batch, depths)
    documents = {(step, int(batch.document[row, slot])) for step, row, slot in expected}
    assert total.documents == 9
    for step in range(depths):
        there = sum(s == step for s, _ in documents)
        assert float(weight[step].sum()) == pytest.approx(decay**step * there / 9, rel=1e-5)
    assert torch.all((weight > 0) == plan.valid)
    # every slot of a document weighs the same
    for step, number in documents:
        own = weight[step][plan.valid[step] & (plan.sample == number)]
        assert float(own.max() - own.min()) < 1e-9
        assert float(own.sum()) == pytest.approx(decay**step / 9, rel=1e-5)


def test_other_normalisers() -> None:
    rows = PackedRows(random_documents(9, 3), PackingConfig(max_length=40))
    batch = rows.batch(range(len(rows)))
    plan, total = plan_unroll(batch, 3), rows.totals(range(len(rows)))
    decay = torch.tensor([1.0, 0.5, 0.25]).view(3, 1, 1)
    assert total.slots == len(rows) * 40  # the length of a row, however wide the batch: no process knows the other's width
    assert total.anchors == int(plan.valid[0].sum())
    everywhere = pair_weights(plan, ObjectiveConfig(depths=3, depth_decay=0.5, loss_norm="all_positions"), total)
    torch.testing.assert_close(everywhere, plan.valid * decay / total.slots)
    valid = pair_weights(plan, ObjectiveConfig(depths=3, depth_decay=0.5, loss_norm="global_valid"), total)
    torch.testing.assert_close(valid, plan.valid * decay / total.anchors)
    assert float(valid[0].sum()) == pytest.approx(1.0, rel=1e-5)


def test_weights_of_parts_sum_to_the_weights_of_the_whole() -> None:
    """Splitting an update over processes and accumulation steps must not change what a pair weighs."""
    rows = PackedRows(random_documents(9, 3), PackingConfig(max_length=40))
    total = rows.totals(range(len(rows)))
    for norm in ("sample_valid", "global_valid", "all_positions"):
        config = ObjectiveConfig(depths=3, loss_norm=norm)
        whole = pair_weights(plan_unroll(rows.batch(range(len(rows))), 3), config, total).sum((1, 2))
        parts = sum(pair_weights(plan_unroll(rows.batch([r]), 3), config, total).sum((1, 2)) for r in range(len(rows)))
        torch.testing.assert_close(parts, whole)


def test_tau_counts_joint_prefixes() -> None:
    """Three slots, three depths. Marginals would give 1 + 2/3 + 4/9 + ...; what counts is how far each slot gets without a mistake."""
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool().unsqueeze(1)
    zeros = torch.zeros(1, 3, dtype=torch.int64)
    plan = Unroll(zeros, valid, zeros.expand(3, 1, 3), zeros)
    #          step 0       step 1  step 2
    agree = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    values = torch.tensor(agree)
    metrics = PairMetrics(loss=values + 1, agree=values, alpha=values * 0.5, mass=torch.full((6,), 0.75), in_vocab=values)
    sums = depth_sums(plan, metrics)
    assert sums[:, 0].tolist() == [3, 2, 1]
    assert sums[:, 1].tolist() == [2, 1, 1]
    assert sums[:, 3].tolist() == [2, 0, 0]  # slot 0 fails at step 1, so its correct step 2 is never reached; slot 1 fails at once
    found = depth_metrics(sums)
    assert found["tau_sim"] == pytest.approx(1 + 2 / 3)
    assert found["agree/0"] == pytest.approx(2 / 3)
    assert found["agree/1"] == pytest.approx(1 / 2)
    assert found["alpha/2"] == pytest.approx(0.5)
    assert found["loss/0"] == pytest.approx(5 / 3)
    assert found["target_mass_in_vocab"] == pytest.approx(0.75)
    perfect = depth_sums(plan, PairMetrics(*[torch.ones(6)] * 5))
    assert depth_metrics(perfect)["tau_sim"] == pytest.approx(4.0)


def test_depths_without_labels_are_left_out() -> None:
    sums = torch.tensor([[2.0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    assert set(depth_metrics(sums)) == {"agree/0", "alpha/0", "loss/0", "target_mass_in_vocab", "tau_sim"}


def test_normaliser_counts_match_the_rows() -> None:
    rows = PackedRows(random_documents(9, 3), PackingConfig(max_length=40))
    parts = [rows.totals([r]) for r in range(len(rows))]
    whole = rows.totals(range(len(rows)))
    assert whole == Normaliser(sum(p.documents for p in parts), sum(p.slots for p in parts), sum(p.anchors for p in parts))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_dpace_weights_by_the_formula(beta: float) -> None:
    """w_j = sum_{m >= j} prod_{i <= m} ((1 - beta) exp(-CE_i) + beta), over each group's valid depths."""
    generator = torch.Generator().manual_seed(2)
    ce = 3 * torch.rand(5, 7, generator=generator)
    reached = torch.tensor([0, 1, 2, 3, 4, 5, 5])  # valid depths of each group
    valid = torch.arange(5).unsqueeze(1) < reached
    found = dpace_weights(ce, valid, beta)
    for group in range(7):
        for j in range(5):
            expected = 0.0
            for m in range(j, int(reached[group])):
                product = 1.0
                for i in range(m + 1):
                    product *= (1 - beta) * math.exp(-float(ce[i, group])) + beta
                expected += product
            assert float(found[j, group]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_dpace_loss_and_gradient_by_direct_computation(pack: bool) -> None:
    """The weights carry no gradient, and the sum is divided by the number of groups of each document, then by documents."""
    target = small_target()
    config = ObjectiveConfig(depth_weights="dpace", dpace_beta=0.3)
    head = new_head(MedusaConfig(heads=3), target, DraftVocab.full(VOCAB), seed=1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    rows = PackedRows(random_documents(5), PackingConfig(max_length=48, pack=pack))
    batch, total = rows.batch(range(len(rows))), rows.totals(range(len(rows)))
    features = run_target(target, batch)
    objective = make_objective(head, config, target)
    loss = objective(batch, features, target.embedding, target.lm_head, None, total)[0]
    found = torch.autograd.grad(loss, list(head.parameters()))

    plan = plan_unroll(batch, 3)
    groups: dict[tuple[int, int], list[torch.Tensor]] = {}
    documents: dict[int, int] = {}
    for depth, row, column in plan.valid.nonzero().tolist():
        slot = int(plan.slots[row, column])
        p = torch.softmax(features.hidden[row, slot + 1 + depth] @ target.lm_head.T, -1)
        log_q = torch.log_softmax(head.blocks[depth](features.hidden[row, slot]) @ target.lm_head.T, -1)
        groups.setdefault((row, slot), []).append(-(p * log_q).sum())
        if depth == 0:
            number = int(batch.document[row, slot])
            documents[number] = documents.get(number, 0) + 1
    expected = torch.zeros(())
    for (row, slot), losses in groups.items():
        trust = [0.7 * math.exp(-float(one.detach())) + 0.3 for one in losses]
        reached = [math.prod(trust[: m + 1]) for m in range(len(trust))]
        share = len(documents) * documents[int(batch.document[row, slot])]
        expected = expected + sum((sum(reached[j:]) / share * one for j, one in enumerate(losses)), torch.zeros(()))
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for mine, other in zip(found, torch.autograd.grad(expected, list(head.parameters())), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)
