"""DraftVocab: the invariants of ALGORITHMS 9.4, what is chosen, what is refused."""

from __future__ import annotations

import pytest
import torch

from heads.errors import UserError
from heads.vocab import DraftVocab


def check_invariants(vocab: DraftVocab) -> None:
    draft = torch.arange(vocab.size)
    assert torch.equal(vocab.t2d.nonzero().squeeze(1), draft + vocab.d2t)
    assert int(vocab.t2d.sum()) == vocab.size
    assert vocab.t2d.dtype == torch.bool and vocab.t2d.shape == (vocab.vocab_size,)
    assert vocab.d2t.dtype == torch.int64
    assert torch.equal(draft + vocab.d2t, vocab.target_ids)


@pytest.mark.parametrize("size", [1, 2, 7, 49, 50, 51])
def test_invariants(size: int) -> None:
    counts = torch.randint(0, 20, (50,), generator=torch.Generator().manual_seed(size))
    vocab = DraftVocab.from_counts(counts, size, always=[49])
    check_invariants(vocab)
    assert vocab.size == min(size, 50)
    assert 49 in vocab.target_ids


def test_most_frequent_are_kept() -> None:
    counts = torch.tensor([0, 9, 1, 0, 7, 8, 2, 0])
    assert DraftVocab.from_counts(counts, 3).target_ids.tolist() == [1, 4, 5]
    assert DraftVocab.from_counts(counts, 4).target_ids.tolist() == [1, 4, 5, 6]


def test_always_ids_push_the_rarest_out() -> None:
    counts = torch.tensor([0, 9, 1, 0, 7, 8, 2, 0])
    assert DraftVocab.from_counts(counts, 3, always=[7]).target_ids.tolist() == [1, 5, 7]
    assert DraftVocab.from_counts(counts, 2, always=[7, 3, 7]).target_ids.tolist() == [3, 7]
    # ids outside the vocabulary (a tokenizer larger than the LM head) are nobody's
    assert DraftVocab.from_counts(counts, 3, always=[7, 8, -1]).target_ids.tolist() == [1, 5, 7]


def test_filled_with_the_lowest_unused() -> None:
    counts = torch.zeros(40, dtype=torch.int64)
    counts[[30, 2]] = 5
    assert DraftVocab.from_counts(counts, 6, always=[39]).target_ids.tolist() == [0, 1, 2, 3, 30, 39]


def test_counts_are_not_changed() -> None:
    counts = torch.tensor([3, 0, 5])
    DraftVocab.from_counts(counts, 2, always=[1])
    assert counts.tolist() == [3, 0, 5]


def test_full() -> None:
    vocab = DraftVocab.full(11)
    check_invariants(vocab)
    assert vocab.is_full and vocab.size == 11
    assert vocab.d2t.tolist() == [0] * 11
    assert DraftVocab.from_counts(torch.arange(11), 11).is_full
    assert not DraftVocab.from_counts(torch.arange(11), 10).is_full


def test_coverage() -> None:
    counts = torch.tensor([0, 9, 1, 0, 7, 8, 2, 0])
    assert DraftVocab.from_counts(counts, 3).coverage(counts) == pytest.approx(24 / 27)
    assert DraftVocab.full(8).coverage(counts) == 1.0
    assert DraftVocab.full(8).coverage(torch.zeros(8, dtype=torch.int64)) == 0.0


def test_fingerprint_binds_ids_and_size() -> None:
    ids = torch.tensor([1, 3])
    assert DraftVocab(ids, 5).fingerprint == DraftVocab(ids.clone(), 5).fingerprint
    assert DraftVocab(ids, 5).fingerprint != DraftVocab(ids, 6).fingerprint
    assert DraftVocab(ids, 5).fingerprint != DraftVocab(torch.tensor([1, 4]), 5).fingerprint


def test_too_many_forced_ids_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 tokens cannot hold the 3 .* raise head\.draft_vocab_size"):
        DraftVocab.from_counts(torch.ones(9, dtype=torch.int64), 2, always=[1, 2, 3])


@pytest.mark.parametrize("ids", [[3, 1], [1, 1], [-1, 2], [0, 5]])
def test_ids_out_of_order_or_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="distinct target ids below 5 in ascending order"):
        DraftVocab(torch.tensor(ids), 5)


@pytest.mark.parametrize("ids", [torch.tensor([], dtype=torch.int64), torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]])])
def test_other_tensors_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(UserError, match="non-empty list of whole numbers"):
        DraftVocab(ids, 5)
