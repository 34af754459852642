"""Model of a handoff of two chunks: the prefill, the decode's request, reads and their quarantine, deadlines.

The messages of the prefill, the reads and the requests arrive in any order. One variant reads into the pool, the other
into a device buffer, which may be closed at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from lmkv.errors import GrantNotFound, NoFreeExtents
from lmkv.keys import ChunkKey
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.chunk_pb2 import Extent, GrantedChunk
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.pipeline import IncomingChunk, PendingWrites
from lmkv_server.node.handoff.receiver import HandoffTransfer
from lmkv_server.node.handoff.state import OPEN, HandedPrompt, Handoff, HandoffSource, HandoffState
from lmkv_server.node.handoff.table import HandoffTable
from tests.models.explorer import Action
from tests.models.pool import PAGE, SPEC, order

NAME = "r"
SESSION = "prefill"
KEYS = [ChunkKey(name.encode() * 16) for name in ("a", "b")]
PROMPT = HandedPrompt(handoff_id=NAME, spec=SPEC, chunk_keys=KEYS, token_count=2 * SPEC.chunk_size)
OTHER = ChunkKey(b"c" * 16)
PAGES = 3
TIMEOUT, ABANDON = 5.0, 60.0


class _Connection:
    """What a transfer reads of the connection to the prefill."""

    instance_id = name = "prefill"
    regions = (pb.Region(size_bytes=10 * PAGE),)


class _Pipeline:
    """What a transfer reads of the pipeline."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier


@dataclass
class Read:
    """One `Commit` of the prefill, for one chunk, and its read; it is `writing` until the transfer has stopped."""

    index: int
    transfer: HandoffTransfer
    writes: PendingWrites
    incoming: IncomingChunk
    stopped: Any
    is_writing: bool = True
    has_ended: bool = False


