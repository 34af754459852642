"""The core of the coordinator is synchronous, and does not know how it is called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lmkv_server.coordinator import core, layout_store

IMPURE = ("asyncio", "grpc", "starlette", "valkey", "logging", "lmkv.rpc", "lmkv.telemetry")
"""Modules that pure ones do not import, directly."""
PURE = [
    *Path(core.__path__[0]).glob("*.py"),
    *(
        Path(layout_store.__path__[0]) / f"{name}.py"
        for name in ("chunk_records", "log_entry", "publication", "follower")
    ),
]


@pytest.mark.parametrize("file", PURE, ids=lambda file: file.stem)
def test_a_pure_module_imports_nothing_that_waits_calls_or_logs(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert not {name for name in imported if name in IMPURE or name.startswith(tuple(f"{one}." for one in IMPURE))}
