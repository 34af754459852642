"""Tenants: each sees and touches only its own, by whichever way it asks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest
from google.longrunning import operations_pb2

from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest
from lmkv.keys import join_keys
from lmkv.rpc.error_status import from_status
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import (
    ClearRequest,
    DrainRequest,
    ExplainRequest,
    HintRequest,
    ListPinsRequest,
    LookupRequest,
    MoveRequest,
    PinRequest,
    UnpinRequest,
    WatchRequest,
)
from lmkv.v1.chunk_pb2 import HINT_ACTION_EVICT, HINT_OUTCOME_ACCEPTED, Position
from lmkv.v1.registry_service_pb2 import DeregisterRequest, Instance, ListInstancesRequest
from lmkv_server.coordinator.services.cache import CacheService
from tests.server.coordinator.cases import KEYS, PROMPT
from tests.server.coordinator.guarded import ENTRIES, Guarded, guarded, token_of
from tests.support.node_stub import registration
from tests.support.operations import wait_for_operation
from tests.support.specs import LLAMA
from tests.support.tokens import entry

BY_TOKENS = LookupRequest(prompt=by_tokens(PROMPT))
BY_KEYS = LookupRequest(prompt=by_keys(KEYS))
UNKNOWN = LookupRequest(prompt=by_keys(KEYS[:0:-1]))


async def error_of(call: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return rpc.from_rpc_error(caught.value)


async def test_a_lookup_finds_the_tenants_own_instances_only(fleet: Guarded) -> None:
    await fleet.instance("a", "n1", KEYS)
    await fleet.instance("b", "n1", KEYS[:1])  # a name of its own, though it is called the same
    found = {}
    for tenant in ("a", "b"):
        cache = await fleet.cache(token_of("reader", tenant))
        for request in (BY_TOKENS, BY_KEYS):
            holders = (await cache.Lookup(request, timeout=60)).holders
            found[tenant, request is BY_KEYS] = [(one.instance_id, one.matched_chunk_count) for one in holders]
    assert found == {
        ("a", False): [("n1", 3)],
        ("a", True): [("n1", 3)],
        ("b", False): [("n1", 1)],
        ("b", True): [("n1", 1)],
    }
    nobodys = await fleet.cache(token_of("reader"))
    assert not (await nobodys.Lookup(BY_KEYS, timeout=60)).holders


async def test_another_tenants_prefix_is_answered_as_a_miss(fleet: Guarded) -> None:
    await fleet.instance("b", "theirs", [])
    cache = await fleet.cache(token_of("engine", "b"))
    before = await cache.Lookup(BY_KEYS, timeout=60)
    await fleet.instance("a", "ours", KEYS)
    assert await cache.Lookup(BY_KEYS, timeout=60) == before == await cache.Lookup(UNKNOWN, timeout=60)
    # And in the same time, since it takes the same steps: the queried map does not contain it.
    tenants = fleet.coordinator.tenants
    assert len(tenants.of("a").core.layout) == len(KEYS)
    assert len(tenants.of("b").core.layout) == 0
    assert tenants.of("b").core.layout.fingerprint_of(KEYS[0]) is None


@pytest.mark.parametrize("by", ["tokens", "keys"])
async def test_another_tenants_prefix_runs_the_same_lines_as_a_miss(fleet: Guarded, by: str) -> None:
    """The work of lookups instead of their time: a clock would need many lookups and a quiet machine."""
    await fleet.instance("a", "ours", KEYS)
    await fleet.instance("b", "theirs", [])
    anothers = BY_TOKENS if by == "tokens" else BY_KEYS
    if by == "tokens":
        nobodys = LookupRequest(prompt=by_tokens([token + 1 for token in PROMPT]))
    else:
        nobodys = LookupRequest(prompt=by_keys([bytes(byte ^ 1 for byte in key) for key in KEYS]))
    a, b = (fleet.coordinator.tenants.of(tenant).cache for tenant in ("a", "b"))
    assert await steps_of(b, anothers) == await steps_of(b, nobodys)
    assert await steps_of(a, anothers) != await steps_of(a, nobodys)  # so it shows where it is held


async def steps_of(cache: CacheService, request: LookupRequest) -> list[tuple[str, int]]:
    """Every line of ours that runs while a request is answered."""
    steps: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_globals["__name__"].startswith("lmkv"):
            return None  # the collector of garbage may come by
        steps.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    await cache.lookup_tokens(np.array([], np.int32))  # settles who is still reporting
    answering = cache.Lookup(request, None)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        answering.send(None)
    except StopIteration:  # it waited for nothing
        return steps
    finally:
        sys.settrace(before)
    raise AssertionError("a lookup waited for something")


async def test_nothing_of_another_tenants_is_listed_or_watched(fleet: Guarded) -> None:
    watcher = (await fleet.cache(token_of("reader", "b"))).Watch(WatchRequest())
    first = await watcher.read()
    a = await fleet.instance("a", "ours", KEYS)
    pin = await (await fleet.cache(token_of("operator", "a"))).Pin(
        PinRequest(prompt=by_tokens(PROMPT), position=Position(instance_id="ours")), timeout=60
    )
    assert a.pins.keys() == {pin.pin.pin_id}
    cache, registry = await fleet.cache(token_of("admin", "b")), await fleet.registry(token_of("admin", "b"))
    assert not (await registry.ListInstances(ListInstancesRequest(), timeout=60)).instances
    assert not (await cache.ListPins(ListPinsRequest(), timeout=60)).pins
    await fleet.instance("b", "theirs", KEYS[:1])
    seen = f"{first}"
    while "theirs" not in seen:
        seen += f"{await watcher.read()}"
    assert "ours" not in seen


async def test_hints_reach_the_instances_of_their_own_tenant_only(fleet: Guarded) -> None:
    ours = await fleet.instance("a", "ours", KEYS)
    hint = HintRequest(prompt=by_tokens(PROMPT), instance_id="ours", action=HINT_ACTION_EVICT)
    other = await fleet.cache(token_of("operator", "b"))
    assert (await error_of(other.Hint(hint, timeout=60))).reason in ("INSTANCE_NOT_FOUND", "MODEL_NOT_FOUND")
    for role in ("engine", "reader"):
        unauthorized = await fleet.cache(token_of(role, "a"))
        assert (await error_of(unauthorized.Hint(hint, timeout=60))).reason == "PERMISSION_DENIED"
    assert not ours.orders
    result = (await (await fleet.cache(token_of("operator", "a"))).Hint(hint, timeout=60)).result
    assert (result.outcome, result.chunk_count) == (HINT_OUTCOME_ACCEPTED, 3)
    (order,) = ours.orders
    assert len(order.hint.owner) == 16


async def test_only_the_tenants_own_instances_explain_prompts(fleet: Guarded) -> None:
    await fleet.instance("a", "ours", KEYS)
    await fleet.instance("b", "theirs")
    for tenant, instance_id in (("a", "ours"), ("b", "theirs")):
        answer = await (await fleet.cache(token_of("reader", tenant))).Explain(
            ExplainRequest(prompt=by_tokens(PROMPT)), timeout=60
        )
        assert [one.instance_id for one in answer.explanations] == [instance_id]
    other = await fleet.cache(token_of("reader", "b"))
    named = ExplainRequest(prompt=by_tokens(PROMPT), instance_id="ours")
    assert (await error_of(other.Explain(named, timeout=60))).reason == "INSTANCE_NOT_FOUND"
    engine = await fleet.cache(token_of("engine", "a"))
    assert (await error_of(engine.Explain(named, timeout=60))).reason == "PERMISSION_DENIED"


async def test_another_tenants_instances_pins_and_operations_cannot_be_touched(fleet: Guarded) -> None:
    a = await fleet.instance("a", "ours", KEYS)
    await fleet.instance("a", "ours-too")
    await fleet.instance("b", "theirs")
    own, other = await fleet.cache(token_of("operator", "a")), await fleet.cache(token_of("operator", "b"))
    pin = (await own.Pin(PinRequest(prompt=by_tokens(PROMPT), position=Position(instance_id="ours")), timeout=60)).pin
    copy = MoveRequest(
        prompt=by_tokens(PROMPT),
        old_position=Position(instance_id="ours"),
        new_position=Position(instance_id="ours-too"),
        copy=True,
    )
    operation = await own.Move(copy, timeout=60)
    operations = await fleet.operations(token_of("admin", "b"))
    stolen = MoveRequest()
    stolen.CopyFrom(copy)
    stolen.new_position.instance_id = "theirs"
    refusals = [
        await error_of(other.Move(stolen, timeout=60)),
        await error_of(other.Clear(ClearRequest(instance_id="ours", all=True), timeout=60)),
        await error_of(other.Drain(DrainRequest(instance_id="ours"), timeout=60)),
        await error_of(own.Drain(DrainRequest(instance_id="ours", destination_instance_ids=["theirs"]), timeout=60)),
        await error_of(operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name), timeout=60)),
        await error_of(
            operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name), timeout=60)
        ),
        await error_of(
            (await fleet.registry(token_of("engine", "b"))).Deregister(
                DeregisterRequest(instance_id="ours", epoch=a.epoch), timeout=60
            )
        ),
    ]
    made_up = f"copy-{int(operation.name.removeprefix('copy-'), 16) + 1:016x}"
    nobodys = await error_of(operations.GetOperation(operations_pb2.GetOperationRequest(name=made_up), timeout=60))
    # An operation that was never started has no record, or one that is not reported yet: the answers are equal.
    assert {refusal.code for refusal in refusals} <= {"NOT_FOUND", "FAILED_PRECONDITION", nobodys.code}
    assert refusals[4].reason == nobodys.reason
    assert not (await operations.ListOperations(operations_pb2.ListOperationsRequest(), timeout=60)).operations
    await asyncio.gather(other.Unpin(UnpinRequest(pin_id=pin.pin_id), timeout=60), return_exceptions=True)
    assert a.pins.keys() == {pin.pin_id}
    assert len(a.chunks) == len(KEYS)


async def test_a_drain_copies_nothing_to_another_tenant(fleet: Guarded) -> None:
    await fleet.instance("a", "ours", KEYS)
    theirs = await fleet.instance("b", "theirs")
    own = await fleet.cache(token_of("operator", "a"))
    operation = await own.Drain(DrainRequest(instance_id="ours"), timeout=60)
    operations = await fleet.operations(token_of("operator", "a"))
    ended = await wait_for_operation(operations, operation.name)
    assert from_status(ended.error).reason == "KV_SPEC_MISMATCH"
    assert not theirs.chunks
    others = await fleet.operations(token_of("admin", "b"))
    assert not (await others.ListOperations(operations_pb2.ListOperationsRequest(), timeout=60)).operations


async def test_http_keeps_tenants_apart_as_well(fleet: Guarded) -> None:
    await fleet.instance("a", "ours", KEYS)
    async with fleet.http(token_of("reader", "a")) as own, fleet.http(token_of("reader", "b")) as other:
        assert (await own.post("/lookup", json={"tokens": PROMPT})).json()["layout_info"].keys() == {"ours"}
        missed = await other.post("/lookup", json={"tokens": PROMPT, "model_name": "llama"})
        assert "ours" not in missed.text
        for path in ("/lmkv.v1.RegistryService/ListInstances", "/query_worker_info"):
            body = {"instance_id": "all"} if path == "/query_worker_info" else {}
            assert "ours" in (await own.post(path, json=body)).text
            assert "ours" not in (await other.post(path, json=body)).text
        assert "ours" in (await own.get("/metrics")).text
        assert "ours" not in (await other.get("/metrics")).text
        assert (await other.post("/health", json={"instance_id": "ours"})).status_code == 404


async def test_an_admin_of_the_fleet_may_look_into_each(fleet: Guarded) -> None:
    await fleet.instance("a", "ours", KEYS)
    async with fleet.http(token_of("admin")) as own, fleet.http(token_of("admin"), **{"lmkv-tenant": "a"}) as for_a:
        path = "/lmkv.v1.RegistryService/ListInstances"
        assert "ours" not in (await own.post(path, json={})).text
        assert "ours" in (await for_a.post(path, json={})).text
    async with fleet.http(token_of("admin", "b"), **{"lmkv-tenant": "a"}) as nosy:
        assert (await nosy.post(path, json={})).status_code == 403


async def test_a_tenant_has_no_more_instances_than_its_quota(tmp_path: Path) -> None:
    async with guarded(tmp_path, ENTRIES, {"a": {"max_instances": 1}}) as fleet:
        await fleet.instance("a", "first")
        with pytest.raises(grpc.RpcError) as refusal:
            await fleet.instance("a", "second")
        error = rpc.from_rpc_error(refusal.value)
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert "max_instances of this tenant is 1" in str(error)
        for name in ("first", "second"):
            await fleet.instance("b", name)


async def test_a_tenant_has_no_more_chunks_than_its_quota(tmp_path: Path) -> None:
    async with guarded(tmp_path, [*ENTRIES, entry("engine", "c")], {"a": {"max_chunks": 2}}) as fleet:
        await fleet.instance("a", "fits", KEYS[:2])
        await fleet.instance("a", "fits-too", KEYS[:2])  # they are the same chunks
        registry = await fleet.registry(token_of("engine", "a"))
        greedy = Instance(instance_id="greedy", epoch=1, peer_address="10.0.0.1:1", specs=[LLAMA.to_proto()])
        await registry.Register(registration(greedy), timeout=60)
        stream = registry.Report()
        change = ChunkChange(tier=HOST, fingerprint=LLAMA.fingerprint, admitted_keys=join_keys(KEYS))
        report = ReportRequest(instance_id="greedy", epoch=1, sequence=1, snapshot=True, changes=[change])
        await stream.write(report)
        error = await error_of(stream.read())
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert "max_chunks of this tenant is 2" in str(error)
        await fleet.instance("b", "free", KEYS)
