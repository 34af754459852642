"""The remote tier over real stores: what goes in comes out, for every node, whatever happens to the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmkv.errors import ConfigError, Unreachable
from lmkv_client.demo.process import free_port as find_free_port
from lmkv_server.node.tiers.base import Needs
from lmkv_server.node.tiers.remote.s3 import S3Store
from lmkv_server.node.tiers.remote.store import HEADER_BYTES, ROOT, StoreRefused
from lmkv_server.node.tiers.remote.tier import RemoteTier
from lmkv_server.node.tiers.remote.valkey import ValkeyStore
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.disk_parts import WAIT_SECONDS, content, until
from tests.server.node.remote_parts import (
    AWS,
    CHUNK_BYTES,
    SPEC,
    S3Server,
    SharedFolder,
    Silent,
    host_with,
    name_of,
    names_of,
    padded,
)
from tests.support.certificates import issue
from tests.support.redis_server import RedisServer

LOST_SECONDS = 1.0
"""A store that says nothing for so long is lost, in tests."""
AnyServer = RedisServer | S3Server | SharedFolder


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def _servers() -> Iterator[dict[str, AnyServer]]:
    with RedisServer() as redis, S3Server() as s3, SharedFolder() as folder:
        yield {"redis": redis, "s3": s3, "folder": folder}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One that a test may kill."""
    with RedisServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _a_tier_that_ends_has_time_to_put_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_server.node.tiers.backend_tier.FLUSH_SECONDS", WAIT_SECONDS)


@pytest.fixture(params=["redis", "s3", "folder"])
def server(request: pytest.FixtureRequest, _servers: dict[str, AnyServer]) -> AnyServer:
    """Each kind of store, empty."""
    server = _servers[request.param]
    server.empty()
    return server


@pytest.fixture
def s3(_servers: dict[str, AnyServer]) -> S3Server:
    """An empty bucket."""
    server = _servers["s3"]
    assert isinstance(server, S3Server)
    server.empty()
    return server


async def test_what_one_node_stores_another_finds_and_reads(server: AnyServer) -> None:
    async with host_with(server.store()) as first:
        first.store(*range(20))
        first.store(20, token_count=16)
    assert server.names() == names_of(*range(21))
    async with host_with(server.store()) as second:
        assert await second.count(*range(24)) == 21
        assert await second.read(*range(24)) == list(range(21))
        assert second.remote.stats().read_chunks == 21
        await second.flushed()
        assert second.remote.stats().written_chunks == 0, "what came from there is not put again"


async def test_a_chunk_is_written_once_whichever_node_holds_it(server: AnyServer) -> None:
    async with host_with(server.store()) as first, host_with(server.store()) as second:
        first.store(0, 1)
        await first.flushed()
        second.store(0, 1, 2)
        await second.flushed()
        assert (second.remote.stats().written_chunks, second.remote.stats().present_chunks) == (1, 2)
    assert server.names() == names_of(0, 1, 2)


async def test_an_owner_that_floods_a_store_evicts_only_objects_that_it_has_written(server: AnyServer) -> None:
    async with host_with(server.store(), quota_chunks=4) as host:
        host.store(*range(3), owner=b"1" * 16)
        host.store(*range(4, 7))
        await host.flushed()
        for first in range(100, 200, 10):
            host.store(*range(first, first + 10), owner=b"2" * 16)
            await host.flushed()
            host.drop(*range(first, first + 10))
        await host.remote.backend.settle()
        assert names_of(*range(3), *range(4, 7)) < server.names()
        assert len(server.names()) == 3 + 3 + 4
        assert await host.clear() == 10
        assert host.remote.backend.written_count == 0
        host.store(*range(200, 203), owner=b"2" * 16)
        await host.flushed()
        assert (usage := host.remote.usage())
        assert (usage.used_bytes, usage.chunk_count) == (3 * CHUNK_BYTES, 3)


async def test_of_an_owners_objects_those_leave_first_that_were_not_read(redis: RedisServer) -> None:
    async with host_with(redis.store(), quota_chunks=3) as host:
        host.store(0, owner=b"1" * 16)
        await host.flushed()
        for number in (10, 20):
            host.store(number, owner=b"1" * 16)
            await host.flushed()
        host.drop(0)
        assert await host.count(0) == 1
        assert await host.read(0) == [0]
        host.store(1, owner=b"1" * 16)
        await host.flushed()
        await host.remote.backend.settle()
        assert redis.names() == names_of(0, 1, 20)


async def test_what_stands_after_a_gap_is_not_counted(redis: RedisServer) -> None:
    async with host_with(redis.store()) as host:
        host.store(0, 1, 3)
        await host.flushed()
        assert await host.count(0, 1, 2, 3) == 2
        later = Needs(spec=SPEC, keys=chunk_keys(0, 1, 2, 3), indices=[3])
        assert list((await host.remote.lookup(later)).indices) == [3]
        assert await host.count(9) == 0


