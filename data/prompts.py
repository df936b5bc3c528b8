"""Prompts from bundled sets, files, dataset directories and the Hub: rows of any common shape -> Conversation."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from data.prompt_shapes import parse_row
from heads.config import Config
from heads.errors import UserError

BUNDLED = ("train", "heldout")


@dataclass(frozen=True)
class Conversation:
    """What the user says, turn by turn; the target writes its own answers."""

    id: str
    category: str
    system: str | None
    turns: tuple[str, ...]
    source: str

    @classmethod
    def make(cls, *, turns: Sequence[str], system: str | None = None, category: str = "uncategorised", source: str = "") -> Conversation:
        """A conversation under the hash of its (system, turns): the row hash that resume and deduplication work with.

        Args:
            turns: the user's turns, in order.
            system: the system message; None where there is none.
            category: what results are grouped by; "" becomes "uncategorised".
            source: the row's place, as "file.jsonl:12"; not part of the hash.
        """
        digest = hashlib.sha256(json.dumps([system, list(turns)]).encode()).hexdigest()
        return cls(digest[:16], category or "uncategorised", system, tuple(turns), source)


class PromptsConfig(Config):
    """Where prompts come from."""

    source: str = "bundled:train"
    """bundled:train | bundled:heldout | a .jsonl, .json or .parquet file | a save_to_disk directory | a Hub id."""

    shape: Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "question", "turns"] = "auto"
    """The rows' shape; auto recognises it row by row, by the keys."""

    split: str = "train"
    """The split to read of a Hub id or of a directory that holds a dataset dict."""

    limit: int | None = Field(default=None, ge=1)
    """Only the first so many conversations, after duplicates are dropped; None takes all."""

    system: str | None = None
    """The system message put before conversations that bring none; None puts nothing."""


def load_prompts(config: PromptsConfig) -> list[Conversation]:
    """The conversations of ``config.source``; see :func:`load_prompts_counted`."""
    return load_prompts_counted(config)[0]


def load_prompts_counted(config: PromptsConfig) -> tuple[list[Conversation], int]:
    """The conversations of ``config.source``, in its order, and how many exact duplicates were dropped.

    A duplicate has the (system, turns) of an earlier conversation. With a limit, reading stops once it is reached:
    rows after that are neither checked nor counted.

    Raises:
        UserError: the source is not there, cannot be read or holds no rows, or a row is of no use.
    """
    kept: dict[str, Conversation] = {}
    duplicates = 0
    for conversation in _conversations(config):
        if conversation.id in kept:
            duplicates += 1
            continue
        kept[conversation.id] = conversation
        if len(kept) == config.limit:
            break
    if not kept:
        raise UserError(f"'{config.source}' holds no prompts; put at least one row into it, or name another source")
    return list(kept.values()), duplicates


def _conversations(config: PromptsConfig) -> Iterator[Conversation]:
    default = config.system if config.system and config.system.strip() else None
    if config.source.startswith("bundled:"):
        for c in _bundled(config.source.removeprefix("bundled:")):
            yield (c if c.system or not default else Conversation.make(turns=c.turns, system=default, category=c.category, source=c.source))
        return
    for place, row in _rows(config):
        parsed = parse_row(row, config.shape, place)
        yield Conversation.make(turns=parsed.turns, system=parsed.system or default, category=parsed.category, source=place)


def _bundled(name: str) -> list[Conversation]:
    from data.bundled_prompts import bundled_prompts  # late: that module takes Conversation from this one

    if name == "train":
        return bundled_prompts("train")
    if name == "heldout":
        return bundled_prompts("heldout")
    raise UserError(f"there is no bundled prompt set '{name}'; bundled are {' and '.join(BUNDLED)}")


# Rows --------------------------------------------------------------------------------------------------------------

_Rows = Iterator[tuple[str, object]]
"""(place, row): the place is "file.jsonl:12", lines counted from 1, or "file.json[11]", rows counted from 0. It has the
file's name only, as it is written into what a run leaves behind, where no directory of the user's belongs."""