class HandoffModel:
    """The pool of the decode's node is empty, and no handoff was announced."""

    has_buffer = False

    def __init__(self) -> None:
        self.tier = HostTier(PAGES * PAGE)
        self.buffer = HostTier(2 * PAGE, region=1) if self.has_buffer else None
        self.table = HandoffTable(self.tier, buffer_bytes=2 * PAGE, timeout_seconds=TIMEOUT, abandon_seconds=ABANDON)
        self.pipeline = _Pipeline(self.tier)
        self.source = HandoffSource(instance_id="prefill", epoch=1, address="", session_id=SESSION)
        self.now = 0.0
        self.handoff: Handoff | None = None
        """The one that was announced; also when it is closed."""
        self.states: list[HandoffState] = []
        """Its states, in order."""
        self.is_over = False
        """Whether the name's handoff was closed or withdrawn, or its last request has ended."""
        self.claim_count = 0
        self.arrived: list[Chunk] = []
        """The chunks of the handoff that a request which has claimed it may load."""
        self.reads: list[Read] = []

    # --- Actions -------------------------------------------------------------------------------------------------

    @property
    def _is_alive(self) -> bool:
        return self.handoff is not None and self.table.find(NAME) is self.handoff

    def actions(self) -> Sequence[Action]:
        found: list[Action] = [("allocate",), ("withdraw", "engine"), ("withdraw", "prefill"), ("withdraw", "stranger")]
        if self.handoff is not None:
            found.append(("end_handoff",))
            if len(self.reads) < 3:
                found += [("commit", index) for index in range(2)]
        for number, read in enumerate(self.reads):
            if read.is_writing:
                found.append(("read_stopped", number))
            if not read.has_ended:
                found.append(("read_failed", number))
                if not read.is_writing:
                    found += [("read_done", number), ("read_damaged", number)]
        found.append(("unclaim",) if self.claim_count else ("claim",))
        if self.table.next_expiry() is not None:
            found.append(("time_passes",))
        if self.tier.get(KEYS[0]) is None:
            found.append(("store", 0))
        else:
            found.append(("drop", 0))
        if self.tier.get(OTHER) is None:
            found.append(("store_other",))
        if self.buffer is not None:
            found.append(("close_buffer",))
        return found

    def apply(self, action: Action) -> None:
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)
        if self.handoff is not None and self.handoff.state is not self.states[-1]:
            self.states.append(self.handoff.state)

    def _allocate(self) -> None:
        was_alive = self._is_alive
        try:
            handoff = self.table.allocate(PROMPT, self.source, self.now, self.buffer)
        except GrantNotFound:
            assert self.is_over, "a handoff is refused as ended that has not ended"
            return
        except NoFreeExtents:
            assert not was_alive
            return
        assert was_alive or not self.is_over, "a handoff begins again that has ended"
        assert not was_alive or handoff is self.handoff, "two handoffs have one name"
        if not was_alive:
            self.arrived = list(handoff.chunks)
            self.states = [HandoffState.ALLOCATED]
        self.handoff = handoff

    def _commit(self, index: int) -> None:
        """As `HandoffReceiver.commit` and `TransferPipeline` do, up to the beginning of the read."""
        assert self.handoff is not None
        try:
            handoff = self.table.get(self.handoff.grant_id, SESSION)
        except GrantNotFound:
            assert not self._is_alive
            return
        if handoff.state in (HandoffState.ABORTED, HandoffState.EXPIRED):
            return
        self.table.renew(handoff, self.now)
        extent = Extent(offset=0, size_bytes=PAGE)
        chunk = GrantedChunk(extent=extent, checksum=1, token_count=SPEC.chunk_size)
        request = pb.CommitRequest(grant_id=handoff.grant_id, indices=[index], chunks=[chunk])
        was_missing = index in handoff._wanted
        transfer = HandoffTransfer(handoff, cast(Any, _Connection), request, cast(Any, self.pipeline), None)
        batch = transfer.next_batch()
        if not batch:
            if was_missing:  # it is in the tier already
                self.arrived.append(handoff.chunks[-1])
            transfer.close()
            return
        assert was_missing
        writes = PendingWrites(transfer.tier)
        reserved = transfer.reserve(batch[0])
        assert reserved is not None
        incoming = writes.add(batch[0], reserved)
        self.reads.append(Read(index, transfer, writes, incoming, writes.begin()))

    def _read_stopped(self, number: int) -> None:
        read = self.reads[number]
        read.is_writing = False
        read.stopped()
        self._forget_reads()

    def _read_done(self, number: int) -> None:
        read = self.reads[number]
        assert self.handoff is not None
        keeps = self._is_alive and (read.writes._tier is self.tier or self.buffer is not None)
        chunk = None
        if read.transfer.is_missing(read.index):
            chunk = read.writes.commit(KEYS[read.index], None, SPEC.fingerprint, read.incoming)
        assert chunk is not None
        read.transfer.commit([(read.index, chunk)])
        if keeps:
            self.arrived.append(chunk)
        self._end(read)

    def _read_damaged(self, number: int) -> None:
        read = self.reads[number]
        read.transfer.reject(read.index)
        self._end(read)

    def _read_failed(self, number: int) -> None:
        self._end(self.reads[number])

    def _end(self, read: Read) -> None:
        """As `TransferPipeline` and `HandoffReceiver.commit` do at the end of a read, however it ended."""
        read.has_ended = True
        read.transfer.end_batch([read.index])
        read.writes.close()
        read.transfer.close()
        if self._is_alive:
            assert self.handoff is not None
            self.table.renew(self.handoff, self.now)
        self._forget_reads()

    def _forget_reads(self) -> None:
        self.reads = [read for read in self.reads if read.is_writing or not read.has_ended]

    def _claim(self) -> None:
        self.table.claim(NAME, self.buffer)
        self.claim_count += 1

    def _unclaim(self) -> None:
        self.table.unclaim(NAME)
        self.claim_count -= 1
        self._over()
        assert not self._is_alive, "a handoff stays after its last request"

    def _withdraw(self, caller: str) -> None:
        session = {"engine": None, "prefill": SESSION, "stranger": "stranger"}[caller]
        was_alive = self._is_alive
        state = self.handoff.state if self.handoff else None
        done = self.table.withdraw(NAME, self.now, session)
        assert done == (caller != "stranger" or not was_alive)
        if done:
            self.is_over = True
            self._over(closed=not self._is_alive)
            assert not self._is_alive or not cast(Handoff, self.handoff).is_open
        else:
            assert self._is_alive
            assert cast(Handoff, self.handoff).state is state

    def _over(self, *, closed: bool = True) -> None:
        self.is_over = True
        if closed:
            self.arrived = []

    def _end_handoff(self) -> None:
        assert self.handoff is not None
        assert self.table.end(self.handoff.grant_id, SESSION, self.now) == self._is_alive
        assert not self.handoff.is_open

    def _time_passes(self) -> None:
        """To the next deadline."""
        due = self.table.next_expiry()
        assert due is not None
        self.now = max(self.now, due)
        was_alive = self._is_alive
        self.table.expire(self.now)
        if was_alive and not self._is_alive:
            assert not self.claim_count, "a handoff that a request has claimed was abandoned"
            self._over()

    def _store(self, index: int) -> None:
        self._put(KEYS[index])

    def _store_other(self) -> None:
        self._put(OTHER)

    def _put(self, key: ChunkKey) -> None:
        reserved = self.tier.reserve(PAGE)
        if reserved is not None:
            self.tier.commit(
                Chunk(
                    offset=reserved.offset,
                    key=key,
                    fingerprint=SPEC.fingerprint,
                    size_bytes=PAGE,
                    checksum=1,
                    token_count=SPEC.chunk_size,
                )
            )

    def _drop(self, index: int) -> None:
        self.tier.drop([KEYS[index]])

    def _close_buffer(self) -> None:
        """As `DeviceBuffers` do: its memory stays until its reads have stopped, and its chunks are not found."""
        assert self.buffer is not None
        lost = [chunk for chunk in self.arrived if chunk.tier is self.buffer]
        self.table.detach_buffer(self.buffer, self.now)
        self.arrived = [chunk for chunk in self.arrived if chunk.tier is not self.buffer]
        ends = (HandoffState.ABORTED, HandoffState.EXPIRED)
        assert not lost or not self._is_alive or cast(Handoff, self.handoff).state in ends
        self.closed_buffer, self.buffer = self.buffer, None

    closed_buffer: HostTier | None = None

    # --- Promises ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.table.check()
        assert self.states == self._legal(), f"states {[state.value for state in self.states]}"
        dropped = {id(chunk): chunk for chunk in self.arrived if chunk.dropped and chunk.tier is self.tier}
        self.tier.check(dropped.values())
        if self._is_alive:
            handoff = cast(Handoff, self.handoff)
            held = {id(chunk) for chunk in handoff.chunks}
            assert held == {id(chunk) for chunk in self.arrived}, "the handoff keeps other chunks than have arrived"
            if handoff.state is HandoffState.COMMITTED:
                assert {chunk.key for chunk in handoff.chunks} == set(KEYS)
                assert handoff.promised(0) == len(KEYS)
        for read in self.reads:
            offset, tier = read.incoming.reserved.offset, read.writes._tier
            assert offset in tier._reserved, "an extent is free that a read may write to"
        extents = [(id(read.writes._tier), read.incoming.reserved.offset) for read in self.reads]
        assert len(set(extents)) == len(extents), "two reads write to one extent"

    def _legal(self) -> list[HandoffState]:
        """The part of its states that is legal: open ones, then one end; a closed buffer takes a committed one back."""
        legal: list[HandoffState] = []
        for state in self.states:
            last = legal[-1] if legal else None
            taken_back = (last, state) == (HandoffState.COMMITTED, HandoffState.ABORTED) and self.closed_buffer
            if last in (None, *OPEN) or taken_back:
                legal.append(state)
        return legal

    def settle(self) -> None:
        for read in list(self.reads):
            if not read.has_ended:
                self._read_failed(self.reads.index(read))
            if read.is_writing:
                self._read_stopped(self.reads.index(read))
        while self.claim_count:
            self._unclaim()
        for _ in range(2):
            if self.table.next_expiry() is not None:
                self._time_passes()
        self.check()
        assert not len(self.table), "a handoff stays"
        stats = self.table.stats()
        assert sum(stats.ended_counts.values()) == bool(self.handoff), "a handoff has not ended once"
        for tier in (self.tier, self.buffer, self.closed_buffer):
            if tier is not None:
                assert tier.reserved_count == 0, "room stays reserved"
                assert all(not chunk.holds for chunk in tier), "a hold stays"
                assert tier.used_bytes == tier.chunk_bytes, "bytes are lost"

    def fingerprint(self) -> object:
        handoff = self.handoff
        return (
            _content(self.tier),
            _content(self.closed_buffer if self.buffer is None else self.buffer),
            self.buffer is None,
            handoff
            and (
                handoff.state,
                sorted((index, one.offset) for index, one in handoff._wanted.items()),
                sorted(handoff._reading),
                [(chunk.key, chunk.offset, chunk.dropped) for chunk in handoff.chunks],
                handoff.missing,
                handoff._closed,
                self._is_alive and handoff.expire_at - self.now,
                handoff.destination is self.tier,
            ),
            [(one.index, one.incoming.reserved.offset, one.is_writing, one.has_ended) for one in self.reads],
            self.claim_count,
            self.is_over,
            len(self.table._claims.get(NAME, ())),
        )


class BufferHandoffModel(HandoffModel):
    """As before, with a device buffer."""

    has_buffer = True


def _content(tier: HostTier | None) -> object:
    if tier is None:
        return None
    return sorted((one.key, one.offset, one.holds) for one in tier), order(tier), sorted(tier._reserved)