@pytest.mark.parametrize("there", [0, 1, 2, 7, 19, 20])
async def test_the_end_of_a_run_is_found(server: AnyServer, there: int) -> None:
    async with host_with(server.store()) as host:
        host.store(*range(there))
        await host.flushed()
        assert await host.count(*range(20)) == there


async def test_a_bucket_is_asked_few_questions_and_a_gap_is_noticed_by_the_load(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    size = S3Store._size

    def counted(self: S3Store, name: str) -> int:
        asked.append(name)
        return size(self, name)

    monkeypatch.setattr(S3Store, "_size", counted)
    async with host_with(s3.store()) as host:
        host.store(*range(10), *range(11, 30))
        await host.flushed()
        host.drop(*range(30))
        asked.clear()
        assert await host.count(*range(30)) == 30, "the first and the last are there"
        assert sorted(asked) == [name_of(0), name_of(29)]
        assert 10 not in await host.read(*range(30))
        host.store(10)
        await host.flushed()
        assert name_of(10) in s3.names(), "the next store fills the gap"


async def test_a_chunk_that_is_stored_again_outlives_the_removal_of_the_damaged_one(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    remove = S3Store.remove

    def slow(self: S3Store, names: Sequence[str]) -> None:
        assert released.wait(WAIT_SECONDS)
        remove(self, names)

    async with host_with(s3.store()) as host:
        host.store(0, 1)
        await host.flushed()
        host.drop(0, 1)
        assert await host.count(0, 1) == 2
        s3.replace(name_of(1), b"damaged")
        monkeypatch.setattr(S3Store, "remove", slow)
        assert await host.read(0, 1) == [0]
        host.store(1)
        asyncio.get_running_loop().call_later(0.2, released.set)
        await host.flushed()
        assert s3.read(name_of(1)) != b"damaged"
        await until(lambda: not host.remote.backend._removals, "no write waits for removals that have ended")


@pytest.mark.parametrize(
    "change", ["bit", "header", "shorter", "longer", "empty", "foreign", "another", "version", "gone"]
)
async def test_an_object_that_is_not_what_was_put_is_a_miss_and_removed(server: AnyServer, change: str) -> None:
    async with host_with(server.store()) as host:
        host.store(0, 1, 2)
        await host.flushed()
        host.drop(0, 1, 2)
        assert await host.count(0, 1, 2) == 3
        whole = server.read(name_of(1))
        match change:
            case "bit":
                whole = whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:]
            case "header":
                whole = whole[:60] + bytes([whole[60] ^ 1]) + whole[61:]
            case "shorter":
                whole = whole[:-100]
            case "longer":
                whole += bytes(100)
            case "empty":
                whole = b""
            case "foreign":
                whole = content(7, len(whole))
            case "another":
                whole = server.read(name_of(2))
            case "version":
                whole = b"lmkvobj9" + whole[8:]
        if change == "gone":
            await host.remote.backend.remove([name_of(1)])
        else:
            server.replace(name_of(1), whole)
        assert await host.read(0, 1, 2) == [0, 2]
        assert host.remote.stats().damaged_chunks == 1
        await until(lambda: server.names() == names_of(0, 2))
        assert host.remote.usable, "the store is not to blame"


async def test_what_no_chunk_could_be_is_not_even_read(server: AnyServer) -> None:
    server.replace(name_of(0), bytes(padded(server, HEADER_BYTES) + CHUNK_BYTES + 1))
    server.replace(name_of(1), bytes(padded(server, HEADER_BYTES)))
    async with host_with(server.store()) as host:
        assert await host.count(0) == await host.count(1) == 0


async def test_a_clear_removes_what_is_ours_and_nothing_else(server: AnyServer) -> None:
    server.replace("another/application", b"bytes")
    other = ROOT + "ff" * 16 + "/" + "00" * 16
    server.replace(other, b"of another spec")
    async with host_with(server.store()) as host:
        host.store(*range(5))
        await host.flushed()
        assert await host.clear(SPEC.fingerprint, dry_run=True) == 5
        assert await host.count(*range(5)) == 5
        assert await host.remove(4, 9) == 1
        assert await host.count(*range(5)) == 4
        assert await host.clear(SPEC.fingerprint) == 4
        assert await host.count(*range(5)) == 0
        assert server.names() == {"another/application", other}
        assert await host.clear() == 1
    assert server.names() == {"another/application"}


@pytest.mark.parametrize("server", ["redis", "s3"], indirect=True)
async def test_a_store_that_refuses_what_it_is_asked_says_why(
    server: RedisServer | S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(server, S3Server):
        store, why = server.store("s3://nowhere"), "404"
    else:
        store, why = server.store(server.url.replace("/0", "/99")), "DB index is out of range"
    async with host_with(store, ready=False, retry_seconds=0.01) as host:
        host.store(0)
        await until(lambda: host.remote.stats().failures >= 3)
        assert await host.count(0) == 0
    assert why in caplog.text
    assert caplog.text.count("continuing without it") == 1, "it says so once"


def test_what_a_bucket_refuses_is_no_absent_chunk(s3: S3Server) -> None:
    store, memory = s3.store("s3://nowhere"), memoryview(bytearray(CHUNK_BYTES))
    with pytest.raises(StoreRefused):
        store.open()
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        store.get(name_of(0), [memory])
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        store.put(name_of(0), [memory])
    store.close()


# ---- one that fails


async def test_a_wrong_password_is_said_but_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer("--requirepass", "right-word") as server:
        url = f"redis://:wrong-word@127.0.0.1:{server.port}/0"
        async with host_with(server.store(url), ready=False) as host:
            assert not host.remote.usable
            host.store(0)
        assert "invalid username-password pair" in caplog.text
        assert "wrong-word" not in caplog.text
        async with host_with(server.store(url.replace("wrong", "right"))) as host:
            assert host.remote.usable
            host.store(0)
            await host.flushed()
            assert await host.count(0) == 1


async def test_a_killed_store_is_done_without_and_filled_again_when_it_is_back(redis: RedisServer) -> None:
    async with host_with(redis.store(), retry_seconds=0.05) as host:
        host.store(0, 1)
        await host.flushed()
        assert await host.count(0) == 1
        redis.kill()
        assert await host.count(5) == 0
        assert not host.remote.usable
        host.store(2)
        host.drop(0)
        redis.start()
        await host.open()
        await host.flushed()
        assert redis.names() == names_of(1, 2)
        assert await host.count(1, 2) == 2
        assert await host.count(0) == 0, "what it was known to have is gone"


async def test_a_store_that_is_killed_while_it_is_read_is_a_miss(redis: RedisServer) -> None:
    async with host_with(redis.store(), retry_seconds=WAIT_SECONDS) as host:
        host.store(*range(16))
        await host.flushed()
        host.drop(*range(16))
        assert await host.count(*range(16)) == 16
        redis.kill()
        assert await host.read(*range(16)) == []
        assert not host.remote.usable
        assert host.remote.stats().damaged_chunks <= 1, "what cannot be reached is not damaged"


def test_a_connection_that_is_in_use_when_the_store_is_closed_is_closed_with_its_call(redis: RedisServer) -> None:
    store = redis.store()
    assert isinstance(store, ValkeyStore)
    store.open()
    with store._connection() as connection:
        assert connection._sock
        store.close()
    assert connection._sock is None
    with pytest.raises(OSError, match="closed"):
        store.open()
    assert not store._idle


async def test_connections_that_the_server_has_closed_are_no_failure(redis: RedisServer) -> None:
    async with host_with(redis.store()) as host:
        host.store(*range(8))
        await host.flushed()
        host.drop(*range(8))
        assert await host.count(*range(8)) == 8
        assert await host.read(*range(8)) == list(range(8))
        with redis.client() as client:
            assert client.client_kill_filter(_type="normal", skipme=True) > 0
        assert await host.count(8) == 0
        host.store(8)
        await host.flushed()
        assert host.remote.stats().failures == 0


async def test_an_option_that_is_none_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match="has an option that is none"):
        RedisServer().store("redis://127.0.0.1/0?colour=red")


async def test_tls_is_spoken_and_the_certificate_verified(tmp_path: Path) -> None:
    files = issue(tmp_path)
    tls_port = find_free_port()
    options = {"tls-port": tls_port, "tls-cert-file": files.cert, "tls-key-file": files.key, "tls-auth-clients": "no"}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with RedisServer(*arguments) as server:
        url = f"rediss://127.0.0.1:{tls_port}/0"
        async with host_with(server.store(url), ready=False) as host:
            assert not host.remote.usable, "its issuer is unknown"
        async with host_with(server.store(f"{url}?ssl_ca_certs={files.ca}")) as host:
            host.store(*range(8))
            await host.flushed()
            host.drop(*range(8))
            assert await host.count(*range(8)) == 8
            assert await host.read(*range(8)) == list(range(8))


async def test_a_frozen_store_costs_one_lookup_its_time_and_the_others_nothing(redis: RedisServer) -> None:
    async with host_with(redis.store(), lookup_seconds=1.0) as host:
        host.store(0)
        await host.flushed()
        redis.freeze()
        assert await host.count(1) == 0
        assert host.remote.stats().late_lookups == 1
        assert host.remote.is_down
        for _ in range(100):
            assert await host.count(1) == 0
        assert host.remote.stats().late_lookups == 1, "no lookup is sent meanwhile"
        redis.thaw()
        await until(lambda: not host.remote.is_down)
        assert await host.count(0) == 1


async def test_a_chunk_that_is_dropped_while_it_is_read_does_not_come_back(redis: RedisServer) -> None:
    async with host_with(redis.store()) as host:
        host.store(0)
        await host.flushed()
        host.drop(0)
        assert await host.count(0) == 1
        redis.freeze()
        reading = asyncio.create_task(host.read(0))
        await until(lambda: host.tier.reserved_count == 1)
        dropping = asyncio.create_task(host.remove(0))
        await asyncio.sleep(0)
        redis.thaw()
        assert await reading == []
        assert await dropping <= 1
        assert len(host.tier) == 0
        assert redis.names() == set()


async def test_a_store_that_stays_frozen_is_lost_and_back_when_it_thaws(redis: RedisServer) -> None:
    store = redis.store(timeout_seconds=LOST_SECONDS)
    async with host_with(store, lookup_seconds=1.0, retry_seconds=0.05) as host:
        host.store(0)
        await host.flushed()
        host.drop(0)
        assert await host.count(0) == 1
        redis.freeze()
        assert await host.read(0) == []
        assert not host.remote.backend.health.is_open
        host.store(1)  # without waiting
        redis.thaw()
        await host.open()
        await host.flushed()
        assert redis.names() == names_of(0, 1)


async def test_a_store_that_never_says_a_word_holds_up_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteTier, "open_seconds", 0.05)
    with Silent() as url:
        async with host_with(RedisServer().store(url, timeout_seconds=LOST_SECONDS), ready=False) as host:
            assert not host.remote.usable
            assert await host.count(0) == 0


