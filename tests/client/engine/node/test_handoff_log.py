"""What the log of a prefill engine states of a handoff that has ended."""

from __future__ import annotations

import logging

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.status_pb2 import Status

from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.node.client import log_handoff

FULL = Status(code=8, message="the pool is full")


@pytest.mark.parametrize(
    ("handed", "lines"),
    [
        (
            pb.HandedChunks(chunk_count=3, transferred_bytes=1 << 20, transfer_duration=Duration(nanos=10**9 // 2)),
            ["[cmpl-7] Handoff r-1: 3 chunks at the decode node, 1.0 MiB sent, 500.0 ms, 0.00195 GiB/s"],
        ),
        (
            pb.HandedChunks(chunk_count=1),
            ["[cmpl-7] Handoff r-1: the decode node held 1 chunk before, nothing was sent"],
        ),
        (pb.HandedChunks(), []),
        (pb.HandedChunks(status=FULL), ["[cmpl-7] handoff r-1 failed: the pool is full"]),
    ],
)
def test_a_handoff_is_logged_as_it_was(
    handed: pb.HandedChunks, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    handed.handoff_id, handed.engine_request_id = "r-1", "cmpl-7"
    with caplog.at_level(logging.INFO):
        log_handoff(handed)
    assert [record.getMessage() for record in caplog.records] == lines
