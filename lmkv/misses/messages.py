"""Reasons of misses as values of the protos' enum, and back; spans of prompts in words."""

from __future__ import annotations

from collections.abc import Iterable

from lmkv.misses.reason import MissReason
from lmkv.v1 import chunk_pb2


def reason_to_proto(reason: MissReason) -> chunk_pb2.MissReason.ValueType:
    """The value of the proto's enum."""
    return chunk_pb2.MissReason.Value(f"MISS_REASON_{reason.name}")


def reason_from_proto(number: int) -> MissReason | None:
    """The reason of a proto's value; None if it is unset, or newer than this version."""
    return _BY_NUMBER.get(number)


def describe(spans: Iterable[chunk_pb2.PromptSpan]) -> str:
    """The spans for a log: `256 own, 512 evicted_by_store`."""
    return ", ".join(f"{span.token_count} {reason_name(span.reason) or span.tier}" for span in spans)


def reason_name(number: int) -> str:
    """The reason in words; its number, if it is newer than this version, and empty if it is unset."""
    reason = _BY_NUMBER.get(number)
    return reason.value if reason else str(number) if number else ""


_BY_NUMBER = {int(reason_to_proto(reason)): reason for reason in MissReason}
