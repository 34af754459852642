"""What passes through a tier give, and how their rows are named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.support.meanings import meaning_of
from benchmarks.tier.passes import Chunks, Passes, through
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.tiers.disk.tier import DiskTier


def test_chunks_pass_through_a_tier_and_back_and_are_compared_with_the_bare_way(tmp_path: Path) -> None:
    passes = Passes()
    with Chunks(64 << 10, 1 << 20) as chunks:
        assert len(chunks.keys) == 16
        for way in ("bare", "tier"):
            for _ in range(2):
                cache = HostCache(pool=chunks.pool, tier=chunks.tier, events=CacheEvents())
                tier = DiskTier([tmp_path / "disk"], chunks.size_bytes, cache)
                asyncio.run(through(tier, chunks, passes, way))
    rows = {row.name: row for row in passes.rows("disk", "2mib")}
    assert set(rows) == {
        f"disk_{way}_{act}_{rest}"
        for way in ("bare", "tier")
        for act in ("write", "read")
        for rest in ("2mib", "cpu_2mib")
    }
    assert rows["disk_bare_read_2mib"].ratio is None
    assert rows["disk_tier_read_2mib"].baseline_value == rows["disk_bare_read_2mib"].value > 0
    assert rows["disk_tier_write_cpu_2mib"].unit == "s/GB"
    assert all(meaning_of(name) for name in rows)
    assert list((tmp_path / "disk").glob("*.chunk")) == [], "files remain"


def test_a_read_is_compared_with_bare_reads_of_the_same_files_right_before_and_after_it(tmp_path: Path) -> None:
    passes = Passes()
    with Chunks(64 << 10, 1 << 20) as chunks:
        for way in ("bare", "tier"):
            cache = HostCache(pool=chunks.pool, tier=chunks.tier, events=CacheEvents())
            tier = DiskTier([tmp_path / "disk"], chunks.size_bytes, cache)
            seen: list[int] = []

            def bare(seen: list[int] = seen) -> None:
                seen.append(len(list((tmp_path / "disk").glob("*.chunk"))))

            asyncio.run(through(tier, chunks, passes, way, bare if way == "tier" else None))
    assert seen == [16, 16]
    rows = {row.name: row for row in passes.rows("disk", "2mib")}
    assert len(rows) == 8
    assert rows["disk_tier_read_2mib"].baseline_value != rows["disk_bare_read_2mib"].value
    assert rows["disk_tier_write_2mib"].baseline_value == rows["disk_bare_write_2mib"].value


def test_a_pass_that_is_not_compared_is_an_error() -> None:
    passes = Passes()
    with passes.timed("tier", "write", 1 << 20):
        pass
    with pytest.raises(KeyError, match="bare"):
        list(passes.rows("disk", "2mib"))
