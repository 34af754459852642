"""Reads from one peer by the faster of two channels; a read that fails by one of them is repeated by the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from lmkv.errors import LmkvError, Unreachable
from lmkv.transfer.channel import Channel, Copy
from lmkv.transfer.choice import ChannelChoice

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""A channel that takes longer to connect for a trial is not tried."""

Connect = Callable[[str], Awaitable[Channel]]
"""Connects to the peer by the channel of this name. Raises an `LmkvError` if that is not possible."""


class SwitchingReader:
    """The reads of one node from one peer. `ChannelChoice` decides; the second channel is connected on first use."""

    def __init__(self, peer_name: str, preferred: Channel, other: str, connect: Connect) -> None:
        self.preferred = preferred
        self._peer_name = peer_name
        self._choice = ChannelChoice(preferred.name, other)
        self._connect = connect
        self._connecting = asyncio.Lock()
        self._channels = {preferred.name: preferred}
        """The channels that the peer was added to."""
        self._failed: set[str] = set()
        """Those of these that must be connected again."""
        self._is_closed = False
        self._trial: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Name of the channel that is used outside of trials."""
        return self._choice.used

    def renew(self, connect: Connect) -> None:
        """The peer was connected by the preferred channel again: metadata of the other one may be outdated."""
        self._connect = connect
        self._failed = set(self._channels) - {self.preferred.name}

    async def close(self, keep: Channel | None = None) -> None:
        """Disconnects from the peer, but not the channel to keep. Idempotent."""
        self.stop()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            if channel is not keep:
                await channel.remove_peer(self._peer_name)

    def stop(self) -> None:
        """Connects to the peer no more. Idempotent."""
        self._is_closed = True
        if self._trial:
            self._trial.cancel()

    async def read(
        self,
        _peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",
    ) -> list[int] | None:
        """As the method of `Channel`."""
        deadline = time.monotonic() + timeout_seconds
        stop = _PostponedStop(on_stopped)
        try:
            try:
                channel = await self._select(deadline)
            except BaseException:
                stop()
                raise
            is_trial = self._choice.is_trial
            try:
                return await self._read(channel, copies, deadline, stop, grant_id)
            except Unreachable as error:
                if channel is not self.preferred and not is_trial:
                    raise  # by the channel that works everywhere: the peer is lost, or refuses
                self._fail(channel.name)
                other = await self._select_other(channel.name, stop, deadline)
                if other is None:
                    raise
                logger.info(
                    "read from %s by %s failed, repeating it by %s: %s",
                    self._peer_name,
                    channel.name,
                    other.name,
                    error,
                )
            stop.rearm()
            return await self._read(other, copies, deadline, stop, grant_id)
        finally:
            stop.release()

    async def _select(self, deadline: float) -> Channel:
        """The connected channel to use now. Raises `Unreachable` if there is none."""
        errors = []
        for _ in range(2):
            name = self._choice.current
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await self._channel(name)
            except (TimeoutError, LmkvError) as error:
                errors.append(f"{name}: {error or 'timeout'}")
                self._fail(name)
        raise Unreachable(f"{self._peer_name} cannot be connected by {'; '.join(errors)}", peer=self._peer_name)

    async def _select_other(self, failed: str, stop: _PostponedStop, deadline: float) -> Channel | None:
        """The channel to repeat a read by, when its memory can be used again; None if there is no such in time."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await stop.happened.wait()
                return await self._channel(self._choice.other_than(failed))
        except (TimeoutError, LmkvError):
            return None

    def _fail(self, name: str) -> None:
        self._failed.add(name)
        self._choice.fail(name, time.monotonic())

    async def _read(
        self, channel: Channel, copies: Sequence[Copy], deadline: float, stop: _PostponedStop, grant_id: str
    ) -> list[int] | None:
        size_bytes = 0
        read = self._choice.begin(channel.name, started := time.monotonic())
        try:
            checksums = await channel.read(self._peer_name, copies, deadline - started, stop, grant_id)
            size_bytes = sum(copy.size_bytes for copy in copies)
        finally:
            used = self._choice.used
            self._choice.end(read, size_bytes, time.monotonic())
        if self._choice.used != used:
            self._log_switch(used)
        if self._choice.is_trial_due and (self._trial is None or self._trial.done()):
            self._trial = asyncio.create_task(self._begin_trial(), name=f"try another channel to {self._peer_name}")
        return checksums

    async def _begin_trial(self) -> None:
        other = self._choice.other_than(self._choice.used)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._channel(other)
        except (TimeoutError, LmkvError) as error:
            logger.debug("%s is not compared with %s to %s: %s", other, self._choice.used, self._peer_name, error)
            self._choice.end_trial(time.monotonic())
        else:
            if self._choice.is_trial_due:  # no read failed meanwhile
                self._choice.begin_trial()

    async def _channel(self, name: str) -> Channel:
        """The channel of this name, connected to the peer. Raises as `Connect` does."""
        if name in self._channels and name not in self._failed:
            return self._channels[name]
        async with self._connecting:
            if self._is_closed:
                raise Unreachable(f"{self._peer_name} is not connected", peer=self._peer_name)
            if name not in self._channels or name in self._failed:
                self._channels[name] = await self._connect(name)
                self._failed.discard(name)
            return self._channels[name]

    def _log_switch(self, before: str) -> None:
        rates = [f"{(self._choice.rate(name) or 0) / 1e9:.2f} GB/s" for name in (self._choice.used, before)]
        logger.info(
            "reading from %s by channel %s: %s, by %s %s", self._peer_name, self.name, rates[0], before, rates[1]
        )


class _PostponedStop:
    """The `on_stopped` of a read that may be repeated: the caller's is called when the last repetition has stopped."""

    def __init__(self, on_stopped: Callable[[], None]) -> None:
        self.happened = asyncio.Event()
        """Set when no more bytes can arrive."""
        self._on_stopped = on_stopped
        self._is_released = False

    def __call__(self) -> None:
        self.happened.set()
        if self._is_released:
            self._on_stopped()

    def rearm(self) -> None:
        """The read is repeated."""
        self.happened.clear()

    def release(self) -> None:
        """The read is not repeated any more."""
        self._is_released = True
        if self.happened.is_set():
            self._on_stopped()
