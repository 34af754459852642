"""A scripted node: replaces `NodeClient`, keeps chunks of simulated KV, and does what a test scripts.

It is a fake, not a real node: it answers in the same thread, when the test asks it to, and checks that the scheduler
side keeps to the contract of `EngineService.Attach`. Memory that may not be read any more is overwritten at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from google.rpc import code_pb2

from lmkv import rpc
from lmkv.errors import ChunkNotFound, LmkvError
from lmkv.keys import ChunkKey, KeyChain, part_key, split_keys
from lmkv.prompt import HeldKeys, Prompt, Tail, match, prefix_count
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import (
    HINT_OUTCOME_ACCEPTED,
    HINT_OUTCOME_DEFERRED,
    MISS_REASON_NEVER_STORED,
    MISS_REASON_SLOWER,
    Extent,
    HintResult,
    PromptSpan,
    RequestReport,
)
from lmkv_client.engine.attachment import Attachment
from lmkv_client.engine.key_space import ServedNames
from lmkv_client.engine.node.client import Event, NodeLost
from tests.client.connector.scripted_chunks import SPOILT, Fetch, HeldChunks, Pool, Stored, Ticket

PARTIAL = -1
"""What a credit for a partial chunk is for, among numbers of parts."""


def outcome_of(hint: pb.HintChunks) -> pb.HintedChunks:
    """What a node answers that holds every chunk once the request has ended."""
    outcome = HINT_OUTCOME_DEFERRED if hint.running else HINT_OUTCOME_ACCEPTED
    return pb.HintedChunks(hint_id=hint.hint_id, result=HintResult(outcome=outcome, ttl=hint.ttl))


class HeldParts(HeldKeys):
    """Items that are held, by key, and the partial chunks of a prompt among them."""

    def tails(self, chunk_count: int) -> Iterable[Tail]:
        prompt = self._prompt
        for tail in prompt.partials(chunk_count, range(1, prompt.spec.chunk_size)):
            if all(part_key(tail.key, part) in self._keys for part in prompt.tail_parts(chunk_count, tail)):
                yield tail


class ScriptedNode:
    """One node and its pool. `prompt` says whether it answers at once or when a test calls `answer`."""

    def __init__(self, spec: KvSpec, *, credit_limit: int = 64) -> None:
        self.inbox: deque[Event] = deque()
        self.served = ServedNames()
        self.spec = spec
        self.hello_version: str | None = None
        """Version of the weights in the next hello; None: that of the engine's spec."""
        self.audits: list[pb.AuditedChunks] = []
        """Chunks that were compared."""
        self.weight_versions: list[str] = []
        """Those that the engine has sent."""
        self.credit_limit = credit_limit
        self.prompt = True
        self.generous = True
        """Whether credits are granted."""
        self.pool_is_full = False
        """Whether it grants no optional credits."""
        self.grants_partial = True
        """Whether it grants credits for partial chunks that are not optional."""
        self.granted_tokens: dict[int, int] = {}
        """Tokens of each extent that was granted for a partial chunk."""
        self.partial_grants: list[int] = []
        """Tokens of all of these, in order."""
        self.grudged_parts: set[int] = set()
        """Parts for which none are."""
        self.fetches_at_once = True
        self.refuses_fetches = False
        """Whether what peers have is not offered, as if to compute it were quicker."""
        self.refuses_commits = False
        self.attached = False
        self.attach_count = 0
        self.epoch = 0
        self.pools: dict[int, Pool] = {}
        """By epoch. A pool outlives its node, as a mapping does."""
        self.chunks = HeldChunks(self._changed)
        """By key; parts behind the first one by their own keys."""
        self.peer_chunks: dict[ChunkKey, Stored] = {}
        self.on_disk = self.in_remote = 0
        """The number of fetched chunks, first and last ones, that come from disk and from a shared store."""
        self.tickets: dict[str, Ticket] = {}
        self.orphans: list[Ticket] = []
        """What was granted over a line that is broken: kept until the workers have let go of the pool."""
        self.credits_out: dict[int, int] = {}
        """The part that each granted extent is for, by offset."""
        self.fetches: list[Fetch] = []
        self.unanswered: deque[pb.Act] = deque()
        self.releases: list[pb.ReleaseChunks] = []
        self.reports: list[RequestReport] = []
        self.miss_reason = MISS_REASON_NEVER_STORED
        """Of what is not held."""
        self.lookups: list[pb.LookupChunks] = []
        self.commit_messages: list[pb.CommitChunk] = []
        self.commits: list[ChunkKey] = []
        """Keys of what was committed: of chunks, or of parts of them."""
        self.superseded: dict[ChunkKey, bytes] = {}
        """The chunk that the commit of a part has superseded."""
        self.alters: Callable[[pb.HeldChunk], None] = lambda _chunk: None
        """Changes the chunks of answers."""
        self.parents: dict[ChunkKey, bytes] = {}
        """What commits named as the chunk before."""
        self.handoffs: list[pb.HandChunks] = []
        self.ended_handoffs: dict[str, list[ChunkKey]] = {}
        """By name: what had been committed when it was ended."""
        self.dropped_handoffs: list[pb.DropHandoff] = []
        self.on_commit: Callable[[pb.CommitChunk, Stored], None] = lambda _commit, _chunk: None
        self.hints: list[pb.HintChunks] = []
        self.on_hint: Callable[[pb.HintChunks], pb.HintedChunks | None] = outcome_of
        """Answers a hint; None: not at all."""
        self._next_offset = 0

    # ---- what the scheduler side sees

    def send(self, attachment: Attachment, *acts: pb.Act) -> None:
        """Takes acts, as `NodeClient.send` does. What is meant for an attachment that has ended is dropped."""
        if not self.attached or attachment.engine_id != f"engine-{self.attach_count}":
            return
        self.unanswered.extend(acts)
        if self.prompt:
            self.answer()

    def receive(self) -> None:
        """See `NodeClient`: what has arrived is in the inbox already."""

    def wait(self, timeout_seconds: float) -> None:
        """See `NodeClient`: what is to arrive is in the inbox already, or arrives when a test says so."""

    def change_spec(self, spec: KvSpec) -> None:
        """See `NodeClient`."""
        self.spec = spec

    # ---- what a test does

    @property
    def memory(self) -> Pool:
        """The pool of the node that runs."""
        return self.pools[self.epoch]

    def attach(self, *, restarted: bool = True) -> None:
        """A new attachment: nothing that was granted before counts. A restarted node has an empty pool too."""
        assert not self.attached
        self.attached = True
        self.attach_count += 1
        if restarted:
            self.epoch += 1
            self.pools[self.epoch] = {}
            dict.clear(self.chunks)
            self.orphans.clear()
            self._next_offset = 0
        attachment = Attachment(
            engine_id=f"engine-{self.attach_count}",
            pool_socket="",
            epoch=self.epoch,
            weight_version=self.hello_version if self.hello_version is not None else self.spec.weight_version,
        )
        self.inbox.append(attachment)
        self.say(pb.Event(welcome=self._welcome()))
        self._changed(pb.TierChange(tier=HOST, stored_keys=list(self.chunks)))

    def _changed(self, change: pb.TierChange) -> None:
        if self.attached:
            self.say(pb.Event(tier_change=change))

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(instance_id="node", peer_address="node:1", epoch=self.epoch, credit_limit=self.credit_limit)

    def lose(self) -> None:
        """The line is broken."""
        self.attached = False
        self.inbox.append(NodeLost())
        self.orphans += self.tickets.values()
        self.tickets.clear()
        self.credits_out.clear()
        self.granted_tokens.clear()
        self.fetches.clear()
        self.unanswered.clear()

    def release_orphans(self) -> None:
        """Every worker has let go of the pool that it mapped for an earlier attachment."""
        for ticket in self.orphans:
            self._unhold(ticket)
        self.orphans.clear()

    def answer(self) -> None:
        """Carries out every act that waits, in order."""
        while self.unanswered:
            self._act(self.unanswered.popleft())

    def deliver(self, count: int | None = None, *, done: bool = True) -> None:
        """Completes the next chunks of the oldest fetch; all of them by default."""
        fetch = self.fetches[0]
        ticket = self.tickets[fetch.ticket]
        take = len(fetch.indexes) if count is None else count
        indexes, fetch.indexes = fetch.indexes[:take], fetch.indexes[take:]
        arrived = []
        for index in indexes:
            chunk = self._admit(ticket.keys[index])
            chunk.holds += 1
            ticket.held.append(chunk)
            arrived.append(self._held(chunk))
        size_bytes = sum(chunk.extent.size_bytes for chunk in arrived)
        loaded = pb.LoadedChunks(
            lookup_id=fetch.ticket,
            first_chunk=indexes[0] if indexes else 0,
            chunks=arrived,
            done=done and not fetch.indexes,
            peer_instance_id="peer",
            transferred_bytes=size_bytes,
        )
        if not fetch.indexes:
            self.fetches.pop(0)
        self.say(pb.Event(loaded=loaded))

    def fail(self, error: LmkvError | None = None) -> None:
        """Ends the oldest fetch without the rest of its chunks."""
        fetch = self.fetches.pop(0)
        loaded = pb.LoadedChunks(lookup_id=fetch.ticket, done=True)
        loaded.status.CopyFrom(rpc.to_status(error or ChunkNotFound("no longer there")))
        self.say(pb.Event(loaded=loaded))

    def move_to_peer(self, part: int | None = None) -> None:
        """From now on only a peer has what was in the pool, or one part of the chunks there."""
        self.peer_chunks.update({key: chunk for key, chunk in self.chunks.items() if part in (None, chunk.part)})
        self.evict(part)

    def evict(self, part: int | None = None) -> None:
        """Drops every chunk that is not held, or one part of each, and damages its memory."""
        for key in [key for key, chunk in self.chunks.items() if not chunk.holds and part in (None, chunk.part)]:
            self._spoil(self.chunks.pop(key))

    def drop(self, key: ChunkKey) -> None:
        """Drops one chunk or part."""
        self._spoil(self.chunks.pop(key))

    # ---- its own affairs

    def say(self, event: pb.Event) -> None:
        """Sends an event."""
        self.inbox.append(pb.AttachResponse(events=[event]))

    def have_hits_audited(self, seconds: int) -> None:
        """Has the engine audit every hit for this time."""
        event = pb.Event(audit_hits=pb.AuditHits())
        event.audit_hits.duration.FromSeconds(seconds)
        self.say(event)

    def _act(self, act: pb.Act) -> None:
        kind = act.WhichOneof("act")
        assert kind is not None
        self._handlers[kind](getattr(act, kind))

    @property
    def _handlers(self) -> dict[str, Callable[[Any], None]]:
        return {
            "serve_models": lambda _: None,
            "release": self._release,
            "commit": self._commit_all,
            "drop_damaged": lambda _: None,
            "return_credits": self._take_back,
            "lookup": self._lookup,
            "load": self._load,
            "reserve": self._reserve_all,
            "hand": self.handoffs.append,
            "end_handoff": self._end_handoff,
            "drop_handoff": self.dropped_handoffs.append,
            "reset": self._reset,
            "change_weights": lambda change: self.weight_versions.append(change.weight_version),
            "report": self.reports.append,
            "hint": self._hint,
            "audited": self.audits.append,
        }

    def _commit_all(self, commits: pb.CommitChunks) -> None:
        assert commits.chunks, "nothing is committed"
        self.commit_messages += commits.chunks
        for commit in commits.chunks:
            self.parents[ChunkKey(commit.chunk_key)] = commit.parent_key
            self._commit(commit)

    def _take_back(self, returned: pb.ReturnCredits) -> None:
        for offset in returned.offsets:
            del self.credits_out[offset]

    def _reserve_all(self, wanted: pb.ReserveCredits) -> None:
        self._reserve(wanted.counts, wanted.counts)
        self._reserve_partial(list(wanted.partial_token_counts), is_granted=self.grants_partial)
        self._reserve_partial(list(wanted.optional_partial_token_counts), is_granted=not self.pool_is_full)

    def _end_handoff(self, ended: pb.EndHandoff) -> None:
        assert ended.handoff_id not in self.ended_handoffs, "a handoff is ended twice"
        self.ended_handoffs[ended.handoff_id] = list(self.commits)

    def _reset(self, _: pb.ResetChunks) -> None:
        count = len(self.chunks)
        self.evict()
        self.chunks.clear()
        self.say(pb.Event(reset=pb.ResetResult(chunk_count=count)))

    def _hint(self, hint: pb.HintChunks) -> None:
        self.hints.append(hint)
        if answer := self.on_hint(hint):
            self.say(pb.Event(hinted=answer))

    def _lookup(self, lookup: pb.LookupChunks) -> None:
        assert lookup.lookup_id not in self.tickets, "a ticket is used twice"
        self.lookups.append(lookup)
        if not self.spec.has_plain_parts:
            self._look_up_parts(lookup)
            return
        keys = split_keys(lookup.chunk_keys)
        own = self._prefix(keys, self.chunks)
        peer = self._prefix(keys[len(own) :], self.peer_chunks)
        partial_key = self._partial_key(lookup, keys[: len(own) + len(peer)])
        if partial_key:
            keys = [*keys[: len(own) + len(peer)], partial_key]
            place = self.chunks if partial_key in self.chunks and not peer else self.peer_chunks
            (peer if place is self.peer_chunks else own).append(place[partial_key])
        full_count = len(own) + len(peer) - bool(partial_key)
        refused, peer = (peer, []) if self.refuses_fetches else ([], peer)
        missed = [
            (MISS_REASON_SLOWER, len(refused)),
            (self.miss_reason, len(split_keys(lookup.chunk_keys)) - full_count),
        ]
        counts = {"disk": self.on_disk, "peers": len(peer) - self.on_disk - self.in_remote, "remote": self.in_remote}
        found = pb.FoundChunks(
            lookup_id=lookup.lookup_id,
            own=[self._held(chunk) for chunk in own],
            runs=[pb.Run(tier=tier, chunk_count=count) for tier, count in counts.items() if peer and count > 0],
            peer_instance_id="peer" if peer else "",
            refused_chunk_count=len(refused),
            missed=[PromptSpan(reason=reason, chunk_count=count) for reason, count in missed if count > 0],
        )
        if partial_key and not refused:
            found.partial_key = partial_key
            found.partial_token_count = (peer or own)[-1].token_count
        if own or peer:
            self._hold(lookup.lookup_id, keys, own)
        self.say(pb.Event(found=found))
        self._reserve([lookup.reserve_count - len(own) - len(peer)], [lookup.reserve_count])

    def _partial_key(self, lookup: pb.LookupChunks, keys: list[ChunkKey]) -> ChunkKey | None:
        """The longest partial chunk with the next tokens behind these chunks, in the pool or, where that is better or
        behind others of it, at the peer."""
        size = self.spec.chunk_size
        tokens = np.frombuffer(lookup.tokens, "<u4")
        rest = tokens[len(keys) * size :][:size]
        chain = KeyChain(ChunkKey(lookup.root_key), size, dict(lookup.chunk_extras))
        chain.keys = keys
        behind_own = all(key in self.chunks for key in keys)
        for count in range(min(size - 1, rest.size), 0, -1):
            key = chain.behind(len(keys), rest[:count])
            if (behind_own and key in self.chunks) or key in self.peer_chunks:
                return key
        return None

    def _look_up_parts(self, lookup: pb.LookupChunks) -> None:
        """Finds the longest hit whose items can be loaded, wherever they are."""
        chunk_keys = split_keys(lookup.chunk_keys)
        places = self.chunks if self.refuses_fetches else self.chunks | self.peer_chunks
        tokens = np.frombuffer(lookup.tokens, "<u4") if lookup.tokens else None
        size = self.spec.chunk_size
        prompt = Prompt(
            self.spec,
            chunk_keys,
            token_count=min(len(chunk_keys) * size, tokens.size) if tokens is not None else 0,
            root=ChunkKey(lookup.root_key),
            tokens=tokens,
            extras=dict(lookup.chunk_extras),
        )
        held = HeldParts(prompt, places)
        hit, prefix = match(prompt, held), prefix_count(prompt, held)
        keys = list(prompt.items(hit).keys)
        own = self._prefix(keys, self.chunks)
        tiers = groupby("own" if key in self.chunks else "peers" for key in keys[len(own) :])
        runs = [pb.Run(tier=tier, chunk_count=len(list(run))) for tier, run in tiers]
        found = pb.FoundChunks(
            lookup_id=lookup.lookup_id,
            hit_chunk_count=hit.chunk_count + (hit.tail is not None),
            partial_key=hit.tail.key if hit.tail else b"",
            partial_token_count=hit.tail.token_count if hit.tail else 0,
            own=[self._held(chunk) for chunk in own],
            runs=runs,
            peer_instance_id="peer" if any(run.tier == "peers" for run in runs) else "",
            missed=[PromptSpan(reason=self.miss_reason, chunk_count=len(chunk_keys) - hit.chunk_count)]
            if chunk_keys[hit.chunk_count :]
            else [],
            prefix_chunk_count=prefix if prefix > hit.chunk_count else 0,
        )
        if hit.chunk_count or hit.tail:
            self._hold(lookup.lookup_id, keys, own, [self.chunks[key] for key in keys if key in self.chunks])
        self.say(pb.Event(found=found))
        wanted = [lookup.reserve_count, *lookup.part_reserve_counts]
        self._reserve(wanted, wanted)

    def _hold(self, lookup_id: str, keys: list[ChunkKey], own: list[Stored], held: list[Stored] | None = None) -> None:
        ticket = self.tickets[lookup_id] = Ticket(keys, len(own), list(own) if held is None else held)
        for chunk in ticket.held:
            chunk.holds += 1

    def _load(self, load: pb.LoadChunks) -> None:
        ticket = self.tickets[load.lookup_id]
        assert load.first_chunk >= ticket.own_count
        assert load.chunk_count > 0
        assert load.timeout.ToNanoseconds() > 0
        indexes = list(range(load.first_chunk, load.first_chunk + load.chunk_count))
        places = self.peer_chunks if self.spec.has_plain_parts else self.peer_chunks | self.chunks
        assert all(ticket.keys[index] in places for index in indexes)
        self.fetches.append(Fetch(load.lookup_id, indexes))
        if self.fetches_at_once:
            self.deliver()

    def _release(self, release: pb.ReleaseChunks) -> None:
        self.releases.append(release)
        self.fetches = [fetch for fetch in self.fetches if fetch.ticket != release.lookup_id]
        if ticket := self.tickets.pop(release.lookup_id, None):
            self._unhold(ticket)

    def _unhold(self, ticket: Ticket) -> None:
        for chunk in ticket.held:
            chunk.holds -= 1
            if not chunk.holds and chunk not in self.chunks.values():
                self._spoil(chunk)

    def _reserve(self, counts: Sequence[int], settled: Sequence[int]) -> None:
        """Grants write credits for each part while there is room for more of it."""
        assert len(counts) <= len(self.spec.parts)
        granted = []
        for part, count in enumerate(counts):
            room = self.credit_limit - sum(other == part for other in self.credits_out.values())
            for _ in range(min(count, room) if self.generous and part not in self.grudged_parts else 0):
                offset = self._new_offset()
                self.credits_out[offset] = part
                extent = Extent(offset=offset, size_bytes=self.spec.part_bytes(part))
                granted.append(pb.WriteCredit(extent=extent, part=part))
        if any(settled):
            self.say(pb.Event(granted=pb.GrantedCredits(credits=granted, settled_counts=settled)))

    def _reserve_partial(self, token_counts: list[int], *, is_granted: bool) -> None:
        """Grants write credits for partial chunks."""
        granted = []
        for token_count in token_counts if self.generous and is_granted else ():
            assert 0 < token_count < self.spec.chunk_size
            self.partial_grants.append(token_count)
            for part in range(len(self.spec.parts)):
                offset = self._new_offset()
                self.credits_out[offset] = PARTIAL - part
                self.granted_tokens[offset] = token_count
                extent = Extent(offset=offset, size_bytes=self.spec.part_bytes(part, token_count))
                granted.append(pb.WriteCredit(extent=extent, part=part, partial_token_count=token_count))
        if token_counts:
            self.say(pb.Event(granted=pb.GrantedCredits(credits=granted, settled_partial_token_counts=token_counts)))

    def _commit(self, commit: pb.CommitChunk) -> None:
        number = self.credits_out.pop(commit.offset)
        assert commit.part == (number if number >= 0 else PARTIAL - number), "the credit is for another part"
        granted_tokens = self.granted_tokens.pop(commit.offset, self.spec.chunk_size)
        assert commit.token_count == granted_tokens, "the credit is for another number of tokens"
        assert commit.size_bytes == self.spec.part_bytes(commit.part, commit.token_count)
        assert self.spec.ends_anywhere or commit.token_count == self.spec.chunk_size
        key = part_key(ChunkKey(commit.chunk_key), commit.part)
        if self.refuses_commits:
            rejected = pb.RejectedCommit(chunk_key=key)
            rejected.status.code = code_pb2.NOT_FOUND
            self.say(pb.Event(rejected_commit=rejected))
            return
        chunk = Stored(commit.token_count, self.memory[commit.offset], commit.offset, part=commit.part)
        self.on_commit(commit, chunk)
        self.commits.append(key)
        if commit.superseded_key:
            self.superseded[key] = commit.superseded_key
        if key not in self.chunks:
            self.chunks[key] = chunk

    def _prefix(self, keys: list[ChunkKey], chunks: dict[ChunkKey, Stored]) -> list[Stored]:
        found = []
        for key in keys:
            if key not in chunks:
                break
            found.append(chunks[key])
        return found

    def _admit(self, key: ChunkKey) -> Stored:
        if key not in self.chunks:
            offset, source = self._new_offset(), self.peer_chunks[key]
            content = {place: list(rows) for place, rows in source.content.items()}
            self.memory[offset] = content
            self.chunks[key] = Stored(source.token_count, content, offset, part=source.part)
        return self.chunks[key]

    def _held(self, chunk: Stored) -> pb.HeldChunk:
        extent = Extent(offset=chunk.offset, size_bytes=self.spec.part_bytes(chunk.part, chunk.token_count))
        held = pb.HeldChunk(extent=extent, token_count=chunk.token_count)
        self.alters(held)
        return held

    def _new_offset(self) -> int:
        self._next_offset += self.spec.chunk_bytes
        self.memory[self._next_offset] = {}
        return self._next_offset

    def _spoil(self, chunk: Stored) -> None:
        if chunk.offset in self.memory:
            self.memory[chunk.offset] = {place: [SPOILT] * len(rows) for place, rows in chunk.content.items()}
