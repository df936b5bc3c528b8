"""Recipes: a YAML file and ``a.b.c=value`` overrides in, a validated Config out, or every problem at once.

Scalars are read as in YAML 1.2: ``1e-4`` is a number (YAML 1.1 reads text), and ``yes``, ``on`` and ``12:30`` are text.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from heads.config import Config
from heads.errors import UserError

M = TypeVar("M", bound=Config)
Part = str | int

_INT = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_DIGITS = list("-+.0123456789")

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
    "recursion_loop": "must not contain itself",
    "invalid_key": "must have keys that are text (write them in quotes)",
    "missing": "missing, it has no default",
    "union_tag_not_found": "missing, it has no default",
}
_COERCED = {"int_type", "float_type", "bool_type"}
# What a strict check says of a plain scalar without meaning a mere change of form (text to a path or an enum).
_NOT_A_FORM = _COERCED | {"list_type", "tuple_type", "set_type", "dict_type", "model_type", "none_required", "string_type"}


class RecipeError(UserError):
    """Everything that is wrong with a recipe: a header line, then one line a problem."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 that notes keys given twice, which PyYAML would let pass in silence."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked where nodes are composed: by the time of construction "<<" has already mixed in other mappings' keys.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            earlier = first.setdefault((key.tag, key.value), line)
            if first[key.tag, key.value] != line or any(key is not k and k.value == key.value for k, _ in node.value):
                if key is not next(k for k, _ in node.value if k.value == key.value):
                    self.duplicates.append(f"line {line}: the key {key.value!r} is already given on line {earlier}; keep one")
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or this module's loader would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0) if "x" in text or "o" in text else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _tag, _pattern, _first in (
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, _DIGITS),  # before float, whose pattern takes whole numbers too
    ("float", _FLOAT, _DIGITS),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<$"), ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)  # type: ignore[no-untyped-call]
