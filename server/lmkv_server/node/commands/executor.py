"""Executes coordinator orders (fetch, drop, pin, unpin, explain) on the node's tiers.

`OrderRunner` starts, bounds and cancels them. Each method updates an `OrderProgress` and may be cancelled at any await.
A chunk that fails is recorded there; an exception means that the whole order failed.

A move drops a chunk at its source because the destination has it. If another coordinator moves the same chunk the
other way at that time, each of the two moves relies on the copy that the other one drops. So a node counts its fetches
(`Arrivals`), a move names the count that the source reported before the destination fetched, and chunks that arrived
later stay.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmkv import rpc
from lmkv.errors import (
    BadMessage,
    ChunkArrived,
    ChunkNotFound,
    ChunkPinned,
    KvSpecMismatch,
    LmkvError,
    TierUnsupported,
    Unreachable,
)
from lmkv.hints import HintResult
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, split_keys
from lmkv.misses import MissReason
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1 import chunk_pb2
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.pins import Pins
from lmkv_server.node.fetch.tier import PeerFetcher
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.base import Dropped, Needs, Progress, SecondaryTier, Selection

MAX_ARRIVALS = 65_536
"""Chunks whose arrival is remembered; of all others it is assumed that they arrived with the last forgotten one."""


class Arrivals:
    """The last arrival of each chunk, as a serial number that increases, also across restarts of the node."""

    def __init__(self, serial: int) -> None:
        """`serial` must be greater than those of an earlier process: a time in nanoseconds."""
        self._serial = serial
        self._serials: OrderedDict[ChunkKey, int] = OrderedDict()  # oldest first
        self._forgotten = 0

    @property
    def serial(self) -> int:
        """The serial number of the last arrival."""
        return self._serial

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are here now because of one fetch order."""
        arrived = list(keys)
        if not arrived:
            return
        self._serial += 1
        for key in arrived:
            self._serials[key] = self._serial
            self._serials.move_to_end(key)
        while len(self._serials) > MAX_ARRIVALS:
            _, self._forgotten = self._serials.popitem(last=False)

    def since(self, serial: int, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Returns the chunks that have arrived after a serial number; all, if that is too long ago to know."""
        if serial < self._forgotten:
            return set(keys)
        return {key for key in keys if self._serials.get(key, 0) > serial}

    def check(self) -> None:
        """Asserts that the bound and the order are kept."""
        serials = list(self._serials.values())
        assert serials == sorted(serials)
        assert len(serials) <= MAX_ARRIVALS
        assert all(self._forgotten <= one <= self.serial for one in serials)


@dataclass(kw_only=True, slots=True)
class OrderProgress:
    """The progress of one order. Updated while it runs, so that the outcome of a stopped order is exact."""

    wanted: Sequence[ChunkKey] = ()
    """Chunks to fetch: in the end each is in `fetched` or in `failures`."""
    fetched: list[Chunk] = field(default_factory=list)
    """Chunks of `wanted` that the host tier has, each with a hold that `OrderRunner` ends."""
    transferred_bytes: int = 0
    explanation: chunk_pb2.PromptExplanation | None = None
    """Answer to an `ExplainOrder`."""
    failures: dict[ChunkKey, LmkvError] = field(default_factory=dict)
    hint: chunk_pb2.HintResult | None = None
    _chunk_count: int = field(default=0, init=False)
    _token_count: int = field(default=0, init=False)
    _pinned_count: int = field(default=0, init=False)

    def count(self, chunks: Collection[Chunk], *, kept_count: int = 0) -> None:
        """Adds chunks that the order was executed for, and the number of those that it kept because of a pin."""
        self.count_dropped(Dropped(chunk_count=len(chunks), token_count=sum(chunk.token_count for chunk in chunks)))
        self._pinned_count += kept_count

    def count_dropped(self, dropped: Dropped) -> None:
        """Adds chunks that a secondary tier dropped for the order."""
        self._chunk_count += dropped.chunk_count
        self._token_count += dropped.token_count

    def outcome(self, order_id: str, error: LmkvError | None) -> pb.OrderOutcome:
        """The outcome of the order if it ends now, with or without an error."""
        present = {chunk.key: chunk for chunk in self.fetched if not chunk.dropped}
        dropped = ChunkNotFound("it was fetched, and dropped since")
        failures = {key: self.failures.get(key) or error or dropped for key in self.wanted if key not in present}
        return pb.OrderOutcome(
            order_id=order_id,
            status=rpc.to_status(error) if error else None,
            chunk_count=self._chunk_count + len(present) + (self.hint.chunk_count if self.hint else 0),
            token_count=self._token_count + sum(chunk.token_count for chunk in present.values()),
            transferred_bytes=self.transferred_bytes,
            pinned_chunk_count=self._pinned_count,
            explanation=self.explanation,
            failures=grouped(failures if self.wanted else self.failures),
            hint=self.hint,
        )


def grouped(failures: dict[ChunkKey, LmkvError]) -> list[chunk_pb2.ChunkFailure]:
    """The failures, one message per reason."""
    keys: dict[str, list[bytes]] = {}
    firsts: dict[str, LmkvError] = {}
    for key, error in failures.items():
        keys.setdefault(error.reason, []).append(key)
        firsts.setdefault(error.reason, error)
    return [
        chunk_pb2.ChunkFailure(chunk_keys=keys[reason], status=rpc.to_status(error)) for reason, error in firsts.items()
    ]


MAX_ORDER_KEYS = 32_768
"""Most chunks that one order may name: 512 KiB, so that its outcome always fits into one report."""
MAX_FETCH_SECONDS = 7200.0
"""Longer than any order: a fetch ends with its order."""
MAX_SHOWN = 100
"""Characters of a tier's id in an error."""
DROP_BATCH_CHUNKS = 4096
"""Chunks between two yields to the event loop: a few milliseconds."""


class OrderHost(Protocol):
    """The node as orders see it. Its implementation, `Node`, imports this package: the floor stays."""

    async def explain(self, order: pb.ExplainOrder) -> chunk_pb2.PromptExplanation:
        """Says where a prompt is. Raises `BadChunkKey` and `KvSpecMismatch`."""

    async def carry_out_hint(self, order: pb.HintOrder) -> HintResult:
        """Carries out a hint. Raises nothing but for cancellation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderContext:
    """The parts of one node that orders act on."""

    instance_id: str
    tier: HostTier
    engines: EngineSessions
    fetcher: PeerFetcher | None = None
    """Without it every fetch is refused."""
    tiers: Sequence[SecondaryTier] = ()
    """The tiers that keep chunks for this node."""
    host: OrderHost | None = None
    """Without it every hint, and every order to explain, is refused."""


class OrderExecutor:
    """Executes orders on one node's tiers."""

    def __init__(self, context: OrderContext, pins: Pins, arrivals: Arrivals) -> None:
        self._tier = context.tier
        self._tiers = context.tiers
        self._engines = context.engines
        self._fetcher = context.fetcher
        self._host = context.host
        self._pins = pins
        self._arrivals = arrivals

    async def fetch(self, order: pb.FetchOrder, progress: OrderProgress) -> None:
        """Fetches the `wanted` chunks that the node does not hold from the order's peer; each may fail alone.

        All that are present in the end are held until the outcome is made. Raises `TierUnsupported`, `KvSpecMismatch`
        if no engine of the spec has attached here and others have, `Unreachable` without peers.
        """
        keys = progress.wanted
        check_tier(order.tier)
        spec = self._engines.spec(order.fingerprint) or self._take_over(order)
        if spec is None:
            raise KvSpecMismatch(
                f"no engine of fingerprint {order.fingerprint.hex()} has attached here", field="fingerprint"
            )
        if self._fetcher is None:
            raise Unreachable("this node has no peers; set enable_p2p")

        def on_chunks(chunks: list[tuple[int, Chunk]]) -> None:
            progress.fetched.extend(chunk for _, chunk in chunks)
            progress.transferred_bytes = fetching.result().size_bytes

        needs = Needs(spec=spec, keys=keys, indices=range(len(keys)), in_order=False)
        evict = None if order.keep_others else MissReason.EVICTED_BY_ORDER
        fetching = Progress(self._tier, needs, on_chunks, delivers_in_order=False, evict=evict)
        progress.failures = fetching.failures
        peer = Holder(
            instance_id=order.instance_id,
            epoch=order.epoch,
            peer_address=order.peer_address,
            matched_chunk_count=len(keys),
        )
        try:
            fetched = await self._fetcher.fetch(fetching, [peer], MAX_FETCH_SECONDS)
        finally:
            fetching.close()
        here = {chunk.key for chunk in progress.fetched if not chunk.dropped}
        self._tier.find([key for key in keys if key in here])  # counts as a use: soon this may be the only holder
        rest = fetched.error or ChunkNotFound(f"{order.instance_id} does not hold it", instance_id=order.instance_id)
        for index in fetching.missing:
            progress.failures.setdefault(keys[index], rest)

    def _take_over(self, order: pb.FetchOrder) -> KvSpec | None:
        """The spec of an order, if a node without engines can hold its chunks. Raises `BadKvSpec` if malformed."""
        if not order.HasField("spec") or order.spec.fingerprint != order.fingerprint:
            return None
        spec = KvSpec.from_proto(order.spec)
        return spec if self._engines.take_over(spec) else None

    async def drop(self, order: pb.DropOrder, progress: OrderProgress) -> None:
        """Drops the chunks that the order selects, in every tier unless it names one; pinned chunks stay unless wrong.

        A pin keeps a chunk in memory only: an order that names a deeper tier drops it there. Chunks in the remote tier
        are dropped for all instances that share it. Raises `BadMessage`, `BadChunkKey`, `TierUnsupported`, and
        `Unreachable` if the remote store fails.
        """
        if not (order.chunk_keys or order.fingerprint or order.all):
            raise BadMessage("an order to drop selects by chunk_keys, by fingerprint, or all")
        everywhere = not order.tier
        tiers = [tier for tier in self._tiers if everywhere or tier.name == order.tier]
        in_memory = everywhere or not tiers
        if in_memory:
            check_tier(order.tier)
        keys = list(dict.fromkeys(order_keys(order.chunk_keys)))
        if order.wrong:
            keys = self._with_those_behind(keys)
        named = self._without_arrived(order, keys, progress)
        if order.chunk_keys and not named:
            return
        for tier in tiers:
            if tier.is_local:
                dropped = await tier.drop(self._selection(order, named, everywhere=everywhere))
                progress.count_dropped(dropped)
        if in_memory:
            await self._drop_from_memory(order, named, progress)
        for tier in tiers:
            if not tier.is_local:  # counted only if the order names the tier: it is not this instance's alone
                dropped = await tier.drop(self._selection(order, named))
                if not everywhere:
                    progress.count_dropped(dropped)

    def _with_those_behind(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys, and those of all chunks in memory and on disk that are behind these in their prompts."""
        children: dict[ChunkKey, list[ChunkKey]] = {}
        for tier in (self._tier, *self._tiers):
            for chunk in tier if isinstance(tier, Iterable) else ():
                if chunk.parent is not None:
                    children.setdefault(chunk.parent, []).append(chunk.key)
        found = dict.fromkeys(keys)
        waiting = list(keys)
        while waiting:
            behind = [key for key in children.get(waiting.pop(), ()) if key not in found]
            found |= dict.fromkeys(behind)
            waiting += behind
        return list(found)

    def _without_arrived(self, order: pb.DropOrder, named: list[ChunkKey], progress: OrderProgress) -> list[ChunkKey]:
        """The named chunks without those that have arrived since the order's `fetch_serial`, which fail."""
        if not order.fetch_serial:
            return named
        arrived = self._arrivals.since(order.fetch_serial, named)
        stays = ChunkArrived("another operation has brought it here since the move began; it stays")
        progress.failures.update((key, stays) for key in named if key in arrived)
        return [key for key in named if key not in arrived]

    def _selection(self, order: pb.DropOrder, named: Sequence[ChunkKey], *, everywhere: bool = False) -> Selection:
        """Returns what a tier drops. With `everywhere` chunks in memory are counted there, and pinned chunks stay."""
        return Selection(
            keys=named,
            fingerprint=order.fingerprint,
            specs=[spec.fingerprint for spec in self._engines.specs],
            kept={chunk.key for chunk in self._tier if chunk.pins} if everywhere and not order.wrong else (),
            counted={chunk.key for chunk in self._tier} if everywhere else (),
            dry_run=order.dry_run,
        )

    async def _drop_from_memory(self, order: pb.DropOrder, named: Sequence[ChunkKey], progress: OrderProgress) -> None:
        chunks = [self._tier.get(key) for key in named] if named else list(self._tier)
        for start in range(0, len(chunks), DROP_BATCH_CHUNKS):
            if start:
                await asyncio.sleep(0)
            batch = [chunk for chunk in chunks[start : start + DROP_BATCH_CHUNKS] if chunk and not chunk.dropped]
            if named:  # chunks may have arrived since the order began
                staying = set(self._without_arrived(order, [chunk.key for chunk in batch], progress))
                batch = [chunk for chunk in batch if chunk.key in staying]
            selected = [chunk for chunk in batch if order.fingerprint in (b"", chunk.fingerprint)]
            free = [chunk for chunk in selected if not chunk.pins or order.wrong]
            if named:
                pinned = ChunkPinned("it is pinned; unpin it first")
                progress.failures.update((chunk.key, pinned) for chunk in selected if chunk not in free)
            if not order.dry_run:
                reason = MissReason.DAMAGED if order.wrong else MissReason.DROPPED if named else MissReason.CLEARED
                self._tier.drop([chunk.key for chunk in free], reason)
            progress.count(free, kept_count=len(selected) - len(free))

    async def explain(self, order: pb.ExplainOrder, progress: OrderProgress) -> None:
        """Explains where a prompt is. Raises `BadMessage` if the node cannot, `BadChunkKey`, `KvSpecMismatch`."""
        if self._host is None:
            raise BadMessage("this node explains no misses", field="explain")
        progress.explanation = await self._host.explain(order)

    def pin(self, order: pb.PinOrder, progress: OrderProgress) -> None:
        """Pins the head of the order's chunks. Raises `TierUnsupported`, `BadChunkKey`, and what `Pins.pin` raises."""
        check_tier(order.tier)
        keys = order_keys(order.chunk_keys)
        pin = self._pins.pin(order.pin_id, keys, time.monotonic(), order.ttl.ToNanoseconds() / 1e9)
        progress.count(pin.kept)

    def unpin(self, order: pb.UnpinOrder, progress: OrderProgress) -> None:
        """Ends a pin; is idempotent. Raises `PinNotFound`."""
        pin = self._pins.unpin(order.pin_id)
        progress.count(pin.kept if pin else ())


def new_progress(order: pb.Order) -> OrderProgress:
    """The progress of an order that has not started. Raises `BadChunkKey`."""
    return OrderProgress(wanted=list(dict.fromkeys(order_keys(order.fetch.chunk_keys))))


def order_keys(packed: bytes) -> list[ChunkKey]:
    """The keys that an order names. Raises `BadChunkKey`."""
    return split_keys(packed, limit=MAX_ORDER_KEYS)


def check_tier(tier: str) -> None:
    """Raises `TierUnsupported` unless this is the host tier, or none is named."""
    if tier not in ("", HOST):
        raise TierUnsupported(
            f"not in tier {tier[:MAX_SHOWN]!r}: this node fetches chunks into {HOST!r}, and pins them there",
            tier=tier[:MAX_SHOWN],
        )
