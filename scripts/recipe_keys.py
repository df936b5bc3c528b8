"""Print every recipe key with its default and meaning, as Markdown: `python -m scripts.recipe_keys > docs/recipe.md`."""

from __future__ import annotations

from train.recipe import Recipe
from train.strict import describe_keys

HEAD = """# Recipe keys

One YAML a run. Every key below can be overridden on every command: `python -m scripts.prepare RECIPE train.steps=100 name=try`.
Unknown keys, wrong types and clashes are all reported at once, before a model is loaded. This page is written by
`python -m scripts.recipe_keys`; a test holds it to the code.

| key | default | meaning |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    cells = ([text.replace("|", "\\|").replace("\n", " ") for text in row] for row in describe_keys(Recipe))
    return HEAD + "".join(f"| `{key}` | {default} | {meaning} |\n" for key, default, meaning in cells)


if __name__ == "__main__":
    print(page(), end="")
