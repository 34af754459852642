"""Stores in progress: chunks until every rank has written its share, and finished requests until they have credits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lmkv.keys import ChunkKey
from lmkv_client.connector.messages import StoreResult, WorkerReport
from lmkv_client.connector.scheduler.block_copies import BlockIds
from lmkv_client.connector.scheduler.events import ChunkBlocks
from lmkv_client.connector.scheduler.request_state import HeldPart, RequestState
from lmkv_client.engine.write_credits import PartCredits, WriteCredits


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStore:
    """One part of a chunk that the workers write."""

    state: RequestState
    part: int
    key: ChunkKey
    parent: bytes = b""
    """Key of the chunk before it. Of the first: empty, or the root of the key chain if it is a partial chunk."""
    superseded: bytes = b""
    """Key of an earlier chunk whose part is needed less once this one is stored, or of a partial chunk with which this
    one begins; empty if there is none."""
    prefix_digests: bytes = b""
    """`lmkv.keys.prefix_digests` of a chunk in which a prompt or an answer has ended; otherwise empty."""
    index: int
    token_count: int
    """Fewer than a chunk's: it is a partial chunk."""
    blocks: ChunkBlocks = ()
    """Its blocks, for KV events when it is committed; empty if it has none."""
    source: WriteCredits
    """The credits from which its extent was taken."""
    held: HeldPart | None = None
    """The held chunk with which it is compared, if it is an audit; such a store is not committed."""
    result: StoreResult = field(default_factory=StoreResult)
    """The ranks' reports so far: copies of several megabytes end in a later step, and not all in the same."""


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

        Returns those that all ranks have written, by offset, whose credits count as committed unless they were only
        compared; and those that some rank has not written or that were discarded, whose credits are available again.
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
                if store.held:
                    store.source.return_unwritten(offset)
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


WAIT_SECONDS = 1.0
"""Longest time that the pages of a finished request wait for further write credits."""
GRACE_SECONDS = 0.005
"""Time that a step that computes nothing waits for it."""


@dataclass(kw_only=True, slots=True, eq=False)
class EndedRequest:
    """A finished request, and what of it is to be stored."""

    state: RequestState
    full_count: int
    """Full chunks; those behind `state.store.stored_count` are not stored yet."""
    rest_count: int
    """Tokens behind them to store as a partial chunk; 0 if it has none."""
    block_ids: BlockIds
    waits_since: float
    """When it ended, or some of its chunks were last stored."""
    is_discarded: bool = False
    """Whether nothing of it is of use any more."""

    @property
    def missing_count(self) -> int:
        """Full chunks that are not stored yet."""
        return 0 if self.is_discarded else max(0, self.full_count - self.state.store.stored_count)

    @property
    def partial_counts(self) -> list[int]:
        """The tokens of the partial chunk that is to be stored, and of the one that is to be compared."""
        end = self.state.store.held_end
        return [count for count in (self.rest_count, end.token_count if end else 0) if count and not self.is_discarded]

    def awaits_answer(self, own: PartCredits) -> bool:
        """Whether it needs credits that are requested and not there."""
        if self.is_discarded:
            return False
        kinds = [own.partial(token_count) for token_count in self.partial_counts]
        return (len(own[0]) < self.missing_count and own[0].requested_count > 0) or any(
            not len(kind) and kind.requested_count > 0 for kind in kinds
        )

    def awaits_credits(self, own: PartCredits) -> bool:
        """Whether it needs credits that are requested, or can be once chunks that are written now are committed: the
        limit of credits counts those, too."""
        return self.awaits_answer(own) or (len(own[0]) < self.missing_count and own[0].writing_count > 0)


class EndedRequests:
    """The finished requests of one engine, in the order of their ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: list[EndedRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, state: RequestState) -> bool:
        return any(request.state is state for request in self._requests)

    @property
    def missing_count(self) -> int:
        """Full chunks that are to be stored."""
        return sum(request.missing_count for request in self._requests)

    @property
    def partial_counts(self) -> Counter[int]:
        """The partial chunks that are to be stored, or compared, by number of tokens."""
        return Counter(count for one in self._requests for count in one.partial_counts)

    def add(self, state: RequestState, full_count: int, rest_count: int, block_ids: BlockIds) -> None:
        """Adds a request that has just finished."""
        self._requests.append(
            EndedRequest(
                state=state,
                full_count=full_count,
                rest_count=rest_count,
                block_ids=block_ids,
                waits_since=self._clock(),
            )
        )

    def discard(self) -> None:
        """Nothing of these requests is of use any more: `take_ready` returns them at once."""
        for request in self._requests:
            request.is_discarded = True

    def grace_seconds(self, own: PartCredits) -> float:
        """Returns how long a step that computes nothing may still wait for write credits, 0 or less if not at all."""
        waits = [one.waits_since for one in self._requests if one.awaits_answer(own)]
        return max(waits) + GRACE_SECONDS - self._clock() if waits else 0.0

    def with_missing_chunks(self) -> Iterator[EndedRequest]:
        """Yields the requests that lack full chunks. Those of which the caller stores some wait longer for others."""
        for request in self._requests:
            if missing_count := request.missing_count:
                yield request
                if request.missing_count < missing_count:
                    request.waits_since = self._clock()

    def take_ready(self, own: PartCredits) -> Iterator[EndedRequest]:
        """Removes and yields, one by one, the requests that wait for no credits any more, or have waited too long.

        The caller takes the credits of each before it asks for the next one.
        """
        now = self._clock()
        for request in list(self._requests):
            if not request.awaits_credits(own) or now >= request.waits_since + WAIT_SECONDS:
                self._requests.remove(request)
                yield request
