"""One entry of a shard's log: what a coordinator tells the others of an instance. Pure."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from lmkv.digests import Digest
from lmkv_server.coordinator.layout_store.content import Change
from lmkv_server.coordinator.layout_store.owner import Owner

MAX_ENTRY_BYTES = 65_536
"""What is longer is not told but loaded: the log shall stay small."""
READ_ENTRIES = 256
"""Most that one call brings."""

Position = tuple[int, int]
"""Where an entry is in its log; the first one is after (0, 0)."""


class EntryKind(IntEnum):
    """What happened."""

    CHANGES = 1
    """Chunks came and went, and then these were the digests."""
    COMPLETE = 2
    """The snapshot of this term is in."""
    RELOAD = 3
    """So many chunks came and went that they are better loaded."""
    GONE = 4
    """The instance left, or its lease ended."""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """What happened to an instance; a term is one stream of reports, and a later one has a higher term."""

    kind: EntryKind
    tenant: str
    instance_id: str
    epoch: int
    term: int
    changes: list[Change] = []
    digests: list[tuple[int, int, int]] = []
    """Tier, chunks and sum of keys."""

    @property
    def owner(self) -> Owner:
        """Whose chunks they are."""
        return Owner(self.tenant, self.instance_id)

    def digest_by_tier(self) -> dict[int, Digest]:
        """The digests, as the layout map has them."""
        return {tier: Digest(chunk_count=count, key_sum=key_sum) for tier, count, key_sum in self.digests}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """An entry as the log keeps it."""
    return _encoder.encode(entry)


def decode(data: bytes) -> Entry:
    """The entry that was encoded. Raises `ValueError` if it is none."""
    return _decoder.decode(data)
