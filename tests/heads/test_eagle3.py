"""EAGLE-3: training-time test equals decoding (ALGORITHMS 16.4), equals a brute-force oracle, and trains masked slots only (16.8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from data.packing import Batch, PackedRows, PackingConfig
from heads.cache import LineCache
from heads.eagle3 import Eagle3Head
from heads.layers import Rotary
from heads.target import FrozenTarget, TargetOutput
from heads.vocab import DraftVocab
from tests.heads.parity import DEPTHS, VOCAB, batch_of, check_detach, check_parity, check_ragged_trees, lively, without_gradient
from tests.tiny import chain_visible, tiny_head, tiny_target
from tests.train.runs import document
from train.kinds import TrainingTimeTest
from train.objective_config import ObjectiveConfig
from train.objectives import run_target
from train.pairs import plan_unroll, shifted_tokens, visible_slots


def lively_head(target: FrozenTarget, full: bool, **config: Any) -> Eagle3Head:
    counts = torch.randint(0, 9, (target.vocab_size,), generator=torch.Generator().manual_seed(2))
    head: Eagle3Head = lively(tiny_head(target, vocab=None if full else DraftVocab.from_counts(counts, 25), **config))
    return head


def training_inputs(target: FrozenTarget, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    taps = run_target(target, batch).taps
    assert taps is not None
    return taps, target.embed(shifted_tokens(batch.ids, DEPTHS))


@pytest.mark.parametrize("full", [True, False], ids=["full", "reduced"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("variant", ["classic", "3.1"])
def test_training_equals_incremental_decoding(variant: str, layers: int, pack: bool, full: bool) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target, full, variant=variant, layers=layers)
    assert head.vocab.size == (VOCAB if full else 25)
    batch = batch_of(pack)
    check_parity(head, target, batch, training_inputs(target, batch)[0])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("variant", ["classic", "3.1"])
def test_ragged_batches_and_trees_equal_chains(variant: str, layers: int) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    check_ragged_trees(lively_head(target, False, variant=variant, layers=layers), target, len(target.taps) * 32)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("variant", ["classic", "3.1"])
def test_unroll_equals_dense_attention_with_an_explicit_mask(variant: str, layers: int) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target, True, variant=variant, layers=layers)
    batch = batch_of(True)
    taps, tokens = training_inputs(target, batch)
    length = batch.ids.shape[1]
    every = torch.arange(length)[None]
    with torch.no_grad():
        outputs = head.unroll(taps, tokens, batch.position, visible_slots(batch), every)[:, 0]
        expected = oracle(head, taps[0], tokens[:, 0], batch.position[0].tolist(), batch.document[0].tolist())
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)


def oracle(head: Eagle3Head, taps: torch.Tensor, tokens: torch.Tensor, position: list[int], document: list[int]) -> torch.Tensor:
    """[S, T, H]: all (step, slot) pairs as one dense sequence, computed again in full for every step; nothing of heads/ but weights."""
    arch, length = head.arch, taps.shape[0]
    eps = arch.rms_eps

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def rotate(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        half = arch.head_dim // 2
        angle = where[:, None].double() * arch.rope["rope_theta"] ** (-torch.arange(half).double() * 2 / arch.head_dim)
        turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), dim=-1).double())
        turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    parts = list(taps.split(arch.hidden_size, dim=-1))
    if head.fc_norms is not None:
        parts = [norm(p, n.weight) for p, n in zip(parts, head.fc_norms, strict=True)]
    states = [torch.cat(parts, dim=-1) @ head.fc.weight.T]
    outputs: list[torch.Tensor] = []
    for step in range(len(tokens)):
        pairs = [(s, t) for s in range(step + 1) for t in range(length)]
        visible = torch.zeros(len(pairs), len(pairs), dtype=torch.bool)
        for q, (query_step, query_slot) in enumerate(pairs):
            for k, (key_step, key_slot) in enumerate(pairs):
                if key_step == 0:
                    visible[q, k] = key_slot <= query_slot and document[key_slot] == document[query_slot]
                else:
                    visible[q, k] = key_slot == query_slot and key_step <= query_step
        where = torch.tensor([position[t] + s for s, t in pairs])
        value = torch.cat(states)
        token = tokens[: step + 1].flatten(0, 1)
        for layer in head.layers:
            normed = norm(value, layer.state_norm.weight)
            if layer.token_norm is not None:
                normed = torch.cat((norm(token, layer.token_norm.weight), normed), dim=-1)
            attention = layer.attention
            query = rotate((normed @ attention.q_proj.weight.T).view(-1, arch.n_q, arch.head_dim), where)
            key = rotate((normed @ attention.k_proj.weight.T).view(-1, arch.n_kv, arch.head_dim), where)
            worth = (normed @ attention.v_proj.weight.T).view(-1, arch.n_kv, arch.head_dim)
            mixed = []
            for h in range(arch.n_q):
                g = h * arch.n_kv // arch.n_q
                scores = query[:, h] @ key[:, g].T / arch.head_dim**0.5
                mixed.append(torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ worth[:, g])
            value = value + torch.cat(mixed, dim=-1) @ attention.o_proj.weight.T
            x = norm(value, layer.mlp_norm.weight)
            mlp = layer.mlp
            value = value + (F.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        own = value[-length:]
        outputs.append(norm(own, head.norm.weight))
        states.append(outputs[-1] if arch.norm_output else own)
    return torch.stack(outputs)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 5000.0}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, LLAMA3],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_equals_the_librarys(rope: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 9, 16, generator=generator), torch.randn(2, 2, 9, 16, generator=generator)
    position = torch.randint(0, 500, (2, 9), generator=generator)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope))
    library_q, library_k = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, position))
    rotary = Rotary(rope, 16, 512)
    torch.testing.assert_close(rotary(q, position), library_q, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rotary(k, position), library_k, atol=1e-6, rtol=1e-6)


def test_llama3_scaling_of_the_target_is_kept() -> None:
    target = tiny_target("llama", vocab=VOCAB, rope_parameters=dict(LLAMA3))
    head = tiny_head(target)
    assert head.arch.rope == LLAMA3
    expected = target.decoder.rotary_emb.inv_freq
    torch.testing.assert_close(head.rotary.rotary.inv_freq, expected, atol=0, rtol=0)
    plain = Rotary({"rope_type": "default", "rope_theta": 10000.0}, head.arch.head_dim, 512)
    assert not torch.allclose(plain.rotary.inv_freq, expected)


def forward_with_outputs(pack: bool, **config: Any) -> tuple[Batch, Any, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Loss of a batch with gradients kept on taps and on the unrolled outputs."""
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target, False, **config)
    batch = batch_of(pack)
    objective = TrainingTimeTest(head, ObjectiveConfig(depths=DEPTHS))
    features = run_target(target, batch)
    assert features.taps is not None
    taps = features.taps.clone().requires_grad_()
    kept: list[torch.Tensor] = []
    original = head.unroll

    def unroll(*args: Any) -> torch.Tensor:
        output = original(*args)
        output.retain_grad()
        kept.append(output)
        return output

    head.unroll = unroll  # type: ignore[method-assign]
    rows = PackedRows([document([1] * 5, [1] * 5)] * 3, PackingConfig(max_length=16))
    total = rows.totals([0])
    assert total.documents == 3

    def call(hidden: torch.Tensor) -> torch.Tensor:
        return objective(batch, TargetOutput(hidden, taps), target.embedding, target.lm_head, target.softcap, total)[0]

    loss = call(features.hidden)
    loss.backward()
    return batch, plan_unroll(batch, DEPTHS), kept[0], taps, features.hidden, (loss, call)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layers", [1, 2])
