"""All that the host tier is filled from: a handoff first, then secondary tiers in their order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

from lmkv.errors import LmkvError
from lmkv.misses import MissReason
from lmkv.prompt import Prompt
from lmkv.spec import KvSpec
from lmkv_server.node.cache.events import Losses, PartialChunks
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.handoff.device_buffer import DeviceBuffers
from lmkv_server.node.handoff.receiver import HandoffReceiver
from lmkv_server.node.lookup.found import Diagnosis, Found
from lmkv_server.node.lookup.lookup import PromptLookup
from lmkv_server.node.sessions.session import HOLD_SHARE
from lmkv_server.node.tiers.base import Loaded, Needs, OnChunks, Presence, Progress, SecondaryTier, Selection

logger = logging.getLogger(__name__)

UNBOUNDED_BYTES = 1 << 62
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
        self.tier = tier
        self.tiers = tiers
        self._receiver = receiver
        self._partial_chunks = PartialChunks() if partial_chunks is None else partial_chunks
        self.diagnosis = Diagnosis(tier, tiers, Losses() if losses is None else losses)
        """Says why chunks are missed."""
        self._clearing: Counter[bytes] = Counter()
        self.stopped: set[bytes] = set()
        """Fingerprints of specs of which nothing is stored or found any more."""
        self._background: set[asyncio.Task[object]] = set()
        self._load_count = 0

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
        """Counts the chunks from `first` on, of `total`, that a handoff may send; and names their instance."""
        return self._receiver.promised(handoff_id, first, total) if handoff_id and self._receiver else (0, "")

    # --- Tiers ---------------------------------------------------------------------------------------------------

    @property
    def has_peers(self) -> bool:
        """Whether other nodes can read chunks of this one."""
        return self._receiver is not None

    @property
    def usable(self) -> bool:
        """Whether any tier can be asked."""
        return any(tier.usable for tier in self.tiers)

    @property
    def is_loading(self) -> bool:
        """Whether chunks are being loaded."""
        return self._load_count > 0

    def begin(self, prompt: Prompt, most_bytes: int) -> PromptLookup:
        """Begins a lookup of a prompt, in the pool; the items of its hit are to have at most `most_bytes`."""
        if prompt.spec.fingerprint in self.stopped:
            most_bytes = 0
        return PromptLookup(self.tier, self._partial_chunks, prompt, most_bytes)

    async def ask(self, lookup: PromptLookup, tokens_per_second: float = 0.0, *, deadline: float | None = None) -> None:
        """Asks the tiers for items of longer hits than the pool has.

        Each within a time of its own, or until the `deadline`, by `time.monotonic()`, if that is later. Hits that take
        longer to bring than to compute are left out, if the engine's prefill rate is known. Raises nothing.
        """
        if not self._clearing[lookup.prompt.spec.fingerprint]:
            await lookup.ask(self.tiers, tokens_per_second, deadline=deadline)

    async def find(self, prompt: Prompt) -> Found:
        """The longest hit of a prompt in pool and tiers. Holds nothing, and raises nothing.

        Of a hit that is only of use as a whole: one that an engine can load.
        """
        most_bytes = self.tier.size_bytes // HOLD_SHARE
        lookup = self.begin(prompt, UNBOUNDED_BYTES if prompt.spec.matches_prefixes else most_bytes)
        if not lookup.is_complete and self.usable:
            await self.ask(lookup)
        return lookup.result()

    async def load(
        self,
        found: Found,
        wanted: range,
        timeout_seconds: float,
        on_chunks: OnChunks,
        handoff_id: str = "",
    ) -> Loaded:
        """Loads items of a hit into host memory, by their indices.

        `on_chunks` gets the chunks in their order, each with a hold that the callee ends. A tier is asked again only
        about items that the lookup did not ask it for. Raises nothing but for cancellation.
        """
        began = time.monotonic()
        items = found.items
        keys = items.keys if wanted.stop >= len(items) else items.keys[: wanted.stop]
        in_order = items.spec.matches_prefixes  # items of other specs come from several tiers, in any order
        indices = range(wanted.start, len(keys))
        needs = Needs(spec=items.spec, keys=keys, indices=indices, in_order=in_order, items=items)
        progress = Progress(self.tier, needs, on_chunks)
        error: LmkvError | None = None
        self._load_count += 1
        try:
            if handoff_id and self._receiver:
                await self._receiver.follow(handoff_id, progress, timeout_seconds)
            for at, tier in enumerate(self.tiers):
                progress.find_own()
                seconds = timeout_seconds - (time.monotonic() - began)
                if not progress.missing or seconds <= 0:
                    break
                presence = await self._presence(tier, found, progress)
                if not presence.indices:
                    continue
                if handoff_id and presence.source:
                    seconds = min(seconds, REST_SECONDS)
                if not tier.is_local and any(later.usable for later in self.tiers[at + 1 :]):
                    seconds /= 2
                error = await tier.read(progress, presence, seconds) or error
        finally:
            self._load_count -= 1
            progress.close()
        return progress.result(error)

    def clear(self, fingerprint: bytes, *, shared: bool = True) -> Coroutine[None, None, int]:
        """Drops every chunk of one spec that is not pinned. From the call on none is found.

        The result is the number of chunks that the node itself held; it is known once its own tiers have dropped them.
        `shared`: also from stores that nodes share.
        """
        dropped = {chunk.key for chunk in self.tier if chunk.fingerprint == fingerprint and not chunk.pins}
        kept = {chunk.key for chunk in self.tier if chunk.pins}
        self.tier.drop(dropped, MissReason.CLEARED)
        self._clearing[fingerprint] += 1
        selection = Selection(fingerprint=fingerprint, kept=kept, counted=dropped)
        return self._clear_tiers(selection, len(dropped), shared=shared)

    def stop(self, fingerprint: bytes) -> None:
        """Begins to drop the chunks of a spec, except those of shared stores; finds nothing of it from now on."""
        self.stopped.add(fingerprint)
        self._clearing[fingerprint] += 1
        self._begin(self.clear(fingerprint, shared=False))

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
            for tier in self.tiers:
                if tier.is_local:
                    chunk_count += await self._drop(tier, selection)
                elif shared:
                    self._begin(self._drop(tier, selection))
        finally:
            self._clearing[selection.fingerprint] -= 1
        return chunk_count

    async def _drop(self, tier: SecondaryTier, selection: Selection) -> int:
        """Returns how many chunks the tier has dropped; 0 if it fails."""
        try:
            return (await tier.drop(selection)).chunk_count
        except LmkvError as error:
            logger.warning("%s: %s", tier.name, error)
            return 0

    async def _presence(self, tier: SecondaryTier, found: Found, progress: Progress) -> Presence:
        """Finds the missing chunks that the tier holds: as the lookup has, or by asking now about others."""
        missing = sorted(progress.missing)
        known = found.presence(tier.name)
        if known is not None and missing[0] in known.asked:
            return known
        return await tier.lookup(replace(progress.needs, indices=missing))
