"""How far an order came, and the outcome that says so. Pure; filled in by `OrderExecutor`, told by `Orders`."""

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
    """What an order did so far. It is filled in on the way, so that an order that is stopped can tell."""

    wanted: Sequence[ChunkKey] = ()
    """Chunks that shall be here in the end: each of them is in `brought` then, or a failure."""
    brought: list[Chunk] = field(default_factory=list)
    """Chunks that are here for it, each with a hold that ends when the outcome is made."""
    chunk_count: int = 0
    """Other chunks that it was carried out for."""
    token_count: int = 0
    """Tokens in these."""
    transferred_bytes: int = 0
    pinned_count: int = 0
    """Chunks that it would have dropped, had pins not kept them."""
    failures: dict[ChunkKey, LmkvError] = field(default_factory=dict)

    def count(self, chunks: Iterable[Chunk | DiskChunk]) -> None:
        """It was carried out for these chunks."""
        for chunk in chunks:
            self.chunk_count += 1
            self.token_count += chunk.token_count

    def outcome(self, order_id: str, error: LmkvError | None) -> pb.OrderOutcome:
        """The outcome of an order that ended now: by itself, or because of `error`."""
        here = {chunk.key: chunk for chunk in self.brought if not chunk.dropped}
        dropped = ChunkNotFound("it was here and has been dropped again")
        failures = {key: self.failures.get(key) or error or dropped for key in self.wanted if key not in here}
        return pb.OrderOutcome(
            order_id=order_id,
            status=rpc.to_status(error) if error else None,
            chunk_count=self.chunk_count + len(here),
            token_count=self.token_count + sum(chunk.token_count for chunk in here.values()),
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
