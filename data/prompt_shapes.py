"""One row of any common shape -> its system message, its user turns and its category.

Answers in the row are dropped, whatever they hold: the target writes its own. Every error names the row's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from heads.errors import UserError

# The key that a row is recognised by; the first one that is there decides. Chat lists come first, as sets that carry
# one often repeat its first turn under 'prompt' or 'instruction'.
SHAPES = {
    "messages": "messages",
    "sharegpt": "conversations",
    "turns": "turns",
    "alpaca": "instruction",
    "prompt": "prompt",
    "question": "question",
}

SHAPES_IN_WORDS = (
    "messages ('messages': a list of {role, content}), sharegpt ('conversations': a list of {from, value}), "
    "alpaca ('instruction' and optionally 'input'), prompt ('prompt': a text or a list of {role, content}), "
    "question ('question': a text), turns ('turns': a list of texts)"
)

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}

_TOOL_ROLES = ("tool", "tool_call", "tool_response", "function", "function_call", "function_response", "observation")


class ParsedRow(NamedTuple):
    """What a row says; ``system`` is None where it has none, ``category`` "" likewise."""

    system: str | None
    turns: list[str]
    category: str


def parse_row(row: object, shape: str, place: str) -> ParsedRow:
    """Read one row.

    Args:
        row: what the file held; a key with the value None counts as absent, as in tables every row has every column.
        shape: a key of SHAPES, or "auto".
        place: where the row is, for the error messages.

    Raises:
        UserError: the row fits no shape, holds an empty turn, or something other than text.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a row must be an object, and this is {_kind(row)}; known are {SHAPES_IN_WORDS}")
    given = {str(key): value for key, value in row.items() if value is not None}
    found = _recognise(given, place) if shape == "auto" else shape
    key = SHAPES[found]
    if key not in given:
        raise UserError(
            f"{place}: the shape '{found}' needs the key '{key}', and the row's keys are {_keys(given)}; "
            "set shape to the one that the rows have, or to auto"
        )
    system, turns = _READERS[found](given, place)
    if not turns:
        raise UserError(f"{place}: '{key}' holds no turn by the user; add one, or remove the row")
    if system is None and "system" in given:
        system = _text(given["system"], f"{place}: 'system'")
    return ParsedRow(system if system and system.strip() else None, turns, _category(given))


def _recognise(row: Mapping[str, Any], place: str) -> str:
    for shape, key in SHAPES.items():
        if key in row:
            return shape
    raise UserError(f"{place}: the row fits no known shape; its keys are {_keys(row)}, and known are {SHAPES_IN_WORDS}")


def _category(row: Mapping[str, Any]) -> str:
    for key in ("category", "task"):
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


_Read = tuple[str | None, list[str]]  # the system message and the user's turns


def _read_messages(row: Mapping[str, Any], place: str, key: str) -> _Read:
    messages, where = row[key], f"{place}: '{key}'"
    if not isinstance(messages, list):
        raise UserError(f"{where} must be a list of messages, and is {_kind(messages)}")
    system: str | None = None
    turns: list[str] = []
    for index, message in enumerate(messages):
        at = f"{where}[{index}]"
        role, content = _message(message, at)
        if role == "user":
            turns.append(_turn(content, at))
        elif role == "system":
            if index:
                raise UserError(f"{at} is a system message, and only the first message may be one; remove it")
            system = _text(content, at)
    return system, turns


def _message(message: object, at: str) -> tuple[str, object]:
    """Role (user, assistant or system) and content, under either pair of names: sets mix them freely."""
    if not isinstance(message, Mapping):
        raise UserError(f"{at} must be an object with role and content (or from and value), and is {_kind(message)}")
    names = ("role", "content") if message.get("role") is not None else ("from", "value")
    role = message.get(names[0])
    if role is None:
        raise UserError(f"{at} has neither 'role' nor 'from'; its keys are {_keys(message)}")
    if role in _TOOL_ROLES or message.get("tool_calls") or message.get("function_call"):
        raise UserError(f"{at} is a tool turn (role '{role}'), and tool turns are not supported yet; remove the row")
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(f"{at} has the unknown role {role!r}; known are {', '.join(_ROLES)}")
    return _ROLES[role], message.get(names[1])


def _read_turns(row: Mapping[str, Any], place: str) -> _Read:
    turns, where = row["turns"], f"{place}: 'turns'"
    if not isinstance(turns, list):
        raise UserError(f"{where} must be a list of texts, and is {_kind(turns)}")
    return None, [_turn(turn, f"{where}[{index}]") for index, turn in enumerate(turns)]


def _read_alpaca(row: Mapping[str, Any], place: str) -> _Read:
    instruction = _turn(row["instruction"], f"{place}: 'instruction'")
    extra = _text(row.get("input", ""), f"{place}: 'input'")
    return None, [f"{instruction}\n\n{extra}" if extra.strip() else instruction]


def _read_prompt(row: Mapping[str, Any], place: str) -> _Read:
    if isinstance(row["prompt"], list):
        return _read_messages(row, place, "prompt")
    return None, [_turn(row["prompt"], f"{place}: 'prompt'")]


_READERS: dict[str, Callable[[Mapping[str, Any], str], _Read]] = {
    "messages": lambda row, place: _read_messages(row, place, "messages"),
    "sharegpt": lambda row, place: _read_messages(row, place, "conversations"),
    "turns": _read_turns,
    "alpaca": _read_alpaca,
    "prompt": _read_prompt,
    "question": lambda row, place: (None, [_turn(row["question"], f"{place}: 'question'")]),
}


def _turn(content: object, at: str) -> str:
    text = _text(content, at)
    if not text.strip():
        raise UserError(f"{at} is empty; a turn needs text, so fill it or remove the row")
    return text


def _text(content: object, at: str) -> str:
    """The text of a content: a string, or a list of {type: text, text} parts, joined."""
    if isinstance(content, list):
        content = "".join(_part(part, f"{at}, part {index}") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise UserError(f"{at} must be text, and is {_kind(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:  # half of a \ud83d\ude00 pair: JSON lets it through, no tokenizer does
        raise UserError(f"{at} holds a lone surrogate at character {error.start}; remove it") from error
    return content


def _part(part: object, at: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = f"of type {part['type']!r}" if isinstance(part, Mapping) and part.get("type") else _kind(part)
    raise UserError(f"{at} is {kind}, and only parts of {{type: text, text: ...}} are supported; remove the row")


def _keys(row: Mapping[Any, Any]) -> str:
    return ", ".join(f"'{key}'" for key in row) or "none"


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")
