"""Reads by two channels that are stubs: which one is used, what is repeated, and when the memory is free again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lmkv.errors import ChannelUnsupported, LmkvError, Unreachable
from lmkv.transfer import Copy, choice
from lmkv.transfer.choice import SAMPLE_BYTES, SwitchingReader
from tests.lmkv.transfer.ends import Stops
from tests.waiting import until

COPIES = [Copy(remote_address=0, local_address=0, size_bytes=SAMPLE_BYTES)]
SECONDS = 30.0


class StubChannel:
    """A channel that moves no bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: LmkvError | None = None
        """Raised by each read."""
        self.stops_late = False
        """Whether the bytes of failed reads may still arrive, until `stop`."""
        self.gate = asyncio.Event()
        """Reads wait for it."""
        self.gate.set()
        self.read_count = 0
        self.removed: list[str] = []
        self._on_stopped: list[Callable[[], None]] = []

    async def read(
        self,
        _peer: str,
        _copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        _grant: str = "",
    ) -> list[int] | None:
        self.read_count += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.sleep(0)  # so that reads overlap
                await self.gate.wait()
            if self.error:
                raise self.error
        except TimeoutError:
            raise Unreachable("timeout", quarantined=True) from None
        finally:
            self._on_stopped.append(on_stopped)
            if not self.stops_late:
                self.stop()
        return None

    def stop(self) -> None:
        """No more bytes arrive for the reads that have ended."""
        while self._on_stopped:
            self._on_stopped.pop()()

    async def remove_peer(self, peer_name: str) -> None:
        self.removed.append(peer_name)


