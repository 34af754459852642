"""A chunk on disk, and the name of its file, which says all there is to know of it. Pure; used by the disk tier.

    key-parent-fingerprint-tokens-bytes-checksum-serial-seal.chunk

All fields are hexadecimal; the parent may be missing. The seal is a checksum of what stands before it: a name that
was changed does not match it and is ignored. The listing of a folder is its index: no other file can be lost or differ.

An encrypted file has `k` and the id of its key in place of the checksum, which is encrypted with the bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from zlib import crc32

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.allocator import ALIGNMENT, align

SUFFIX = ".chunk"
_NAME = re.compile(
    r"(?P<sealed>(?P<key>[0-9a-f]{32})-(?P<parent>[0-9a-f]{32})?-(?P<fingerprint>[0-9a-f]{32})"
    r"-(?P<tokens>[0-9a-f]{1,8})-(?P<bytes>[0-9a-f]{1,16})-(?:(?P<checksum>[0-9a-f]{16})|k(?P<key_id>[0-9a-f]{16}))-(?P<serial>[0-9a-f]{16}))"
    r"-(?P<seal>[0-9a-f]{8})\.chunk"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskChunk:
    """A chunk that is in a file."""

    key: ChunkKey
    parent: ChunkKey | None = None
    """The chunk before it in its prompts, if that is known."""
    fingerprint: bytes
    token_count: int
    size_bytes: int
    checksum: int = 0
    """0 if the file is encrypted, until it is read."""
    key_id: bytes = b""
    """Id of the key that the file is encrypted with; empty: it is not encrypted."""
    serial: int
    """Sets it apart from every other file of the same chunk: when it was written, in nanoseconds."""
    prefix_digests: bytes = b""
    """As `host.Chunk`; in memory only: empty if an earlier process wrote the file."""

    @property
    def memory_bytes(self) -> int:
        """Room that reading it takes: whole pages, so that the device can copy straight from and to the pool."""
        return align(self.size_bytes)

    @property
    def file_bytes(self) -> int:
        """Length of its file: if it is encrypted, with a page for the header."""
        return self.memory_bytes + (ALIGNMENT if self.key_id else 0)

    @property
    def file_name(self) -> str:
        """The name of its file."""
        content = f"k{self.key_id.hex()}" if self.key_id else f"{self.checksum:016x}"
        sealed = (
            f"{self.key.hex()}-{(self.parent or b'').hex()}-{self.fingerprint.hex()}"
            f"-{self.token_count:x}-{self.size_bytes:x}-{content}-{self.serial:016x}"
        )
        return f"{sealed}-{crc32(sealed.encode()):08x}{SUFFIX}"


def parse_file_name(name: str) -> DiskChunk | None:
    """The chunk that a file of this name holds; None if no chunk's file has such a name."""
    match = _NAME.fullmatch(name)
    if match is None or crc32(match["sealed"].encode()) != int(match["seal"], 16):
        return None
    chunk = DiskChunk(
        key=ChunkKey(bytes.fromhex(match["key"])),
        parent=ChunkKey(bytes.fromhex(match["parent"])) if match["parent"] else None,
        fingerprint=bytes.fromhex(match["fingerprint"]),
        token_count=int(match["tokens"], 16),
        size_bytes=int(match["bytes"], 16),
        checksum=int(match["checksum"] or "0", 16),
        key_id=bytes.fromhex(match["key_id"] or ""),
        serial=int(match["serial"], 16),
    )
    return chunk if chunk.token_count and chunk.size_bytes else None
