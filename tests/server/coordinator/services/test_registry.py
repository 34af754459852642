"""`RegistryService` over a socket: joining, reporting, leaving, and every error that its page promises."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from lmkv import __version__, rpc
from lmkv.errors import LmkvError
from lmkv.internal import PROTOCOL_VERSION
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest, TierDigest
from lmkv.keys import KEY_BYTES, MAX_KEYS, split_keys
from lmkv.rpc.error_status import from_rpc_error
from lmkv.rpc.messages import by_keys
from lmkv.spec import MAX_PARTS, KvSpec
from lmkv.tiers import HOST
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.registry_service_pb2 import (
    DeregisterRequest,
    Instance,
    InstanceStats,
    ListInstancesRequest,
    ListInstancesResponse,
    PeerTraffic,
    RegisterRequest,
    RegisterResponse,
    TierUsage,
)
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.core import instances
from lmkv_server.coordinator.core.instances import MAX_JOINING_OF_TENANT
from lmkv_server.coordinator.core.models import (
    InstanceInfo,
    ReportedPin,
    ReportedStats,
    ReportedTier,
    ReportedTraffic,
)
from lmkv_server.coordinator.services.registry import (
    MAX_ID_BYTES,
    reported_pins,
    reported_stats,
    set_state,
    stats_message,
)
from tests.server.coordinator.cases import CHUNKS
from tests.server.coordinator.scripted_instance import Make
from tests.support.node_stub import NodeStub, registration
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS, eventually, until

CLOCK_SECONDS = 1.0
"""How far two readings of the clocks may be apart."""
KEY = b"sixteen bytes id"
HELD = [ChunkChange(tier=HOST, fingerprint=LLAMA.fingerprint, admitted_keys=KEY)]


async def register(
    registry: Any, instance_id: str = "a", epoch: int = 1, port: int = 7000, *specs: KvSpec, **fields: Any
) -> RegisterResponse:
    instance = Instance(
        instance_id=instance_id,
        epoch=epoch,
        peer_address=f"127.0.0.1:{port}",
        specs=[spec.to_proto() for spec in specs],
        **fields,
    )
    response: RegisterResponse = await registry.Register(registration(instance), timeout=WAIT_SECONDS)
    return response


def report(sequence: int = 1, *, epoch: int = 1, **fields: Any) -> ReportRequest:
    said: dict[str, Any] = {"instance_id": "a", "epoch": epoch, "sequence": sequence}
    if sequence == 1:
        said |= {"snapshot": True, "snapshot_end": True}
    return ReportRequest(**(said | fields))


async def listed(registry: Any, **fields: Any) -> ListInstancesResponse:
    response: ListInstancesResponse = await registry.ListInstances(ListInstancesRequest(**fields), timeout=WAIT_SECONDS)
    return response


async def refusal(call: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(call, WAIT_SECONDS)
    return from_rpc_error(caught.value)


async def refused_report(registry: Any, *reports: ReportRequest) -> LmkvError:
    """The error that the last of some reports gets; those before it must be acknowledged."""
    stream = registry.Report(timeout=WAIT_SECONDS)
    for sent in reports[:-1]:
        await stream.write(sent)
        await stream.read()
    await stream.write(reports[-1])
    return await refusal(stream.read())


async def is_held(cache: Any) -> bool:
    response = await cache.Lookup(LookupRequest(prompt=by_keys(split_keys(KEY))), timeout=WAIT_SECONDS)
    return bool(response.holders)


async def test_registering_returns_the_instance_and_its_lease(registry: Any) -> None:
    before = time.time()
    response = await register(registry, "a", 1, 7000, LLAMA, version="0.1.0", engine_count=2)
    assert response.lease_ttl.ToNanoseconds() == 30_000_000_000
    instance = response.instance
    assert (instance.instance_id, instance.epoch, instance.peer_address) == ("a", 1, "127.0.0.1:7000")
    assert (instance.version, instance.engine_count, instance.synced) == ("0.1.0", 2, False)
    assert [spec.fingerprint for spec in instance.specs] == [LLAMA.fingerprint]
    assert before - CLOCK_SECONDS <= instance.register_time.ToNanoseconds() / 1e9 <= time.time() + CLOCK_SECONDS
    lease = instance.expire_time.ToNanoseconds() - instance.register_time.ToNanoseconds()
    assert lease == pytest.approx(30e9, abs=1e8)


def spec_of_parts(count: int) -> chunk_pb2.KvSpec:
    """A spec of as many parts."""
    spec = LLAMA.to_proto()
    spec.more_parts.extend(chunk_pb2.KvPart() for _ in range(count - 1))
    return spec


@pytest.mark.parametrize(
    "instance",
    [
        Instance(epoch=1, peer_address="host:1"),
        Instance(instance_id="x" * (MAX_ID_BYTES + 1), epoch=1, peer_address="host:1"),
        Instance(instance_id="a", peer_address="host:1"),
        Instance(instance_id="a", epoch=-1, peer_address="host:1"),
        *(Instance(instance_id="a", epoch=1, peer_address=bad) for bad in (":", "host", ":1", "host:0", "host:x1")),
        Instance(instance_id="a", epoch=1, peer_address="host:65536"),
        Instance(instance_id="two\nlines", epoch=1, peer_address="host:1"),
        Instance(instance_id="a", epoch=1, peer_address="two\nlines:1"),
        Instance(instance_id="a", epoch=1, peer_address="host:" + 5000 * "1"),
        Instance(instance_id="a", epoch=1, peer_address="host:1", specs=[spec_of_parts(MAX_PARTS + 1)]),
    ],
)
async def test_a_bad_instance_is_refused(registry: Any, instance: Instance) -> None:
    error = await refusal(registry.Register(registration(instance), timeout=WAIT_SECONDS))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "BAD_INSTANCE")
    assert not (await listed(registry)).instances


async def test_a_spec_that_lies_is_refused(registry: Any) -> None:
    spec = LLAMA.to_proto()
    spec.kv_dtype = "float32"
    instance = Instance(instance_id="a", epoch=1, peer_address="host:1", specs=[spec])
    error = await refusal(registry.Register(registration(instance), timeout=WAIT_SECONDS))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "BAD_KV_SPEC")


@pytest.mark.parametrize(
    ("version", "protocol_version", "said"),
    [
        ("", 0, "lmkv of an unknown version (protocol 0)"),
        ("0.0.9", 0, "lmkv 0.0.9 (protocol 0)"),  # from before there was a number
        ("7.1.0", PROTOCOL_VERSION + 1, f"lmkv 7.1.0 (protocol {PROTOCOL_VERSION + 1})"),
        ("1\nready", -1, r"lmkv 1\nready (protocol -1)"),
    ],
)
async def test_a_node_of_another_version_is_refused_in_one_sentence(
    registry: Any, caplog: pytest.LogCaptureFixture, version: str, protocol_version: int, said: str
) -> None:
    instance = Instance(instance_id="a", version=version)  # other fields are not read: they may mean something else
    request = RegisterRequest(instance=instance, protocol_version=protocol_version)
    for _ in range(20):
        error = await refusal(registry.Register(request, timeout=WAIT_SECONDS))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "VERSION_MISMATCH")
    assert str(error) == (
        f"the node runs {said}, the coordinator runs lmkv {__version__} (protocol {PROTOCOL_VERSION}); the node shares "
        "nothing until both run the same version: upgrade coordinators and nodes together"
    )
    assert not (await listed(registry)).instances
    lines = [record.getMessage() for record in caplog.records if "refused instance a" in record.getMessage()]
    assert lines[0] == f"refused instance a: {error}"
    assert len(lines) < 20, "the lines are limited"
    answer = await register(registry)
    assert (answer.protocol_version, answer.version) == (PROTOCOL_VERSION, __version__)


async def test_an_id_in_use_is_refused_and_the_error_says_where(registry: Any) -> None:
    await register(registry)
    stream = registry.Report()
    await stream.write(report())
    await stream.read()
    error = await refusal(register(registry, "a", 2, 8000))
    assert (error.code, error.reason) == ("ALREADY_EXISTS", "INSTANCE_ID_IN_USE")
    assert error.metadata["peer_address"] == "127.0.0.1:7000"
    stream.cancel()
    async with asyncio.timeout(WAIT_SECONDS):
        while True:  # until the coordinator sees that the stream is gone
            try:
                await register(registry, "a", 2, 8000)
                break
            except grpc.RpcError:
                await asyncio.sleep(0.01)


async def test_a_stale_epoch_is_refused_everywhere(registry: Any) -> None:
    await register(registry, "a", 2)
    for call in (
        register(registry, "a", 1),
        registry.Deregister(DeregisterRequest(instance_id="a", epoch=1), timeout=WAIT_SECONDS),
    ):
        error = await refusal(call)
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "STALE_EPOCH")
    error = await refused_report(registry, report(epoch=1))
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "STALE_EPOCH")


async def test_conflicts_are_reported_on_both_sides(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    response = await register(registry, "b", 1, 8000, dataclasses.replace(LLAMA, kv_dtype="float32"))
    (conflict,) = response.instance.conflicts
    assert (conflict.instance_id, conflict.model_name, conflict.field) == ("a", "llama", "kv_dtype")
    assert (conflict.own_value, conflict.other_value) == ("float32", "bfloat16")
    (a, b) = (await listed(registry)).instances
    assert (a.conflicts[0].instance_id, a.conflicts[0].own_value) == ("b", "bfloat16")
    assert b.conflicts[0] == conflict
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "instances a and b cannot share chunks of model llama: kv_dtype is bfloat16 there, float32 here"


async def test_reports_are_acknowledged_and_their_chunks_are_found(registry: Any, cache: Any) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    stream = registry.Report()
    await stream.write(report(changes=HELD))
    first = await stream.read()
    assert first.acked_sequence == 1
    assert await is_held(cache)
    # Changes have no answer of their own: it arrives with the next report.
    await stream.write(report(2, changes=[ChunkChange(tier=HOST, evicted_keys=KEY)]))
    await stream.write(report(3))
    second = await stream.read()
    assert second.acked_sequence == 3
    assert second.revision > first.revision
    assert not await is_held(cache)
    changes = [ChunkChange(tier=HOST, admitted_keys=KEY)]
    await stream.write(report(4, changes=changes, stats=InstanceStats(asked_chunks=1)))
    assert (await stream.read()).acked_sequence == 4


@pytest.mark.parametrize("lease_ttl", [3.0])
async def test_heartbeats_keep_an_instance_alive(registry: Any, cache: Any) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    stream = registry.Report()
    await stream.write(report(changes=HELD))
    began, sequence = time.monotonic(), 1
    while time.monotonic() - began < 4.0:  # longer than the lease
        await asyncio.sleep(0.1)
        sequence += 1
        await stream.write(report(sequence))
        assert (await stream.read()).acked_sequence == sequence - 1
    assert await is_held(cache)


@pytest.mark.parametrize("lease_ttl", [2.0])
async def test_a_silent_instance_expires_though_its_stream_is_open(registry: Any, cache: Any) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    stream = registry.Report()
    await stream.write(report(changes=HELD))
    await stream.read()
    await eventually(partial(is_held, cache), expected=False)
    assert not (await listed(registry)).instances
    await stream.write(report(2))
    error = await refusal(stream.read())
    assert (error.code, error.reason) == ("NOT_FOUND", "INSTANCE_NOT_FOUND")


@pytest.mark.parametrize("lease_ttl", [2.0])
async def test_a_cut_connection_expires_within_its_lease(coordinator: Coordinator, registry: Any, cache: Any) -> None:
    async with rpc.open_channel(coordinator.address) as doomed:
        stub = NodeStub(doomed)
        await register(stub, "a", 1, 7000, LLAMA)
        stream = stub.Report()
        last_report = time.monotonic()
        await stream.write(report(changes=HELD))
        await stream.read()
    await eventually(partial(is_held, cache), expected=False)
    assert time.monotonic() - last_report >= 1.9, "not with the connection but with the lease"


async def test_reports_of_the_unregistered_are_refused(registry: Any) -> None:
    for instance_id in ("a", 100_000 * "a"):
        error = await refused_report(registry, report(instance_id=instance_id))
        assert (error.code, error.reason) == ("NOT_FOUND", "INSTANCE_NOT_FOUND")


@pytest.mark.parametrize(
    "reports",
    [
        [report(2)],
        [report(1), report(3)],
        [report(1, snapshot=False, snapshot_end=False)],
        [report(1), report(2, snapshot=True)],
        [report(1), report(2, digests=[TierDigest(tier=HOST, chunk_count=1, key_sum=1)])],
    ],
    ids=["late start", "gap", "no snapshot", "second snapshot", "drift"],
)
async def test_a_lost_report_requires_a_resync(registry: Any, reports: list[ReportRequest]) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    error = await refused_report(registry, *reports)
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "RESYNC_REQUIRED")
    stream = registry.Report(timeout=WAIT_SECONDS)
    await stream.write(report())
    assert (await stream.read()).acked_sequence == 1


async def test_a_broken_key_list_is_refused_and_the_server_keeps_serving(registry: Any) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    bad = ChunkChange(tier=HOST, admitted_keys=b"short")
    error = await refused_report(registry, report(changes=[bad]))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "BAD_CHUNK_KEY")
    stream = registry.Report(timeout=WAIT_SECONDS)
    await stream.write(report())
    assert (await stream.read()).acked_sequence == 1


async def test_an_oversized_report_ends_its_stream_only(registry: Any, boundless: grpc.aio.Channel) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    bad = ChunkChange(tier=HOST, admitted_keys=bytes(KEY_BYTES * (MAX_KEYS + 1)))
    stub = NodeStub(boundless)
    stream = stub.Report(timeout=WAIT_SECONDS)
    await stream.write(report(changes=[bad]))
    with pytest.raises(grpc.RpcError) as caught:
        await stream.read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [instance.instance_id for instance in (await listed(registry)).instances] == ["a"]


async def test_a_second_stream_supersedes_the_first(registry: Any, cache: Any) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    first, second = registry.Report(timeout=WAIT_SECONDS), registry.Report(timeout=WAIT_SECONDS)
    await first.write(report())
    await first.read()
    await second.write(report(changes=HELD))
    await second.read()
    await first.write(report(2))
    assert (await refusal(first.read())).reason == "RESYNC_REQUIRED"
    assert await is_held(cache)


async def test_leaving_forgets_everything_at_once(registry: Any, cache: Any) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    stream = registry.Report()
    await stream.write(report(changes=HELD))
    await stream.read()
    await registry.Deregister(DeregisterRequest(instance_id="a", epoch=1), timeout=WAIT_SECONDS)
    assert not await is_held(cache)
    error = await refusal(registry.Deregister(DeregisterRequest(instance_id="a", epoch=1), timeout=WAIT_SECONDS))
    assert (error.code, error.reason) == ("NOT_FOUND", "INSTANCE_NOT_FOUND")


async def test_many_instances_come_and_go_at_once(registry: Any) -> None:
    await asyncio.gather(
        *(register(registry, f"instance-{i}", 1, 7000 + i, LLAMA) for i in range(MAX_JOINING_OF_TENANT))
    )
    assert len((await listed(registry)).instances) == MAX_JOINING_OF_TENANT
    leaving = [DeregisterRequest(instance_id=f"instance-{i}", epoch=1) for i in range(MAX_JOINING_OF_TENANT)]
    await asyncio.gather(*(registry.Deregister(request, timeout=WAIT_SECONDS) for request in leaving))
    assert len((await listed(registry)).instances) == 0


async def test_an_instance_beyond_the_limit_gets_a_retry_delay(registry: Any) -> None:
    for number in range(MAX_JOINING_OF_TENANT):
        await register(registry, f"instance-{number}", 1, 7000 + number, LLAMA)
    error = await refusal(register(registry, "instance-x", 1, 8000, LLAMA))
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "FULL")
    assert 0 < float(error.metadata["retry_seconds"]) < 1


async def test_the_list_shows_reported_values(registry: Any) -> None:
    await register(registry, "a", 1, 7000, LLAMA)
    stream = registry.Report()
    usage = TierUsage(tier=HOST, capacity_bytes=1000, used_bytes=10, chunk_count=1)
    stats = InstanceStats(asked_chunks=10, own_chunks=6, traffic=[PeerTraffic(instance_id="b", chunk_count=3)])
    await stream.write(report(changes=HELD, tiers=[usage], engine_count=1, stats=stats))
    await stream.read()
    (instance,) = (await listed(registry)).instances
    assert instance.synced
    assert list(instance.tiers) == [usage]
    assert instance.stats == stats
    assert instance.engine_count == 1


async def test_the_list_comes_in_pages_ordered_by_id(registry: Any) -> None:
    for name in ("c", "a", "e", "b", "d"):
        await register(registry, name)
    pages, token = [], ""
    while True:
        page = await listed(registry, page_size=2, page_token=token)
        pages.append([instance.instance_id for instance in page.instances])
        token = page.next_page_token
        if not token:
            break
    assert pages == [["a", "b"], ["c", "d"], ["e"]]


async def test_a_page_ends_early_rather_than_outgrow_a_message(registry: Any) -> None:
    specs = [dataclasses.replace(LLAMA, model_name="m" * 500, model_id=f"{i:0500}") for i in range(64)]
    names = [f"n{i:02}" for i in range(12)]
    for name in names:
        await register(registry, name, 1, 7000, *specs)
    first = await listed(registry)
    rest = await listed(registry, page_token=first.next_page_token)
    assert 1 < len(first.instances) < len(names)
    assert [instance.instance_id for page in (first, rest) for instance in page.instances] == names
    assert not rest.next_page_token


@pytest.mark.parametrize("token", ["a", "nonsense", "größe", "YQ=="])
async def test_a_page_token_from_elsewhere_is_refused(registry: Any, token: str) -> None:
    error = await refusal(registry.ListInstances(ListInstancesRequest(page_token=token), timeout=WAIT_SECONDS))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "BAD_PAGE_TOKEN")


async def test_the_end_of_an_earlier_stream_leaves_the_later_one_reachable(
    coordinator: Coordinator, make: Make
) -> None:
    services = coordinator.tenants.unnamed
    async with make("a", CHUNKS) as first:
        earlier = first._stream
        await first.join()  # another stream of the same process
        earlier.cancel()
        await until(earlier.done)
        await first.evict([])  # a later message, so that the coordinator has noticed
        assert "a" in services.reports._outboxes
        services.resync("a test", "a")
        await until(first._stream.done)
        assert "a test; register again" in await first._stream.details()


@pytest.mark.parametrize("seconds", [0, 1, 253_402_300_799, 1 << 62])
def test_any_time_that_a_node_reports_as_its_end_can_be_listed(seconds: int) -> None:
    instance = instances.Instance(InstanceInfo(instance_id="a", epoch=1, peer_address=""), now=0, expire_time=3)
    usage = pb.TierUsage(tier=HOST)
    set_state(instance, report_pb.ReportRequest(tiers=[usage], end_time=Timestamp(seconds=seconds)))
    Timestamp().FromNanoseconds(instance.end_time_ns)
    set_state(instance, report_pb.ReportRequest(tiers=[usage]))
    assert instance.end_time_ns == 0, "an engine has attached"


def test_usage_and_statistics_are_kept_until_a_report_carries_others() -> None:
    instance = instances.Instance(InstanceInfo(instance_id="a", epoch=1, peer_address=""), now=0, expire_time=3)
    report = report_pb.ReportRequest(tiers=[pb.TierUsage(tier=HOST, capacity_bytes=100, used_bytes=10)], engine_count=2)
    report.stats.CopyFrom(
        pb.InstanceStats(asked_chunks=5, traffic=[pb.PeerTraffic(instance_id="b", chunk_count=1, transferred_bytes=7)])
    )
    set_state(instance, report)
    set_state(instance, report_pb.ReportRequest())
    assert instance.engine_count == 2
    assert instance.tiers == (ReportedTier(tier=HOST, capacity_bytes=100, used_bytes=10),)
    traffic = (ReportedTraffic(instance_id="b", chunk_count=1, transferred_bytes=7),)
    assert instance.stats == ReportedStats(asked_chunks=5, traffic=traffic)


def test_every_number_of_the_statistics_is_kept() -> None:
    message = pb.InstanceStats(traffic=[pb.PeerTraffic(instance_id="b", chunk_count=1, transferred_bytes=7)])
    for number, field in enumerate(message.DESCRIPTOR.fields, 1):
        if field.name == "stopped_models":
            message.stopped_models.append("m")
        elif field.message_type is None:
            setattr(message, field.name, number)
        elif field.message_type.name == "Duration":
            getattr(message, field.name).FromMilliseconds(1250 * number)
    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)
    assert stats_message(reported_stats(message)) == message


def test_pins_are_kept_by_their_ids() -> None:
    pins = report_pb.PinList()
    pin = pins.pins.add(pin_id="a/1", chunk_count=3, token_count=768)
    pin.position.tier = HOST
    pin.expire_time.FromNanoseconds(5)
    assert reported_pins(pins) == {
        "a/1": ReportedPin(pin_id="a/1", tier=HOST, chunk_count=3, token_count=768, expire_time_ns=5)
    }
