"""The lookups of one engine's stream: what pool and tiers hold of a prompt. Used by `EngineStream`."""

from __future__ import annotations

from collections.abc import Callable

from lmkv import telemetry
from lmkv.keys import split_keys
from lmkv.telemetry import Span
from lmkv.tiers import HANDOFF, Run
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.request_tasks import RequestTasks
from lmkv_server.node.sessions.extents import credit, extent
from lmkv_server.node.sessions.session import EngineSession, LookupLease
from lmkv_server.node.stack import TierStack, found_runs


class EngineLookups:
    """Answers lookups at once where the pool and the disk have all of it, else when the other tiers have answered."""

    def __init__(
        self, session: EngineSession, stack: TierStack, counters: LookupCounters, outbox: Outbox, tasks: RequestTasks
    ) -> None:
        self._session = session
        self._stack = stack
        self._counters = counters
        self._outbox = outbox
        self._tasks = tasks

    def lookup(self, lookup: pb.LookupChunks) -> None:
        """Begins a lookup. Raises `BadChunkKey` or `BadMessage` if its keys or its id cannot be used."""
        lease = self._session.open(lookup.request_id, split_keys(lookup.chunk_keys))
        lease.handoff_id = lookup.handoff_id
        lease.on_release = self._stack.claim(lookup.handoff_id, self._session.engine_id)
        on_disk = self._stack.on_disk(self._session.spec.fingerprint, lease.keys, lease.own_count)
        lease.disk_count = min(on_disk, self._session.holdable_count)
        span = telemetry.follow("lmkv.lookup", lookup.traceparent, asked_chunks=len(lease.keys))
        here_count = lease.own_count + lease.disk_count
        if here_count == len(lease.keys) or not self._stack.asks or self._promised(lease)[0]:
            with span:
                self._answer(lookup, lease, span)
        else:
            self._tasks.start(lookup.request_id, self._locate(lookup, lease, span))

    def reserve(self, count: int, *, settled: int) -> None:
        """Grants up to `count` write credits; the answer settles `settled` of those that the engine asked for."""
        granted = [credit(one) for one in self._session.reserve(count)]
        self._outbox.put(pb.AttachResponse(credits=granted, settled_reserve_count=settled))

    async def _locate(self, lookup: pb.LookupChunks, lease: LookupLease, span: Span) -> None:
        with span:
            lease.holders = await self._stack.locate(lease.keys[lease.own_count :], after=lease.disk_count)
            here_count = lease.disk_count + lease.peer_count
            shared = await self._stack.in_remote(self._session.spec, lease.keys, lease.own_count + here_count)
            lease.remote_count = max(0, min(shared, self._session.holdable_count - here_count))
            self._answer(lookup, lease, span)

    def _answer(self, lookup: pb.LookupChunks, lease: LookupLease, span: Span) -> None:
        refused_count = self._refuse_slow(lookup, lease)
        promised_count, peer_id = self._promised(lease)
        runs: tuple[Run, ...] = (Run(tier=HANDOFF, chunk_count=promised_count),)
        if not promised_count:
            runs = found_runs(disk=lease.disk_count, peers=lease.peer_count, remote=lease.remote_count)
            peer_id = lease.holders[0].instance_id if lease.holders else ""
        found = pb.FoundChunks(
            request_id=lookup.request_id,
            own=[extent(chunk) for chunk in lease.chunks],
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in runs],
            peer_instance_id=peer_id,
            refused_chunk_count=refused_count,
        )
        self._outbox.put(pb.AttachResponse(found=[found]))
        self._counters.add(asked_count=len(lease.keys), own_count=lease.own_count, runs=runs, refused=refused_count > 0)
        span.set(
            own_chunks=lease.own_count,
            peer_instance_id=peer_id,
            **{f"{run.tier}_chunks": run.chunk_count for run in runs},
        )
        found_count = lease.own_count + sum(run.chunk_count for run in runs)
        self.reserve(lookup.reserve_count - found_count, settled=max(0, lookup.reserve_count))
        if not lease.chunks and not runs:
            self._session.release(lookup.request_id)

    def _promised(self, lease: LookupLease) -> tuple[int, str]:
        """The number of chunks that a handoff will bring, and the instance that sends them."""
        return self._stack.promised(lease.handoff_id, lease.own_count, len(lease.keys))

    def _refuse_slow(self, lookup: pb.LookupChunks, lease: LookupLease) -> int:
        """Removes chunks from the lease that take longer to fetch than to compute; returns their number.

        Nothing is removed where either time is unknown.
        """
        spec, rate = self._session.spec, lookup.prefill_tokens_per_second

        def is_slower(count: int, expected_seconds: Callable[[int], float | None]) -> bool:
            seconds = expected_seconds(count * spec.chunk_bytes) if count and rate > 0 else None
            return seconds is not None and seconds > count * spec.chunk_size / rate

        refused_count = 0
        if is_slower(lease.disk_count, self._stack.read_seconds):
            refused_count = lease.disk_count + lease.peer_count + lease.remote_count
            lease.disk_count, lease.holders, lease.remote_count = 0, (), 0
        elif is_slower(lease.peer_count, lambda size: self._stack.fetch_seconds(lease.holders, size)):
            refused_count = lease.peer_count + lease.remote_count
            lease.holders, lease.remote_count = (), 0
        elif is_slower(lease.remote_count, self._stack.remote_seconds):
            refused_count, lease.remote_count = lease.remote_count, 0
        return refused_count
