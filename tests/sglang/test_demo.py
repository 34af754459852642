"""`lmkv demo` with engines of two kinds: vLLM of the environment below this one, and SGLang of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lmkv_client.demo.process import pids_with_environment
from tests.sglang.engine import SHIM
from tests.sglang.test_across_engines import VLLM_PYTHON

MARK = "TEST_OF_DEMO"
PROMPT_TOKENS = 1000
HIT_TOKENS = 896
"""Seven pages of 128 tokens."""
DEMO_SECONDS = 560.0


def test_sglang_loads_what_vllm_has_computed(tmp_path: Path) -> None:
    numbers, logs = tmp_path / "numbers.json", tmp_path / "logs"
    flags = ["--engines", "vllm,sglang", "--sglang-python", sys.executable, "--model-size", "tiny", "--rounds", "1"]
    files = ["--json", str(numbers), "--keep-logs", str(logs)]
    path = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    demo = subprocess.run(
        [str(VLLM_PYTHON), "-m", "lmkv", "demo", *flags, *files, "--prompt-tokens", str(PROMPT_TOKENS)],
        env=os.environ | {"PYTHONPATH": path, MARK: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    measured = json.loads(numbers.read_text())
    assert (measured["engines"], measured["identical"]) == (["vLLM", "SGLang"], True)
    assert (measured["peer_tokens"], measured["own_tokens"]) == (HIT_TOKENS, HIT_TOKENS)
    assert "engine 2, SGLang, loads it" in demo.stdout
    assert {file.name for file in logs.iterdir()} >= {"coordinator.log", "engine-1.log", "engine-2.log"}
    assert pids_with_environment({MARK: str(tmp_path)}, "node") == []
