"""Measures LMCache's controller with the fleet and the lookups of the coordinator's measurement."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.coordinator.layouts import INSTANCE_COUNT
from benchmarks.coordinator.lookups import CHUNK_COUNT
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row, compare
from benchmarks.systems.pairs import ROOT, answers
from lmkv.errors import LmkvError
from lmkv_client.demo.process import ServerProcess, free_port

SECONDS = 300.0
COUNTERPARTS = {
    "report_ingest_per_s": ("changes/s", "report_ingest_per_s"),
    "map_bytes_per_pair": ("bytes", "map_bytes_per_pair"),
    "lookup_p50_ms": ("ms", "lookup_stream_p50_ms"),
    "lookup_p99_ms": ("ms", "lookup_stream_p99_ms"),
    "http_lookup_131072_ms": ("ms", "http_lookup_131072_ms"),
}
"""Unit of what LMCache's controller is measured by, and lmkv's row that it is compared with."""


def measure(run: BenchmarkRun, python: Path) -> None:
    """Adds rows for the controller in the environment of `python`."""
    http, pull, reply, heartbeat = (free_port() for _ in range(4))
    monitor_ports = json.dumps({"pull": pull, "reply": reply, "heartbeat": heartbeat})
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "LMCACHE_DISABLE_BANNER": "1"}
    controller = ServerProcess(
        "lmcache-controller",
        [
            str(python.parent / "lmcache_controller"),
            *("--host", "127.0.0.1", "--port", str(http), "--monitor-ports", monitor_ports),
        ],
        run.logs / "lmcache-controller.log",
        environment | {"LMCACHE_LOG_LEVEL": "WARNING"},
    )
    with controller:
        controller.start()
        controller.wait_until(lambda: answers(f"http://127.0.0.1:{http}/controller/key-stats"), "ready", 60.0)
        numbers = {
            "pull": pull,
            "reply": reply,
            "http": http,
            "pid": controller.pid,
            "instances": INSTANCE_COUNT,
            "chunks": CHUNK_COUNT,
            "rounds": 200 if run.quick else 2000,
        }
        flags = [part for name, number in numbers.items() for part in (f"--{name}", str(number))]
        done = subprocess.run(
            [str(python), "-m", "benchmarks.systems.lmcache_controller", *flags],
            env=dict(os.environ) | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    if done.returncode:
        raise LmkvError(f"LMCache's controller could not be measured: {done.stderr.strip().splitlines()[-1]}")
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    for what, (unit, counterpart) in COUNTERPARTS.items():
        run.add(_row(run, f"lmcache_{what}", measured[what], unit, counterpart))


def _row(run: BenchmarkRun, name: str, value: float, unit: str, counterpart: str) -> Row:
    own = next((row.value for row in run.report.rows if row.name == counterpart), None)
    return Row(name=name, value=value, unit=unit) if own is None else compare(name, value, unit, "lmkv", own)
