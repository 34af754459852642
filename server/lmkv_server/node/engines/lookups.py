"""The lookups and loads of one engine's stream, and their statistics. Used by `EngineStream`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc, telemetry
from lmkv.errors import BadChunkKey, BadMessage, ChunkNotFound, LmkvError
from lmkv.keys import KEY_BYTES, ChunkKey, split_keys
from lmkv.misses import reason_to_proto
from lmkv.prompt import Hit, Prompt
from lmkv.runtime.patience import MAX_BUDGET_SECONDS, NODE_SHARE
from lmkv.spec import KvSpec
from lmkv.telemetry import Span
from lmkv.tiers import HANDOFF, HIT_TIERS, OWN, PEERS, Run
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PromptSpan
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.engines.outbox import Outbox, RequestTasks
from lmkv_server.node.lookup.found import Found, MissedRun
from lmkv_server.node.lookup.lookup import PromptLookup
from lmkv_server.node.sessions.session import MAX_EXTENTS, EngineSession, LookupLease, add_credit, add_held
from lmkv_server.node.stack import TierStack


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupStats:
    """Lookups of engines since the start of the node, and what they found."""

    count: int
    asked_chunks: int
    found_chunks: Mapping[str, int]
    """Chunks that were found and offered, by tier; `own` are those in the node's memory."""
    refused_slower: int
    """Lookups after which chunks were not offered, because computing them is quicker."""
    load_count: int
    """Loads for which the engine reported both of the following."""
    load_seconds: float
    """Time that the requests of these loads waited for lookup and load."""
    avoided_prefill_seconds: float
    """Time that computing the loaded tokens would have taken."""

    @property
    def peer_chunks(self) -> int:
        """Chunks that other nodes held."""
        return self.found_chunks[PEERS] + self.found_chunks[HANDOFF]

    @property
    def own_chunks(self) -> int:
        """All other chunks that were found; those in a shared store count as the node's own."""
        return sum(self.found_chunks.values()) - self.peer_chunks


