"""The clock that jumps: what a process of Python reads, while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.clock import Clock, compiled

PRINT_TIME = "import time\nwhile input(): print(time.time(), time.monotonic(), flush=True)"


@pytest.mark.parametrize("seconds", [-3600.25, 0.0, 20.75])
def test_a_clock_jumps_while_its_process_runs_and_no_other_does(tmp_path: Path, seconds: float) -> None:
    library = compiled(tmp_path)
    assert library is not None, "cc is missing: install gcc"
    clock = Clock(library, tmp_path / "clock")
    command = [sys.executable, "-c", PRINT_TIME]
    pipe, environment = subprocess.PIPE, os.environ | clock.environment
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        for jump in (0.0, seconds, 0.0):
            clock.jump(jump)
            begun = time.time(), time.monotonic()
            wall, monotonic = ask(process)
            ended = time.time(), time.monotonic()
            assert begun[0] <= wall - jump <= ended[0]
            assert begun[1] <= monotonic <= ended[1]
        process.communicate("\n", timeout=60)


def ask(process: subprocess.Popen[str]) -> tuple[float, float]:
    """What time it is for a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    wall, monotonic = process.stdout.readline().split()
    return float(wall), float(monotonic)
