"""FrozenTarget against the library itself, for every family: taps, logits, cache and crop, packed documents, ready-made masks, refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

from heads.cache import TargetCache, causal, visible_slots
from heads.errors import UserError
from heads.target import FrozenTarget, default_taps
from tests.tiny import FAMILIES, chain_visible, tiny_model, tiny_target

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
        cache.keep([at + 2] * 2)
        assert cache.lengths == [at + 2] * 2
        at += 2
        cache.keep([at - 1] * 2)
        again = target.forward(ids[:, at - 1 : at + 1], cache=cache)
        cache.keep([at] * 2)
        assert again.taps is not None
        shown = again.hidden.shape[1]
        assert_close(again.hidden, whole.hidden[:, at - 1 : at - 1 + shown])
        assert_close(again.taps, whole.taps[:, at - 1 : at - 1 + shown])
    # far back, before the window, and forward again in one go
    cache.keep([5, 5])
    rest = target.forward(ids[:, 5:], cache=cache)
    assert_close(rest.hidden, whole.hidden[:, 5:])
    assert cache.used == length


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
    cache.commit([range(20)] * 3)
    cache.select([2, 0])
    output = target.forward(ids[[2, 0], 20:], cache=cache)
    assert_close(output.hidden, target.forward(ids).hidden[[2, 0], 20:])


MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 mixed": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3 mixed": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "gemma2 mixed": ("gemma2", {}),
    "gemma3 sliding": ("gemma3", {}),
    "gemma3 mixed": ("gemma3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "phi3 sliding": ("phi3", {"sliding_window": WINDOW}),
}
"""Targets whose layers see all, slide all, or both."""


@pytest.fixture(params=MASKED)
def masked(request: pytest.FixtureRequest) -> FrozenTarget:
    family, more = MASKED[request.param]
    target = tiny_target(family, **more)
    types = set(getattr(target.config, "layer_types", None) or [])
    assert (target.window is not None) == ("mixed" in request.param or "sliding" in request.param or family == "mistral")
    assert (len(types) == 2) == ("mixed" in request.param), types
    return target


def alone(target: FrozenTarget, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(taps, hidden) of one sequence by a straight forward, [n, ...] each."""
    output = target.forward(torch.tensor([ids]))
    assert output.taps is not None
    return output.taps[0], output.hidden[0]


LENGTHS = (3, 21, 40)  # shorter than the window, longer, much longer


def prefill(target: FrozenTarget, sequences: list[list[int]]) -> TargetCache:
    """Sequences of unequal length read in one padded forward, which is checked."""
    lengths = [len(s) for s in sequences]
    width = max(lengths)
    ids = torch.tensor([s + [7] * (width - len(s)) for s in sequences])
    cache = TargetCache()
    position = torch.arange(width).expand(len(ids), -1)
    output = target.forward(ids, cache=cache, position=position, visible=causal(len(ids), width, ids.device))
    assert output.taps is not None
    for b, sequence in enumerate(sequences):
        taps, hidden = alone(target, sequence)
        assert_close(output.taps[b, : lengths[b]], taps, 1e-5)
        assert_close(output.hidden[b, : lengths[b]], hidden, 1e-5)
    cache.commit([range(n) for n in lengths])
    return cache


def test_ragged_batch_equals_each_sequence_alone(masked: FrozenTarget) -> None:
    """Lines grow by different numbers a call, as in speculative decoding, and all of them past the window."""
    rng = random.Random(0)
    ids = random_ids(3, 70).tolist()
    cache = prefill(masked, [row[:n] for row, n in zip(ids, LENGTHS)])
    expected = [alone(masked, row) for row in ids]
    for count in (1, 5, 1, 9, 4, 1):
        lengths = list(cache.lengths)
        fed = torch.tensor([row[n : n + count] for row, n in zip(ids, lengths)])
        position = torch.tensor(lengths).unsqueeze(1) + torch.arange(count)
        output = masked.forward(fed, cache=cache, position=position, visible=chain_visible(cache, 3, count))
        assert output.taps is not None
        for b, (taps, hidden) in enumerate(expected):
            span = slice(lengths[b], lengths[b] + count)
            assert_close(output.taps[b], taps[span], 1e-5)
            assert_close(output.hidden[b], hidden[span], 1e-5)
        cache.commit([range(rng.randint(0, count)) for _ in ids])
    assert len(set(cache.lengths)) == 3


