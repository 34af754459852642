"""Which of two records of an operation counts: what nodes, who keep them, and coordinators must agree on."""

from __future__ import annotations

from lmkv.v1 import registry_service_pb2 as pb

MAX_RECORDS = 1000
MAX_RECORD_BYTES = 16 << 20
"""What one node keeps of operations, and most that a coordinator keeps of what one node reports."""


def rank(record: pb.OperationRecord) -> tuple[int, bool]:
    """Of two records of one operation the higher rank counts: the later attempt, then what is over."""
    return record.attempt, record.operation.done
