"""Connects an engine's callers, on any thread, with its node: one thread receives, locks keep the rest in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from lmkv import rpc
from lmkv.config import ConnectorConfig
from lmkv.misses import MissReason
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import Attachment
from lmkv_client.engine.counters import EngineCounters, EngineCounts
from lmkv_client.engine.extent import Extent, MappedPool, Written
from lmkv_client.engine.log import logger
from lmkv_client.engine.lookups import HeldChunks, LoadWaiter, Lookup, Lookups
from lmkv_client.engine.node.client import Event, NodeClient, NodeLost
from lmkv_client.engine.outcomes import Outcomes
from lmkv_client.engine.pool_mapping import PoolMapping
from lmkv_client.engine.prompts.prompt_account import PromptAccounts
from lmkv_client.engine.reservations import ExtentRequest, Reservations
from lmkv_client.engine.served_names import ServedNames
from lmkv_client.processors import use_processors
from lmkv_kernels import checksum

TICK_SECONDS = 0.1
"""Longest delay after the deadline of a call that does not block until its future is set."""
MAP_WAIT_SECONDS = 5.0
"""Longest time that `start` waits for the pool of a node that is attached."""
JOIN_SECONDS = 5.0


class _Attached:
    """What one attachment, whose pool is mapped, consists of."""

    def __init__(self, attachment: Attachment, pool: MappedPool, lookups: Lookups, reservations: Reservations) -> None:
        self.attachment = attachment
        self.pool = pool
        self.lookups = lookups
        self.reservations = reservations


class Dispatcher:
    """Keeps the engine attached, sends what callers ask, and sets their futures. All methods are thread-safe."""

    def __init__(self, config: ConnectorConfig, spec: KvSpec, served: ServedNames) -> None:
        self._spec = spec
        self._verifies = config.verify_loads
        self._client = NodeClient(config, spec, 1, served)
        self._lock = threading.Lock()
        self._counts = EngineCounts()
        self._accounts = PromptAccounts(self._count_missed, logger)
        self._outcomes = Outcomes()
        self._attached: _Attached | None = None
        self._attachment: Attachment | None = None
        """The attachment whose pool is not mapped yet."""
        self._mapping: PoolMapping | None = None
        self._credit_limit = 0
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
            return self._counts.snapshot()

    def lookup(self, lookup: Lookup) -> None:
        """Begins a lookup. Its future gets None if there is nothing to load."""
        now = time.monotonic()
        with self._locked():
            if record := lookup.record:
                self._counts.add("lookups")
                self._counts.add("asked_chunks", len(lookup.keys))
                self._counts.add("asked_tokens", record.account.token_count)
            if self._attached and lookup.keys:
                self._attached.lookups.begin(lookup, now)
                return
            if record:
                record.unanswered(MissReason.NODE_LOST if lookup.keys else MissReason.UNCACHEABLE)
                record.close(self._accounts, self._counts)
            self._outcomes.add(lookup.future, None)

    def load(self, held: HeldChunks, waiter: LoadWaiter, up_to: int) -> None:
        """Begins to wait for chunks. The waiter's future gets those of them that are in the pool in time."""
        with self._locked():
            lookups = self._lookups_of(held)
            if lookups:
                lookups.load(held, waiter, up_to, time.monotonic())
            else:
                self._outcomes.add(waiter.future, held.extents[: waiter.count])

    def loading(self, held: HeldChunks, chunk_count: int) -> None:
        """Notes that a caller begins to load the first chunks."""
        if held.record:
            with self._lock:
                held.record.loading(chunk_count)

    def delivered(self, held: HeldChunks, extents: Sequence[Extent], chunk_count: int) -> None:
        """Counts chunks that a load has handed out, the last of the first `chunk_count`."""
        with self._lock:
            if held.record:
                held.record.delivered(chunk_count)
            self._counts.add("loaded_chunks", len(extents))
            self._counts.add("loaded_tokens", sum(extent.token_count for extent in extents))
            self._counts.add("loaded_bytes", sum(extent.size_bytes for extent in extents))

    def fell_short(self, held: HeldChunks, chunk_count: int) -> None:
        """Notes that a load has ended with the first `chunk_count` chunks only."""
        if held.record:
            with self._lock:
                held.record.fell_short(chunk_count)

    def refuse(self, held: HeldChunks, kept: int, reason: MissReason) -> None:
        """Notes that the hit behind its first `kept` chunks is computed."""
        if held.record:
            with self._lock:
                held.record.refuse(kept, reason)

    def release(self, held: HeldChunks) -> None:
        """Ends a lookup. Idempotent."""
        with self._locked():
            if held.record:
                held.record.close(self._accounts, self._counts)
            if lookups := self._lookups_of(held):
                lookups.release(held)
            held.is_over = True
            held.extents = []  # they no longer keep the pool of a lost node mapped

    def reserve(self, reservation: ExtentRequest) -> None:
        """Begins a reservation."""
        with self._locked():
            if self._attached:
                self._attached.reservations.begin(reservation, time.monotonic())
            else:
                if reservation.count:
                    self._counts.add("short_reserves")
                self._outcomes.add(reservation.future, [])

    def put_back(self, extents: Iterable[Extent]) -> None:
        """Extents that are not needed any more. Those of a lost node are ignored."""
        with self._locked():
            if self._attached:
                self._attached.reservations.put_back(extents)

    def commit(self, written: Sequence[Written]) -> None:
        """Commits chunks. Raises `ValueError`, before any of them is, if one is not in a reserved extent."""
        commits = [self._commit(one) for one in written]
        with self._locked():
            attached = self._attached
            valid = [
                pair for pair in zip(commits, written, strict=True) if attached and pair[1].extent.pool is attached.pool
            ]
            self._counts.add("dropped_commits", len(written) - len(valid))
            if not valid or not attached:
                return
            extents = [one.extent for _, one in valid]
            if len({extent.offset for extent in extents}) < len(extents) or not all(
                map(attached.reservations.is_written, extents)
            ):
                raise ValueError("a chunk is not in an extent that was reserved, or was committed or put back before")
            act = pb.Act()
            act.commit.chunks.extend(commit for commit, _ in valid)
            self._client.send(attached.attachment, act)
            self._counts.add("committed_chunks", len(valid))
            self._counts.add("committed_bytes", sum(commit.size_bytes for commit, _ in valid))
            attached.reservations.committed(extents)

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
            due.set()

    def _commit(self, one: Written) -> pb.CommitChunk:
        tokens = one.token_count or self._spec.chunk_size
        if not 0 < tokens <= self._spec.chunk_size:
            raise ValueError(f"token_count {tokens} is not from 1 to {self._spec.chunk_size}")
        size_bytes = self._spec.size_bytes(tokens)
        total = checksum(one.extent.view, 0, size_bytes) if one.checksum is None else one.checksum
        return pb.CommitChunk(
            chunk_key=one.key,
            offset=one.extent.offset,
            size_bytes=size_bytes,
            checksum=total,
            token_count=tokens,
            parent_key=one.parent,
        )

    def _lookups_of(self, held: HeldChunks) -> Lookups | None:
        """The lookups that a held one belongs to; None if its node is lost."""
        attached = self._attached
        return attached.lookups if attached and attached.lookups.holds(held) else None

    def _expire(self) -> None:
        now = time.monotonic()
        if self._attached:
            self._attached.lookups.expire(now)
            self._attached.reservations.expire(now)

    def _lose(self) -> None:
        """Ends what the node has granted. Extents that callers still have keep the pool mapped."""
        self._mapped.clear()
        attached, self._attached = self._attached, None
        mapping, self._mapping = self._mapping, None
        self._attachment = None
        if mapping:
            mapping.close()
        if attached:
            attached.lookups.lost()
            attached.reservations.lost()
            attached.pool.retire()

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
        inbox = self._client.inbox
        while inbox and not self._closed:
            self._handle(inbox.popleft())
        self._open_pool()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Attachment):
            self._lose()
            self._attachment = event
            self._mapping = PoolMapping(event, 0)
        elif isinstance(event, NodeLost):
            self._counts.add("node_losses")
            self._lose()
        elif isinstance(event, pb.AttachResponse):
            for one in event.events:
                self._answer(one)

    def _answer(self, event: pb.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "welcome":
            self._credit_limit = event.welcome.credit_limit
        if (attached := self._attached) is None:
            return
        if kind == "found":
            attached.lookups.found(event.found)
        elif kind == "loaded":
            attached.lookups.loaded(event.loaded, time.monotonic())
        elif kind == "granted":
            offsets = [credit.extent.offset for credit in event.granted.credits]
            attached.reservations.settle(sum(event.granted.settled_counts), offsets)
        elif kind == "rejected_commit":
            rejected = event.rejected_commit
            self._counts.add("rejected_commits")
            logger.warning("chunk %s was not stored: %s", rejected.chunk_key.hex(), rpc.from_status(rejected.status))

    def _open_pool(self) -> None:
        """Begins to use the pool if it has been mapped."""
        if not (self._mapping and self._attachment and (mapped := self._mapping.take())):
            return
        attachment, pool = self._attachment, MappedPool(mapped)
        self._mapping = self._attachment = None

        def send(*acts: pb.Act) -> None:
            self._client.send(attachment, *acts)

        name = attachment.engine_id
        lookups = Lookups(pool, send, self._outcomes, self._counts, self._is_intact, self._accounts, name)
        reservations = Reservations(
            pool, self._spec, self._credit_limit, send, self._outcomes, self._counts, self.put_back
        )
        self._attached = _Attached(attachment, pool, lookups, reservations)
        self._mapped.set()

    def _count_missed(self, reason: MissReason, token_count: int) -> None:
        self._counts.add("miss_tokens", token_count, label=reason)

    def _is_intact(self, extent: Extent) -> bool:
        return not self._verifies or checksum(extent.view) == extent.checksum
