"""Encryption of chunks: what is encrypted comes back by the same tenant, key and name only, and unchanged."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv_server.node.tiers.encryption import (
    HEADER_BYTES,
    ChunkEncryption,
    EncryptionHeader,
    TenantKeys,
    associated_data,
    parse_encryption_header,
)
from lmkv_server.node.tiers.remote.store import RemoteObject
from tests.server.node.cases import chunk_key
from tests.support.encryption_keys import write_keys

CONTENT = bytes(range(256)) * 4
CHUNK = RemoteObject(
    key=chunk_key(1),
    parent=chunk_key(0),
    fingerprint=b"f" * 16,
    token_count=7,
    size_bytes=len(CONTENT),
    checksum=0x0123456789ABCDEF,
)


def encryption_of(folder: Path, *names: str, tenant: str = "") -> ChunkEncryption:
    return ChunkEncryption(TenantKeys(write_keys(folder / "keys", *names), tenant), "disk")


def encrypted(encryption: ChunkEncryption, chunk: RemoteObject = CHUNK, *, step: int = 64) -> bytes:
    body = bytearray(len(CONTENT))
    encryptor = encryption.encryptor(chunk)
    for at in range(0, len(CONTENT), step):
        encryptor.update_into(CONTENT[at : at + step], memoryview(body)[at : at + step])
    return encryptor.header() + body


def decrypted(
    encryption: ChunkEncryption, data: bytes, chunk: RemoteObject = CHUNK, *, step: int = 100
) -> tuple[int, bytes] | None:
    """The checksum and the bytes; None if they are not to be used."""
    decryptor = encryption.decryptor(chunk, data[:HEADER_BYTES])
    if decryptor is None:
        return None
    source, body = data[HEADER_BYTES:], bytearray(len(data) - HEADER_BYTES)
    for at in range(0, len(source), step):
        decryptor.update_into(source[at : at + step], memoryview(body)[at : at + step])
    checksum = decryptor.checksum()
    return None if checksum is None else (checksum, bytes(body))


def test_a_chunk_comes_back_with_its_checksum_and_neither_can_be_seen(tmp_path: Path) -> None:
    encryption = encryption_of(tmp_path, "a")
    data = encrypted(encryption)
    assert decrypted(encryption, data) == (CHUNK.checksum, CONTENT)
    assert not any(CONTENT[at : at + 8] in data for at in range(0, len(CONTENT), 8))
    assert CHUNK.checksum.to_bytes(8, "little") not in data
    assert encryption.rejected_count == 0


def test_no_two_writes_of_a_chunk_are_alike(tmp_path: Path) -> None:
    encryption = encryption_of(tmp_path, "a")
    one, other = encrypted(encryption), encrypted(encryption)
    assert one[16:28] != other[16:28], "the nonce"
    assert one[HEADER_BYTES:] != other[HEADER_BYTES:]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(bit=st.integers(0, 8 * (HEADER_BYTES + len(CONTENT)) - 1))
def test_one_changed_bit_anywhere_is_noticed(tmp_path: Path, bit: int) -> None:
    encryption = encryption_of(tmp_path, "a")
    data = bytearray(encrypted(encryption))
    data[bit // 8] ^= 1 << bit % 8
    assert decrypted(encryption, bytes(data)) is None
    assert encryption.rejected_count == 1


@pytest.mark.parametrize(
    "said",
    [
        {"key": chunk_key(2)},
        {"parent": None},
        {"parent": chunk_key(5)},
        {"fingerprint": b"g" * 16},
        {"token_count": 8},
        {"size_bytes": len(CONTENT) - 1},
    ],
)
def test_a_chunk_under_another_name_is_noticed(tmp_path: Path, said: dict[str, object]) -> None:
    encryption = encryption_of(tmp_path, "a")
    other = dataclasses.replace(CHUNK, **said)  # type: ignore[arg-type]
    assert decrypted(encryption, encrypted(encryption), other) is None
    assert encryption.rejected_count == 1


def test_tenants_of_one_file_have_different_keys_and_names(tmp_path: Path) -> None:
    one, other, unnamed = (encryption_of(tmp_path, "a", tenant=tenant) for tenant in ("one", "other", ""))
    data = encrypted(one)
    assert decrypted(other, data) is decrypted(unnamed, data) is None
    assert decrypted(encryption_of(tmp_path, "a", tenant="one"), data) == (CHUNK.checksum, CONTENT)
    assert len({each.active_key_id for each in (one, other, unnamed)}) == 3
    assert len({each.scope for each in (one, other, unnamed)}) == 3
    assert not one.knows(other.active_key_id)


def test_a_key_is_replaced_while_the_process_runs(tmp_path: Path) -> None:
    encryption = encryption_of(tmp_path, "old")
    scope, old = encryption.scope, encrypted(encryption)
    write_keys(tmp_path / "keys", "new", "old")
    new = encrypted(encryption)
    assert old[8:16] != new[8:16] == encryption.active_key_id
    assert decrypted(encryption, old) == decrypted(encryption, new) == (CHUNK.checksum, CONTENT)
    write_keys(tmp_path / "keys", "new")
    assert decrypted(encryption, old) is None
    assert decrypted(encryption, new) == (CHUNK.checksum, CONTENT)
    assert encryption.scope == scope, "names in the store do not change"


def test_a_key_file_that_becomes_invalid_or_readable_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encryption = encryption_of(tmp_path, "a")
    data = encrypted(encryption)
    write_keys(tmp_path / "keys", "b", mode=0o644)
    assert decrypted(encryption, data) == (CHUNK.checksum, CONTENT)
    assert "keeping the previous value: encryption_key_file" in caplog.text
    write_keys(tmp_path / "keys")
    assert decrypted(encryption, data) == (CHUNK.checksum, CONTENT)


def test_a_wrong_key_of_the_same_name_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = encrypted(encryption_of(tmp_path, "a"))
    encryption = ChunkEncryption(TenantKeys(write_keys(tmp_path / "keys", "a"), "another"), "disk")
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            assert decrypted(encryption, data) is None
    assert encryption.rejected_count == 50
    assert caplog.text.count("cannot be decrypted") == 1
    assert chunk_key(1).hex() in caplog.text


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
