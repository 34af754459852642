"""What Valkey is asked to do, against a real server: terms fence, what is lost is noticed."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from lmkv.config.remote_url import parse_remote_url
from lmkv.errors import ConfigError
from lmkv_server.coordinator.core.layout_map import Change
from lmkv_server.coordinator.layout_store.layout_store import StoreLost
from lmkv_server.coordinator.layout_store.publication import Backlog, PendingEntry, Publication
from lmkv_server.coordinator.layout_store.records import (
    MAX_ENTRY_BYTES,
    ChunkOwner,
    EntryKind,
    admissions,
    decode,
    has_marker,
)
from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient
from tests.server.coordinator.layout_store.parts import connected
from tests.server.node.remote_parts import Silent
from tests.support.redis_server import RedisServer

OWNER = ChunkOwner("tenant", "a/b {1}")
EPOCH = 5


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[ValkeyClient]:
    server.empty()
    made = await connected(server.url)
    yield made
    await made.aclose()


class RecordedPublication:
    """A publication, and the entries that it has not sent yet."""

    def __init__(self, term: int) -> None:
        self.backlog = Backlog()
        self.publication = Publication(OWNER, EPOCH, term, self.backlog)

    def take(self) -> list[PendingEntry]:
        return self.backlog.take().get(OWNER.shard, [])


async def held(store: ValkeyClient, term: int) -> dict[bytes, int]:
    """Keys with their tokens."""
    cursor, found = -1, b""
    while cursor:
        cursor, records = await store.scan(OWNER, term, max(cursor, 0))
        found += records
    assert has_marker(found)
    return {
        change.admitted[at : at + 16]: change.chunk_size
        for change in admissions(found)
        for at in range(0, len(change.admitted), 16)
    }


def change(admitted: int, evicted: int = 0, partial: dict[int, int] | None = None) -> Change:
    keys = b"".join(number.to_bytes(16, "big") for number in range(max(admitted, evicted)))
    return Change(2, b"f" * 16, 256, keys[: 16 * admitted], partial or {}, keys[: 16 * evicted])


async def test_what_is_published_can_be_loaded_and_followed(store: ValkeyClient) -> None:
    source = RecordedPublication(await store.next_term(OWNER))
    term = source.publication.term
    before = await store.tail(OWNER.shard)
    source.publication.publish_changes([change(5000, partial={4999: 7})])
    assert await store.publish(OWNER.shard, source.take()) == [b"ok"]
    assert await store.current(OWNER) is None
    source.publication.publish_complete()
    source.publication.publish_changes([change(0, evicted=3000)], [(2, 2000, 1 << 63)])
    assert await store.publish(OWNER.shard, source.take()) == [b"ok", b"ok"]
    assert await store.current(OWNER) == (term, EPOCH)
    found = await held(store, term)
    assert len(found) == 2000
    assert found[(4999).to_bytes(16, "big")] == 7
    assert set(found.values()) == {7, 256}
    logged = await store.read(OWNER.shard, before)
    assert [decode(entry.data).kind for entry in logged] == [EntryKind.COMPLETE, EntryKind.CHANGES]
    assert [entry.previous for entry in logged] == [before, logged[0].position]
    assert decode(logged[1].data).digests == [(2, 2000, 1 << 63)]
    assert await store.tail(OWNER.shard) == logged[-1].position


async def test_parents_of_partial_chunks_come_back_as_they_went(store: ValkeyClient) -> None:
    source = RecordedPublication(await store.next_term(OWNER))
    source.publication.publish_complete()
    keys = [number.to_bytes(16, "big") for number in range(3000)]
    partial = {index: 1 + index % 255 for index in range(0, 3000, 3)}
    parents = {index: keys[index - 1] for index in range(0, 3000, 6)}
    whole = Change(2, b"f" * 16, 256, b"".join(keys), partial, partial_parents=parents)
    source.publication.publish_changes([whole, Change(2, b"f" * 16, 256, evicted=b"".join(keys[1000:]))])
    assert await store.publish(OWNER.shard, source.take()) == [b"ok", b"ok"]
    found: dict[bytes, tuple[int, bytes]] = {}
    cursor, records = -1, b""
    while cursor:
        cursor, read = await store.scan(OWNER, source.publication.term, max(cursor, 0))
        records += read
    for change in admissions(records):
        for index in range(len(change.admitted) // 16):
            tokens = change.partial_token_counts.get(index, change.chunk_size)
            found[change.admitted[16 * index : 16 * index + 16]] = tokens, change.partial_parents.get(index, b"")
    assert found == {keys[index]: (partial.get(index, 256), parents.get(index, b"")) for index in range(1000)}


async def test_chunks_without_a_spec_and_of_no_tokens_come_back_as_they_went(store: ValkeyClient) -> None:
    source = RecordedPublication(await store.next_term(OWNER))
    source.publication.publish_changes([Change(1, b"", 0, bytes(16), {}, b"")])
    await store.publish(OWNER.shard, source.take())
    _, records = await store.scan(OWNER, source.publication.term, 0)
    assert list(admissions(records)) == [Change(1, b"", 0, bytes(16), {}, b"")]


async def test_a_later_term_fences_an_earlier_one(store: ValkeyClient) -> None:
    old = RecordedPublication(await store.next_term(OWNER))
    old.publication.publish_changes([change(3)])
    old.publication.publish_complete()
    await store.publish(OWNER.shard, old.take())
    new = RecordedPublication(await store.next_term(OWNER))
    assert new.publication.term > old.publication.term
    position = await store.tail(OWNER.shard)
    old.publication.publish_changes([change(5)])
    old.publication.publish_gone()
    assert await store.publish(OWNER.shard, old.take()) == [b"fenced", b"fenced"]
    assert await store.tail(OWNER.shard) == position
    assert await store.renew(OWNER.shard, [(OWNER, old.publication.term, True)]) == [b"fenced"]
    assert len(await held(store, old.publication.term)) == 3  # until the new one is complete
    new.publication.publish_complete()
    assert await store.publish(OWNER.shard, new.take()) == [b"ok"]
    assert await store.scan(OWNER, old.publication.term, 0) == (0, b"")
    assert await held(store, new.publication.term) == {}


async def test_who_leaves_leaves_nothing(store: ValkeyClient, server: RedisServer) -> None:
    source = RecordedPublication(await store.next_term(OWNER))
    source.publication.publish_changes([change(3)])
    source.publication.publish_complete()
    source.publication.publish_gone()
    source.publication.publish_changes([change(4)])
    assert await store.publish(OWNER.shard, source.take()) == [b"ok"] * 3
    assert await store.current(OWNER) is None
    assert not [name for name in server.names() if ":held:" in name or ":current:" in name]


async def test_nothing_stays_for_ever(store: ValkeyClient, server: RedisServer) -> None:
    source = RecordedPublication(await store.next_term(OWNER))
    source.publication.publish_changes([change(3)])
    source.publication.publish_complete()
    await store.publish(OWNER.shard, source.take())
    await store.renew(OWNER.shard, [(OWNER, source.publication.term, True)])
    with server.client() as client:
        assert {name: client.pttl(name) > 0 for name in server.names()} == dict.fromkeys(server.names(), True)


async def test_what_vanished_is_noticed(store: ValkeyClient, server: RedisServer) -> None:
    source = RecordedPublication(await store.next_term(OWNER))
    source.publication.publish_complete()
    await store.publish(OWNER.shard, source.take())
    kept = (OWNER, source.publication.term, True)
    assert await store.renew(OWNER.shard, [kept]) == [b"ok"]
    with server.client() as client:
        client.delete(*[name for name in server.names() if ":current:" in name])
        assert await store.renew(OWNER.shard, [kept]) == [b"lost"]
        client.delete(*[name for name in server.names() if ":held:" in name])
    assert await store.renew(OWNER.shard, [(OWNER, source.publication.term, False)]) == [b"lost"]
    source.publication.publish_changes([change(1)])
    assert await store.publish(OWNER.shard, source.take()) == [b"lost"]


@pytest.mark.parametrize("lost", [":term:", "term"])
async def test_terms_rise_strictly_though_the_last_one_is_forgotten(
    store: ValkeyClient, server: RedisServer, lost: str
) -> None:
    terms = [await store.next_term(OWNER)]
    names = [name for name in server.names() if lost in name]
    with server.client() as client:
        for _ in range(500):  # some of them in the same millisecond
            client.delete(*names)
            terms.append(await store.next_term(OWNER))
    assert all(last < next_term for last, next_term in itertools.pairwise(terms))


async def test_terms_rise_strictly_though_the_clock_was_set_back_and_the_last_one_is_forgotten(
    store: ValkeyClient, server: RedisServer
) -> None:
    first = await store.next_term(OWNER)
    with server.client() as client:
        ahead = first + 3600 * 1_000_000
        for name in server.names():
            if "term" in name:
                client.set(name, ahead)
        client.delete(*[name for name in server.names() if ":term:" in name])
    assert await store.next_term(OWNER) > ahead


async def test_long_changes_are_loaded_instead_of_sent(store: ValkeyClient) -> None:
    source = RecordedPublication(await store.next_term(OWNER))
    source.publication.publish_complete()
    source.publication.publish_changes([change(MAX_ENTRY_BYTES // 16)])
    await store.publish(OWNER.shard, source.take())
    logged = [decode(entry.data) for entry in await store.read(OWNER.shard, (0, 0))]
    assert [(entry.kind, entry.changes) for entry in logged] == [(EntryKind.COMPLETE, []), (EntryKind.RELOAD, [])]
    assert len(await held(store, source.publication.term)) == MAX_ENTRY_BYTES // 16


async def test_a_server_that_was_emptied_is_another_map(store: ValkeyClient, server: RedisServer) -> None:
    before = await store.connect()
    assert await store.connect() == before
    await store.check()
    server.empty()
    with pytest.raises(StoreLost, match="another one"):
        await store.next_term(OWNER)
    with pytest.raises(StoreLost, match="another one"):
        await store.check()
    assert await store.connect() != before


async def test_who_does_not_answer_is_lost_in_time() -> None:
    with Silent() as url:
        store = ValkeyClient(parse_remote_url(url), held_seconds=60)
        with pytest.raises(StoreLost):
            await store.connect()
        await store.aclose()


async def test_a_wrong_password_is_reported_without_the_password(server: RedisServer) -> None:
    store = ValkeyClient(parse_remote_url(f"redis://:hush@127.0.0.1:{server.port}/0"), held_seconds=60)
    with pytest.raises(StoreLost) as caught:
        await store.connect()
    await store.aclose()
    assert "hush" not in str(caught.value) + store.shown


def test_unknown_options_of_a_url_are_refused() -> None:
    with pytest.raises(ConfigError, match="layout_map_url"):
        ValkeyClient(parse_remote_url("redis://127.0.0.1:1/0?nonsense=1"), held_seconds=60)
