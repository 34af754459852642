"""One running load: from extents in the pool to the pages of one request."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.telemetry import NO_SPAN, Span
from lmkv.v1.chunk_pb2 import Extent
from lmkv_client.connector.messages import ExtentChecksum, LoadPlan, LoadResult
from lmkv_client.connector.scheduler.block_copies import blocks_of, prompt_copy
from lmkv_client.connector.scheduler.hit_sources import HitSources
from lmkv_kernels import ChunkCopy

POOL = 0
"""The region of extents in the pool; other regions are in the device buffer, where chunks were verified on arrival."""
NO_SOURCES = HitSources()


class LoadState:
    """Tokens `[start, end)` of a request, going into the pages `block_ids` of that request.

    chunk      0          1          2
           ┌──────────┬──────────┬──────────┐
    tokens │ ▒▒▒▒▒▒▒▒ │ ▒▒▒▒████ │ ███      │   ▒ vLLM had it: start     █ to load: end
           └──────────┴──────────┴──────────┘
    """

    def __init__(
        self,
        *,
        request_id: str,
        lookup_id: str,
        start: int,
        end: int,
        block_ids: Sequence[int],
        chunk_size: int,
        block_size: int,
        sync: bool,
        started_at: float,
        deadline: float,
        waited_seconds: float = 0.0,
        sources: HitSources = NO_SOURCES,
        verify: bool = False,
        span: Span = NO_SPAN,
    ) -> None:
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
        self.peer_id = ""
        self.arrived_tokens = 0
        self.first_chunk = start // chunk_size
        self.stop_chunk = -(-end // chunk_size)
        self.final_sent = False
        self.copied = LoadResult()
        """The summed results of the ranks that are done."""
        self._block_ids = block_ids
        self._chunk_size = chunk_size
        self._block_size = block_size
        self._sources = sources
        self._missing = set(range(self.first_chunk, self.stop_chunk))
        self._verify = verify
        self._ready: dict[int, tuple[ChunkCopy, Extent]] = {}
        """By chunk: arrived and not yet in a plan."""
        self._closed = False

    def add_extents(self, first_chunk: int, extents: Sequence[Extent]) -> None:
        """Adds arrived chunks, from `first_chunk` on, with their extents."""
        for chunk, extent in enumerate(extents, first_chunk):
            if chunk in self._missing and not self._closed:
                self._missing.discard(chunk)
                self._ready[chunk] = self._copy(chunk, extent), extent
                high = min(self.end, chunk * self._chunk_size + extent.token_count)
                self.arrived_tokens += high - self._low(chunk)

    def tokens_by_tier(self, token_count: int) -> dict[str, int]:
        """Where the load's first `token_count` tokens were at the lookup, by tier. Chunks arrive in prompt order."""
        return self._sources.tokens(self.start, self.start + token_count, self._chunk_size)

    def close(self) -> None:
        """Ends the wait: chunks that have not arrived count as lost."""
        self._closed = True

    def node_lost(self) -> None:
        """Ends the wait, and discards extents that are not yet in a plan: they are not valid in the next pool."""
        self._missing |= self._ready.keys()
        self.arrived_tokens -= sum(self._high(chunk) - self._low(chunk) for chunk in self._ready)
        self._ready.clear()
        self.close()

    @property
    def complete(self) -> bool:
        """Whether every wanted chunk has arrived."""
        return not self._missing

    def take(self) -> LoadPlan | None:
        """The next plan for the workers; None if there is nothing new."""
        final = not self.final_sent and (self._closed or self.complete)
        if not self._ready and not final:
            return None
        ready, self._ready = list(self._ready.values()), {}
        pooled = [one for one in ready if one[1].region == POOL]
        self.final_sent |= final
        return LoadPlan(
            request_id=self.request_id,
            copies=[copy for copy, _ in pooled],
            buffered=[copy for copy, extent in ready if extent.region != POOL],
            sync=self.sync,
            final=final,
            checks=[check(extent) for _, extent in pooled] if self._verify else [],
            failed_blocks=self._lost_blocks() if final else [],
        )

    def _low(self, chunk: int) -> int:
        return max(self.start, chunk * self._chunk_size)

    def _high(self, chunk: int) -> int:
        return min(self.end, (chunk + 1) * self._chunk_size)

    def _copy(self, chunk: int, extent: Extent) -> ChunkCopy:
        base = chunk * self._chunk_size
        return prompt_copy(
            self._block_ids,
            self._block_size,
            chunk_start=base,
            low=self._low(chunk),
            high=min(self.end, base + extent.token_count),
            offset=extent.offset,
            extent_tokens=extent.token_count,
        )

    def _lost_blocks(self) -> list[int]:
        lost: dict[int, None] = {}  # two chunks may share a block
        for chunk in sorted(self._missing):
            lost |= dict.fromkeys(blocks_of(self._block_ids, self._block_size, self._low(chunk), self._high(chunk)))
        return list(lost)


def check(extent: Extent) -> ExtentChecksum:
    """The checksum to compare an extent with."""
    return ExtentChecksum(offset=extent.offset, size_bytes=extent.size_bytes, checksum=extent.checksum)
