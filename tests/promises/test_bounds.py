"""tests/bounds.md is true: each bound is its constant's or key's value, and each named test exists."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.promises.conftest import ROOT, Run
from tests.server.test_places import SCENARIOS

PAGE = ROOT / "tests" / "bounds.md"
BOUNDS = runpy.run_path(str(ROOT / "scripts" / "bounds"))
value_of: Callable[[str], float | None] = BOUNDS["value_of"]
ROW = re.compile(r"^\| (\w[^|]*): [^|]+ \| ([^|]+) \| ([^|]+) \| `(tests/[^|`]+)::(\w+)` \|$", re.MULTILINE)
RESOURCES = {"memory", "tasks", "streams", "log lines", "disk", "CPU", "connections"}
WITHOUT_NUMBER: set[str] = BOUNDS["WITHOUT_NUMBER"]


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, ...]]:
    """Resource, bound, definition, test file and test name of each row."""
    tables = PAGE.read_text().split("## Places")[0]
    found = ROW.findall(tables)
    lines = [line for line in tables.splitlines() if line.startswith("| ") and "| resource |" not in line]
    assert len(found) == len(lines) > 50, "a row has another form"
    return found


def test_every_kind_of_resource_is_covered(rows: list[tuple[str, ...]]) -> None:
    assert {row[0] for row in rows} == RESOURCES


def test_numbers_and_places_are_those_of_the_code(run: Run, tmp_path: Path) -> None:
    run(sys.executable, "scripts/bounds", tmp_path / "bounds.md")
    assert (tmp_path / "bounds.md").read_text() == PAGE.read_text(), "run `make fix-bounds`: the page is stale"


def test_each_named_test_exists(rows: list[tuple[str, ...]]) -> None:
    names: dict[Path, set[str]] = {}
    for _, _, _, path, name in rows:
        file = ROOT / path
        if file not in names:
            tree = ast.walk(ast.parse(file.read_text()))
            names[file] = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names[file], f"{path} has no {name}"


def test_named_tests_take_bounds_from_the_code(rows: list[tuple[str, ...]]) -> None:
    """A copied number hides that the bound has changed: the test may then be far from it, or far beyond."""
    copied = []
    for _, _, definition, path, name in rows:
        bound = None if definition in WITHOUT_NUMBER else value_of(definition.strip("`"))
        if bound is None or bound < 10:
            continue
        for function in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == name:
                numbers = [one.value for one in ast.walk(function) if isinstance(one, ast.Constant)]
                copied += [f"{path}::{name}: {one}" for one in numbers if one in (bound - 1, bound, bound + 1)]
    assert copied == []


def test_every_pool_of_places_has_its_floods() -> None:
    floods = {flood for pool in BOUNDS["POOLS"].values() for flood in pool.floods.split(", ")}
    assert floods == set(SCENARIOS)
    assert len(BOUNDS["pools"]()) > 10
