"""The parts of the chaos test do what they claim: the clock, kept logs, links, schedule, store and watcher."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import valkey

from tests.chaos.clock import Clock, compiled
from tests.chaos.kept_logs import kept_logs
from tests.chaos.link import Link, Way
from tests.chaos.schedule import DELAYS, LAST_SECONDS, Fault, Kind, schedule
from tests.chaos.store import Store
from tests.chaos.watchers import Died, MetricsWatcher

PRINT_TIME = "import time\nwhile input(): print(time.time(), time.monotonic(), flush=True)"


@pytest.mark.parametrize("seconds", [-3600.25, 0.0, 20.75])
def test_a_clock_jumps_while_its_process_runs_and_no_other_does(tmp_path: Path, seconds: float) -> None:
    library = compiled(tmp_path)
    assert library is not None, "cc is missing: install gcc"
    clock = Clock(library, tmp_path / "clock")
    command = [sys.executable, "-c", PRINT_TIME]
    pipe, environment = subprocess.PIPE, os.environ | clock.environment
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        for jump in (0.0, seconds, 0.0):
            clock.jump(jump)
            begun = time.time(), time.monotonic()
            wall, monotonic = ask(process)
            ended = time.time(), time.monotonic()
            assert begun[0] <= wall - jump <= ended[0]
            assert begun[1] <= monotonic <= ended[1]
        process.communicate("\n", timeout=60)


def ask(process: subprocess.Popen[str]) -> tuple[float, float]:
    """What time it is for a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    wall, monotonic = process.stdout.readline().split()
    return float(wall), float(monotonic)


@pytest.mark.parametrize("error", [AssertionError("an operation runs"), pytest.fail.Exception("a rule")])
def test_the_logs_of_a_failed_run_are_copied_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    logs, failures = tmp_path / "logs", tmp_path / "failures"
    (logs / "coordinator-1").mkdir(parents=True)
    (logs / "coordinator-1" / "coordinator.log").write_text("registered")
    with pytest.raises(type(error)) as raised, kept_logs("run-7", "SEED=7", logs, capsys, failures):
        raise error
    (kept,) = failures.iterdir()
    assert kept.name.startswith("run-7-")
    assert (kept / "coordinator-1" / "coordinator.log").read_text() == "registered"
    assert raised.value.__notes__ == [f"SEED=7 failed; its logs are in {kept}"]


def test_a_run_that_passes_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kept_logs("run-7", "SEED=7", tmp_path, capsys, tmp_path / "failures"):
        pass
    assert not (tmp_path / "failures").exists()


WAIT_SECONDS = 60.0


SILENCE_SECONDS = 0.1


"""Nothing comes for so long; never mistaken where all is well, however slow the machine."""


