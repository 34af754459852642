"""The client of Valkey or Redis, one server or a cluster. All IO of the shared map is here.

Keys of a shard contain its number in braces, so that a cluster keeps them on one server. The server of each shard is
looked up when connecting; if it changes, calls fail and `SharedMap` connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import uuid4
from zlib import crc32

from valkey.asyncio import ConnectionPool, Valkey
from valkey.asyncio.retry import Retry
from valkey.backoff import NoBackoff
from valkey.crc import key_slot
from valkey.exceptions import ValkeyError

from lmkv.config.remote_url import RemoteUrl
from lmkv.errors import ConfigError
from lmkv.internal import OWN_BUILD, PROTOCOL_VERSION
from lmkv_server.coordinator.layout_store import scripts
from lmkv_server.coordinator.layout_store.layout_store import OwnedRecords, StoreLost, all_of
from lmkv_server.coordinator.layout_store.publication import PendingEntry
from lmkv_server.coordinator.layout_store.records import (
    FIELD_BYTES,
    MARKER,
    MAX_ENTRY_BYTES,
    READ_ENTRIES,
    SHARD_COUNT,
    ChunkOwner,
    EntryKind,
    LogEntry,
    LogPosition,
    encode,
    field_prefix,
    writes,
)

CALL_SECONDS = 2.0
"""Timeout of a call: less than a lease, because nodes that start to report wait for one."""
BLOCK_SECONDS = 1.0
"""Longest time that a read waits for entries."""
LOG_ENTRIES = 4096
"""Approximate length of a shard's log: a coordinator further behind loads again."""
LOG_SECONDS = 600.0
"""Lifetime of a log that is not written."""
UNUSED_SECONDS = 60.0
"""A map of another protocol that its coordinators have not renewed for such a time is replaced."""
TERM_SECONDS = 86_400.0
"""Lifetime of ids and terms that are not renewed."""
SCANNED_RECORDS = 4000


class Logged(NamedTuple):
    """An entry of a log, not decoded yet."""

    position: LogPosition
    previous: LogPosition
    """LogPosition of the entry before it: if the reader has not seen that one, entries are lost."""
    data: bytes


