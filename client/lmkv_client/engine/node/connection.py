"""The socket of one attachment: frames of messages, sent and received by the thread that needs them. Used by `client`.

The scheduler's thread sends and receives itself, without a hop to another thread. The client's thread (`keep`) sends
what the socket had no room for, receives while the scheduler does not, and notices the end of the connection.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from lmkv import rpc
from lmkv.errors import BadMessage, LmkvError, MessageTooLarge, Unreachable
from lmkv.rpc.frames import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS, FrameBuffer, FrameKind, to_frame
from lmkv.v1 import engine_service_pb2 as pb

MAX_UNSENT = 4096
"""Most acts that wait for a node that does not read; with more of them the node counts as lost."""
IDLE_SECONDS = 0.1
"""Time without a call of the scheduler after which the client's thread receives."""
RECEIVE_BYTES = 1 << 16
ACT_FRAMING_BYTES = 5
"""Bytes of a message besides an act's own: its tag and length."""
FLUSH_COUNT = 8
"""Most writes at once, while which no other thread can send."""

Deliver = Callable[[pb.AttachResponse], None]


class AttachConnection:
    """A connection to a node. All methods but `keep` and `close` may be called on any thread; only `welcome` and `wait`
    block."""

    def __init__(self, path: Path, deliver: Deliver, timeout_seconds: float) -> None:
        """Connects. `deliver` is called with each message, in order, on the thread that receives it.

        Raises `Unreachable` if no node listens at `path`.
        """
        self.error: LmkvError | None = None
        """The reason why the connection has ended; None if it has not."""
        self.lock = threading.RLock()
        """Held while messages are received and delivered."""
        self._deliver = deliver
        self._frames = FrameBuffer(rpc.MAX_MESSAGE_BYTES)
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._received_at = 0.0
        self._pinged_at: float | None = None
        self._was_polled = False
        """Whether the scheduler has received since the client's thread last looked."""
        self._send_lock = threading.RLock()
        self._outbox: deque[pb.Act] = deque()
        self._control: deque[FrameKind] = deque()
        """Pings and answers to pings that are to be sent."""
        self._rest = memoryview(b"")
        """The part of a frame that is not sent yet."""
        self._is_blocked = False
        """Whether the client's thread is to send the rest, once the socket has room for it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.connect(str(path))
            self._socket.settimeout(0)
            self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            self._socket.close()
            raise Unreachable(f"no node listens at {path}: {error}", socket=path) from None
        self._arrival = select.poll()
        self._arrival.register(self._socket, select.POLLIN)

    # ---- on any thread

    def send(self, *acts: pb.Act) -> None:
        """Sends acts, in one message with those that wait; never blocks. Dropped if the connection has ended."""
        with self._send_lock:
            if self.error is not None:
                return
            self._outbox.extend(acts)
            self._flush()
            if len(self._outbox) <= MAX_UNSENT:
                return
        self.end(Unreachable("the node does not read"))

    def receive(self) -> None:
        """Delivers what has arrived; never waits for more."""
        self._was_polled = True
        with self.lock:
            if self.error is None and self._arrival.poll(0):
                self._receive()

    def wait(self, timeout_seconds: float) -> None:
        """Waits until something arrives, if `timeout_seconds` is positive, and delivers it."""
        self._was_polled = True
        with self.lock:
            if self.error is None and self._arrival.poll(max(0.0, 1e3 * timeout_seconds)):
                self._receive()

    def end(self, error: LmkvError) -> None:
        """Ends the connection with this error, unless it has ended already."""
        with self._send_lock:
            if self.error is not None:
                return
            self.error = error
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for messages
            os.eventfd_write(self._wakeup, 1)

    # ---- on the client's thread

    def welcome(self, hello: pb.Hello, timeout_seconds: float) -> list[pb.AttachResponse]:
        """Sends `hello` and returns what the node answers first. Raises the node's error, or `Unreachable`.

        No other thread may use the connection before.
        """
        answers: list[pb.AttachResponse] = []
        deliver, self._deliver = self._deliver, answers.append
        self.send(pb.Act(hello=hello))
        deadline = time.monotonic() + timeout_seconds
        while not answers and self.error is None:
            if (left := deadline - time.monotonic()) <= 0:
                raise Unreachable("the node does not answer")
            self.wait(left)
        if not answers:
            assert self.error is not None
            raise self.error
        self._deliver = deliver
        return answers

    def keep(self) -> None:
        """Sends and receives what no other thread does. Raises the error with which the connection ends."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        self._received_at = time.monotonic()
        while self.error is None:
            poller.register(self._socket, select.POLLRDHUP | (select.POLLOUT if self._is_blocked else 0))
            ready = dict(poller.poll(1e3 * IDLE_SECONDS))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            happened = ready.get(self._socket.fileno(), 0)
            if happened & select.POLLOUT:
                with self._send_lock:
                    self._flush()
            if happened & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                with self.lock:
                    self._receive()
            elif not self._was_polled and self.lock.acquire(blocking=False):
                try:
                    self._receive()
                finally:
                    self.lock.release()
            self._was_polled = False
            self._keep_alive()
        raise self.error

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self.end(Unreachable("the connection is closed"))  # ends a wait of the scheduler
        with self.lock, self._send_lock:
            if self._socket.fileno() >= 0:
                self._socket.close()
                os.close(self._wakeup)

    # ---- with the lock

    def _receive(self) -> None:
        while self.error is None:
            try:
                count = self._socket.recv_into(self._received)
            except BlockingIOError:
                return
            except OSError as error:
                self.end(Unreachable(f"the connection to the node is broken: {error}"))
                return
            if count == 0:
                self.end(Unreachable("the node ended the stream"))
                return
            self._received_at = time.monotonic()
            try:
                self._take(self._received[:count])
            except (BadMessage, MessageTooLarge, DecodeError) as error:
                self.end(Unreachable(f"the node sends what is no message of this protocol: {error}"))
            if count < RECEIVE_BYTES:
                return

    def _take(self, data: memoryview) -> None:
        self._frames.add(data)
        while frame := self._frames.take():
            kind, payload = frame
            if kind is FrameKind.MESSAGE:
                self._deliver(pb.AttachResponse.FromString(payload))
            elif kind is FrameKind.STATUS:
                self.end(rpc.from_status(status_pb2.Status.FromString(payload)))
                return
            elif kind is FrameKind.PING:
                self._send_control(FrameKind.PONG)

    # ---- with the send lock

    def _flush(self) -> None:
        """Sends what the socket has room for; if much waits, the client's thread sends the rest."""
        was_blocked, self._is_blocked = self._is_blocked, False
        for _ in range(FLUSH_COUNT):
            if not (self._rest or self._control or self._outbox):
                return
            try:
                if not self._rest:
                    self._rest = memoryview(self._next_frame())
                self._rest = self._rest[self._socket.send(self._rest) :]
            except BlockingIOError:
                break
            except OSError:
                return  # the thread that receives learns why
            except MessageTooLarge as error:
                self.end(Unreachable(str(error)))
                return
        self._is_blocked = True
        if not was_blocked:
            os.eventfd_write(self._wakeup, 1)

    def _next_frame(self) -> bytes:
        if self._control:
            return to_frame(self._control.popleft(), b"", 0)
        return to_frame(FrameKind.MESSAGE, next_message(self._outbox).SerializeToString(), rpc.MAX_MESSAGE_BYTES)

    def _send_control(self, kind: FrameKind) -> None:
        with self._send_lock:
            self._control.append(kind)
            self._flush()

    def _keep_alive(self) -> None:
        """Ends the connection if the node does not answer a ping."""
        now = time.monotonic()
        if self._pinged_at is None:
            if now - self._received_at > KEEPALIVE_SECONDS:
                self._pinged_at = now
                self._send_control(FrameKind.PING)
        elif self._received_at > self._pinged_at:
            self._pinged_at = None
        elif now - self._pinged_at > KEEPALIVE_TIMEOUT_SECONDS:
            self.end(Unreachable(f"the node has not answered for {now - self._received_at:.0f} s"))


def next_message(outbox: deque[pb.Act]) -> pb.AttachRequest:
    """Removes acts from the outbox, as many as one message can carry, at least one."""
    message = pb.AttachRequest(acts=[outbox.popleft()])
    size_bytes = message.ByteSize()
    while outbox:
        size_bytes += outbox[0].ByteSize() + ACT_FRAMING_BYTES
        if size_bytes > rpc.MAX_MESSAGE_BYTES // 2:
            break
        message.acts.append(outbox.popleft())
    return message
