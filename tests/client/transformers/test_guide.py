"""The Python of docs/guides/transformers.md runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmkv.config import ConnectorConfig
from lmkv.config.resolve import to_environment

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_python_of_the_guide_runs(
    model_folder: Callable[[str], Path], config: ConnectorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in to_environment(config).items():
        monkeypatch.setenv(name, value)
    blocks = BLOCK.findall((ROOT / "docs" / "guides" / "transformers.md").read_text())
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks:
            exec(compile(block.replace("MODEL", str(model_folder("llama"))), "transformers.md", "exec"), names)
    finally:
        if "cache" in names:  # else it would start another node when this one ends
            names["cache"].close()