class ValkeyClient:
    """Connections to the store. Call `connect` first. All methods but `aclose` raise `StoreLost`."""

    def __init__(self, url: RemoteUrl, *, held_seconds: float) -> None:
        """`held_seconds` is the lifetime of publications without renewal. Raises `ConfigError` for a bad URL option."""
        self.shown = url.shown
        self._held_ms = round(held_seconds * 1000)
        scheme, rest = url.url.split("://", 1)
        try:
            self._pool = ConnectionPool.from_url(  # holds connection options only
                f"{'valkeys' if scheme in ('rediss', 'valkeys') else 'valkey'}://{rest}",
                socket_timeout=CALL_SECONDS + BLOCK_SECONDS,
                socket_connect_timeout=CALL_SECONDS,
                retry=Retry(NoBackoff(), 0),
            )
            self._pool.connection_class(**self._pool.connection_kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"layout_map_url: {url.shown} has an invalid option: {error}", key="layout_map_url"
            ) from None
        self._address = (url.host, url.port)
        self._known_addresses: list[tuple[str, int]] = []
        """Servers of the cluster, from the last connection."""
        self._clients: dict[tuple[str, int], Valkey] = {}
        self._shards: list[Valkey] = []
        """The server of each shard."""
        self._ids: list[bytes] = []
        """The id of each shard."""
        self._shas: dict[str, str] = {}

    # --- Connection ----------------------------------------------------------------------------------------------

    async def connect(self) -> str:
        """Finds the server of each shard; returns the id of the map, which is created if there is none."""
        await self.aclose()
        await self._find_shards()
        for script in scripts.ALL:
            for client in self._clients.values():
                async with _answer():
                    self._shas[script] = await client.script_load(script)
        self._ids = await self._claim()
        return sha256(b"".join(self._ids)).hexdigest()[:32]

    async def check(self) -> None:
        """Raises `StoreLost` if the map was replaced; renews its id."""
        if await self._claim() != self._ids:
            raise StoreLost("the layout map was replaced by another one")

    async def aclose(self) -> None:
        """Disconnects. Idempotent."""
        clients, self._clients = self._clients, {}
        self._shards = []
        for client in clients.values():
            await client.aclose()
            await client.connection_pool.disconnect()

    # --- Publishing ----------------------------------------------------------------------------------------------

    async def next_term(self, owner: ChunkOwner) -> int:
        """Starts a new term for an instance; publications of earlier terms are refused from now on."""
        keys = [_key(owner, "term"), _shard_key(owner.shard, "last_term"), _key(owner, "held") + b":"]
        marker = (MARKER[:FIELD_BYTES], MARKER[FIELD_BYTES:])
        return int(await self._run(scripts.TERM, owner.shard, keys, _ms(TERM_SECONDS), self._held_ms, *marker))

    async def publish(self, shard: int, batch: Sequence[PendingEntry]) -> list[bytes]:
        """Writes entries of one shard, in order; the reply for each is `ok`, `fenced` (its term is over) or `lost`."""
        keys = [_shard_key(shard, "log")]
        arguments: list[Any] = [self._held_ms, LOG_ENTRIES, _ms(LOG_SECONDS)]
        for pending in batch:
            entry = pending.entry
            keys += _publication_keys(entry.owner, entry.term)
            written = [(field_prefix(change), *step) for change in entry.changes for step in writes(change)]
            arguments += [entry.kind.name.lower(), entry.term, entry.epoch, _encoded(pending), len(written)]
            for step in written:
                arguments += step
        return list(await self._run(scripts.PUBLISH, shard, keys, *arguments))

    async def renew(self, shard: int, terms: Sequence[tuple[ChunkOwner, int, bool]]) -> list[bytes]:
        """Renews terms of one shard, given with whether each is complete; replies as `publish`."""
        keys: list[bytes] = []
        arguments: list[Any] = [_ms(TERM_SECONDS), self._held_ms]
        for owner, term, is_complete in terms:
            keys += _publication_keys(owner, term)
            arguments += [term, int(is_complete)]
        return list(await self._run(scripts.RENEW, shard, keys, *arguments))

    # --- Following -----------------------------------------------------------------------------------------------

    async def current(self, owner: ChunkOwner) -> tuple[int, int] | None:
        """Term and epoch of the complete snapshot of an instance; None if there is none."""
        answer = await self._run(scripts.CURRENT, owner.shard, [_key(owner, "current")])
        if not answer:
            return None
        term, epoch = answer.split()
        return int(term), int(epoch)

    async def scan(self, owner: ChunkOwner, term: int, cursor: int) -> tuple[int, bytes]:
        """A step of a scan of an instance's records: the next cursor, 0 at the end, and records."""
        keys = [_key(owner, "held") + b":%d" % term]
        cursor, records = await self._run(scripts.SCAN, owner.shard, keys, cursor, SCANNED_RECORDS)
        return int(cursor), records

    async def tail(self, shard: int) -> LogPosition:
        """LogPosition of the newest entry of a shard's log."""
        return _position(await self._run(scripts.TAIL, shard, [_shard_key(shard, "log")]))

    async def read(self, shard: int, after: LogPosition) -> list[Logged]:
        """The next entries of a shard's log; empty if there are none within `BLOCK_SECONDS`."""
        arguments = ("COUNT", READ_ENTRIES, "BLOCK", _ms(BLOCK_SECONDS), "STREAMS")
        position = b"%d-%d" % after
        async with _answer(BLOCK_SECONDS):
            found = await self._shards[shard].execute_command("XREAD", *arguments, _shard_key(shard, "log"), position)
        return [
            Logged(_position(at), _position(fields[b"p"]), fields[b"e"])
            for _, entries in found or ()
            for at, fields in entries
        ]

    # --- Operations ----------------------------------------------------------------------------------------------

    async def write_operations(
        self,
        tenant: str,
        owner: str,
        changed: Mapping[str, bytes | None],
        lifetime_seconds: float,
        age_seconds: float,
    ) -> int:
        """Writes or removes (None) records of operations, and renews all of `owner`; returns how many these are.

        They count as renewed `age_seconds` ago.
        """
        shard, keys = _operations_keys(tenant)
        removed = [name for name, record in changed.items() if record is None]
        named = [word for name, record in changed.items() if record is not None for word in (name, record)]
        lifetime_ms = max(_ms(lifetime_seconds), self._held_ms)
        arguments = (owner, lifetime_ms, _ms(age_seconds), len(removed), *removed, *named)
        return int(await self._run(scripts.WRITE_OPERATIONS, shard, keys, *arguments))

    async def read_operations(self, tenant: str, name: str, max_bytes: int) -> list[OwnedRecords]:
        """Records of the operations of a tenant by coordinator, the one that wrote last first; or of one operation."""
        shard, keys = _operations_keys(tenant)
        found = await self._run(scripts.READ_OPERATIONS, shard, keys, name, max_bytes)
        return [
            OwnedRecords(
                owner=owner.decode(errors="replace"),
                age_seconds=int(age_ms) / 1000,
                records={
                    key.decode(errors="replace"): value for key, value in zip(words[::2], words[1::2], strict=True)
                },
            )
            for owner, age_ms, words in found
        ]

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _find_shards(self) -> None:
        failure = StoreLost("no server is known")
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
        """The client of a server; it connects when it is first used."""
        if address not in self._clients:
            host, port = address
            kwargs = {**self._pool.connection_kwargs, "host": host, "port": port}
            pool = ConnectionPool(connection_class=self._pool.connection_class, **kwargs)
            self._clients[address] = Valkey(connection_pool=pool)
        return self._clients[address]

    async def _claim(self) -> list[bytes]:
        return await all_of(self._claim_shard(shard) for shard in range(SHARD_COUNT))

    async def _claim_shard(self, shard: int) -> bytes:
        own = f"{PROTOCOL_VERSION}-{uuid4().hex[:8]}"
        arguments = (1, _shard_key(shard, "id"), own, _ms(TERM_SECONDS), _ms(UNUSED_SECONDS))
        async with _answer():
            answer = await self._shards[shard].evalsha(self._shas[scripts.CLAIM], *arguments)
        if (version := _version_of(answer)) != PROTOCOL_VERSION:
            raise StoreLost(
                f"coordinators of protocol {version} share it, and this one runs {OWN_BUILD}; upgrade all coordinators "
                "together, or name another database"
            )
        return bytes(answer)

    async def _run(self, script: str, shard: int, keys: Sequence[bytes], *arguments: Any) -> Any:
        all_keys = [_shard_key(shard, "id"), *keys]
        async with _answer():
            if not self._shards:
                raise StoreLost("not connected")
            return await self._shards[shard].evalsha(
                self._shas[script], len(all_keys), *all_keys, self._ids[shard], *arguments
            )


