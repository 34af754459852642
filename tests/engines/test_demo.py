"""`lmkv demo` with its real engines and nodes, but for their start: engines and coordinator are forked."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from lmkv.cli import main
from lmkv_client.demo.process import pids_with_environment

MARK = "TEST_OF_DEMO"


@pytest.mark.timeout(900)
def test_the_demo_takes_a_prompt_from_the_peer_and_leaves_only_what_was_asked_for(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(MARK, str(short_folder))
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    numbers, logs = short_folder / "numbers.json", short_folder / "logs"
    flags = ["--model-size", "tiny", "--prompt-tokens", "2000", "--rounds", "1"]
    status = main(["demo", *flags, "--json", str(numbers), "--keep-logs", str(logs)])
    shown = capsys.readouterr().out
    assert status == 0, shown
    measured = json.loads(numbers.read_text())
    assert measured["identical"] is True
    assert measured["prompt_tokens"] == 2000
    assert (measured["peer_tokens"], measured["own_tokens"]) == (2000, 1999), "a load in the step computes the last one"
    assert measured["peer_gib_per_s"] > 0
    assert min(measured["cold_ttft_ms"], measured["peer_ttft_ms"], measured["own_ttft_ms"]) > 0
    assert "from peer" in shown
    assert {file.name for file in logs.iterdir()} >= {"coordinator.log", "engine-1.log", "engine-2.log"}
    assert {file.name for file in short_folder.iterdir()} == {"numbers.json", "logs"}
    assert pids_with_environment({MARK: str(short_folder)}, "node") == []
