"""What one tenant registers and looks up is bounded, and stalls no other tenant."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lmkv import rpc
from lmkv.errors import BadInstance, BadTokens, Full, LmkvError
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest
from lmkv.keys import join_keys
from lmkv.rpc.messages import by_tokens
from lmkv.spec import MAX_SPECS, KvSpec
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_server.coordinator.registry.selection import MAX_NAMESPACES, MAX_WAITING
from tests.server.coordinator.cases import HYBRID, KEYS, PROMPT, keys_of
from tests.server.coordinator.guarded import Guarded, token_of
from tests.support.node_stub import registration
from tests.support.specs import LLAMA

LONG = LookupRequest(prompt=by_tokens(range(65_000), model_name="attacked"))


def specs(count: int, first: int = 0, model_name: str = "attacked") -> list[KvSpec]:
    """Different specs of one model."""
    return [
        dataclasses.replace(LLAMA, model_name=model_name, model_id=f"m@{first + at}", chunk_size=1)
        for at in range(count)
    ]


async def join(fleet: Guarded, own: Sequence[KvSpec], name: str = "evil") -> Any:
    """Has an instance of tenant a register these specs; its registry stub."""
    registry = await fleet.registry(token_of("engine", "a"))
    instance = Instance(
        instance_id=name, epoch=1, peer_address="127.0.0.1:7000", specs=[spec.to_proto() for spec in own]
    )
    await registry.Register(registration(instance), timeout=120)
    return registry


async def hold(registry: Any, own: Sequence[KvSpec], keys: Sequence[bytes] = ()) -> Any:
    """Has it report these keys of each, by default one that is no prompt's; the stream that it does so over."""
    changes = [
        ChunkChange(tier=HOST, fingerprint=spec.fingerprint, admitted_keys=keys[at] if keys else bytes([at]) * 16)
        for at, spec in enumerate(own)
    ]
    stream = registry.Report()
    await stream.write(
        ReportRequest(instance_id="evil", epoch=1, sequence=1, snapshot=True, snapshot_end=True, changes=changes)
    )
    assert (await asyncio.wait_for(stream.read(), 120)).acked_sequence == 1
    return stream


async def error_of(call: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return rpc.from_rpc_error(caught.value)


async def test_an_instance_with_too_many_specs_is_refused(fleet: Guarded) -> None:
    error = await error_of(join(fleet, specs(16_852 // 4)))  # all that a message holds
    assert isinstance(error, BadInstance)
    assert str(error).startswith(f"specs: {16_852 // 4} specs; an instance has at most {MAX_SPECS}")
    await join(fleet, specs(MAX_SPECS))


async def test_a_spec_with_a_long_text_is_refused(fleet: Guarded) -> None:
    error = await error_of(join(fleet, specs(1, model_name="m" * 600)))
    assert isinstance(error, BadInstance)
    assert "specs.model_name has 600 bytes" in str(error)


@pytest.mark.parametrize("field", ["layers", "tile_isa", "kv_dtype"])
async def test_a_part_with_a_long_text_is_refused(fleet: Guarded, field: str) -> None:
    message = HYBRID.to_proto()
    setattr(message.more_parts[1], field, "x" * 600)
    registry = await fleet.registry(token_of("engine", "a"))
    instance = Instance(instance_id="evil", epoch=1, specs=[message])
    error = await error_of(registry.Register(registration(instance), timeout=120))
    assert isinstance(error, BadInstance)
    assert f"specs.more_parts.{field} has 600 bytes" in str(error)


async def test_a_spec_with_too_many_parts_is_refused(fleet: Guarded) -> None:
    message = HYBRID.to_proto()
    message.more_parts.extend([message.more_parts[0]] * 1000)
    registry = await fleet.registry(token_of("engine", "a"))
    instance = Instance(instance_id="evil", epoch=1, specs=[message])
    error = await error_of(registry.Register(registration(instance), timeout=120))
    assert isinstance(error, BadInstance)
    assert "specs.more_parts has 1002 parts; at most 7 are allowed" in str(error)


async def test_a_model_with_too_many_specs_takes_no_more_of_them(fleet: Guarded) -> None:
    await join(fleet, specs(MAX_SPECS))
    error = await error_of(join(fleet, specs(1, first=MAX_SPECS), "late"))
    assert isinstance(error, Full)
    assert f"specs: model 'attacked' has {MAX_SPECS} specs and adapters in this fleet" in str(error)
    await join(fleet, specs(1), "same")  # a spec that is there already
    await join(fleet, specs(1, model_name="other"), "other")


async def test_a_lookup_computes_keys_under_specs_that_have_chunks(fleet: Guarded) -> None:
    own = specs(MAX_SPECS)
    registry = await join(fleet, own)
    cache = await fleet.cache(token_of("reader", "a"))
    assert not (await cache.Lookup(LONG, timeout=120)).holders  # 64 x 65,000 keys, if it were for what is registered
    stream = await hold(registry, own)
    error = await error_of(cache.Lookup(LONG, timeout=120))
    assert isinstance(error, BadTokens)
    assert f"under the {MAX_NAMESPACES} specs and adapters of model 'attacked'" in str(error)
    stream.cancel()


async def test_a_lookup_covers_the_newest_specs_of_a_model(fleet: Guarded) -> None:
    own = specs(MAX_NAMESPACES + 1)
    held = {0: 30, 1: 10, MAX_NAMESPACES: 20}
    keys = [join_keys(keys_of(PROMPT, spec)[: held.get(at, 1)]) for at, spec in enumerate(own)]
    stream = await hold(await join(fleet, own), own, keys)
    cache = await fleet.cache(token_of("reader", "a"))
    found = await cache.Lookup(LookupRequest(prompt=by_tokens(PROMPT, model_name="attacked")), timeout=120)
    assert [one.matched_chunk_count for one in found.holders] == [20]
    stream.cancel()


async def test_long_lookups_stall_no_other_tenant(fleet: Guarded) -> None:
    stream = await hold(await join(fleet, specs(2)), specs(2))
    await fleet.instance("b", "n1", KEYS)
    theirs = await fleet.cache(token_of("engine", "b"))
    health = health_pb2_grpc.HealthStub(await fleet.channel(""))
    attacker = await fleet.cache(token_of("reader", "a"))
    long = [asyncio.ensure_future(attacker.Lookup(LONG, timeout=120)) for _ in range(MAX_WAITING)]
    for _ in range(10):
        found = await theirs.Lookup(LookupRequest(prompt=by_tokens(PROMPT)), timeout=120)
        assert found.holders[0].matched_chunk_count == len(KEYS)
        probed = await health.Check(health_pb2.HealthCheckRequest(), timeout=120)
        assert probed.status == health_pb2.HealthCheckResponse.SERVING
    done = sum(one.done() for one in long)
    assert done < len(long), "all of that came between their slices"
    for one in long:
        one.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    stream.cancel()


async def test_long_lookups_wait_for_each_other_in_a_bounded_queue(fleet: Guarded) -> None:
    stream = await hold(await join(fleet, specs(2)), specs(2))
    attacker = await fleet.cache(token_of("reader", "a"))
    long = [asyncio.ensure_future(attacker.Lookup(LONG, timeout=120)) for _ in range(3 * MAX_WAITING)]
    done, waiting = await asyncio.wait(long, return_when=asyncio.FIRST_EXCEPTION)
    refused = [one for one in done if one.exception()]
    assert isinstance(rpc.from_rpc_error(refused[0].exception()), Full)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    assert not (await attacker.Lookup(LONG, timeout=120)).holders, "a call that was cancelled waits no longer"
    stream.cancel()
