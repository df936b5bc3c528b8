"""Medusa-2: the adapter on the target, the joint loss, and what a checkpoint of both is worth elsewhere."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file

from data.packing import PackedRows, PackingConfig
from eval.quality import distance, measure_quality
from heads.adapter import AdapterConfig, TargetAdapter, has_adapter
from heads.errors import UserError
from heads.medusa import MedusaConfig
from heads.registry import new_head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.tiny import tiny_model
from tests.train.runs import KINDS, VOCAB, kind_run, random_documents, small_run, small_target, weights
from train.kinds import make_objective
from train.objective_config import JointTerms, ObjectiveConfig
from train.objectives import Moment, run_target
from train.pairs import pair_weights, plan_unroll

IDS = torch.arange(3, 15)[None]


def lively(target: FrozenTarget, rank: int = 4, size: float = 0.3) -> TargetAdapter:
    """An adapter whose updates are far from zero."""
    adapter = TargetAdapter.fresh(target, AdapterConfig(rank=rank, alpha=8), "tiny", seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in adapter.values.values():
            value.copy_(size * torch.randn(value.shape, generator=generator))
    return adapter


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_switched_off_it_is_the_original_target_bit_for_bit(family: str) -> None:
    target = FrozenTarget(tiny_model(family))
    before, mark = target.forward(IDS), target.fingerprint
    adapter = lively(target)
    off = target.forward(IDS)
    assert torch.equal(off.hidden, before.hidden) and off.taps is not None and torch.equal(off.taps, before.taps)  # type: ignore[arg-type]
    with adapter.on():
        assert not torch.allclose(target.forward(IDS).hidden, before.hidden, atol=1e-2)
    assert torch.equal(target.forward(IDS).hidden, before.hidden) and target.fingerprint == mark


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone() -> None:
    made = []
    for seed, stir in ((1, 0), (1, 9), (2, 0)):
        target = small_target()
        torch.manual_seed(stir)
        drawn = torch.get_rng_state()
        adapter = TargetAdapter.fresh(target, AdapterConfig(rank=2), "tiny", seed)
        assert torch.equal(torch.get_rng_state(), drawn)
        with adapter.on():
            on = target.forward(IDS).hidden
        assert torch.equal(on, target.forward(IDS).hidden)
        made.append(adapter.values)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert any(not torch.equal(made[0][name], made[2][name]) for name in made[0])


def test_peft_loads_what_was_saved_and_merging_gives_the_same_model(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    plain = copy.deepcopy(model)
    target = FrozenTarget(model)
    adapter, mark = lively(target), target.fingerprint
    adapter.save(tmp_path)
    assert has_adapter(tmp_path)
    with adapter.on():
        expected = target.logits(target.forward(IDS).hidden)
    theirs = PeftModel.from_pretrained(plain, str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=IDS).logits, expected, atol=1e-5, rtol=1e-5)
    again = FrozenTarget(tiny_model("llama", vocab=VOCAB))
    loaded = TargetAdapter.load(again, tmp_path)
    with loaded.on():
        assert torch.equal(again.logits(again.forward(IDS).hidden), expected)
    names = {name for name, _ in tiny_model("llama", vocab=VOCAB).named_parameters()}
    loaded.merge()
    torch.testing.assert_close(again.logits(again.forward(IDS).hidden), expected, atol=1e-5, rtol=1e-5)
    assert {name for name, _ in again.model.named_parameters()} == names and again.fingerprint != mark


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    lively(small_target(), rank=4).save(tmp_path)
    other = TargetAdapter.fresh(small_target(), AdapterConfig(rank=3), "tiny", 0)
    with pytest.raises(UserError, match=r"another target or of another rank \(first difference: base_model"):
        other.restore(tmp_path)


def test_the_first_stage_is_medusa_1_bit_for_bit(tmp_path: Path) -> None:
    kind_run("medusa2", tmp_path / "two", save_every=3, keep_last=3).train()
    config, objective = KINDS["medusa"]
    target = small_target()
    head = new_head(config, target, DraftVocab.full(target.vocab_size), seed=1).train()
    one = small_run(tmp_path / "one", target=target, objective=make_objective(head, objective, target), save_every=3, keep_last=3)
    one.train()
    first, second = (load_file(tmp_path / which / "checkpoints/step-000003/head.safetensors") for which in ("one", "two"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    middle, last = (load_file(tmp_path / f"two/checkpoints/step-00000{n}/adapter_model.safetensors") for n in (3, 6))
    assert all(torch.all(value == 0) for name, value in middle.items() if "lora_B" in name)
    assert all(not torch.equal(value, last[name]) for name, value in middle.items())
    assert one.rates(4) == kind_run("medusa2", tmp_path / "x").rates(4)[:1]


def test_the_adapters_rate_is_zero_before_its_stage_and_warms_up_in_it(tmp_path: Path) -> None:
    run = kind_run("medusa2", tmp_path, steps=40, warmup=0.1)
    rates = [run.rates(step)[1] for step in range(40)]
    assert rates[:20] == [0.0] * 20 and rates[20] == pytest.approx(0.5e-3) and max(rates) == rates[21] == rates[22] == pytest.approx(1e-3)
    assert all(a > b for a, b in itertools.pairwise(rates[22:]))


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_joint_loss_and_gradients_by_direct_computation(pack: bool) -> None:
    """KL(original || adapted) + the heads' losses; the target feels heads_weight of the latter, the heads all of them."""
    target = small_target()
    adapter = lively(target)
    config = ObjectiveConfig(joint=JointTerms(start=0.0, heads_weight=0.3))
    head = new_head(MedusaConfig(heads=3), target, DraftVocab.full(VOCAB), seed=1).train()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    objective: Any = make_objective(head, config, target, adapter).train()
    rows = PackedRows(random_documents(5), PackingConfig(max_length=48, pack=pack))
    batch, total, moment = rows.batch(range(len(rows))), rows.totals(range(len(rows))), Moment(0, 4, steps=10)
    features = run_target(target, batch)
    loss, _ = objective(batch, features, target.embedding, target.lm_head, None, total, None, moment)
    parameters = [*head.parameters(), *adapter.parameters()]
    found = torch.autograd.grad(loss, parameters)

    share = 0.3 * float(torch.sin(torch.tensor(0.5 * torch.pi * 5 / 10)))
    assert objective.heads_weight(moment) == pytest.approx(share)
    plan = plan_unroll(batch, 3)
    weight = pair_weights(plan, config, total)
    p = torch.softmax(features.hidden @ target.lm_head.T, -1)
    with adapter.on():
        adapted = target.trace(batch.ids, batch.position).hidden
    kl, heads = torch.zeros(()), torch.zeros(())
    log_q = torch.log_softmax(adapted @ target.lm_head.T, -1)
    for depth, row, column in plan.valid.nonzero().tolist():
        slot, label = int(plan.slots[row, column]), int(plan.label[depth, row, column])
        w = weight[depth, row, column]
        if depth == 0:
            kl = kl + w * F.kl_div(log_q[row, label], p[row, label], reduction="sum")
        logits = head.blocks[depth](adapted[row, slot]) @ target.lm_head.T
        heads = heads - w * (p[row, label] * torch.log_softmax(logits, -1)).sum()
    torch.testing.assert_close(loss, kl + heads, atol=1e-5, rtol=1e-5)
    own = torch.autograd.grad(heads, list(head.parameters()), retain_graph=True)
    felt = torch.autograd.grad(kl + share * heads, list(adapter.parameters()))
    for mine, expected in zip(found, [*own, *felt], strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def test_a_run_is_not_continued_with_another_adapter(tmp_path: Path) -> None:
    kind_run("medusa2", tmp_path / "with", steps=1).train()
    kind_run("medusa", tmp_path / "without", steps=1).train()
    with pytest.raises(UserError, match="with an adapter on the target, unlike this recipe"):
        kind_run("medusa", tmp_path / "with").resume()
    with pytest.raises(UserError, match="without an adapter on the target, unlike this recipe"):
        kind_run("medusa2", tmp_path / "without").resume()


def test_training_of_an_adapter_lowers_its_distance_from_the_original(tmp_path: Path) -> None:
    """Self-distillation: an adapter that starts far off is drawn back to the original."""
    target = small_target()
    adapter = lively(target, size=0.1)
    objective = make_objective(
        new_head(MedusaConfig(heads=1), target, DraftVocab.full(VOCAB), seed=1),
        ObjectiveConfig(joint=JointTerms(start=0.0, learning_rate=1e-2)),
        target,
        adapter,
    )

    def far() -> float:
        return sum(distance(target, adapter, d.ids.tolist()[:3], d.ids.tolist()[3:])[0] for d in random_documents(16))

    before = far()
    run = small_run(tmp_path, target=target, objective=objective, steps=80, learning_rate=1e-3)
    start = weights(run)
    run.train()
    assert far() < 0.1 * before
    assert all(not torch.equal(value, start[name]) for name, value in weights(run).items() if "lora" in name)


def test_quality_by_direct_computation() -> None:
    target = small_target()
    adapter = lively(target)

    class Record:
        def __init__(self, name: str, context: list[int], output: list[int]) -> None:
            self.prompt_id, self.context, self.output = name, context, output

    records: Any = [Record("a", [3, 4], [5, 6, 7]), Record("b", [8], [9, 10]), Record("a", [3, 4, 5, 6, 7, 8], [11])]
    kl, same, tokens = 0.0, 0, 0
    for record in records:
        for at in range(len(record.output)):
            ids = torch.tensor([record.context + record.output[:at]])
            p = torch.softmax(target.logits(target.forward(ids).hidden[0, -1]), -1)
            with adapter.on():
                q = torch.softmax(target.logits(target.forward(ids).hidden[0, -1]), -1)
            kl += float((p * (p / q).log()).sum())
            same += int(p.argmax() == q.argmax())
            tokens += 1
    found = measure_quality(target, adapter, records, bootstrap=200, seed=0)
    assert found.tokens == tokens == 6 and found.prompts == 2
    assert found.kl == pytest.approx(kl / tokens, rel=1e-4) and found.agreement == same / tokens
    assert found.kl_interval is not None and found.kl_interval.low <= found.kl <= found.kl_interval.high
