"""Instances that exist only as streams of reports: a fleet for a coordinator that is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc

from benchmarks.coordinator.layouts import FINGERPRINT, INSTANCE_COUNT, KEYS_PER_REPORT, random_keys
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row
from lmkv import rpc
from lmkv.errors import Full, LmkvError
from lmkv.internal import PROTOCOL_VERSION
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest
from lmkv.internal.v1.report_service_pb2_grpc import ReportServiceStub
from lmkv.keys import KEY_BYTES
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1.registry_service_pb2 import Instance, RegisterRequest
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub
from lmkv_client.demo.cluster import CoordinatorProcess

LONG_LEASE = ("--lease-ttl", "600")
"""Lease of instances that send no further reports: none expires during a measurement."""
TIMEOUT_SECONDS = 60.0


class SimulatedInstance:
    """A simulated instance: its name, and the keys that it reports in host memory."""

    def __init__(self, number: int, keys: bytes, fingerprint: bytes = FINGERPRINT) -> None:
        self.instance_id = f"instance-{number:02}"
        self.keys = keys
        size = KEYS_PER_REPORT * KEY_BYTES
        parts = [keys[start : start + size] for start in range(0, len(keys), size)] or [b""]
        self._reports = [
            ReportRequest(
                instance_id=self.instance_id,
                epoch=1,
                sequence=sequence,
                snapshot=True,
                snapshot_end=sequence == len(parts),
                changes=[ChunkChange(tier=HOST, fingerprint=fingerprint, admitted_keys=part)],
            )
            for sequence, part in enumerate(parts, 1)
        ]
        self._call: Any = None
        self._sequence = 0

    async def join(self, channel: grpc.aio.Channel, specs: Sequence[KvSpec] = ()) -> None:
        """Registers and reports its chunks; returns when the coordinator has all of them."""
        stub: Any = RegistryServiceStub(channel)
        said = Instance(
            instance_id=self.instance_id,
            epoch=1,
            peer_address="127.0.0.1:7000",
            specs=[spec.to_proto() for spec in specs],
        )
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await _register(stub, RegisterRequest(instance=said, protocol_version=PROTOCOL_VERSION))
        reports: Any = ReportServiceStub(channel)
        self._call = reports.Report()
        self._sequence = len(self._reports)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for report in self._reports:
                await self._call.write(report)
            await self._acknowledged()

    async def beat(self) -> None:
        """Says that it is alive."""
        self._sequence += 1
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self._call.write(ReportRequest(instance_id=self.instance_id, epoch=1, sequence=self._sequence))
            await self._acknowledged()

    async def _acknowledged(self) -> None:
        acknowledged = 0
        while acknowledged < self._sequence:
            response = await self._call.read()
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise LmkvError(f"the coordinator ended the reports of {self.instance_id}")
            acknowledged = response.acked_sequence


async def _register(stub: Any, request: RegisterRequest) -> None:
    """Registers an instance. Waits the given time if too many others are registering."""
    while True:
        try:
            await stub.Register(request)
            return
        except grpc.RpcError as error:
            refusal = rpc.from_rpc_error(error)
            if not isinstance(refusal, Full):
                raise refusal from None
        await asyncio.sleep(refusal.retry_seconds)


async def join_all(instances: Sequence[SimulatedInstance], channel: grpc.aio.Channel) -> None:
    """All of them at the same time."""
    async with asyncio.TaskGroup() as tasks:
        for instance in instances:
            tasks.create_task(instance.join(channel))


def make_fleet(instance_count: int, chunk_count: int) -> list[SimulatedInstance]:
    """Instances that together hold `chunk_count` distinct chunks."""
    each = chunk_count // instance_count
    return [SimulatedInstance(number, random_keys(number, each)) for number in range(1, instance_count + 1)]


async def measure_rebuild(run: BenchmarkRun) -> None:
    """Adds the row for a coordinator that is killed and started again: from its start until it knows everything."""
    fleet = make_fleet(INSTANCE_COUNT, 2_000_000)
    with CoordinatorProcess(run.logs, arguments=LONG_LEASE) as coordinator:
        await _fill(coordinator, fleet)
        coordinator.kill()
        started = time.perf_counter()
        coordinator.start()
        coordinator.wait_ready()
        ready = time.perf_counter()
        await _fill(coordinator, fleet)
        ended = time.perf_counter()
    run.add(Row(name="rebuild_2m_s", value=ended - started, unit="s"))
    run.note(f"rebuild_2m_s: {ready - started:.2f} s of it are the start of the process")


async def _fill(coordinator: CoordinatorProcess, fleet: Sequence[SimulatedInstance]) -> None:
    async with rpc.open_channel(coordinator.address) as channel:
        await join_all(fleet, channel)
