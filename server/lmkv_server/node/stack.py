"""All that the host tier is filled from: a handoff first, then secondary tiers in their order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.spec import KvSpec
from lmkv.tiers import Run
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.losses import Losses
from lmkv_server.node.cache.partial_chunks import PartialChunks, PromptTokens
from lmkv_server.node.handoff.device_buffers import DeviceBuffers
from lmkv_server.node.handoff.receiver import HandoffReceiver
from lmkv_server.node.sessions.extents import MAX_EXTENTS
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier, Selection, deadline_at
from lmkv_server.node.tiers.diagnosis import Diagnosis
from lmkv_server.node.tiers.hit import Hit
from lmkv_server.node.tiers.item_lookup import ItemLookup
from lmkv_server.node.tiers.progress import Loaded, OnChunks, Progress
from lmkv_server.node.tiers.tail_lookup import TailLookup

logger = logging.getLogger(__name__)

REST_SECONDS = 1.0
"""Most time to fetch from other instances what a handoff did not send."""


class TierStack:
    """The sources of one node's host tier. One event loop owns it."""

    def __init__(
        self,
        tier: HostTier,
        tiers: Sequence[SecondaryTier],
        receiver: HandoffReceiver | None = None,
        partial_chunks: PartialChunks | None = None,
        losses: Losses | None = None,
    ) -> None:
        """`tiers` in the order in which they are asked; `receiver` has the handoffs of a node with peers.

        `partial_chunks` has those of the pool and of the disk; `losses` are those of the pool and all tiers.
        """
        self._tier = tier
        self._tiers = tiers
        self._receiver = receiver
        self._partial_chunks = PartialChunks() if partial_chunks is None else partial_chunks
        self.diagnosis = Diagnosis(tier, tiers, Losses() if losses is None else losses)
        """Says why chunks are missed."""
        self._clearing: Counter[bytes] = Counter()
        self._background: set[asyncio.Task[object]] = set()

    # --- Handoffs ------------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> DeviceBuffers | None:
        """The device buffers that engines have lent; None if the node has no peers."""
        return self._receiver.buffers if self._receiver else None

    def claim(self, handoff_id: str, engine_id: str) -> Callable[[], None] | None:
        """Notes that a request waits for a handoff; the result, if any, is to be called when it is released."""
        return self._receiver.claim(handoff_id, engine_id) if handoff_id and self._receiver else None

    def drop_handoff(self, handoff_id: str) -> None:
        """Ends a handoff that no request of an engine here will load."""
        if self._receiver:
            self._receiver.drop(handoff_id)

    def promised(self, handoff_id: str, first: int, total: int) -> tuple[int, str]:
        """How many chunks from `first` on, of a prompt of `total`, a handoff may send, and the instance that does."""
        return self._receiver.promised(handoff_id, first, total) if handoff_id and self._receiver else (0, "")

    # --- Tiers ---------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether any tier can be asked."""
        return any(tier.usable for tier in self._tiers)

    async def lookup(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        first: int,
        limit: int | None = None,
        *,
        root: ChunkKey | None = None,
        deadline: float | None = None,
    ) -> Hit:
        """Which tiers hold the chunks of a prompt from `first` on without a gap, at most `limit` of them.

        Each tier is asked for what those before it do not hold, within a time of its own, or until the `deadline`, by
        `time.monotonic()`, if that is later. With the `root` of the key chain, the presences have `partial_lengths`.
        Raises nothing.
        """
        runs: list[Run] = []
        presences: dict[str, Presence] = {}
        end = len(keys) if limit is None else min(len(keys), first + limit)
        if self._clearing[spec.fingerprint]:
            return Hit()
        for at, tier in enumerate(self._tiers):
            if first >= end:
                break
            if not tier.usable:
                continue
            until = deadline_at(self._tiers, at, deadline)
            needs = Needs(spec=spec, keys=keys, indices=range(first, len(keys)), root=root, deadline=until)
            presence = await tier.lookup(needs)
            presences[tier.name] = presence
            if count := min(presence.run_from(first), end - first):
                runs.append(Run(tier=tier.name, chunk_count=count))
                first += count
        return Hit(runs=tuple(runs), presences=presences)

    def begin_tail(self, spec: KvSpec, prompt: PromptTokens, keys: Sequence[ChunkKey], end: int) -> TailLookup:
        """Begins a lookup of the tail of a hit that ends before chunk `end` of `keys`, in the pool."""
        return TailLookup(self._tier, self._partial_chunks, spec, prompt, keys, end)

    async def ask_for_tail(
        self,
        lookup: TailLookup,
        spec: KvSpec,
        hit: Hit,
        tokens_per_second: float,
        *,
        deadline: float | None = None,
    ) -> None:
        """Asks the tiers for a longer tail of the `hit` than the pool has; `deadline` as for `lookup`.

        Raises nothing.
        """
        if not self._clearing[spec.fingerprint]:
            await lookup.ask(self._tiers, hit, tokens_per_second, deadline=deadline)

    def begin_items(self, spec: KvSpec, chunk_keys: Sequence[ChunkKey]) -> ItemLookup:
        """Begins a lookup of a prompt whose chunks have several parts, in the pool."""
        return ItemLookup(self._tier, spec, chunk_keys, MAX_EXTENTS)

    async def ask_for_items(self, lookup: ItemLookup, budget_bytes: int, *, deadline: float | None = None) -> None:
        """Asks the tiers for items of longer hits than the pool has within the budget; `deadline` as for `lookup`.

        Raises nothing.
        """
        if not self._clearing[lookup.spec.fingerprint]:
            await lookup.ask(self._tiers, budget_bytes, deadline=deadline)

    def without_slow(self, hit: Hit, spec: KvSpec, tokens_per_second: float) -> tuple[Hit, tuple[Run, ...]]:
        """The runs before the first that takes longer to load than to compute, and the others.

        A run whose time is not known is kept, and so are all if the engine's prefill rate is not known.
        """
        for at, run in enumerate(hit.runs if tokens_per_second > 0 else ()):
            presence = hit.presences[run.tier]
            seconds = self._named(run.tier).expected_seconds(presence, run.chunk_count * spec.chunk_bytes)
            if seconds is not None and seconds > run.chunk_count * spec.chunk_size / tokens_per_second:
                dropped = [late.tier for late in hit.runs[at:]]
                known = {
                    name: Presence(asked=presence.asked) if name in dropped else presence
                    for name, presence in hit.presences.items()
                }
                return Hit(runs=hit.runs[:at], presences=known), hit.runs[at:]
        return hit, ()

    async def load(
        self,
        hit: Hit,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        first: int,
        timeout_seconds: float,
        on_chunks: OnChunks,
        handoff_id: str = "",
        *,
        root: ChunkKey | None = None,
    ) -> Loaded:
        """Loads `keys[first:]` into host memory; `hit` is what a lookup of the prompt, or a part of it, found.

        `root` is the root of the key chain, if that is known.

        `on_chunks` gets the chunks in their order, by index in `keys`, each with a hold that the callee ends. A tier is
        asked again only about chunks that the lookup did not ask it for. Raises nothing but for cancellation.
        """
        began = time.monotonic()
        progress = Progress(self._tier, spec, keys, first, on_chunks, items=hit.items, root=root)
        error: LmkvError | None = None
        try:
            if handoff_id and self._receiver:
                await self._receiver.follow(handoff_id, progress, timeout_seconds)
            for at, tier in enumerate(self._tiers):
                progress.find_own()
                seconds = timeout_seconds - (time.monotonic() - began)
                if not progress.missing or seconds <= 0:
                    break
                presence = await self._presence(tier, hit, progress)
                if not presence.indices:
                    continue
                if handoff_id and presence.source:
                    seconds = min(seconds, REST_SECONDS)
                if not tier.is_local and any(later.usable for later in self._tiers[at + 1 :]):
                    seconds /= 2
                error = await tier.read(progress, presence, seconds) or error
        finally:
            progress.close()
        return progress.result(error)

    def clear(self, fingerprint: bytes, *, shared: bool = True) -> Coroutine[None, None, int]:
        """Drops every chunk of one spec that is not pinned. From the call on none is found.

        The result is the number of chunks that the node itself held; it is known once its own tiers have dropped them.
        `shared`: also from stores that nodes share.
        """
        dropped = {chunk.key for chunk in self._tier if chunk.fingerprint == fingerprint and not chunk.pins}
        kept = {chunk.key for chunk in self._tier if chunk.pins}
        self._tier.drop(dropped, MissReason.CLEARED)
        self._clearing[fingerprint] += 1
        selection = Selection(fingerprint=fingerprint, kept=kept, counted=dropped)
        return self._clear_tiers(selection, len(dropped), shared=shared)

    def forget(self, spec: KvSpec) -> None:
        """Begins to drop the chunks of a spec that no engine of this node will use; shared stores keep those of a spec
        that engines of other nodes may have."""
        self._begin(self.clear(spec.fingerprint, shared=spec.is_private))

    def _begin(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _clear_tiers(self, selection: Selection, chunk_count: int, *, shared: bool) -> int:
        try:
            for tier in self._tiers:
                if tier.is_local:
                    chunk_count += (await tier.drop(selection)).chunk_count
                elif shared:
                    self._begin(self._drop(tier, selection))
        finally:
            self._clearing[selection.fingerprint] -= 1
        return chunk_count

    async def _drop(self, tier: SecondaryTier, selection: Selection) -> None:
        try:
            await tier.drop(selection)
        except LmkvError as error:
            logger.warning("%s: %s", tier.name, error)

    async def _presence(self, tier: SecondaryTier, hit: Hit, progress: Progress) -> Presence:
        """What the tier holds of the missing chunks: as the lookup found, or asked now if that was about others."""
        missing = sorted(progress.missing)
        known = hit.presences.get(tier.name)
        if known is not None and missing[0] in known.asked:
            return known
        return await tier.lookup(
            Needs(
                spec=progress.spec,
                keys=progress.keys,
                indices=missing,
                in_order=progress.stops_at_gap,
                items=progress.items,
            )
        )

    def _named(self, name: str) -> SecondaryTier:
        return next(tier for tier in self._tiers if tier.name == name)
