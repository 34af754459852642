"""Watching the layout map over a socket: snapshots, changes, returns, and watchers that are too slow."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from lmkv.errors import Full, LmkvError
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.error_status import from_rpc_error
from lmkv.v1.cache_service_pb2 import WatchRequest, WatchResponse
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap
from lmkv_server.coordinator.services import layout_watch as watch
from tests.server.coordinator.cases import CHUNKS, KEYS, QWEN, keys_of
from tests.server.coordinator.scripted_instance import Make
from tests.waiting import WAIT_SECONDS

FINGERPRINT = b"f" * 16


class Watcher:
    """Applies the events it receives, as a router would."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.revision = 0
        self.held: dict[str, set[ChunkKey]] = {}
        self.responses: list[WatchResponse] = []

    async def read(self) -> WatchResponse:
        """Takes one response in."""
        response: WatchResponse = await asyncio.wait_for(self._call.read(), 60)
        assert response is not grpc.aio.EOF  # type: ignore[attr-defined]
        assert response.revision >= self.revision
        self.revision = response.revision
        self.responses.append(response)
        for change in response.changes:
            if change.instance_gone:
                self.held.pop(change.instance_id, None)
                continue
            keys = self.held.setdefault(change.instance_id, set())
            keys |= {*map(ChunkKey, change.admitted_keys)}
            keys -= {*map(ChunkKey, change.evicted_keys)}
        return response

    async def until(self, held: dict[str, set[ChunkKey]]) -> None:
        """Reads until it knows just this."""
        while {name: keys for name, keys in self.held.items() if keys} != held:
            await self.read()

    async def error(self) -> LmkvError:
        """How the call ends."""
        try:
            while True:
                await self.read()
        except grpc.RpcError as error:
            return from_rpc_error(error)


@asynccontextmanager
async def watching(cache: Any, **fields: Any) -> AsyncIterator[Watcher]:
    call = cache.Watch(WatchRequest(**fields), timeout=300)
    try:
        yield Watcher(call)
    finally:
        call.cancel()


async def test_a_snapshot_is_followed_by_a_bookmark_and_by_changes(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS) as a, watching(cache) as watcher:
        first = await watcher.read()
        assert first.snapshot
        assert watcher.held == {"a": set(KEYS)}
        bookmark = await watcher.read()
        assert not bookmark.snapshot
        assert not bookmark.changes
        async with make("b", KEYS[:1]):
            await watcher.until({"a": set(KEYS), "b": {KEYS[0]}})
            await a.evict(KEYS[1:])
            await watcher.until({"a": {KEYS[0]}, "b": {KEYS[0]}})
        assert all(not response.snapshot for response in watcher.responses[1:])


async def test_an_empty_map_is_a_bookmark_at_once(cache: Any) -> None:
    async with watching(cache) as watcher:
        response = await watcher.read()
        assert not response.changes
        assert response.revision > 0


async def test_a_watcher_that_returns_hears_what_it_missed(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS) as a:
        async with watching(cache) as watcher:
            await watcher.until({"a": set(KEYS)})
            await watcher.read()
        await a.evict(KEYS[2:])
        async with make("b", KEYS[:1]), watching(cache, start_revision=watcher.revision) as again:
            again.held = watcher.held
            await again.until({"a": set(KEYS[:2]), "b": {KEYS[0]}})
            assert not any(response.snapshot for response in again.responses)


async def test_a_node_that_restarts_is_seen_as_gone_and_back(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS), watching(cache) as watcher:
        await watcher.until({"a": set(KEYS)})
        async with make("a", KEYS[:1]):
            await watcher.until({"a": {KEYS[0]}})
            gone = [change.instance_gone for response in watcher.responses for change in response.changes]
            assert any(gone)


async def test_what_an_instance_has_lost_while_it_reported_nothing_is_seen_as_lost(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS) as a, watching(cache) as watcher:
        await watcher.until({"a": set(KEYS)})
        await a.leave()
        a.chunks = {KEYS[0]: CHUNKS[KEYS[0]]}
        await a.join()
        await watcher.until({"a": {KEYS[0]}})


async def test_only_one_spec_may_be_watched(make: Make, cache: Any) -> None:
    qwen = keys_of(range(64), QWEN)
    async with make("a", CHUNKS), make("q", qwen, QWEN) as q, watching(cache, fingerprint=QWEN.fingerprint) as watcher:
        await watcher.until({"q": set(qwen)})
        await q.evict(qwen[:1])
        await watcher.until({"q": set(qwen[1:])})
        fingerprints = {change.fingerprint for response in watcher.responses for change in response.changes}
        assert fingerprints == {QWEN.fingerprint}


async def test_a_watcher_of_one_spec_is_informed_that_an_instance_is_gone(make: Make, cache: Any) -> None:
    qwen = keys_of(range(64), QWEN)
    async with make("q", qwen, QWEN), watching(cache, fingerprint=QWEN.fingerprint) as watcher:
        await watcher.until({"q": set(qwen)})
        async with make("q", CHUNKS):  # restarts, with chunks of another spec only
            await watcher.until({})
        (gone,) = watcher.responses[-1].changes
        assert gone.instance_gone
        assert gone.instance_id == "q"


