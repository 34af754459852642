"""Every key of the configuration does something."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig, ProxyConfig, keys
from lmkv.config.schema import Config


@pytest.fixture(scope="module")
def read() -> set[str]:
    """Names of all attributes that our code reads."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("lmkv", "client/lmkv_client", "server") for file in (root / folder).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("process", [ConnectorConfig, CoordinatorConfig, NodeConfig, ProxyConfig])
def test_every_key_is_read_by_somebody(process: type[Config], read: set[str]) -> None:
    assert "no_such_key" not in read
    assert [key for key in keys(process) if key not in read] == []
