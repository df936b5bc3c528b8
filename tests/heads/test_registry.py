"""Every kind of head builds from a target, survives its checkpoint bit for bit, and unknown kinds are answered with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.errors import UserError
from heads.registry import HEADS, head_kind, new_head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.heads.parity import VOCAB
from tests.tiny import tiny_target
from train.state import Progress, load_head, save_checkpoint

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"layers": 2, "ffn": 24}),
    ("eagle3", {}),
    ("eagle3", {"variant": "classic", "layers": 2, "train_lm_head": False}),
    ("medusa", {}),
    ("medusa", {"heads": 2, "blocks": 3, "share_lm_head": False}),
    ("peagle", {"layers": 1}),
    ("peagle", {"layers": 3, "depths": 3, "train_embedding": True}),
]


def build(kind: str, config: dict[str, Any], target: FrozenTarget, pruned: bool) -> Any:
    vocab = DraftVocab(torch.arange(0, VOCAB, 3), VOCAB) if pruned else DraftVocab.full(VOCAB)
    return new_head(head_kind(kind).config(**config), target, vocab, seed=3)


def scrambled(head: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def save(directory: Path, head: Any) -> Path:
    return save_checkpoint(directory, head, {}, Progress(step=7), {"recipe.yaml": "name: test\n"})


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _ in CONFIGS} == set(HEADS)
    for kind, parts in HEADS.items():
        assert parts.config.model_fields["kind"].default == parts.architecture.model_fields["kind"].default == kind


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("kind", "config", "pruned"),
    [(k, c, p) for k, c in CONFIGS for p in (False, True) if HEADS[k].prunes or not p],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, dict) else str(v),
)
def test_saved_and_loaded_bit_for_bit(kind: str, config: dict[str, Any], family: str, pruned: bool, tmp_path: Path) -> None:
    more = {"final_logit_softcapping": 5.0} if family == "gemma2" else {}
    head = scrambled(build(kind, config, tiny_target(family, vocab=VOCAB, **more), pruned))
    loaded = load_head(save(tmp_path, head))
    assert type(loaded) is type(head) and loaded.arch == head.arch
    assert loaded.vocab.fingerprint == head.vocab.fingerprint and loaded.vocab.size == (20 if pruned else VOCAB)
    before, after = head.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    assert {n for n, _ in head.named_parameters()} == {n for n, _ in loaded.named_parameters()}
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in loaded.parameters())
    # The rest of a head, its rotary tables above all, is made again from the architecture.
    for (name, one), (_, two) in zip(head.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(("kind", "config"), CONFIGS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)))
def test_initial_values_are_a_function_of_the_seed(kind: str, config: dict[str, Any]) -> None:
    target = tiny_target(vocab=VOCAB)
    torch.manual_seed(0)
    one = build(kind, config, target, False)
    torch.manual_seed(1)
    two = build(kind, config, target, False)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert all(torch.isfinite(v).all() for v in one.state_dict().values())


def test_scaled_rotary_survives(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    target = tiny_target("llama", vocab=VOCAB, rope_parameters=rope)
    for kind in ("eagle", "eagle3", "peagle"):
        loaded = load_head(save(tmp_path / kind, build(kind, {}, target, False)))
        rotary = (loaded.base if kind == "peagle" else loaded).rotary
        assert torch.equal(rotary.rotary.inv_freq, target.decoder.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("asked", "hint"), [("eagle4", "; did you mean 'eagle"), ("medussa", "; did you mean 'medusa'?"), ("", ""), ("transformer", "")]
)
def test_unknown_kind(asked: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        head_kind(asked)
    text = str(error.value)
    assert text.startswith(f"there is no draft head of kind '{asked}'; the kinds are eagle, eagle3, medusa, peagle" + hint)
    assert hint or "did you mean" not in text
    assert "\n" not in text


def test_a_checkpoint_of_an_unknown_kind(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, build("eagle3", {}, tiny_target(vocab=VOCAB), False))
    about = json.loads((checkpoint / "head.json").read_text())
    (checkpoint / "head.json").write_text(json.dumps(about | {"kind": "hydra"}))
    with pytest.raises(UserError, match="no draft head of kind 'hydra'"):
        load_head(checkpoint)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_maps_that_contradict_each_other(kind: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, build(kind, {}, tiny_target(vocab=VOCAB), True))
    tensors = load_file(checkpoint / "head.safetensors")
    name = next(n for n in tensors if n.endswith("t2d"))
    tensors[name] = tensors[name].roll(1)
    save_file(tensors, checkpoint / "head.safetensors")
    with pytest.raises(UserError, match="maps in .* contradict each other"):
        load_head(checkpoint)


@pytest.mark.parametrize("kind", HEADS)
def test_tensors_that_do_not_fit(kind: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, build(kind, {}, tiny_target(vocab=VOCAB), False))
    tensors = load_file(checkpoint / "head.safetensors")
    tensors.pop(next(n for n in tensors if n.endswith("weight")))
    save_file(tensors, checkpoint / "head.safetensors")
    with pytest.raises(UserError, match=r"tensors in .* do not fit its head\.json"):
        load_head(checkpoint)
