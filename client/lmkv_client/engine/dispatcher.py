"""Connects an engine's callers, on any thread, with its node: one thread receives, locks keep the rest in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from lmkv.config import ConnectorConfig
from lmkv.misses import MissReason
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import PoolMapping
from lmkv_client.engine.caller_lookup import CallerLookup, CallerLookups, LoadWaiter, Outcomes
from lmkv_client.engine.counters import Counters, EngineCounters
from lmkv_client.engine.extent import Extent, MappedPool, Written
from lmkv_client.engine.key_space import ServedNames
from lmkv_client.engine.log import logger
from lmkv_client.engine.node.client import NodeClient
from lmkv_client.engine.reservations import ExtentRequest, Reservations
from lmkv_client.engine.session import Session, SessionEvent
from lmkv_client.processors import use_processors
from lmkv_kernels import checksum

TICK_SECONDS = 0.1
"""Longest delay after the deadline of a call that does not block until its future is set."""
MAP_WAIT_SECONDS = 5.0
"""Longest time that `start` waits for the pool of a node that is attached."""
JOIN_SECONDS = 5.0


class Dispatcher:
    """Keeps the engine attached, sends what callers ask, and sets their futures. All methods are thread-safe."""

    def __init__(self, config: ConnectorConfig, spec: KvSpec, served: ServedNames) -> None:
        self._client = NodeClient(config, spec, 1, served)
        self._session = Session[CallerLookup](config, spec, self._client, Counters())
        self._lock = threading.Lock()
        self._outcomes = Outcomes()
        self._lookups = CallerLookups(self._session, self._outcomes, verifies=config.verify_loads)
        self._reservations = Reservations(self._session, self._outcomes)
        self._pool: MappedPool | None = None
        """The pool of the attachment, once it is mapped."""
        self._mapping: PoolMapping | None = None
        """Maps it."""
        self._mapped = threading.Event()
        """Set while the engine is attached and the pool is mapped."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lmkv-engine", daemon=True)

    def start(self) -> None:
        """Attaches. Waits up to `node_start_timeout`; no node is not an error. Raises `ConfigError`."""
        self._thread.start()
        try:
            self._client.start()
        except BaseException:
            self.close()
            raise
        if self._client.is_attached:
            self._mapped.wait(MAP_WAIT_SECONDS)

    def close(self) -> None:
        """Detaches and ends all calls. Idempotent."""
        with self._locked():
            if self._closed:
                return
            self._closed = True
            self._lookups.lost(self._session.lose())
            self._lose()
        self._client.close()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    @property
    def is_attached(self) -> bool:
        """Whether a node is attached and its pool mapped."""
        return self._mapped.is_set()

    @property
    def counters(self) -> EngineCounters:
        """A snapshot."""
        with self._lock:
            return self._session.counters.snapshot()

    def lookup(self, lookup: CallerLookup) -> None:
        """Begins a lookup. Its future gets None if there is nothing to load."""
        with self._locked():
            self._lookups.begin(lookup, time.monotonic())

    def worth_of(self, token_count: int) -> float:
        """The seconds that a lookup is worth which may save computing this number of tokens."""
        with self._lock:
            return self._session.worth_of(token_count)

    def prefilled(self, token_count: int, seconds: float) -> None:
        """Records how long the engine has taken to compute tokens of a prompt."""
        with self._lock:
            self._session.prefill.add(token_count, seconds)

    def load(self, lookup: CallerLookup, waiter: LoadWaiter, up_to: int) -> None:
        """Begins to wait for chunks. The waiter's future gets those of them that are in the pool in time."""
        with self._locked():
            self._lookups.load(lookup, waiter, up_to, time.monotonic())

    def loading(self, lookup: CallerLookup, chunk_count: int) -> None:
        """Notes that a caller begins to load the first chunks."""
        with self._lock:
            lookup.loading(chunk_count)

    def delivered(self, lookup: CallerLookup, extents: Sequence[Extent], chunk_count: int) -> None:
        """Counts chunks that a load has handed out, the last of the first `chunk_count`."""
        with self._lock:
            lookup.delivered(chunk_count)
            counters = self._session.counters
            counters.add("loaded_chunks", len(extents))
            counters.add("loaded_tokens", sum(extent.token_count for extent in extents))
            counters.add("loaded_bytes", sum(extent.size_bytes for extent in extents))

    def fell_short(self, lookup: CallerLookup, chunk_count: int) -> None:
        """Notes that a load has ended with the first `chunk_count` chunks only."""
        with self._lock:
            lookup.fell_short(chunk_count)

    def refuse(self, lookup: CallerLookup, kept: int, reason: MissReason) -> None:
        """Notes that the hit behind its first `kept` chunks is computed."""
        with self._lock:
            lookup.refuse(kept, reason)

    def release(self, lookup: CallerLookup) -> None:
        """Ends a lookup. Idempotent."""
        with self._locked():
            self._lookups.release(lookup)

    def reserve(self, reservation: ExtentRequest) -> None:
        """Begins a reservation."""
        with self._locked():
            self._reservations.begin(reservation, time.monotonic())

    def put_back(self, extents: Iterable[Extent]) -> None:
        """Extents that are not needed any more. Those of a lost node are ignored."""
        with self._locked():
            if self._pool is not None:
                self._reservations.put_back(extents)

    def commit(self, written: Sequence[Written]) -> None:
        """Commits chunks. Raises `ValueError`, before any of them is, if one is not in a reserved extent."""
        commits = [self._commit(one) for one in written]
        with self._locked():
            pool, counters = self._pool, self._session.counters
            valid = [pair for pair in zip(commits, written, strict=True) if pool and pair[1].extent.pool is pool]
            counters.add("dropped_commits", len(written) - len(valid))
            if not valid:
                return
            extents = [one.extent for _, one in valid]
            if len({extent.offset for extent in extents}) < len(extents) or not all(
                map(self._reservations.is_written, extents)
            ):
                raise ValueError("a chunk is not in an extent that was reserved, or was committed or put back before")
            self._session.commit([commit for commit, _ in valid])
            counters.add("committed_chunks", len(valid))
            counters.add("committed_bytes", sum(commit.size_bytes for commit, _ in valid))
            self._reservations.committed(extents)

    def expire(self) -> None:
        """Ends all calls whose deadline has passed."""
        with self._locked():
            self._expire()

    # ---- with the lock

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock; sets the futures that became due afterwards."""
        try:
            with self._lock:
                try:
                    yield
                finally:
                    due = self._outcomes.take()
        finally:
            for result in due.set():
                self.put_back(result if isinstance(result, list) else ())

    def _commit(self, one: Written) -> pb.CommitChunk:
        tokens = one.token_count or self._session.spec.chunk_size
        if not 0 < tokens <= self._session.spec.chunk_size:
            raise ValueError(f"token_count {tokens} is not from 1 to {self._session.spec.chunk_size}")
        size_bytes = self._session.spec.size_bytes(tokens)
        total = checksum(one.extent.view, 0, size_bytes) if one.checksum is None else one.checksum
        return pb.CommitChunk(
            chunk_key=one.key,
            offset=one.extent.offset,
            size_bytes=size_bytes,
            checksum=total,
            token_count=tokens,
            parent_key=one.parent,
            owner_key=one.owner,
        )

    def _expire(self) -> None:
        now = time.monotonic()
        self._lookups.expire(now)
        if self._pool is not None:
            self._reservations.expire(now)

    def _lose(self) -> None:
        """Ends what the node has granted. Extents that callers still have keep the pool mapped."""
        self._mapped.clear()
        mapping, self._mapping = self._mapping, None
        if mapping:
            mapping.close()
        self._reservations.lost()
        pool, self._pool, self._lookups.pool = self._pool, None, None
        if pool:
            pool.retire()

    # ---- on the dispatcher's thread

    def _run(self) -> None:
        use_processors()
        while not self._closed:
            try:
                self._client.wait(TICK_SECONDS)
                with self._locked():
                    self._receive()
                    self._expire()
            except Exception:  # callers would wait for ever
                logger.exception("handling an answer of the node failed unexpectedly")

    def _receive(self) -> None:
        now = time.monotonic()
        for event in self._session.events(now):
            if self._closed:
                return
            self._handle(event, now)
        self._open_pool()

    def _handle(self, event: SessionEvent[CallerLookup], now: float) -> None:
        if event.kind == "attached":
            self._mapping = PoolMapping(event.message, 0)
        elif event.kind == "granted":
            self._reservations.granted(event.message)
        elif event.kind == "rejected_commit":
            self._session.counters.add("rejected_commits")
        else:
            self._lookups.handle(event, now)
            if event.kind == "lost":
                self._lose()

    def _open_pool(self) -> None:
        """Begins to use the pool if it has been mapped."""
        if not (self._mapping and (mapped := self._mapping.take())):
            return
        self._mapping = None
        self._pool = self._lookups.pool = pool = MappedPool(mapped)
        self._reservations.open(pool)
        self._mapped.set()
