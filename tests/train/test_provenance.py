"""What a run leaves behind: whole files, no secrets, no names."""

from __future__ import annotations

import getpass
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from train import provenance


def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *argv: str) -> str:
    monkeypatch.setattr(sys, "argv", list(argv))
    provenance.write_provenance(tmp_path / "run", "a: 1\n")
    text = (tmp_path / "run" / "command.txt").read_text()
    assert text.endswith("\n")
    return text[:-1]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory with a working directory in it."""
    (tmp_path / "joe" / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "joe"))
    monkeypatch.setenv("PWD", str(tmp_path / "joe" / "work"))
    monkeypatch.chdir(tmp_path / "joe" / "work")
    return tmp_path / "joe"


def test_writes_the_three_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert command(monkeypatch, tmp_path, "train.py", "a b", "x=1") == "train.py 'a b' x=1"
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == ["command.txt", "recipe.yaml", "versions.json"]
    assert (run / "recipe.yaml").read_text() == "a: 1\n"
    facts = json.loads((run / "versions.json").read_text())
    assert facts["python"] == platform.python_version()
    assert {"torch", "pydantic", "numpy"} <= facts["packages"].keys()
    assert set(facts["git"]) == {"revision", "dirty"}
    assert facts["machine"]["cores"] >= 1 and facts["machine"]["cpu"] and isinstance(facts["machine"]["gpus"], list)
    for name in {platform.node(), getpass.getuser()} - {"", "root", "localhost"}:
        assert name not in json.dumps(facts)


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGES", ("pydantic", "no-such-package"))
    assert list(provenance.versions()["packages"]) == ["pydantic"]


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("hub.token=abc", "hub.token=***"),
        ("--api-key=abc", "--api-key=***"),
        ("client_secret=12345", "client_secret=***"),
        ("name=hf_abcdEFGH1234", "name=***"),
        ("x-sk-abcdefghijklmnop1234", "x-***"),
        ("url=https://joe:pw@host/x", "url=https://***@host/x"),
        ("note=envsecret123", "note=***"),
        ("data.max_tokens=512", "data.max_tokens=512"),
        ("tokenizer=org/name", "tokenizer=org/name"),
        ("data=hf_datasets/x", "data=hf_datasets/x"),
    ],
)
def test_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argument: str, shown: str) -> None:
    monkeypatch.setenv("SOME_API_KEY", "envsecret123")
    assert shlex.split(command(monkeypatch, tmp_path, "train.py", argument)) == ["train.py", shown]


def test_a_secret_option_masks_the_next_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = command(monkeypatch, tmp_path, "train.py", "--token", "abc", "--key", "--fast", "x")
    assert shlex.split(text) == ["train.py", "--token", "***", "--key", "--fast", "x"]


def test_paths(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    argv = [f"{home}/bin/train", f"{home}/work/r.yaml", f"out={home}/work/runs/a", f"in=[{home}/x, {home}/work]"]
    argv += [f"{home}", f"{home}/work/", f"{home}y/z", f"/mnt{home}/z", f"url=file://{home}/a", f"{home}/a b"]
    text = command(monkeypatch, home, *argv)
    assert text.startswith("~/bin/train r.yaml out=runs/a 'in=[~/x, .]' ")
    assert text.endswith("~/'a b'")
    assert shlex.split(text)[4:] == ["~", ".", f"{home}y/z", f"/mnt{home}/z", "url=file://~/a", "~/a b"]


def test_a_working_directory_above_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(home.parent)
    monkeypatch.setenv("PWD", str(home.parent))
    assert command(monkeypatch, home, f"{home}/x", f"{home.parent}/y") == "~/x y"


def test_git_state(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    unknown = {"revision": None, "dirty": None}
    file = tmp_path / "code.py"
    file.write_text("1")
    assert provenance._git_state(file) == unknown
    git("init", "-q")
    assert provenance._git_state(file) == unknown
    git("add", "code.py")
    git("commit", "-qm", "one")
    assert provenance._git_state(file) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    file.write_text("2")
    assert provenance._git_state(file)["dirty"] is True


def test_no_git_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.versions()["git"] == {"revision": None, "dirty": None}


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    provenance.write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        provenance.write_atomically(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_importing_is_cheap() -> None:
    code = "import sys, train.provenance; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
