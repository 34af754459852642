"""The plug-in of vLLM: which versions of vLLM it supports, and what an engine with another one reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmkv_client.plugin import NEWEST_VLLM, OLDEST_VLLM, is_newer, version_error
from lmkv_client.startup_error import VARIABLE
from tests.promises.conftest import ROOT, pyproject

__all__ = ["pyproject"]

FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
ENGINE = """
from lmkv_client import plugin
plugin.register()
plugin.register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
KVConnectorFactory._registry["LMKVConnector"]()
"""


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1+cpu", "0.33.0", "0.34.0.dev4+g1a2b3c4", "1.0.0", "dev"])
def test_no_version_of_vllm_is_refused_for_being_new(version: str) -> None:
    assert version_error(version) is None


@pytest.mark.parametrize("version", ["0.30.2", "0.9.1"])
def test_a_version_of_vllm_that_is_too_old_is_refused_in_one_line(version: str) -> None:
    assert str(version_error(version)) == (
        f"vLLM {version} is too old for this version of lmkv, which needs vllm>=0.31: "
        "install another version of either, or remove LMKVConnector from --kv-transfer-config"
    )


@pytest.mark.parametrize(("version", "newer"), [("0.33.1", False), ("0.34.0rc1", True), ("1.0", True), ("dev", False)])
def test_versions_that_lmkv_was_not_tested_with_are_compared_with_what_it_relies_on(version: str, newer: bool) -> None:
    assert is_newer(version) == newer


def test_the_extra_and_the_page_name_the_supported_versions(pyproject: dict[str, Any]) -> None:
    oldest = ".".join(map(str, OLDEST_VLLM))
    assert pyproject["project"]["optional-dependencies"]["vllm"][0] == f"vllm>={oldest}"
    page = (ROOT / "docs/reference/compatibility.md").read_text()
    assert f"`vllm>={oldest}`" in page
    for minor in range(OLDEST_VLLM[1], NEWEST_VLLM[1] + 1):
        assert f"| 0.{minor} | yes |" in page


NEWER = """
import vllm
vllm.__version__ = "7.0.0"
from lmkv_client import plugin
plugin.register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
for hook in ("restore_kv_caches", "unregister_kv_caches"):  # since 0.33
    setattr(KVConnectorBase_V1, hook, lambda self: None)
if BREAKS:
    from vllm.v1 import kv_cache_interface
    del kv_cache_interface.MambaSpec
for _ in range(2):
    print(KVConnectorFactory._registry["LMKVConnector"]().__name__)
"""


@pytest.mark.parametrize("breaks", [False, True])
def test_a_newer_vllm_works_with_one_warning_or_is_refused_by_what_it_lacks(tmp_path: Path, breaks: bool) -> None:
    """The installed vLLM, under another version: the connector loads, or the engine ends without a traceback."""
    environment = os.environ | {VARIABLE: str(tmp_path / "error")}  # of a program that has loaded the plug-in, too
    script = NEWER.replace("BREAKS", str(breaks))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    warnings = [line for line in (done.stdout + done.stderr).splitlines() if "newer than lmkv was tested with" in line]
    if not breaks:
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-2:] == ["LMKVConnector"] * 2
        assert len(warnings) == 1
        return
    assert (done.returncode, warnings) == (1, [])
    assert "Traceback" not in done.stderr
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("lmkv: error: "))
    assert "vllm.v1.kv_cache_interface has no attribute MambaSpec" in error
    assert done.stderr.splitlines()[-1] == error


def test_an_engine_with_an_old_vllm_ends_with_the_error_and_no_traceback(tmp_path: Path) -> None:
    """vLLM is imitated only in what the plug-in uses: its version and the registry of connectors."""
    factory = tmp_path / FACTORY
    factory.parent.mkdir(parents=True)
    for folder in (factory.parent, *factory.parent.parents):
        if folder == tmp_path:
            break
        (folder / "__init__.py").touch()
    (tmp_path / "vllm/__init__.py").write_text('__version__ = "0.30.0"\n')
    factory.write_text("class KVConnectorFactory:\n    _registry = {}\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{ENGINE}"
    environment = os.environ | {VARIABLE: str(tmp_path / "error")}  # of a program that has loaded the plug-in, too
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"lmkv: error: {version_error('0.30.0')}\n"
    assert not (tmp_path / "error").exists()


PARTS = """
import multiprocessing
from lmkv.errors import ConfigError
from lmkv_client import startup_error

def work():
    startup_error.print_at_exit()
    error = ConfigError("of a worker")
    startup_error.record(error)
    raise error

if __name__ == "__main__":
    startup_error.print_at_exit()
    worker = multiprocessing.get_context("METHOD").Process(target=work)
    worker.start()
    worker.join()
    raise RuntimeError(f"the worker ended with {worker.exitcode}")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_an_error_of_a_worker_is_the_last_line_of_its_engine(tmp_path: Path, method: str) -> None:
    script = tmp_path / "engine.py"
    script.write_text(PARTS.replace("METHOD", method))
    environment = os.environ | {VARIABLE: str(tmp_path / "error")}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("lmkv: error: ")] == [
        "lmkv: error: of a worker"
    ]
    assert done.stderr.splitlines()[-1] == "lmkv: error: of a worker"
