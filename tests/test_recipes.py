"""Every recipe loads, and every command in the README can be run as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from train.recipe import load_recipe

REPOSITORY = Path(__file__).parents[1]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))


def readme_commands(text: str) -> list[str]:
    """The lines of code blocks, fenced or indented, that run one of our commands; continued lines joined, prompts cut."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL) + re.findall(r"^ {4}.*$", text, re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.search(r"(^|\s)(python -m scripts\.|accelerate launch)", line.split("#")[0])]


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_recipes_load(path: Path) -> None:
    assert load_recipe(path, []).name == path.stem


def test_readme_commands() -> None:
    text = (REPOSITORY / "README.md").read_text()
    commands = readme_commands(text)
    assert commands or len(text.splitlines()) <= 20, "the README shows no command"
    for command in commands:
        words = shlex.split(command, comments=True)
        modules = [w for w in words if w.startswith("scripts.")] + [w for w in words if w.endswith(".py")]
        assert len(modules) == 1, command
        module = modules[0] if modules[0].endswith(".py") else modules[0].replace(".", "/") + ".py"
        assert (REPOSITORY / module).is_file(), f"{command}: there is no {module}"
        rest = words[words.index(modules[0]) + 1 :]
        recipes = [w for w in rest if w.endswith(".yaml") and "=" not in w]
        assert len(recipes) == 1 and (REPOSITORY / recipes[0]).is_file(), f"{command}: there is no such recipe"
        load_recipe(REPOSITORY / recipes[0], [w for w in rest if "=" in w and not w.startswith("-")])


def test_readme_commands_are_found() -> None:
    text = "```bash\npython -m scripts.prepare a.yaml \\\n  x=1  # note\nls\n```\npython -m scripts.evaluate b.yaml\n"
    text += "\n    A=1 accelerate launch train_eagle.py c.yaml\n"
    found = [shlex.split(command, comments=True) for command in readme_commands(text)]
    assert found == [
        ["python", "-m", "scripts.prepare", "a.yaml", "x=1"],
        ["A=1", "accelerate", "launch", "train_eagle.py", "c.yaml"],
    ]
