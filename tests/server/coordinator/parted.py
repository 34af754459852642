"""A prompt whose chunks have several parts, and the keys of what its hits need."""

from __future__ import annotations

from lmkv.keys import ChunkKey, part_key
from lmkv.spec import KvSpec
from tests.server.coordinator.cases import HYBRID, keys_of

PROMPT = list(range(100, 170))  # four chunks of 16 tokens, and 6 tokens that are never stored
KEYS = keys_of(PROMPT, HYBRID)[:4]
FULL, WINDOW, STATE = range(3)
"""The parts of `HYBRID`."""


def items(chunk_count: int, spec: KvSpec = HYBRID) -> list[ChunkKey]:
    """What a hit of the prompt's first chunks needs."""
    return spec.item_keys(spec.items(chunk_count), keys_of(PROMPT, spec))


def item(part: int, chunk: int) -> ChunkKey:
    """One part of one of the prompt's chunks."""
    return part_key(KEYS[chunk], part)
