"""The Python of docs/guides/transformers.md, and of README, runs as it stands there."""

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


@pytest.fixture
def run(
    model_folder: Callable[[str], Path], config: ConnectorConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], None]:
    """Runs blocks one after the other with a model in the place of `MODEL`."""
    for name, value in to_environment(config).items():
        monkeypatch.setenv(name, value)

    def run_blocks(blocks: list[str]) -> None:
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            for block in blocks:
                exec(compile(block.replace("MODEL", str(model_folder("llama"))), "page", "exec"), names)
        finally:
            if "cache" in names:  # else it would start another node when this one ends
                names["cache"].close()

    return run_blocks


def test_the_python_of_the_guide_runs(run: Callable[[list[str]], None]) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "guides" / "transformers.md").read_text())
    assert len(blocks) == 3
    run(blocks)


def test_the_second_call_of_the_readme_loads_the_prompt(
    run: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run(BLOCK.findall((ROOT / "README.md").read_text()))
    first, second = (int(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert first == 0
    assert second > 100
