from __future__ import annotations

from lmkv.misses import MissReason, reason_from_proto, reason_to_proto
from lmkv.v1 import chunk_pb2


def test_every_reason_is_one_of_the_proto_and_back() -> None:
    names = {name.removeprefix("MISS_REASON_").lower() for name, _ in chunk_pb2.MissReason.items()}
    assert {reason.value for reason in MissReason} == names - {"unspecified"}
    assert [reason_from_proto(reason_to_proto(reason)) for reason in MissReason] == list(MissReason)
    assert reason_from_proto(0) is None
    assert reason_from_proto(255) is None
