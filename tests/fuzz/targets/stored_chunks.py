"""Chunks as they are stored: file names on disk, headers in remote stores and of encryption, ledgers of pools."""

from __future__ import annotations

import dataclasses
from zlib import crc32

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.warm_start import SLOT_BYTES, Ledger
from lmkv_server.node.tiers.disk.folder import DiskChunk, parse_file_name
from lmkv_server.node.tiers.disk.volume import DiskIndex
from lmkv_server.node.tiers.encryption_header import EncryptionHeader, parse_encryption_header
from lmkv_server.node.tiers.remote.store import HEADER_BYTES, RemoteChunk, RemoteObject, object_name, parse_header
from tests.fuzz.inputs import Input
from tests.support.specs import make_spec

COVERS = (
    "lmkv_server.node.tiers.disk.folder",
    "lmkv_server.node.tiers.disk.volume",
    "lmkv_server.node.tiers.encryption",
    "lmkv_server.node.tiers.remote.store",
    "lmkv_server.node.cache.warm_start",
)
CAPACITY_BYTES = 1 << 20
TIER = HostTier(CAPACITY_BYTES)
SPEC = make_spec(model_name="m", model_id="m@1")
OBJECT = RemoteObject(
    key=ChunkKey(bytes(range(16))),
    fingerprint=SPEC.fingerprint,
    token_count=32,
    size_bytes=SPEC.chunk_bytes,
    checksum=1 << 63,
)
ON_DISK = DiskChunk(
    key=OBJECT.key, fingerprint=OBJECT.fingerprint, token_count=32, size_bytes=8192, checksum=5, serial=7
)


def _slot(serial: int, offset: int) -> bytes:
    table = bytearray(SLOT_BYTES)
    chunk = Chunk(
        key=OBJECT.key,
        parent=None,
        fingerprint=OBJECT.fingerprint,
        offset=offset,
        size_bytes=8192,
        checksum=serial,
        token_count=32,
    )
    Ledger(memoryview(table)).put(chunk)
    table[:8] = serial.to_bytes(8, "little")
    table[-4:] = crc32(table[:-4]).to_bytes(4, "little")
    return bytes(table)


ENCRYPTED = EncryptionHeader(key_id=b"key id 8", nonce=b"nonce of 12 ", checksum=bytes(16), tag=b"tag of 16 bytes ")
SEEDS = [
    b"\0" + ON_DISK.file_name.encode(),
    b"\0" + dataclasses.replace(ON_DISK, parent=OBJECT.key, size_bytes=1 << 40).file_name.encode(),
    b"\0" + dataclasses.replace(ON_DISK, checksum=0, key_id=b"key id 8").file_name.encode(),
    b"\1" + OBJECT.header,
    b"\1" + dataclasses.replace(OBJECT, parent=OBJECT.key, token_count=8, size_bytes=2048).header,
    b"\2" + _slot(1, 0) + bytes(SLOT_BYTES) + _slot(2, 8192) + _slot(3, 0),
    b"\2" + _slot((1 << 64) - 1, 0) + bytes(SLOT_BYTES),  # no serial can follow
    b"\2" + _slot(1 << 63, 0) + bytes(SLOT_BYTES),
    b"\3" + ENCRYPTED.packed(),
    b"\3" + ENCRYPTED.packed()[:-1],
]


def run(data: bytes) -> None:
    """The first byte selects the format; its highest bit has the seals made right, which random bytes never are."""
    source = Input(data)
    selected = source.byte()
    _FORMATS[selected % len(_FORMATS)](source.rest(), bool(selected & 0x80))


def _disk(data: bytes, sealed: bool) -> None:
    index = DiskIndex(CAPACITY_BYTES)
    chunks = []
    for line in data.split(b"\n"):
        name = line.decode("latin-1")
        if sealed:
            body = name.removesuffix(".chunk").rpartition("-")[0]
            name = f"{body}-{crc32(body.encode()):08x}.chunk"
        chunk = parse_file_name(name)
        if chunk is None:
            continue
        assert chunk.token_count > 0
        assert chunk.file_bytes >= chunk.memory_bytes >= chunk.size_bytes > 0
        assert parse_file_name(chunk.file_name) == chunk
        chunks.append(chunk)
    superfluous = index.fill(chunks)
    index.check()
    assert len(superfluous) + len(index) == len(chunks), "a file that is neither indexed nor removed"


def _remote(data: bytes, sealed: bool) -> None:
    if sealed:
        fields = data[: HEADER_BYTES - 4].ljust(HEADER_BYTES - 4, b"\0")
        data = fields + crc32(fields).to_bytes(4, "little")
    header = parse_header(data)
    if header is None:
        return
    assert parse_header(header.header) == header
    chunk = RemoteChunk(key=OBJECT.key, spec=SPEC, size_bytes=SPEC.chunk_bytes)
    described = chunk.described(data, SPEC.chunk_bytes)
    assert described is None or (described.key, described.size_bytes) == (OBJECT.key, SPEC.chunk_bytes)
    assert described is None or not chunk.is_whole(described) or 0 < described.token_count <= SPEC.chunk_size
    assert object_name(header.fingerprint, header.key).isascii()


def _ledger(data: bytes, sealed: bool) -> None:
    table = bytearray(data[: SLOT_BYTES * 16])
    if sealed:
        for at in range(0, len(table) - SLOT_BYTES + 1, SLOT_BYTES):
            table[at + SLOT_BYTES - 4 : at + SLOT_BYTES] = crc32(table[at : at + SLOT_BYTES - 4]).to_bytes(4, "little")
    ledger = Ledger(memoryview(table))
    records = ledger.records
    assert len(records) <= len(table) // SLOT_BYTES
    assert len({record.offset for record in records}) == len(records), "two records of one place"
    assert [record.serial for record in records] == sorted(record.serial for record in records)
    again = Ledger(memoryview(bytearray(table)))
    assert again.records == records
    for record in records:
        ledger.drop(record.offset)
    assert ledger.recorded_count == 0
    new = Chunk(
        key=OBJECT.key,
        parent=OBJECT.key,
        fingerprint=OBJECT.fingerprint,
        offset=4096,
        size_bytes=4096,
        checksum=1,
        token_count=1,
    )
    ledger.put(new)
    kept = Ledger(memoryview(table)).records
    assert len(kept) == 1 - ledger.unrecorded_count, "a dropped record is found again, or a new one is not"
    is_last = bool(records) and records[-1].serial == (1 << 64) - 1
    assert ledger.unrecorded_count == (is_last or len(table) < SLOT_BYTES), "a chunk has no record, and could have one"


def _encryption(data: bytes, sealed: bool) -> None:
    if sealed:  # the rest of a header that begins as one
        data = ENCRYPTED.packed()[:8] + data
    header = parse_encryption_header(data)
    if header is not None:
        assert header.packed() == data


_FORMATS = (_disk, _remote, _ledger, _encryption)
