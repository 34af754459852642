"""A gRPC channel that reloads its certificates and sends the token. `endpoints` opens it if either is configured.

gRPC for Python reads a client's certificates once, and stubs are bound to a channel. So this channel wraps another one,
which is replaced after a file has changed. Calls in flight end over the old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

import grpc

from lmkv.runtime.reload import Reloadable

OLD_CALLS_SECONDS = 60.0
"""Maximum duration of calls over a connection whose certificates were replaced. Streams then reconnect."""

Metadata = Sequence[tuple[str, str]]


class ReloadingChannel(grpc.aio.Channel):
    """The channel that `make` opens, reopened when one of the files changes; sends `headers` with each call."""

    def __init__(
        self, paths: Sequence[str], make: Callable[[], grpc.aio.Channel], headers: Callable[[], Metadata]
    ) -> None:
        self._channels = Reloadable(paths, make)
        self._current = self._channels.get()
        self._headers = headers
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def current(self) -> grpc.aio.Channel:
        """The channel for the next call."""
        newest = self._channels.get()
        if newest is not self._current:
            old, self._current = self._current, newest
            task = asyncio.create_task(old.close(OLD_CALLS_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._current

    @property
    def headers(self) -> Metadata:
        """The metadata to send with the next call."""
        return self._headers()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        """Ends calls within `grace` seconds, at once if it is None. Idempotent."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._current.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the connection."""
        return self.current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the state differs from `last_observed_state`."""
        await self.current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns when it is connected."""
        await self.current.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """A method for stubs, as the next three."""
        return _Method(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", args, options)


class _Method:
    """One method, called over the current channel."""

    def __init__(self, channel: ReloadingChannel, kind: str, args: Sequence[Any], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._args = args
        self._options = options
        self._bound: tuple[grpc.aio.Channel, Any] | None = None

    def __call__(self, *args: Any, metadata: Metadata | None = None, **options: Any) -> Any:
        channel = self._channel.current
        if self._bound is None or self._bound[0] is not channel:
            self._bound = channel, getattr(channel, self._kind)(*self._args, **self._options)
        return self._bound[1](*args, metadata=(*(metadata or ()), *self._channel.headers), **options)