class LookupCounters:
    """Counts the lookups of engines."""

    def __init__(self) -> None:
        self._count = 0
        self._asked_chunks = 0
        self._found_chunks = dict.fromkeys(HIT_TIERS, 0)
        self._refused_slower = 0
        self._load_count = 0
        self._load_seconds = 0.0
        self._avoided_prefill_seconds = 0.0

    def add(self, *, asked_count: int, own_count: int, runs: Iterable[Run], refused: bool = False) -> None:
        """Counts one lookup; `refused`: chunks were not offered, because computing them is quicker."""
        self._count += 1
        self._asked_chunks += asked_count
        self._found_chunks[OWN] += own_count
        for run in runs:
            self._found_chunks[run.tier] = self._found_chunks.get(run.tier, 0) + run.chunk_count
        self._refused_slower += refused

    def add_load(self, *, load_seconds: float, avoided_prefill_seconds: float) -> None:
        """Counts a load whose engine knows how long computing its tokens would have taken."""
        self._load_count += 1
        self._load_seconds += load_seconds
        self._avoided_prefill_seconds += avoided_prefill_seconds

    def stats(self) -> LookupStats:
        return LookupStats(
            count=self._count,
            asked_chunks=self._asked_chunks,
            found_chunks=dict(self._found_chunks),
            refused_slower=self._refused_slower,
            load_count=self._load_count,
            load_seconds=self._load_seconds,
            avoided_prefill_seconds=self._avoided_prefill_seconds,
        )


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
        self._found: dict[str, Found] = {}

    def lookup(self, lookup: pb.LookupChunks) -> None:
        """Begins a lookup. Raises `BadChunkKey` or `BadMessage` if its keys, its tokens or its id cannot be used."""
        session, spec = self._session, self._session.spec
        self._check_parts([lookup.reserve_count, *lookup.part_reserve_counts], "part_reserve_counts")
        prompt = prompt_of(lookup, spec)
        lease = session.begin(lookup.lookup_id)
        lease.handoff_id = lookup.handoff_id
        lease.on_release = self._stack.claim(lookup.handoff_id, session.engine_id)
        span = telemetry.follow("lmkv.lookup", lookup.traceparent, asked_chunks=len(prompt))
        own = self._stack.begin(prompt.first(MAX_EXTENTS // len(spec.parts)), session.holdable_bytes)
        handed, sender_id = self._handed(lease, own)
        if handed or own.is_complete or not self._stack.usable:
            with span:
                self._answer(lookup, lease, prompt, handed or own.result(), span, sender_id)
        else:
            if own.own_bytes:
                before = own.result()  # is held, so that it stays while the tiers answer
                session.keep(lease, before.items.keys, before.own)
            self._tasks.start(lookup.lookup_id, self._ask(lookup, lease, prompt, own, span))

    async def _ask(
        self, lookup: pb.LookupChunks, lease: LookupLease, prompt: Prompt, own: PromptLookup, span: Span
    ) -> None:
        with span:
            await self._stack.ask(own, lookup.prefill_tokens_per_second, deadline=lookup_deadline(lookup))
            own.most_bytes = self._session.holdable_for(lease)
            self._answer(lookup, lease, prompt, own.result(), span)

    def _answer(
        self,
        lookup: pb.LookupChunks,
        lease: LookupLease,
        prompt: Prompt,
        found: Found,
        span: Span,
        sender_id: str = "",
    ) -> None:
        session, tail, runs = self._session, found.hit.tail, found.runs
        source = sender_id or found.source
        missed = self._missed(prompt, found)
        message = pb.FoundChunks(
            lookup_id=lookup.lookup_id,
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in runs],
            peer_instance_id=source,
            refused_chunk_count=sum(run.chunk_count for run in found.refused),
            hit_chunk_count=found.chunk_count,
            missed=[missed_span(run) for run in missed],
            partial_key=tail.key if tail else b"",
            partial_token_count=tail.token_count if tail else 0,
            prefix_chunk_count=found.prefix_count,
        )
        session.keep(lease, found.items.keys, found.own, found.behind)
        add_held(message.own, found.own)
        self._outbox.put(pb.Event(found=message))
        own_count, item_count = len(found.own), len(found.own) + found.absent_count
        asked_count = max(item_count, prompt.item_count(Hit(len(prompt))))
        self._counters.add(asked_count=asked_count, own_count=own_count, runs=runs, refused=bool(found.refused))
        counts = Counter({OWN: own_count})
        for run in runs:
            counts[run.tier] += run.chunk_count
        span.set(
            hit_chunks=found.chunk_count,
            peer_instance_id=source,
            miss_reasons=[run.reason.value for run in missed],
            **{f"{tier}_chunks": count for tier, count in counts.items()},
        )
        self._grant_wanted(lookup, found)
        if item_count:
            self._found[lookup.lookup_id] = found
        else:
            session.release(lookup.lookup_id)

    def _missed(self, prompt: Prompt, found: Found) -> list[MissedRun]:
        """Says why the prompt's chunks behind a hit are not offered; empty if the hit has all of its tokens."""
        end = found.hit.chunk_count
        is_whole = prompt.tokens is not None and prompt.end(found.hit) == prompt.tokens.size
        if end >= len(prompt) or is_whole:
            return []
        return self._stack.diagnosis.behind(
            prompt,
            end,
            refused=found.refused,
            unanswered=found.unanswered,
            limited_count=len(prompt) - end if end >= len(found.prompt) else found.limited_count,
        )

    def _grant_wanted(self, lookup: pb.LookupChunks, found: Found) -> None:
        """Grants the write credits that the lookup asks for; of one part, those of chunks that were found are not
        needed."""
        wanted = [lookup.reserve_count, *lookup.part_reserve_counts]
        if any(count > 0 for count in wanted):
            needed = [wanted[0] - found.hit.chunk_count] if self._session.spec.matches_prefixes else wanted
            self._outbox.put(pb.Event(granted=self._grant(needed, settled=wanted)))

    def found(self, lookup_id: str) -> Found | None:
        """The hit that the request's lookup found; None if that was nothing, or it was released."""
        return self._found.get(lookup_id)

    def release(self, lookup_id: str) -> None:
        """Forgets what the request's lookup found. Idempotent."""
        self._found.pop(lookup_id, None)

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
            for part, reserved in enumerate(self._session.reserve_partial(token_count, is_optional=is_optional)):
                add_credit(granted.credits, reserved, part, token_count=token_count)
        self._outbox.put(pb.Event(granted=granted))

    def _grant(self, counts: Sequence[int], settled: Sequence[int] = ()) -> pb.GrantedCredits:
        """Grants up to `counts` write credits, by part, and settles `settled` or as many requested credits."""
        granted = pb.GrantedCredits(settled_counts=[max(0, count) for count in settled or counts])
        for part, count in enumerate(counts):
            for reserved in self._session.reserve(count, part) if count > 0 else ():
                add_credit(granted.credits, reserved, part)
        return granted

    def _check_parts(self, counts: Sequence[int], field: str) -> None:
        if len(counts) > (part_count := len(self._session.spec.parts)):
            raise BadMessage(f"{len(counts)} {field}: chunks of this spec have {part_count} parts", field=field)

    def _handed(self, lease: LookupLease, own: PromptLookup) -> tuple[Found | None, str]:
        """The hit that the pool and a handoff make, and the instance that sends it; none without a handoff of it."""
        if not lease.handoff_id or own.is_complete:
            return None, ""
        first, total = own.first_absent()
        count, sender_id = self._stack.promised(lease.handoff_id, first, total)
        return (own.handed(count), sender_id) if count else (None, "")


def lookup_deadline(lookup: pb.LookupChunks) -> float | None:
    """Returns when a lookup that begins now is no longer worth its time; None if its engine does not know that."""
    seconds = min(lookup.budget.seconds + lookup.budget.nanos / 1e9, MAX_BUDGET_SECONDS)
    return time.monotonic() + NODE_SHARE * seconds if seconds > 0 else None


def missed_span(run: MissedRun) -> PromptSpan:
    """A missed run as messages name it."""
    span = PromptSpan(chunk_count=run.chunk_count, reason=reason_to_proto(run.reason), tier=run.tier)
    if run.time:
        span.remove_time.FromMilliseconds(round(run.time * 1000))
    return span


def prompt_of(lookup: pb.LookupChunks, spec: KvSpec) -> Prompt:
    """The prompt of a lookup. Raises `BadMessage` or `BadChunkKey` if its keys or its tokens cannot be used."""
    keys, tokens = split_keys(lookup.chunk_keys), lookup.tokens
    if not tokens:
        return Prompt(spec, keys)
    if len(tokens) % TOKEN_BYTES or len(tokens) > TOKEN_BYTES * MAX_TOKENS:
        raise BadMessage(
            f"tokens have {len(tokens)} bytes; they must be whole ids of 4 bytes each, at most {MAX_TOKENS}",
            field="tokens",
            size_bytes=len(tokens),
        )
    if len(lookup.root_key) != KEY_BYTES:
        raise BadChunkKey(f"root_key has {len(lookup.root_key)} bytes, not {KEY_BYTES}", field="root_key")
    return Prompt(
        spec,
        keys,
        token_count=min(len(keys) * spec.chunk_size, len(tokens) // TOKEN_BYTES),
        root=ChunkKey(lookup.root_key),
        tokens=np.frombuffer(tokens, "<u4"),
        extras=dict(lookup.chunk_extras),
    )


class EngineLoads:
    """Reports chunks as they arrive, then the end of each load. A release cancels it."""

    def __init__(
        self, session: EngineSession, stack: TierStack, lookups: EngineLookups, outbox: Outbox, tasks: RequestTasks
    ) -> None:
        self._session = session
        self._stack = stack
        self._lookups = lookups
        self._outbox = outbox
        self._tasks = tasks

    def load(self, load: pb.LoadChunks) -> None:
        """Begins a load. Failures are reported in its last answer."""
        self._tasks.start(load.lookup_id, self._load(load))

    async def _load(self, load: pb.LoadChunks) -> None:
        with telemetry.follow("lmkv.fetch", load.traceparent, asked_chunks=load.chunk_count) as span:
            await self._fetch(load, span)

    async def _fetch(self, load: pb.LoadChunks, span: Span) -> None:
        lease = self._session.lease(load.lookup_id)
        found = self._lookups.found(load.lookup_id)
        if lease is None or found is None or load.first_chunk < lease.own_count:
            refusal = BadMessage("the load names no chunks that a lookup found outside the pool")
            span.fail(refusal.reason, str(refusal))
            self._end(load, error=refusal)
            return
        arrived_count = 0

        def on_chunks(chunks: list[tuple[int, Chunk]]) -> None:
            nonlocal arrived_count
            arrived_count += len(chunks)
            arrived = [chunk for _, chunk in chunks]
            if self._session.hold(load.lookup_id, arrived):
                self._report(load, chunks[0][0], arrived)

        try:
            fetched = await self._stack.load(
                found,
                range(load.first_chunk, load.first_chunk + load.chunk_count),
                load.timeout.ToNanoseconds() / 1e9,
                on_chunks,
                lease.handoff_id,
            )
        except asyncio.CancelledError:
            if arrived_count < load.chunk_count:
                raise
            span.set(arrived_chunks=arrived_count)  # the engine had all of it, and has released it
            return
        error = fetched.error
        if error is None and fetched.chunk_count < load.chunk_count:
            error = ChunkNotFound("chunks are no longer available")
        span.set(
            arrived_chunks=fetched.chunk_count,
            transferred_bytes=fetched.size_bytes,
            peer_instance_ids=fetched.instance_ids,
        )
        if error:
            span.fail(error.reason, str(error))
        self._end(
            load,
            error=error,
            peer_id=",".join(fetched.instance_ids),
            size_bytes=fetched.size_bytes,
            seconds=fetched.seconds,
        )

    def _report(self, load: pb.LoadChunks, first_chunk: int, chunks: list[Chunk]) -> None:
        """Reports consecutive chunks, in as many messages as they need."""
        for start in range(0, len(chunks), MAX_EXTENTS):
            loaded = pb.LoadedChunks(lookup_id=load.lookup_id, first_chunk=first_chunk + start)
            add_held(loaded.chunks, chunks[start : start + MAX_EXTENTS])
            self._outbox.put(pb.Event(loaded=loaded))

    def _end(
        self,
        load: pb.LoadChunks,
        *,
        error: LmkvError | None = None,
        peer_id: str = "",
        size_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Reports the end of a load."""
        loaded = pb.LoadedChunks(
            lookup_id=load.lookup_id,
            done=True,
            status=rpc.to_status(error) if error else None,
            peer_instance_id=peer_id,
            transferred_bytes=size_bytes,
            transfer_duration=Duration(nanos=int(seconds % 1 * 1e9), seconds=int(seconds)),
        )
        self._outbox.put(pb.Event(loaded=loaded))
