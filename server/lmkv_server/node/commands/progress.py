"""Progress of an order, and the outcome that reports it. Updated by `OrderExecutor`, read by `OrderRunner`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lmkv import rpc
from lmkv.errors import ChunkNotFound, LmkvError
from lmkv.keys import ChunkKey
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.disk.chunk import DiskChunk


@dataclass(kw_only=True, slots=True)
class OrderProgress:
    """What an order has done so far. Updated while it runs, so that the outcome of a stopped order is exact."""

    wanted: Sequence[ChunkKey] = ()
    """Chunks to fetch: in the end each is in `fetched` or in `failures`."""
    fetched: list[Chunk] = field(default_factory=list)
    """Chunks of `wanted` that the host tier has, each with a hold that `OrderRunner` ends."""
    chunk_count: int = 0
    """Other chunks that the order was executed for."""
    token_count: int = 0
    """Their tokens."""
    transferred_bytes: int = 0
    pinned_count: int = 0
    """Chunks that a drop kept because they are pinned."""
    failures: dict[ChunkKey, LmkvError] = field(default_factory=dict)

    def count(self, chunks: Iterable[Chunk | DiskChunk]) -> None:
        """Adds chunks that the order was executed for."""
        for chunk in chunks:
            self.chunk_count += 1
            self.token_count += chunk.token_count

    def outcome(self, order_id: str, error: LmkvError | None) -> pb.OrderOutcome:
        """The outcome of the order if it ends now, with or without an error."""
        present = {chunk.key: chunk for chunk in self.fetched if not chunk.dropped}
        dropped = ChunkNotFound("it was fetched, and dropped since")
        failures = {key: self.failures.get(key) or error or dropped for key in self.wanted if key not in present}
        return pb.OrderOutcome(
            order_id=order_id,
            status=rpc.to_status(error) if error else None,
            chunk_count=self.chunk_count + len(present),
            token_count=self.token_count + sum(chunk.token_count for chunk in present.values()),
            transferred_bytes=self.transferred_bytes,
            pinned_chunk_count=self.pinned_count,
            failures=grouped(failures if self.wanted else self.failures),
        )


def grouped(failures: dict[ChunkKey, LmkvError]) -> list[chunk_pb2.ChunkFailure]:
    """The failures, one message per reason."""
    keys: dict[str, bytearray] = {}
    firsts: dict[str, LmkvError] = {}
    for key, error in failures.items():
        keys.setdefault(error.reason, bytearray()).extend(key)
        firsts.setdefault(error.reason, error)
    return [
        chunk_pb2.ChunkFailure(chunk_keys=bytes(keys[reason]), status=rpc.to_status(error))
        for reason, error in firsts.items()
    ]
