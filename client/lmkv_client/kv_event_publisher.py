"""Publishes KV events over ZMQ, as vLLM's `ZmqEventPublisher` does, for `lmkv events`. Only this module uses pyzmq."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from types import TracebackType
from typing import Any, Self

from lmkv.errors import ConfigError, Unreachable
from lmkv.keys import MEDIA_HASH_SCHEME
from lmkv.telemetry.logs import LimitedLogger
from lmkv_client.coordinator import Coordinator, LayoutUpdate
from lmkv_client.kv_events import LayoutEvents, Model, PublishedBatch

try:
    import zmq
    import zmq.asyncio
    from zmq.auth.asyncio import AsyncioAuthenticator
except ModuleNotFoundError:
    MISSING = True
else:
    MISSING = False

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""
RETRY_SECONDS = 0.5
"""Between two questions to a coordinator that does not respond."""
USER = "lmkv"
"""Name that consumers give with a token."""
LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]")
MAX_QUEUED = 100_000
"""Most messages that wait for one consumer; further messages are dropped, and it has to ask for a replay."""


class EventPublisher:
    """A PUB socket for batches and a ROUTER socket for replays. Raises `ConfigError` if it cannot open them."""

    def __init__(self, events: LayoutEvents, endpoint: str, replay_endpoint: str, token: str = "") -> None:
        """An endpoint of all addresses, of loopback or of `ipc` is bound, others are connected; replays are bound.

        With a `token` only consumers that give it are served: ZMQ's PLAIN, user `USER`.
        """
        if MISSING:
            raise ConfigError(
                "KV events need pyzmq, which is not installed; pip install '.[events]' in a clone of lmkv"
            )
        self._events = events
        self._tokens: Any = None
        self._log = LimitedLogger(logger)
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._publisher, self._router):
            socket.set_hwm(MAX_QUEUED)
            socket.linger = 0
            socket.plain_server = bool(token)
        if token:
            self._tokens = AsyncioAuthenticator(self._context)
            self._tokens.start()
            self._tokens.configure_plain(passwords={USER: token})
        try:
            for socket, place in ((self._publisher, endpoint), (self._router, replay_endpoint)):
                if place and (socket is self._router or is_bound(place)):
                    socket.bind(place)
                elif place:
                    socket.connect(place)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{place}: {error}", endpoint=place) from None
        self._replays: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._replays = asyncio.create_task(self._serve_replays())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._replays:
            self._replays.cancel()
            await asyncio.wait([self._replays])
        if self._tokens:
            self._tokens.stop()
        self._context.destroy(linger=0)

    async def follow(self, coordinator: Coordinator, updates: AsyncGenerator[LayoutUpdate, None]) -> None:
        """Publishes the updates of a watch until it ends."""
        async for update in updates:
            if self._events.unknown(update):
                await self._learn(coordinator)
            for batch in self._events.apply(update, time.time()):
                await self._publisher.send_multipart(frames(batch))

    async def _learn(self, coordinator: Coordinator) -> None:
        """Learns the names and chunk sizes of all models. Waits for a coordinator that does not respond."""
        while True:
            try:
                instances = await coordinator.instances()
                break
            except Unreachable as error:
                logger.warning("cannot learn the models of new chunks, trying again: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
        for instance in instances:
            for spec in instance.specs:
                self._events.models[spec.fingerprint] = Model(
                    spec.model_name, spec.chunk_size, spec.hash_scheme != MEDIA_HASH_SCHEME
                )

    async def _serve_replays(self) -> None:
        while True:
            request = await self._router.recv_multipart()
            try:
                peer, start, topic = read_replay(request)
            except ValueError as error:
                self._log.warning("bad replay request: %s", error)
                continue
            for batch in self._events.replay(start, time.time(), topic):
                await self._router.send_multipart([peer, b"", *frames(batch)])
            await self._router.send_multipart([peer, b"", b"", END, b""])


def frames(batch: PublishedBatch) -> list[bytes]:
    """The frames of a batch."""
    return [batch.topic.encode(), batch.sequence.to_bytes(8, "big"), batch.payload]


def read_replay(request: Iterable[bytes]) -> tuple[bytes, int, str | None]:
    """Peer, first number, and topic, if one is named. Raises `ValueError`."""
    match list(request):
        case [peer, b"", start] if len(start) == 8:
            return peer, int.from_bytes(start, "big"), None
        case [peer, b"", start, topic] if len(start) == 8:
            return peer, int.from_bytes(start, "big"), topic.decode()
        case other:
            raise ValueError(f"{len(other)} frames; expected an empty one, 8 bytes, and possibly a topic")


def is_bound(endpoint: str) -> bool:
    """Returns whether to bind an endpoint. vLLM's publisher does the same, except that it connects to loopback."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://", *LOOPBACK))
