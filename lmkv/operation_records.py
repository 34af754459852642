"""Order and limits of operation records, which nodes store for coordinators."""

from __future__ import annotations

from lmkv.v1 import registry_service_pb2 as pb

MAX_RECORDS = 1000
MAX_RECORD_BYTES = 16 << 20
"""Limits of the records that a node stores, and of those that a coordinator keeps of one node."""


def rank(record: pb.OperationRecord) -> tuple[int, bool]:
    """Rank among the records of one operation: the later attempt wins, then the finished one."""
    return record.attempt, record.operation.done
