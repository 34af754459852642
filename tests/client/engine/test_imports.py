"""The engine API is for any engine: it brings none with it, and its log can be that of an engine."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from lmkv_client.engine.log import join_log


def test_the_api_needs_neither_an_engine_nor_torch() -> None:
    program = "import sys, lmkv_client.engine; print([name for name in ('torch', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_log_can_be_that_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("lmkv.engine")
    engines = logging.getLogger("tests.engine")
    monkeypatch.setattr(logger, "parent", logger.parent)
    monkeypatch.setattr(engines, "propagate", False)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    engines.addHandler(handler)
    engines.setLevel(logging.INFO)
    join_log(engines)
    logger.debug("too detailed")
    logger.info("attached")
    assert [record.getMessage() for record in records] == ["attached"]
