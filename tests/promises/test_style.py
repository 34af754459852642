"""The code is formatted, linted and typed as pyproject.toml says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.promises.conftest import Run


def test_the_code_is_formatted(run: Run) -> None:
    run("ruff", "format", "--check", "--diff", "--no-cache")


def test_the_linter_finds_nothing(run: Run) -> None:
    run("ruff", "check", "--no-cache")


@pytest.mark.timeout(600)
def test_the_types_are_right(run: Run) -> None:
    run("mypy", timeout_seconds=580)


def test_every_module_says_what_lives_in_it(root: Path) -> None:
    files = [
        file
        for folder in ("lmkv", "kernels", "client", "server", "benchmarks")
        for file in (root / folder).rglob("*.py")
        if "_pb2" not in file.name and "node_modules" not in file.parts and file.read_text().strip()
    ]
    assert len(files) > 50
    silent = [str(file.relative_to(root)) for file in files if ast.get_docstring(ast.parse(file.read_text())) is None]
    assert not silent, f"no module docstring: {silent}"
