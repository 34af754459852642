"""A scripted node: replaces `NodeClient`, keeps chunks of simulated KV, and does what a test scripts.

It is a fake, not a real node: it answers in the same thread, when the test asks it to, and checks that the scheduler
side keeps to the contract of `EngineService.Attach`. Memory that may not be read any more is overwritten at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from google.rpc import code_pb2

from lmkv.keys import ChunkKey, split_keys
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import Extent
from lmkv_client.connector.messages import Attachment
from lmkv_client.connector.node.client import Event, NodeLost
from lmkv_client.connector.served_names import ServedNames

Content = list[list[int]]
"""KV of one rank in one extent: per block the value of each slot."""
Pool = dict[int, dict[int, Content]]
"""Content by offset and rank."""
SPOILT = -1
"""Value of a slot whose bytes mean nothing."""


@dataclass
class Stored:
    """A chunk at a peer or in the pool."""

    token_count: int
    content: dict[int, Content]
    """By rank."""
    offset: int = -1
    holds: int = 0


@dataclass
class Fetch:
    """A load that the engine has asked for: chunks by their index in the prompt."""

    ticket: str
    indexes: list[int]


@dataclass
class Ticket:
    """A lookup that was answered."""

    keys: list[ChunkKey]
    own_count: int
    held: list[Stored] = field(default_factory=list)


class ScriptedNode:
    """One node and its pool. `prompt` says whether it answers at once or when a test calls `answer`."""

    def __init__(self, spec: KvSpec, *, credit_limit: int = 64) -> None:
        self.inbox: deque[Event] = deque()
        self.served = ServedNames()
        self.spec = spec
        self.credit_limit = credit_limit
        self.prompt = True
        self.generous = True
        """Whether credits are granted."""
        self.fetches_at_once = True
        self.refuses_fetches = False
        """Whether what peers have is not offered, as if to compute it were quicker."""
        self.refuses_commits = False
        self.attached = False
        self.attach_count = 0
        self.epoch = 0
        self.pools: dict[int, Pool] = {}
        """By epoch. A pool outlives its node, as a mapping does."""
        self.chunks: dict[ChunkKey, Stored] = {}
        self.peer_chunks: dict[ChunkKey, Stored] = {}
        self.on_disk = self.in_remote = 0
        """The number of fetched chunks, first and last ones, that come from disk and from a shared store."""
        self.tickets: dict[str, Ticket] = {}
        self.orphans: list[Ticket] = []
        """What was granted over a line that is broken: kept until the workers have let go of the pool."""
        self.credits_out: set[int] = set()
        self.fetches: list[Fetch] = []
        self.unanswered: deque[pb.AttachRequest] = deque()
        self.releases: list[pb.ReleaseChunks] = []
        self.lookups: list[pb.LookupChunks] = []
        self.commits: list[ChunkKey] = []
        self.parents: dict[ChunkKey, bytes] = {}
        """What commits named as the chunk before."""
        self.handoffs: list[pb.HandChunks] = []
        self.ended_handoffs: dict[str, list[ChunkKey]] = {}
        """By name: what had been committed when it was ended."""
        self.dropped_handoffs: list[pb.DropHandoff] = []
        self.on_commit: Callable[[ChunkKey, Stored], None] = lambda _key, _chunk: None
        self._next_offset = 0

    # ---- what the scheduler side sees

    def send(self, attachment: Attachment, message: pb.AttachRequest) -> None:
        """Takes a message, as `NodeClient.send` does. What is meant for an attachment that has ended is dropped."""
        if not self.attached or attachment.engine_id != f"engine-{self.attach_count}":
            return
        self.unanswered.append(message)
        if self.prompt:
            self.answer()

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
            self.chunks.clear()
            self.orphans.clear()
            self._next_offset = 0
        self.inbox.append(Attachment(engine_id=f"engine-{self.attach_count}", pool_socket="", epoch=self.epoch))
        self.inbox.append(pb.AttachResponse(welcome=self._welcome()))

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(instance_id="node", peer_address="node:1", epoch=self.epoch, credit_limit=self.credit_limit)

    def lose(self) -> None:
        """The line is broken."""
        self.attached = False
        self.inbox.append(NodeLost())
        self.orphans += self.tickets.values()
        self.tickets.clear()
        self.credits_out.clear()
        self.fetches.clear()
        self.unanswered.clear()

    def let_go(self) -> None:
        """Every worker has let go of the pool that it mapped for an earlier attachment."""
        for ticket in self.orphans:
            self._unhold(ticket)
        self.orphans.clear()

    def answer(self) -> None:
        """Carries out every message that waits, in order."""
        while self.unanswered:
            self._act(self.unanswered.popleft())

    def deliver(self, count: int | None = None, *, done: bool = True) -> None:
        """Completes the next chunks of the oldest fetch; all of them by default."""
        fetch = self.fetches[0]
        ticket = self.tickets[fetch.ticket]
        take = len(fetch.indexes) if count is None else count
        indexes, fetch.indexes = fetch.indexes[:take], fetch.indexes[take:]
        extents = []
        for index in indexes:
            chunk = self._admit(ticket.keys[index], self.peer_chunks[ticket.keys[index]])
            chunk.holds += 1
            ticket.held.append(chunk)
            extents.append(self._extent(chunk))
        size_bytes = sum(extent.size_bytes for extent in extents)
        loaded = pb.LoadedChunks(
            request_id=fetch.ticket,
            first_chunk=indexes[0] if indexes else 0,
            extents=extents,
            done=done and not fetch.indexes,
            peer_instance_id="peer",
            transferred_bytes=size_bytes,
        )
        if not fetch.indexes:
            self.fetches.pop(0)
        self.inbox.append(pb.AttachResponse(loaded=[loaded]))

    def fail(self) -> None:
        """Ends the oldest fetch without the rest of its chunks."""
        fetch = self.fetches.pop(0)
        loaded = pb.LoadedChunks(request_id=fetch.ticket, done=True)
        loaded.status.code = code_pb2.UNAVAILABLE
        self.inbox.append(pb.AttachResponse(loaded=[loaded]))

    def move_to_peer(self) -> None:
        """From now on only a peer has what was in the pool."""
        self.peer_chunks.update(self.chunks)
        self.evict()

    def evict(self) -> None:
        """Drops every chunk that is not held, and damages its memory."""
        for key in [key for key, chunk in self.chunks.items() if not chunk.holds]:
            self._spoil(self.chunks.pop(key))

    # ---- its own affairs

    def _act(self, message: pb.AttachRequest) -> None:
        assert not message.HasField("hello")
        for release in message.releases:
            self.releases.append(release)
            self._release(release.request_id)
        for commit in message.commits:
            self.parents[ChunkKey(commit.chunk_key)] = commit.parent_key
            self._commit(commit)
        for offset in message.returned_credits:
            self.credits_out.remove(offset)
        for lookup in message.lookups:
            self._lookup(lookup)
        for load in message.loads:
            self._load(load)
        if message.reserve_count:
            self._reserve(message.reserve_count, message.reserve_count)
        self.handoffs += message.handoffs
        for request_id in message.ended_handoffs:
            assert request_id not in self.ended_handoffs, "a handoff is ended twice"
            self.ended_handoffs[request_id] = list(self.commits)
        self.dropped_handoffs += message.dropped_handoffs
        if message.reset:
            count = len(self.chunks)
            self.evict()
            self.chunks.clear()
            self.inbox.append(pb.AttachResponse(reset_counts=[count]))

    def _lookup(self, lookup: pb.LookupChunks) -> None:
        assert lookup.request_id not in self.tickets, "a ticket is used twice"
        self.lookups.append(lookup)
        keys = split_keys(lookup.chunk_keys)
        own = self._prefix(keys, self.chunks)
        peer = self._prefix(keys[len(own) :], self.peer_chunks)
        refused, peer = (peer, []) if self.refuses_fetches else ([], peer)
        counts = {"disk": self.on_disk, "peers": len(peer) - self.on_disk - self.in_remote, "remote": self.in_remote}
        found = pb.FoundChunks(
            request_id=lookup.request_id,
            own=[self._extent(chunk) for chunk in own],
            runs=[pb.Run(tier=tier, chunk_count=count) for tier, count in counts.items() if peer and count > 0],
            peer_instance_id="peer" if peer else "",
            refused_chunk_count=len(refused),
        )
        if own or peer:
            for chunk in own:
                chunk.holds += 1
            self.tickets[lookup.request_id] = Ticket(keys, len(own), list(own))
        self.inbox.append(pb.AttachResponse(found=[found]))
        self._reserve(lookup.reserve_count - len(own) - len(peer), lookup.reserve_count)

    def _load(self, load: pb.LoadChunks) -> None:
        ticket = self.tickets[load.request_id]
        assert load.first_chunk >= ticket.own_count
        assert load.chunk_count > 0
        assert load.timeout.ToNanoseconds() > 0
        indexes = list(range(load.first_chunk, load.first_chunk + load.chunk_count))
        assert all(ticket.keys[index] in self.peer_chunks for index in indexes)
        self.fetches.append(Fetch(load.request_id, indexes))
        if self.fetches_at_once:
            self.deliver()

    def _release(self, request_id: str) -> None:
        self.fetches = [fetch for fetch in self.fetches if fetch.ticket != request_id]
        if ticket := self.tickets.pop(request_id, None):
            self._unhold(ticket)

    def _unhold(self, ticket: Ticket) -> None:
        for chunk in ticket.held:
            chunk.holds -= 1
            if not chunk.holds and chunk not in self.chunks.values():
                self._spoil(chunk)

    def _reserve(self, count: int, settled: int) -> None:
        granted = []
        room = self.credit_limit - len(self.credits_out)
        for _ in range(min(count, room) if self.generous else 0):
            offset = self._new_offset()
            self.credits_out.add(offset)
            granted.append(Extent(offset=offset, size_bytes=self.spec.chunk_bytes))
        if settled:
            self.inbox.append(pb.AttachResponse(credits=granted, settled_reserve_count=settled))

    def _commit(self, commit: pb.CommitChunk) -> None:
        self.credits_out.remove(commit.offset)
        assert commit.size_bytes == self.spec.size_bytes(commit.token_count)
        key = ChunkKey(commit.chunk_key)
        if self.refuses_commits:
            rejected = pb.RejectedCommit(chunk_key=key)
            rejected.status.code = code_pb2.NOT_FOUND
            self.inbox.append(pb.AttachResponse(rejected_commits=[rejected]))
            return
        chunk = Stored(commit.token_count, self.memory[commit.offset], commit.offset)
        self.on_commit(key, chunk)
        self.commits.append(key)
        if key not in self.chunks:
            self.chunks[key] = chunk

    def _prefix(self, keys: list[ChunkKey], chunks: dict[ChunkKey, Stored]) -> list[Stored]:
        found = []
        for key in keys:
            if key not in chunks:
                break
            found.append(chunks[key])
        return found

    def _admit(self, key: ChunkKey, source: Stored) -> Stored:
        if key not in self.chunks:
            offset = self._new_offset()
            content = {rank: [list(block) for block in blocks] for rank, blocks in source.content.items()}
            self.memory[offset] = content
            self.chunks[key] = Stored(source.token_count, content, offset)
        return self.chunks[key]

    def _extent(self, chunk: Stored) -> Extent:
        return Extent(
            offset=chunk.offset, size_bytes=self.spec.size_bytes(chunk.token_count), token_count=chunk.token_count
        )

    def _new_offset(self) -> int:
        self._next_offset += self.spec.chunk_bytes
        self.memory[self._next_offset] = {}
        return self._next_offset

    def _spoil(self, chunk: Stored) -> None:
        if chunk.offset in self.memory:
            self.memory[chunk.offset] = {
                rank: [[SPOILT] * len(block) for block in blocks] for rank, blocks in chunk.content.items()
            }
