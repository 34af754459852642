"""Engines that are attached by the engine API to real node processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv_client.engine import Engine
from tests.client.engine.engines import Attach, attach_engine
from tests.client.engine.nodes import kill, kill_all


@pytest.fixture
def attach(runtime_dir: Path) -> Iterator[Attach]:
    """Attaches engines to nodes in `runtime_dir`, which they start; closes the engines and ends the nodes."""
    made = []

    def make(**settings: Any) -> Engine:
        made.append(engine := attach_engine(runtime_dir, **settings))
        return engine

    yield make
    for engine in made:
        engine.close()
    kill_all(runtime_dir)
    for engine in made:  # a node may have been started that has no lock yet
        if (node := engine._dispatcher._client._launcher._node) and node.running:
            kill(node.pid)
