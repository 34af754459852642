"""Progress of an order, and the outcome that reports it. Updated by `OrderExecutor`, read by `OrderRunner`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lmkv import rpc
from lmkv.errors import ChunkNotFound, LmkvError
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey
from lmkv.v1 import chunk_pb2
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.base import Dropped


@dataclass(kw_only=True, slots=True)
class OrderProgress:
    """What an order has done so far. Updated while it runs, so that the outcome of a stopped order is exact."""

    wanted: Sequence[ChunkKey] = ()
    """Chunks to fetch: in the end each is in `fetched` or in `failures`."""
    fetched: list[Chunk] = field(default_factory=list)
    """Chunks of `wanted` that the host tier has, each with a hold that `OrderRunner` ends."""
    transferred_bytes: int = 0
    explanation: chunk_pb2.PromptExplanation | None = None
    """Answer to an `ExplainOrder`."""
    failures: dict[ChunkKey, LmkvError] = field(default_factory=dict)
    hint: chunk_pb2.HintResult | None = None
    """How a hint ended."""
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
