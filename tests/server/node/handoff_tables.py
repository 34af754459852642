"""A table of handoffs on a small tier, without a network."""

from __future__ import annotations

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation
from lmkv_server.node.handoff.state import HandedPrompt, Handoff, HandoffSource
from lmkv_server.node.handoff.table import HandoffTable
from tests.server.node.peer_parts import SMALL, keys_of

SILENCE, ABANDON = 5.0, 60.0
SOURCE = HandoffSource(instance_id="prefill", epoch=1, address="127.0.0.1:1", session_id="session")
POOL_CHUNKS = 24
BUFFER_CHUNKS = 12
DEVICE_CHUNKS = 6
KEYS = keys_of(40)


def table(pool_chunks: int = POOL_CHUNKS, buffer_chunks: int = BUFFER_CHUNKS) -> tuple[HostTier, HandoffTable]:
    tier = HostTier(pool_chunks * SMALL.chunk_bytes)
    handoffs = HandoffTable(
        tier, buffer_bytes=buffer_chunks * SMALL.chunk_bytes, timeout_seconds=SILENCE, abandon_seconds=ABANDON
    )
    return tier, handoffs


def handed(name: str, keys: list[ChunkKey], token_count: int | None = None) -> HandedPrompt:
    """The prompt of these chunks, all of them full unless it has another number of tokens."""
    tokens = len(keys) * SMALL.chunk_size if token_count is None else token_count
    return HandedPrompt(handoff_id=name, spec=SMALL, chunk_keys=keys, token_count=tokens)


def begin(
    handoffs: HandoffTable, name: str, keys: list[ChunkKey], now: float = 0.0, buffer: HostTier | None = None
) -> Handoff:
    """A prefill announces the prompt of these chunks, all of them full."""
    return handoffs.allocate(handed(name, keys), SOURCE, now, buffer)


def device_buffer() -> HostTier:
    """An engine's."""
    return HostTier(DEVICE_CHUNKS * SMALL.chunk_bytes, region=1)


def commit(tier: HostTier, handoff: Handoff, index: int, reserved: Reservation) -> Chunk:
    """What the receiver does when a chunk has been read and is sound."""
    chunk = handoff.destination.commit(
        Chunk(
            offset=reserved.offset,
            key=handoff.keys[index],
            fingerprint=SMALL.fingerprint,
            size_bytes=handoff.size_bytes_of(index),
            checksum=1,
            token_count=handoff.token_count_of(index),
        )
    ) or handoff.destination.get(handoff.keys[index])
    assert chunk
    handoff.commit(index, chunk, tier)
    return chunk


def take(tier: HostTier, handoff: Handoff, *indices: int) -> None:
    """The prefill says that these are computed; they are read."""
    for index, reserved in handoff.begin(indices, tier).items():
        commit(tier, handoff, index, reserved)


def assert_nothing_is_left(tier: HostTier, handoffs: HandoffTable) -> None:
    """No room, no hold and no byte of the buffer is taken."""
    assert len(handoffs) == handoffs.used_bytes == tier.reserved_bytes == 0
    assert all(chunk.holds == 0 for chunk in tier)
    assert tier.used_bytes == tier.chunk_bytes
    tier.check()