def test_gradient_is_zero_outside_the_mask(pack: bool, layers: int) -> None:
    batch, plan, outputs, taps, _, _ = forward_with_outputs(pack, layers=layers)
    assert outputs.grad is not None and taps.grad is not None
    moved = outputs.grad.abs().sum(-1) != 0  # [S, B, N]
    assert torch.equal(moved, plan.valid)
    for row in range(len(batch.ids)):
        for number in batch.document[row].unique().tolist():
            there = (batch.document[row] == number).nonzero().squeeze(1)
            used = [slot for slot, ok in zip(plan.slots[row].tolist(), plan.valid[0, row].tolist(), strict=True) if ok and slot in there]
            last = max(used, default=-1)
            for slot in there.tolist():  # slots up to the last anchor are seen as keys; later ones by nobody
                assert bool((taps.grad[row, slot] != 0).any()) == (slot <= last), (row, slot, last)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("variant", ["classic", "3.1"])
def test_every_parameter_gets_a_gradient(variant: str, layers: int) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = tiny_head(target, variant=variant, layers=layers)
    batch = batch_of(True)
    taps, tokens = training_inputs(target, batch)
    plan = plan_unroll(batch, DEPTHS)
    outputs = head.unroll(taps, tokens, batch.position, visible_slots(batch), plan.slots)
    head.logits(outputs)[plan.valid].square().sum().backward()
    assert without_gradient(head) == []


@pytest.mark.parametrize("variant", ["classic", "3.1"])
def test_detached_steps_have_the_same_values_and_no_gradient_between_them(variant: str) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    taps, _ = training_inputs(target, batch_of(True))
    check_detach(lively_head(target, True, variant=variant, layers=2), target, taps)


def test_hidden_states_of_prompts_and_padding_are_never_labels() -> None:
    batch, _, _, _, hidden, (loss, call) = forward_with_outputs(True)
    # a label of position s predicts s + 1, so it counts where both s (read) and s + 1 (predicted) were written by the target
    label = torch.zeros_like(batch.mask)
    label[:, :-1] = batch.mask[:, :-1] & batch.mask[:, 1:] & (batch.document[:, :-1] == batch.document[:, 1:])
    assert 0 < int(label.sum()) < label.numel()
    poisoned = hidden.masked_fill(~label[..., None], float("nan"))
    torch.testing.assert_close(call(poisoned), loss, atol=0, rtol=0)
    assert not torch.isfinite(call(hidden.masked_fill(label[..., None], float("nan"))))


def test_initial_values() -> None:
    target = tiny_target("gemma3", vocab=VOCAB)
    counts = torch.arange(VOCAB)
    vocab = DraftVocab.from_counts(counts, 20)
    head = tiny_head(target, vocab=vocab)
    assert torch.equal(head.lm_head.weight, target.lm_head[-20:])
    torch.testing.assert_close(head.norm.weight, target.final_norm_weight() * 0.3)
    # Aligned: what comes out of an untrained head is close to the highest tap as fused.
    taps = torch.randn(1, 8, len(target.taps) * target.hidden_size)
    cache = LineCache()
    token = torch.randn(1, 8, target.hidden_size)
    _, state = head.extend(taps, None, token, torch.arange(8)[None], cache, chain_visible(cache, 1, 8))
    high = taps[..., -target.hidden_size :]
    assert torch.cosine_similarity(state / head.norm.weight, high, dim=-1).mean().item() > 0.7
    assert torch.equal(head.target_ids(torch.arange(20)), torch.arange(40, 60))
    random = tiny_head(target, vocab=vocab, init="paper", train_lm_head=False)
    assert float(random.lm_head.weight.std()) == pytest.approx(0.02, rel=0.15)
    assert not random.lm_head.weight.requires_grad
    assert all(p.requires_grad for n, p in random.named_parameters() if n != "lm_head.weight")
