"""Medusa: what training and decoding compute is the formula of ALGORITHMS 7.1; untrained heads are the target's LM head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from heads.medusa import MedusaConfig, MedusaHead
from heads.registry import new_head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.heads.parity import VOCAB, batch_of, without_gradient
from tests.tiny import tiny_target
from train.objectives import run_target


def fresh_head(target: FrozenTarget, **config: Any) -> MedusaHead:
    head: MedusaHead = new_head(MedusaConfig(**config), target, DraftVocab.full(target.vocab_size), seed=1)
    return head


def lively_head(target: FrozenTarget, **config: Any) -> MedusaHead:
    head = fresh_head(target, **config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head


def targets() -> dict[str, FrozenTarget]:
    return {
        "llama": tiny_target("llama", vocab=VOCAB),
        "gemma2": tiny_target("gemma2", vocab=VOCAB, final_logit_softcapping=3.0, scale=8.0),
    }


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_training_equals_decoding_equals_the_formula(family: str, blocks: int, share: bool) -> None:
    target = targets()[family]
    head = lively_head(target, heads=4, blocks=blocks, share_lm_head=share)
    for pack in (True, False):
        batch = batch_of(pack)
        hidden = run_target(target, batch).hidden
        with torch.no_grad():
            outputs = head.outputs(hidden)
            assert outputs.shape == (4, *hidden.shape)
            trained = torch.stack([target.cap(F.linear(o, head.output_weight(k, target.lm_head))) for k, o in enumerate(outputs)])
            for depth in (1, 3, 4):
                drafted = head.draft(hidden.flatten(0, 1), depth, target.lm_head)  # every position as if decoding stood there
                assert drafted.shape == (hidden.shape[0] * hidden.shape[1], depth, VOCAB)
                for k in range(depth):
                    torch.testing.assert_close(drafted[:, k], trained[k].flatten(0, 1), atol=1e-5, rtol=1e-5)
            state = head.state_dict()
            for k in range(4):
                u = hidden
                for block in range(blocks):
                    z = u @ state[f"blocks.{k}.{block}.linear.weight"].T + state[f"blocks.{k}.{block}.linear.bias"]
                    u = u + z * torch.sigmoid(z)
                logits = u @ (target.lm_head if share else state[f"lm_heads.{k}.weight"]).T
                logits = logits if target.softcap is None else 3.0 * torch.tanh(logits / 3.0)
                torch.testing.assert_close(trained[k], logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(trained[0], trained[1], atol=0.1)  # heads differ


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_untrained_heads_are_the_lm_head(family: str, share: bool) -> None:
    target = targets()[family]
    head = fresh_head(target, heads=3, blocks=2, share_lm_head=share)
    hidden = target.forward(batch_of(False).ids).hidden[:, 4]
    with torch.no_grad():
        logits = head.draft(hidden, 3, target.lm_head)
    for k in range(3):
        torch.testing.assert_close(logits[:, k], target.logits(hidden), atol=0, rtol=0)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_every_parameter_gets_a_gradient_from_its_own_head(share: bool) -> None:
    target = targets()["llama"]
    hidden = target.forward(batch_of(True).ids).hidden
    names = {n for n, _ in fresh_head(target, heads=3, blocks=2, share_lm_head=share).named_parameters()}
    missing = []
    for k in range(3):
        head = fresh_head(target, heads=3, blocks=2, share_lm_head=share)
        loss = F.linear(head.outputs(hidden)[k], head.output_weight(k, target.lm_head)).log_softmax(-1)[..., 5].sum()
        loss.backward()
        silent = set(without_gradient(head))
        assert silent == {n for n in names if n.split(".")[1] != str(k)}
        missing.append(silent)
    assert not set.intersection(*missing)
    assert target.lm_head.grad is None


def test_a_shared_lm_head_is_not_among_the_weights() -> None:
    target = targets()["llama"]
    assert {n.split(".")[0] for n in fresh_head(target).state_dict()} == {"blocks"}
    own = fresh_head(target, share_lm_head=False)
    assert [p.data_ptr() for p in own.lm_heads.parameters()] != [target.lm_head.data_ptr()] * 4
    assert len({p.data_ptr() for p in own.parameters()}) == len(list(own.parameters())) == 4 * 3  # blocks are not one block repeated


def test_cannot_draft_deeper_than_there_are_heads() -> None:
    target = targets()["llama"]
    head = fresh_head(target, heads=2)
    with pytest.raises(AssertionError):
        head.draft(torch.zeros(1, 32), 3, target.lm_head)
