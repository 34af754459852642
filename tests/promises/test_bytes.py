"""Bytes that other processes, hosts or versions read are fixed: an order that both sides change would pass every test.

The expected bytes are written out field by field, without the formats of the code. `tests/lmkv/test_keys.py` has those
of chunk keys, the tests of disk and remote tier the names of their files and objects.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from lmkv.auth.credentials import BearerToken
from lmkv.auth.handoff import HandoffKeys
from lmkv.keys import ChunkKey
from lmkv.packing import pack_fields
from lmkv.pool.pool import Pool
from lmkv.rpc.frames import FrameKind, to_frame
from lmkv.transfer import channel, ucx
from lmkv.transfer.channel import ChannelEnd
from lmkv.transfer.tcp import server as tcp
from lmkv_client.connector.multimodal import MediaDigests
from lmkv_client.kv_event_publisher import END, frames, read_replay
from lmkv_client.kv_events import PublishedBatch
from lmkv_server.coordinator.core.layout_map import Change
from lmkv_server.coordinator.layout_store.records import field_prefix, split_records, writes
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.warm_start import SLOT_BYTES, Ledger
from lmkv_server.node.tiers.encryption_header import EncryptionHeader, associated_data
from lmkv_server.node.tiers.remote.store import RemoteObject
from tests.server.node.cases import put

KEY, PARENT, FINGERPRINT = (ChunkKey(bytes([first]) + bytes(range(15))) for first in (0xA1, 0xB2, 0xC3))
GRANT_ID = "0123456789abcdef" * 2


def big(value: int, size_bytes: int) -> bytes:
    return bytes.fromhex(f"{value:0{2 * size_bytes}x}")


def little(value: int, size_bytes: int) -> bytes:
    return big(value, size_bytes)[::-1]


def test_requests_of_a_reader_over_tcp() -> None:
    assert tcp.hello(b"t" * 32) == b"lmkvtcp2" + b"t" * 32
    assert (tcp.GRANTED, tcp.REFUSED) == (b"\x01", b"\x00")
    ranges = [(0x0102030405060708, 0x1112), (0x21, 0x313233)]
    expected = big(2, 4) + GRANT_ID.encode() + b"".join(big(address, 8) + big(size, 8) for address, size in ranges)
    assert tcp.request(GRANT_ID, ranges) == expected


def test_requests_of_a_reader_over_ucx() -> None:
    assert (ucx.HELLO, ucx.GRANTED) == (b"lmkvucx2", b"\x01")
    expected = big(0x0A0B0C, 8) + big(1, 4) + GRANT_ID.encode() + big(0x0102, 8) + big(0x0304, 8)
    assert ucx.request(0x0A0B0C, GRANT_ID, [(0x0102, 0x0304)]) == expected


def test_the_metadata_of_a_channel() -> None:
    with Pool.create(1 << 20) as pool:
        content = big(3, 2) + big(6, 2) + big(pool.address, 8) + big(1 << 20, 8) + b"tcpnode:1" + b"payload"
        assert (
            channel.wrap("tcp", ChannelEnd(name="node:1", pool=pool), b"payload")
            == sha256(content).digest()[:8] + content
        )


def test_frames_between_engine_and_node() -> None:
    assert to_frame(FrameKind.STATUS, b"x" * 0x0102, 1 << 20) == b"\x01" + big(0x0102, 4) + b"x" * 0x0102


def test_the_record_of_a_chunk_in_the_file_of_a_pool() -> None:
    tier, table = HostTier(1 << 20), memoryview(bytearray(8 * SLOT_BYTES))
    ledger = Ledger(table)
    offset = 0
    for key, parent in ((PARENT, None), (KEY, PARENT)):
        chunk = put(
            tier,
            key,
            0x3000,
            fingerprint=FINGERPRINT,
            checksum=0x1122334455667788,
            token_count=0x0102,
            parent=parent,
        )
        ledger.put(chunk)
        offset = chunk.offset
    fields = little(2, 8) + little(offset, 8) + little(0x3000, 8) + little(0x1122334455667788, 8)
    fields += little(0x0102, 4) + b"\x01" + PARENT + KEY + FINGERPRINT
    assert bytes(table[SLOT_BYTES : 2 * SLOT_BYTES]) == fields + little(crc32(fields), 4)


def test_the_header_of_an_object_in_a_remote_store() -> None:
    described = RemoteObject(
        key=KEY,
        parent=PARENT,
        fingerprint=FINGERPRINT,
        token_count=0x0102,
        size_bytes=0x030405,
        checksum=0x0607,
        writer=b"writer 1",
    )
    fields = b"lmkvobj2" + FINGERPRINT + KEY + PARENT + b"\x01" + little(0x0102, 4) + little(0x030405, 8)
    fields += little(0x0607, 8) + b"writer 1"
    assert described.header == fields + little(crc32(fields), 4)
    encrypted = b"lmkvenc\x01" + FINGERPRINT + KEY + PARENT + b"\x01" + little(0x0102, 8) + little(0x030405, 8)
    assert associated_data(described) == encrypted


def test_the_header_of_encrypted_bytes() -> None:
    header = EncryptionHeader(key_id=b"k" * 8, nonce=b"n" * 12, checksum=b"c" * 16, tag=b"t" * 16)
    assert header.packed() == b"lmkvenc\x01" + b"k" * 8 + b"n" * 12 + b"c" * 16 + b"t" * 16


def test_the_records_of_chunks_in_a_shared_layout_map() -> None:
    change = Change(2, FINGERPRINT, 0x0102, KEY + PARENT, {1: 7}, b"", {1: KEY})
    assert field_prefix(change) == b"\x02" + FINGERPRINT
    partial, full = writes(change)
    assert partial == (little(7 | 1 << 31, 4) + KEY, PARENT, b"")
    assert full == (little(0x0102, 4), KEY, b"")
    record = field_prefix(change) + PARENT + little(7 | 1 << 31, 4) + KEY
    assert list(split_records(record)) == [(field_prefix(change), PARENT, 7, KEY, b"")]
    digests = Change(2, FINGERPRINT, 0x0102, KEY, {}, b"", {0: PARENT}, {0: b"d" * 24})
    value = little(0x0102 | 3 << 30, 4) + PARENT + little(3, 4) + b"d" * 24
    assert list(writes(digests)) == [(value, KEY, b""), (little(0x0102, 4), b"", b"")]
    record = field_prefix(digests) + KEY + value
    assert list(split_records(record)) == [(field_prefix(digests), KEY, 0x0102, PARENT, b"d" * 24)]


def test_the_proof_of_a_handoff() -> None:
    proof = HandoffKeys("hush", BearerToken()).prove("request", "node", now=1000.0)
    fields = [b"request", b"node", big(1900, 8)]
    packed = b"".join(little(len(field), 4) + field for field in fields)
    assert pack_fields(fields) == packed
    key = hmac.digest(b"hush", b"lmkv handoff v1 cluster_secret", "sha256")
    assert proof == {"expire_time": 1900, "mac": hmac.digest(key, packed, "sha256").hex()}


def test_what_an_image_adds_to_the_keys_of_its_chunks() -> None:
    position = SimpleNamespace(offset=10, length=10, is_embed=None)
    data = {"pixels": SimpleNamespace(data=torch.arange(6, dtype=torch.int32).reshape(2, 3))}
    image: Any = SimpleNamespace(identifier="a name", modality="image", data=data, mm_position=position)
    digest = bytes.fromhex("8421061197c66766ed0a1b6096a23f009d48b89474bb54c3f4f76872b0796cf8")
    expected = {0: digest + little(10, 8), 1: digest + little((1 << 64) - 6, 8)}
    assert MediaDigests().extras([image], 16) == expected


def test_the_frames_of_kv_events() -> None:
    batch = PublishedBatch(topic="kv@a", sequence=0x0102, payload=b"payload")
    assert frames(batch) == [b"kv@a", big(0x0102, 8), b"payload"]
    assert END == b"\xff" * 8
    assert read_replay([b"peer", b"", big(0x0102, 8)]) == (b"peer", 0x0102, None)
