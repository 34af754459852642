"""The layout map by itself: what it takes for each chunk of a holder, and how fast it takes reports in."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import compare
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest
from lmkv.keys import KEY_BYTES, split_keys
from lmkv.tiers import HOST
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap, tier_number
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.registry.registry import Registry, ReportStream

INSTANCE_COUNT = 50
KEYS_PER_REPORT = 16_384
"""As many as a node puts into one."""
FINGERPRINT = b"f" * 16
CHUNK_SIZE = 256


def random_keys(seed: int, count: int) -> bytes:
    """Keys that are all different, as if they were digests."""
    return np.random.default_rng(seed).bytes(KEY_BYTES * count)


def measure(run: BenchmarkRun) -> None:
    """Adds the rows, each beside a plain dictionary from keys to integers with a bit per holder."""
    pairs = 1_000_000 if run.quick else 10_000_000
    taken = [in_a_process_of_its_own(fill, pairs) for fill in (fill_map, fill_dict)]
    run.add(compare("map_bytes_per_pair", taken[0] / pairs, "bytes", "a dictionary", taken[1] / pairs))
    changes = 1_000_000 if run.quick else 4_000_000
    rates = [in_a_process_of_its_own(ingest, changes) for ingest in (ingest_into_map, ingest_into_dict)]
    run.add(compare("report_ingest_per_s", rates[0], "changes/s", "a dictionary", rates[1]))


def in_a_process_of_its_own(measurement: Callable[[int], float], size: int) -> float:
    """What a measurement gives where nothing has been measured before it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        return processes.submit(measurement, size).result()


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process that is not swapped out."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def _reports(count: int) -> list[tuple[int, bytes]]:
    """Keys of reports, and which instance they come from, in the order in which instances that report in turns fill up.

    Every chunk has one holder: nothing is shared, so that this is the most that pairs can take.
    """
    each = count // INSTANCE_COUNT
    return [
        (instance, random_keys(INSTANCE_COUNT * start + instance, min(KEYS_PER_REPORT, each - start)))
        for start in range(0, each, KEYS_PER_REPORT)
        for instance in range(INSTANCE_COUNT)
    ]


def fill_map(pairs: int) -> float:
    """Bytes that a layout map takes."""
    reports = _reports(pairs)
    before = resident_bytes()
    layout = LayoutMap()
    for instance, keys in reports:
        layout.apply(f"instance-{instance}", Change(tier_number(HOST), FINGERPRINT, CHUNK_SIZE, keys))
    assert len(layout) == pairs
    return resident_bytes() - before


def fill_dict(pairs: int) -> float:
    """Bytes that a dictionary takes."""
    reports = _reports(pairs)
    gc.disable()
    before = resident_bytes()
    bits: dict[bytes, int] = {}
    for instance, keys in reports:
        mask = CHUNK_SIZE | 1 << 32 + instance
        for key in split_keys(keys):
            bits[key] = bits.get(key, 0) | mask
    assert len(bits) == pairs
    return resident_bytes() - before


def _changes(count: int) -> list[tuple[int, bytes, bytes]]:
    """Instance, keys to admit, keys to evict: each instance drops what it said in its report before."""
    reports = _reports(count // 2)
    before: dict[int, bytes] = {}
    changes = []
    for instance, keys in reports:
        changes.append((instance, keys, before.get(instance, b"")))
        before[instance] = keys
    return changes


def _rate(changes: list[tuple[int, bytes, bytes]], seconds: float) -> float:
    return sum(len(admitted) + len(evicted) for _, admitted, evicted in changes) / KEY_BYTES / seconds


def ingest_into_map(count: int) -> float:
    """Changes per second of processor time, in reports as a stream of them is applied."""
    now = time.monotonic()
    registry = Registry(lease_ttl=600, now=now)
    streams = []
    for instance in range(INSTANCE_COUNT):
        said = InstanceInfo(instance_id=f"instance-{instance}", epoch=1, peer_address="host:7000")
        registry.register(said, now)
        streams.append(registry.open_stream(said.instance_id, 1, now))
        streams[-1].apply(_report(instance, 1, snapshot=True, snapshot_end=True), now)
    changes = _changes(count)
    reports: list[tuple[ReportStream, ReportRequest]] = []
    for instance, admitted, evicted in changes:
        change = ChunkChange(tier=HOST, fingerprint=FINGERPRINT, admitted_keys=admitted, evicted_keys=evicted)
        sequence = 2 + len(reports) // INSTANCE_COUNT
        reports.append((streams[instance], _report(instance, sequence, changes=[change])))
    started = time.process_time()
    for stream, report in reports:
        stream.apply(report, now)
    return _rate(changes, time.process_time() - started)


def _report(instance: int, sequence: int, **fields: object) -> ReportRequest:
    return ReportRequest(instance_id=f"instance-{instance}", epoch=1, sequence=sequence, **fields)  # type: ignore[arg-type]


def ingest_into_dict(count: int) -> float:
    """Changes per second of processor time, straight into a dictionary."""
    changes = _changes(count)
    bits: dict[bytes, int] = {}
    gc.disable()
    started = time.process_time()
    for instance, admitted, evicted in changes:
        mask = 1 << 32 + instance
        for key in split_keys(admitted):
            bits[key] = bits.get(key, 0) | mask
        for key in split_keys(evicted):
            if left := bits[key] & ~mask:
                bits[key] = left
            else:
                del bits[key]
    return _rate(changes, time.process_time() - started)
