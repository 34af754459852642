"""Encryption of chunks: what is encrypted comes back by the same tenant, key and name only, and unchanged."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv_server.node.tiers.encryption import ChunkEncryption, TenantKeys
from lmkv_server.node.tiers.encryption_header import HEADER_BYTES
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
