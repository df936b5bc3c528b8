"""A warm start takes exactly what it says and leaves the rest; what does not fit is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.eagle3 import Eagle3Config
from heads.errors import UserError
from heads.medusa import MedusaConfig
from heads.peagle import PEagleConfig
from heads.registry import new_head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.tiny import heated, tiny_target
from train.state import Progress, save_checkpoint
from train.warm_start import open_start, warm_start

VOCAB = 60
PRUNED = DraftVocab(torch.arange(0, VOCAB, 3), VOCAB)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target("llama", vocab=VOCAB)


def saved(directory: Path, head: Any) -> str:
    return str(save_checkpoint(directory, head, {}, Progress(step=3), {}))


def fresh(target: FrozenTarget, config: Any, vocab: DraftVocab = PRUNED, seed: int = 5) -> Any:
    return new_head(config, target, vocab, seed)


def test_peagle_from_eagle3_takes_what_they_share(tmp_path: Path, target: FrozenTarget) -> None:
    trained = heated(fresh(target, Eagle3Config()))
    path = saved(tmp_path, trained)
    head, untouched = (fresh(target, PEagleConfig(layers=3, depths=4)) for _ in range(2))
    taken = warm_start(head, open_start(path), path)
    source, before = dict(trained.named_parameters()), dict(untouched.named_parameters())
    assert {name.removeprefix("base.") for name in taken} == set(source) and all(name.startswith("base.") for name in taken)
    for name, value in head.named_parameters():
        expected = source[name.removeprefix("base.")] if name in taken else before[name]
        assert torch.equal(value, expected), name
    left = {name for name, _ in head.named_parameters()} - set(taken)
    assert {name.split(".")[0] for name in left} == {"mask_hidden", "mask_embedding", "base"}
    assert all(name.startswith(("base.layers.1.", "base.layers.2.", "mask_")) for name in left)


@pytest.mark.parametrize("config", [Eagle3Config(layers=2), MedusaConfig(heads=2), PEagleConfig(layers=2, depths=3)], ids=lambda c: c.kind)
def test_the_same_kind_takes_all(tmp_path: Path, target: FrozenTarget, config: Any) -> None:
    trained = heated(fresh(target, config))
    path = saved(tmp_path, trained)
    head = fresh(target, config, seed=9)
    start = open_start(path)
    assert start.vocab.fingerprint == trained.vocab.fingerprint
    assert set(warm_start(head, start, path)) == {name for name, _ in head.named_parameters()}
    assert all(torch.equal(value, dict(trained.named_parameters())[name]) for name, value in head.named_parameters())


@pytest.mark.parametrize(
    ("given", "wanted", "vocab", "words"),
    [
        (MedusaConfig(), Eagle3Config(), None, "a head of kind medusa; a head of kind eagle3 can start from eagle3"),
        (MedusaConfig(), PEagleConfig(), None, "can start from peagle or eagle3"),
        (PEagleConfig(), Eagle3Config(), None, "a head of kind peagle"),
        (Eagle3Config(ffn=40), Eagle3Config(), None, r"differs from this recipe's in layers\.0\.mlp"),
        (Eagle3Config(), Eagle3Config(layers=2), None, r"differs from this recipe's in layers\.1\."),
        (Eagle3Config(layers=3), PEagleConfig(layers=2), None, r"differs from this recipe's in layers\.2\."),
        (Eagle3Config(variant="classic"), Eagle3Config(), None, "differs from this recipe's in fc_norm"),
        (Eagle3Config(), Eagle3Config(), DraftVocab(torch.arange(1, VOCAB, 3), VOCAB), "draft vocabulary is not this head's"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: FrozenTarget, given: Any, wanted: Any, vocab: DraftVocab | None, words: str
) -> None:
    path = saved(tmp_path, fresh(target, given))
    full = not hasattr(wanted, "draft_vocab_size") or not hasattr(given, "draft_vocab_size")
    head = fresh(target, wanted, vocab or (DraftVocab.full(VOCAB) if full else PRUNED))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with pytest.raises(UserError, match=words) as caught:
        warm_start(head, open_start(path), path)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_other_taps_are_refused(tmp_path: Path) -> None:
    """The tensors would fit."""
    path = saved(tmp_path, fresh(tiny_target("llama", vocab=VOCAB, taps=(1, 2, 3)), Eagle3Config()))
    head = fresh(tiny_target("llama", vocab=VOCAB, taps=(1, 2, 4)), Eagle3Config())
    with pytest.raises(UserError, match="differs from this recipe's in taps"):
        warm_start(head, open_start(path), path)


def test_missing_and_damaged_checkpoints(tmp_path: Path, target: FrozenTarget) -> None:
    with pytest.raises(UserError, match="no head.json lies there"):
        open_start(str(tmp_path / "nothing"))
    path = Path(saved(tmp_path, fresh(target, Eagle3Config())))
    file = path / "head.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged"):
        open_start(str(path))
