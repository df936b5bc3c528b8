"""What every command shares: the exit codes and the recipe arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from heads.errors import UserError


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Runs a command and exits: 0 or what main returns, 2 for the user's errors, 130 when interrupted.

    Any other exception is a bug of ours and keeps its traceback.
    """
    try:
        code = main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        sys.exit(130)
    sys.exit(code or 0)


def recipe_arguments(
    argv: Sequence[str],
    description: str,
    add_options: Callable[[argparse.ArgumentParser], object] | None = None,
) -> tuple[Path, list[str], argparse.Namespace]:
    """Parses ``RECIPE [KEY=VALUE ...]``; overrides may stand among the options.

    Args:
        argv: the arguments without the program's name.
        description: what the command does, for --help.
        add_options: adds the command's own options to the parser.

    Returns:
        The recipe's path, the overrides as given, and all that was parsed.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="example: %(prog)s recipes/my.yaml train.steps=100 train.learning_rate=1e-4",
    )
    parser.add_argument("recipe", type=Path, help="the recipe, a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a dotted key of the recipe and its value as YAML")
    if add_options is not None:
        add_options(parser)
    # Plain parse_args takes all of nargs="*" at the first positional and refuses overrides after an option.
    parsed = parser.parse_intermixed_args(list(argv))
    return parsed.recipe, parsed.overrides, parsed


def add_drafter_option(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """--drafter NAME, short for evaluate.drafter.kind=NAME; several: NAME ..., one after the other."""
    parser.add_argument(
        "--drafter",
        nargs="+" if several else None,
        metavar="NAME",
        help=f"who drafts{', one after the other' if several else ''}: head, lookup, independent, cross, none or oracle; "
        "options are evaluate.drafter.*",
    )


def drafter_override(name: str | None) -> list[str]:
    """The override that --drafter stands for."""
    return [] if name is None else [f"evaluate.drafter.kind={name}"]
