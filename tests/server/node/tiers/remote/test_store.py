"""Names and headers of objects in the shared store: what one node writes every other reads, and nothing else passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv_server.node.tiers.remote.store import (
    HEADER_BYTES,
    RemoteChunk,
    RemoteObject,
    object_name,
    parse_header,
    spec_root,
)
from tests.server.node.cases import chunk_key
from tests.support.specs import small_spec

SPEC = small_spec()
KEYS = st.binary(min_size=16, max_size=16).map(ChunkKey)
OBJECT = RemoteObject(
    key=chunk_key(5),
    parent=chunk_key(4),
    fingerprint=SPEC.fingerprint,
    token_count=SPEC.chunk_size,
    size_bytes=SPEC.chunk_bytes,
    checksum=0x0123456789ABCDEF,
)
CHUNK = RemoteChunk(key=chunk_key(5), spec=SPEC, size_bytes=SPEC.chunk_bytes)


@given(
    key=KEYS,
    parent=st.none() | KEYS,
    fingerprint=st.binary(min_size=16, max_size=16),
    token_count=st.integers(1, 2**32 - 1),
    size_bytes=st.integers(1, 2**63),
    checksum=st.integers(0, 2**64 - 1),
)
def test_a_header_says_all_there_is(
    key: ChunkKey, parent: ChunkKey | None, fingerprint: bytes, token_count: int, size_bytes: int, checksum: int
) -> None:
    said = RemoteObject(
        key=key,
        parent=parent,
        fingerprint=fingerprint,
        token_count=token_count,
        size_bytes=size_bytes,
        checksum=checksum,
    )
    assert parse_header(said.header) == said


def test_the_format_does_not_change_by_accident() -> None:
    said = replace(OBJECT, fingerprint=b"f" * 16)
    assert said.header.hex() == (
        "6c6d6b766f626a32" + "66" * 16 + "00" * 15 + "05" + "00" * 15 + "04" + "01"
        "200000000020000000000000efcdab89674523010000000000000000" + said.header[-4:].hex()
    )
    assert len(said.header) == HEADER_BYTES == 89
    assert object_name(b"f" * 16, chunk_key(5)) == f"lmkv2/{'66' * 16}/{'00' * 15}05"
    assert object_name(b"f" * 16, chunk_key(5)).startswith(spec_root(b"f" * 16))


@pytest.mark.parametrize("at", range(HEADER_BYTES))
def test_a_header_with_a_changed_byte_is_none(at: int) -> None:
    header = bytearray(OBJECT.header)
    header[at] ^= 1
    assert parse_header(bytes(header)) is None


@pytest.mark.parametrize("header", [b"", OBJECT.header[:-1], OBJECT.header + b"\0", bytes(HEADER_BYTES)])
def test_what_is_no_header_is_none(header: bytes) -> None:
    assert parse_header(header) is None


def test_a_header_must_be_of_the_chunk_that_was_asked_for() -> None:
    assert CHUNK.described(OBJECT.header, SPEC.chunk_bytes) == OBJECT
    assert CHUNK.is_whole(OBJECT)
    for other in (
        replace(OBJECT, key=chunk_key(6)),
        replace(OBJECT, fingerprint=b"g" * 16),
        replace(OBJECT, size_bytes=SPEC.chunk_bytes - 8),
    ):
        assert CHUNK.described(other.header, SPEC.chunk_bytes) is None, other


def test_a_chunk_that_was_read_must_have_the_size_of_its_tokens() -> None:
    for other in (
        replace(OBJECT, size_bytes=SPEC.chunk_bytes - 8),
        replace(OBJECT, token_count=SPEC.chunk_size - SPEC.block_size),
        replace(OBJECT, token_count=SPEC.chunk_size + 1),
        replace(OBJECT, token_count=0),
    ):
        assert not CHUNK.is_whole(other), other


def test_a_chunk_has_the_name_of_its_object_and_takes_its_bytes() -> None:
    assert CHUNK.name == object_name(SPEC.fingerprint, chunk_key(5))
    assert replace(CHUNK, root="other/").name.startswith("other/")
    assert (CHUNK.fingerprint, CHUNK.memory_bytes) == (SPEC.fingerprint, SPEC.chunk_bytes)
