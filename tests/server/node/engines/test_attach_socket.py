"""`Attach` as frames on the node's unix socket: of real nodes, by an engine that a test plays byte by byte."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, Self

import grpc
import pytest
from google.rpc import status_pb2

from lmkv import rpc
from lmkv.errors import LmkvError, MessageTooLarge
from lmkv.keys import join_keys
from lmkv.rpc.frames import HEADER, FrameBuffer, FrameKind, to_frame
from lmkv.runtime.memory_budget import DECODED_PROTOBUF_FACTOR, MemoryBudget
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.engines import attach_socket, outbox
from lmkv_server.node.engines import service as engine_service
from lmkv_server.node.node import Node
from tests.attach import events, request
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import SPEC
from tests.support.specs import small_spec
from tests.waiting import until

SECONDS = 40.0


def hello(engine_id: str = "engine", **fields: Any) -> pb.AttachRequest:
    return request(hello=pb.Hello(engine_id=engine_id, spec=SPEC.to_proto(), worker_count=1, **fields))


def lookup(lookup_id: str) -> pb.AttachRequest:
    keys = join_keys(chunk_keys(0, 1, 2))
    return request(lookup=[pb.LookupChunks(lookup_id=lookup_id, chunk_keys=keys)])


def framed(message: pb.AttachRequest) -> bytes:
    return to_frame(FrameKind.MESSAGE, message.SerializeToString(), rpc.MAX_MESSAGE_BYTES)


class FrameEngine:
    """The engine's end of the socket."""

    def __init__(self, node: Node) -> None:
        self._path = node.config.attach_socket
        self._frames = FrameBuffer(rpc.MAX_MESSAGE_BYTES)

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_unix_connection(str(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def send(self, *messages: pb.AttachRequest) -> None:
        self.writer.write(b"".join(framed(message) for message in messages))

    async def read(self) -> tuple[FrameKind, bytes] | None:
        """The next frame; None at the end."""
        async with asyncio.timeout(SECONDS):
            while (frame := self._frames.take()) is None:
                if not (data := await self.reader.read(1 << 16)):
                    return None
                self._frames.add(data)
        return frame

    async def message(self) -> pb.AttachResponse:
        frame = await self.read()
        assert frame is not None, "the node ended the stream"
        kind, payload = frame
        assert kind is FrameKind.MESSAGE
        return pb.AttachResponse.FromString(payload)

    async def found(self, count: int) -> list[str]:
        """The ids of the next answers to lookups."""
        ids: list[str] = []
        while len(ids) < count:
            ids += [one.lookup_id for one in events(await self.message(), "found")]
        return ids

    async def ending(self) -> LmkvError:
        """Why the node ends the stream; what it sent before is dropped."""
        while frame := await self.read():
            kind, payload = frame
            if kind is FrameKind.STATUS:
                assert await self.read() is None, "nothing follows"
                return rpc.from_status(status_pb2.Status.FromString(payload))
        raise AssertionError("the node ended the stream without a reason")


async def test_only_the_nodes_user_can_open_it_and_it_ends_with_the_node(node: Node) -> None:
    path = node.config.attach_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with FrameEngine(node) as engine:
        engine.send(hello())
        await engine.message()
        await node._stack.aclose()
        assert await engine.read() is None
    assert not path.exists()


async def test_an_engine_is_welcomed_and_answered(node: Node) -> None:
    async with FrameEngine(node) as engine:
        engine.send(hello())
        welcome = (await engine.message()).events[0].welcome
        assert (welcome.instance_id, welcome.epoch) == ("test-node", node.epoch)
        engine.send(lookup("1"))
        assert await engine.found(1) == ["1"]
        assert node.engines.attached_count == 1
    await until(lambda: node.engines.attached_count == 0)


async def test_messages_that_arrive_byte_by_byte_are_carried_out(node: Node) -> None:
    async with FrameEngine(node) as engine:
        for byte in framed(hello()) + framed(lookup("1")):
            engine.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await engine.message()).events[0].HasField("welcome")
        assert await engine.found(1) == ["1"]


async def test_messages_are_carried_out_in_order(node: Node) -> None:
    async with FrameEngine(node) as engine:
        engine.send(hello(), *(lookup(str(number)) for number in range(300)))
        assert await engine.found(300) == [str(number) for number in range(300)]


async def test_an_engine_that_ends_in_the_middle_of_a_frame_is_detached_without_it(node: Node) -> None:
    async with FrameEngine(node) as engine:
        engine.send(hello())
        await engine.message()
        engine.send(request(reserve=2))
        while not list(events(await engine.message(), "granted")):
            pass
        engine.writer.write(framed(lookup("1"))[:-1])
    await until(lambda: node.engines.attached_count == 0)
    await until(lambda: node.tier.used_bytes == 0)


BAD: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "frames of kind 80 do not exist"),
    "no protobuf": (to_frame(FrameKind.MESSAGE, b"\xff\xff", 9), "not a valid protobuf message"),
    "no hello": (framed(lookup("1")), "the first act must be hello"),
    "a second hello": (framed(hello("other")) + framed(hello("other")), "hello may be sent only once"),
    "a bad key": (framed(hello("other")) + framed(request(drop_damaged=[b"short"])), "chunk_keys"),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_makes_no_sense_ends_its_stream_with_a_reason_and_no_other(
    node: Node, engine: EngineClient, case: str
) -> None:
    sent, text = BAD[case]
    async with FrameEngine(node) as bad:
        bad.writer.write(sent)
        error = await bad.ending()
    assert error.code == "INVALID_ARGUMENT"
    assert text in str(error)
    await until(lambda: node.engines.attached_count == 1)
    assert not (await engine.lookup("1", chunk_keys(0))).own


