"""Images, sounds and videos in prompts: what they add to the keys of chunks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def multimodal_extras(features: Sequence[Any], chunk_size: int) -> dict[int, bytes]:
    """What besides tokens decides a chunk's KV: each image or sound in it, by hash, and where in the chunk it begins.

    The begin is relative to the chunk and negative where the item began in an earlier one.
    """
    extras: dict[int, bytes] = {}
    for feature in features:
        low, length = feature.mm_position.offset, feature.mm_position.length
        identifier = feature.identifier.encode()
        for chunk in range(low // chunk_size, -(-(low + length) // chunk_size)):
            begin = (low - chunk * chunk_size).to_bytes(8, "little", signed=True)
            extras[chunk] = extras.get(chunk, b"") + len(identifier).to_bytes(4, "little") + identifier + begin
    return extras
