"""Order, quorums and limits of operation records, which nodes store for coordinators."""

from __future__ import annotations

from lmkv.v1 import registry_service_pb2 as pb

MAX_RECORDS = 1000
MAX_RECORD_BYTES = 16 << 20
"""Limits of the records that a node stores, and of those that a coordinator keeps of one node."""

MAX_HOLDERS = 3
"""Instances that decide the end of one operation: it survives the loss of one of three."""


def rank(record: pb.OperationRecord) -> tuple[bool, int, str]:
    """Rank among the records of one operation: one that has ended wins, then the later attempt."""
    return record.operation.done, record.attempt, record.coordinator_id


def end_rank(end: pb.ProposedEnd) -> tuple[int, str]:
    """Rank among the proposed ends of one operation: the one of the later attempt wins."""
    return end.attempt, end.coordinator_id


def begin_quorum(holder_count: int) -> int:
    """Holders that must keep the record of a later attempt before it begins: each set of them shares a holder with
    each set of `end_quorum` ones, so that the attempt learns of an end that was accepted before."""
    return holder_count // 2 + 1


def end_quorum(holder_count: int) -> int:
    """Holders that must keep a proposed end before it is the end: at least half."""
    return holder_count - holder_count // 2
