"""Rows: every document once and to itself, totals that equal a count by hand, an order that is a function of seed and step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from data.corpus import Document
from data.packing import PackedRows, PackingConfig, RowOrder, anchors
from heads.errors import UserError

LENGTH = 32


def documents(seed: int = 0, count: int = 60, longest: int = 45) -> list[Document]:
    """Random documents; those longer than a row and those without loss among them. First ids are unique."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        size = int(rng.integers(2, longest))
        mask = np.zeros(size, np.uint8)
        start = int(rng.integers(0, size))
        mask[start : start + int(rng.integers(0, size))] = 1
        if i % 3 == 0:
            mask[rng.integers(0, size)] ^= 1
        ids = np.concatenate(([1000 + i], rng.integers(1, 900, size - 1))).astype(np.int32)
        made.append(Document(f"d{i}", "c", 1, ("stop",), ids, mask))
    return made


@pytest.fixture(params=[True, False], ids=["packed", "one a row"])
def rows(request: pytest.FixtureRequest) -> PackedRows:
    return PackedRows(documents(), PackingConfig(max_length=LENGTH, pack=request.param))


def test_each_document_lies_once_and_whole(rows: PackedRows) -> None:
    batch = rows.batch(range(len(rows)))
    by_id = {int(d.ids[0]): d for d in documents()}
    seen: Counter[int] = Counter()
    for line in range(len(rows)):
        for number in batch.document[line].unique().tolist():
            here = batch.document[line] == number
            at = here.nonzero()[:, 0]
            assert int(at[-1] - at[0]) + 1 == len(at)  # one run
            assert batch.position[line][here].tolist() == list(range(len(at)))
            ids, mask = batch.ids[line][here], batch.mask[line][here]
            if int(ids[0]) == 0:  # padding
                assert not ids.any() and not mask.any() and int(at[-1]) == batch.ids.shape[1] - 1
                continue
            source = by_id[int(ids[0])]
            seen[int(ids[0])] += 1
            assert ids.tolist() == source.ids[:LENGTH].tolist()
            assert mask.tolist() == (source.mask[:LENGTH] == 1).tolist()
    with_loss = {k for k, d in by_id.items() if any(a and b for a, b in zip(d.mask[1:LENGTH], d.mask[2:LENGTH]))}
    assert set(seen) == with_loss and set(seen.values()) == {1}
    assert rows.without_loss == len(by_id) - len(with_loss) > 0
    assert rows.cut == sum(len(d.ids) > LENGTH for d in by_id.values()) > 0
    # Numbers of documents are not used in two rows.
    lines = [set(batch.document[line].unique().tolist()) for line in range(len(rows))]
    assert sum(map(len, lines)) == len(set.union(*lines))


def test_totals_equal_a_count_by_hand(rows: PackedRows) -> None:
    for chosen in ([0], [len(rows) - 1, 2, 5], list(range(len(rows)))):
        batch = rows.batch(chosen)
        count = carrying = 0
        for line in range(len(chosen)):
            mask, document = batch.mask[line].tolist(), batch.document[line].tolist()
            slots = [
                document[t]
                for t in range(len(mask) - 2)
                if mask[t + 1] and mask[t + 2] and document[t] == document[t + 1] == document[t + 2]
            ]
            count += len(slots)
            carrying += len(set(slots))
        total = rows.totals(chosen)
        assert (total.anchors, total.documents) == (count, carrying)
        assert total.slots == len(chosen) * LENGTH
        assert int(anchors(batch.mask, batch.document).sum()) == count > 0


def test_anchors_stay_inside_their_document() -> None:
    """Two documents whose masks would form an anchor across the seam."""
    ids = np.arange(1, 9, dtype=np.int32)
    first = Document("a", "c", 1, ("stop",), ids, np.array([0, 0, 0, 0, 0, 1, 1, 1], np.uint8))
    second = Document("b", "c", 1, ("stop",), ids, np.array([1, 1, 1, 1, 0, 0, 0, 0], np.uint8))
    rows = PackedRows([first, second], PackingConfig(max_length=16))
    batch = rows.batch([0])
    assert len(rows) == 1 and batch.mask[0].tolist() == [False] * 5 + [True] * 7 + [False] * 4
    assert anchors(batch.mask, batch.document)[0].nonzero()[:, 0].tolist() == [4, 5, 8, 9]


@pytest.mark.parametrize("seed", range(5))
def test_rows_keep_to_their_capacity_and_are_few(seed: int) -> None:
    rows = PackedRows(documents(seed, 200, 30), PackingConfig(max_length=LENGTH))
    sizes = [len(d.ids) for d in rows.documents]
    assert all(sum(sizes[i] for i in row) <= LENGTH for row in rows.rows)
    fewest = -(-sum(sizes) // LENGTH)
    assert len(rows) <= fewest * 11 / 9 + 1  # the bound of first-fit decreasing
    assert rows.fill == pytest.approx(sum(sizes) / (len(rows) * LENGTH))
    # No two rows could have been one.
    loads = sorted(sum(sizes[i] for i in row) for row in rows.rows)
    assert loads[0] + loads[1] > LENGTH


def test_nothing_to_train_on() -> None:
    blank = Document("a", "c", 1, ("stop",), np.arange(9, dtype=np.int32), np.zeros(9, np.uint8))
    with pytest.raises(UserError, match="nothing to train on"):
        PackedRows([blank], PackingConfig(max_length=LENGTH))


def test_an_epoch_takes_every_row_once() -> None:
    order = RowOrder(12, seed=3)
    epochs = [[r for step in range(e * 3, e * 3 + 3) for r in order.update(step, 4)] for e in range(4)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert RowOrder(12, seed=4).update(0, 12) != epochs[0]


def test_the_order_has_no_memory() -> None:
    """A resumed run, and every process of a run, sees the rows that one uninterrupted process sees."""
    order = RowOrder(10, seed=0)
    straight = [order.update(step, 4) for step in range(20)]  # 4 does not divide 10: updates straddle epochs
    assert [RowOrder(10, seed=0).update(step, 4) for step in reversed(range(20))] == straight[::-1]
    flat = [r for update in straight for r in update]
    assert [r for step in range(40) for r in RowOrder(10, seed=0).update(step, 2)] == flat
    for processes in (2, 4):
        shares = [RowOrder(10, seed=0).update(7, 4)[p::processes] for p in range(processes)]
        assert sorted(r for share in shares for r in share) == sorted(straight[7])
