"""EAGLE-1: training equals decoding, equals a brute-force oracle; the untrained head repeats the feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from data.packing import Batch
from heads.cache import LineCache
from heads.eagle import EagleConfig, EagleHead
from heads.registry import new_head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.heads.parity import DEPTHS, VOCAB, batch_of, check_detach, check_parity, check_ragged_trees, lively, without_gradient
from tests.tiny import chain_visible, tiny_target
from train.objectives import run_target
from train.pairs import plan_unroll, shifted_tokens, visible_slots


def fresh_head(target: FrozenTarget, **config: Any) -> EagleHead:
    head: EagleHead = new_head(EagleConfig(**config), target, DraftVocab.full(target.vocab_size), seed=1)
    return head.eval()


def lively_head(target: FrozenTarget, **config: Any) -> EagleHead:
    """The fusion apart, which passes the feature through and must not multiply it: no norm stands between steps, and values would explode."""  # noqa: E501
    head = fresh_head(target, **config)
    first: Any = head.layers[0]
    fusion = first.fc.weight.detach().clone()
    lively(head)
    with torch.no_grad():
        first.fc.weight.copy_(torch.cat((8 * fusion[:, :32], fusion[:, 32:]), dim=1))
    return head


def hidden_of(target: FrozenTarget, batch: Batch) -> torch.Tensor:
    return run_target(target, batch).hidden


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layers", [1, 2])
def test_training_equals_incremental_decoding(layers: int, pack: bool, family: str) -> None:
    target = tiny_target(family, vocab=VOCAB)
    batch = batch_of(pack)
    check_parity(lively_head(target, layers=layers), target, batch, hidden_of(target, batch))


@pytest.mark.parametrize("layers", [1, 2])
def test_ragged_batches_and_trees_equal_chains(layers: int) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    check_ragged_trees(lively_head(target, layers=layers), target, target.hidden_size)


@pytest.mark.parametrize("layers", [1, 2])
def test_detached_steps_have_the_same_values_and_no_gradient_between_them(layers: int) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    check_detach(lively_head(target, layers=layers), target, hidden_of(target, batch_of(True)))


@pytest.mark.parametrize("layers", [1, 2])
def test_every_parameter_gets_a_gradient(layers: int) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = fresh_head(target, layers=layers)
    batch = batch_of(True)
    plan = plan_unroll(batch, DEPTHS)
    tokens = target.embed(shifted_tokens(batch.ids, DEPTHS))
    outputs = head.unroll(hidden_of(target, batch), tokens, batch.position, visible_slots(batch), plan.slots)
    outputs[plan.valid].square().sum().backward()
    assert without_gradient(head) == []
    assert len(list(head.parameters())) == 2 + 8 + (layers - 1) * 9  # no embedding and no LM head among them


def test_one_layer_equals_the_formula() -> None:
    """ALGORITHMS 8.1 written down again: W_fc [e ; f] + b, attention without a norm before it, MLP after one; nothing of heads/ but weights."""  # noqa: E501
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target)
    arch, layer = head.arch, head.layers[0]
    generator = torch.Generator().manual_seed(3)
    length = 9
    feature, token = torch.randn(length, 32, generator=generator), torch.randn(length, 32, generator=generator)
    with torch.no_grad():
        cache = LineCache()
        found, state = head.extend(feature[None], None, token[None], torch.arange(length)[None], cache, chain_visible(cache, 1, length))
        fc: Any = layer.fc
        u = torch.cat((token, feature), dim=-1) @ fc.weight.T + fc.bias
        attention: Any = layer.attention
        half = arch.head_dim // 2
        angle = torch.arange(length)[:, None].double() * arch.rope["rope_theta"] ** (-torch.arange(half).double() * 2 / arch.head_dim)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)[:, None]
            return torch.cat((turned.real, turned.imag), dim=-1).float()

        query = rotate((u @ attention.q_proj.weight.T).view(length, arch.n_q, arch.head_dim))
        key = rotate((u @ attention.k_proj.weight.T).view(length, arch.n_kv, arch.head_dim))
        worth = (u @ attention.v_proj.weight.T).view(length, arch.n_kv, arch.head_dim)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = []
        for h in range(arch.n_q):
            g = h * arch.n_kv // arch.n_q
            scores = (query[:, h] @ key[:, g].T / arch.head_dim**0.5).masked_fill(hidden, float("-inf"))
            mixed.append(torch.softmax(scores, dim=-1) @ worth[:, g])
        value = u + torch.cat(mixed, dim=-1) @ attention.o_proj.weight.T
        norm: Any = layer.mlp_norm
        x = value / (value.pow(2).mean(-1, keepdim=True) + arch.rms_eps).sqrt() * norm.weight
        mlp: Any = layer.mlp
        value = value + (F.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(found[0], value, atol=1e-5, rtol=1e-5)
    assert state is found  # the predicted feature recurs


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_untrained_head_repeats_the_feature(family: str, layers: int) -> None:
    target = tiny_target(family, vocab=VOCAB, final_logit_softcapping=7.0) if family == "gemma2" else tiny_target(family, vocab=VOCAB)
    head = fresh_head(target, layers=layers)
    ids = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    hidden = target.forward(ids).hidden[:, :-1]
    with torch.no_grad():
        cache = LineCache()
        output, _ = head.extend(hidden, None, target.embed(ids[:, 1:]), torch.arange(19)[None], cache, chain_visible(cache, 1, 19))
        logits, expected = head.draft_logits(output, target), target.logits(hidden)
    assert torch.cosine_similarity(output, hidden, dim=-1).min() > 0.97
    assert (output - hidden).norm(dim=-1).max() < 0.25 * hidden.norm(dim=-1).min()
    # So its drafts are the target's own distribution of one position before: the LM head reads something that it knows.
    assert torch.nn.functional.kl_div(logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean") < 0.5
    if target.softcap is not None:
        assert logits.abs().max() <= target.softcap
    torch.testing.assert_close(head.output_weight(target.lm_head), target.lm_head, atol=0, rtol=0)
