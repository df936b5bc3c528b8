"""Recipes: a YAML file and ``a.b.c=value`` overrides in, a validated Config out, or every problem at once.

Scalars are read as in YAML 1.2: ``1e-4`` is a number (YAML 1.1 reads text), and ``yes``, ``on`` and ``12:30`` are text.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from heads.config import Config
from heads.errors import UserError
from train.strict_yaml import StrictDumper, parse_yaml

M = TypeVar("M", bound=Config)
Part = str | int

_PHRASES = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text (write it in quotes)",
    "path_type": "must be a path",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "dict_type": "must be a section of keys",
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "too_short": "must have at least {min_length} entries, it has {actual_length}",
    "too_long": "must have at most {max_length} entries, it has {actual_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "none_required": "must be null",
    "is_instance_of": "must be a value of another kind",
    "invalid_key": "must have keys that are text (write them in quotes)",
    "missing": "missing, it has no default",
    "union_tag_not_found": "missing, it has no default",
}
_COERCED = {"int_type", "float_type", "bool_type"}
# What a strict check says of a plain scalar without meaning a mere change of form (text to a path or an enum).
_NOT_A_FORM = _COERCED | {"list_type", "tuple_type", "set_type", "dict_type", "model_type"}
_NOT_A_FORM |= {"none_required", "string_type", "literal_error"}


class RecipeError(UserError):
    """Everything that is wrong with a recipe: a header line, then one line a problem."""


def load_strict(path: Path, overrides: Sequence[str], model: type[M]) -> M:
    """Reads a recipe and applies overrides to it.

    Checks across the keys of a section run only once each key of that section is right by itself, so mending the
    reported problems can bring up new ones there.

    Args:
        path: a YAML file that holds a mapping.
        overrides: ``a.b.c=value`` each, the value as YAML; later ones win. Entries of lists go by number, ``a.0.b``.
        model: what the recipe must be.

    Raises:
        UserError: the file cannot be read as a YAML mapping.
        RecipeError: all that is wrong with what the file and the overrides say.
    """
    data, problems = _read(path)
    for text in overrides:
        problem = _override(data, text, model)
        if problem is not None:
            problems.append(problem)
    result, found = _validate(model, data)
    problems += found
    if problems or result is None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise RecipeError("\n  ".join([f"recipe {path}: {count}", *problems]))
    return result


def dump_recipe(model: Config) -> str:
    """The resolved recipe, every default written out; ``load_strict`` reads it back to an equal model."""
    data = model.model_dump(mode="json", round_trip=True)
    return str(yaml.dump(data, Dumper=StrictDumper, sort_keys=False, allow_unicode=True, width=120))


def describe_keys(model: type[BaseModel]) -> list[tuple[str, str, str]]:
    """(dotted key, default, description) of every key, in the order of declaration, for the docs.

    A section has a row of its own only where it has a description. Entries of lists are written ``key[].sub``, those
    of mappings ``key.<name>.sub``. Where a section is one of several kinds, the description begins with those that have the key.
    """
    rows: dict[tuple[str, str, str], list[str]] = {}
    _describe(model, "", None, rows, 0, "")
    return [(key, default, f"({', '.join(kinds)}) {text}".rstrip() if all(kinds) else text) for (key, default, text), kinds in rows.items()]


def _describe(
    model: type[BaseModel], prefix: str, instance: Any, rows: dict[tuple[str, str, str], list[str]], depth: int, kind: str
) -> None:
    for name, field in model.model_fields.items():
        default = getattr(instance, name) if isinstance(instance, model) else _default(field)
        text = " ".join((field.description or "").split())
        subs = _submodels(field.annotation)
        whole = isinstance(field.annotation, type) and bool(subs)
        if not whole or text:
            shown = "required" if default is _ABSENT else _show(default)
            rows.setdefault((prefix + name, shown, text), []).append(kind)
        if depth < 8:  # a model may hold itself
            origins = _origins(field.annotation)
            below = ".<name>." if dict in origins else "[]." if list in origins or tuple in origins else "."
            for sub in subs:
                tag = sub.model_fields.get("kind") if len(subs) > 1 else None
                _describe(sub, prefix + name + below, default, rows, depth + 1, kind if tag is None else str(get_args(tag.annotation)[0]))


class _Absent:
    """The type of _ABSENT, "nothing there", since None is a value."""


_ABSENT = _Absent()


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return _ABSENT
    try:
        return field.get_default(call_default_factory=True)
    except (TypeError, ValueError):  # a factory that needs the other fields' values
        return "computed"


def _origins(annotation: Any) -> list[Any]:
    """The generic types an annotation is built from: ``list[A] | None`` gives the union and list."""
    origin = get_origin(annotation)
    if origin is None or origin is Literal:
        return []
    return [origin, *(o for arg in get_args(annotation) for o in _origins(arg))]


def _submodels(annotation: Any) -> list[type[BaseModel]]:
    """The models a field's value can hold, at any depth of unions and containers."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, BaseModel) else []
    if get_origin(annotation) is Literal:
        return []
    return [sub for arg in get_args(annotation) for sub in _submodels(arg)]


