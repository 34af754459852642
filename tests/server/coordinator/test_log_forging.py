"""Names that callers choose cannot forge or fill the log of a coordinator's process, in either format."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest

from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.v1 import registry_service_pb2 as pb
from tests.support.node_stub import NodeStub, registration
from tests.support.specs import LLAMA

FORGED = "\n2026-01-01 00:00:00,000 CRITICAL instance b is gone\x1b[2J\u2028\u202e"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} lmkv coordinator (INFO|WARNING|ERROR) \S.*")


@contextmanager
def coordinator(log_format: str) -> Iterator[tuple[str, list[str]]]:
    """A coordinator's process: its address, and once it is left all lines that it logged."""
    command = [sys.executable, "-m", "lmkv", "coordinator", "--port", "0", "--http-port", "off"]
    lines: list[str] = []
    command += ["--log-format", log_format]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                lines.append(line.decode())
                if found := re.search(rb"Ready on ([\d.:]+)", line):
                    yield found[1].decode(), lines
                    break
        finally:
            process.send_signal(signal.SIGTERM)
            lines += process.stderr.read().decode().split("\n")
    assert process.returncode == 0, lines


def attack(address: str) -> None:
    """Every RPC whose name or id is logged, with text that would be a record of its own."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = NodeStub(channel)
        spec = LLAMA.to_proto()
        spec.model_name = f"m{FORGED}"
        good = pb.Instance(instance_id="a", epoch=1, peer_address="127.0.0.1:1", specs=[spec], version=f"1{FORGED}")
        for instance in (good, pb.Instance(instance_id=f"a{FORGED}", epoch=1), pb.Instance(instance_id="x" * 900_000)):
            with suppress(grpc.RpcError):
                stub.Register(registration(instance), timeout=60)
        for instance_id in (f"a{FORGED}", "x" * 900_000):
            with suppress(grpc.RpcError):
                list(
                    stub.Report(
                        iter([report_pb.ReportRequest(instance_id=instance_id, epoch=1, sequence=1)]), timeout=60
                    )
                )
            with suppress(grpc.RpcError):
                stub.Deregister(pb.DeregisterRequest(instance_id=instance_id, epoch=1), timeout=60)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_each_line_is_a_record_of_the_process(log_format: str) -> None:
    with coordinator(log_format) as (address, lines):
        attack(address)
    lines = [line.removesuffix("\n") for line in lines if line]
    assert any("instance b is gone" in line for line in lines), "some of it was logged"
    for line in lines:
        assert line.isprintable()
        assert len(line) < 20_000
        if log_format == "json":
            assert json.loads(line)["level"] in ("info", "warning", "error")
        else:
            assert RECORD.fullmatch(line), line
