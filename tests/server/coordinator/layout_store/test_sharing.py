"""Coordinators that share a layout map on one real server: reports to one reach all, with faults and without."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from lmkv import __version__, rpc
from lmkv.auth.caller import read_callers
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.internal import PROTOCOL_VERSION
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import join_keys
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.core.layout_map import Change
from lmkv_server.coordinator.layout_store import session, shared_map
from lmkv_server.coordinator.layout_store.publication import Backlog, Publication
from lmkv_server.coordinator.layout_store.records import SHARD_COUNT, ChunkOwner
from lmkv_server.coordinator.layout_store.session import Publisher
from lmkv_server.coordinator.layout_store.valkey_client import TERM_SECONDS, UNUSED_SECONDS
from tests.server.coordinator.cases import CHUNKS, KEYS, PROMPT
from tests.server.coordinator.layout_store.parts import (
    chunks_of,
    connected,
    held,
    is_partial,
    knows,
    names_in_shard,
    until,
)
from tests.server.coordinator.layout_store.scripted_node import ScriptedNode
from tests.support.node_stub import NodeStub, registration
from tests.support.redis_server import RedisServer
from tests.support.specs import LLAMA
from tests.support.tokens import entry, write
from tests.waiting import WAIT_SECONDS

LEASE_SECONDS = 10.0
Start = Callable[[], Awaitable[Coordinator]]


@pytest.fixture
async def start(server: RedisServer) -> AsyncIterator[Start]:
    """Starts coordinators that share a map."""
    async with AsyncExitStack() as stack:

        async def start_one() -> Coordinator:
            made = Coordinator(
                CoordinatorConfig(
                    port=0, http_port=OFF, lease_ttl=LEASE_SECONDS, cluster_secret="hush", layout_map_url=server.url
                )
            )
            return await stack.enter_async_context(made)

        yield start_one


@pytest.fixture
async def pair(start: Start) -> tuple[Coordinator, Coordinator]:
    return await start(), await start()


def addresses(*coordinators: Coordinator) -> list[str]:
    return [coordinator.address for coordinator in coordinators]


def map_id(coordinator: Coordinator) -> str:
    assert coordinator.shared is not None
    return coordinator.shared.map_id


async def all_know(node: ScriptedNode, *coordinators: Coordinator) -> None:
    """Waits until each knows what the node really holds."""
    for coordinator in coordinators:
        await until(
            lambda at=coordinator: knows(at, node.instance_id, node.chunks),  # type: ignore[misc]
            f"{coordinator.address} knows {node.instance_id}; streams were {node.stream_kinds}",
        )


async def test_reports_to_one_coordinator_reach_the_other(pair: tuple[Coordinator, Coordinator]) -> None:
    home, other = pair
    assert map_id(home) == map_id(other) != ""
    async with ScriptedNode("a", addresses(*pair), CHUNKS) as node:
        await all_know(node, *pair)
        assert node.stream_kinds[other.address][-1] == "elsewhere"
        node.admit(chunks_of("more", 100) | chunks_of("short", 10, tokens=3))
        await all_know(node, *pair)
        node.evict([*KEYS[1:], *list(chunks_of("more", 50))])
        await all_know(node, *pair)
        node.report_digests()
        node.admit(chunks_of("last", 1))
        await all_know(node, *pair)
        assert other.shared is not None
        assert other.shared.stats().load_count == 1, "digests agreed"


async def test_lookups_count_the_tokens_of_partial_chunks_everywhere(pair: tuple[Coordinator, Coordinator]) -> None:
    async with ScriptedNode("a", addresses(*pair), CHUNKS) as node:
        await all_know(node, *pair)
        for coordinator in pair:
            async with rpc.open_channel(coordinator.address) as channel:
                cache = cache_service_pb2_grpc.CacheServiceStub(channel)
                answer = await cache.Lookup(cache_service_pb2.LookupRequest(prompt=by_tokens(PROMPT)), timeout=60)
            assert [(holder.instance_id, holder.matched_token_count) for holder in answer.holders] == [("a", 40)]


async def test_a_late_coordinator_knows_all_chunks_without_direct_reports(start: Start) -> None:
    first = await start()
    held = chunks_of("a", 20_000) | chunks_of("part", 3, tokens=7)
    async with ScriptedNode("a", addresses(first), held) as node:
        await all_know(node, first)
        late = await start()
        async with rpc.open_channel(late.address) as channel:
            registry = NodeStub(channel)
            said = pb.Instance(
                instance_id="a", epoch=node.epoch, peer_address="127.0.0.1:7000", specs=[LLAMA.to_proto()]
            )
            answer = await registry.Register(registration(said), timeout=60)
            assert answer.layout_map_id == map_id(first)
            stream: Any = registry.Report()
            await stream.write(
                report_pb.ReportRequest(instance_id="a", epoch=node.epoch, sequence=1, reported_elsewhere=True)
            )
            assert (await stream.read()).acked_sequence == 1
            await all_know(node, late)
            node.admit(chunks_of("more", 10))
            await all_know(node, late)
            stream.cancel()


async def test_a_repeated_snapshot_replaces_the_state_of_others(pair: tuple[Coordinator, Coordinator]) -> None:
    home, _other = pair
    async with ScriptedNode("a", addresses(*pair), chunks_of("old", 500)) as node:
        await all_know(node, *pair)
        node.chunks = chunks_of("new", 300)  # which are not reported
        home.tenants.unnamed.resync("a test wants it")
        await all_know(node, *pair)


async def test_another_home_takes_over(pair: tuple[Coordinator, Coordinator]) -> None:
    home, other = pair
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 300)) as node:
        await all_know(node, *pair)
        for number, coordinator in enumerate((other, home, other)):
            node.prefer(coordinator.address)
            node.admit(chunks_of(f"at {number}", 100))
            await until(lambda at=coordinator: node.stream_kinds[at.address][-1] == "home")  # type: ignore[misc]
            await all_know(node, *pair)
            node.evict(list(chunks_of(f"at {number}", 50)))
            await all_know(node, *pair)


async def test_two_receivers_of_the_same_report_agree_on_the_publisher(pair: tuple[Coordinator, Coordinator]) -> None:
    async with (
        ScriptedNode("a", addresses(pair[0]), chunks_of("a", 50)) as node,
        ScriptedNode("a", addresses(pair[1]), chunks_of("a", 50)) as twin,
    ):
        twin.epoch = node.epoch
        node.admit(chunks_of("more", 50))
        twin.admit(chunks_of("more", 50))
        await until(lambda: len(node.stream_kinds[pair[0].address]) + len(twin.stream_kinds[pair[1].address]) > 2)
        await all_know(node, *pair)


async def test_what_a_home_publishes_that_stood_still_is_ignored(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    home, other = pair
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 100)) as node:
        await all_know(node, *pair)
        late = Backlog()
        before = home.tenants.unnamed.core.publications["a"]
        thawed = Publication(before.owner, before.epoch, before.term, late)
        node.prefer(other.address)
        await all_know(node, *pair)
        await until(lambda: "a" in other.tenants.unnamed.core.publications)
        thawed.is_complete = True
        keys = join_keys(chunks_of("late", 5))
        thawed.publish_changes([Change(2, LLAMA.fingerprint, 16, keys, {}, join_keys(node.chunks))])
        thawed.publish_complete()
        thawed.publish_gone()
        store = await connected(server.url)
        assert await store.publish(before.owner.shard, late.take()[before.owner.shard]) == [b"fenced"] * 3
        await store.aclose()
        node.admit(chunks_of("after", 5))
        await all_know(node, *pair)


async def test_who_leaves_at_its_home_is_gone_there_and_elsewhere_when_its_lease_ends(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    _home, _other = pair
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 10)) as node:
        await all_know(node, *pair)
    for coordinator in pair:
        async with rpc.open_channel(coordinator.address) as channel:
            farewell = pb.DeregisterRequest(instance_id="a", epoch=node.epoch)
            await NodeStub(channel).Deregister(farewell, timeout=60)
    for coordinator in pair:
        assert not coordinator.tenants.unnamed.core.followers
        assert not coordinator.tenants.unnamed.core.publications
        coordinator.tenants.unnamed.core.check()
    await until(lambda: not any(":held:" in name or ":current:" in name for name in server.names()))


async def test_a_newer_epoch_replaces_what_the_older_one_held(pair: tuple[Coordinator, Coordinator]) -> None:
    async with ScriptedNode("a", addresses(*pair), chunks_of("old", 50)) as node:
        await all_know(node, *pair)
    async with ScriptedNode("a", addresses(*reversed(pair)), chunks_of("new", 70)) as node:
        await all_know(node, *pair)


async def test_without_the_store_nodes_report_to_all_and_with_an_empty_one_sharing_resumes(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    home, other = pair
    before = map_id(home)
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 1000)) as node:
        await all_know(node, *pair)
        lookups = [asyncio.create_task(look_up(coordinator.address)) for coordinator in pair]
        server.kill()
        await until(lambda: not map_id(home) and not map_id(other))
        await until(lambda: node.stream_kinds[other.address][-1] == "own")
        node.admit(chunks_of("meanwhile", 100))
        await all_know(node, *pair)
        server.start()
        await until(lambda: map_id(home) == map_id(other) != "")
        assert map_id(home) != before
        await until(lambda: node.stream_kinds[other.address][-1] == "elsewhere")
        await all_know(node, *pair)
        node.evict(list(chunks_of("meanwhile", 50)))
        await all_know(node, *pair)
        for looking in lookups:
            looking.cancel()
        ended = await asyncio.gather(*lookups, return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError] * 2, "every lookup was answered"


async def look_up(address: str) -> None:
    """Asks for ever; raises what is refused."""
    async with rpc.open_channel(address) as channel:
        cache = cache_service_pb2_grpc.CacheServiceStub(channel)
        for _ in itertools.count():
            await cache.Lookup(cache_service_pb2.LookupRequest(prompt=by_keys(KEYS)), timeout=60)
            await asyncio.sleep(0.01)


async def test_a_server_that_is_emptied_while_it_runs_is_another_map(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    before = map_id(pair[0])
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 100)) as node:
        await all_know(node, *pair)
        server.empty()
        await until(lambda: before != map_id(pair[0]) == map_id(pair[1]) != "")
        await all_know(node, *pair)
        node.admit(chunks_of("more", 100))
        await all_know(node, *pair)


async def test_a_server_that_is_emptied_is_another_map_though_nothing_is_published_or_loaded(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    before = map_id(pair[0])
    server.empty()
    await until(lambda: before != map_id(pair[0]) == map_id(pair[1]) != "")


async def test_each_loss_of_the_map_is_counted_and_logged_once(
    start: Start, server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_map, "MAX_PAUSE_SECONDS", shared_map.MIN_PAUSE_SECONDS)
    caplog.set_level(logging.INFO)
    coordinator = await start()
    assert coordinator.shared is not None
    attempts: list[int] = []
    connect = coordinator.shared._store.connect

    async def counted() -> str:
        attempts.append(1)
        return await connect()

    coordinator.shared._store.connect = counted  # type: ignore[method-assign]
    for losses in (1, 2):
        caplog.clear()
        attempts.clear()
        assert coordinator.shared.stats().loss_count == losses - 1
        server.kill()
        await until(lambda: not map_id(coordinator))
        await until(lambda: len(attempts) > 2)
        lines = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
        assert 1 <= len(lines) == len(set(lines)) <= 2, "not with every attempt"
        assert all(line.startswith(f"layout_map_url: {coordinator.shared._store.shown}") for line in lines)
        server.start()
        await until(lambda: map_id(coordinator) != "")
        assert coordinator.shared.stats().loss_count == losses
        assert "sharing the layout map" in caplog.text


async def test_a_publisher_that_waits_for_space_continues_once_there_is_some(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ROOM_SECONDS", 600.0)
    store = await connected(server.url)
    publisher = Publisher(store, lambda *_: None)
    publisher.backlog = Backlog(limit_bytes=1 << 20)
    owner = ChunkOwner("", "a")
    published = Publication(owner, 1, await store.next_term(owner), publisher.backlog)
    published.publish_complete()
    for number in range(8):
        keys = join_keys(chunks_of(f"{number}", 5000))
        published.publish_changes([Change(2, b"f" * 16, 16, keys, {}, b"")])
    assert not publisher.backlog.is_below_half
    waiting = asyncio.create_task(publisher.wait_for_room())
    await asyncio.sleep(0)
    publishing = asyncio.create_task(publisher.run())
    await asyncio.wait_for(waiting, WAIT_SECONDS)
    assert publisher.backlog.is_below_half
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    await store.aclose()


async def test_a_publisher_forgets_the_instances_that_have_left(server: RedisServer) -> None:
    store = await connected(server.url)
    publisher = Publisher(store, lambda *_: None)
    open_publications: list[Publication] = []
    for number in range(20):
        owner = ChunkOwner("", f"visitor-{number}")
        open_publications.append(Publication(owner, 1, await store.next_term(owner), publisher.backlog))
        open_publications[-1].publish_complete()
    publishing = asyncio.create_task(publisher.run())
    renewing = asyncio.create_task(publisher.renew(lambda: open_publications, 0.01))
    await until(lambda: len(publisher._complete) == 20)
    while len(open_publications) > 1:
        open_publications.pop().publish_gone()
    await until(lambda: list(publisher._complete) == [ChunkOwner("", "visitor-0")])
    for task in (publishing, renewing):
        task.cancel()
    await asyncio.gather(publishing, renewing, return_exceptions=True)
    await store.aclose()


async def test_a_server_that_freezes_is_done_without(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 100)) as node:
        await all_know(node, *pair)
        server.freeze()
        await until(lambda: not map_id(pair[0]) and not map_id(pair[1]))
        node.admit(chunks_of("more", 100))
        await all_know(node, *pair)
        server.thaw()
        await until(lambda: map_id(pair[0]) == map_id(pair[1]) != "")
        await all_know(node, *pair)


async def test_a_coordinator_starts_without_its_store(server: RedisServer) -> None:
    server.kill()
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF, layout_map_url=server.url)) as alone:
        assert not map_id(alone)
        async with ScriptedNode("a", addresses(alone), chunks_of("a", 10)) as node:
            await all_know(node, alone)
            assert node.stream_kinds[alone.address] == ["own"]
            server.start()
            await until(lambda: node.stream_kinds[alone.address][-1] == "home")
            await all_know(node, alone)


async def test_entries_that_the_store_lost_are_published_again(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 100)) as node:
        await all_know(node, *pair)
        with server.client() as client:
            client.delete(*[name for name in server.names() if ":held:" in name])
        node.admit(chunks_of("more", 10))
        await all_know(node, *pair)
        await until(lambda: any(":held:" in name for name in server.names()))


async def test_a_follower_that_misses_a_part_of_the_log_reloads(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    _home, other = pair
    nodes = [ScriptedNode(name, addresses(*pair), chunks_of(name, 20)) for name in names_in_shard(3, 2)]
    async with nodes[0], nodes[1]:
        for node in nodes:
            await all_know(node, *pair)
        assert other.shared is not None
        loads = other.shared.stats().load_count
        # What a trimmed log looks like to who is slow: the next entry follows one that was never read.
        with server.client() as client:
            client.xadd("lmkv:{3}:log", {"p": b"1-1", "e": b"nothing"})
        nodes[0].admit(chunks_of("more", 20))
        await until(lambda: other.shared.stats().load_count >= loads + 2)  # type: ignore[union-attr]
        for node in nodes:
            await all_know(node, *pair)


async def test_persistently_different_digests_cause_a_snapshot(
    pair: tuple[Coordinator, Coordinator], server: RedisServer
) -> None:
    home, other = pair
    async with ScriptedNode("a", addresses(*pair), chunks_of("a", 100)) as node:
        await all_know(node, *pair)
        term = home.tenants.unnamed.core.publications["a"].term
        entries = Backlog()
        lossy = Publication(ChunkOwner("", "a"), node.epoch, term, entries)
        lossy.publish_changes([Change(2, LLAMA.fingerprint, 16, b"", {}, join_keys(chunks_of("a", 10)))])
        store = await connected(server.url)
        await store.publish(lossy.owner.shard, entries.take()[lossy.owner.shard])
        # the log says nothing of it, as after a failover that lost some
        await store.aclose()
        other.tenants.unnamed.core.followers["a"].request_load()
        await until(lambda: len(held(other, "a", list(node.chunks))) == 90)

        def is_mended() -> bool:
            node.report_digests()
            return knows(other, "a", node.chunks)

        await until(is_mended)
        publications = home.tenants.unnamed.core.publications
        await until(lambda: "a" in publications and publications["a"].term > term)
        await all_know(node, *pair)


async def test_tenants_with_instances_of_one_name_do_not_mix(server: RedisServer, tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", entry("engine", "red"), entry("engine", "blue"), entry("admin"))
    assert read_callers(path)
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, layout_map_url=server.url, auth_tokens=str(path))) as home,
        Coordinator(
            CoordinatorConfig(port=0, http_port=OFF, layout_map_url=server.url, auth_tokens=str(path))
        ) as other,
        ScriptedNode("a", addresses(home, other), chunks_of("r", 30), token="engine-of-red-token") as red,
        ScriptedNode("a", addresses(other, home), chunks_of("b", 40), token="engine-of-blue-token") as blue,
    ):
        for coordinator in (home, other):
            await until(lambda at=coordinator: knows(at, "a", red.chunks, "red"))  # type: ignore[misc]
            await until(lambda at=coordinator: knows(at, "a", blue.chunks, "blue"))  # type: ignore[misc]
        assert red.stream_kinds[home.address][-1] == blue.stream_kinds[other.address][-1] == "home"


async def test_a_stream_that_is_reported_elsewhere_carries_no_chunks(pair: tuple[Coordinator, Coordinator]) -> None:
    async with rpc.open_channel(pair[0].address) as channel:
        registry = NodeStub(channel)
        said = pb.Instance(instance_id="a", epoch=1, peer_address="127.0.0.1:7000", specs=[LLAMA.to_proto()])
        await registry.Register(registration(said), timeout=60)
        stream: Any = registry.Report()
        change = report_pb.ChunkChange(tier="host", fingerprint=LLAMA.fingerprint, admitted_keys=KEYS[0])
        first = report_pb.ReportRequest(instance_id="a", epoch=1, sequence=1, reported_elsewhere=True)
        await stream.write(first)
        await stream.read()
        await stream.write(report_pb.ReportRequest(instance_id="a", epoch=1, sequence=2, changes=[change]))
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        assert rpc.from_rpc_error(caught.value).reason == "BAD_MESSAGE"


async def test_a_coordinator_without_a_shared_map_needs_its_own_reports() -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as alone,
        rpc.open_channel(alone.address) as channel,
    ):
        registry = NodeStub(channel)
        said = pb.Instance(instance_id="a", epoch=1, peer_address="127.0.0.1:7000")
        answer = await registry.Register(registration(said), timeout=60)
        assert answer.layout_map_id == ""
        stream: Any = registry.Report()
        await stream.write(report_pb.ReportRequest(instance_id="a", epoch=1, sequence=1, reported_elsewhere=True))
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        assert rpc.from_rpc_error(caught.value).reason == "RESYNC_REQUIRED"


async def test_answers_are_partial_until_what_is_reported_elsewhere_is_known(start: Start, server: RedisServer) -> None:
    late = await start()
    assert is_partial(late)  # it is young
    core = late.tenants.unnamed.core
    now = time.monotonic() + LEASE_SECONDS
    assert not core.is_partial(now)
    async with rpc.open_channel(late.address) as channel:
        registry = NodeStub(channel)
        said = pb.Instance(instance_id="a", epoch=1, peer_address="127.0.0.1:7000")
        await registry.Register(registration(said), timeout=60)
        stream: Any = registry.Report()
        await stream.write(report_pb.ReportRequest(instance_id="a", epoch=1, sequence=1, reported_elsewhere=True))
        await stream.read()
        assert core.is_partial(now)
        store = await connected(server.url)
        owner = ChunkOwner("", "a")
        entries = Backlog()
        publication = Publication(owner, 1, await store.next_term(owner), entries)
        publication.publish_complete()
        await store.publish(owner.shard, entries.take()[owner.shard])
        await store.aclose()
        await until(lambda: not core.is_partial(now))
        stream.cancel()


async def test_a_map_of_coordinators_of_another_protocol_is_left_to_them_until_they_are_gone(
    start: Start, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries of another version could be misunderstood: instances are known from their own reports instead."""
    names = [f"lmkv:{{{shard}}}:id" for shard in range(SHARD_COUNT)]
    with server.client() as client:
        for name in names:
            client.set(name, f"{PROTOCOL_VERSION + 1}-abcdef", px=round(1000 * TERM_SECONDS))
        coordinator = await start()
        async with ScriptedNode("a", addresses(coordinator), chunks_of("a", 10)) as node:
            await all_know(node, coordinator)
            assert (map_id(coordinator), node.stream_kinds[coordinator.address]) == ("", ["own"])
            own = f"lmkv {__version__} (protocol {PROTOCOL_VERSION})"
            lines = [record.getMessage() for record in caplog.records if "continuing without it" in record.getMessage()]
            assert [line.partition("without it: ")[2] for line in lines] == [
                f"coordinators of protocol {PROTOCOL_VERSION + 1} share it, and this one runs {own}; upgrade all "
                "coordinators together, or name another database"
            ]
            assert all(client.get(name).startswith(b"%d-" % (PROTOCOL_VERSION + 1)) for name in names), (
                "it has not renewed them either"
            )
            for name in names:
                client.pexpire(name, round(1000 * (TERM_SECONDS - UNUSED_SECONDS - 1)))
            await until(lambda: map_id(coordinator) != "")
            await all_know(node, coordinator)
            await until(lambda: node.stream_kinds[coordinator.address][-1] == "home")


async def test_every_refused_publication_of_a_batch_is_reported(server: RedisServer) -> None:
    store = await connected(server.url)
    refused: list[tuple[ChunkOwner, str]] = []
    publisher = Publisher(store, lambda owner, _term, reply: refused.append((owner, reply)))
    owners = [ChunkOwner("", "visitor") for _ in range(3)]
    fenced = [Publication(owner, 1, await store.next_term(owner), publisher.backlog) for owner in owners]
    await store.next_term(owners[0])
    for one in fenced:
        one.publish_complete()
    running = asyncio.create_task(publisher.run())
    await until(lambda: len(refused) == len(fenced), "all publications are refused")
    await publisher._renew(owners[0].shard, fenced)
    assert refused == [(owners[0], "fenced")] * 2 * len(fenced)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await store.aclose()
