"""Who is told what the tiers of a node gain and lose."""

from __future__ import annotations

from lmkv.v1 import chunk_pb2
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.cache.ledger import Ledger
from lmkv_server.node.fleet.fleet import Fleet
from lmkv_server.node.handoff.senders import Senders
from lmkv_server.node.tiers.disk.chunk import DiskChunk
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.tier import RemoteTier


class Reporting:
    """Tells the fleet, handoffs under way, the deeper tiers and the pool's ledger what the tiers gain and lose."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        self.senders: Senders | None = None
        self.disk: DiskTier | None = None
        self.remote: RemoteTier | None = None
        self.ledger: Ledger | None = None

    def admitted(self, chunk: Chunk) -> None:
        """See `Listener`."""
        if self.ledger:
            self.ledger.put(chunk)
        if self.senders:
            self.senders.admitted(chunk)
        if self.fleet:
            self.fleet.admitted(chunk_pb2.TIER_HOST, chunk.fingerprint, chunk.key, chunk.token_count)
        if self.disk:
            self.disk.writer.admitted(chunk)
        if self.remote:
            self.remote.writer.admitted(chunk)

    def evicted(self, chunk: Chunk) -> None:
        """See `Listener`."""
        if self.ledger:
            self.ledger.drop(chunk.offset)
        if self.fleet:
            self.fleet.evicted(chunk_pb2.TIER_HOST, chunk.fingerprint, chunk.key)
        if self.disk:
            self.disk.writer.evicted(chunk)
        if self.remote:
            self.remote.writer.evicted(chunk)

    def stored(self, chunk: DiskChunk) -> None:
        """See `DiskListener`."""
        if self.fleet:
            self.fleet.admitted(chunk_pb2.TIER_DISK, chunk.fingerprint, chunk.key, chunk.token_count)

    def lost(self, chunk: DiskChunk) -> None:
        """See `DiskListener`."""
        if self.fleet:
            self.fleet.evicted(chunk_pb2.TIER_DISK, chunk.fingerprint, chunk.key)
