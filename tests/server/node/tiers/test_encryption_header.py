"""The header of an encrypted chunk: round trips, and everything else is no header."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv_server.node.tiers.encryption_header import (
    HEADER_BYTES,
    EncryptionHeader,
    associated_data,
    parse_encryption_header,
)
from lmkv_server.node.tiers.remote.store import RemoteObject


def exactly(count: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=count, max_size=count)


headers = st.builds(EncryptionHeader, key_id=exactly(8), nonce=exactly(12), checksum=exactly(16), tag=exactly(16))
keys = exactly(16).map(ChunkKey)
described = st.builds(
    RemoteObject,
    key=keys,
    parent=st.none() | keys,
    fingerprint=exactly(16),
    token_count=st.integers(0, 2**32 - 1),
    size_bytes=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


@given(headers)
def test_a_header_gives_back_what_it_was_made_of(header: EncryptionHeader) -> None:
    assert len(header.packed()) == HEADER_BYTES
    assert parse_encryption_header(header.packed()) == header


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_any_bytes_are_no_header_or_one_that_gives_them_back(data: bytes) -> None:
    header = parse_encryption_header(data)
    assert header is None or header.packed() == data


@given(headers, st.integers(0, 8 * 8 - 1))
def test_another_magic_or_version_is_no_header(header: EncryptionHeader, bit: int) -> None:
    data = bytearray(header.packed())
    data[bit // 8] ^= 1 << bit % 8
    assert parse_encryption_header(bytes(data)) is None


@given(described, described)
def test_two_chunks_have_the_same_associated_data_only_if_all_but_their_checksum_is_equal(
    one: RemoteObject, other: RemoteObject
) -> None:
    assert (associated_data(one) == associated_data(other)) == (
        dataclasses.replace(one, checksum=0) == dataclasses.replace(other, checksum=0)
    )
    assert associated_data(one) == associated_data(dataclasses.replace(one, checksum=other.checksum))
    if one.parent is None:
        known = dataclasses.replace(one, parent=ChunkKey(bytes(16)))
        assert associated_data(one) != associated_data(known)


def test_the_format_does_not_change_by_accident() -> None:
    header = EncryptionHeader(key_id=b"k" * 8, nonce=b"n" * 12, checksum=b"c" * 16, tag=b"t" * 16)
    assert header.packed() == b"lmkvenc\x01" + b"k" * 8 + b"n" * 12 + b"c" * 16 + b"t" * 16
    one = RemoteObject(
        key=ChunkKey(b"k" * 16), fingerprint=b"f" * 16, token_count=3, size_bytes=258, checksum=9, parent=None
    )
    head, counts = b"lmkvenc\x01" + b"f" * 16 + b"k" * 16, b"\3" + bytes(7) + b"\2\1" + bytes(6)
    assert associated_data(one) == head + bytes(16) + b"\0" + counts
    assert associated_data(dataclasses.replace(one, parent=ChunkKey(b"p" * 16))) == head + b"p" * 16 + b"\1" + counts
