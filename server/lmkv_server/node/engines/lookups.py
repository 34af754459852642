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
from lmkv.prompt import Hit, Prompt
from lmkv.runtime.patience import MAX_BUDGET_SECONDS, NODE_SHARE
from lmkv.spec import KvSpec
from lmkv.telemetry import Span
from lmkv.tiers import OWN
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PromptSpan
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.request_tasks import RequestTasks
from lmkv_server.node.lookup.diagnosis import MissedRun
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.lookup.lookup import PromptLookup
from lmkv_server.node.sessions.extents import MAX_EXTENTS, add_credit, add_held
from lmkv_server.node.sessions.session import EngineSession, LookupLease
from lmkv_server.node.stack import TierStack

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
        """Why the prompt's chunks behind a hit are not offered: none if the hit has all of its tokens."""
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
        """What the request's lookup found; None if that was nothing, or it was released."""
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
        """Grants up to `counts` write credits, by part, and settles `settled` or as many requested ones."""
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
    """Until when tiers may answer a lookup that begins now; None if its engine does not know what it is worth."""
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