class Caller:
    """One connection to an echo server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, word: bytes) -> None:
        """Sends a word."""
        self._writer.write(word)
        await self._writer.drain()

    async def hear(self, timeout_seconds: float = WAIT_SECONDS) -> bytes:
        """What comes next; nothing at the end."""
        async with asyncio.timeout(timeout_seconds):
            return await self._reader.read(100)

    def close(self) -> None:
        """Hangs up."""
        self._writer.close()


class Parts:
    """A link to an echo."""

    def __init__(self, link: Link, address: str) -> None:
        self.link = link
        self._address = address

    async def call(self) -> Caller:
        """A connection over the link."""
        host, _, port = self._address.rpartition(":")
        return Caller(*await asyncio.open_connection(host, int(port)))


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while word := await reader.read(100):
            writer.write(word)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server, Link("a>b") as link:
        yield Parts(link, await link.open_door(server.sockets[0].getsockname()[1]))


@pytest.mark.parametrize("ways", [(Way.QUESTIONS,), (Way.ANSWERS,), tuple(Way)])
async def test_what_is_cut_is_silent_and_comes_when_it_is_mended(parts: Parts, ways: tuple[Way, ...]) -> None:
    caller = await parts.call()
    parts.link.cut(*ways)
    parts.link.cut(*ways)
    await caller.say(b"hello")
    parts.link.mend(*ways)
    with pytest.raises(TimeoutError):
        await caller.hear(SILENCE_SECONDS)
    parts.link.mend(*ways)
    assert await caller.hear() == b"hello"
    caller.close()


async def test_who_refuses_resets_connections_and_new_ones(parts: Parts) -> None:
    before = await parts.call()
    await before.say(b"hello")
    assert await before.hear() == b"hello"
    parts.link.refuse()
    with pytest.raises(ConnectionResetError):
        await before.hear()
    with pytest.raises(ConnectionResetError):
        await (await parts.call()).hear()
    parts.link.accept()
    after = await parts.call()
    await after.say(b"again")
    assert await after.hear() == b"again"
    after.close()


async def test_a_half_open_connection_stays_silent_and_a_new_one_works(parts: Parts) -> None:
    caller = await parts.call()
    await caller.say(b"hello")
    assert await caller.hear() == b"hello"
    parts.link.half_open()
    await caller.say(b"hello?")
    with pytest.raises(TimeoutError):
        await caller.hear(SILENCE_SECONDS)
    other = await parts.call()
    await other.say(b"hello")
    assert await other.hear() == b"hello"
    caller.close()
    other.close()


async def test_a_late_link_passes_everything_on_in_order(parts: Parts) -> None:
    parts.link.delay(0.05)
    caller = await parts.call()
    await caller.say(b"hello")
    assert await caller.hear() == b"hello"
    parts.link.hurry(0.05)
    await caller.say(b"again")
    assert await caller.hear() == b"again"
    caller.close()


NODES, COORDINATORS, DISKS, STORES = ("a", "b"), ("x", "y"), ("b",), ("s",)


def drawn(seed: int, count: int = 1000, stores: Sequence[str] = ()) -> list[Fault]:
    """The first faults of a schedule."""
    return list(islice(schedule(seed, NODES, COORDINATORS, DISKS, stores), count))


def targets(faults: Sequence[Fault]) -> dict[Kind, set[str]]:
    """What each kind was drawn for."""
    return {kind: {fault.target for fault in faults if fault.kind is kind} for kind in Kind}


def test_a_seed_is_a_schedule() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1, 10) == drawn(1, 20)[:10]


def test_faults_come_in_order_of_every_kind_and_end() -> None:
    faults = drawn(3)
    assert all(one.at < other.at for one, other in pairwise(faults))
    assert {fault.kind for fault in faults} == set(Kind)
    assert all(LAST_SECONDS[0] <= fault.seconds <= LAST_SECONDS[1] for fault in faults)


def test_each_kind_finds_all_its_targets_and_no_other() -> None:
    found = targets(drawn(4, 5000))
    reports = {"a>x", "a>y", "b>x", "b>y"}
    assert found[Kind.KILL] == found[Kind.FREEZE] == found[Kind.CLOCK] == {"a", "b", "x", "y"}
    assert found[Kind.PARTITION] == found[Kind.CROWD] == {"a", "b"}
    assert found[Kind.FILL] == {"b"}
    assert found[Kind.REPEAT] == found[Kind.REORDER] == reports
    assert found[Kind.CUT] == found[Kind.RESET] == found[Kind.DELAY] == reports | {"a>b", "b>a"}


def test_a_store_is_a_process_with_links_of_its_own() -> None:
    without, found = targets(drawn(4, 5000)), targets(drawn(4, 5000, STORES))
    for kind in Kind:
        is_of_processes = kind in (Kind.KILL, Kind.FREEZE, Kind.CLOCK)
        is_of_nodes = kind in (Kind.FILL, Kind.CROWD, Kind.PARTITION, Kind.REPEAT, Kind.REORDER)
        own = {"s"} if is_of_processes else set() if is_of_nodes else {"x>s", "y>s"}
        assert found[kind] - without[kind] == own


def test_a_fault_says_what_it_is_in_a_line() -> None:
    fault = Fault(at=1.5, kind=Kind.DELAY, target="a>x", seconds=0.25, amount=DELAYS[0])
    assert str(fault) == "    1.50 s  delay a>x by 0.01 s for 0.25 s"


HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    library = compiled(tmp_path)
    assert library is not None, "cc is missing: install gcc"
    store = Store("store", tmp_path, Clock(library, tmp_path / "clock"))
    try:
        store.start()
        store.wait_ready()
        yield store
    finally:
        store.process.kill()


def test_a_store_that_is_killed_comes_back_empty(store: Store) -> None:
    with valkey.Valkey(port=store.port) as client:
        client.set("name", "value")
        store.kill()
        store.start()
        store.wait_ready()
        assert client.dbsize() == 0


def test_when_the_clock_of_a_store_jumps_what_was_to_expire_is_gone(store: Store) -> None:
    with valkey.Valkey(port=store.port) as client:
        client.set("stays", "value")
        client.set("goes", "value", px=round(1000 * HOUR / 2))
        store.clock.jump(HOUR)
        seconds, _ = client.time()
        assert seconds > time.time() + HOUR / 2
        assert (client.get("stays"), client.get("goes")) == (b"value", None)


ABORTED = "INFO reading from node-2\n[vm:3752 :0:3778] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout\n"


class EndedNode:
    """A node that is not alive until it is started again."""

    name = "node-1"
    is_wanted = True

    def __init__(self, log: str) -> None:
        self.process = SimpleNamespace(alive=False, log=lambda: log)
        self.calls: list[str] = []

    def kill(self) -> None:
        """Ends what is left of it."""
        self.calls.append("kill")

    def start(self) -> None:
        """Starts it again."""
        self.calls.append("start")
        self.process.alive = True


async def watch(node: EndedNode, counts: Counter[str]) -> None:
    """Watches until the node is alive, or its end is an error."""
    fleet: Any = SimpleNamespace(victims={node.name: node}, nodes=[])
    watching = asyncio.create_task(MetricsWatcher(fleet, 1, counts).run())
    while not node.process.alive and not watching.done():
        await asyncio.wait([watching], timeout=0.05)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=not watching.done())


async def test_a_node_that_ucx_has_aborted_is_counted_and_started_again() -> None:
    node, counts = EndedNode(ABORTED), Counter[str]()
    await watch(node, counts)
    assert node.calls == ["kill", "start"]
    assert counts == {"nodes aborted by UCX": 1}


@pytest.mark.parametrize("log", ["", "Traceback\n", ABORTED + "INFO node ready\n"])
async def test_any_other_end_without_a_fault_is_an_error(log: str) -> None:
    node = EndedNode(log)
    with pytest.raises(Died, match="node-1 ended by itself"):
        await watch(node, Counter())
    assert not node.calls
