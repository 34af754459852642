"""KVCR as a rival: its hint is vLLM's `kv_hints`, and a run without it says why. One test needs `pip install kvcr`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.systems.kvcr import KvcrPair, kvcr_problem
from lmkv_client.demo.engine import EngineProcess

ADDRESS = "tcp://127.0.0.1:17771"


@pytest.fixture
def hints(tmp_path: Path) -> Any:
    """The hints of a request to the second engine, as sent."""
    engines = [EngineProcess(tmp_path / "model", tmp_path, name=name) for name in ("first", "second")]
    extra: Any = KvcrPair(first=engines[0], second=engines[1], address=ADDRESS).hint()
    return extra["kv_transfer_params"]["kv_hints"]


def test_its_hint_is_an_envelope_of_vllm(hints: Any) -> None:
    envelope = pytest.importorskip("vllm.v1.kv_hints").KvHintsEnvelope
    (action,) = msgspec.convert(hints, envelope).actions
    assert (action.action_type, action.payload["source_control_endpoint"]) == ("kv.fetch", ADDRESS)


def test_kvcr_reads_its_hint(hints: Any) -> None:
    parser = pytest.importorskip("kvcr.hint_parser", reason="kvcr is not installed")
    assert parser._KVFetchHint.from_hint(hints).source_endpoint == ADDRESS


def test_it_says_why_it_cannot_be_measured(tmp_path: Path) -> None:
    assert "was not given" in str(kvcr_problem(None))
    assert "there is no python" in str(kvcr_problem(tmp_path / "python"))
    python = tmp_path / "empty"
    python.symlink_to("/bin/false")
    assert "does not have it" in str(kvcr_problem(python))
