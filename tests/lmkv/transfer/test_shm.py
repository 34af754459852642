"""What only shared memory does: a peer's pool is mapped page by page before anybody reads it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.lmkv.transfer.ends import MIB, Memory

MAPPED_SECONDS = 10.0
READ_ONLY = re.compile(r"^\S+ r--s .*memfd:.*\n(?:[A-Z].*\n)*?Rss: +(\d+) kB", re.MULTILINE)


def mapped_bytes() -> list[int]:
    """Of each pool that this process has mapped read-only, how much is in its page tables."""
    return [1024 * int(size) for size in READ_ONLY.findall(Path("/proc/self/smaps").read_text())]


async def test_the_pages_of_a_peer_are_mapped_before_anybody_reads_them(short_folder: Path) -> None:
    own, other = Memory(64 * MIB), Memory(MIB)
    own.pool.populate()
    owner, reader = await own.open("shm", "owner:1", short_folder), await other.open("shm", "reader:1", short_folder)
    assert mapped_bytes() == []
    await reader.add_peer("owner:1", owner.metadata)
    async with asyncio.timeout(MAPPED_SECONDS):
        while mapped_bytes() != [64 * MIB]:  # noqa: ASYNC110 # only the kernel knows
            await asyncio.sleep(0.005)
    await reader.aclose()
    await owner.aclose()
