"""Chunks that the workers write, until every rank has reported its share."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmkv.keys import ChunkKey
from lmkv_client.connector.messages import StoreResult, WorkerReport
from lmkv_client.connector.scheduler.events import ChunkBlocks
from lmkv_client.connector.scheduler.request_state import RequestState
from lmkv_client.engine.write_credits import WriteCredits


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStore:
    """One part of a chunk that the workers write."""

    state: RequestState
    part: int
    key: ChunkKey
    """Of the chunk."""
    parent: bytes
    """Key of the chunk before it. Of the first: empty, or the root of the key chain if it is a partial chunk."""
    superseded: bytes
    """Key of an earlier chunk whose part is needed less once this one is stored, or of a partial chunk with which this
    one begins; empty if there is none."""
    prefix_digests: bytes
    """`lmkv.keys.prefix_digests` of a chunk in which a prompt or an answer has ended; otherwise empty."""
    index: int
    token_count: int
    """Fewer than a chunk's: it is a partial chunk."""
    blocks: ChunkBlocks
    """Its blocks, for KV events when it is committed; empty if it has none."""
    source: WriteCredits
    """The credits from which its extent was taken."""
    result: StoreResult = field(default_factory=StoreResult)
    """What the ranks have reported so far: copies of several megabytes end in a later step, not at the same time."""


class PendingStores:
    """The pending stores of one engine, by offset of their extent. An extent is not used again while a rank may write
    to it."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._stores: dict[int, PendingStore] = {}
        self._discarded: set[int] = set()
        """Offsets of stores that are not committed."""

    def __len__(self) -> int:
        return len(self._stores)

    def has_any_of(self, state: RequestState) -> bool:
        """Whether workers still write chunks of this request."""
        return any(store.state is state for store in self._stores.values())

    def add(self, offset: int, store: PendingStore) -> None:
        """Adds a store of this step's plan, which the workers write."""
        self._stores[offset] = store

    def handle_report(self, report: WorkerReport) -> tuple[dict[int, PendingStore], list[PendingStore]]:
        """Removes the stores that every rank has reported now.

        Returns those that all ranks have written, by offset, whose credits count as committed; and those that some
        rank has not written or that were discarded, whose credits are available again.
        """
        written, failed = dict[int, PendingStore](), list[PendingStore]()
        for offset, result in report.stores.items():
            if (store := self._stores.get(offset)) is None:
                continue
            store.result.add(result)
            if store.result.rank_count < self._rank_count:
                continue
            del self._stores[offset]
            if store.result.failed or offset in self._discarded:
                self._discarded.discard(offset)
                store.source.return_unwritten(offset)
                failed.append(store)
            else:
                store.source.commit()
                written[offset] = store
        return written, failed

    @property
    def states(self) -> set[RequestState]:
        """The requests of which workers write chunks."""
        return {store.state for store in self._stores.values()}

    def discard(self, state: RequestState | None = None) -> None:
        """Commits nothing of what the workers write now, or only of this request."""
        self._discarded |= {offset for offset, store in self._stores.items() if state in (None, store.state)}

    def take_all(self) -> list[PendingStore]:
        """Removes and returns all: their extents are lost with the node."""
        stores = list(self._stores.values())
        self._stores.clear()
        self._discarded.clear()
        return stores
