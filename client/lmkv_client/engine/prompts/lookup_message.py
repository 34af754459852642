"""The message of a lookup: keys of a prompt's chunks, and those of its tokens that fit into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmkv.keys import KEY_BYTES, ChunkKey, Tokens, join_keys
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.v1 import engine_service_pb2 as pb

MAX_ASKED_KEYS = MAX_MESSAGE_BYTES // 2 // KEY_BYTES
"""Most chunks of a prompt in one lookup, so that it fits into a message; the others are computed."""
OTHER_BYTES = 64 << 10
"""Room in the message of a lookup for everything but keys and tokens."""
TOKEN_BYTES = 4
NO_EXTRAS: Mapping[int, bytes] = {}


def lookup_message(
    lookup_id: str,
    keys: Sequence[ChunkKey],
    *,
    tokens: Tokens | None = None,
    root: bytes = b"",
    extras: Mapping[int, bytes] = NO_EXTRAS,
) -> pb.LookupChunks:
    """A lookup of the first `MAX_ASKED_KEYS` keys.

    With `tokens`, those of the prompt, `root`, the root of its key chain, and `extras`, what else its keys are made of,
    the node also finds partial chunks that other prompts have stored. Tokens that do not fit are left out.
    """
    lookup = pb.LookupChunks(lookup_id=lookup_id, chunk_keys=join_keys(keys[:MAX_ASKED_KEYS]))
    if tokens is not None:
        room = MAX_MESSAGE_BYTES - OTHER_BYTES - len(lookup.chunk_keys)
        lookup.tokens = tokens[: room // TOKEN_BYTES].tobytes()
        lookup.root_key = root
        lookup.chunk_extras.update(extras)
    return lookup
