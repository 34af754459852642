"""The contract of a secondary tier: chunks that a node can load into its host memory from elsewhere.

`TierStack` asks an ordered list of them; the disk, the peers and the remote store are three. All methods are called on
the node's event loop and none blocks it. A tier that fails is one that has nothing: a lookup or a read never raises.
`Progress` has the chunks of one load: missing, arrived, delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey, part_key
from lmkv.misses import MissReason
from lmkv.prompt import Items, Tail
from lmkv.spec import KvSpec
from lmkv_server.node.cache.host import Chunk, HostTier

OnChunks = Callable[[list[tuple[int, Chunk]]], None]
"""Receives chunks with their indices; each has a hold that the callee ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The outcome of one load."""

    chunk_count: int
    """Chunks that were delivered."""
    size_bytes: int
    """Bytes of those that came from peers."""
    seconds: float
    instance_ids: tuple[str, ...]
    """Peers that sent any, in order of first use."""
    error: LmkvError | None
    """Why chunks are missing, if there was an error; that no tier holds a chunk any more is not an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The items that a hit needs of the tiers: any set of the keys of one prompt."""

    spec: KvSpec
    keys: Sequence[ChunkKey]
    """Keys of the items of a prompt, part by part and in prompt order."""
    indices: Sequence[int]
    """Indices in `keys` of the chunks that are asked for, ascending. The others are in memory or in another tier."""
    in_order: bool = True
    """Whether a chunk is only of use with all chunks before it, so that a tier may stop at the first absent one."""
    any_of: bool = False
    """Whether `keys` are alternatives, the best first, and one of them is enough: the first of which the tier has all
    parts. They are keys of chunks."""
    root: ChunkKey | None = None
    """The root of the key chain, if the presence shall have `partial_lengths`. With `any_of`: the key of the chunk
    before the alternatives, or this root."""
    prefix_digests: bytes = b""
    """The digests of the prompt's next tokens, with `any_of`, if the presence shall have `beginning`."""
    items: Items | None = None
    """The items that `keys` name; None for alternatives, and for keys whose prompt is not known. A tier that keeps
    chunks by key need not know."""
    deadline: float | None = None
    """The time, by `time.monotonic()`, up to which the answer is worth waiting; None: a tier's own timeout is right."""

    def parts_of(self, index: int) -> Sequence[ChunkKey]:
        """The keys of what one of the `keys` stands for: of an alternative, of all its parts."""
        key = self.keys[index]
        return [part_key(key, part) for part in range(len(self.spec.parts))] if self.any_of else (key,)

    def seconds(self, least: float) -> float:
        """The time that a tier whose own timeout is `least` may take."""
        return least if self.deadline is None else max(least, self.deadline - time.monotonic())


