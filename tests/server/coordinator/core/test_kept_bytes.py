"""What instances and callers have a coordinator keep is bounded in bytes: for each instance, and for each tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.errors import BadInstance, BadMessage, Full, LmkvError
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES
from lmkv.rpc.messages import by_keys
from lmkv.tiers import HOST
from lmkv.v1 import cache_service_pb2 as cache_pb
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.core.instances import MAX_OWNER_BYTES, Budget
from lmkv_server.coordinator.core.models import MAX_NAMES
from lmkv_server.coordinator.operations import operations as operations_module
from lmkv_server.coordinator.operations import pins
from lmkv_server.coordinator.operations.orders import MAX_PENDING_BYTES
from lmkv_server.coordinator.operations.pins import MAX_PINS
from lmkv_server.coordinator.services.registry import MAX_CHANGES, MAX_STATS_BYTES, MAX_TIERS
from tests.server.coordinator.cases import KEYS
from tests.server.coordinator.scripted_instance import Make
from tests.support.node_stub import registration
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS, until


async def test_large_moves_give_way_once_they_ended_and_are_refused_while_they_run(
    coordinator: Coordinator, make: Make, cache: Any
) -> None:
    core = coordinator.tenants.unnamed.fleet_operations.table
    move = cache_pb.MoveRequest(
        prompt=by_keys(number.to_bytes(16, "little") for number in range(1, 58_001)),
        old_position=chunk_pb2.Position(instance_id="a"),
        new_position=chunk_pb2.Position(instance_id="b"),
    )
    async with make("a", KEYS[:1]) as a, make("b") as b:
        for number in range(45):  # they fail, for the source holds nothing of that
            move.request_id = str(number)
            await cache.Move(move, timeout=60)
        assert core.used_bytes <= operations_module.MAX_BYTES
        a.going.clear()
        b.going.clear()
        move.prompt.keys.chunk_keys[0] = KEYS[0]
        errors = []
        for number in range(75):
            move.request_id = f"running {number}"
            try:
                await cache.Move(move, timeout=60)
            except grpc.RpcError as error:
                errors.append(rpc.from_rpc_error(error))
        assert errors
        assert all(isinstance(error, Full) and "running operations use" in str(error) for error in errors)
        assert core.used_bytes <= operations_module.MAX_BYTES
        b.going.set()
        a.going.set()


async def test_a_long_request_id_is_refused(make: Make, cache: Any) -> None:
    async with make("a", KEYS):
        error = await error_of(cache.Clear(cache_pb.ClearRequest(all=True, request_id="x" * 1000), timeout=60))
        assert isinstance(error, BadMessage)
        assert "request_id has 1000 bytes" in str(error)


async def test_orders_that_an_instance_does_not_carry_out_are_bounded_in_bytes(
    make: Make, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "TIMEOUT_SECONDS", 2 * WAIT_SECONDS)  # none of the orders ends by itself
    async with make("a", KEYS) as a:
        a.going.clear()
        request = cache_pb.PinRequest(
            prompt=by_keys([b"k" * 16] * 32_000), position=chunk_pb2.Position(instance_id="a")
        )

        async def pin() -> Any:
            return await cache.Pin(request, timeout=2 * WAIT_SECONDS)

        calls = [asyncio.create_task(pin()) for _ in range(2 * MAX_PENDING_BYTES // (32_000 * KEY_BYTES))]
        await until(lambda: sum(call.done() for call in calls) >= len(calls) // 3)
        ended = [call.exception() for call in calls if call.done()]
        errors = [rpc.from_rpc_error(error) for error in ended if isinstance(error, grpc.RpcError)]
        assert len(errors) == len(ended)
        assert all(isinstance(error, Full) and "orders of" in str(error) for error in errors)
        a.going.set()
        await asyncio.gather(*calls, return_exceptions=True)


# --- What an instance says of itself -----------------------------------------------------------------------------


@pytest.fixture
async def instance(registry: Any) -> pb.Instance:
    said = pb.Instance(instance_id="evil", epoch=1, peer_address="127.0.0.1:7000", specs=[LLAMA.to_proto()])
    await registry.Register(registration(said), timeout=60)
    return said


async def error_of(call: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return rpc.from_rpc_error(caught.value)


async def refused(registry: Any, **fields: Any) -> LmkvError:
    stream = registry.Report()
    report = report_pb.ReportRequest(
        instance_id="evil", epoch=1, sequence=1, snapshot=True, snapshot_end=True, **fields
    )
    await stream.write(report)
    return await error_of(stream.read())


async def test_an_instance_that_is_too_large_is_refused(registry: Any, instance: pb.Instance) -> None:
    instance.version = "v" * (600 << 10)
    error = await error_of(registry.Register(registration(instance), timeout=60))
    assert isinstance(error, BadInstance)
    assert error.metadata["field"] == "instance"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tiers", {"tiers": [pb.TierUsage(tier=HOST)] * (MAX_TIERS + 1)}),
        ("digests", {"digests": [report_pb.TierDigest(tier=HOST)] * (MAX_TIERS + 1)}),
        (
            "pins",
            {"pins": report_pb.PinList(pins=[chunk_pb2.PinnedChunks(pin_id=f"evil/{n}") for n in range(MAX_PINS + 1)])},
        ),
        (
            "stats",
            {"stats": pb.InstanceStats(traffic=[pb.PeerTraffic(instance_id="p" * MAX_STATS_BYTES)])},
        ),
        ("changes", {"changes": [report_pb.ChunkChange(tier=HOST)] * (MAX_CHANGES + 1)}),
        ("outcomes", {"outcomes": [report_pb.OrderOutcome()] * 20_000}),
    ],
)
@pytest.mark.usefixtures("instance")
async def test_a_report_with_too_much_of_something_is_refused(
    registry: Any, field: str, fields: dict[str, Any]
) -> None:
    error = await refused(registry, **fields)
    assert isinstance(error, BadMessage)
    assert str(error).startswith(f"{field}")


async def test_what_instances_say_of_themselves_is_counted_and_forgotten_with_them(
    coordinator: Coordinator, registry: Any, instance: pb.Instance
) -> None:
    budget = coordinator.tenants.unnamed.core.instances.budget
    registered = budget.used_bytes
    assert registered >= instance.ByteSize()
    pins = report_pb.PinList(pins=[chunk_pb2.PinnedChunks(pin_id="p" * 900) for _ in range(900)])
    stream = registry.Report()
    report = report_pb.ReportRequest(
        instance_id="evil", epoch=1, sequence=1, snapshot=True, snapshot_end=True, pins=pins
    )
    await stream.write(report)
    assert (await stream.read()).acked_sequence == 1
    assert registered + pins.ByteSize() <= budget.used_bytes <= MAX_OWNER_BYTES
    await registry.Deregister(pb.DeregisterRequest(instance_id="evil", epoch=1), timeout=60)
    assert budget.used_bytes == 0


async def test_the_names_of_models_in_a_fleet_are_bounded(registry: Any) -> None:
    error: LmkvError | None = None
    for number in range(MAX_NAMES // 256 + 1):
        served = [chunk_pb2.ServedModel(name=f"{number}-{name}", fingerprint=LLAMA.fingerprint) for name in range(256)]
        instance = pb.Instance(
            instance_id=f"evil-{number}",
            epoch=1,
            peer_address="127.0.0.1:7000",
            specs=[LLAMA.to_proto()],
            served_models=served,
        )
        try:
            await registry.Register(registration(instance), timeout=60)
        except grpc.RpcError as caught:
            error = rpc.from_rpc_error(caught)
    assert isinstance(error, Full)
    assert str(error).startswith("served_models: ")


def test_a_budget_bounds_each_owner_and_all_of_them() -> None:
    budget = Budget(owner_bytes=10, total_bytes=25)
    budget.charge("a", "pins", 10)
    budget.charge("a", "pins", 5)  # instead
    with pytest.raises(Full, match="the limit of one instance is 10 bytes"):
        budget.charge("a", "stats", 6)
    budget.charge("b", "pins", 10)
    budget.charge("", "pins", 10)  # the coordinator's own
    with pytest.raises(Full, match="the limit of all instances is 25 bytes"):
        budget.charge("c", "pins", 1)
    budget.drop_owner("b")
    budget.drop_owner("b")
    assert budget.used_bytes == 15
    budget.check()
