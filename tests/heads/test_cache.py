"""The caches against a model of plain lists, in random sequences of operations, and against the library's dynamic cache."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DynamicCache

from heads.cache import GROWTH, LineCache, TargetCache, causal, visible_slots

LAYERS, HEADS, WIDTH = 2, 3, 4


def fresh(batch: int, count: int, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of new slots, a pair a layer."""
    shape = (batch, HEADS, count, WIDTH)
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(LAYERS)]


class Plain:
    """A cache and its model: each line a list of kept slots and a list of uncommitted ones, a slot being what every layer holds of it."""

    def __init__(self, seed: int, cache: LineCache | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = cache or LineCache()
        self.kept: list[list[torch.Tensor]] = []
        self.extra: list[list[torch.Tensor]] = []

    def write(self, count: int, batch: int) -> None:
        if not self.kept:
            self.kept, self.extra = [[] for _ in range(batch)], [[] for _ in range(batch)]
        new = fresh(batch, count, self.generator)
        shown = [self.cache.layer(index).write(keys, values) for index, (keys, values) in enumerate(new)]
        self.cache.advance(count)
        for b, line in enumerate(self.extra):
            line += [torch.stack([torch.stack((k[b, :, i], v[b, :, i])) for k, v in new]) for i in range(count)]
        for keys, values in shown:
            assert keys.shape == values.shape == (batch, HEADS, self.cache.used, WIDTH)
        self.check(shown)

    def check(self, shown: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        """Everything the model holds stands in the cache, in order."""
        assert self.cache.lengths == [len(line) for line in self.kept]
        assert self.cache.used == max((len(k) + len(e) for k, e in zip(self.kept, self.extra)), default=0)
        assert all(len(e) == self.cache.lines.extra for e in self.extra)
        for layer in range(LAYERS):
            tensors = self.cache.layer(layer).tensors if shown is None else shown[layer]
            assert tensors is not None
            for b, line in enumerate(k + e for k, e in zip(self.kept, self.extra)):
                for which in (0, 1):
                    held = tensors[which][b, :, : len(line)].transpose(0, 1)
                    expected = torch.stack([slot[layer][which] for slot in line]) if line else held[:0]
                    assert torch.equal(held, expected), f"layer {layer}, line {b}, {'values' if which else 'keys'}"

    def commit(self, paths: list[list[int]]) -> None:
        self.cache.commit(paths)
        self.kept = [k + [e[i] for i in path] for k, e, path in zip(self.kept, self.extra, paths, strict=True)]
        self.extra = [[] for _ in self.kept]
        self.check()

    def drop(self) -> None:
        self.cache.drop()
        self.extra = [[] for _ in self.kept]
        self.check()

    def keep(self, lengths: list[int]) -> None:
        self.cache.keep(lengths)
        self.kept = [(k + e)[:n] for k, e, n in zip(self.kept, self.extra, lengths, strict=True)]
        self.extra = [[] for _ in self.kept]
        self.check()

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
        self.kept, self.extra = [list(self.kept[r]) for r in rows], [list(self.extra[r]) for r in rows]
        self.check()

    def adopt(self, lines: list[int], other: Plain, source: list[int]) -> None:
        self.cache.adopt(lines, other.cache, source)
        for line, index in zip(lines, source, strict=True):
            self.kept[line] = list(other.kept[index])
        self.check()
        other.check()

    def append(self, other: Plain, source: list[int]) -> None:
        self.cache.append(other.cache, source)
        self.kept += [list(other.kept[i]) for i in source]
        self.extra += [[] for _ in source]
        self.check()
        other.check()


def random_paths(rng: random.Random, plain: Plain, even: bool) -> list[list[int]]:
    """Ascending indices into the uncommitted slots; of the same number in every line, or of any."""
    extra = plain.cache.lines.extra
    count = rng.randint(0, extra)
    sizes = [count if even else rng.randint(0, extra) for _ in plain.kept]
    return [sorted(rng.sample(range(extra), n)) for n in sizes]


def other_cache(rng: random.Random, seed: int) -> Plain:
    """A cache of one to four committed lines, as a prefill leaves it."""
    other = Plain(seed)
    other.write(rng.choice([1, 3, 20, GROWTH + 40]), rng.randint(1, 4))
    other.commit(random_paths(rng, other, False))
    return other


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("seed", range(6))
def test_random_operations_equal_lists(seed: int, even: bool) -> None:
    rng = random.Random(seed)
    plain = Plain(seed)
    plain.write(rng.randint(1, 6), rng.randint(1, 4))
    done: set[str] = set()
    for number in range(60):
        lines = len(plain.kept)
        operation = rng.choice(["write", "write", "commit", "commit", "drop", "keep", "select", "adopt", "append"])
        if operation in ("adopt", "append") and plain.cache.lines.extra:
            plain.commit(random_paths(rng, plain, even))
        if operation == "write":
            plain.write(rng.choice([1, 1, 2, 7, 30]), lines)
        elif operation == "commit":
            plain.commit(random_paths(rng, plain, even))
        elif operation == "drop":
            plain.drop()
        elif operation == "keep":
            held = [len(k) + len(e) for k, e in zip(plain.kept, plain.extra)]
            least = rng.randint(max(0, min(held) - 9), min(held))
            plain.keep([least if even else rng.randint(max(0, h - 9), h) for h in held])
        elif operation == "select":
            # Repeats and any order; never none, and not so many that the test grows slow.
            plain.select([rng.randrange(lines) for _ in range(rng.randint(1, min(5, lines + 1)))])
        elif not even and operation == "adopt":
            other = other_cache(rng, 1000 * seed + number)
            count = rng.randint(1, min(lines, len(other.kept)))
            plain.adopt(rng.sample(range(lines), count), other, [rng.randrange(len(other.kept)) for _ in range(count)])
        elif not even and operation == "append" and lines < 6:
            other = other_cache(rng, 1000 * seed + number)
            plain.append(other, [rng.randrange(len(other.kept)) for _ in range(rng.randint(1, 2))])
        else:
            continue
        assert plain.cache.lines.even == (len({len(k) for k in plain.kept}) <= 1)
        done.add(operation)
    assert done >= {"write", "commit", "drop", "keep", "select"} | (set() if even else {"adopt", "append"})


def test_a_gathered_tree_path_becomes_the_lines_end() -> None:
    """Paths that skip, and one whose sources are overwritten by its own copies (3 -> 1 after 1 -> 0)."""
    plain = Plain(0)
    plain.write(5, 3)
    plain.commit([[0, 1, 2, 3, 4], [0], [0, 1, 2]])
    plain.write(6, 3)
    plain.commit([[0, 2, 5], [1, 3, 4, 5], []])
    assert plain.cache.lengths == [8, 5, 3]
    plain.write(4, 3)
    plain.commit([[3], [1, 2, 3], [2]])
    plain.write(2, 3)


def test_uncommitted_slots_of_several_writes_are_committed_together() -> None:
    plain = Plain(1)
    plain.write(4, 2)
    plain.commit([[0, 1, 2, 3], [0, 1]])
    for count in (1, 3, 2):
        plain.write(count, 2)
    plain.commit([[0, 4, 5], [1, 2, 3, 4, 5]])
    assert plain.cache.lengths == [7, 7]


def test_an_empty_cache_takes_lines_of_another() -> None:
    other = Plain(3)
    other.write(9, 3)
    other.commit([[0, 1, 2], list(range(9)), [0]])
    plain = Plain(4)
    plain.append(other, [2, 0])
    assert plain.cache.lengths == [1, 3]
    plain.write(3, 2)
    other.write(1, 3)  # what one writes the other does not see
    plain.check()
    other.check()


def test_takes_lines_that_are_longer_than_its_buffer() -> None:
    for operation in ("append", "adopt"):
        other, plain = Plain(6), Plain(7)
        other.write(3 * GROWTH, 2)
        other.commit([list(range(3 * GROWTH)), [0, 5]])
        plain.write(4, 3)
        plain.commit([[0, 1, 2, 3], [1], []])
        if operation == "append":
            plain.append(other, [1, 0])
        else:
            plain.adopt([2, 0], other, [0, 1])
        plain.write(2, len(plain.kept))
        plain.commit([[1]] * len(plain.kept))


def test_grows_beyond_its_buffer() -> None:
    plain = Plain(5)
    plain.write(3, 2)
    plain.commit([[0, 1, 2], [0]])
    for _ in range(3):
        plain.write(GROWTH - 20, 2)
        plain.keep([n + GROWTH - 25 for n in plain.cache.lengths])
        plain.write(9, 2)
        plain.commit([list(range(9)), [3]])
    plain.write(2 * GROWTH, 2)
    assert plain.cache.used == 3 + 3 * (GROWTH - 16) + 2 * GROWTH


def test_does_not_copy_for_every_token() -> None:
    cache = LineCache()
    generator = torch.Generator().manual_seed(0)
    places = set()
    for _ in range(40):
        for index, (keys, values) in enumerate(fresh(2, 1, generator)):
            cache.layer(index).write(keys, values)
        cache.advance(1)
        cache.commit([[0], [0]])
        tensors = cache.layer(0).tensors
        assert tensors is not None
        places.add(tensors[0].data_ptr())
    assert len(places) == 1


def test_cannot_keep_more_than_it_holds() -> None:
    plain = Plain(0)
    plain.write(3, 2)
    plain.commit([[0, 1, 2], [0]])
    with pytest.raises(AssertionError, match=r"\[3, 1\] slots held, \[3, 2\] to keep"):
        plain.cache.keep([3, 2])
    with pytest.raises(AssertionError):
        plain.cache.keep([3])
    plain.check()


def test_cannot_commit_what_was_not_written() -> None:
    plain = Plain(0)
    plain.write(3, 2)
    for paths in ([[0, 3], [0]], [[0]]):
        with pytest.raises(AssertionError):
            plain.cache.commit(paths)
    plain.check()


def test_adopting_needs_committed_lines() -> None:
    plain, other = Plain(0), Plain(1)
    plain.write(2, 1)
    other.write(2, 1)
    plain.commit([[0, 1]])
    with pytest.raises(AssertionError):
        plain.cache.adopt([0], other.cache, [0])
    with pytest.raises(AssertionError):
        plain.cache.append(other.cache, [0])


def test_empty_cache() -> None:
    cache = TargetCache()
    assert cache.used == 0 and cache.lengths == [] and cache.lines.even
    cache.keep([])
    cache.commit([])
    cache.select([])
    assert cache.library.get_seq_length() == 0


def test_library_layers_show_what_the_librarys_own_cache_shows() -> None:
    ours, library = TargetCache(), DynamicCache()
    generator = torch.Generator().manual_seed(0)

    def update(count: int, batch: int) -> None:
        for index, (keys, values) in enumerate(fresh(batch, count, generator)):
            got, expected = ours.library.update(keys, values, index), library.update(keys, values, index)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        ours.advance(count)
        assert ours.used == ours.library.get_seq_length() == library.get_seq_length()

    def keep(length: int) -> None:
        ours.keep([length] * len(ours.lengths))
        for layer in library.layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    for length in (5, 1, 1, 4):
        update(length, 2)
    keep(4)
    update(3, 2)
    keep(7)  # all
    keep(1)
    update(GROWTH, 2)
    ours.select([1])
    for layer in library.layers:
        layer.keys, layer.values = layer.keys[[1]], layer.values[[1]]
    update(2, 1)
    keep(0)
    update(2, 1)
    assert ours.used == 2


@pytest.mark.parametrize("seed", range(8))
def test_visible_slots_equals_the_rule_spelt_out(seed: int) -> None:
    rng = random.Random(seed)
    batch, count, own_slots = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 7)
    lengths = [rng.randint(0, 9) for _ in range(batch)]
    total = max(lengths) + own_slots + rng.randint(0, 2)
    own = torch.rand(batch, count, own_slots, generator=torch.Generator().manual_seed(seed)) < 0.5
    found = visible_slots(torch.tensor(lengths), own, total)
    assert found.shape == (batch, count, total) and found.dtype == torch.bool
    for b in range(batch):
        for i in range(count):
            for column in range(total):
                if column < lengths[b]:
                    expected = True
                elif column < lengths[b] + own_slots:
                    expected = bool(own[b, i, column - lengths[b]])
                else:
                    expected = False  # rubbish behind the line
                assert bool(found[b, i, column]) == expected, (b, i, column)


@pytest.mark.parametrize(("count", "before"), [(1, 0), (4, 0), (3, 2), (1, 5)])
def test_causal(count: int, before: int) -> None:
    mask = causal(2, count, torch.device("cpu"), before)
    assert mask.shape == (2, count, before + count)
    expected = [[column <= before + i for column in range(before + count)] for i in range(count)]
    assert mask.tolist() == [expected, expected]
