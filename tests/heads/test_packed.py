"""Packed linear layers against float64: few and many rows, bias, changed weights, gradients, copies, and torch without oneDNN."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eval.drafters.build import first_layers, head_drafter
from eval.drafters.shape import ShapeConfig
from heads import packed
from heads.packed import LONG, MOST_ROWS, NARROW, PackedLinear, PackedWeight, pack_linears
from heads.sampling import Sampling
from heads.target import FrozenTarget
from tests.tiny import FAMILIES, library_greedy, random_prompts, tiny_head, tiny_model

needs_onednn = pytest.mark.skipif(packed.OPERATORS is None, reason="this torch has no oneDNN")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(inputs: int = 300, outputs: int = 260, bias: bool = True) -> nn.Linear:
    """A layer of numbers about 1, packed."""
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    linear.weight.copy_(random(outputs, inputs, seed=1))
    if bias:
        linear.bias.copy_(random(outputs, seed=2))
    pack_linears(linear)
    return linear


def assert_rounding(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within what float32 may lose: a few roundings of the sum of the magnitudes."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    sizes = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    assert actual.dtype == torch.float32 and actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= 8 * torch.finfo(torch.float32).eps * sizes).all()


class Watch:
    """Counts products and packings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert packed.OPERATORS is not None
        self.products = self.packings = 0
        product, reorder = packed.OPERATORS

        def counted_product(*args: Any) -> Any:
            self.products += 1
            return product(*args)

        def counted_reorder(*args: Any) -> Any:
            self.packings += 1
            return reorder(*args)

        monkeypatch.setattr(packed, "OPERATORS", (counted_product, counted_reorder))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 8, 11, 17, 32, 63, 64, 65, 200])
def test_every_row_count_is_right_to_rounding(rows: int, bias: bool, watch: Watch) -> None:
    linear = layer(bias=bias)
    x = random(rows, 300)
    for _ in range(2):
        assert_rounding(linear(x), x, linear.weight, linear.bias)
    used = 2 <= rows <= MOST_ROWS
    assert (watch.packings, watch.products) == (int(used), 2 * int(used))


@needs_onednn
@pytest.mark.parametrize(("inputs", "outputs", "used"), [(NARROW, LONG, 1), (NARROW + 1, LONG, 0), (NARROW, LONG - 1, 0)])
def test_single_rows_are_packed_for_narrow_lm_heads_only(inputs: int, outputs: int, used: int, watch: Watch) -> None:
    linear = layer(inputs, outputs, bias=False)
    x = random(1, 1, inputs)
    assert_rounding(linear(x), x, linear.weight, None)
    assert watch.products == used


@needs_onednn
def test_shapes_and_strides(watch: Watch) -> None:
    linear = layer()
    wide = random(4, 6, 600)
    for x in (
        wide[:, :, :300],
        wide[:, ::2, 100:400],
        random(300, 5).T,
        wide[:1, :1, :300].expand(3, 2, 300),
        wide[..., :300].transpose(0, 1),
    ):
        assert_rounding(linear(x), x, linear.weight, linear.bias)
    assert watch.products == 5 and watch.packings == 1
    assert linear(random(0, 300)).shape == (0, 260)
    assert_rounding(linear(random(300)), random(300), linear.weight, linear.bias)
    every_second = random(260, 600)[:, ::2]  # a weight that is a view
    assert_rounding(PackedWeight().linear(x, every_second, linear.bias), x, every_second, linear.bias)
    assert watch.packings == 2
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(random(4, 150))


