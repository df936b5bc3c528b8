"""docs/recipe.md is what the code says."""

from pathlib import Path

from scripts.recipe_keys import page


def test_the_page_of_recipe_keys_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs/recipe.md").read_text()
    assert written == page(), "run: python -m scripts.recipe_keys > docs/recipe.md"
    assert "`train.learning_rate`" in written
