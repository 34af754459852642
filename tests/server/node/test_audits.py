"""Audits of engines: wrong chunks are dropped at every holder, and a spec with too many of them is not served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.keys import ChunkKey, join_keys
from lmkv.kv_inputs import KvInputs
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client import Coordinator as Client
from lmkv_client.commands.doctor.fleet import check_audits
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.services.reports import MAX_WRONG_REPORTS, WrongReports
from lmkv_server.node.audits import LAST_AUDITS, MAX_WATCHES, MIN_WRONG, CircuitBreaker
from lmkv_server.node.node import Node
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.support.encryption_keys import write_keys
from tests.waiting import WAIT_SECONDS, eventually, until

KEYS = [ChunkKey(bytes([number]) * 16) for number in range(4)]
OTHER = ChunkKey(b"o" * 16)
"""A chunk behind the second, of another prompt."""


async def store(engine: EngineClient, checksum: int = 0) -> None:
    """Stores a prompt, and the chunk of another one behind its second."""
    extents = await engine.reserve(5)
    parents = [b"", *KEYS[:3], KEYS[1]]
    commits = zip([*KEYS, OTHER], extents, parents, strict=True)
    await engine.say(
        commit=[engine.commit(key, extent, parent=parent, checksum=checksum) for key, extent, parent in commits]
    )


async def test_wrong_chunks_and_those_behind_them_are_dropped_at_every_holder(runtime_dir: Path) -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        address = {"coordinator_address": (f"127.0.0.1:{coordinator.port}",)}
        disk = {"local_disk": (f"{runtime_dir}/disk",), "max_local_disk_size": 0.0625}
        async with (
            Node(node_config(runtime_dir, "a", **address)) as first,
            Node(node_config(runtime_dir, "b", **address, **disk)) as second,
            EngineClient(first, "engine-a") as engine,
            EngineClient(second, "engine-b") as other,
        ):
            for client in (engine, other):
                await store(client)
            on_disk = second.disk
            assert on_disk
            await until(lambda: len(first.tier) == 5 == on_disk.chunk_count)
            pinned = second.tier.get(KEYS[3])
            assert pinned
            second.tier.pin([pinned])
            wrong = pb.AuditedChunks(chunk_count=7, wrong_keys=join_keys(KEYS[1:3]))
            await engine.say(audited=wrong)
            await until(lambda: [len(first.tier), len(second.tier), on_disk.chunk_count] == [1, 1, 1])
            assert [chunk.key for chunk in (*first.tier, *second.tier)] == [KEYS[0], KEYS[0]]
            second.tier.unpin([pinned])
            assert first.describe().stats.wrong_chunks == 1
            assert not first.describe().stats.stopped_models


async def test_a_node_ends_while_wrong_chunks_are_dropped(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropping = asyncio.Event()

    async def drop(_: object) -> None:
        dropping.set()
        await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(WAIT_SECONDS):
        async with Node(node_config(runtime_dir, "a")) as node, EngineClient(node) as engine:
            monkeypatch.setattr(node.orders, "drop", drop)
            await engine.say(audited=pb.AuditedChunks(chunk_count=1, wrong_keys=join_keys(KEYS[:1])))
            await dropping.wait()


async def test_a_spec_with_too_many_wrong_chunks_is_not_served(runtime_dir: Path) -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator,
        Node(node_config(runtime_dir, "a", coordinator_address=(f"127.0.0.1:{coordinator.port}",))) as node,
        EngineClient(node) as engine,
        Client(f"127.0.0.1:{coordinator.port}") as client,
    ):
        await store(engine)
        assert len((await engine.lookup("before", KEYS)).own) == len(KEYS)
        await engine.release("before")
        for number in range(MIN_WRONG):
            assert not node.audits.stopped
            await engine.say(audited=pb.AuditedChunks(chunk_count=1, wrong_keys=bytes([200 + number]) * 16))
            await until(lambda number=number: node.audits.wrong_count == number + 1)  # type: ignore[misc]
        assert list(node.audits.stopped.values()) == [engine.spec.model_name]
        assert node.describe().stats.stopped_models == [engine.spec.model_name]
        assert not (await engine.lookup("after", KEYS)).own
        await store(engine)
        assert not (await engine.lookup("stored again", KEYS)).own
        assert len(node.tier) == 0
        assert node.tier.reserved_count == 0
        async with httpx.AsyncClient(base_url=f"http://{coordinator.http_address}") as http:
            detail = "a model is not served from the cache any more at a: too many chunks were wrong (lmkv doctor)"
            await eventually(lambda: health(http), {"status": "ok", "detail": detail})
        (finding,) = check_audits(await client.instances())
        assert finding.text.startswith(f"a neither stores nor finds chunks of {engine.spec.model_name}")


WRITER = KvInputs(
    named={"config.hidden_size": "64", "weights": "w"},
    others={"lmkv": "1.0", "vllm": "0.31.0", "config.rope_theta": "10000"},
)
READER = KvInputs(named=WRITER.named, others={**WRITER.others, "vllm": "0.32.0", "config.rope_theta": "500000"})


def compared(outcome: pb.AuditOutcome.ValueType, number: int = 1, *, is_requested: bool = False) -> pb.AuditedChunks:
    """One compared chunk of the prompt."""
    chunk = pb.AuditedChunk(
        chunk_key=KEYS[number],
        first_token=256 * number,
        token_count=256,
        tier="own",
        layers=[pb.LayerDifference(layer=3, mean=1.25, most=2.5)],
        engine_request_id="request-7",
        is_requested=is_requested,
    )
    wrong = join_keys(KEYS[number:]) if outcome == pb.AUDIT_OUTCOME_WRONG else b""
    return pb.AuditedChunks(chunk_count=1, wrong_keys=wrong, outcome=outcome, chunk=chunk)


async def test_the_record_of_a_wrong_chunk_names_what_the_keys_lack(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a chunk that an engine of the node has stored, and of one that was read from a peer."""
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        address = {"coordinator_address": (f"127.0.0.1:{coordinator.port}",)}
        async with (
            Node(node_config(runtime_dir, "a", **address)) as first,
            Node(node_config(runtime_dir, "b", **address)) as second,
            EngineClient(first, "writer", inputs=WRITER) as writer,
            EngineClient(first, "reader", inputs=READER) as reader,
            EngineClient(second, "other", inputs=READER) as other,
        ):
            await store(writer, checksum(bytes(writer.spec.chunk_bytes)))
            await until(lambda: len(first.tier) == 5)
            request = pb.LoadRequest(fingerprint=other.spec.fingerprint, chunk_keys=KEYS)
            await eventually(lambda: loaded(other, request), len(KEYS))
            for engine, number in ((other, 3), (reader, 1)):
                await engine.say(audited=compared(pb.AUDIT_OUTCOME_WRONG, number))
                await until(lambda: "is wrong" in caplog.text)
                (record,) = (line for line in caplog.messages if "is wrong" in line)
                assert "[request-7]" in record
                assert KEYS[number].hex() in record
                assert "3: 1.2, 2.5" in record
                assert "computed it: lmkv 1.0, vllm 0.32.0" in record
                assert "lmkv 1.0, vllm 0.31.0" in record.split("Engine that stored it: ")[1].split(". Its key")[0]
                assert "in its model_id, config.hidden_size, weights" in record
                assert "both engines differ: config.rope_theta 10000, here 500000; vllm 0.31.0, here 0.32.0" in record
                own, peer = "stored by an engine of this node", "read from instance a by channel shm"
                assert (own if engine is reader else peer) in record
                assert "in the pool for" in record
                caplog.clear()