async def test_a_frame_over_the_limit_ends_its_stream_with_the_code_of_grpc_and_no_other(
    node: Node, engine: EngineClient
) -> None:
    async with FrameEngine(node) as large:
        large.writer.write(HEADER.pack(FrameKind.MESSAGE, rpc.MAX_MESSAGE_BYTES + 1))
        error = await large.ending()
    assert type(error) is MessageTooLarge
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.name  # as of gRPC on the other socket
    assert error.metadata == {"size_bytes": "1048577", "limit": "1048576"}
    assert not (await engine.lookup("1", chunk_keys(0))).own


@pytest.mark.parametrize(
    "refused",
    [
        hello("other", expected_config={"LMKV_NODE_LINGER": "1.0"}),
        hello("engine"),  # in use
        request(hello=pb.Hello(engine_id="other", spec=small_spec(layer_count=10_000).to_proto())),
    ],
    ids=["another configuration", "id in use", "a spec that does not fit"],
)
async def test_an_engine_is_refused_with_the_error_of_grpc(
    node: Node, engine: EngineClient, refused: pb.AttachRequest
) -> None:
    async with FrameEngine(node) as other:
        other.send(refused)
        error = await other.ending()
    by_grpc = EngineClient(node)
    await by_grpc.call.write(refused)
    with pytest.raises(grpc.RpcError) as raised:
        await by_grpc.call.read()
    expected = rpc.from_rpc_error(raised.value)
    await by_grpc.aclose()
    assert (type(error), str(error), error.metadata) == (type(expected), str(expected), expected.metadata)
    assert str(error)


async def test_an_engine_that_sends_nothing_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_service, "HELLO_TIMEOUT_SECONDS", 0.1)
    async with FrameEngine(node) as silent:
        assert "must be hello" in str(await silent.ending())


async def test_an_engine_that_does_not_read_delays_no_other_and_is_detached_at_its_end(
    node: Node, engine: EngineClient
) -> None:
    async with FrameEngine(node) as slow:
        slow.send(hello("slow"))
        await slow.message()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(5_000):
            slow.send(lookup(f"{number}-{'x' * 200}"))
        await slow.writer.drain()
        await until(lambda: node.service.lookups.stats().asked_chunks >= 15_000)
        assert not (await engine.lookup("1", chunk_keys(0))).own
        assert node.engines.attached_count == 2
    await until(lambda: node.engines.attached_count == 1)