def test_tree_nodes_equal_straight_forwards_of_their_paths(masked: FrozenTarget) -> None:
    """A random tree, deeper than the window, behind lines of unequal length; then a path of it is committed, and what follows is as if
    nothing else had been."""
    rng = random.Random(1)
    sequences = [row[:n] for row, n in zip(random_ids(3, 40).tolist(), LENGTHS)]
    cache = prefill(masked, sequences)
    nodes = 40
    parents = [[-1] + [i - 1 if rng.random() < 0.7 else rng.randrange(max(0, i - 6), i) for i in range(1, nodes)] for _ in sequences]
    tokens = torch.tensor([[rng.randrange(3, 300) for _ in range(nodes)] for _ in sequences])
    paths = [[_path(parent, i) for i in range(nodes)] for parent in parents]
    own = torch.tensor([[[j in path for j in range(nodes)] for path in row] for row in paths])
    lengths = list(cache.lengths)
    position = torch.tensor([[lengths[b] + len(path) - 1 for path in row] for b, row in enumerate(paths)])
    visible = visible_slots(torch.tensor(lengths), own, cache.used + nodes)
    output = masked.forward(tokens, cache=cache, position=position, visible=visible)
    assert output.taps is not None
    for b, row in enumerate(paths):
        assert max(map(len, row)) > WINDOW + 2
        for i in {0, 1, 2, nodes - 1, row.index(max(row, key=len)), *rng.sample(range(nodes), 6)}:
            path = row[i]
            taps, hidden = alone(masked, sequences[b] + tokens[b, path].tolist())
            assert_close(output.taps[b, i], taps[-1], 1e-5)
            assert_close(output.hidden[b, i], hidden[-1], 1e-5)
    chosen = [max(row, key=len) for row in paths]
    assert any(path != list(range(len(path))) for path in chosen)
    chosen[0] = chosen[0][:2]
    cache.commit(chosen)
    after = torch.tensor([[5, 6, 8], [9, 10, 11], [12, 13, 14]])
    position = torch.tensor(cache.lengths).unsqueeze(1) + torch.arange(3)
    output = masked.forward(after, cache=cache, position=position, visible=chain_visible(cache, 3, 3))
    for b, path in enumerate(chosen):
        _, hidden = alone(masked, sequences[b] + tokens[b, path].tolist() + after[b].tolist())
        assert_close(output.hidden[b], hidden[-3:], 1e-5)


def _path(parent: list[int], node: int) -> list[int]:
    return ([] if parent[node] < 0 else _path(parent, parent[node])) + [node]


