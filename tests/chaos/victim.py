"""Processes that are killed, frozen and started again: nodes and coordinators; `store.py` has one more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from lmkv.errors import LmkvError
from lmkv.pool.socket import AttachedPool, attach
from lmkv_client.demo import cluster
from lmkv_client.demo.process import ServerProcess, free_port, session_pids
from tests.chaos.clock import Clock
from tests.chaos.disks import Disks
from tests.chaos.engine import SPEC, Engine
from tests.chaos.tap import Tap
from tests.server.node.engine_client import EngineClient

POOL_BYTES = 48 << 20
"""A third of all prompts: nodes evict, and find what they lack on disk and at others."""
DISK_SIZE = "40MiB"
"""Less than its tmpfs has: the limit holds, until that is filled."""
UCX = {"UCX_TLS": "tcp"}
"""Where NIXL reads need their owner, as between hosts: what a frozen one owes is quarantined."""
PATIENCE_SECONDS = 20.0
"""A process without a fault that does not answer for this long hangs."""
END_SECONDS = 60.0


class Hangs(Exception):
    """A process did not answer although it was neither killed nor frozen."""


async def mapped(socket: str, engine_id: str, epoch: int) -> AttachedPool:
    """The pool of a node. Raises `Unreachable`. If cancelled, waits for the thread that maps it, and closes it."""
    mapping = asyncio.create_task(asyncio.to_thread(attach, socket, engine_id, 0, epoch, PATIENCE_SECONDS))
    try:
        return await asyncio.shield(mapping)
    except asyncio.CancelledError:
        with suppress(LmkvError):
            (await mapping).close()
        raise


class Victim:
    """One process, and what was done to it."""

    def __init__(self, process: ServerProcess, clock: Clock) -> None:
        self.process = process
        self.clock = clock
        self.is_wanted = False
        """Whether it was started, and not killed since."""
        self.frozen = False
        self.life = 0
        """Which one this is, from 1."""
        self._touched_at = 0.0
        process.environment.update(clock.environment)

    @property
    def name(self) -> str:
        """Its name in the schedule, and in the fleet if it is a node."""
        return self.process.name

    def start(self) -> None:
        """Starts it, also again; without waiting."""
        self._touch()
        self.life += 1
        self.process.start()
        self.is_wanted = True

    def kill(self) -> None:
        """Kills it as a crash would."""
        self._touch()
        self.is_wanted = False
        self.process.kill()
        self.frozen = False

    def freeze(self) -> None:
        """Stops it where it is."""
        self._touch()
        os.kill(self.process.pid, signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        """Resumes it if it is frozen."""
        if self.frozen:
            self._touch()
            os.kill(self.process.pid, signal.SIGCONT)
            self.frozen = False

    def overdue(self, error: BaseException) -> None:
        """A client waited `PATIENCE_SECONDS` for it in vain. Raises `Hangs` if no fault explains that."""
        if self.process.alive and not self.frozen and time.monotonic() - self._touched_at > PATIENCE_SECONDS + 1:
            raise Hangs(f"{self.name} did not answer for {PATIENCE_SECONDS:g} s") from error

    async def end(self) -> None:
        """Asks it to end. Raises `Hangs` if it does not, or leaves a process behind."""
        self.thaw()
        if not self.is_wanted:
            return
        self.is_wanted = False
        self.process.request_stop()
        deadline = time.monotonic() + END_SECONDS
        while session_pids(self.process.pid):
            if time.monotonic() > deadline:
                raise Hangs(f"{self.name} does not end within {END_SECONDS:g} s")
            await asyncio.sleep(0.05)

    def _touch(self) -> None:
        self._touched_at = time.monotonic()


class Coordinator(Victim):
    """One `lmkv coordinator`."""

    def __init__(self, name: str, folder: Path, clock: Clock, settings: Mapping[str, str], tap: Tap) -> None:
        (folder / name).mkdir()
        self._tap = tap
        self.server = cluster.CoordinatorProcess(folder / name)
        self.server.environment |= {f"LMKV_{key}": value for key, value in settings.items()}
        self.server.name = name
        super().__init__(self.server, clock)

    @property
    def port(self) -> int:
        """Where it serves, over all its lives."""
        return self.server.port

    def open_channel(self) -> grpc.aio.Channel:
        """A channel of a client, which calls it without a link."""
        return self._tap.client_channel(self.server.address, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a node is, and how it differs from others."""

    name: str
    channel: str
    runtime_dir: Path
    logs: Path
    coordinator_addresses: str


class Node(Victim):
    """One `lmkv node`."""

    def __init__(self, place: Place, disks: Disks, clock: Clock, tap: Tap) -> None:
        self._tap = tap
        self.has_disk = place.name in disks.names
        self.port = free_port()
        """For peers' words."""
        self.bytes_port = free_port()
        """For their reads over TCP."""
        self._socket = place.runtime_dir / place.name / "engine.sock"
        self._metrics_port = free_port()
        self._engine_count = 0
        settings = {
            "INSTANCE_ID": place.name,
            "RUNTIME_DIR": str(place.runtime_dir),
            "COORDINATOR_ADDRESS": place.coordinator_addresses,
            "COORDINATOR_TIMEOUT": "0.5",
            "MAX_LOCAL_CPU_SIZE": f"{POOL_BYTES}B",
            "METRICS_PORT": str(self._metrics_port),
            "P2P_PORT": str(self.port),
            "TRANSFER_PORT": str(self.bytes_port),
            "TRANSFER_CHANNEL": place.channel,
            "GRANT_TTL": "4",
            "PD_ABANDON_TIMEOUT": "5",
            "NODE_LINGER": "3600",
        }
        if self.has_disk:
            settings |= {"LOCAL_DISK": str(disks.path(place.name)), "MAX_LOCAL_DISK_SIZE": DISK_SIZE}
        environment = {f"LMKV_{key}": value for key, value in settings.items()} | UCX
        log = place.logs / f"{place.name}.log"
        super().__init__(ServerProcess(place.name, disks.command(place.name), log, environment), clock)

    @asynccontextmanager
    async def engine(self, *, wants_tier_changes: bool = False) -> AsyncIterator[Engine]:
        """An engine that attaches, maps the pool, and leaves. Raises whatever goes wrong on the line."""
        self._engine_count += 1
        client = EngineClient(
            self._socket,
            f"{self.name}-{self._engine_count}",
            SPEC,
            answer_seconds=PATIENCE_SECONDS,
            wants_tier_changes=wants_tier_changes,
        )
        try:
            await client.__aenter__()
            socket, epoch = client.welcomed.pool_socket, client.welcomed.epoch
            with await mapped(socket, client.engine_id, epoch) as attached:
                engine = self._tap.engine(client, attached.pool, self.name)
                try:
                    yield engine
                finally:
                    engine.close()
        except TimeoutError as error:
            self.overdue(error)
            raise
        finally:
            await client.aclose()

    async def metrics(self) -> dict[str, float]:
        """What the node measures, as `NAME` or `NAME/TIER`, without `lmkv_node_`. Raises `httpx.HTTPError`, `Hangs`."""
        async with httpx.AsyncClient(trust_env=False) as client:
            try:
                address = f"http://127.0.0.1:{self._metrics_port}/metrics"
                answer = await client.get(address, timeout=PATIENCE_SECONDS)
            except httpx.TimeoutException as error:
                self.overdue(error)
                raise
        return {
            "/".join([sample.name.removeprefix("lmkv_node_"), sample.labels.get("tier", "")]).rstrip("/"): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name.startswith("lmkv_node_") and sample.labels.keys() <= {"instance_id", "tier"}
        }
