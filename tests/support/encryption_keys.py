"""A file of encryption keys made for a test."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path


def secret_of(name: str) -> bytes:
    """The key of that name, the same in every test."""
    return hashlib.sha256(name.encode()).digest()


def key_line(name: str) -> str:
    """Its line in the file."""
    return f"{name} {base64.b64encode(secret_of(name)).decode()}\n"


def write_keys(path: Path, *names: str, mode: int = 0o600) -> str:
    """Writes the file, in one step if it was there before; returns its path."""
    new = path.with_suffix(".new")
    new.write_text("# keys of a test\n" + "".join(map(key_line, names)))
    new.chmod(mode)
    new.replace(path)
    return str(path)
