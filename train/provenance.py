"""What a run leaves beside its results so that it can be judged and repeated: recipe, command, versions, machine.

Run directories get published, so no secrets, host names or user names go in.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.files import write_atomically

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "deepspeed",
    "safetensors",
    "numpy",
    "pydantic",
    "wandb",
)
_MASK = "***"
_SECRET_NAME = re.compile(r"token|key|secret|passw|credential", re.IGNORECASE)
# Hub, OpenAI and the like, GitHub, AWS, Slack, Weights & Biases. Short hf_ words need a digit: "hf_datasets" is none.
_SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_(?=[A-Za-z]*\d)[A-Za-z0-9]{6,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{12,}|xox[abp]-[\w-]{8,}|wandb_v1_\w{16,})"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def write_provenance(directory: Path, recipe_yaml: str) -> None:
    """Writes recipe.yaml, command.txt and versions.json into directory, each whole or not at all.

    Args:
        directory: the run's directory, made if it is not there.
        recipe_yaml: the resolved recipe.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "recipe.yaml", recipe_yaml)
    write_atomically(directory / "command.txt", command_line(sys.argv) + "\n")
    facts = {**versions(), "machine": machine_class()}
    write_atomically(directory / "versions.json", json.dumps(facts, indent=2) + "\n")


def machine_class() -> dict[str, Any]:
    """What kind of machine this is, not which: ``cpu``, ``cores`` (usable ones), ``memory_gib``, ``gpus``."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS or Windows
        cores = os.cpu_count() or 1
    try:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, ValueError, OSError):
        memory = None
    return {"cpu": _cpu_model(), "cores": cores, "memory_gib": memory, "gpus": _gpu_names()}


def versions() -> dict[str, Any]:
    """``python``, ``platform``, ``packages`` (installed ones of PACKAGES) and ``git`` (``revision`` and ``dirty``).

    Both entries of ``git`` are None where this code is not in a git checkout.
    """
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "git": _git_state(Path(__file__).resolve()),
    }


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    try:
        import torch  # takes seconds, which commands that never call this should not pay

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.cuda.get_device_name(number) for number in range(count)]
    except (ImportError, OSError, RuntimeError):  # no torch, or a driver that does not answer: not worth failing a run
        return []


def _git_state(file: Path) -> dict[str, Any]:
    """The revision file is from and whether the checkout differs from it."""
    unknown = {"revision": None, "dirty": None}
    # Git hooks set these, and then git would look at the hook's repository instead.
    env = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    env["GIT_OPTIONAL_LOCKS"] = "0"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        # An installed copy can lie in some other project's checkout, in its .venv; that revision would say nothing.
        git("ls-files", "--error-unmatch", "--", str(file))
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return unknown


def command_line(argv: Sequence[str]) -> str:
    """The command line, quoted for a shell, its secrets masked and its paths without the user's name."""
    words = []
    mask_next = False
    for argument in argv:
        if mask_next and not argument.startswith("-"):
            word, mask_next = _MASK, False
        else:
            name, equals, value = argument.partition("=")
            mask_next = not equals and name.startswith("-") and _is_secret_name(name, "")
            secret = bool(equals) and _is_secret_name(name, value)
            word = f"{name}={_MASK}" if secret else _anonymous(_without_secrets(argument))
        # A quoted ~ is not the home directory to a shell.
        words.append(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") and word[2:] else shlex.quote(word))
    return " ".join(words)


def _is_secret_name(name: str, value: str) -> bool:
    """Whether an option's name says that its value is secret: "hf_token", but not "tokenizer" or "max_tokens=512"."""
    if re.fullmatch(r"[-+\d._e]*|true|false|null", value, re.IGNORECASE):
        name = re.sub(r"tokens|keys", "", name, flags=re.IGNORECASE)
    return bool(_SECRET_NAME.search(re.sub(r"tokeni[sz]e[rd]?", "", name, flags=re.IGNORECASE)))


def _without_secrets(text: str) -> str:
    for name, value in os.environ.items():
        if len(value) >= 8 and "/" not in value and _SECRET_NAME.search(name):
            text = text.replace(value, _MASK)
    return _URL_PASSWORD.sub(_MASK, _SECRET_VALUE.sub(_MASK, text))


def _anonymous(text: str) -> str:
    """Paths under the working directory made relative to it, others under the home directory made ``~/...``."""
    home = os.path.expanduser("~")
    # PWD keeps the symbolic links that getcwd resolves.
    roots = [(os.getcwd(), "."), (os.environ.get("PWD", ""), "."), (home, "~"), (os.path.realpath(home), "~")]
    # The longest first: from a working directory above the home directory, "joe/x" would still name the user.
    for root, short in sorted(roots, key=lambda pair: -len(pair[0])):
        if len(root) < 2 or not os.path.isabs(root):
            continue
        pattern = rf"(?<![\w.~-])(?<!(?<!:/)/){re.escape(root)}(?:(/)(?=[^\s/])|/?(?![\w.-]))"

        def shorten(match: re.Match[str], short: str = short) -> str:
            if match[1]:
                return "" if short == "." else f"{short}/"
            return short

        text = re.sub(pattern, shorten, text)
    return text