def test_uncommitted_chain_slots_are_seen_by_the_next_forward(masked: FrozenTarget) -> None:
    """As a draft model writes: one slot a call, none committed, then a tree level on top, then all of it forgotten."""
    ids = random_ids(3, 70).tolist()
    cache = prefill(masked, [row[:n] for row, n in zip(ids, LENGTHS)])
    expected = [alone(masked, row)[1] for row in ids]
    done = 0
    for count in (1, 1, 4, 1, 12, 1):
        fed = torch.tensor([row[n + done : n + done + count] for row, n in zip(ids, LENGTHS)])
        position = torch.tensor(LENGTHS).unsqueeze(1) + done + torch.arange(count)
        output = masked.forward(fed, cache=cache, position=position, visible=chain_visible(cache, 3, count))
        done += count
        assert cache.lines.extra == done and tuple(cache.lengths) == LENGTHS
        for b, n in enumerate(LENGTHS):
            assert_close(output.hidden[b], expected[b][n + done - count : n + done], 1e-5)
    # Two siblings behind the uncommitted chain: neither sees the other.
    own = torch.ones(3, 2, done + 2, dtype=torch.bool)
    own[:, 0, -1] = own[:, 1, -2] = False
    visible = visible_slots(torch.tensor(LENGTHS), own, cache.used + 2)
    siblings = torch.tensor([[row[n + done], 9] for row, n in zip(ids, LENGTHS)])
    position = (torch.tensor(LENGTHS) + done).unsqueeze(1).expand(-1, 2)
    output = masked.forward(siblings, cache=cache, position=position, visible=visible)
    for b, n in enumerate(LENGTHS):
        assert_close(output.hidden[b, 0], expected[b][n + done], 1e-5)
        assert_close(output.hidden[b, 1], alone(masked, [*ids[b][: n + done], 9])[1][-1], 1e-5)
    cache.drop()
    position = torch.tensor(LENGTHS).unsqueeze(1)
    fed = torch.tensor([[row[n]] for row, n in zip(ids, LENGTHS)])
    output = masked.forward(fed, cache=cache, position=position, visible=chain_visible(cache, 3, 1))
    for b, n in enumerate(LENGTHS):
        assert_close(output.hidden[b, 0], expected[b][n], 1e-5)


def test_an_even_batch_needs_no_mask(masked: FrozenTarget) -> None:
    ids = random_ids(2, 44)
    whole = masked.forward(ids)
    with_mask, without = TargetCache(), TargetCache()
    for low, high in ((0, 20), (20, 21), (21, 30), (30, 44)):
        position = torch.arange(low, high).expand(2, -1)
        visible = chain_visible(with_mask, 2, high - low)
        one = masked.forward(ids[:, low:high], cache=with_mask, position=position, visible=visible)
        two = masked.forward(ids[:, low:high], cache=without, position=position)
        for output, cache in ((one, with_mask), (two, without)):
            assert_close(output.hidden, whole.hidden[:, low:high], 1e-5)
            cache.commit([range(high - low)] * 2)


def test_a_mask_for_sliding_layers_does_not_outlive_its_forward() -> None:
    target = tiny_target("gemma2")
    ids = random_ids(1, 30)
    before = target.forward(ids).hidden
    prefill(target, [ids[0, :20].tolist()])
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        cache = TargetCache()
        wrong = torch.ones(1, 4, 9, dtype=torch.bool)  # of other columns than there are
        target.forward(ids[:, :4], cache=cache, position=torch.arange(4)[None], visible=wrong)
    assert_close(target.forward(ids).hidden, before, 0.0)


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
    with pytest.raises(UserError, match="keeps recurrent or other state"):
        FrozenTarget(model)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_model_that_ignores_a_ready_made_mask_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose kernels know causal masks only."""
    model = tiny_model(family)
    original = model.model.forward
    ignored = [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            ignored[0] += 1
            kwargs["attention_mask"] = None
            for layer in model.model.layers:
                layer._forward_pre_hooks.clear()  # nor may one reach it through the hooks on its sliding layers
        return original(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(UserError, match="does not obey a ready-made attention mask"):
        FrozenTarget(model)
    assert ignored == [1]


def test_recurrent_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum over all tokens it was ever fed, which no crop of keys and values takes back."""
    model = tiny_model("llama")
    original = model.model.forward
    running = torch.zeros(1, 1, 32)

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        output = original(*args, **kwargs)
        sums = model.model.embed_tokens(kwargs["input_ids"]).cumsum(1)
        if kwargs.get("use_cache"):
            sums = sums + running
            running = sums[:, -1:]
        output.last_hidden_state = output.last_hidden_state + 0.1 * sums
        return output

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(UserError, match="keeps recurrent or other state that cropping its KV cache does not undo"):
        FrozenTarget(model)


def test_hybrid_of_the_library_is_refused() -> None:
    """Convolution layers between attention layers: their state is not in keys and values."""
    config = Lfm2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="KV cache"):
        FrozenTarget(Lfm2ForCausalLM(config))


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
