"""What an operation did not do, and why: chunks that failed alike are told together."""

from __future__ import annotations

from typing import TypeAlias

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.rpc import status_pb2

from lmkv.v1 import chunk_pb2

Failures: TypeAlias = "RepeatedCompositeFieldContainer[chunk_pb2.ChunkFailure]"


def add_failure(failures: Failures, chunk_keys: bytes, status: status_pb2.Status) -> None:
    """Adds to the failures of an operation, chunks that failed alike together."""
    for known in failures:
        if known.status == status:
            known.chunk_keys += chunk_keys
            return
    if chunk_keys:
        failures.add(chunk_keys=chunk_keys, status=status)
