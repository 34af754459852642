"""Engines that are attached by the engine API to real node processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.engine.engines import Attach, attach_engine
from tests.client.engine.nodes import kill_all


@pytest.fixture
def attach(runtime_dir: Path) -> Iterator[Attach]:
    """Attaches engines to nodes in `runtime_dir`, which they start; closes the engines and ends the nodes."""
    made = []

    def make(**settings: object) -> object:
        made.append(engine := attach_engine(runtime_dir, **settings))
        return engine

    yield make  # type: ignore[misc]
    for engine in made:
        engine.close()
    kill_all(runtime_dir)