class Two:
    """A reader with two stubs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.nixl, self.tcp = StubChannel("nixl"), StubChannel("tcp")
        self.connect_error: LmkvError | None = None
        self.connected: list[str] = []
        self.connects = asyncio.Event()
        """Connections wait for it."""
        self.connects.set()
        preferred: Any = self.nixl
        self.reader = SwitchingReader("owner:1", preferred, "tcp", self.connect)

    async def connect(self, name: str) -> Any:
        self.connected.append(name)
        await self.connects.wait()
        if self.connect_error:
            raise self.connect_error
        return self.nixl if name == "nixl" else self.tcp

    def choice_always_switches(self) -> None:
        """Any bandwidth of the other channel is enough."""
        self.monkeypatch.setattr(choice, "SWITCH_FACTOR", 0.0)

    async def read(self, stops: Stops, timeout_seconds: float = SECONDS) -> None:
        await self.reader.read("owner:1", COPIES, timeout_seconds, stops, "grant")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Two:
    return Two(monkeypatch)


@pytest.fixture
def stops() -> Stops:
    return Stops()


async def test_reads_use_the_preferred_channel_and_connect_no_other(two: Two, stops: Stops) -> None:
    await two.read(stops)
    assert (two.nixl.read_count, two.tcp.read_count, stops.count) == (1, 0, 1)
    assert two.connected == []


async def test_a_failed_read_is_repeated_and_stops_once(two: Two, stops: Stops) -> None:
    two.nixl.error = Unreachable("no device")
    await two.read(stops)
    assert (two.nixl.read_count, two.tcp.read_count, stops.count) == (1, 1, 1)
    assert two.reader.name == "tcp"
    await two.read(stops)
    assert (two.nixl.read_count, two.tcp.read_count, stops.count) == (1, 2, 2)
    assert two.connected == ["tcp"]


async def test_a_read_is_repeated_only_when_the_first_one_writes_no_more(two: Two, stops: Stops) -> None:
    two.nixl.error, two.nixl.stops_late = Unreachable("lost"), True
    reading = asyncio.create_task(two.read(stops))
    await until(lambda: two.reader.name == "tcp")
    assert (two.tcp.read_count, stops.count) == (0, 0)
    two.nixl.stop()
    await reading
    assert (two.tcp.read_count, stops.count) == (1, 1)


async def test_a_read_that_takes_too_long_is_not_repeated_but_the_next_one_uses_the_other(
    two: Two, stops: Stops
) -> None:
    two.nixl.gate.clear()
    two.nixl.stops_late = True
    with pytest.raises(Unreachable, match="timeout"):
        await two.read(stops, 0.01)
    assert (two.tcp.read_count, stops.count) == (0, 0)
    two.nixl.stop()
    assert stops.count == 1
    await two.read(stops)
    assert (two.tcp.read_count, stops.count) == (1, 2)


async def test_a_cancelled_read_is_not_repeated(two: Two, stops: Stops) -> None:
    two.nixl.gate.clear()
    reading = asyncio.create_task(two.read(stops))
    await until(lambda: two.nixl.read_count == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (two.tcp.read_count, stops.count, two.reader.name) == (0, 1, "nixl")


async def test_without_the_other_channel_the_error_of_the_read_is_raised(two: Two, stops: Stops) -> None:
    two.nixl.error, two.connect_error = Unreachable("lost"), ChannelUnsupported("nixl only")
    with pytest.raises(Unreachable, match="lost"):
        await two.read(stops)
    with pytest.raises(Unreachable, match="cannot be connected by tcp: nixl only; nixl: nixl only"):
        await two.read(stops)
    assert (two.tcp.read_count, stops.count) == (0, 2)
    two.nixl.error = two.connect_error = None
    await two.read(stops)
    assert stops.count == 3


async def test_an_error_of_the_channel_that_works_everywhere_is_raised(two: Two, stops: Stops) -> None:
    two.nixl.error = two.tcp.error = Unreachable("the peer is lost")
    for count in (1, 2):
        with pytest.raises(Unreachable, match="the peer is lost"):
            await two.read(stops)
        assert (two.nixl.read_count, two.tcp.read_count, stops.count) == (1, count, count)


async def test_a_failed_read_of_a_trial_is_repeated_too(two: Two, stops: Stops) -> None:
    two.tcp.error = Unreachable("a firewall")
    for _ in range(2):  # the second one completes a sample
        await two.read(stops)
    await until(lambda: two.connected)
    for _ in range(3):
        await two.read(stops)
    assert (two.tcp.read_count, two.nixl.read_count, stops.count) == (1, 5, 5)
    assert two.reader.name == "nixl"


async def test_a_switch_after_a_trial_is_logged_once_with_what_was_measured(
    two: Two, stops: Stops, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmkv.transfer.choice")
    two.choice_always_switches()
    for _ in range(2):
        await two.read(stops)
    await until(lambda: two.connected)
    while two.reader.name == "nixl":
        await asyncio.gather(*(two.read(stops) for _ in range(3)))
    await two.read(stops)
    (line,) = caplog.messages
    assert line.startswith("reading from owner:1 by channel tcp: ")
    assert ", by nixl " in line


async def test_a_peer_that_cannot_be_connected_by_the_other_channel_is_not_tried(two: Two, stops: Stops) -> None:
    two.connect_error = ChannelUnsupported("nixl only")
    for _ in range(2):
        await two.read(stops)
    await until(lambda: two.connected)
    for _ in range(3):
        await two.read(stops)
    assert two.connected == ["tcp"]
    assert (two.tcp.read_count, two.nixl.read_count, stops.count) == (0, 5, 5)


async def test_what_was_learned_outlives_a_new_connection_but_no_metadata_does(two: Two, stops: Stops) -> None:
    two.nixl.error = Unreachable("no device")
    await two.read(stops)
    two.reader.renew(two.connect)
    for _ in range(3):
        await two.read(stops)
    assert (two.nixl.read_count, two.tcp.read_count) == (1, 4)
    assert two.connected == ["tcp", "tcp"], "each connection connects it once"


async def test_a_closed_reader_disconnects_all_but_the_channel_to_keep_and_connects_no_more(two: Two) -> None:
    two.nixl.error = Unreachable("no device")
    await two.read(Stops())
    keep: Any = two.nixl
    await two.reader.close(keep=keep)
    assert (two.nixl.removed, two.tcp.removed) == ([], ["owner:1"])
    stops = Stops()
    with pytest.raises(Unreachable):
        await two.read(stops)
    assert (stops.count, two.tcp.read_count) == (1, 1)


async def test_a_reader_that_is_stopped_ends_its_trial_and_connects_no_more(two: Two, stops: Stops) -> None:
    two.connects = asyncio.Event()
    for _ in range(2):
        await two.read(stops)
    await until(lambda: two.connected, "a trial connects")
    trial = two.reader._trial
    assert trial
    two.reader.stop()
    await asyncio.wait([trial])
    assert trial.cancelled()
    two.nixl.error = Unreachable("lost")
    with pytest.raises(Unreachable):
        await two.read(stops)
    assert (two.connected, two.tcp.read_count) == (["tcp"], 0)
