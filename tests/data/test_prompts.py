"""Prompts of every shape from every kind of source, and what is said when one is of no use."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from data.prompts import Conversation, PromptsConfig, load_prompts, load_prompts_counted
from heads.errors import UserError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "An answer that is dropped."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Another."},
]


def jsonl(directory: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = directory / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(source: str, **fields: Any) -> list[Conversation]:
    return load_prompts(PromptsConfig(source=source, **fields))


def fails(source: str, *parts: str, **fields: Any) -> None:
    """Loading is a UserError of one line that says all of ``parts``."""
    with pytest.raises(UserError) as caught:
        load(source, **fields)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


SHAPES = [
    ("messages", {"messages": CHAT}, "Be brief.", ("One?", "Two?")),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        None,
        ("ab",),
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "A"},
                {"from": "gpt", "value": "x"},
                {"from": "user", "value": "B"},
                {"from": "assistant", "value": "y"},
            ]
        },
        "S",
        ("A", "B"),
    ),
    ("sharegpt", {"conversations": CHAT}, "Be brief.", ("One?", "Two?")),
    ("alpaca", {"instruction": "Do", "input": "this", "output": "x"}, None, ("Do\n\nthis",)),
    ("alpaca", {"instruction": "Do", "input": "", "output": "x", "system": "S"}, "S", ("Do",)),
    ("alpaca", {"instruction": "Do"}, None, ("Do",)),
    ("prompt", {"prompt": " kept as it is\n"}, None, (" kept as it is\n",)),
    ("prompt", {"prompt": CHAT}, "Be brief.", ("One?", "Two?")),
    ("question", {"question": "Why?"}, None, ("Why?",)),
    ("turns", {"turns": ["a", "b"]}, None, ("a", "b")),
]


@pytest.mark.parametrize(("shape", "row", "system", "turns"), SHAPES)
@pytest.mark.parametrize("auto", [True, False])
def test_shapes(tmp_path: Path, shape: str, row: dict[str, Any], system: str | None, turns: tuple[str, ...], auto: bool) -> None:
    source = jsonl(tmp_path, row)
    assert load(source, shape="auto" if auto else shape) == [Conversation.make(turns=turns, system=system, source="rows.jsonl:1")]


def test_auto_goes_by_row_and_prefers_the_chat(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"question": "Q"}, {"prompt": "One?", "messages": CHAT}, {"turns": None, "prompt": "P"})
    assert [c.turns for c in load(source)] == [("Q",), ("One?", "Two?"), ("P",)]


def test_the_id_is_of_system_and_turns_alone() -> None:
    one = Conversation.make(turns=["a", "b"], system="s")
    assert one.id == hashlib.sha256(b'["s", ["a", "b"]]').hexdigest()[:16]
    assert Conversation.make(turns=("a", "b"), system="s", category="x", source="y").id == one.id
    others = [Conversation.make(turns=["a", "b"]), Conversation.make(turns=["ab"], system="s")]
    assert len({one.id, *(c.id for c in others)}) == 3
    assert Conversation.make(turns=["a"], category="").category == "uncategorised"


def test_categories(tmp_path: Path) -> None:
    marks: list[dict[str, Any]] = [{"category": "maths"}, {"task": "code"}, {"category": 3}, {"category": " "}, {}]
    source = jsonl(tmp_path, *({"prompt": str(i)} | mark for i, mark in enumerate(marks)))
    assert [c.category for c in load(source)] == ["maths", "code", *["uncategorised"] * 3]


def test_the_configs_system_goes_where_there_is_none(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"messages": CHAT}, {"prompt": "P"}, {"messages": [{"role": "system", "content": ""}, *CHAT[1:]]})
    assert [c.system for c in load(source, system="Mine.")] == ["Be brief.", "Mine.", "Mine."]
    assert [c.system for c in load(source)] == ["Be brief.", None, None]
    assert load(source, system="Mine.")[1].id == Conversation.make(turns=["P"], system="Mine.").id


def test_duplicates_go_before_the_limit(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *({"prompt": text} for text in "aabcb"))
    kept, dropped = load_prompts_counted(PromptsConfig(source=source))
    assert ([c.turns[0] for c in kept], dropped) == (["a", "b", "c"], 2)
    assert [c.source for c in kept] == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:4"]
    assert [c.turns[0] for c in load(source, limit=2)] == ["a", "b"]


# Formats


def test_jsonl_lines(tmp_path: Path) -> None:
    """Blank lines, a byte order mark, Windows line ends, and a line separator inside of a string."""
    path = tmp_path / "rows.JSONL"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "é"}'.encode())
    assert [(c.turns, c.source) for c in load(str(path))] == [
        (("a\u2028b",), "rows.JSONL:1"),
        (("é",), "rows.JSONL:3"),
    ]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"question": "b"}], indent=1))
    assert [(c.turns[0], c.source) for c in load(str(path))] == [("a", "rows.json[0]"), ("b", "rows.json[1]")]
    path.write_text(json.dumps({"version": 1, "data": [{"prompt": "a"}]}))
    assert load(str(path))[0].source == "rows.json:data[0]"


ROWS = [{"messages": CHAT, "prompt": None, "category": "c"}, {"messages": None, "prompt": "P", "category": None}]


def check_rows(found: list[Conversation], place: str) -> None:
    assert found == [
        Conversation.make(turns=["One?", "Two?"], system="Be brief.", category="c", source=f"{place}[0]"),
        Conversation.make(turns=["P"], source=f"{place}[1]"),
    ]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    check_rows(load(str(path)), "rows.parquet")


def test_saved_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The format that a set was saved with would turn texts into arrays.
    datasets.Dataset.from_list(ROWS).with_format("numpy").save_to_disk(str(tmp_path / "saved"))
    check_rows(load(str(tmp_path / "saved")), "saved")
    monkeypatch.chdir(tmp_path / "saved")
    check_rows(load("."), "saved")


def test_saved_dataset_dict(tmp_path: Path) -> None:
    other = datasets.Dataset.from_list([{"prompt": "other"}])
    source = str(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "extra": other}).save_to_disk(source)
    check_rows(load(source), "saved/train")
    assert load(source, split="extra")[0].turns == ("other",)
    fails(source, "no split 'test'", "train, extra", split="test")


def test_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> datasets.Dataset:
        asked.append((name, split))
        if split == "nowhere":
            raise ConnectionError("Couldn't reach it\non the Hub")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    check_rows(load("owner/name-v1.5", split="test"), "owner/name-v1.5/test")
    fails("owner/name", "no file 'owner/name'", "'nowhere'", "Couldn't reach it", "network", split="nowhere")
    for path in ("data/rows.jsonl", "data/rows.csv", "../rows", "name", "a/b/c", ""):
        fails(path, f"no such file or directory as '{path}'", ".parquet", "bundled:train", "owner/name")
    assert len(asked) == 2
    (tmp_path / "owner" / "name").mkdir(parents=True)  # what exists is never asked of the Hub
    fails("owner/name", "no dataset")
    assert len(asked) == 2


def test_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("data.bundled_prompts")
    rows = [Conversation.make(turns=["a"], category="c", source="b:1"), Conversation.make(turns=["b"], system="own")]
    monkeypatch.setattr(module, "bundled_prompts", {"train": rows, "heldout": rows[:1]}.__getitem__, raising=False)
    monkeypatch.setitem(sys.modules, "data.bundled_prompts", module)
    assert load_prompts(PromptsConfig()) == rows
    assert load("bundled:heldout") == rows[:1]
    assert load("bundled:train", limit=1) == rows[:1]
    assert load("bundled:train", system="S") == [
        Conversation.make(turns=["a"], system="S", category="c", source="b:1"),
        rows[1],
    ]
    fails("bundled:test", "'test'", "train and heldout")


# What is of no use


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    fails(str(tmp_path / name), name, "holds no prompts")


def test_no_rows(tmp_path: Path) -> None:
    fails(jsonl(tmp_path, "", "  "), "holds no prompts")
    fails(jsonl(tmp_path, "[]", name="rows.json"), "holds no prompts")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    fails(jsonl(tmp_path, {"prompt": "a"}, '{"prompt": '), "rows.jsonl:2", "not valid JSON")
    fails(jsonl(tmp_path, "[" * 100_000), "rows.jsonl:1", "not valid JSON")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    fails(str(tmp_path / "latin.jsonl"), "latin.jsonl:2", "utf-8")
    fails(jsonl(tmp_path, {"a": 1}, {"a": 2}, name="rows.json"), "rows.json", "line 2", "name it .jsonl")
    fails(jsonl(tmp_path, {"a": [1], "b": [2]}, name="two.json"), "2 lists", "a, b", "exactly one")
    fails(jsonl(tmp_path, {"a": 1}, name="none.json"), "0 lists", "exactly one")
    fails(jsonl(tmp_path, "3", name="bare.json"), "bare.json", "list of rows")
    fails(jsonl(tmp_path, "PAR1", name="bad.parquet"), "bad.parquet", "parquet", "write it anew")
    fails(jsonl(tmp_path, "a,b", name="rows.csv"), "rows.csv", ".jsonl, .json or .parquet", "convert")
    fails(jsonl(tmp_path, "a,b", name="rows"), ".jsonl, .json or .parquet")


def test_directories_that_are_no_dataset(tmp_path: Path) -> None:
    fails(str(tmp_path), str(tmp_path), "save_to_disk", ".parquet")
    (tmp_path / "state.json").write_text("{")
    fails(str(tmp_path), "cannot be read", "save it anew")


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"text": "x", "n": 1}, ["fits no known shape", "'text', 'n'", "sharegpt ('conversations'", "turns"]),
        ({"prompt": None}, ["fits no known shape", "keys are none"]),
        (["x"], ["must be an object", "a list"]),
        ("null", ["must be an object", "null"]),
        ({"messages": "x"}, ["'messages' must be a list", "a string"]),
        ({"messages": ["x"]}, ["'messages'[0]", "role and content"]),
        ({"messages": [{"content": "x"}]}, ["neither 'role' nor 'from'", "'content'"]),
        ({"messages": [{"role": "narrator", "content": "x"}]}, ["'narrator'", "user, human, assistant"]),
        ({"messages": [{"role": ["user"], "content": "x"}]}, ["unknown role"]),
        ({"messages": [*CHAT, {"role": "tool", "content": "x"}]}, ["'messages'[5]", "tool turns are not supported"]),
        ({"conversations": [{"from": "observation", "value": "x"}]}, ["tool turns are not supported"]),
        ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [{}]}]}, ["tool turns are not supported"]),
        ({"messages": [CHAT[1], CHAT[0]]}, ["'messages'[1]", "system message", "first"]),
        ({"messages": [CHAT[0]]}, ["no turn by the user"]),
        ({"messages": []}, ["no turn by the user"]),
        ({"turns": []}, ["no turn by the user"]),
        ({"turns": "x"}, ["'turns' must be a list"]),
        ({"turns": ["a", " \n"]}, ["'turns'[1] is empty"]),
        ({"turns": ["a", 3]}, ["'turns'[1] must be text", "a number"]),
        ({"prompt": ""}, ["'prompt' is empty"]),
        ({"prompt": {}}, ["'prompt' must be text", "an object"]),
        ({"question": "\t"}, ["'question' is empty"]),
        ({"instruction": "", "input": "x"}, ["'instruction' is empty"]),
        ({"instruction": "x", "input": 3}, ["'input' must be text"]),
        ({"instruction": "x", "system": 3}, ["'system' must be text"]),
        ({"prompt": "\ud83d"}, ["lone surrogate", "character 0"]),
        (user(""), ["'messages'[0] is empty"]),
        (user([]), ["'messages'[0] is empty"]),
        (user(None), ["must be text", "null"]),
        (user([{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]), ["part 1", "'image'", "only parts"]),
        (user([{"type": "text", "text": None}]), ["part 0", "only parts"]),
        (user(["a"]), ["part 0", "a string", "only parts"]),
    ],
)
def test_rows_of_no_use(tmp_path: Path, row: Any, parts: list[str]) -> None:
    fails(jsonl(tmp_path, {"prompt": "good"}, row), "rows.jsonl:2", *parts)


def test_a_shape_that_the_rows_do_not_have(tmp_path: Path) -> None:
    fails(jsonl(tmp_path, {"prompt": "x"}), "rows.jsonl:1", "'turns'", "'prompt'", "auto", shape="turns")


def test_places_in_other_files(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a", ""]}), tmp_path / "rows.parquet")
    fails(str(tmp_path / "rows.parquet"), "rows.parquet[1]", "is empty")
    fails(jsonl(tmp_path, '[{"prompt": "a"}, {"x": 1}]', name="rows.json"), "rows.json[1]", "'x'")


def test_answers_may_be_anything(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"messages": [CHAT[1], {"role": "assistant", "content": None}, CHAT[3]]})
    assert load(source)[0].turns == ("One?", "Two?")
