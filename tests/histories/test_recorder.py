"""What the recorder writes of calls to a scripted coordinator and of an engine, and what is left of a long history."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.longrunning import operations_pb2

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.errors import ChunkNotFound, Unreachable
from lmkv.internal.v1 import lookup_service_pb2 as lookup_pb
from lmkv.internal.v1 import lookup_service_pb2_grpc as lookup_grpc
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.internal.v1 import report_service_pb2_grpc as report_grpc
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.messages import by_keys
from lmkv.tiers import HOST
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import cache_service_pb2_grpc as pb_grpc
from lmkv_server.node.node import Node
from tests.chaos.engine import PROMPTS, SPEC
from tests.chaos.relay import CoordinatorRelay
from tests.chaos.victim import mapped
from tests.histories.checker import check
from tests.histories.history import NEVER, History, Outcome, Record, dump, load
from tests.histories.minimise import minimise
from tests.histories.recorder import Recorder
from tests.histories.test_checker import (
    ILLEGAL,
    call,
    find,
    gain,
    hold,
    lookup,
    lose,
    read,
    watch,
    write,
)
from tests.server.node.engine_client import EngineClient

KEYS = [ChunkKey((3).to_bytes(8, "big") + index.to_bytes(8, "big")) for index in range(2)]


ANSWER = pb.LookupResponse(
    holders=[pb.Holder(instance_id="node-1", runs=[pb.TierRun(tier=HOST, chunk_count=2)])],
    revision=7,
    is_complete=True,
)


FOUND = {"revision": 7, "partial": False, "holders": {"node-1": ["host", "host"]}}


class NodeLookups(lookup_grpc.LookupServiceServicer):
    async def Lookup(self, request: lookup_pb.LookupRequest, context: Any) -> lookup_pb.LookupResponse:  # noqa: N802
        return lookup_pb.LookupResponse(holders=ANSWER.holders, revision=ANSWER.revision, is_complete=True)

    LookupStream: Any = None
    """The relay makes a call of each lookup."""


class Scripted(pb_grpc.CacheServiceServicer, report_grpc.ReportServiceServicer):
    """Answers as a coordinator may."""

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:  # noqa: N802
        return ANSWER

    async def LookupStream(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.LookupStreamResponse]:  # noqa: N802
        async for message in request_iterator:
            for _ in message.requests:
                yield pb.LookupStreamResponse(results=[pb.LookupResult(response=ANSWER)])

    async def Move(self, request: pb.MoveRequest, context: Any) -> operations_pb2.Operation:  # noqa: N802
        raise ChunkNotFound("none") if request.copy else Unreachable("gone")

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        change = pb.LayoutChange(instance_id="node-1", tier=HOST, admitted_keys=KEYS)
        yield pb.WatchResponse(revision=7, snapshot=True, changes=[change])
        yield pb.WatchResponse(revision=8, changes=[pb.LayoutChange(instance_id="node-1", instance_gone=True)])

    async def Report(self, request_iterator: Any, context: Any) -> AsyncIterator[report_pb.ReportResponse]:  # noqa: N802
        drop = report_pb.DropOrder(tier=HOST, chunk_keys=join_keys(KEYS))
        async for report in request_iterator:
            if report.sequence == 2:
                order = report_pb.Order(order_id="o1", operation_name="move-1", drop=drop)
                yield report_pb.ReportResponse(acked_sequence=2, revision=9, orders=[order])


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = await rpc.make_server([])
    scripted = cast(Any, Scripted)()
    pb_grpc.add_CacheServiceServicer_to_server(scripted, server)
    lookup_grpc.add_LookupServiceServicer_to_server(NodeLookups(), server)
    report_grpc.add_ReportServiceServicer_to_server(scripted, server)
    port = rpc.add_port(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "history.jsonl")


def recorded(recorder: Recorder) -> list[Record]:
    """All records, once the recorder is closed."""
    with recorder:
        pass
    return list(load(recorder.path))


def test_a_record_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    records = [
        Record(call="Move", actor="a", server="b", start=0.5, outcome=Outcome.UNKNOWN, request={"keys": ["1/0"]}),
        Record(call="Watch", actor="a", server="b", start=1.0, end=2.0, stream="watch 1", answer={"revision": 1}),
    ]
    path = tmp_path / "records"
    path.write_text("".join(dump(record) + "\n" for record in records))
    assert list(load(path)) == records


async def test_unary_calls_have_answers_refusals_or_unknown_outcomes(recorder: Recorder, address: str) -> None:
    async with recorder.client_channel(address, "coordinator-1") as channel:
        stub: Any = pb_grpc.CacheServiceStub(channel)
        await stub.Lookup(pb.LookupRequest(prompt=by_keys(KEYS)), timeout=60)
        for copy in (True, False):
            with pytest.raises(grpc.RpcError):
                await stub.Move(pb.MoveRequest(prompt=by_keys(KEYS), copy=copy))
    lookup, refused, unknown = recorded(recorder)
    assert (lookup.call, lookup.server, lookup.outcome) == ("Lookup", "coordinator-1", Outcome.OK)
    assert lookup.request == {"keys": ["3/0", "3/1"], "excluded": "", "timeout": 60}
    assert lookup.answer.items() >= FOUND.items()
    assert lookup.start <= lookup.end
    assert (refused.outcome, refused.answer["error"]) == (Outcome.FAILED, "NOT_FOUND")
    assert (unknown.outcome, unknown.end, unknown.answer["error"]) == (Outcome.UNKNOWN, NEVER, "UNAVAILABLE")


async def test_each_message_of_a_stream_is_a_record(recorder: Recorder, address: str) -> None:
    async with recorder.client_channel(address, "coordinator-1") as channel:
        stub: Any = pb_grpc.CacheServiceStub(channel)
        watched = [response.revision async for response in stub.Watch(pb.WatchRequest())]
        call = stub.LookupStream()
        await call.write(pb.LookupStreamRequest(requests=[pb.LookupRequest(prompt=by_keys(KEYS))] * 2))
        for _ in range(2):
            assert isinstance(await call.read(), pb.LookupStreamResponse)
        await call.done_writing()
        assert not isinstance(await call.read(), pb.LookupStreamResponse)
    first, second, *lookups = recorded(recorder)
    assert watched == [7, 8]
    assert first.answer["changes"] == [{"instance": "node-1", "tier": "host", "gained": ["3/0", "3/1"], "lost": []}]
    assert second.answer == {"revision": 8, "snapshot": False, "changes": [{"instance": "node-1", "gone": True}]}
    assert first.stream == second.stream
    assert [(lookup.call, lookup.answer) for lookup in lookups] == [("LookupStream", FOUND)] * 2


async def test_reports_end_with_their_acknowledgement_and_orders_with_their_outcome(
    recorder: Recorder, address: str
) -> None:
    relay = CoordinatorRelay(recorder.relay_channel(address, "coordinator-1"), lambda _, peer: peer)
    async with relay, rpc.open_channel(f"127.0.0.1:{relay.port}") as channel:
        call: Any = report_grpc.ReportServiceStub(channel).Report()  # type: ignore[call-arg]
        change = report_pb.ChunkChange(tier=HOST, admitted_keys=join_keys(KEYS))
        for sequence in (1, 2):
            await call.write(report_pb.ReportRequest(instance_id="node-1", sequence=sequence, changes=[change]))
        assert (await call.read()).acked_sequence == 2
        outcome = report_pb.OrderOutcome(order_id="o1", chunk_count=2)
        await call.write(report_pb.ReportRequest(instance_id="node-1", sequence=3, outcomes=[outcome]))
        await call.done_writing()
        assert not isinstance(await call.read(), report_pb.ReportResponse)
    records = recorded(recorder)
    reports = {record.request["sequence"]: record for record in records if record.call == "Report"}
    assert [reports[number].outcome for number in (1, 2, 3)] == [Outcome.OK, Outcome.OK, Outcome.UNKNOWN]
    assert reports[1].request["changes"] == [{"tier": "host", "gained": ["3/0", "3/1"], "lost": []}]
    (ack,) = (record for record in records if record.call == "Acknowledge")
    assert ack.answer == {"acked_sequence": 2, "revision": 9}
    (drop,) = (record for record in records if record.call == "Drop")
    assert (drop.server, drop.request["operation"], drop.answer["failed"]) == ("node-1", "move-1", [])
    assert reports[2].start <= drop.start <= reports[3].start <= drop.end


async def test_each_lookup_of_a_stream_passes_a_relay_as_a_call(recorder: Recorder, address: str) -> None:
    relay = CoordinatorRelay(recorder.relay_channel(address, "coordinator-1"), lambda _, peer: peer)
    async with relay, rpc.open_channel(f"127.0.0.1:{relay.port}") as channel:
        call: Any = lookup_grpc.LookupServiceStub(channel).LookupStream()  # type: ignore[call-arg]
        for count in (2, 1):
            request = lookup_pb.LookupRequest(chunk_keys=join_keys(KEYS))
            await call.write(lookup_pb.LookupStreamRequest(requests=[request] * count))
            assert len((await call.read()).results) == count
        await call.done_writing()
        assert not isinstance(await call.read(), lookup_pb.LookupStreamResponse)
    lookups = recorded(recorder)
    assert [(lookup.call, lookup.outcome) for lookup in lookups] == [("Lookup", Outcome.OK)] * 3
    assert all(lookup.answer.items() >= FOUND.items() for lookup in lookups)


async def test_calls_that_are_open_at_the_end_have_no_known_outcome(recorder: Recorder) -> None:
    with recorder:
        recorder.orders["o1"] = recorder.open("Drop", "node-1", {"keys": []})
        with recorder.fault("kill", "node-1"):
            pass
    drop, fault = sorted(load(recorder.path), key=lambda record: record.call)
    assert (drop.outcome, drop.end) == (Outcome.UNKNOWN, NEVER)
    assert (fault.call, fault.request) == ("Fault", {"kind": "kill"})
    late = recorder.count
    recorder.write(fault)
    assert recorder.count == late


async def test_writes_and_holds_name_their_extents(tmp_path: Path, runtime_dir: Path) -> None:
    keys = PROMPTS[0][:2]
    config = NodeConfig(
        instance_id="node-1",
        runtime_dir=str(runtime_dir),
        enable_p2p=False,
        max_local_cpu_size="8MiB",  # type: ignore[arg-type]  # what people write
    )
    path = tmp_path / "history.jsonl"
    with Recorder(path) as recorder:
        async with Node(config) as node, EngineClient(node, "engine", SPEC) as client:
            welcomed = client.welcomed
            with await mapped(welcomed.pool_socket, client.engine_id, welcomed.epoch) as attached:
                engine = recorder.engine(client, attached.pool, "node-1")
                extents = await client.reserve(len(keys))
                pairs = list(zip(keys, extents, strict=True))
                commits = [client.commit(key, one, checksum=engine.write(key, one)) for key, one in pairs]
                await client.say(commit=commits)
                for lookup_id in ("1", "2"):
                    found = await client.lookup(lookup_id, keys)
                    for key, extent in zip(keys, found.own, strict=True):
                        engine.check(key, extent)
                    await client.release(lookup_id)
                engine.close()
    history = History(load(path))
    offsets = [extent.offset for extent in extents]
    writes = list(history.of("Write"))
    assert [write.request["offset"] for write in writes] == offsets
    assert {write.request["epoch"] for write in writes} == {welcomed.epoch}
    known, unknown = history.attempts("Hold")
    assert known.request == {"id": "1", "offsets": offsets, "epoch": welcomed.epoch}
    assert (known.outcome, unknown.outcome) == (Outcome.OK, Outcome.UNKNOWN), "the node answered after one of both"
    second = list(history.of("Find"))[1]
    assert known.start < known.end <= second.start
    assert len(list(history.of("Read"))) == 2 * (len(keys) + 1)
    assert check(history) == []


def test_what_does_not_matter_is_left_out() -> None:
    chance = random.Random(7)
    noise = [write(at, f"{at}/0", f"d{at}") for at in range(10, 90)]
    noise += [read(at + 2, f"{at}/0", f"d{at}", generation=at) for at in range(10, 90)]
    records = [*noise, write(0), read(95, digest="other"), *(find(at) for at in range(30))]
    chance.shuffle(records)
    history = History(records)
    (violation,) = check(history)
    assert minimise(history, violation) == [write(0), read(95, digest="other")]


def test_a_write_into_a_held_extent_is_left_with_the_hold() -> None:
    noise = [write(at, f"{at}/0", offset=at) for at in range(10, 90)]
    noise += [hold(at + 1, at + 9, at) for at in range(10, 90)]
    history = History([*noise, hold(40, 60, 4096), write(50, "1/0", offset=4096), read(52, "1/0", offset=4096)])
    (violation,) = check(history)
    assert minimise(history, violation) == [hold(40, 60, 4096), write(50, "1/0", offset=4096)]


def test_the_changes_that_lead_to_a_state_are_kept() -> None:
    changes = [
        watch(1, 5, gain("1/0"), snapshot=True),
        watch(2, 5),
        watch(4, 6, gain("1/1", "1/2")),
        watch(5, 7, gain("3/0", instance="node-2")),
        watch(6, 8, lose("1/2")),
        watch(7, 9, lose("1/0")),
    ]
    asked = [lookup(3, 5, {"node-1": ["host"]}), lookup(8, 9, {"node-1": ["host", "host"]})]
    history = History([*changes, *asked, call("Contents", 9, 10, answer={"tiers": {}})])
    (violation,) = (one for one in check(history) if one.rule == "lookups_equal_map")
    kept = minimise(history, violation)
    assert set(map(str, kept)) <= set(map(str, history.records))
    assert {str(record) for record in violation.records} <= set(map(str, kept))
    assert str(changes[3]) not in map(str, kept)
    assert all(violation not in check(History(without(kept, record))) for record in kept)


def test_an_illegal_history_stays_illegal() -> None:
    for rule, histories in ILLEGAL.items():
        for records in histories:
            history = History(records)
            (violation,) = (one for one in check(history) if one.rule == rule)
            kept = minimise(history, violation)
            assert all(record in kept for record in violation.records)
            assert rule in [one.rule for one in check(History(kept))]


def without(records: list[Record], left_out: Record) -> list[Record]:
    return [record for record in records if record is not left_out]