def _version_of(shard_id: bytes) -> int:
    """The `PROTOCOL_VERSION` of the coordinators that share a map; 0 if they are from before it was in the id."""
    version, dash, _ = shard_id.partition(b"-")
    return int(version) if dash and version.isdigit() else 0


@asynccontextmanager
async def _answer(more_seconds: float = 0.0) -> AsyncIterator[None]:
    """Limits the time of a call, and maps all its errors to `StoreLost`."""
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
    """The primary of a shard in the answer of `CLUSTER SLOTS`. Raises `StoreLost` if no server has its slot."""
    slot = key_slot(_shard_key(shard, "id"))
    for first, last, (host, port, *_), *_ in slots:
        if first <= slot <= last:
            return (host.decode() if host else asked[0]), port  # an empty host means the server that was asked
    raise StoreLost(f"no server of the cluster has slot {slot}")


def _encoded(pending: PendingEntry) -> bytes:
    """The log's form of an entry; empty for a part of a snapshot, which is not logged."""
    if not pending.is_logged:
        return b""
    entry = pending.entry
    if pending.size_bytes > MAX_ENTRY_BYTES:
        entry = LogEntry(EntryKind.RELOAD, entry.tenant, entry.instance_id, entry.epoch, entry.term)
    return encode(entry)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _shard_key(shard: int, what: str) -> bytes:
    return b"lmkv:{%d}:%s" % (shard, what.encode())


def _operations_keys(tenant: str) -> tuple[int, list[bytes]]:
    """The shard of a tenant's operations, and its keys: the coordinators, and the prefix of their records' keys."""
    shard = crc32(tenant.encode()) % SHARD_COUNT
    prefix = _shard_key(shard, "operations") + b":" + tenant.encode()
    return shard, [prefix, prefix + b"/"]


def _key(owner: ChunkOwner, what: str) -> bytes:
    return b"%s:%s" % (_shard_key(owner.shard, what), owner.name.encode())


def _publication_keys(owner: ChunkOwner, term: int) -> list[bytes]:
    return [_key(owner, "term"), _key(owner, "held") + b":%d" % term, _key(owner, "current")]


def _position(text: bytes) -> LogPosition:
    milliseconds, number = text.split(b"-")
    return int(milliseconds), int(number)
