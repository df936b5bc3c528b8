"""Exit codes and recipe arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from heads.errors import UserError
from scripts.cli import recipe_arguments, run


@pytest.mark.parametrize(
    ("outcome", "code", "stderr"),
    [
        (None, 0, ""),
        (3, 3, ""),
        (UserError("give a recipe"), 2, "error: give a recipe\n"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again to continue\n"),
        (SystemExit(4), 4, ""),
    ],
)
def test_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: int | BaseException | None,
    code: int,
    stderr: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "a", "b"])

    def main(argv: list[str]) -> int | None:
        assert argv == ["a", "b"]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == code
    assert capsys.readouterr() == ("", stderr)


def test_bugs_keep_their_traceback() -> None:
    def main(argv: list[str]) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run(main)


def test_recipe_arguments() -> None:
    assert recipe_arguments(["r.yaml"], "d")[:2] == (Path("r.yaml"), [])
    path, overrides, _ = recipe_arguments(["r.yaml", "a.b=1", "c=-2"], "d")
    assert path == Path("r.yaml") and overrides == ["a.b=1", "c=-2"]


def test_own_options_between_overrides() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--resume", action="store_true")
        parser.add_argument("--out", type=Path)

    path, overrides, parsed = recipe_arguments(["--resume", "r.yaml", "a=1", "--out", "x", "b=2"], "d", add)
    assert path == Path("r.yaml") and overrides == ["a=1", "b=2"]
    assert parsed.resume is True and parsed.out == Path("x")


def test_help_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        recipe_arguments(["--help"], "What it does.")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "What it does." in text and "example:" in text and "train.learning_rate=1e-4" in text
    for argv in ([], ["r.yaml", "--no-such-option"]):
        with pytest.raises(SystemExit) as caught:
            recipe_arguments(argv, "d")
        assert caught.value.code == 2
