"""The contract of stores that can be the remote tier's, and the names and headers of chunks in them. Pure.

    lmkv2/fingerprint/key          ->  header | bytes of the chunk
    lmkv2e/scope/fingerprint/key   ->  header | header of the encryption | encrypted bytes
    lmkv2c/codec/...               ->  as above, with the bytes of the encoded chunk instead
    lmkv2i/...                     ->  as the first two, with the inputs of an engine's KV instead (`lmkv.kv_inputs`)

The header says what the bytes are, so that an object that is torn, foreign, or under a wrong key is a miss. Some stores
pad headers with zeros (`RemoteStore.pads_headers`). Encrypted objects have names of their own, by tenant, so that
nodes without the keys neither find nor remove them; so have encoded objects, by codec and parameters.
The version of all this is in the name: nodes of another version neither find nor remove each other's objects.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv.kv_inputs import WRITER_BYTES
from lmkv.spec import KvSpec


class StoreRefused(OSError):
    """The store answered with a refusal: no room, no permission, no such bucket."""


class RemoteStore(Protocol):
    """Named bytes that many nodes share. Methods block, and may be called on any thread.

    Each ends within a small multiple of the timeout that the store was made with. All raise `StoreRefused` if the store
    refuses, and another `OSError` if it does not answer as expected. No message contains a secret.
    """

    @property
    def shown(self) -> str:
        """The name of the store in logs and errors."""

    @property
    def one_per_request(self) -> bool:
        """Whether each name in `sizes` costs a request; then a lookup asks for few of them."""

    @property
    def pads_headers(self) -> bool:
        """Whether headers are padded to whole pages, so that the pages of the pool are read and written directly."""

    @property
    def evicted_count(self) -> int:
        """Objects that this process has removed for others; 0 where the store evicts by itself."""

    def open(self) -> None:
        """Returns once the store has answered. Raises `ConfigError` if it cannot be used as it is configured."""

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Sizes of objects in bytes, 0 of an absent one."""

    def get(self, name: str, parts: Sequence[memoryview]) -> int:
        """Fills the parts in order from an object, and returns its size; 0 if there is none that fits into them."""

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Stores the parts as one object; False if there is one of that name already, which stays."""

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; absent objects are ignored."""

    def names(self, prefix: str) -> Iterator[list[str]]:
        """Names that begin with `prefix`, in pages. Those that are stored or removed meanwhile may be missing."""

    def close(self) -> None:
        """Closes idle connections. Idempotent."""


ROOT = "lmkv2/"
"""The beginning of the names of all objects that are not encrypted."""
ENCRYPTED_ROOT = "lmkv2e/"
ENCODED_ROOT = "lmkv2c/"
INPUTS_ROOT = "lmkv2i/"
_MAGIC = b"lmkvobj2"
_FIELDS = struct.Struct(
    f"<8s16s16s16s?IQQ{WRITER_BYTES}s"
)  # magic, fingerprint, key, parent and whether it is known, tokens, bytes, checksum, writer
_SEAL = struct.Struct("<I")  # of the fields
HEADER_BYTES = _FIELDS.size + _SEAL.size


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteObject:
    """A chunk as its header describes it."""

    key: ChunkKey
    parent: ChunkKey | None = None
    """The chunk before it in its prompts, if that is known."""
    fingerprint: bytes
    token_count: int
    size_bytes: int
    checksum: int
    writer: bytes = b""
    """The id of the inputs of the engine that has stored it; empty if that is not known."""
    is_verified: bool = False
    """Whether `checksum` was computed from what was read, after the stored bytes were verified."""
    encoded_bytes: int = 0
    """Bytes that the store has in place of the chunk's, if that was read and decoded."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that were read for it."""
        return self.encoded_bytes or self.size_bytes

    @property
    def header(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC,
            self.fingerprint,
            self.key,
            self.parent or bytes(KEY_BYTES),
            self.parent is not None,
            self.token_count,
            self.size_bytes,
            self.checksum,
            self.writer,
        )
        return fields + _SEAL.pack(crc32(fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteChunk:
    """A chunk that the store has listed, by name and size; its header describes it."""

    key: ChunkKey
    spec: KvSpec
    size_bytes: int
    """Bytes of the chunk, without headers; of an encoded one, the most that it may have."""
    root: str = ROOT

    @property
    def fingerprint(self) -> bytes:
        """The spec's."""
        return self.spec.fingerprint

    @property
    def memory_bytes(self) -> int:
        """Room that reading it takes in the pool."""
        return self.size_bytes

    @property
    def prefix_digests(self) -> bytes:
        """Empty: the header has no room for them."""
        return b""

    @property
    def owner(self) -> bytes:
        """Empty: the header does not have it."""
        return b""

    @property
    def name(self) -> str:
        """The name of its object in the store."""
        return object_name(self.fingerprint, self.key, self.root)

    def described(self, header: bytes, stored_bytes: int) -> RemoteObject | None:
        """Reads the header of an object with `stored_bytes` behind its headers; None if it is not of this chunk."""
        said = parse_header(header)
        expected = (self.key, self.fingerprint, stored_bytes)
        return said if said and (said.key, said.fingerprint, said.size_bytes) == expected else None

    def is_whole(self, described: RemoteObject) -> bool:
        """Whether what was read can be this chunk: it is not larger, and has the size of its tokens."""
        size_bytes = described.size_bytes
        return size_bytes <= self.size_bytes and self.spec.fits(size_bytes, described.token_count)


def first_bytes(parts: Sequence[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """The parts, in order, up to a number of bytes in all."""
    for part in parts:
        yield part[: max(0, size_bytes)]
        size_bytes -= len(part)


def object_name(fingerprint: bytes, key: ChunkKey, root: str = ROOT) -> str:
    """The name of a chunk in the store."""
    return f"{spec_root(fingerprint, root)}{key.hex()}"


def spec_root(fingerprint: bytes, root: str = ROOT) -> str:
    """Returns the beginning of the names of all chunks of a spec."""
    return f"{root}{fingerprint.hex()}/"


def parse_header(header: bytes) -> RemoteObject | None:
    """Reads a header; None if it is none, or of another version."""
    if len(header) != HEADER_BYTES:
        return None
    fields = header[: _FIELDS.size]
    magic, fingerprint, key, parent, has_parent, token_count, size_bytes, checksum, writer = _FIELDS.unpack(fields)
    if magic != _MAGIC or _SEAL.unpack(header[_FIELDS.size :]) != (crc32(fields),):
        return None
    return RemoteObject(
        key=ChunkKey(key),
        parent=ChunkKey(parent) if has_parent else None,
        fingerprint=fingerprint,
        token_count=token_count,
        size_bytes=size_bytes,
        checksum=checksum,
        writer=writer if any(writer) else b"",
    )
