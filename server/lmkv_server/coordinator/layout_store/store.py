"""The words that coordinators have for Valkey or Redis, on one server or a cluster. All IO of the shared map is here.

Keys of a shard have its number in braces, so that a cluster keeps them together. Which server has which shard is asked
when connecting: should that change, calls fail, and whoever uses the store connects anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import uuid4

from valkey.asyncio import ConnectionPool, Valkey
from valkey.asyncio.retry import Retry
from valkey.backoff import NoBackoff
from valkey.crc import key_slot
from valkey.exceptions import ValkeyError

from lmkv.errors import ConfigError
from lmkv.remote_url import RemoteUrl
from lmkv_server.coordinator.layout_store import scripts
from lmkv_server.coordinator.layout_store.content import FIELD_BYTES, OPENING
from lmkv_server.coordinator.layout_store.entry import MAX_ENTRY_BYTES, READ_ENTRIES, Entry, EntryKind, Position, encode
from lmkv_server.coordinator.layout_store.lost import StoreLost, all_of
from lmkv_server.coordinator.layout_store.owner import SHARD_COUNT, Owner
from lmkv_server.coordinator.layout_store.publication import Note

CALL_SECONDS = 2.0
"""Most time that an answer may take: less than a lease, for nodes that begin to report wait for it too."""
BLOCK_SECONDS = 1.0
"""How long a read waits for entries."""
LOG_ENTRIES = 4096
"""About what a shard's log keeps: who is further behind loads anew."""
LOG_SECONDS = 600.0
"""How long a log stays that nobody writes."""
TERM_SECONDS = 86_400.0
"""How long ids and terms stay that nobody renews."""
SCANNED_RECORDS = 4000


class Logged(NamedTuple):
    """An entry of a log, as it came."""

    position: Position
    previous: Position
    """The entry before it: something else than the reader has seen means that some are lost."""
    data: bytes


class Store:
    """Connect before anything else. All methods but `aclose` raise `StoreLost`."""

    def __init__(self, url: RemoteUrl, *, held_seconds: float) -> None:
        """`held_seconds`: how long what nobody renews is kept. Raises `ConfigError` if the URL has unknown options."""
        self.shown = url.shown
        self._held_ms = round(held_seconds * 1000)
        scheme, rest = url.url.split("://", 1)
        try:
            self._pool = ConnectionPool.from_url(  # only says how to connect
                f"{'valkeys' if scheme in ('rediss', 'valkeys') else 'valkey'}://{rest}",
                socket_timeout=CALL_SECONDS + BLOCK_SECONDS,
                socket_connect_timeout=CALL_SECONDS,
                retry=Retry(NoBackoff(), 0),
            )
            self._pool.connection_class(**self._pool.connection_kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"layout_map_url: {url.shown} has an option that is none: {error}", key="layout_map_url"
            ) from None
        self._address = (url.host, url.port)
        self._known_addresses: list[tuple[str, int]] = []
        """Of a cluster, as of the last time."""
        self._clients: dict[tuple[str, int], Valkey] = {}
        self._shards: list[Valkey] = []
        """Who has each shard."""
        self._ids: list[bytes] = []
        """The id of each shard."""
        self._shas: dict[str, str] = {}

    # --- Life ----------------------------------------------------------------------------------------------------

    async def connect(self) -> str:
        """Finds out who has which shard; returns the id of the map, which is made if there is none."""
        await self.aclose()
        await self._find_shards()
        for script in scripts.ALL:
            for client in self._clients.values():
                async with _answer():
                    self._shas[script] = await client.script_load(script)
        self._ids = await self._claim()
        return sha256(b"".join(self._ids)).hexdigest()[:32]

    async def check(self) -> None:
        """Finds out whether the map is still the same, and renews its id."""
        if await self._claim() != self._ids:
            raise StoreLost("the layout map is another one")

    async def aclose(self) -> None:
        """Disconnects. Repeating it is safe."""
        clients, self._clients = self._clients, {}
        self._shards = []
        for client in clients.values():
            await client.aclose()
            await client.connection_pool.disconnect()

    # --- Publishing ----------------------------------------------------------------------------------------------

    async def next_term(self, owner: Owner) -> int:
        """A term for an instance; from now on nothing is published in earlier ones."""
        keys = [_key(owner, "term"), _shard_key(owner.shard, "last_term"), _key(owner, "held") + b":"]
        opening = (OPENING[:FIELD_BYTES], OPENING[FIELD_BYTES:])
        return int(await self._run(scripts.TERM, owner.shard, keys, _ms(TERM_SECONDS), self._held_ms, *opening))

    async def publish(self, shard: int, notes: Sequence[Note]) -> list[bytes]:
        """Publishes notes of one shard, in order; for each `ok`, `fenced` (its term is over) or `lost`."""
        keys = [_shard_key(shard, "log")]
        words: list[Any] = [self._held_ms, LOG_ENTRIES, _ms(LOG_SECONDS)]
        for note in notes:
            entry = note.entry
            keys += _publication_keys(entry.owner, entry.term)
            words += [entry.kind.name.lower(), entry.term, entry.epoch, _logged(note), len(entry.changes)]
            for change in entry.changes:
                words += [change.place, change.tokens, change.admitted, change.evicted]
        return list(await self._run(scripts.PUBLISH, shard, keys, *words))

    async def renew(self, shard: int, terms: Sequence[tuple[Owner, int, bool]]) -> list[bytes]:
        """Keeps terms of one shard, each complete or not, from vanishing; for each as `publish`."""
        keys: list[bytes] = []
        words: list[Any] = [_ms(TERM_SECONDS), self._held_ms]
        for owner, term, is_complete in terms:
            keys += _publication_keys(owner, term)
            words += [term, int(is_complete)]
        return list(await self._run(scripts.RENEW, shard, keys, *words))

    # --- Following -----------------------------------------------------------------------------------------------

    async def current(self, owner: Owner) -> tuple[int, int] | None:
        """Term and epoch of what is complete of an instance; None if nothing is."""
        answer = await self._run(scripts.CURRENT, owner.shard, [_key(owner, "current")])
        if not answer:
            return None
        term, epoch = answer.split()
        return int(term), int(epoch)

    async def scan(self, owner: Owner, term: int, cursor: int) -> tuple[int, bytes]:
        """A step of a walk over what an instance holds: the next cursor, at last 0, and records."""
        keys = [_key(owner, "held") + b":%d" % term]
        cursor, records = await self._run(scripts.SCAN, owner.shard, keys, cursor, SCANNED_RECORDS)
        return int(cursor), records

    async def tail(self, shard: int) -> Position:
        """The newest entry of a shard's log."""
        return _position(await self._run(scripts.TAIL, shard, [_shard_key(shard, "log")]))

    async def read(self, shard: int, after: Position) -> list[Logged]:
        """The next entries of a shard's log; none if none came within a second."""
        words = ("COUNT", READ_ENTRIES, "BLOCK", _ms(BLOCK_SECONDS), "STREAMS")
        position = b"%d-%d" % after
        async with _answer(BLOCK_SECONDS):
            found = await self._shards[shard].execute_command("XREAD", *words, _shard_key(shard, "log"), position)
        return [
            Logged(_position(at), _position(fields[b"p"]), fields[b"e"])
            for _, entries in found or ()
            for at, fields in entries
        ]

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _find_shards(self) -> None:
        failure = StoreLost("nobody was asked")
        for address in (self._address, *self._known_addresses):
            try:
                client = self._client(address)
                async with _answer():
                    is_cluster = (await client.info("cluster")).get("cluster_enabled") == 1
                async with _answer():
                    slots = await client.execute_command("CLUSTER SLOTS") if is_cluster else ()
            except StoreLost as lost:
                failure = lost
                continue
            self._shards = [client] * SHARD_COUNT
            if is_cluster:
                self._shards = [self._client(_primary(slots, shard, address)) for shard in range(SHARD_COUNT)]
                self._known_addresses = [known for known in self._clients if known != self._address]
            return
        raise failure

    def _client(self, address: tuple[str, int]) -> Valkey:
        """Connects when it is first used."""
        if address not in self._clients:
            host, port = address
            kwargs = {**self._pool.connection_kwargs, "host": host, "port": port}
            pool = ConnectionPool(connection_class=self._pool.connection_class, **kwargs)
            self._clients[address] = Valkey(connection_pool=pool)
        return self._clients[address]

    async def _claim(self) -> list[bytes]:
        return await all_of(self._claim_shard(shard) for shard in range(SHARD_COUNT))

    async def _claim_shard(self, shard: int) -> bytes:
        words = (1, _shard_key(shard, "id"), uuid4().hex[:8], _ms(TERM_SECONDS))
        async with _answer():
            answer = await self._shards[shard].evalsha(self._shas[scripts.CLAIM], *words)
        return bytes(answer)

    async def _run(self, script: str, shard: int, keys: Sequence[bytes], *words: Any) -> Any:
        all_keys = [_shard_key(shard, "id"), *keys]
        async with _answer():
            if not self._shards:
                raise StoreLost("not connected")
            return await self._shards[shard].evalsha(
                self._shas[script], len(all_keys), *all_keys, self._ids[shard], *words
            )


