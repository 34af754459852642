"""`lmkv demo` as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmkv_client.demo.process import pids_with_environment


@pytest.mark.timeout(420)
def test_the_demo_takes_a_prompt_from_the_peer_and_leaves_only_what_was_asked_for(short_folder: Path) -> None:
    numbers, logs = short_folder / "numbers.json", short_folder / "logs"
    flags = ["--model-size", "tiny", "--prompt-tokens", "2000", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "lmkv", "demo", *flags, "--json", str(numbers), "--keep-logs", str(logs)],
        env=os.environ | {"TMPDIR": str(short_folder)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(numbers.read_text())
    assert said["identical"] is True
    assert said["prompt_tokens"] == 2000
    assert said["peer_tokens"] == said["own_tokens"] == 2000
    assert said["peer_gib_per_s"] > 0
    assert min(said["cold_ttft_ms"], said["peer_ttft_ms"], said["own_ttft_ms"]) > 0
    assert "from peer" in done.stdout
    assert {file.name for file in logs.iterdir()} >= {"coordinator.log", "engine-1.log", "engine-2.log"}
    assert {file.name for file in short_folder.iterdir()} == {"numbers.json", "logs"}
    assert pids_with_environment({"TMPDIR": str(short_folder)}, "node") == []
