"""The plug-in of vLLM: which versions of vLLM it supports, and what an engine with another one reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmkv_client.plugin import NEXT_VLLM, OLDEST_VLLM, version_error
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


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1+cpu", "0.32.2.dev4+g1a2b3c4", "dev"])
def test_a_supported_version_of_vllm_is_accepted(version: str) -> None:
    assert version_error(version) is None


@pytest.mark.parametrize("version", ["0.30.2", "0.33.0", "0.33.0rc1", "1.0.0"])
def test_another_version_of_vllm_is_refused_in_one_line(version: str) -> None:
    error = version_error(version)
    assert str(error) == (
        f"vLLM {version} is not supported by this version of lmkv, which supports vllm>=0.31,<0.33: "
        "install another version of either, or remove LMKVConnector from --kv-transfer-config"
    )


def test_the_extra_and_the_page_name_the_supported_range(pyproject: dict[str, Any]) -> None:
    supported = f"vllm>={OLDEST_VLLM[0]}.{OLDEST_VLLM[1]},<{NEXT_VLLM[0]}.{NEXT_VLLM[1]}"
    assert pyproject["project"]["optional-dependencies"]["vllm"][0] == supported
    assert f"`{supported}`" in (ROOT / "docs/reference/compatibility.md").read_text()


def test_an_engine_with_an_unsupported_vllm_ends_with_the_error_as_its_last_line(tmp_path: Path) -> None:
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
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}  # no child of an engine
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
    assert done.stderr.splitlines()[-1] == f"lmkv: error: {version_error('0.30.0')}"
