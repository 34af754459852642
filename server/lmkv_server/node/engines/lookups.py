"""The lookups of one engine's stream: what pool and tiers hold of a prompt. Used by `EngineStream`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lmkv import telemetry
from lmkv.errors import BadChunkKey, BadMessage
from lmkv.keys import KEY_BYTES, ChunkKey, split_keys
from lmkv.misses import reason_to_proto
from lmkv.runtime.patience import MAX_BUDGET_SECONDS, NODE_SHARE
from lmkv.telemetry import Span
from lmkv.tiers import HANDOFF, OWN, Run
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PromptSpan
from lmkv_server.node.cache.partial_chunks import PromptTokens
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.request_tasks import RequestTasks
from lmkv_server.node.sessions.extents import MAX_EXTENTS, add_credit, add_held
from lmkv_server.node.sessions.session import EngineSession, LookupLease
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.diagnosis import MissedRun
from lmkv_server.node.tiers.hit import Hit, ItemHit, Tail
from lmkv_server.node.tiers.item_lookup import ItemLookup
from lmkv_server.node.tiers.tail_lookup import TailLookup

MAX_PARTIAL_RESERVES = 1024
"""Most write credits for partial chunks that one act may ask for."""
TOKEN_BYTES = 4
MAX_TOKENS = 262_144
"""Most tokens of a prompt that a lookup may carry: as many as a message has room for."""


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
        """Begins a lookup. Raises `BadChunkKey` or `BadMessage` if its keys, its tokens or its id cannot be used."""
        if not self._session.spec.has_plain_parts:
            self._lookup_items(lookup)
            return
        keys, prompt = split_keys(lookup.chunk_keys), prompt_tokens(lookup, self._session.spec.chunk_size)
        lease = self._session.open(lookup.lookup_id, keys)
        lease.root = prompt.root if prompt else None
        lease.handoff_id = lookup.handoff_id
        lease.on_release = self._stack.claim(lookup.handoff_id, self._session.engine_id)
        span = telemetry.follow("lmkv.lookup", lookup.traceparent, asked_chunks=len(keys))
        if lease.own_count == len(keys) or not self._stack.usable or self._promised(lease)[0]:
            with span:
                tail = self._begin_tail(lease, prompt, Hit())
                self._answer(lookup, lease, Hit(), span, tail=tail.tail if tail else None)
        else:
            self._tasks.start(lookup.lookup_id, self._ask(lookup, lease, prompt, span))

    def hit(self, lookup_id: str) -> Hit:
        """What the request's lookup found outside the pool; empty without one."""
        return self._hits.get(lookup_id, Hit())

    def release(self, lookup_id: str) -> None:
        """Forgets what the request's lookup found. Idempotent."""
        self._hits.pop(lookup_id, None)

    def reserve(self, wanted: pb.ReserveCredits) -> None:
        """Grants write credits.

        Raises `BadMessage` for an unknown part, for too many partial chunks, or for a length that no partial chunk has.
        """
        self._check_parts(wanted.counts, "counts")
        partial = [(count, False) for count in wanted.partial_token_counts]
        partial += [(count, True) for count in wanted.optional_partial_token_counts]
        if len(partial) > MAX_PARTIAL_RESERVES:
            raise BadMessage(f"{len(partial)} credits for partial chunks are too many", field="partial_token_counts")
        granted = self._grant(wanted.counts)
        granted.settled_partial_token_counts.extend(token_count for token_count, _ in partial)
        for token_count, is_optional in partial:
            if reserved := self._session.reserve_partial(token_count, is_optional=is_optional):
                add_credit(granted.credits, reserved, token_count=token_count)
        self._outbox.put(pb.Event(granted=granted))

    def _grant(self, counts: Sequence[int], settled: Sequence[int] = ()) -> pb.GrantedCredits:
        """Grants up to `counts` write credits, by part, and settles `settled` or as many requested ones."""
        granted = pb.GrantedCredits(settled_counts=[max(0, count) for count in settled or counts])
        for part, count in enumerate(counts):
            for reserved in self._session.reserve(count, part) if count > 0 else ():
                add_credit(granted.credits, reserved, part)
        return granted

    def _check_parts(self, counts: Sequence[int], field: str) -> None:
        if len(counts) > (part_count := len(self._session.spec.parts)):
            raise BadMessage(f"{len(counts)} {field}: chunks of this spec have {part_count} parts", field=field)

    async def _ask(self, lookup: pb.LookupChunks, lease: LookupLease, prompt: PromptTokens | None, span: Span) -> None:
        with span:
            spec, limit, rate = self._session.spec, self._session.holdable_count, lookup.prefill_tokens_per_second
            deadline = lookup_deadline(lookup)
            hit = await self._stack.lookup(spec, lease.keys, lease.own_count, limit, root=lease.root, deadline=deadline)
            hit, refused = self._stack.without_slow(hit, spec, rate)
            tail = self._begin_tail(lease, prompt, hit)
            if tail:
                await self._stack.ask_for_tail(tail, spec, hit, rate, deadline=deadline)
            self._answer(lookup, lease, hit, span, refused, tail.tail if tail else None)

    def _begin_tail(self, lease: LookupLease, prompt: PromptTokens | None, hit: Hit) -> TailLookup | None:
        """Begins a lookup behind the last chunk of a hit; None if the prompt has no tokens there."""
        end = lease.own_count + hit.chunk_count
        if prompt is None or prompt.tokens.size <= end * prompt.chunk_size:
            return None
        return self._stack.begin_tail(self._session.spec, prompt, lease.keys, end)

    def _answer(
        self,
        lookup: pb.LookupChunks,
        lease: LookupLease,
        hit: Hit,
        span: Span,
        refused: Sequence[Run] = (),
        tail: Tail | None = None,
    ) -> None:
        asked_count = len(lease.keys)
        promised_count, sender_id = self._promised(lease)
        full_count = lease.own_count + (promised_count or hit.chunk_count)
        missed = self._missed(lease, hit, full_count, refused)
        if promised_count or tail is None or not self._fits(tail, hit):
            tail = None
        else:
            if full_count * self._session.spec.chunk_size + tail.token_count == len(lookup.tokens) // TOKEN_BYTES:
                missed = []
            self._session.add_tail(lease, [*lease.keys[:full_count], tail.key], tail.chunk)
            hit = hit.cut(full_count) if lease.own_count > full_count else hit.with_tail(full_count, tail)
        runs, source = hit.runs, hit.source
        if promised_count:
            runs, source = (Run(tier=HANDOFF, chunk_count=promised_count),), sender_id
        found = pb.FoundChunks(
            lookup_id=lookup.lookup_id,
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in runs],
            peer_instance_id=source,
            refused_chunk_count=sum(run.chunk_count for run in refused),
            missed=[missed_span(run) for run in missed],
            partial_key=tail.key if tail else b"",
            partial_token_count=tail.token_count if tail else 0,
        )
        add_held(found.own, lease.chunks)
        self._outbox.put(pb.Event(found=found))
        found_count = full_count + (tail is not None)
        self._counters.add(
            asked_count=max(asked_count, found_count),
            own_count=lease.own_count,
            runs=runs,
            refused=bool(refused),
        )
        span.set(
            own_chunks=lease.own_count,
            peer_instance_id=source,
            miss_reasons=[run.reason.value for run in missed],
            **{f"{run.tier}_chunks": run.chunk_count for run in runs},
        )
        if lookup.reserve_count > 0:
            granted = self._grant([lookup.reserve_count - full_count], settled=[lookup.reserve_count])
            self._outbox.put(pb.Event(granted=granted))
        if lease.chunks or runs:
            self._hits[lookup.lookup_id] = hit
        else:
            self._session.release(lookup.lookup_id)

    def _missed(self, lease: LookupLease, hit: Hit, end: int, refused: Sequence[Run]) -> list[MissedRun]:
        """Why the prompt's chunks from `end` on are not offered."""
        if end >= len(lease.keys):
            return []
        is_limited = lease.own_count >= MAX_EXTENTS or self._session.holdable_count <= hit.chunk_count
        return self._stack.diagnosis.behind(
            lease.keys, end, refused=refused, presences=hit.presences, is_limited=is_limited
        )

    def _fits(self, tail: Tail, hit: Hit) -> bool:
        """Whether the tail of a hit can be held for the engine, and was not evicted meanwhile."""
        spec = self._session.spec
        size_bytes = hit.chunk_count * spec.chunk_bytes + spec.size_bytes(tail.stored_token_count)
        return size_bytes <= self._session.holdable_bytes and not (tail.chunk and tail.chunk.dropped)

    # --- Prompts whose chunks have several parts -----------------------------------------------------------------

    def _lookup_items(self, lookup: pb.LookupChunks) -> None:
        """As `lookup`."""
        self._check_parts([lookup.reserve_count, *lookup.part_reserve_counts], "part_reserve_counts")
        keys = split_keys(lookup.chunk_keys)
        lease = self._session.begin(lookup.lookup_id)
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
            self._tasks.start(lookup.lookup_id, self._ask_for_items(lookup, lease, items, span, asked_count))

    async def _ask_for_items(
        self, lookup: pb.LookupChunks, lease: LookupLease, items: ItemLookup, span: Span, asked_count: int
    ) -> None:
        with span:
            await self._stack.ask_for_items(items, self._session.holdable_bytes, deadline=lookup_deadline(lookup))
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
        missed: list[MissedRun] = []
        if found.chunk_count < len(lookup.chunk_keys) // KEY_BYTES:
            missed = self._stack.diagnosis.behind_items(
                self._session.spec,
                split_keys(lookup.chunk_keys),
                found.chunk_count,
                refused_count=found.refused_count,
                unanswered=found.unanswered,
            )
        message = pb.FoundChunks(
            lookup_id=lookup.lookup_id,
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in runs],
            peer_instance_id=source,
            refused_chunk_count=found.refused_count,
            hit_chunk_count=found.chunk_count,
            missed=[missed_span(run) for run in missed],
        )
        add_held(message.own, found.own)
        self._outbox.put(pb.Event(found=message))
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
            miss_reasons=[run.reason.value for run in missed],
            **{f"{tier}_chunks": count for tier, count in counts.items()},
        )
        if any(wanted := [lookup.reserve_count, *lookup.part_reserve_counts]):
            self._outbox.put(pb.Event(granted=self._grant(wanted)))
        if found.rest.items:
            self._session.hold_items(lease, found.rest.items.keys, found.own, found.behind)
            self._hits[lookup.lookup_id] = found.rest
        else:
            self._session.release(lookup.lookup_id)

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


