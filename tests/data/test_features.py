"""FeatureStore: what was written comes back, features are bound to their ids and their target, damage is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.features import FeatureStore, States, document_key
from heads.errors import UserError

IDENTITY: dict[str, Any] = {"target_fingerprint": "abc", "taps": [1, 2, 3], "dtype": "torch.float32"}
Entry = tuple[np.ndarray, States]


def entry(seed: int, length: int, dtype: torch.dtype = torch.float32) -> Entry:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (length,), generator=generator).numpy().astype(np.int32)
    taps, hidden = torch.randn(length - 1, 12, generator=generator), torch.randn(length - 1, 4, generator=generator)
    return ids, (taps.to(dtype), hidden.to(dtype))


ENTRIES = [entry(i, 5 + 3 * i) for i in range(6)]


def same(store: FeatureStore, entries: list[Entry]) -> bool:
    for ids, states in entries:
        assert ids in store
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(store.read(ids), states, strict=True)):
            return False
    return True


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    made = FeatureStore(tmp_path / "features", IDENTITY)
    made.append(ENTRIES[:2])
    made.append([])
    made.append(ENTRIES[2:5])
    return made


def test_round_trip(store: FeatureStore) -> None:
    for opened in (store, FeatureStore(store.directory, IDENTITY)):
        assert len(opened) == 5 and same(opened, ENTRIES[:5])
        assert ENTRIES[5][0] not in opened
    assert len(list(store.directory.glob("features-*.safetensors"))) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_targets_dtype_stays(tmp_path: Path, dtype: torch.dtype) -> None:
    store = FeatureStore(tmp_path, IDENTITY)
    made = [entry(9, 8, dtype)]
    store.append(made)
    assert same(FeatureStore(tmp_path, IDENTITY), made)


def test_views_of_larger_tensors_are_written_as_what_they_show(tmp_path: Path) -> None:
    ids, (taps, hidden) = entry(3, 9)
    wide = torch.cat((taps, taps + 1)).reshape(2, 8, 12).permute(1, 0, 2)[:, 0]
    store = FeatureStore(tmp_path, IDENTITY)
    store.append([(ids, (wide, torch.cat((hidden, hidden))[:8]))])
    assert same(store, [(ids, (taps, hidden))])


def test_features_are_never_taken_for_those_of_other_text(store: FeatureStore) -> None:
    ids = ENTRIES[0][0]
    other = ids.copy()
    other[-1] += 1
    assert other not in store and ids[:-1] not in store and ids[1:] not in store and np.append(ids, 0) not in store
    assert ids.astype(np.int64) in store and ids.tolist() not in store  # by value, and nothing but arrays
    assert np.concatenate((ids, ids))[: len(ids)] in store
    assert len({document_key(e[0]) for e in ENTRIES}) == len(ENTRIES)


def test_states_must_cover_all_but_the_last_position(store: FeatureStore) -> None:
    ids, (taps, hidden) = ENTRIES[5]
    for wrong in ((taps[:-1], hidden[:-1]), (taps, hidden[:-1])):
        with pytest.raises(AssertionError):
            store.append([(ids, wrong)])
    assert ids not in FeatureStore(store.directory, IDENTITY)


def test_written_twice(store: FeatureStore) -> None:
    """A preparation that was killed between features and corpus shard answers, and writes, again."""
    store.append(ENTRIES[1:3])
    assert len(store) == 5 and same(FeatureStore(store.directory, IDENTITY), ENTRIES[:5])
    ids, (taps, hidden) = ENTRIES[1]
    store.append([(ids, (taps + 1, hidden))])
    for opened in (store, FeatureStore(store.directory, IDENTITY)):
        assert torch.equal(opened.read(ids)[0], taps + 1)  # the newest


@pytest.mark.parametrize(("key", "value"), [("target_fingerprint", "def"), ("taps", [1, 2]), ("dtype", "torch.bfloat16"), ("extra", 1)])
def test_another_identity_is_refused(store: FeatureStore, key: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        FeatureStore(store.directory, IDENTITY | {key: value})
    text = str(error.value)
    assert f"features of another {key} ({IDENTITY.get(key)!r}, this recipe's is {value!r})" in text
    assert str(store.directory) in text and "remove that directory" in text and "\n" not in text
    assert same(FeatureStore(store.directory, IDENTITY), ENTRIES[:5])  # and nothing was touched


@pytest.mark.parametrize("damage", ["cut in the tensors", "cut in the header", "empty", "text"])
def test_a_damaged_file_is_refused_and_may_be_removed(store: FeatureStore, damage: str) -> None:
    first = store.directory / "features-00000.safetensors"
    whole = first.read_bytes()
    first.write_bytes({"cut in the tensors": whole[:-7], "cut in the header": whole[:40], "empty": b"", "text": b"no features" * 9}[damage])
    with pytest.raises(UserError) as error:
        FeatureStore(store.directory, IDENTITY)
    text = str(error.value)
    assert f"feature file {first} is damaged" in text and "remove it" in text and "\n" not in text
    first.unlink()
    opened = FeatureStore(store.directory, IDENTITY)
    assert len(opened) == 3 and same(opened, ENTRIES[2:5]) and ENTRIES[0][0] not in opened
    # What is written next does not take another file's place.
    opened.append([ENTRIES[5]])
    for again in (opened, FeatureStore(store.directory, IDENTITY)):
        assert len(again) == 4 and same(again, ENTRIES[2:6])


def test_half_written_files_are_ignored_and_cleared(store: FeatureStore) -> None:
    whole = (store.directory / "features-00001.safetensors").read_bytes()
    leftover = store.directory / ".features-00002.safetensors.tmp-123"
    leftover.write_bytes(whole[: len(whole) // 2])
    opened = FeatureStore(store.directory, IDENTITY)
    assert len(opened) == 5 and same(opened, ENTRIES[:5]) and not leftover.exists()
    assert json.loads((store.directory / "identity.json").read_text()) == IDENTITY


def test_a_kill_while_writing_leaves_nothing_visible(store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.append([ENTRIES[5]])
    assert ENTRIES[5][0] not in store
    monkeypatch.undo()
    opened = FeatureStore(store.directory, IDENTITY)
    assert len(opened) == 5 and ENTRIES[5][0] not in opened
    opened.append([ENTRIES[5]])
    assert same(FeatureStore(store.directory, IDENTITY), ENTRIES)