def _models_at(model: type[BaseModel], parts: Sequence[Part], data: Any) -> list[type[BaseModel]]:
    """The models that the value under a key may be; where a literal such as ``kind`` decides, those that fit."""
    models = [model]
    for part in parts:
        data = _child(data, part)
        fields = [m.model_fields[str(part)] for m in models if part in m.model_fields]
        if fields:
            models = [sub for field in fields for sub in _submodels(field.annotation)]
        # Else the part is a list's index or a mapping's key: the models below it were reached with the field.
        models = [m for m in models if _fits(m, data)] or models
    return models


def _fits(model: type[BaseModel], data: Any) -> bool:
    literals = {n: get_args(f.annotation) for n, f in model.model_fields.items() if get_origin(f.annotation) is Literal}
    return not isinstance(data, dict) or all(data[n] in allowed for n, allowed in literals.items() if n in data)


def _child(data: Any, part: Part) -> Any:
    if isinstance(data, dict):
        return data.get(part, _ABSENT)
    if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
        return data[part]
    return _ABSENT


def _read(path: Path) -> tuple[dict[Any, Any], list[str]]:
    """The file's mapping, and the keys it gives twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"recipe {path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"recipe {path} is a directory; give the YAML file itself") from None
    except UnicodeDecodeError:
        raise UserError(f"recipe {path} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from None
    try:
        data, duplicates = parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"recipe {path}{where}: not valid YAML, {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise UserError(f"recipe {path} is empty")
    if not isinstance(data, dict):
        raise UserError(f"recipe {path} must hold a mapping (key: value) at its top level, not {_show(data)}")
    return data, duplicates


def _override(data: dict[Any, Any], text: str, model: type[BaseModel]) -> str | None:
    """Writes one override into data; what is wrong with it, if anything is."""
    key, equals, raw = text.partition("=")
    parts: list[Part] = list(key.strip().split("."))
    if not equals or not all(parts):
        return f"override {text!r}: must be written key=value, as in a.b=1"
    try:
        value, duplicates = parse_yaml(raw)
    except yaml.YAMLError:
        return f"{key} = {raw!r}: not a YAML value; write it in quotes within quotes, as in '{key}=\"...\"'"
    if duplicates:
        return f"{key} = {raw!r}: gives a key twice"
    here: Any = data
    for depth, part in enumerate(parts):
        if isinstance(here, list):
            if not str(part).isdigit() or int(part) >= len(here):
                return f"override {text!r}: the list it goes into has entries 0 to {len(here) - 1}, not {part!r}"
            part = parts[depth] = int(part)
        if depth == len(parts) - 1:
            break
        below = _child(here, part)
        if below is _ABSENT or below is None:
            below = {}
        elif isinstance(below, str) and _has_name(model, parts[: depth + 1]):
            below = {"name": below}
        elif not isinstance(below, dict | list):
            return f"override {text!r}: {_dotted(parts[: depth + 1])} is {_show(below)}, a value with no keys below it"
        # A copy, because a YAML alias makes two keys share one value, and only this one is overridden.
        here[part] = copy.copy(below)
        here = here[part]
    here[parts[-1]] = value
    return None


def _has_name(model: type[BaseModel], parts: Sequence[Part]) -> bool:
    return any("name" in sub.model_fields for sub in _models_at(model, parts, _ABSENT))


def _validate(model: type[M], data: dict[Any, Any]) -> tuple[M | None, list[str]]:
    result, errors = None, []
    try:
        result = model.model_validate(data)
    except ValidationError as error:
        errors = [(*_locate(data, e), e) for e in error.errors(include_url=False)]
    reported = {parts for parts, _, _ in errors}
    errors += [found for found in _coercions(model, data) if found[0] not in reported]

    phrases: dict[tuple[Part, ...], list[str]] = {}  # the members of a union each have their say on the same key
    values: dict[tuple[Part, ...], Any] = {}
    for parts, value, details in errors:
        values[parts] = value
        phrase = _unknown(model, parts, data) if details["type"] == "extra_forbidden" else _phrase(details)
        said = phrases.setdefault(parts, [])
        if phrase not in said:
            said.append(phrase)
    lines = []
    for parts, said in phrases.items():
        value = values[parts]
        unsaid = value is _ABSENT or (isinstance(value, dict) and not said[0].startswith("must "))
        given = "" if unsaid else f" = {_show(value)}"
        joined = " or ".join([said[0], *(phrase.removeprefix("must be ") for phrase in said[1:])])
        lines.append(f"{_dotted(parts) or 'the recipe as a whole'}{given}: {joined}")
    return result, lines


def _coercions(model: type[BaseModel], data: dict[Any, Any]) -> list[tuple[tuple[Part, ...], Any, Any]]:
    """Scalars that pydantic would turn into another kind, "5" or true into a number: wrong types, so errors.

    Pydantic's strict mode cannot be the one check: it also refuses text for paths and enums and lists for tuples,
    which YAML has no other way to write. Of its errors only those on scalars count, with lists made tuples as needed.
    """
    spelled: Any = data
    while True:
        try:
            model.model_validate(spelled, strict=True)
            return []
        except ValidationError as error:
            errors = [(*_locate(spelled, e), e) for e in error.errors(include_url=False)]
        lists = {parts for parts, value, e in errors if e["type"] == "tuple_type" and isinstance(value, list)}
        if not lists:
            break
        for parts in lists:  # a level of nesting a round
            spelled = _with_tuple(spelled, parts)
    found = []
    for parts in dict.fromkeys(parts for parts, _, _ in errors):
        group = [entry for entry in errors if entry[0] == parts]
        value, types = group[0][1], {details["type"] for _, _, details in group}
        whole_float = isinstance(value, float) and value.is_integer()  # 1e4 says a whole number well enough
        if isinstance(value, str | int | float) and not whole_float and types & _COERCED and types <= _NOT_A_FORM:
            found += group
    return found


def _with_tuple(data: Any, parts: tuple[Part, ...]) -> Any:
    """A copy of data whose list at parts is a tuple."""
    if not parts:
        return tuple(data)
    inner = _with_tuple(data[parts[0]], parts[1:])
    if isinstance(data, dict):
        return {**data, parts[0]: inner}
    return type(data)(inner if number == parts[0] else item for number, item in enumerate(data))


def _locate(data: Any, details: Any) -> tuple[tuple[Part, ...], Any]:
    """The key an error is about and the value the recipe has there.

    Pydantic's location also names members of unions and validators, which are no keys: what is not there is left out.
    """
    parts: list[Part] = []
    for number, part in enumerate(details["loc"]):
        below = _child(data, part)
        if below is not _ABSENT:
            parts.append(part)
            data = below
        elif number == len(details["loc"]) - 1 and details["type"] == "missing":
            parts.append(part)
            data = _ABSENT
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = details["ctx"]["discriminator"].strip("'")
        parts.append(tag)
        data = _child(data, tag)
    return tuple(parts), data


def _phrase(details: Any) -> str:
    if details["loc"] and details["loc"][-1] == "[key]":
        return "its key " + _phrase({**details, "loc": ()})
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return " ".join(str(context["error"]).split())
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        expected = str(context["expected_tags" if kind == "union_tag_invalid" else "expected"])
        names = re.findall(r"'([^']*)'", expected)
        near = difflib.get_close_matches(str(details["input"]), names, n=1) if kind != "union_tag_invalid" else []
        allowed = f"must be one of {expected}" if "," in expected or " or " in expected else f"must be {expected}"
        return allowed + (f" (did you mean '{near[0]}'?)" if near else "")
    if kind in _PHRASES:
        return _PHRASES[kind].format(**context)
    message = str(details["msg"])
    return message.replace("Input should", "must", 1) if message.startswith("Input should") else message.lower()


def _unknown(model: type[BaseModel], parts: tuple[Part, ...], data: dict[Any, Any]) -> str:
    """What to say of a key that is not known: near names in its section, and the same name elsewhere."""
    name = str(parts[-1]).lower().replace("-", "_")
    known = list(dict.fromkeys(n for sub in _models_at(model, parts[:-1], data) for n in sub.model_fields))
    here = [_dotted((*parts[:-1], near)) for near in difflib.get_close_matches(name, known, n=2)]
    keys = dict.fromkeys(key for key, _, _ in describe_keys(model))
    tails = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in keys}, n=3, cutoff=0.8)
    elsewhere = [key for tail in tails for key in keys if key.rpartition(".")[2] == tail]
    near = list(dict.fromkeys([*here, *elsewhere]))[:3]
    if near:
        return f"unknown key; did you mean {' or '.join(near)}?"
    return f"unknown key; known here: {', '.join(known)}"


def _dotted(parts: Sequence[Part]) -> str:
    return ".".join(map(str, parts))


def _show(value: Any) -> str:
    """A value on one line, as YAML would have it but with text in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return _show(value.value)
    if isinstance(value, BaseModel | dict):
        return "a section of keys"
    if isinstance(value, list | tuple | set | frozenset):
        text = f"[{', '.join(map(_show, value))}]"
    else:
        text = repr(value if isinstance(value, int | float | str) else str(value))
    return text if len(text) <= 80 else text[:76] + " ..."
