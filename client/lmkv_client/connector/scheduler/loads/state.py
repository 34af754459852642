"""One running load: from extents in the pool to the pages of one request."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.misses import MissReason
from lmkv.telemetry import NO_SPAN, Span
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.messages import ExtentChecksum, LoadPlan, LoadResult
from lmkv_client.connector.scheduler.loads.items import LoadItems
from lmkv_client.engine.prompts.hit_sources import HitSources
from lmkv_client.engine.prompts.prompt_account import PromptAccount
from lmkv_kernels import ChunkCopy

POOL = 0
"""The region of extents in the pool; other regions are in the device buffer, where chunks were verified on arrival."""
NO_SOURCES = HitSources()


class LoadState:
    """Tokens `[start, end)` of a request, going into the pages of that request.

    "Items" are here its chunks, or the items of its hit where chunks have several parts.
    """

    def __init__(
        self,
        *,
        request_id: str,
        lookup_id: str,
        start: int,
        end: int,
        items: LoadItems,
        chunk_size: int,
        sync: bool,
        started_at: float,
        deadline: float,
        waited_seconds: float = 0.0,
        sources: HitSources = NO_SOURCES,
        verify: bool = False,
        span: Span = NO_SPAN,
        account: PromptAccount | None = None,
    ) -> None:
        """`account` is corrected if the load brings less than asked for; None if it is fixed already."""
        self.request_id = request_id
        self.lookup_id = lookup_id
        self.start = start
        self.end = end
        self.sync = sync
        self.started_at = started_at
        self.deadline = deadline
        self.waited_seconds = waited_seconds
        """Time that the request had waited for its lookup when the load began."""
        self.span = span
        """The span of the load; `Loads` ends it."""
        self.account = account
        self.failure = MissReason.LOAD_FAILED
        """Why items that did not arrive did not."""
        self.peer_id = ""
        self.arrived_tokens = 0
        self.items = items
        self.final_sent = False
        self.copied = LoadResult()
        """The summed results of the ranks that are done."""
        self._chunk_size = chunk_size
        self._sources = sources
        self._missing = set(items.wanted)
        self._verify = verify
        self._ready: dict[int, tuple[list[ChunkCopy], HeldChunk]] = {}
        """By item: arrived and not yet in a plan."""
        self._closed = False

    def add_chunks(self, first: int, chunks: Sequence[HeldChunk]) -> None:
        """Adds arrived items, from `first` on. A chunk that does not fit its item ends the load."""
        for index, chunk in enumerate(chunks, first):
            if index in self._missing and not self._closed:
                copies = self.items.copies(index, chunk)
                if copies is None:
                    self.close()
                    return
                self._missing.discard(index)
                self._ready[index] = copies, chunk
                self.arrived_tokens += self.items.token_count(index, chunk)

    def tokens_by_tier(self, token_count: int) -> dict[str, int]:
        """Where the load's first `token_count` tokens were at the lookup, by tier. Chunks arrive in prompt order."""
        return self._sources.tokens(self.start, self.start + token_count, self._chunk_size)

    @property
    def tier_behind(self) -> str:
        """The tier that had the token behind those that have arrived; empty if there is none."""
        return self._sources.tier_at(self.start + self.arrived_tokens, self._chunk_size)

    def close(self) -> None:
        """Ends the wait: what has not arrived counts as lost."""
        self._closed = True

    def node_lost(self) -> None:
        """Ends the wait, and discards extents that are not yet in a plan: they are not valid in the next pool."""
        self._missing |= self._ready.keys()
        self.arrived_tokens -= sum(self.items.token_count(index, chunk) for index, (_, chunk) in self._ready.items())
        self._ready.clear()
        self.failure = MissReason.NODE_LOST
        self.close()

    def discard(self) -> None:
        """Ends the wait; nothing that was or will be copied is of use."""
        self._missing.update(self.items.wanted)
        self.arrived_tokens = 0
        self._ready.clear()
        self.close()

    @property
    def waits(self) -> bool:
        """Whether items may still arrive."""
        return not self._closed and not self.complete

    @property
    def complete(self) -> bool:
        """Whether every wanted item has arrived."""
        return not self._missing

    def take(self) -> LoadPlan | None:
        """The next plan for the workers; None if there is nothing new."""
        final = not self.final_sent and (self._closed or self.complete)
        if not self._ready and not final:
            return None
        ready, self._ready = list(self._ready.values()), {}
        pooled = [one for one in ready if one[1].extent.region == POOL]
        self.final_sent |= final
        return LoadPlan(
            request_id=self.request_id,
            copies=[copy for copies, _ in pooled for copy in copies],
            buffered=[copy for copies, chunk in ready if chunk.extent.region != POOL for copy in copies],
            sync=self.sync,
            final=final,
            checks=[check(chunk) for _, chunk in pooled] if self._verify else [],
            failed_blocks=self.items.blocks(self._missing) if final else [],
            failed=final and self.items.all_or_none and bool(self._missing),
        )


def check(chunk: HeldChunk) -> ExtentChecksum:
    """The checksum to compare a chunk's extent with."""
    extent = chunk.extent
    return ExtentChecksum(offset=extent.offset, size_bytes=extent.size_bytes, checksum=chunk.checksum)
