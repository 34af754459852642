"""docs/operate/bounds.md is true: each bound is its constant's or key's value, and each named test exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from lmkv.config import NodeConfig, PickerConfig, ProxyConfig
from tests.promises.conftest import ROOT

PAGE = ROOT / "docs" / "operate" / "bounds.md"
CONFIGS = {"node": NodeConfig(), "picker": PickerConfig(), "proxy": ProxyConfig()}
UNITS = {"": 1, "s": 1, "ms": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1}
"""Sizes in the configuration are in GiB."""
ROW = re.compile(r"^\| (\w[^|]*): [^|]+ \| ([^|]+) \| ([^|]+) \| `(tests/[^|`]+)::(\w+)` \|$", re.MULTILINE)
RESOURCES = {"memory", "tasks", "streams", "log lines", "disk", "CPU", "connections"}
WITHOUT_NUMBER = {"tokens file", "none is written"}


def value_of(name: str) -> float | None:
    """The value of a constant or of a key's default; None for a module."""
    place, _, last = name.rpartition(".")
    if place in CONFIGS:
        return float(getattr(CONFIGS[place], last))
    if not last.isupper():
        importlib.import_module(name)
        return None
    return float(getattr(importlib.import_module(place), last))


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, ...]]:
    """Resource, bound, definition, test file and test name of each row."""
    found = ROW.findall(PAGE.read_text())
    tables = PAGE.read_text().split("## Not bounded")[0]
    lines = [line for line in tables.splitlines() if line.startswith("| ") and "| resource |" not in line]
    assert len(found) == len(lines) > 50, "a row has another form"
    return found


def test_every_kind_of_resource_is_covered(rows: list[tuple[str, ...]]) -> None:
    assert {row[0] for row in rows} == RESOURCES


def test_each_bound_is_the_value_of_what_defines_it(rows: list[tuple[str, ...]]) -> None:
    wrong, compared = [], 0
    for _, bound, definition, _, _ in rows:
        if definition in WITHOUT_NUMBER:
            continue
        value = value_of(definition.strip("`"))
        number = re.fullmatch(r"([\d.,]+)(?: (\w+))?", bound)
        assert (number is None) == (value is None), f"{definition}: {bound}"
        if number is not None:
            compared += 1
            stated = float(number[1].replace(",", "")) * UNITS[number[2] or ""]
            wrong += [f"{definition} is {value}, not {bound}"] if stated != value else []
    assert wrong == []
    assert compared > 45


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
