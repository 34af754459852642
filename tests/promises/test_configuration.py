"""Every key of the configuration does something, and pages that name its default name the right one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig, WebhookConfig, keys
from lmkv.config.schema import Config

PROCESSES = (ConnectorConfig, CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig, WebhookConfig)
VARIABLE = re.compile(r'"(LMKV_[A-Z0-9_]+)"')
TIME = re.compile(r"`(\w+)`(?:, | \(| \| )(\d+(?:\.\d+)?) (ms|s)\b")
"""`coordinator_timeout` (50 ms), or `load_timeout`, 1 s, or in two cells of a table."""


@pytest.fixture(scope="module")
def read() -> set[str]:
    """Names of all attributes that our code reads."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("lmkv", "client/lmkv_client", "server") for file in (root / folder).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("process", PROCESSES)
def test_every_key_is_read(process: type[Config], read: set[str]) -> None:
    assert "no_such_key" not in read
    assert [key for key in keys(process) if key not in read] == []


def test_every_variable_that_engines_are_started_with_is_a_key(root: Path) -> None:
    """Where only benchmarks, engines or Ray would find out: a process refuses one that it does not know."""
    folders = ("client/lmkv_client", "benchmarks", "tests/engines", "tests/ray", "tests/sglang")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    named = {name for file in files for name in VARIABLE.findall(file.read_text())}
    assert len(named) > 20
    known = {f"LMKV_{key.upper()}" for process in PROCESSES for key in keys(process)}
    assert named - known == {"LMKV_CONFIG_FILE"}


def test_times_that_pages_give_for_a_key_are_its_default(root: Path) -> None:
    found = [
        (page.name, key, float(number) / (1000 if unit == "ms" else 1))
        for page in (root / "docs").rglob("*.md")
        for key, number, unit in TIME.findall(page.read_text())
    ]
    assert len(found) > 12
    defaults = {key: getattr(process(), key) for process in PROCESSES for key in keys(process)}
    assert [(page, key, seconds) for page, key, seconds in found if defaults.get(key, seconds) != seconds] == []