async def test_a_full_store_keeps_what_it_has_and_is_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        async with host_with(server.store(), chunk_count=600, full_seconds=2.0) as host:
            host.store(*range(512))
            await until(lambda: host.remote.stats().skipped_chunks > 0)
            assert host.remote.usable
            assert await host.count(0) == 1
            assert "accepts no more writes" in caplog.text
            with server.client() as client:
                client.config_set("maxmemory", "64mb")
            await host.flushed()
            assert host.remote.stats().waiting_chunks == 0
            assert len(server.names()) == 512 - host.remote.stats().skipped_chunks
        assert caplog.text.count("accepts no more writes") <= 2


async def test_a_store_that_may_not_be_written_is_read(redis: RedisServer) -> None:
    async with host_with(redis.store()) as host:
        host.store(0)
    with redis.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~*", "+@read", "+ping", "+select")
    url = redis.url.replace("redis://", "redis://reader:word@")
    async with host_with(redis.store(url)) as host:
        host.store(1)
        await until(lambda: host.remote.stats().skipped_chunks == 1)
        assert await host.count(0) == 1
        assert await host.read(0) == [0]


async def test_the_server_forgets_after_the_ttl(redis: RedisServer) -> None:
    async with host_with(redis.store(ttl_seconds=100.0)) as host:
        host.store(0)
        await host.flushed()
        with redis.client() as client:
            assert 90_000 < client.pttl(name_of(0)) <= 100_000


