"""The tree is as its rules say: packages are described, and pure is pure."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.promises.conftest import Run

SOURCES = ("lmkv", "kernels/lmkv_kernels", "client/lmkv_client", "server/lmkv_server")
IMPURE = (
    "asyncio",
    "google",
    "grpc",
    "lmkv.internal",
    "lmkv.rpc",
    "lmkv.telemetry",
    "lmkv.v1",
    "logging",
    "opentelemetry",
    "prometheus_client",
    "starlette",
    "valkey",
)
"""What a pure module does not import: I/O, protos, logs, telemetry."""
PURE_PACKAGES = ("server/lmkv_server/coordinator/core",)
"""Packages whose modules are all pure."""


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every product module that is not generated."""
    for source in SOURCES:
        for file in sorted((root / source).rglob("*.py")):
            if "_pb2" not in file.name:
                yield file.relative_to(root), ast.parse(file.read_text())


def test_the_drawing_is_what_the_contracts_say_now(root: Path, run: Run, tmp_path: Path) -> None:
    run(sys.executable, "scripts/architecture", tmp_path / "packages.md")
    page = Path("docs", "contribute", "packages.md")
    made, committed = (tmp_path / page.name).read_text(), (root / page).read_text()
    assert made == committed, "run `make fix-floors`: docs/contribute/packages.md is stale"


def test_every_package_says_what_it_is_for(root: Path) -> None:
    packages = [(file, tree) for file, tree in modules(root) if file.name == "__init__.py" and file.parent.name != "v1"]
    assert len(packages) > 20
    assert not [str(file) for file, tree in packages if not ast.get_docstring(tree)]


def test_modules_that_are_called_pure_are(root: Path) -> None:
    found = {}
    for file, tree in modules(root):
        if re.search(r"\bPure\b", ast.get_docstring(tree) or "") or str(file.parent) in PURE_PACKAGES:
            found[str(file)] = sorted(impurities(tree))
    assert len(found) > 10
    assert not {file: names for file, names in found.items() if names}


def test_only_its_owner_counts_up_an_attribute_of_the_node(root: Path) -> None:
    """Others read a property, or a frozen `...Stats`: no module changes the counters of another."""
    found, counted = [], 0
    for file, tree in modules(root):
        if not file.is_relative_to("server/lmkv_server/node"):
            continue
        private = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("_")]
        hidden = {id(node) for owner in private for node in ast.walk(owner)}
        own = set(attributes(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
                counted += 1
                name, owner = node.target.attr, ast.unparse(node.target.value)
                if (owner != "self" and name not in own) or (
                    owner == "self" and not name.startswith("_") and id(node) not in hidden
                ):
                    found.append(f"{file}:{node.lineno}: {owner}.{name}")
    assert counted > 50
    assert not found


def attributes(tree: ast.Module) -> Iterator[str]:
    """The names of attributes that the classes of a module define."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(target, ast.Name):
                yield target.id
            for each in node.targets if isinstance(node, ast.Assign) else [target]:
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                    yield each.attr


def impurities(tree: ast.Module) -> Iterator[str]:
    """Modules for I/O, protos and telemetry that a module imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if f"{name}.".startswith(tuple(f"{impure}." for impure in IMPURE)):
                yield name
