"""One attachment's socket against a node that a test plays byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmkv import rpc
from lmkv.errors import ConfigConflict, LmkvError, Unreachable
from lmkv.keys import split_keys
from lmkv.rpc.frames import HEADER, FrameBuffer, FrameKind, to_frame
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.node import connection as connection_module
from lmkv_client.engine.node.connection import AttachConnection
from tests.attach import acts
from tests.waiting import wait_until

SECONDS = 20.0


def response(number: int) -> pb.AttachResponse:
    return pb.AttachResponse(events=[pb.Event(reset=pb.ResetResult(chunk_count=number))])


def frame(message: pb.AttachResponse) -> bytes:
    return to_frame(FrameKind.MESSAGE, message.SerializeToString(), rpc.MAX_MESSAGE_BYTES)


class PlayedNode:
    """A listening socket, an engine's connection to it, and the node's end of that."""

    def __init__(self, path: Path) -> None:
        self.arrived: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.connection = AttachConnection(path, self._deliver, SECONDS)
        self.end, _ = self._listener.accept()
        self.end.settimeout(SECONDS)
        self._frames = FrameBuffer(rpc.MAX_MESSAGE_BYTES)

    def _deliver(self, message: pb.AttachResponse) -> None:
        self.arrived += [event.reset.chunk_count for event in message.events]

    def close(self) -> None:
        self.connection.close()
        self.end.close()
        self._listener.close()

    def read(self) -> tuple[FrameKind, bytes]:
        """The next frame of the engine."""
        while (found := self._frames.take()) is None:
            data = self.end.recv(1 << 16)
            assert data, "the engine ended the connection"
            self._frames.add(data)
        return found

    def wait_for(self, count: int) -> list[int]:
        """What the engine has received, as soon as it is this much."""
        while len(self.arrived) < count:
            assert self.connection.error is None
            self.connection.wait(SECONDS)
        return self.arrived

    def error(self) -> LmkvError:
        """The error with which the connection ends."""
        while self.connection.error is None:
            self.connection.wait(SECONDS)
        return self.connection.error


@pytest.fixture
def node(short_folder: Path) -> Iterator[PlayedNode]:
    node = PlayedNode(short_folder / "attach.sock")
    yield node
    node.close()


@pytest.fixture
def keep(node: PlayedNode) -> Iterator[Callable[[], LmkvError]]:
    """Runs the client's thread; the function returns the error with which it ends."""
    with ThreadPoolExecutor(1) as threads:
        kept = threads.submit(node.connection.keep)

        def ended() -> LmkvError:
            error = kept.exception(SECONDS)
            assert isinstance(error, LmkvError)
            return error

        yield ended
        node.connection.end(Unreachable("the test ends"))


def test_no_node(short_folder: Path) -> None:
    with pytest.raises(Unreachable, match="no node listens at"):
        AttachConnection(short_folder / "none.sock", lambda _: None, SECONDS)


def test_the_welcome_is_returned_with_what_arrives_beside_it(node: PlayedNode) -> None:
    node.end.sendall(frame(response(1)) + frame(response(2)))
    answers = node.connection.welcome(pb.Hello(engine_id="e"), SECONDS)
    assert [answer.events[0].reset.chunk_count for answer in answers] == [1, 2]
    assert node.arrived == []
    kind, payload = node.read()
    assert kind is FrameKind.MESSAGE
    assert pb.AttachRequest.FromString(payload).acts[0].hello.engine_id == "e"
    node.end.sendall(frame(response(3)))
    assert node.wait_for(1) == [3]


def test_a_node_that_does_not_welcome_is_unreachable(node: PlayedNode) -> None:
    with pytest.raises(Unreachable, match="does not answer"):
        node.connection.welcome(pb.Hello(), 0.05)


def test_the_error_of_the_node_is_raised_as_it_was(node: PlayedNode) -> None:
    sent = ConfigConflict("max_local_cpu_size: the engine expects '1'", key="max_local_cpu_size", replaced="true")
    status = rpc.to_status(sent).SerializeToString()
    node.end.sendall(to_frame(FrameKind.STATUS, status, rpc.MAX_MESSAGE_BYTES))
    node.end.shutdown(socket.SHUT_WR)
    with pytest.raises(ConfigConflict) as raised:
        node.connection.welcome(pb.Hello(), SECONDS)
    assert (str(raised.value), raised.value.metadata) == (str(sent), sent.metadata)