class Progress:
    """The chunks of one load. An arrived chunk is held, and delivered once all chunks before it have arrived.

    Without `delivers_in_order` each chunk is delivered when it arrives.
    """

    def __init__(
        self,
        tier: HostTier,
        needs: Needs,
        on_chunks: OnChunks,
        *,
        delivers_in_order: bool = True,
        evict: MissReason | None = MissReason.EVICTED_BY_FETCH,
    ) -> None:
        """`needs` are the chunks to load. `evict` is why other chunks are evicted to make room for chunks from peers;
        None if they may not be.
        """
        self.needs = needs
        self.spec = needs.spec
        self.keys = needs.keys
        self.evict = evict
        self.missing = set(needs.indices)
        """Indices of chunks that have not arrived."""
        self.failures: dict[ChunkKey, LmkvError] = {}
        """The errors of reads of chunks; another read may have succeeded since."""
        self.changed = asyncio.Event()
        """Set when another load has read a chunk of this one, or failed to."""
        self._tier = tier
        self._on_chunks = on_chunks
        self._delivers_in_order = delivers_in_order
        self._next_index = needs.indices[0] if needs.indices else len(needs.keys)
        self._arrived: dict[int, Chunk] = {}
        self._closed = False
        self._began = time.monotonic()
        self._handed_count = 0
        self._peer_bytes = 0
        self._instance_ids: dict[str, None] = {}

    @property
    def front(self) -> Collection[int]:
        """The missing chunks that would be delivered as soon as they arrive."""
        return {self._next_index} & self.missing if self.needs.in_order else self.missing

    @property
    def mean_bytes(self) -> int:
        """Average size of the chunks."""
        if items := self.needs.items:
            return items.mean_bytes
        return max(1, self.spec.chunk_bytes // len(self.spec.parts))

    def size_bytes(self, index: int) -> int | None:
        """Exact size of a chunk; None if it depends on the number of its tokens, or its part is not known."""
        items = self.needs.items
        return items.sizes[index] if items and not self.spec.matches_prefixes else None

    def parent(self, index: int) -> ChunkKey | None:
        """The key of what must not be evicted before a chunk; None if there is none or it is unknown."""
        if items := self.needs.items:
            return items.parent(index)
        return self.keys[index - 1] if index and self.spec.matches_prefixes else None

    def held_by(self, matched_count: int) -> Collection[int]:
        """The chunks that a holder of the first `matched_count` chunks of the prompt may hold."""
        items = self.needs.items
        return items.below(matched_count) if items else range(matched_count)

    def result(self, error: LmkvError | None = None) -> Loaded:
        """Returns what has been delivered by now; `error` is why chunks are missing, if any are."""
        return Loaded(
            chunk_count=self._handed_count,
            size_bytes=self._peer_bytes,
            seconds=time.monotonic() - self._began,
            instance_ids=tuple(self._instance_ids),
            error=error if self.missing else None,
        )

    def add(self, chunks: Iterable[tuple[int, Chunk]], instance_id: str = "") -> None:
        """Adds chunks that are in the host tier now; `instance_id` is the peer that sent them, if any."""
        for index, chunk in chunks:
            if index in self.missing and not self._closed and self._fits(index, chunk):
                self._take(index, chunk, instance_id)
        if due := self._due():
            self._handed_count += len(due)
            self._on_chunks(due)

    def _fits(self, index: int, chunk: Chunk) -> bool:
        size_bytes = self.size_bytes(index)
        return size_bytes is None or (chunk.fingerprint == self.spec.fingerprint and chunk.size_bytes == size_bytes)

    def _due(self) -> list[tuple[int, Chunk]]:
        """Removes and returns the chunks to deliver now."""
        if not self._delivers_in_order:
            due, self._arrived = list(self._arrived.items()), {}
            return due
        due = []
        while self._next_index in self._arrived:
            due.append((self._next_index, self._arrived.pop(self._next_index)))
            self._next_index += 1
        return due

    def _take(self, index: int, chunk: Chunk, instance_id: str) -> None:
        self.missing.discard(index)
        self._tier.hold([chunk])
        self._arrived[index] = chunk
        if instance_id:
            self._peer_bytes += chunk.size_bytes
            self._instance_ids[instance_id] = None

    def find_own(self) -> None:
        """Adds missing chunks that are in the host tier by now."""
        found = ((index, self._tier.get(self.keys[index])) for index in sorted(self.missing))
        self.add([(index, chunk) for index, chunk in found if chunk and chunk.fingerprint == self.spec.fingerprint])

    def close(self) -> None:
        """Ends the holds on chunks that were not delivered. No chunk is added after this. Idempotent."""
        self._closed = True
        self._tier.unhold(self._arrived.values())
        self._arrived.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """The answer of a tier to `Needs`. A tier may return a subclass that says more to its own `read`."""

    asked: Sequence[int] = ()
    """`Needs.indices`."""
    indices: Sequence[int] = ()
    """The indices of `asked` that the tier has, ascending."""
    source: str = ""
    """Instance that has them, if it is another one."""
    end: int = 0
    """Index of the first chunk that the tier does not have."""
    partial_lengths: Sequence[int] = ()
    """Token counts of partial chunks that the tier has in place of chunk `end`, ascending, for any prompt."""
    beginning: Tail | None = None
    """A chunk that has more of the prompt's next tokens than any of the alternatives; then `indices` are empty."""
    is_answered: bool = True
    """Whether the tier has answered in time; if not, it may have more."""
    moved_share: float | None = 1.0
    """Bytes that a read moves for each byte of the chunks; None: that is not known before the first read."""

    def with_tail(self, tail: Presence, chunk_count: int) -> Self:
        """This presence, and that of a tail behind the first chunks, which another lookup of the tier has found."""
        del chunk_count
        return replace(self, source=self.source or tail.source)

    def run_from(self, index: int) -> int:
        """Number of chunks that the tier has without a gap from `index` on."""
        count = 0
        for found in self.indices:
            if found == index + count:
                count += 1
            elif found > index:
                break
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Chunks to drop: those of `keys` and of the spec `fingerprint`; an empty one of these selects all."""

    keys: Sequence[ChunkKey] = ()
    fingerprint: bytes = b""
    specs: Sequence[bytes] = ()
    """Fingerprints of the known specs, for a tier that finds a chunk only by key and spec."""
    kept: Container[ChunkKey] = ()
    """Pinned chunks, which a tier that belongs to this node alone does not drop."""
    counted: Container[ChunkKey] = ()
    """Chunks that the caller counts itself: they are dropped and not part of the result."""
    dry_run: bool = False
    """Whether chunks are only counted."""

    def has_spec(self, fingerprint: bytes) -> bool:
        """Whether chunks of this spec are selected."""
        return self.fingerprint in (b"", fingerprint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """The number of dropped chunks, and of their tokens where the tier knows these."""

    chunk_count: int = 0
    token_count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUsage:
    capacity_bytes: int
    """Bytes that chunks may take now; 0 if there is no limit."""
    used_bytes: int
    chunk_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStats:
    """Counts since the start of the node, except those that say `now`."""

    written_chunks: int = 0
    written_bytes: int = 0
    present_chunks: int = 0
    """Chunks that were not written because the backend had them."""
    skipped_chunks: int = 0
    """Chunks that were not written because they were evicted first, or the backend had no room or refused them."""
    waiting_chunks: int = 0
    """Chunks that wait to be written now."""
    read_chunks: int = 0
    read_bytes: int = 0
    damaged_chunks: int = 0
    """Chunks that were dropped because they were damaged or gone when they were read."""
    undecryptable_chunks: int = 0
    """Damaged chunks that could not be decrypted: they are of another key, or were changed."""
    evicted_chunks: int = 0
    """Chunks that were evicted from the tier to make room."""
    failures: int = 0
    """Failures to open, read or write a backend."""
    late_lookups: int = 0
    """Lookups that a backend did not answer in time."""
    down_backends: int = 0
    """Backends that cannot be used now."""

    def __add__(self, other: TierStats) -> TierStats:
        """The counts of two parts of one tier together."""
        return TierStats(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


class SecondaryTier(Protocol):
    """A place that chunks are loaded from, below host memory. Its name stands on the wire and in metrics."""

    @property
    def name(self) -> str:
        """Unique in the node: `disk`, `peers`, `remote`, or the name of a third party's entry point."""

    @property
    def is_local(self) -> bool:
        """Whether a read stays on this host. A read that does not leaves half of its time to usable tiers behind."""

    @property
    def usable(self) -> bool:
        """Whether a lookup can find anything now."""

    @property
    def is_down(self) -> bool:
        """Whether it may hold chunks that a lookup cannot find now: it has failed, or does not answer."""

    async def lookup(self, needs: Needs) -> Presence:
        """Finds the needed chunks that the tier has. Bounded by `Needs.seconds` of the tier's own time; late or failed:
        none.

        Counts as a use of those and of the prompt's chunks before them. Raises nothing but for cancellation.
        """

    async def read(self, progress: Progress, presence: Presence, timeout_seconds: float, /) -> LmkvError | None:
        """Commits missing chunks to the host tier and adds them to `progress`; returns by the timeout.

        `presence` is a lookup's answer about the same keys. Returns why chunks did not come, if there was an error.
        Every chunk is verified before it is committed. Raises nothing but for cancellation, and then leaves no
        reservation except of memory that may still be written to.
        """

    def expected_seconds(self, presence: Presence, size_bytes: int, /) -> float | None:
        """Estimates the seconds that a read of `size_bytes` takes; None if that is not known."""

    async def drop(self, selection: Selection, /) -> Dropped:
        """Removes chunks; a read of them that runs does not commit them. Raises `Unreachable` if a backend fails."""

    def usage(self) -> TierUsage | None:
        """Returns the tier's usage; None if the node does not know."""

    def stats(self) -> TierStats:
        """Returns the tier's counters."""


def deadline_at(tiers: Sequence[SecondaryTier], at: int, deadline: float | None) -> float | None:
    """Returns when the lookup in a tier is to end: one beyond this host leaves half of the time to later tiers."""
    if deadline is None or tiers[at].is_local or not any(later.usable for later in tiers[at + 1 :]):
        return deadline
    now = time.monotonic()
    return now + (deadline - now) / 2