def optimize(linear: nn.Linear, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """One update, as training does it; no gradient is wanted afterwards."""
    linear.requires_grad_(True).train()
    step = optimizer(linear.parameters())
    linear(random(6, 300, seed=8)).square().sum().backward()
    step.step()
    linear.requires_grad_(False).eval()


def replace_storage(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data * 2


def there_and_back(linear: nn.Linear) -> None:
    """The memory of the first weight may be given to the last."""
    linear.to(torch.bfloat16)
    linear.to(torch.float32)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "in place": lambda m: m.weight.mul_(2),
    "one row": lambda m: m.weight[3].fill_(7.0),
    "loaded": lambda m: m.load_state_dict({"weight": random(260, 300, seed=5), "bias": m.bias}),
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(random(260, 300, seed=6), requires_grad=False)),
    "another storage": replace_storage,
    "to bfloat16 and back": there_and_back,
    "through data, before eval()": lambda m: (m.weight.data.mul_(2), m.eval()),
    "through data, before packing again": lambda m: (m.weight.data.mul_(2), pack_linears(m)),
    "AdamW": lambda m: optimize(m, lambda p: torch.optim.AdamW(p, lr=0.1)),
    "fused AdamW": lambda m: optimize(m, lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)),
}


@needs_onednn
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_noticed(change: str, watch: Watch) -> None:
    linear, x = layer(), random(6, 300)
    before = linear(x)
    CHANGES[change](linear)
    after = linear(x)
    assert_rounding(after, x, linear.weight, linear.bias)
    assert not torch.allclose(after, before, atol=1e-2)
    assert watch.packings == watch.products == 2
    linear(x)
    assert watch.packings == 2


@needs_onednn
def test_a_changed_bias_needs_no_packing(watch: Watch) -> None:
    linear, x = layer(), random(6, 300)
    linear(x)
    linear.bias.add_(1.0)
    assert_rounding(linear(x), x, linear.weight, linear.bias)
    assert watch.packings == 1


@needs_onednn
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_gradients_are_those_of_the_plain_layer(wanted: str, watch: Watch) -> None:
    results = []
    for pack in (False, True):
        linear = nn.Linear(300, 260).requires_grad_(False)
        linear.load_state_dict(layer().state_dict())
        if pack:
            pack_linears(linear)
            linear(random(6, 300))
        x = random(6, 300, seed=3)
        sought = {"x": x, "weight": linear.weight, "bias": linear.bias}[wanted].requires_grad_(True)
        output = linear(x)
        output.square().sum().backward()
        results.append((output.detach(), sought.grad))
    (plain, plain_grad), (ours, grad) = results
    assert torch.equal(plain, ours) and grad is not None and torch.equal(plain_grad, grad) and grad.abs().max() > 0
    assert watch.products == 1  # the one without gradients
    with torch.no_grad():
        linear(x)
    assert watch.products == 2


@needs_onednn
def test_left_to_torch(watch: Watch) -> None:
    """Other dtypes, autocast, small weights, inference tensors, subclasses of nn.Linear."""
    x = random(6, 300)
    half = layer().to(torch.bfloat16)
    assert torch.equal(half(x.bfloat16()), F.linear(x.bfloat16(), half.weight, half.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(x).dtype == torch.bfloat16
    small = layer(20, 30)
    assert torch.equal(small(random(6, 20)), F.linear(random(6, 20), small.weight, small.bias))
    with torch.inference_mode():
        linear = nn.Linear(300, 260)
        pack_linears(linear)
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))

    class Special(nn.Linear):
        pass

    special = Special(300, 260)
    pack_linears(special)
    assert type(special) is Special
    assert watch.products == 0


def test_without_onednn_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "OPERATORS", None)
    linear = layer()
    assert type(linear) is nn.Linear
    x = random(6, 300)
    assert torch.equal(PackedWeight().linear(x, linear.weight, linear.bias), F.linear(x, linear.weight, linear.bias))
    target = FrozenTarget(tiny_model())
    assert torch.equal(target.logits(random(1, 6, 32)), F.linear(random(1, 6, 32), target.lm_head))


@pytest.mark.parametrize("missing", ["_linear_pointwise", "_reorder_linear_weight", "library"])
def test_missing_operators_are_found_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Operators:
        def __getattr__(self, name: str) -> Any:
            if name == missing:
                raise AttributeError(name)
            return getattr(real, name)

    real = torch.ops.mkldnn
    monkeypatch.setattr(torch.ops, "mkldnn", Operators())
    if missing == "library":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed._operators() is None


