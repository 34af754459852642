"""Chooses one of two channels for the reads from one peer, by the bandwidth of the reads themselves.

preferred channel ── SAMPLE_BYTES were read ──► trial: the next SAMPLE_BYTES by the other channel
        ▲                                          │ not clearly faster ──► back, and the next trial is later
        └── a failed read: the other at once ──────┴ clearly faster ──────► the channels change places
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmkv.errors import LmkvError, Unreachable
from lmkv.transfer.channel import Channel, Copy

SAMPLE_BYTES = 64 << 20
"""Bytes that a bandwidth is measured by."""
LEAST_BYTES = 1 << 20
"""Smaller reads measure latency rather than bandwidth, and are ignored."""
SWITCH_FACTOR = 1.3
"""A channel replaces another one only if it is faster by this factor."""
MOST_SLOWDOWN = 2.0
"""A trial ends when it has taken this multiple of the time that the other channel needs for `SAMPLE_BYTES`."""
FIRST_PAUSE_SECONDS = 60.0
"""Least time between a trial and the next one. It doubles with each trial."""
LAST_PAUSE_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class RunningRead:
    """A read that was begun and has not ended."""

    name: str
    """Its channel."""
    started: float
    is_mixed: bool = False
    """Whether reads by the other channel ran at the same time: it measures neither."""


@dataclass(slots=True)
class _Sample:
    """The bandwidth of one channel."""

    rate: float | None = None
    """Bytes per second of the last complete sample."""
    size_bytes: int = 0
    seconds: float = 0.0
    is_connected: bool = False
    """Whether a read was made: the first one is ignored, because it includes connecting."""
    last_end: float = field(default=-math.inf)

    def add(self, size_bytes: int, seconds: float) -> bool:
        """Adds a read; whether this completes a sample."""
        if not self.is_connected:
            self.is_connected = True
            return False
        if size_bytes < LEAST_BYTES or seconds <= 0:
            return False
        self.size_bytes += size_bytes
        self.seconds += seconds
        if self.size_bytes < SAMPLE_BYTES:
            return False
        self.rate = self.size_bytes / self.seconds
        self.size_bytes, self.seconds = 0, 0.0
        return True


class ChannelChoice:
    """The choice between two channels to one peer."""

    def __init__(self, preferred: str, other: str) -> None:
        self.used = preferred
        """The channel of all reads outside of trials."""
        self.is_trial = False
        self._other = other
        self._samples = {preferred: _Sample(), other: _Sample()}
        self._running: set[RunningRead] = set()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next_trial = -math.inf
        self._is_due = False

    @property
    def current(self) -> str:
        """The channel of the next read."""
        return self._other if self.is_trial else self.used

    @property
    def is_trial_due(self) -> bool:
        """Whether the caller should connect by the other channel, then call `begin_trial` or `end_trial`."""
        return self._is_due and not self.is_trial

    def other_than(self, name: str) -> str:
        """The other one of the two channels."""
        return self._other if name == self.used else self.used

    def rate(self, name: str) -> float | None:
        """Measured bytes per second of a channel; None: unknown."""
        return self._samples[name].rate

    def begin(self, name: str, now: float) -> RunningRead:
        """Notes that a read by a channel begins."""
        read = RunningRead(name, now)
        for other in self._running:
            if other.name != name:
                read.is_mixed = other.is_mixed = True
        self._running.add(read)
        return read

    def end(self, read: RunningRead, size_bytes: int, now: float) -> None:
        """Notes that a read has ended and that `size_bytes` were read; 0: it failed or was cancelled."""
        self._running.discard(read)
        sample = self._samples[read.name]
        seconds = now - max(read.started, sample.last_end)  # reads of one channel share its bandwidth
        sample.last_end = now
        is_complete = not read.is_mixed and size_bytes > 0 and sample.add(size_bytes, seconds)
        if self.is_trial and read.name == self._other:
            self._judge(now)
        elif is_complete and read.name == self.used and now >= self._next_trial:
            self._is_due = True

    def begin_trial(self) -> None:
        """Begins a trial: the other channel is connected."""
        self._samples[self._other] = _Sample()
        self.is_trial = True

    def end_trial(self, now: float) -> None:
        """Ends a trial without a change, or gives up a due trial; the next trial is later."""
        self.is_trial = self._is_due = False
        self._next_trial = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LAST_PAUSE_SECONDS)

    def fail(self, name: str, now: float) -> None:
        """Records that a read by this channel failed: the next reads use the other channel."""
        if name == self.current:
            if not self.is_trial:
                self._change_places()
            self.end_trial(now)

    def _judge(self, now: float) -> None:
        """Ends the trial if the other channel is known to be faster, or not to be."""
        used, other = self._samples[self.used], self._samples[self._other]
        assert used.rate is not None, "a trial follows a sample"
        if other.rate is not None and other.rate > SWITCH_FACTOR * used.rate:
            self._change_places()
            self.end_trial(now)
        elif other.rate is not None or other.seconds > MOST_SLOWDOWN * SAMPLE_BYTES / used.rate:
            self.end_trial(now)

    def _change_places(self) -> None:
        self.used, self._other = self._other, self.used


RDMA = "RDMA device"
"""An RDMA device with an active port, which this process may open."""
NEEDED_LINKS: Mapping[str, str] = {"nixl": RDMA}
"""The link without which a channel is slower than the others: NIXL over TCP reaches half of `tcp`'s bandwidth."""


def missing_link(name: str, links: Collection[str]) -> str | None:
    """The link that a channel needs and a host with these links lacks."""
    needed = NEEDED_LINKS.get(name)
    return needed if needed not in links else None


def rank(names: Iterable[str], links: Collection[str]) -> tuple[str, ...]:
    """The channels in this order, but those whose link the host lacks last."""
    return tuple(sorted(names, key=lambda name: missing_link(name, links) is not None))


def find_links(sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> frozenset[str]:
    """The links of the host that has these folders; none where there is no `/sys`."""
    return frozenset({RDMA} if active_rdma_devices(sys) and _may_open_rdma(dev) else ())


def active_rdma_devices(sys: Path) -> list[str]:
    """The RDMA devices (InfiniBand, RoCE, EFA) with an active port, by name."""
    states = sorted(sys.glob("class/infiniband/*/ports/*/state"))
    return list(dict.fromkeys(state.parts[-4] for state in states if _is_active(state)))


def _is_active(state: Path) -> bool:
    """Whether the file of a port's state contains `4: ACTIVE`."""
    try:
        return state.read_text().strip().endswith(": ACTIVE")
    except OSError:  # the device was removed meanwhile
        return False


def _may_open_rdma(dev: Path) -> bool:
    """Whether a device file can be opened. Containers see the devices of their host in `/sys` in any case."""
    return any(os.access(file, os.R_OK | os.W_OK) for file in dev.glob("infiniband/uverbs*"))


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
        """The peers among these that must be connected again."""
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
        """Implements `Channel`."""
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
