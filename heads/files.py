"""Files that are whole or absent: temporary name, sync, rename; and checksums. Lowest room, because every room writes files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces path by content in one step: a reader, or a run killed midway, sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