@needs_onednn
def test_copies_pickles_and_state_dicts_are_the_plain_layers(tmp_path: Path, watch: Watch) -> None:
    plain = nn.Sequential(nn.Linear(300, 260), nn.ReLU(), nn.Linear(260, 300, bias=False)).requires_grad_(False)
    ours = copy.deepcopy(plain)
    pack_linears(ours)
    x = random(6, 300)
    expected = ours(x)
    assert watch.packings == 2 and isinstance(ours[0], PackedLinear) and isinstance(ours[0], nn.Linear)
    state = ours.state_dict()
    assert list(state) == list(plain.state_dict()) and all(torch.equal(state[n], p) for n, p in plain.state_dict().items())
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()] and not list(ours.buffers())
    twin = copy.deepcopy(ours)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (twin, torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(ours))):
        assert other[0].packed is not ours[0].packed
        other[0].weight.mul_(0.5)  # its own weight, not the original's
        assert torch.allclose(other[0](x), ours[0](x) * 0.5 + ours[0].bias * 0.5, atol=1e-4)
    assert torch.equal(ours(x), expected)


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_target_equals_the_plain_library_model(family: str, watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All sizes are packed here; outputs, greedy text and saved weights are the unpacked model's."""
    monkeypatch.setattr(packed, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(packed, "LONG", 1)  # single rows too
    target, plain = FrozenTarget(tiny_model(family, scale=2.0)), FrozenTarget(tiny_model(family, scale=2.0), packed=False)
    assert plain.packed_head is None and not any(isinstance(m, PackedLinear) for m in plain.model.modules())
    assert watch.products == 0  # a target that is only opened has no second copy of anything
    ids = torch.tensor(random_prompts(1, 300, longest=30, seed=4)[0] * 2)[None]
    ours, theirs = target.forward(ids), plain.forward(ids)
    assert ours.taps is not None and theirs.taps is not None
    torch.testing.assert_close(ours.taps, theirs.taps, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(ours.hidden), plain.logits(theirs.hidden), atol=1e-4, rtol=1e-4)
    linears = sum(isinstance(m, nn.Linear) for m in target.decoder.modules())
    assert watch.products == watch.packings == linears + 1  # and the LM head
    for prompt in random_prompts(3, 300, longest=12, seed=5):
        assert library_greedy(target, prompt, 8) == library_greedy(plain, prompt, 8)
    target.model.save_pretrained(tmp_path)
    again = type(target.model).from_pretrained(tmp_path).state_dict()
    assert again.keys() == plain.model.state_dict().keys()
    assert all(torch.equal(again[n], p) for n, p in plain.model.state_dict().items())


@needs_onednn
def test_first_layers_share_the_targets_copies(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_NUMBERS", 1)
    target = FrozenTarget(tiny_model())
    draft = first_layers(target, 2)
    hidden = random(1, 6, 32)
    assert torch.equal(draft.logits(hidden), target.logits(hidden))
    ids = torch.tensor([[5, 6, 7, 8]])
    draft.forward(ids)
    before = watch.packings
    target.forward(ids)
    assert draft.packed_head is target.packed_head
    assert watch.packings - before == 2 * 7  # the two layers that are not the draft's; seven matrices each


@needs_onednn
@pytest.mark.parametrize("pack", [True, False])
def test_heads_are_packed_as_their_target_is(pack: bool) -> None:
    target = FrozenTarget(tiny_model(), packed=pack)
    head = tiny_head(target)
    names = list(head.state_dict())
    head_drafter(head, target, Sampling(), False, ShapeConfig())
    linears = [m for m in head.modules() if isinstance(m, nn.Linear)]
    assert linears and all(isinstance(m, PackedLinear) == pack for m in linears)
    assert list(head.state_dict()) == names