@asynccontextmanager
async def _answer(more_seconds: float = 0.0) -> AsyncIterator[None]:
    """Bounds the wait for an answer, and makes one exception of all that can go wrong."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        async with asyncio.timeout(CALL_SECONDS + more_seconds):
            yield
        if task.cancelling() > before:  # just as the answer came; the client's `wait_for` swallows that in Python 3.11
            raise asyncio.CancelledError
    except TimeoutError:
        raise StoreLost(f"no answer for {CALL_SECONDS + more_seconds:g} s") from None
    except (ValkeyError, OSError, EOFError, RuntimeError) as error:  # the last is uvloop's, of a connection just reset
        raise StoreLost(str(error)) from None


def _primary(slots: Sequence[Sequence[Any]], shard: int, asked: tuple[str, int]) -> tuple[str, int]:
    """Who has a shard, as somebody of a cluster tells. Raises `StoreLost` if nobody does."""
    slot = key_slot(_shard_key(shard, "id"))
    for first, last, (host, port, *_), *_ in slots:
        if first <= slot <= last:
            return (host.decode() if host else asked[0]), port  # without a name: as we call it
    raise StoreLost(f"nobody in the cluster has slot {slot}")


def _logged(note: Note) -> bytes:
    """What the log says of a note; nothing of a part of a snapshot."""
    if not note.is_logged:
        return b""
    entry = note.entry
    if note.size_bytes > MAX_ENTRY_BYTES:
        entry = Entry(EntryKind.RELOAD, entry.tenant, entry.instance_id, entry.epoch, entry.term)
    return encode(entry)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _shard_key(shard: int, what: str) -> bytes:
    return b"lmkv:{%d}:%s" % (shard, what.encode())


def _key(owner: Owner, what: str) -> bytes:
    return b"%s:%s" % (_shard_key(owner.shard, what), owner.name.encode())


def _publication_keys(owner: Owner, term: int) -> list[bytes]:
    return [_key(owner, "term"), _key(owner, "held") + b":%d" % term, _key(owner, "current")]


def _position(text: bytes) -> Position:
    milliseconds, number = text.split(b"-")
    return int(milliseconds), int(number)
