"""Prompts of tokens as an engine stores, looks up and loads them; every word of a chunk is the head of its key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmkv.keys import ChunkKey, as_tokens, chunk_keys, join_keys, prefix_digests, root_key
from lmkv.pool.pool import Pool
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import Extent
from lmkv_kernels import checksum
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec

SPEC = small_spec()
SIZE = SPEC.chunk_size
ROOT = root_key(SPEC.fingerprint)


def prompt(length: int, seed: int = 0, *, after: Sequence[int] = ()) -> list[int]:
    """A prompt of `length` tokens that begins with those of `after`."""
    tokens = np.random.default_rng(seed).integers(SPEC.vocab_size, size=length)
    return [*after, *tokens.tolist()[len(after) :]]


def keys_of(tokens: Sequence[int]) -> list[ChunkKey]:
    """The keys of a prompt's chunks, the partial one included."""
    return chunk_keys(as_tokens(tokens), ROOT, SIZE, partial=True)


def lookup_of(ticket: str, tokens: Sequence[int], **fields: object) -> pb.LookupChunks:
    """The lookup of a prompt, with its tokens."""
    return pb.LookupChunks(
        lookup_id=ticket,
        chunk_keys=join_keys(keys_of(tokens)),
        tokens=as_tokens(tokens).tobytes(),
        root_key=ROOT,
        **fields,  # type: ignore[arg-type]
    )


async def store_prompt(
    engine: EngineClient, pool: Pool, tokens: Sequence[int], superseded: bytes = b"", *, with_digests: bool = False
) -> None:
    """Stores all chunks of a prompt; the last one supersedes another one. `with_digests`: it has prefix digests."""
    keys = keys_of(tokens)
    commits = []
    for index, (key, extent) in enumerate(zip(keys, await engine.reserve(len(keys)), strict=True)):
        token_count = min(SIZE, len(tokens) - index * SIZE)
        size_bytes = SPEC.size_bytes(token_count)
        np.frombuffer(pool.buffer, np.uint64, size_bytes // 8, extent.offset)[:] = _word(key)
        commits.append(
            pb.CommitChunk(
                chunk_key=key,
                offset=extent.offset,
                size_bytes=size_bytes,
                checksum=checksum(pool.buffer, extent.offset, size_bytes),
                token_count=token_count,
                parent_key=keys[index - 1] if index else ROOT if token_count < SIZE or with_digests else b"",
                superseded_key=superseded if index == len(keys) - 1 else b"",
                prefix_digests=prefix_digests(keys[index - 1] if index else ROOT, as_tokens(tokens[index * SIZE :]))
                if with_digests and index == len(keys) - 1
                else b"",
            )
        )
    await engine.say(commit=commits)


async def look_up(engine: EngineClient, ticket: str, tokens: Sequence[int], **fields: object) -> pb.FoundChunks:
    """What the node finds of a prompt."""
    await engine.say(lookup=[lookup_of(ticket, tokens, **fields)])
    (found,) = await engine.hear("found")
    assert isinstance(found, pb.FoundChunks)
    assert found.lookup_id == ticket
    return found


async def hit_tokens(engine: EngineClient, pool: Pool, ticket: str, tokens: Sequence[int]) -> int:
    """The number of a prompt's tokens that the node finds and that can be loaded, by the bytes of their chunks."""
    found = await look_up(engine, ticket, tokens)
    chunks = list(found.own)
    if wanted := sum(run.chunk_count for run in found.runs):
        order = pb.LoadChunks(lookup_id=ticket, first_chunk=len(found.own), chunk_count=wanted)
        order.timeout.FromSeconds(10)
        await engine.say(load=[order])
        done = False
        while not done:
            for loaded in await engine.hear("loaded"):
                chunks += loaded.chunks
                done = done or loaded.done
        assert len(chunks) == len(found.own) + wanted, "all that was found has arrived"
    keys = keys_of(tokens)[: len(chunks)]
    if found.partial_key:
        keys[-1] = ChunkKey(found.partial_key)
        assert chunks[-1].token_count >= found.partial_token_count
        chunks[-1].token_count, all_tokens = found.partial_token_count, chunks[-1].token_count
        assert chunks[-1].extent.size_bytes == SPEC.size_bytes(all_tokens)
    assert [_word(key) for key in keys] == [_content(pool, chunk.extent) for chunk in chunks]
    await engine.release(ticket)
    return sum(chunk.token_count for chunk in chunks)


def _word(key: ChunkKey) -> int:
    return int.from_bytes(key[:8], "little")


def _content(pool: Pool, extent: Extent) -> int:
    words = np.frombuffer(pool.buffer, np.uint64, extent.size_bytes // 8, extent.offset)
    assert (words == words[0]).all()
    return int(words[0])
