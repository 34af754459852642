"""SGLang on a CPU, for all tests of a run; see `make test-sglang`."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest

SHIM = Path(__file__).parent / "shim"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}


def pytest_sessionstart() -> None:
    """Fails at once, with the fix, instead of in each test. Imports SGLang with its shims, and whatever it warns of."""
    if importlib.util.find_spec("sglang") is None:
        pytest.exit(f"SGLang is not installed beside {sys.executable}: run `make test-sglang`", returncode=2)
    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(SHIM))
    runpy.run_path(str(SHIM / "sitecustomize.py"))
    with warnings.catch_warnings(action="ignore"):
        import sglang.srt.mem_cache.pool_host.mha
        import sglang.srt.mem_cache.pool_host.mla
        import sglang.srt.mem_cache.storage.backend_factory  # noqa: F401