def lookup_deadline(lookup: pb.LookupChunks) -> float | None:
    """Until when tiers may answer a lookup that begins now; None if its engine does not know what it is worth."""
    seconds = min(lookup.budget.seconds + lookup.budget.nanos / 1e9, MAX_BUDGET_SECONDS)
    return time.monotonic() + NODE_SHARE * seconds if seconds > 0 else None


def missed_span(run: MissedRun) -> PromptSpan:
    """A missed run as messages name it."""
    span = PromptSpan(chunk_count=run.chunk_count, reason=reason_to_proto(run.reason), tier=run.tier)
    if run.time:
        span.remove_time.FromMilliseconds(round(run.time * 1000))
    return span


def prompt_tokens(lookup: pb.LookupChunks, chunk_size: int) -> PromptTokens | None:
    """The tokens of a lookup; None without any. Raises `BadMessage` or `BadChunkKey` if they cannot be used."""
    tokens = lookup.tokens
    if not tokens:
        return None
    if len(tokens) % 4 or len(tokens) > 4 * MAX_TOKENS:
        raise BadMessage(
            f"tokens have {len(tokens)} bytes; they must be whole ids of 4 bytes each, at most {MAX_TOKENS}",
            field="tokens",
            size_bytes=len(tokens),
        )
    if len(lookup.root_key) != KEY_BYTES:
        raise BadChunkKey(f"root_key has {len(lookup.root_key)} bytes, not {KEY_BYTES}", field="root_key")
    return PromptTokens(
        root=ChunkKey(lookup.root_key),
        chunk_size=chunk_size,
        tokens=np.frombuffer(tokens, "<u4"),
        extras=dict(lookup.chunk_extras),
    )
