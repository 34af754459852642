"""Imports point down only, and what is heavy is imported in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.promises.conftest import Run

MAX_MODULES = 60
"""Modules that `import lmkv` may read beside what the interpreter has at its start: it stays fast."""
HOMES = {
    "torch": ("kernels/", "client/lmkv_client/connector/", "client/lmkv_client/transformers/"),
    "vllm": (
        "client/lmkv_client/connector/vllm_api.py",
        "client/lmkv_client/connector/encoder/ec_api.py",
        "client/lmkv_client/plugin.py",
    ),
    "nixl": ("lmkv/transfer/",),
    "nixl_cu12": ("lmkv/transfer/",),
    "ucxx": ("lmkv/transfer/",),
    "mooncake": ("lmkv/transfer/",),
    "opentelemetry": ("lmkv/telemetry/",),
    "zstandard": ("server/lmkv_server/node/tiers/codec.py",),
    "cryptography": ("server/lmkv_server/node/tiers/encryption.py",),
    "transformers": ("client/lmkv_client/transformers/",),
    "starlette": (
        "server/lmkv_server/http/",
        "server/lmkv_server/coordinator/http/",
        "server/lmkv_server/proxy/",
        "server/lmkv_server/webhook/",
    ),
    "uvicorn": ("server/lmkv_server/http/",),
    "aiohttp": ("server/lmkv_server/proxy/",),
}
"""Where in the tree each heavy package may be imported."""

SOURCES = ("lmkv", "kernels", "client", "server")


def test_imports_keep_the_contracts(run: Run) -> None:
    done = run("lint-imports", "--no-cache")
    assert " 0 broken" in done.stdout


def test_heavy_packages_are_imported_in_their_homes_only(root: Path) -> None:
    files = [file for folder in SOURCES for file in (root / folder).rglob("*.py")]
    assert len(files) > 30
    astray = [
        f"{place}: {package}"
        for file in files
        for package in imported_packages(file)
        if package in HOMES and not (place := str(file.relative_to(root))).startswith(HOMES[package])
    ]
    assert not astray, f"these belong elsewhere: {astray}"


def imported_packages(file: Path) -> Iterator[str]:
    """Top-level packages that a file imports at run time, wherever in it; imports for type checkers do not count."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_import_lmkv_brings_in_nothing_heavy() -> None:
    heavy = (*HOMES, "grpc", "numpy", "google.protobuf", "yaml", "rich")
    program = f"import sys, lmkv; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150)
    assert done.stdout.strip() == "[]"


def test_import_lmkv_reads_few_modules() -> None:
    program = "import sys; before = set(sys.modules); import lmkv; print(len(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150)
    assert int(done.stdout) < MAX_MODULES


@pytest.mark.parametrize("module", ["lmkv_client.plugin", "lmkv_server.coordinator", "lmkv_server.node"])
def test_what_runs_without_an_engine_starts_without_torch_and_vllm(module: str) -> None:
    program = (
        f"import sys, {module}; print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150)
    assert done.stdout.strip() == "[]"