def disk_of(folder: Path) -> dict[str, Any]:
    return {"local_disk": (f"{folder}/disk",), "max_local_disk_size": 0.0625}


def store_of(folder: Path) -> dict[str, Any]:
    (folder / "store").mkdir(exist_ok=True)
    return {"remote_url": f"file://{folder}/store", "max_remote_size": 0.0625}


@pytest.mark.parametrize("more", ["", "codec", "encryption"])
@pytest.mark.parametrize("tier", [disk_of, store_of], ids=["disk", "remote"])
async def test_a_chunk_that_was_kept_outside_of_memory_names_the_engine_that_has_stored_it(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture, tier: Callable[[Path], dict[str, Any]], more: str
) -> None:
    """Although other engines of the spec have attached to the node since, and that one has not."""
    settings = tier(runtime_dir)
    if more == "codec":
        settings["local_disk_codec" if tier is disk_of else "remote_codec"] = "zstd"
    elif more:
        settings["encryption_key_file"] = write_keys(runtime_dir / "keys", "a")
    async with (
        Node(node_config(runtime_dir, "a", **settings)) as node,
        EngineClient(node, "writer", inputs=WRITER) as writer,
    ):
        await store(writer, checksum(bytes(writer.spec.chunk_bytes)))
        (kept,) = node.stores
        await until(lambda: kept.stats().written_chunks == 5)
    async with (
        Node(node_config(runtime_dir, "a", **settings)) as node,
        EngineClient(node, "newer", inputs=replace(READER, others={"lmkv": "2.0"})),
        EngineClient(node, "reader", inputs=READER) as reader,
    ):
        request = pb.LoadRequest(fingerprint=reader.spec.fingerprint, chunk_keys=KEYS)
        await eventually(lambda: loaded(reader, request), len(KEYS))
        await reader.say(audited=compared(pb.AUDIT_OUTCOME_WRONG, 1))
        await until(lambda: "is wrong" in caplog.text)
        (record,) = (line for line in caplog.messages if "is wrong" in line)
        assert "Engine that stored it: lmkv 1.0, vllm 0.31.0. " in record
        assert "both engines differ: config.rope_theta 10000, here 500000; vllm 0.31.0, here 0.32.0" in record
    if more == "encryption":
        assert not files_with(runtime_dir, b"rope_theta")