async def test_constant_changes_of_other_specs_do_not_delay_bookmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BOOKMARK_SECONDS", 0.1)
    layout = LayoutMap(100)
    responses = watch.LayoutWatch(layout).watch(0, QWEN.fingerprint)
    start = (await anext(responses)).revision

    async def change() -> None:  # in each pass of the loop, so that the watcher never finds nothing
        while True:
            layout.apply("a", Change(2, FINGERPRINT, 16, KEYS[0]))
            layout.apply("a", Change(2, FINGERPRINT, 16, evicted=KEYS[0]))
            await asyncio.sleep(0)

    changing = asyncio.create_task(change())
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            bookmark = await anext(responses)
    finally:
        changing.cancel()
    assert not bookmark.changes
    assert bookmark.revision > start


async def test_a_revision_that_is_not_known_is_refused(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS):
        for revision in (1, 1 << 62, -5):
            async with watching(cache, start_revision=revision) as watcher:
                assert (await watcher.error()).reason == "REVISION_COMPACTED"


async def test_the_number_of_watchers_is_limited() -> None:
    watched = watch.LayoutWatch(LayoutMap(100))
    open_watches = [watched.watch(0, client=f"client-{number}") for number in range(watch.MAX_WATCHERS)]
    for one in open_watches:
        await anext(one)
    with pytest.raises(Full, match="watches are taken"):
        await anext(watched.watch(0, client="one more"))
    await open_watches.pop().aclose()  # type: ignore[attr-defined]
    await anext(watched.watch(0, client="one more"))


async def test_the_history_forgets_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HISTORY_BYTES", 3 * (watch.EVENT_BYTES + 16))
    layout = LayoutMap(100)
    watched = watch.LayoutWatch(layout)
    for index in range(5):
        layout.apply("a", Change(2, FINGERPRINT, 16, bytes([index]) * 16))
    with pytest.raises(LmkvError, match="is not between 102 and 105"):
        await anext(watched.watch(101))
    response = await anext(watched.watch(102))
    assert [change.admitted_keys[0][0] for change in response.changes] == [2, 3, 4]


@pytest.mark.parametrize("key_count", [1, 4, 16, 64, 1000])
def test_the_history_takes_no_more_memory_than_it_counts(key_count: int) -> None:
    program = f"""
import os
from pathlib import Path
from lmkv_server.coordinator.core.layout_map import LayoutMap
from lmkv_server.coordinator.services.layout_watch import HISTORY_BYTES, LayoutWatch

def used_bytes():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])

watched = LayoutWatch(LayoutMap())
before = used_bytes()
for revision in range(HISTORY_BYTES // 256):
    watched.changed(10**6 + revision, "node-1", 2, os.urandom(16), os.urandom({16 * key_count}), b"")
print(used_bytes() - before, HISTORY_BYTES)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    used_bytes, limit_bytes = map(int, printed.split())
    assert used_bytes <= 1.25 * limit_bytes


async def test_a_watcher_that_does_not_read_is_cut_off_and_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "QUEUE_BYTES", 1000)
    layout = LayoutMap(100)
    watched = watch.LayoutWatch(layout)
    responses = watched.watch(0)
    await anext(responses)
    for index in range(100):
        layout.apply("a", Change(2, FINGERPRINT, 16, bytes([index]) * 16))
    (watcher,) = watched._watchers
    assert not watcher.queue.events
    with pytest.raises(LmkvError, match="start_revision 0"):
        await anext(responses)
    assert watched.watcher_count == 0


async def test_changes_during_a_long_snapshot_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SCAN_KEYS", 10)
    layout = LayoutMap(100)
    watched = watch.LayoutWatch(layout)
    keys = [ChunkKey(index.to_bytes(16, "little")) for index in range(200)]
    layout.apply("a", Change(2, FINGERPRINT, 16, join_keys(keys[:100])))
    held: set[ChunkKey] = set()
    step = 0
    async for response in watched.watch(0):
        for change in response.changes:
            held |= {*map(ChunkKey, change.admitted_keys)}
            held -= {*map(ChunkKey, change.evicted_keys)}
        if step < 100:
            layout.apply("a", Change(2, FINGERPRINT, 16, keys[100 + step], {}, keys[step]))
            step += 1
        elif response.revision == layout.revision:
            break
    assert held == set(keys[100:])


async def test_a_watcher_that_leaves_during_a_large_change_misses_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FRAME_BYTES", 160)
    layout = LayoutMap(100)
    watched = watch.LayoutWatch(layout)
    keys = [ChunkKey(index.to_bytes(16, "little")) for index in range(40)]
    first = watched.watch(0)
    await anext(first)
    layout.revision += 1
    watched.replaced(layout.revision, "a", [(2, FINGERPRINT, join_keys(keys))])  # one revision, several responses
    left_at = (await anext(first)).revision
    held: set[ChunkKey] = set()
    async for response in watched.watch(left_at):
        held |= {ChunkKey(key) for change in response.changes for key in change.admitted_keys}
        if response.revision == layout.revision:
            break
    assert held == set(keys)
