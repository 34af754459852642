"""The acts of one message: each field has a handler, and they are carried out in the order that the proto promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from lmkv.attach_order import ATTACH_ORDER
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import RequestReport
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.engines.stream import EngineStream
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack
from tests.server.node.cases import small_spec


def make_stream() -> EngineStream:
    tier = HostTier(1 << 20)
    stack = cast(TierStack, SimpleNamespace(drop_handoff=lambda _: None))
    hints = cast(HintExecutor, None)
    return EngineStream(tier, EngineSessions(tier).attach("engine", small_spec()), stack, hints, LookupCounters())


def test_every_field_of_a_message_is_carried_out_in_the_order_of_its_number() -> None:
    fields = sorted(pb.AttachRequest.DESCRIPTOR.fields, key=lambda field: field.number)
    assert [field.name for field in fields] == ["hello", *ATTACH_ORDER]
    stream = make_stream()
    done: list[str] = []
    assert list(stream._handlers) == list(ATTACH_ORDER), "a field has no handler, or they are not in order"
    stream._handlers = {name: lambda _, name=name: done.append(name) for name in ATTACH_ORDER}  # type: ignore[misc]
    stream.act(
        pb.AttachRequest(
            optional_partial_reserves=[1],
            partial_reserves=[1],
            reports=[RequestReport()],
            weight_version="1",
            hints=[pb.HintChunks()],
            part_reserve_counts=[1],
            reset=True,
            dropped_handoffs=[pb.DropHandoff()],
            ended_handoffs=["a"],
            handoffs=[pb.HandChunks()],
            reserve_count=1,
            loads=[pb.LoadChunks()],
            lookups=[pb.LookupChunks()],
            returned_credits=[0],
            damaged_keys=[bytes(16)],
            commits=[pb.CommitChunk()],
            releases=[pb.ReleaseChunks()],
            served_models=[{"name": "m"}],  # type: ignore[list-item]
        )
    )
    assert done == list(ATTACH_ORDER)
