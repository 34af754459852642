"""Model of the pool: write credits and leases of two engines, grants of a peer, and a fetch with its quarantine.

The model keeps its own account of who may write or read which extent, by what the protos promise, and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.transfer.channel import ReadAccess
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.pipeline import IncomingChunk, PendingWrites
from lmkv_server.node.peers.connection import PeerChunk
from lmkv_server.node.serving.read_grants import PeerSessions, ReadGrant, ReadGrants
from lmkv_server.node.sessions.session import EngineSession
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.models.explorer import Action
from tests.server.node.pool_lookups import open_lookup
from tests.support.specs import make_spec

SPEC = make_spec(
    model_name="m",
    model_id="m@1",
    kv_dtype="bfloat16",
    layer_count=1,
    kv_head_count=1,
    head_size=64,
    chunk_size=16,
    vocab_size=1000,
)
PAGE = SPEC.chunk_bytes
"""Bytes of a chunk, one page of the pool."""
PAGES = 3
KEYS = {name: ChunkKey(name.encode() * 16) for name in ("a", "b")}
"""Chunk b comes after chunk a."""
NAMES = {key: name for name, key in KEYS.items()}
PARENTS = {"a": None, "b": KEYS["a"]}
TTL = 10.0


@dataclass
class Engine:
    """What an engine was granted, as it knows it; its processes may use it until they are gone."""

    session: EngineSession
    credits: set[int]
    lease: tuple[Chunk, ...] | None = None
    is_connected: bool = True
    has_worker: bool = True


@dataclass
class Fetch:
    """A read from a peer into the pool. It is `writing` until the transfer has stopped."""

    name: str
    writes: PendingWrites
    incoming: IncomingChunk
    stopped: object
    is_writing: bool = True
    is_closed: bool = False


class PoolModel:
    """Engine x is attached with a worker and has stored chunk a; engine y is not attached; the peer has a session."""

    def __init__(self) -> None:
        self.tier = HostTier(PAGES * PAGE)
        self.engines = EngineSessions(self.tier)
        access = ReadAccess()
        self.grants = ReadGrants(self.tier, access, 0)
        self.peer = PeerSessions(access).open("", "peer", 1)
        self.now = 0.0
        self.attached: dict[str, Engine] = {}
        self.granted: list[ReadGrant] = []
        self.fetches: list[Fetch] = []
        for action in (("attach", "x"), ("reserve", "x"), ("commit", "x", 0, "a")):
            self.apply(action)

    # --- Actions -------------------------------------------------------------------------------------------------

    def actions(self) -> Sequence[Action]:
        found: list[Action] = []
        for name in ("x", "y"):
            engine = self.attached.get(name)
            if engine is None:
                found.append(("attach", name))
                continue
            if engine.is_connected:
                found.append(("detach", name))
                found.append(("reserve", name))
                found += [("commit", name, offset, key) for offset in sorted(engine.credits) for key in KEYS]
                found += [("return", name, offset) for offset in sorted(engine.credits)]
                found.append(("release", name) if engine.lease is not None else ("lookup", name))
            if engine.has_worker:
                found.append(("worker_gone", name))
        if len(self.granted) < 2:
            found += [("acquire", key) for key in KEYS if self.tier.get(KEYS[key])]
        if self.granted:
            found += [("release_grant",), ("expire",)]
        if len(self.fetches) < 2:
            found += [("fetch", key) for key in KEYS]
        for number, fetch in enumerate(self.fetches):
            if fetch.is_writing:
                found.append(("fetch_stopped", number))
            if not fetch.is_closed:
                found.append(("fetch_cancelled", number))
                if not fetch.is_writing:
                    found.append(("fetch_commit", number))
        found += [("drop", key) for key in KEYS if self.tier.get(KEYS[key])]
        return found

    def apply(self, action: Action) -> None:
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)

    def _attach(self, name: str) -> None:
        session = self.engines.attach(name, SPEC)
        self.engines.worker_connected(name, 0)
        self.attached[name] = Engine(session, set())

    def _detach(self, name: str) -> None:
        engine = self.attached[name]
        engine.is_connected = False
        self.engines.detach(engine.session)
        self._forget_if_gone(name)

    def _worker_gone(self, name: str) -> None:
        self.attached[name].has_worker = False
        self.engines.worker_disconnected(name, 0)
        self._forget_if_gone(name)

    def _forget_if_gone(self, name: str) -> None:
        engine = self.attached[name]
        if not engine.is_connected and not engine.has_worker:
            del self.attached[name]

    def _reserve(self, name: str) -> None:
        engine = self.attached[name]
        granted = {one.offset for one in engine.session.reserve(1)}
        assert not granted & engine.credits, "a credit was granted twice"
        engine.credits |= granted
        assert len(engine.credits) <= engine.session.credit_limit

    def _commit(self, name: str, offset: int, key: str) -> None:
        engine = self.attached[name]
        known = self.tier.get(KEYS[key])
        written = Chunk(
            key=KEYS[key],
            fingerprint=SPEC.fingerprint,
            offset=offset,
            size_bytes=PAGE,
            checksum=1,
            token_count=SPEC.chunk_size,
            parent=PARENTS[key],
        )
        chunk = engine.session.commit(written)
        engine.credits.remove(offset)
        assert (chunk is None) == (known is not None)

    def _return(self, name: str, offset: int) -> None:
        engine = self.attached[name]
        engine.session.return_credit(offset)
        engine.credits.remove(offset)

    def _lookup(self, name: str) -> None:
        engine = self.attached[name]
        lease = open_lookup(engine.session, self.tier, "r", list(KEYS.values()))
        assert [chunk.key for chunk in lease.chunks] == list(KEYS.values())[: len(lease.chunks)]
        engine.lease = tuple(lease.chunks)

    def _release(self, name: str) -> None:
        engine = self.attached[name]
        engine.session.release("r")
        engine.lease = None

    def _acquire(self, key: str) -> None:
        chunk = self.tier.get(KEYS[key])
        assert chunk is not None
        try:
            grant = self.grants.acquire(self.peer, [chunk], self.now, TTL)
        except LmkvError:  # beyond the peer's share
            return
        assert grant is not None
        self.granted.append(grant)

    def _release_grant(self) -> None:
        self.grants.release(self.granted.pop(0))

    def _expire(self) -> None:
        self.now += TTL
        assert self.grants.expire(self.now) == len(self.granted)
        self.granted.clear()

    def _fetch(self, key: str) -> None:
        reserved = self.tier.reserve(PAGE)
        if reserved is None:
            return
        writes = PendingWrites(self.tier)
        remote = PeerChunk(index=0, address=0, checksum=1, token_count=SPEC.chunk_size, size_bytes=PAGE)
        incoming = writes.add(remote, reserved)
        self.fetches.append(Fetch(key, writes, incoming, writes.begin()))

    def _fetch_stopped(self, number: int) -> None:
        fetch = self.fetches[number]
        fetch.is_writing = False
        assert callable(fetch.stopped)
        fetch.stopped()
        self._forget_fetches()

    def _fetch_cancelled(self, number: int) -> None:
        fetch = self.fetches[number]
        fetch.is_closed = True
        fetch.writes.close()
        assert fetch.writes.is_quarantined == fetch.is_writing
        self._forget_fetches()

    def _fetch_commit(self, number: int) -> None:
        fetch = self.fetches[number]
        assert fetch.writes.commit(KEYS[fetch.name], PARENTS[fetch.name], SPEC.fingerprint, fetch.incoming)
        fetch.is_closed = True
        fetch.writes.close()
        self._forget_fetches()

    def _forget_fetches(self) -> None:
        self.fetches = [fetch for fetch in self.fetches if fetch.is_writing or not fetch.is_closed]

    def _drop(self, key: str) -> None:
        assert self.tier.drop([KEYS[key]]) == 1

    # --- Promises ------------------------------------------------------------------------------------------------

    def _writers(self) -> list[tuple[str, int]]:
        found = [(name, offset) for name, engine in self.attached.items() for offset in sorted(engine.credits)]
        return found + [("a fetch", fetch.incoming.reserved.offset) for fetch in self.fetches]

    def _readers(self) -> list[tuple[str, Chunk]]:
        found = [(name, chunk) for name, engine in self.attached.items() for chunk in engine.lease or ()]
        return found + [("the peer", chunk) for grant in self.granted for chunk in grant.chunks]

    def check(self) -> None:
        writers, readers = self._writers(), self._readers()
        for (one, offset), (other, same) in combinations(writers, 2):
            assert offset != same, f"{one} and {other} may both write at {offset // PAGE}"
        for writer, offset in writers:
            for reader, chunk in readers:
                assert offset != chunk.offset, f"{writer} may write at {offset // PAGE}, which {reader} may read"
            assert all(offset != chunk.offset for chunk in self.tier), f"{writer} may write to a chunk in the index"
        by_offset: dict[int, Chunk] = {}
        for chunk in (*(chunk for _, chunk in readers), *self.tier):
            assert by_offset.setdefault(chunk.offset, chunk) is chunk, "two chunks are at one offset"
        dropped = {id(chunk): chunk for _, chunk in readers if chunk.dropped}
        self.tier.check(dropped.values())
        self.grants.check()
        assert self.tier.reserved_count == len(writers)

    def settle(self) -> None:
        for fetch in list(self.fetches):
            if not fetch.is_closed:
                self._fetch_cancelled(self.fetches.index(fetch))
            if fetch.is_writing:
                self._fetch_stopped(self.fetches.index(fetch))
        for name, engine in list(self.attached.items()):
            if engine.has_worker:
                self._worker_gone(name)
            if engine.is_connected:
                self._detach(name)
        if self.granted:
            self._expire()
        self.check()
        assert self.engines.mapped_count == 0
        assert self.tier.reserved_count == 0, "an extent stays reserved"
        assert all(not chunk.holds for chunk in self.tier), "a hold stays"
        assert self.tier.used_bytes == self.tier.chunk_bytes, "bytes of the pool are lost"

    def fingerprint(self) -> object:
        """Offsets count, generations do not. The order of evictions is that of the last uses."""
        return (
            sorted((chunk.key, chunk.offset, chunk.holds) for chunk in self.tier),
            order(self.tier),
            [
                (name, engine.is_connected, engine.has_worker, sorted(engine.credits), _extents(engine.lease))
                for name, engine in sorted(self.attached.items())
            ],
            [_extents(grant.chunks) for grant in self.granted],
            [(one.name, one.incoming.reserved.offset, one.is_writing, one.is_closed) for one in self.fetches],
        )


def _extents(chunks: Sequence[Chunk] | None) -> object:
    return None if chunks is None else [(chunk.key, chunk.offset, chunk.dropped) for chunk in chunks]


def order(tier: HostTier) -> object:
    """What the next evictions depend on besides holds and parents."""
    queue = tier._queue
    aside = sorted(queue._aside, key=lambda key: queue._aside[key])
    return list(queue._policy._line), aside, list(queue._superseded)  # type: ignore[attr-defined]  # of `Lru`