async def test_pings_of_either_side_are_answered(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_socket, "KEEPALIVE_SECONDS", 0.1)
    monkeypatch.setattr(attach_socket, "KEEPALIVE_TIMEOUT_SECONDS", SECONDS)
    async with FrameEngine(node) as engine:
        engine.send(hello())
        await engine.message()
        engine.writer.write(to_frame(FrameKind.PING, b"", 0))
        assert {await engine.read(), await engine.read()} == {(FrameKind.PONG, b""), (FrameKind.PING, b"")}


async def test_an_engine_that_does_not_answer_a_ping_is_detached(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_socket, "KEEPALIVE_SECONDS", 0.1)
    monkeypatch.setattr(attach_socket, "KEEPALIVE_TIMEOUT_SECONDS", 0.1)
    async with FrameEngine(node) as engine:
        engine.send(hello())
        kinds = []
        while frame := await engine.read():
            kinds.append(frame[0])
        assert kinds[-1] is FrameKind.PING
    await until(lambda: node.engines.attached_count == 0)


async def test_an_engine_that_sends_and_never_reads_is_detached(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING_BYTES", 1 << 20)
    monkeypatch.setattr(attach_socket, "KEEPALIVE_SECONDS", 0.2)
    monkeypatch.setattr(attach_socket, "KEEPALIVE_TIMEOUT_SECONDS", 0.2)
    ids = [f"{number:0>64}" for number in range(500)]
    lookups = request(lookup=[act.lookup for number in ids for act in lookup(number).acts])
    releases = request(release=[pb.ReleaseChunks(lookup_id=number) for number in ids])
    async with FrameEngine(node) as engine:
        engine.send(hello())
        await engine.message()
        with suppress(ConnectionError):
            async with asyncio.timeout(SECONDS):
                while node.engines.attached_count:
                    engine.send(lookups, releases)
                    await engine.writer.drain()
        await until(lambda: not node.engines.attached_count)
    async with FrameEngine(node) as engine:
        engine.send(hello("next"))
        await engine.message()


async def test_a_frame_takes_memory_before_its_payload_is_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(40 << 20)
    monkeypatch.setattr(attach_socket, "of_process", lambda: budget)
    size = rpc.MAX_MESSAGE_BYTES
    async with FrameEngine(node) as engine, FrameEngine(node) as other:
        engine.send(hello())
        await engine.message()
        assert budget.held_bytes == 0
        engine.writer.write(HEADER.pack(FrameKind.MESSAGE, size))
        await until(lambda: budget.held_bytes == size * DECODED_PROTOBUF_FACTOR)
        with budget.take("another process", 8 << 20):  # it has a share of its own
            other.writer.write(HEADER.pack(FrameKind.MESSAGE, size) + bytes(size // 2))
            await until(lambda: budget.waiting_count == 1)  # both have one share, as they are of one process
    await until(lambda: budget.held_bytes == 0)
    assert budget.waiting_count == 0


async def test_an_engine_that_does_not_read_its_last_frames_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_socket, "CLOSE_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    frame = bytes(rpc.MAX_MESSAGE_BYTES // 2)

    async def serve(_: AsyncIterator[pb.AttachRequest]) -> AsyncGenerator[pb.AttachResponse, None]:
        for _number in range(8):
            yield pb.AttachResponse(events=[pb.Event(found=pb.FoundChunks(partial_key=frame))])

    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.transport.set_write_buffer_limits(high=16 * len(frame))
        await attach_socket._Connection(reader, writer).serve(serve)
        theirs.settimeout(SECONDS)
        received = 0
        while data := await asyncio.to_thread(theirs.recv, 1 << 16):
            received += len(data)
    assert received < 8 * len(frame), "what was not read in time is not sent"
