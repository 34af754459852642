"""The lookups of one engine's stream: what pool and tiers hold of a prompt. Used by `EngineStream`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lmkv import telemetry
from lmkv.errors import BadMessage
from lmkv.keys import split_keys
from lmkv.telemetry import Span
from lmkv.tiers import HANDOFF, OWN, Run
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.request_tasks import RequestTasks
from lmkv_server.node.sessions.extents import credit, extent
from lmkv_server.node.sessions.session import EngineSession, LookupLease
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.hit import Hit, ItemHit
from lmkv_server.node.tiers.item_lookup import ItemLookup


class EngineLookups:
    """Answers a lookup at once where the pool has all chunks, else when the tiers have answered."""

    def __init__(
        self, session: EngineSession, stack: TierStack, counters: LookupCounters, outbox: Outbox, tasks: RequestTasks
    ) -> None:
        self._session = session
        self._stack = stack
        self._counters = counters
        self._outbox = outbox
        self._tasks = tasks
        self._hits: dict[str, Hit] = {}

    def lookup(self, lookup: pb.LookupChunks) -> None:
        """Begins a lookup. Raises `BadChunkKey` or `BadMessage` if its keys or its id cannot be used."""
        if not self._session.spec.has_plain_parts:
            self._lookup_items(lookup)
            return
        lease = self._session.open(lookup.request_id, split_keys(lookup.chunk_keys))
        lease.handoff_id = lookup.handoff_id
        lease.on_release = self._stack.claim(lookup.handoff_id, self._session.engine_id)
        span = telemetry.follow("lmkv.lookup", lookup.traceparent, asked_chunks=len(lease.keys))
        if lease.own_count == len(lease.keys) or not self._stack.usable or self._promised(lease)[0]:
            with span:
                self._answer(lookup, lease, Hit(), span)
        else:
            self._tasks.start(lookup.request_id, self._ask(lookup, lease, span))

    def hit(self, request_id: str) -> Hit:
        """What the request's lookup found outside the pool; empty without one."""
        return self._hits.get(request_id, Hit())

    def release(self, request_id: str) -> None:
        """Forgets what the request's lookup found. Idempotent."""
        self._hits.pop(request_id, None)

    def reserve(self, count: int, *, settled: int) -> None:
        """Grants up to `count` write credits; the answer settles `settled` of those that the engine asked for."""
        granted = [credit(one) for one in self._session.reserve(count)]
        self._outbox.put(pb.AttachResponse(credits=granted, settled_reserve_count=settled))

    def reserve_parts(self, counts: Sequence[int]) -> None:
        """Grants up to `counts` write credits for parts 1, 2, ...; raises `BadMessage` for an unknown part."""
        self._check_parts(counts)
        settled = [max(0, count) for count in counts]
        granted = [
            credit(one, part) for part, count in enumerate(settled, 1) for one in self._session.reserve(count, part)
        ]
        self._outbox.put(pb.AttachResponse(credits=granted, settled_part_reserve_counts=settled))

    def _check_parts(self, counts: Sequence[int]) -> None:
        if counts and len(counts) >= (part_count := len(self._session.spec.parts)):
            raise BadMessage(f"chunks of this spec have {part_count} parts", field="part_reserve_counts")

    async def _ask(self, lookup: pb.LookupChunks, lease: LookupLease, span: Span) -> None:
        with span:
            spec, limit = self._session.spec, self._session.holdable_count
            self._answer(lookup, lease, await self._stack.lookup(spec, lease.keys, lease.own_count, limit), span)

    def _answer(self, lookup: pb.LookupChunks, lease: LookupLease, hit: Hit, span: Span) -> None:
        hit, refused_count = self._stack.without_slow(hit, self._session.spec, lookup.prefill_tokens_per_second)
        runs, source = hit.runs, hit.source
        promised_count, sender_id = self._promised(lease)
        if promised_count:
            runs, source = (Run(tier=HANDOFF, chunk_count=promised_count),), sender_id
        found = pb.FoundChunks(
            request_id=lookup.request_id,
            own=[extent(chunk) for chunk in lease.chunks],
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in runs],
            peer_instance_id=source,
            refused_chunk_count=refused_count,
        )
        self._outbox.put(pb.AttachResponse(found=[found]))
        self._counters.add(asked_count=len(lease.keys), own_count=lease.own_count, runs=runs, refused=refused_count > 0)
        span.set(
            own_chunks=lease.own_count,
            peer_instance_id=source,
            **{f"{run.tier}_chunks": run.chunk_count for run in runs},
        )
        found_count = lease.own_count + sum(run.chunk_count for run in runs)
        self.reserve(lookup.reserve_count - found_count, settled=max(0, lookup.reserve_count))
        if lease.chunks or runs:
            self._hits[lookup.request_id] = hit
        else:
            self._session.release(lookup.request_id)

    # --- Prompts whose chunks have several parts -----------------------------------------------------------------

    def _lookup_items(self, lookup: pb.LookupChunks) -> None:
        """As `lookup`."""
        self._check_parts(lookup.part_reserve_counts)
        keys = split_keys(lookup.chunk_keys)
        lease = self._session.begin(lookup.request_id)
        lease.handoff_id = lookup.handoff_id
        lease.on_release = self._stack.claim(lookup.handoff_id, self._session.engine_id)
        items = self._stack.begin_items(self._session.spec, keys)
        asked_count = len(self._session.spec.items(len(keys)))
        span = telemetry.follow("lmkv.lookup", lookup.traceparent, asked_chunks=asked_count)
        handed, sender_id = self._handed(lease, items)
        if handed.chunk_count or items.is_complete or not self._stack.usable:
            with span:
                found = handed if handed.chunk_count else self._found(items, lookup)
                self._answer_items(lookup, lease, found, span, asked_count, sender_id)
        else:
            self._tasks.start(lookup.request_id, self._ask_for_items(lookup, lease, items, span, asked_count))

    async def _ask_for_items(
        self, lookup: pb.LookupChunks, lease: LookupLease, items: ItemLookup, span: Span, asked_count: int
    ) -> None:
        with span:
            await self._stack.ask_for_items(items, self._session.holdable_bytes)
            self._answer_items(lookup, lease, self._found(items, lookup), span, asked_count)

    def _found(self, items: ItemLookup, lookup: pb.LookupChunks) -> ItemHit:
        return items.result(self._session.holdable_bytes, lookup.prefill_tokens_per_second)

    def _answer_items(
        self,
        lookup: pb.LookupChunks,
        lease: LookupLease,
        found: ItemHit,
        span: Span,
        asked_count: int,
        sender_id: str = "",
    ) -> None:
        runs, source = found.rest.runs, sender_id or found.rest.source
        message = pb.FoundChunks(
            request_id=lookup.request_id,
            own=[extent(chunk) for chunk in found.own],
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in runs],
            peer_instance_id=source,
            refused_chunk_count=found.refused_count,
            hit_chunk_count=found.chunk_count,
        )
        self._outbox.put(pb.AttachResponse(found=[message]))
        self._counters.add(
            asked_count=max(asked_count, len(found.own) + found.rest.chunk_count),
            own_count=len(found.own),
            runs=runs,
            refused=found.refused_count > 0,
        )
        counts = Counter({OWN: len(found.own)})
        for run in runs:
            counts[run.tier] += run.chunk_count
        span.set(
            hit_chunks=found.chunk_count,
            peer_instance_id=source,
            **{f"{tier}_chunks": count for tier, count in counts.items()},
        )
        self.reserve(lookup.reserve_count, settled=max(0, lookup.reserve_count))
        if lookup.part_reserve_counts:
            self.reserve_parts(lookup.part_reserve_counts)
        if found.rest.items:
            self._session.hold_items(lease, found.rest.items.keys, found.own, found.behind)
            self._hits[lookup.request_id] = found.rest
        else:
            self._session.release(lookup.request_id)

    # --- Handoffs ------------------------------------------------------------------------------------------------

    def _handed(self, lease: LookupLease, items: ItemLookup) -> tuple[ItemHit, str]:
        """The hit that the pool and a handoff make, and the instance that sends it; none without a handoff of it."""
        if not lease.handoff_id or items.is_complete:
            return ItemHit(), ""
        found = items.handed(self._session.holdable_bytes)
        first, total = len(found.own), len(found.own) + found.rest.chunk_count
        count, sender_id = self._stack.promised(lease.handoff_id, first, total)
        return (found, sender_id) if count and count == total - first else (ItemHit(), "")

    def _promised(self, lease: LookupLease) -> tuple[int, str]:
        """The number of chunks that a handoff will bring, and the instance that sends them."""
        return self._stack.promised(lease.handoff_id, lease.own_count, len(lease.keys))
