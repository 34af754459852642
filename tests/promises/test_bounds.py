"""docs/operate/bounds.md is true: each bound is its constant's or key's value, and each named test exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from lmkv.config import NodeConfig, PickerConfig, ProxyConfig
from lmkv.runtime.places import most_of
from lmkv_server.http import connections, server
from tests.promises.conftest import ROOT
from tests.server.test_places import SCENARIOS

PAGE = ROOT / "docs" / "operate" / "bounds.md"
CONFIGS = {"node": NodeConfig(), "picker": PickerConfig(), "proxy": ProxyConfig()}
UNITS = {"": 1, "s": 1, "ms": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1}
"""Sizes in the configuration are in GiB."""
ROW = re.compile(r"^\| (\w[^|]*): [^|]+ \| ([^|]+) \| ([^|]+) \| `(tests/[^|`]+)::(\w+)` \|$", re.MULTILINE)
PLACES = re.compile(r"^\| `([^`]+)` [^|]+ \| ([\d,]+) \| ([\d,]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"\bPlaces\[[^(]*\]\(\s*\"([^\"]+)\"")
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
    tables = PAGE.read_text().split("## Places")[0]
    found = ROW.findall(tables)
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


def test_every_pool_of_places_is_listed_with_its_share_and_its_floods() -> None:
    section = PAGE.read_text().split("## Places")[1].split("## ")[0]
    rows = PLACES.findall(section)
    assert len(rows) == section.count("\n| `")
    sources = [path.read_text() for folder in ("lmkv", "server") for path in (ROOT / folder).rglob("*.py")]
    assert {row[0] for row in rows} == {name for source in sources for name in NAMED.findall(source)}
    assert {flood for row in rows for flood in row[4].split(", ")} == set(SCENARIOS)


def test_numbers_and_shares_of_places_are_those_of_the_code() -> None:
    compared = 0
    for name, number, share, definition, _ in PLACES.findall(PAGE.read_text()):
        limit, own = (int(text.replace(",", "")) for text in (number, share))
        if name == "connections":
            assert (limit, own) == (
                server.MAX_CONCURRENT_REQUESTS + connections.SPARE_CONNECTIONS,
                server.MAX_CONNECTIONS_PER_CLIENT + connections.SPARE_CONNECTIONS_PER_CLIENT,
            )
            continue
        values = [value_of(one) for one in re.findall(r"`([^`]+\.[^`]+)`", definition)]
        assert values[0] == limit, name
        if len(values) == 2:
            assert values[1] == own, name
        elif "7/8" in definition:
            assert own == most_of(limit), name
        elif name == "requests":
            assert own == server.MAX_CONNECTIONS_PER_CLIENT
        else:
            assert own == limit, name
        compared += 1
    assert compared > 5