def _rows(config: PromptsConfig) -> _Rows:
    source = config.source
    path = os.path.abspath(os.path.expanduser(source)) if source else ""
    suffix = os.path.splitext(path)[1].lower()
    if os.path.isdir(path):
        return _saved_rows(Path(path), config)
    if os.path.exists(path):
        if suffix not in _READERS:
            raise UserError(f"'{source}' is no prompts file: these end in {_SUFFIXES}; convert or rename it")
        return _file_rows(Path(path), config)
    # 'data/prompts.csv' has the form of a Hub id, and is meant as a file.
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and suffix not in _FILE_SUFFIXES:
        return _hub_rows(config)
    bundled = " or ".join(f"bundled:{name}" for name in BUNDLED)
    raise UserError(
        f"there is no such file or directory as '{source}'; source takes {bundled}, a file that ends in {_SUFFIXES}, "
        "a directory that datasets' save_to_disk wrote, or a Hub id (owner/name)"
    )


def _file_rows(path: Path, config: PromptsConfig) -> _Rows:
    try:
        if path.stat().st_size:
            yield from _READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"'{config.source}' cannot be read ({_first_line(error)}); check the file") from error


def _jsonl_rows(path: Path) -> _Rows:
    # Read as bytes, as text would be split at more than line feeds; "utf-8-sig" passes over a byte order mark.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path.name}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{place}: the line is not valid JSON ({_first_line(error)}); put one object on each line, or name "
                    "the file .json if it is one JSON document"
                ) from error
            if text:
                yield place, row


def _json_rows(path: Path) -> _Rows:
    try:
        text = path.read_bytes().decode("utf-8-sig").strip()
        rows = json.loads(text) if text else []
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path.name} is not valid JSON ({_first_line(error)}); mend it, or name it .jsonl if it has a row a line"
        ) from error
    where = path.name
    if isinstance(rows, dict):
        lists = [key for key, value in rows.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise UserError(
                f"{path.name} is an object with {len(lists)} lists in it ({', '.join(lists) or 'none'}); make it a "
                "list of rows, or an object with exactly one list of rows"
            )
        where, rows = f"{path.name}:{lists[0]}", rows[lists[0]]
    if not isinstance(rows, list):
        raise UserError(f"{path.name} must be a list of rows, or an object with one list of rows; it is a bare value")
    for index, row in enumerate(rows):
        yield f"{where}[{index}]", row


def _parquet_rows(path: Path) -> _Rows:
    import pyarrow
    from pyarrow import parquet

    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{path.name}[{index}]", row
                    index += 1
    except pyarrow.ArrowException as error:
        raise UserError(f"{path.name} cannot be read as parquet ({_first_line(error)}); write it anew") from error


def _saved_rows(path: Path, config: PromptsConfig) -> _Rows:
    if not any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json", "state.json")):
        raise UserError(
            f"the directory '{config.source}' is no dataset that datasets' save_to_disk wrote; name such a directory, "
            f"or a file that ends in {_SUFFIXES}"
        )
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever Arrow, JSON or the file system raise at damaged files
        raise UserError(f"the dataset '{config.source}' cannot be read ({_first_line(error)}); save it anew") from error
    if isinstance(loaded, datasets.DatasetDict):
        if config.split not in loaded:
            raise UserError(f"'{config.source}' has no split '{config.split}'; set split to one of {', '.join(loaded)}")
        return _dataset_rows(loaded[config.split], f"{path.name}/{config.split}")
    return _dataset_rows(loaded, path.name)


def _hub_rows(config: PromptsConfig) -> _Rows:
    import datasets

    try:
        loaded = datasets.load_dataset(config.source, split=config.split)
    except Exception as error:  # no network, set, split or access: each has a class of its own
        raise UserError(
            f"there is no file '{config.source}' here, and split '{config.split}' of the Hub dataset of that name "
            f"cannot be loaded ({_first_line(error)}); check name, split and network, or name a local file"
        ) from error
    return _dataset_rows(loaded, f"{config.source}/{config.split}")


def _dataset_rows(dataset: Any, where: str) -> _Rows:
    # A set may have been saved with format "torch" or "numpy"; rows are wanted as plain Python values.
    return ((f"{where}[{index}]", row) for index, row in enumerate(dataset.with_format(None)))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_READERS: dict[str, Callable[[Path], _Rows]] = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
_SUFFIXES = ".jsonl, .json or .parquet"
_FILE_SUFFIXES = {*_READERS, ".csv", ".tsv", ".txt", ".arrow", ".ndjson", ".gz", ".zst", ".zip", ".yaml", ".yml"}