def test_messages_that_arrive_byte_by_byte_are_delivered_in_order(node: PlayedNode) -> None:
    stream = b"".join(frame(response(number)) for number in (1, 200, 30_000))
    for at in range(len(stream)):
        node.end.sendall(stream[at : at + 1])
        node.connection.receive()
    assert node.wait_for(3) == [1, 200, 30_000]


def test_what_a_busy_socket_does_not_take_is_sent_merged_and_in_order(
    node: PlayedNode, keep: Callable[[], LmkvError]
) -> None:
    for number in range(100):
        node.connection.send(*acts(drop_damaged=[number.to_bytes(16, "big")] * 2_000))
    keys: list[int] = []
    counts: list[int] = []
    while len(keys) < 200_000:
        message = pb.AttachRequest.FromString(node.read()[1])
        damaged = [key for act in message.acts for key in split_keys(act.drop_damaged.chunk_keys)]
        keys += [int.from_bytes(key, "big") for key in damaged]
        counts.append(len(message.acts))
    assert keys == [number for number in range(100) for _ in range(2_000)]
    assert len(counts) < 100, "those that waited were merged"


def test_a_node_that_does_not_read_is_lost(node: PlayedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNSENT", 5)
    large = acts(drop_damaged=[bytes(16)] * 20_000)
    sent = 0
    while node.connection.error is None:
        node.connection.send(*large)
        sent += 1
        assert sent < 100
    assert "does not read" in str(node.error())
    node.connection.send(*large)  # dropped


def test_a_message_that_is_too_large_ends_the_connection(node: PlayedNode) -> None:
    node.connection.send(*acts(drop_damaged=[bytes(rpc.MAX_MESSAGE_BYTES)]))
    assert "at most 1048576 can be sent" in str(node.error())


def test_a_node_that_ends_in_the_middle_of_a_frame_is_lost(node: PlayedNode, keep: Callable[[], LmkvError]) -> None:
    node.end.sendall(frame(response(1)) + frame(response(2))[:-1])
    node.end.close()
    assert "ended the stream" in str(keep())
    assert node.arrived == [1]


@pytest.mark.parametrize(
    ("garbage", "text"),
    [
        (b"HTTP/1.1 200 OK\r\n", "frames of kind 72 do not exist"),
        (HEADER.pack(FrameKind.MESSAGE, 1 << 30), "a frame has 1073741824 bytes; at most 1048576 are accepted"),
        (to_frame(FrameKind.MESSAGE, b"\xff\xff", 9), "no message of this protocol"),
    ],
)
def test_what_is_no_message_ends_the_connection(node: PlayedNode, garbage: bytes, text: str) -> None:
    node.end.sendall(frame(response(1)) + garbage)
    error = node.error()
    assert isinstance(error, Unreachable)
    assert text in str(error)
    assert node.arrived == [1]


def test_messages_arrive_while_the_scheduler_does_nothing(node: PlayedNode, keep: Callable[[], LmkvError]) -> None:
    node.end.sendall(frame(response(1)))
    wait_until(lambda: node.arrived == [1])


def test_threads_that_receive_at_once_deliver_in_order(node: PlayedNode, keep: Callable[[], LmkvError]) -> None:
    numbers = list(range(1, 2_000))
    sender = threading.Thread(target=node.end.sendall, args=(b"".join(frame(response(one)) for one in numbers),))
    sender.start()
    assert node.wait_for(len(numbers)) == numbers
    sender.join()


def test_a_ping_of_the_node_is_answered(node: PlayedNode, keep: Callable[[], LmkvError]) -> None:
    node.end.sendall(to_frame(FrameKind.PING, b"", 0))
    assert node.read() == (FrameKind.PONG, b"")


def test_a_node_that_does_not_answer_a_ping_is_lost(
    node: PlayedNode, monkeypatch: pytest.MonkeyPatch, keep: Callable[[], LmkvError]
) -> None:
    monkeypatch.setattr(connection_module, "KEEPALIVE_SECONDS", 0.1)
    monkeypatch.setattr(connection_module, "KEEPALIVE_TIMEOUT_SECONDS", 0.1)
    assert node.read() == (FrameKind.PING, b"")
    assert "has not answered" in str(keep())


def test_the_end_of_the_connection_ends_a_wait(node: PlayedNode) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(node.connection.wait, SECONDS)
        node.connection.end(Unreachable("lost"))
        waiting.result(SECONDS)
    node.connection.receive()
    assert str(node.error()) == "lost"
