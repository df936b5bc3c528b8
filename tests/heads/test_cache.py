"""The target's KV cache against the library's dynamic cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from heads.cache import GROWTH, BufferedLayer, TargetCache

LAYERS, HEADS, WIDTH = 2, 3, 4


def step(length: int, seed: int, batch: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(batch, HEADS, length, WIDTH, generator=generator), torch.randn(batch, HEADS, length, WIDTH, generator=generator))
        for _ in range(LAYERS)
    ]  # fmt: skip


def assert_equal(ours: TargetCache, library: DynamicCache) -> None:
    assert len(ours.layers) == len(library.layers) == LAYERS
    for mine, theirs in zip(ours.layers, library.layers):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    assert ours.length == library.get_seq_length()


class Pair:
    """Our cache and the library's, fed alike."""

    def __init__(self) -> None:
        self.ours, self.library, self.seed = TargetCache(), DynamicCache(), 0

    def update(self, length: int, batch: int = 2) -> None:
        self.seed += 1
        for index, (keys, values) in enumerate(step(length, self.seed, batch)):
            got = self.ours.update(keys, values, index)
            expected = self.library.update(keys, values, index)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        assert_equal(self.ours, self.library)

    def keep(self, length: int) -> None:
        self.ours.keep(length)
        for layer in self.library.layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        assert_equal(self.ours, self.library)

    def select(self, rows: list[int]) -> None:
        self.ours.select(torch.tensor(rows))
        for layer in self.library.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        assert_equal(self.ours, self.library)


def test_updates_show_what_the_library_shows() -> None:
    pair = Pair()
    for length in (5, 1, 1, 4):
        pair.update(length)
    assert pair.ours.length == 11


def test_kept_prefix_is_followed_by_new_tokens_not_by_the_rejected() -> None:
    pair = Pair()
    pair.update(7)
    pair.keep(4)
    pair.update(3)
    pair.keep(7)  # keeps all
    pair.keep(1)
    pair.update(2)
    pair.keep(0)
    pair.update(2)
    assert pair.ours.length == 2


def test_grows_beyond_its_buffer() -> None:
    pair = Pair()
    pair.update(3)
    for _ in range(3):
        pair.update(GROWTH - 20)
        pair.keep(pair.ours.length - 5)
        pair.update(9)
    pair.update(2 * GROWTH)
    assert pair.ours.length == 3 + 3 * (GROWTH - 16) + 2 * GROWTH


def test_does_not_copy_for_every_token() -> None:
    cache = TargetCache()
    places = set()
    for seed in range(40):
        keys, values = step(1, seed)[0]
        cache.update(keys, values, 0)
        places.add(cache.layers[0].keys.data_ptr())
    assert len(places) == 1


def test_selects_rows_and_goes_on() -> None:
    pair = Pair()
    pair.update(6, batch=4)
    pair.keep(5)
    pair.select([3, 1])
    pair.update(2, batch=2)
    pair.select([1])
    pair.update(GROWTH, batch=1)
    assert pair.ours.length == 7 + GROWTH


def test_select_does_not_write_into_the_old_rows() -> None:
    cache = TargetCache()
    keys, values = step(3, 0)[0]
    cache.update(keys, values, 0)
    cache.select(torch.tensor([0, 0, 1]))
    new_keys, new_values = step(2, 1, batch=3)[0]
    shown, _ = cache.update(new_keys, new_values, 0)
    assert torch.equal(shown[:, :, :3], keys[[0, 0, 1]]) and torch.equal(shown[:, :, 3:], new_keys)


def test_cannot_keep_more_than_it_holds() -> None:
    cache = TargetCache()
    keys, values = step(3, 0)[0]
    cache.update(keys, values, 0)
    with pytest.raises(AssertionError, match="holds 3 tokens and cannot keep 4"):
        cache.keep(4)


def test_empty_cache_and_reset() -> None:
    cache = TargetCache()
    assert cache.length == 0
    cache.keep(0)
    layer = BufferedLayer()
    keys, values = step(3, 0)[0]
    layer.update(keys, values)
    assert layer.get_seq_length() == 3
    layer.reset()
    other, values = step(2, 5)[0]
    shown, _ = layer.update(other, values)
    assert layer.get_seq_length() == 2 and torch.equal(shown, other)
