"""Measures which share of a salt's chunks a quota keeps while another salt floods the pool, or the disk.

`python -m benchmarks.quotas`.

The pool is a `HostTier` without memory behind it, and every chunk has one size, so that the result is the same in every
run. One salt asks for prompts of its working set again and again, and stores what is missing; between two of these
requests the other one stores prompts that nothing asks for again. The disk tier is whole, with files in a folder and a
pool of a few chunks before it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import compare
from benchmarks.tier.passes import spec_of
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.eviction import POLICIES
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.tiers.base import Needs
from lmkv_server.node.tiers.disk.tier import DiskTier

POOL_CHUNKS = 4096
PROMPT_CHUNKS = 16
WORKING_SET_PROMPTS = 96
"""Together they fill 3/8 of the pool."""
REQUESTS = 400
FLOODS = (1, 4, 16)
"""Prompts of the flood for each request of the other salt."""
SHARES = (0.25, 0.5)
STEADY, FLOODING = b"s" * 16, b"f" * 16
SPEC = spec_of(ALIGNMENT)
DISK_CHUNKS = 512
DISK_WORKING_SET_PROMPTS = 12
DISK_REQUESTS = 96
DISK_FLOOD = 4


def measure(run: BenchmarkRun) -> None:
    """Adds the share of the working set that is found, beside that without a quota."""
    requests = REQUESTS // (4 if run.quick else 1)
    for policy in POLICIES:
        for flood in FLOODS:
            without = _found_percent(policy, 0.0, flood, requests)
            for share in SHARES:
                name = f"{policy}_quota_{round(100 * share)}_flood_{flood}"
                found = _found_percent(policy, share, flood, requests)
                run.add(compare(name, found, "%", "no quota", max(without, 0.01)))
        run.say(policy)
    without = asyncio.run(_disk_found_percent(run.folder / "without", 0.0))
    for share in SHARES:
        found = asyncio.run(_disk_found_percent(run.folder / str(share), share))
        name = f"disk_quota_{round(100 * share)}_flood_{DISK_FLOOD}"
        run.add(compare(name, found, "%", "no quota", max(without, 0.01)))


def _found_percent(policy: str, share: float, flood: int, requests: int) -> float:
    """The chunks of the steady salt's requests that are found, after a first round."""
    quota_bytes = round(share * POOL_CHUNKS) * ALIGNMENT
    tier = HostTier(POOL_CHUNKS * ALIGNMENT, policy=POLICIES[policy](), quota_bytes=quota_bytes)
    choose, floods, found = random.Random(1), _new_prompts(), 0
    working_set = [_prompt(f"steady {number}") for number in range(WORKING_SET_PROMPTS)]
    for number in range(-WORKING_SET_PROMPTS, requests):
        prompt = working_set[number] if number < 0 else choose.choice(working_set)
        found += _ask(tier, prompt, STEADY) * (number >= 0)
        for _ in range(flood):
            _ask(tier, next(floods), FLOODING)
    return 100 * found / (requests * PROMPT_CHUNKS)


async def _disk_found_percent(folder: Path, share: float) -> float:
    """As `_found_percent`, of a disk tier: of each prompt the part that the disk has when it is asked for."""
    pool = Pool.create(2 * PROMPT_CHUNKS * ALIGNMENT, huge_pages="never")
    events = CacheEvents()
    tier = HostTier(pool.size_bytes, events)
    quota_bytes = round(share * DISK_CHUNKS) * ALIGNMENT
    choose, floods, found = random.Random(1), _new_prompts(), 0
    working_set = [_prompt(f"steady {number}") for number in range(DISK_WORKING_SET_PROMPTS)]
    cache = HostCache(pool=pool, tier=tier, events=events)
    async with DiskTier([folder], DISK_CHUNKS * ALIGNMENT, cache, quota_bytes=quota_bytes) as disk:
        for number in range(-DISK_WORKING_SET_PROMPTS, DISK_REQUESTS):
            prompt = working_set[number] if number < 0 else choose.choice(working_set)
            presence = await disk.lookup(Needs(spec=SPEC, keys=prompt, indices=range(PROMPT_CHUNKS)))
            found += len(presence.indices) * (number >= 0)
            for keys, owner in ((prompt, STEADY), *((next(floods), FLOODING) for _ in range(DISK_FLOOD))):
                _ask(tier, keys, owner)
                await disk.writer.flush()
        await disk.settle()
    pool.close()
    return 100 * found / (DISK_REQUESTS * PROMPT_CHUNKS)


def _new_prompts() -> Iterator[list[ChunkKey]]:
    number = 0
    while True:
        yield _prompt(f"flood {number}")
        number += 1


def _prompt(name: str) -> list[ChunkKey]:
    return [ChunkKey(random.Random(f"{name} {index}").randbytes(16)) for index in range(PROMPT_CHUNKS)]


def _ask(tier: HostTier, keys: list[ChunkKey], owner: bytes) -> int:
    """Looks a prompt up, and stores what is missing; returns how many of its chunks were found."""
    count = len(tier.find(keys))
    for index in range(count, len(keys)):
        if (reserved := tier.reserve(ALIGNMENT)) is None:
            break
        chunk = Chunk(
            key=keys[index],
            fingerprint=SPEC.fingerprint,
            offset=reserved.offset,
            size_bytes=ALIGNMENT,
            checksum=0,
            token_count=1,
            parent=keys[index - 1] if index else None,
            owner=owner,
        )
        if committed := tier.commit(chunk):
            tier.keep_quota(committed)
    return count


BENCHMARK = Benchmark(
    name="quotas",
    description="Measures what a quota keeps of a salt's chunks while another salt floods the pool.",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