def files_with(folder: Path, content: bytes) -> list[Path]:
    """The files somewhere in a folder that have some bytes in them."""
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


async def loaded(engine: EngineClient, request: pb.LoadRequest) -> int:
    """The chunks that the engine's node has, once it has brought them."""
    response: pb.LoadResponse = await engine.stub.Load(request, timeout=10)
    return response.chunk_count


async def test_audits_that_requests_ask_for_stop_no_spec(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, "a")) as node, EngineClient(node) as engine:
        for number in range(2 * MIN_WRONG):
            await engine.say(audited=compared(pb.AUDIT_OUTCOME_WRONG, number % 4, is_requested=True))
        await until(lambda: node.audits.wrong_count == 2 * MIN_WRONG)
        assert not node.audits.stopped


async def test_a_call_has_every_hit_audited_for_a_time_and_reports_comparisons(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, "a")) as node, EngineClient(node, inputs=READER) as engine:
        await store(engine)
        request = pb.AuditRequest(chunk_count=2)
        request.duration.FromSeconds(60)
        call = engine.stub.Audit(request)
        first = await call.read()
        assert (first.engine_count, first.HasField("audited")) == (1, False)
        (begun,) = await engine.hear("audit_hits")
        assert begun.duration.seconds == 60
        for outcome in (pb.AUDIT_OUTCOME_EQUAL, pb.AUDIT_OUTCOME_WRONG):
            await engine.say(audited=compared(outcome))
        reports = [await call.read() for _ in range(2)]
        assert not isinstance(await call.read(), pb.AuditResponse), "the call has ended"
        assert [report.audited.outcome for report in reports] == [pb.AUDIT_OUTCOME_EQUAL, pb.AUDIT_OUTCOME_WRONG]
        assert [bool(report.record) for report in reports] == [False, True]
        (ended,) = await engine.hear("audit_hits")
        assert not ended.duration.seconds


async def test_calls_that_have_hits_audited_are_few_and_short(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, "a")) as node, EngineClient(node) as engine:
        request = pb.AuditRequest()
        with pytest.raises(grpc.aio.AioRpcError, match="duration must be positive"):
            await engine.stub.Audit(request).read()
        request.duration.FromSeconds(60)
        calls = [engine.stub.Audit(request) for _ in range(MAX_WATCHES)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match="calls watch the audits"):
            await engine.stub.Audit(request).read()
        for call in calls:
            call.cancel()
        await until(lambda: not node.audits.is_watched)


def test_an_instance_reports_wrong_chunks_a_bounded_number_of_times_in_a_minute() -> None:
    reports = WrongReports()
    admitted = [reports.admits("hostile", now / 10) for now in range(300)]
    assert sum(admitted) == MAX_WRONG_REPORTS
    assert reports.admits("honest", 30)
    assert reports.admits("hostile", 90)


async def health(http: httpx.AsyncClient) -> dict[str, str]:
    """The answer of the coordinator's `/healthz`; it has a node's statistics from its heartbeats."""
    answer: dict[str, str] = (await http.get("/healthz")).json()
    return answer


def test_few_wrong_chunks_among_many_do_not_open_the_breaker() -> None:
    breaker = CircuitBreaker()
    assert not breaker.add(LAST_AUDITS, 0)
    for _ in range(LAST_AUDITS // 100):
        assert not breaker.add(1, 1)
    assert breaker.add(1, 1)
    assert not breaker.add(1, 1), "it opens once"
    assert breaker.is_open
