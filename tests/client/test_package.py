"""The package's root: light until something of it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lmkv_client


def test_importing_the_package_brings_in_nothing_heavy() -> None:
    heavy = ("grpc", "numpy", "google.protobuf", "rich", "yaml", "asyncio")
    program = f"import sys, lmkv_client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_what_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'lmkv_client' has no attribute 'Nothing'"):
        _ = lmkv_client.Nothing
