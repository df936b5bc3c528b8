"""FrozenTarget against the library itself, for every family: taps, logits, cache and crop, packed documents, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from heads.cache import TargetCache
from heads.errors import UserError
from heads.target import FrozenTarget, default_taps
from tests.tiny import FAMILIES, tiny_model, tiny_target

WINDOW = 16  # of the sliding layers of tests.tiny


def random_ids(rows: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_hidden_and_logits_are_the_librarys(family: str) -> None:
    target = tiny_target(family, taps=(0, 1, 2, 3), scale=4.0)
    ids = random_ids(2, 24)
    expected = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    output = target.forward(ids)
    assert output.taps is not None
    assert len(expected.hidden_states) == target.num_layers + 1
    for tap, states in zip(target.taps, output.taps.split(target.hidden_size, dim=-1), strict=True):
        assert_close(states, expected.hidden_states[tap], 1e-6)
    assert not torch.allclose(output.taps[..., :32], output.taps[..., 32:64], atol=1e-2)  # the layers do something
    assert_close(output.hidden, expected.hidden_states[-1], 1e-6)
    assert_close(target.logits(output.hidden), expected.logits, 1e-5)
    assert target.forward(ids, taps=False).taps is None


def test_last_tap_is_not_normed() -> None:
    model = tiny_model("llama")
    captured: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: captured.append(args[0]))
    target = FrozenTarget(model, (4,))
    captured.clear()
    output = target.forward(random_ids(1, 9))
    assert output.taps is not None
    assert_close(output.taps, captured[0], 0.0)
    assert not torch.allclose(output.taps, output.hidden, atol=1e-2)


def test_soft_cap_is_applied_and_matters() -> None:
    target = tiny_target("gemma2", scale=30.0, final_logit_softcapping=5.0)
    ids = random_ids(1, 12)
    hidden = target.forward(ids).hidden
    assert target.softcap == 5.0
    assert_close(target.logits(hidden), target.model(input_ids=ids).logits, 1e-5)
    assert target.logits(hidden).abs().max() <= 5.0
    assert torch.nn.functional.linear(hidden, target.lm_head).abs().max() > 6.0
    assert tiny_target("llama").softcap is None


@pytest.mark.parametrize("family", FAMILIES)
def test_cropped_and_refed_cache_equals_from_scratch(family: str) -> None:
    target = tiny_target(family)
    length = 3 * WINDOW
    ids, other = random_ids(2, length), random_ids(2, length, seed=4)
    whole = target.forward(ids)
    assert whole.taps is not None
    cache = TargetCache()
    first = target.forward(ids[:, :20], cache=cache)
    assert_close(first.hidden, whole.hidden[:, :20])
    at = 20
    while at < length:  # each cycle writes six tokens, four of which are wrong and are taken back
        wrong = torch.cat((ids[:, at : at + 2], other[:, at : at + 4]), dim=1)
        target.forward(wrong, cache=cache)
        cache.keep(at + 2)
        assert cache.length == at + 2
        at += 2
        cache.keep(at - 1)
        again = target.forward(ids[:, at - 1 : at + 1], cache=cache)
        cache.keep(at)
        assert again.taps is not None
        shown = again.hidden.shape[1]
        assert_close(again.hidden, whole.hidden[:, at - 1 : at - 1 + shown])
        assert_close(again.taps, whole.taps[:, at - 1 : at - 1 + shown])
    # far back, before the window, and forward again in one go
    cache.keep(5)
    rest = target.forward(ids[:, 5:], cache=cache)
    assert_close(rest.hidden, whole.hidden[:, 5:])
    assert cache.length == length


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_sliding_window_is_in_force(family: str) -> None:
    """The cache test above would say nothing about windows if the tiny models had none."""
    narrow, wide = tiny_target(family), tiny_target(family, sliding_window=400)
    ids = random_ids(1, 3 * WINDOW)
    difference = (narrow.forward(ids).hidden - wide.forward(ids).hidden).abs().amax(-1)[0]
    assert difference[: WINDOW - 1].max() < 1e-5
    assert difference[WINDOW + 1 :].max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_rows_can_be_selected(family: str) -> None:
    target = tiny_target(family)
    ids = random_ids(3, 24)
    cache = TargetCache()
    target.forward(ids[:, :20], cache=cache)
    cache.select(torch.tensor([2, 0]))
    output = target.forward(ids[[2, 0], 20:], cache=cache)
    assert_close(output.hidden, target.forward(ids).hidden[[2, 0], 20:])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_each_alone(family: str) -> None:
    target = tiny_target(family)
    sizes = [[22, 5, 19], [9, 20, 17]]
    ids = random_ids(2, 46)
    position = torch.tensor([[i for size in row for i in range(size)] for row in sizes])
    packed = target.forward(ids, position=position)
    assert packed.taps is not None
    for row, parts in enumerate(sizes):
        start = 0
        for size in parts:
            span = slice(start, start + size)
            alone = target.forward(ids[row : row + 1, span])
            assert alone.taps is not None
            assert_close(packed.hidden[row : row + 1, span], alone.hidden)
            assert_close(packed.taps[row : row + 1, span], alone.taps)
            start += size
    # without the positions the second document would see the first
    assert not torch.allclose(target.forward(ids).hidden[:, 22:], packed.hidden[:, 22:], atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_final_norm_weight_is_the_factor(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        model.get_decoder().norm.weight.copy_(torch.linspace(-0.5, 2.0, 32))
    target = FrozenTarget(model)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    rms = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    assert_close(rms * target.final_norm_weight(), target.decoder.norm(x), 1e-4)
    expected = torch.linspace(-0.5, 2.0, 32) + (1.0 if family.startswith("gemma") else 0.0)
    assert_close(target.final_norm_weight(), expected, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_frozen(family: str) -> None:
    target = tiny_target(family)
    free = [name for name, parameter in target.model.named_parameters() if parameter.requires_grad]
    assert free == []
    assert not target.model.training
    assert not target.forward(random_ids(1, 8)).hidden.requires_grad


@pytest.mark.parametrize("taps", [(0, 5), (-1,), (2, 1), (1, 1), ()])
def test_wrong_taps_are_refused_with_the_limits(taps: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"from 0 to 4 \(the target has 4 layers\)") as error:
        FrozenTarget(tiny_model("llama"), taps)
    assert str(list(taps)) in str(error.value)


def test_default_taps() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(8) == (2, 4, 5)
    assert default_taps(4) == (1, 2, 3)
    assert default_taps(2) == (1,)
    assert default_taps(1) == (0,)
    assert tiny_target("llama").taps == (1, 2, 3)


def test_state_space_model_is_refused() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(UserError, match="KV cache"):
        FrozenTarget(MambaForCausalLM(config))


def test_model_that_refuses_a_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    original = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache"):
            raise ValueError("no cache here")
        return original(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(UserError, match=r"no KV cache that can be cropped \(no cache here\)"):
        FrozenTarget(model)


def test_model_with_state_beside_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    original = model.model.forward
    seen = [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if kwargs.get("use_cache"):
            output.last_hidden_state = output.last_hidden_state + 0.1 * seen[0]
            seen[0] += 1
        return output

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(UserError, match="keeps state"):
        FrozenTarget(model)


def test_model_with_unknown_logit_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", scale=4.0)
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(UserError, match="changes its logits"):
        FrozenTarget(model)


def test_fingerprint_tells_fine_tunes_apart() -> None:
    same, again, other = tiny_target("llama"), tiny_target("llama"), tiny_target("llama", seed=1)
    assert same.fingerprint == again.fingerprint != other.fingerprint