async def test_what_was_to_be_cleared_while_the_store_was_away_is_cleared_before_it_is_read(
    redis: RedisServer,
) -> None:
    store = redis.store(timeout_seconds=LOST_SECONDS)
    async with host_with(store, retry_seconds=0.05) as host:
        host.store(0, 1)
        await host.flushed()
        host.drop(0, 1)
        redis.freeze()
        with pytest.raises(Unreachable, match=r".+"):
            await host.clear(SPEC.fingerprint)
        redis.thaw()
        await host.open()
        assert await host.count(0) == 0
        assert redis.names() == set()


async def test_a_chunk_that_host_memory_loses_before_its_turn_is_skipped(redis: RedisServer) -> None:
    async with host_with(redis.store()) as host:
        host.store(*range(8))
        host.drop(*range(8))  # before any write
        await host.flushed()
        assert host.remote.stats().skipped_chunks == 8
        assert redis.names() == set()


async def test_a_full_pool_of_chunks_in_use_is_a_miss(redis: RedisServer) -> None:
    async with host_with(redis.store(), chunk_count=2) as host:
        host.store(0)
        await host.flushed()
        host.drop(0)
        host.store(1, 2)
        await host.flushed()
        assert await host.count(0) == 1
        held = list(host.tier)
        host.tier.hold(held)
        assert await host.read(0) == []
        host.tier.unhold(held)
        assert await host.read(0) == [0]
        assert {chunk.key for chunk in host.tier} >= {chunk_key(0)}
