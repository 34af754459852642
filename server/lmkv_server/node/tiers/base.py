"""The contract of a secondary tier: chunks that a node can load into its host memory from elsewhere.

`TierStack` asks an ordered list of them; the disk, the peers and the remote store are three. All methods are called on
the node's event loop and none blocks it. A tier that fails is one that has nothing: a lookup or a read never raises.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey, part_key
from lmkv.prompt import Items, Tail
from lmkv.spec import KvSpec
from lmkv_server.node.tiers.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a hit needs of the tiers: any set of the keys of one prompt."""

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
    """With `any_of`: those of the prompt's next tokens, if the presence shall have `beginning`."""
    items: Items | None = None
    """What `keys` are; None for alternatives, and for keys whose prompt is not known. A tier that keeps chunks by key
    need not know."""
    deadline: float | None = None
    """Until when, by `time.monotonic()`, the answer is worth its time; None: a tier's own timeout is right."""

    def parts_of(self, index: int) -> Sequence[ChunkKey]:
        """The keys of what one of the `keys` stands for: of an alternative, of all its parts."""
        key = self.keys[index]
        return [part_key(key, part) for part in range(len(self.spec.parts))] if self.any_of else (key,)

    def seconds(self, least: float) -> float:
        """How long a tier whose own timeout is `least` may take."""
        return least if self.deadline is None else max(least, self.deadline - time.monotonic())


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """The answer of a tier to `Needs`. A tier may return a subclass that says more to its own `read`."""

    asked: Sequence[int] = ()
    """`Needs.indices`."""
    indices: Sequence[int] = ()
    """Those of them that the tier has, ascending."""
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
    """How full a tier is."""

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
    """Those of them that could not be decrypted: they are of another key, or were changed."""
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
        """Which of the needed chunks the tier has. Bounded by `Needs.seconds` of the tier's own time; late or failed:
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
        """How long a read of `size_bytes` is expected to take; None if that is not known."""

    async def drop(self, selection: Selection, /) -> Dropped:
        """Removes chunks; a read of them that runs does not commit them. Raises `Unreachable` if a backend fails."""

    def usage(self) -> TierUsage | None:
        """How full the tier is; None if the node does not know."""

    def stats(self) -> TierStats:
        """What the tier has done."""


def deadline_at(tiers: Sequence[SecondaryTier], at: int, deadline: float | None) -> float | None:
    """When the lookup in a tier among these is to end: one beyond this host leaves half of the time to those behind."""
    if deadline is None or tiers[at].is_local or not any(later.usable for later in tiers[at + 1 :]):
        return deadline
    now = time.monotonic()
    return now + (deadline - now) / 2
