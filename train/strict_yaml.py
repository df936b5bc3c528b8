"""YAML with the scalars of version 1.2: ``1e-4`` is a number, ``yes``, ``on`` and ``12:30`` are text. Duplicate keys are noted."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

_INT = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_DIGITS = list("-+.0123456789")


class StrictLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 that notes keys given twice, which PyYAML would let pass in silence."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked where nodes are composed: by the time of construction "<<" has already mixed in other mappings' keys.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            earlier = first.get((key.tag, key.value))
            if earlier is None:
                first[key.tag, key.value] = line
            else:
                self.duplicates.append(f"line {line}: the key {key.value!r} is already given on line {earlier}")
        return node


class StrictDumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or this module's loader would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds the "next line" character away in its other styles.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0) if "x" in text or "o" in text else int(text)


StrictLoader.yaml_implicit_resolvers = {}
StrictDumper.add_representer(str, _represent_text)
StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _tag, _pattern, _first in (
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, _DIGITS),  # before float, whose pattern takes whole numbers too
    ("float", _FLOAT, _DIGITS),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<$"), ["<"]),
):
    for _class in (StrictLoader, StrictDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of a document and its duplicate keys; raises yaml.YAMLError."""
    loader = StrictLoader(text)
    try:
        data = loader.get_single_data()
        json.dumps(data, skipkeys=True, default=str)  # finds what aliases can make: a value inside itself
        return data, loader.duplicates
    except (ValueError, RecursionError):
        raise yaml.YAMLError("a value contains itself or is nested too deeply") from None
    finally:
        loader.dispose()
