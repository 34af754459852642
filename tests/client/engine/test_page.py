"""docs/reference/engine.md is right: its program runs, and it names every call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lmkv_client.engine
from lmkv_client.engine import Copier, Engine, EngineCounters, Held
from tests.client.engine.engines import Attach

PAGE = Path(__file__).parents[3] / "docs/reference/engine.md"


def test_the_program_stores_its_chunks_once(attach: Attach, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, value in {"RUNTIME_DIR": str(runtime_dir), "INSTANCE_ID": "n", "NODE_LINGER": "10"}.items():
        monkeypatch.setenv(f"LMKV_{name}", value)
    counters = []
    for _ in range(2):
        scope: dict[str, Any] = {}
        exec(program, scope)  # our own
        counters.append(scope["engine"].counters)
    assert [(one.committed_chunks, one.loaded_chunks) for one in counters] == [(3, 0), (0, 3)]


def test_every_call_and_class_is_on_the_page() -> None:
    page = PAGE.read_text()
    for name in lmkv_client.engine.__all__:
        assert f"`{name}`" in page
    for made in (Engine, Held, Copier):
        for name in vars(made):
            assert name.startswith("_") or name in page, f"{made.__name__}.{name}"
    counters = set(re.findall(r"`(\w+)`", page)) & set(EngineCounters.__dataclass_fields__)
    assert len(counters) > 5
