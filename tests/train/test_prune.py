"""Which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

from train.state import point, prune


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        (tmp_path / f"step-{step:06d}").mkdir()
    (tmp_path / ".step-000010.tmp-7").mkdir()
    (tmp_path / ".progress.json.tmp-7").write_text("")
    point(tmp_path / "last", "step-000008")
    prune(tmp_path, 2, best_step=2)
    assert names(tmp_path) == {"last", "step-000002", "step-000006", "step-000008"}


def test_a_damaged_later_one_does_not_push_out_what_was_just_written(tmp_path: Path) -> None:
    """A resume skipped step 9 as damaged; training went on from step 2 and has just saved step 4."""
    for step in (2, 4, 9):
        (tmp_path / f"step-{step:06d}").mkdir()
    point(tmp_path / "last", "step-000004")
    prune(tmp_path, 1, best_step=-1)
    assert (tmp_path / "last").is_dir() and "step-000002" not in names(tmp_path)
