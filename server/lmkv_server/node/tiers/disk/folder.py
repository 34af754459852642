"""One folder with a file for each chunk. Every method blocks, and runs on a thread; all raise `OSError`.

A file has a temporary name until it is complete. The next opening removes incomplete files that a crash has left. Files
are not flushed: after a power failure a file may have its name and wrong bytes, which the checksum shows at a read.
The name of a file has all that is known of its chunk:

    key-parent-fingerprint-tokens-bytes-checksum-serial-seal.chunk

All fields are hexadecimal; the parent may be missing. The seal is a checksum of the fields before it: a name that
was changed does not match it and is ignored. The listing of a folder is its index: no other file can be lost or differ.

An encrypted file has `k` and the id of its key in place of the checksum, which is encrypted with the bytes. An encoded
file has `~codec~bytes` behind the bytes of its chunk: those that it stores, of which the checksum is. A chunk that
counts towards a quota has `@owner` behind its serial, and one of which it is known what engine has stored it `+writer`
behind that. The inputs of an engine's KV are in a file `.inputs` with its id as the key, written as a chunk is.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from zlib import crc32

from lmkv.errors import ConfigError
from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv.kv_inputs import LENGTH_BYTES, MAX_PACKED_BYTES, KvInputs, inputs_key
from lmkv.runtime.folder import Folder
from lmkv_kernels import checksum
from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.tiers.threads import ThreadBuffer

logger = logging.getLogger(__name__)

SUFFIX = ".chunk"
_NAME = re.compile(
    r"(?P<sealed>(?P<key>[0-9a-f]{32})-(?P<parent>[0-9a-f]{32})?-(?P<fingerprint>[0-9a-f]{32})"
    r"-(?P<tokens>[0-9a-f]{1,8})-(?P<bytes>[0-9a-f]{1,16})(?:~(?P<codec>[a-z0-9.]{1,16})~(?P<stored>[0-9a-f]{1,16}))?-(?:(?P<checksum>[0-9a-f]{16})|k(?P<key_id>[0-9a-f]{16}))-(?P<serial>[0-9a-f]{16})(?:@(?P<owner>[0-9a-f]{32}))?(?:\+(?P<writer>[0-9a-f]{16}))?)"
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
    """0 if the file is encrypted, until it is read; until then of an encoded file that of its stored bytes."""
    key_id: bytes = b""
    """Id of the key that the file is encrypted with; empty: it is not encrypted."""
    codec: str = ""
    """`ChunkCodec.scope` of an encoded file; empty: it is not encoded."""
    encoded_bytes: int = 0
    """Bytes of the encoded chunk, or before it is written the most that they may be; 0: it is not encoded."""
    serial: int
    """Sets it apart from every other file of the same chunk: when it was written, in nanoseconds."""
    owner: bytes = b""
    """The owner of `host.Chunk`."""
    writer: bytes = b""
    """The id of the inputs of the engine that has stored it; empty if that is not known."""
    prefix_digests: bytes = b""
    """The digests of `host.Chunk`; in memory only: empty if an earlier process wrote the file."""
    is_verified: bool = False
    """Whether `checksum` was computed from what was read, after the stored bytes were verified."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that are read for it: of an encoded chunk, those of its code."""
        return self.encoded_bytes or self.size_bytes

    @property
    def memory_bytes(self) -> int:
        """Room that reading it takes: whole pages, so that the device can copy straight from and to the pool."""
        return align(self.size_bytes)

    @property
    def file_bytes(self) -> int:
        """Length of its file: if it is encrypted, with a page for the header."""
        return align(self.moved_bytes) + (ALIGNMENT if self.key_id else 0)

    @property
    def extent_bytes(self) -> int:
        """Bytes that count towards its owner's quota: those of its file."""
        return self.file_bytes

    @property
    def file_name(self) -> str:
        content = f"k{self.key_id.hex()}" if self.key_id else f"{self.checksum:016x}"
        encoded = f"~{self.codec}~{self.encoded_bytes:x}" if self.codec else ""
        owner = f"@{self.owner.hex()}" if self.owner else ""
        writer = f"+{self.writer.hex()}" if self.writer else ""
        sealed = (
            f"{self.key.hex()}-{(self.parent or b'').hex()}-{self.fingerprint.hex()}"
            f"-{self.token_count:x}-{self.size_bytes:x}{encoded}-{content}-{self.serial:016x}{owner}{writer}"
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
        codec=match["codec"] or "",
        encoded_bytes=int(match["stored"] or "0", 16),
        serial=int(match["serial"], 16),
        owner=bytes.fromhex(match["owner"] or ""),
        writer=bytes.fromhex(match["writer"] or ""),
    )
    return chunk if chunk.token_count and chunk.size_bytes else None


LOCK = "lock"
PROBE = "probe.new"
UNFINISHED = ".new"
"""Suffix of incomplete files."""
INPUTS = ".inputs"
"""Suffix of files with the inputs of an engine's KV."""
MAX_INPUT_FILES = 64
"""Engines with different inputs whose inputs a folder has: at its opening those that were used last."""


class FileIo(Protocol):
    """Moves bytes between an open file and memory that is aligned to pages: `PlainIo`, or `NixlFiles`.

    Called on several threads at a time. Raises `OSError`.
    """

    def read(self, fd: int, memory: memoryview) -> int:
        """Reads from the file's beginning; how many bytes came before its end."""

    def write(self, fd: int, memory: memoryview) -> None:
        """Writes all of it to the file's beginning."""


class PlainIo:
    """Plain system calls."""

    def read(self, fd: int, memory: memoryview) -> int:
        return read_at(fd, memory, 0)

    def write(self, fd: int, memory: memoryview) -> None:
        write_at(fd, memory, 0)


def read_at(fd: int, memory: memoryview, offset: int) -> int:
    """Reads from an offset on; how many bytes came before the file's end. Raises `OSError`."""
    done = 0
    while done < len(memory) and (count := os.preadv(fd, [memory[done:]], offset + done)):
        done += count
    return done


def write_at(fd: int, memory: memoryview, offset: int) -> None:
    """Writes all of it from an offset on. Raises `OSError`."""
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset + done)


class ChunkFiles(Protocol):
    """The content of files: the bytes of a chunk (`PlainFiles`), encrypted (`EncryptedFiles`), or encoded before
    (`EncodedFiles`).

    Called on several threads at a time. `read` and `write` raise `OSError`.
    """

    @property
    def key_id(self) -> bytes:
        """The id of the key that new files are encrypted with; empty: they are not encrypted."""

    def planned(self, chunk: DiskChunk) -> DiskChunk:
        """A chunk as it will be written, with the most bytes that its file may have."""

    def can_read(self, chunk: DiskChunk) -> bool:
        """Whether a file of this name can be read."""

    def read(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk | None:
        """Reads a chunk into `memory`; the chunk with its checksum, or None if the file is not what it should be."""

    def write(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk:
        """Writes a chunk of which `memory` has the bytes, padded to whole pages; the chunk as it is written."""


class PlainFiles:
    """Files of the bytes of chunks, which are copied directly from and to the pool."""

    key_id = b""

    def __init__(self, io: FileIo) -> None:
        self._io = io

    def planned(self, chunk: DiskChunk) -> DiskChunk:
        return chunk

    def can_read(self, chunk: DiskChunk) -> bool:
        return not chunk.key_id and not chunk.codec

    def read(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk | None:
        return chunk if self._io.read(fd, memory) == chunk.file_bytes else None

    def write(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk:
        self._io.write(fd, memory)
        return chunk


class DiskFolder:
    """A folder of one node. Call `open` first, and again after a failure."""

    def __init__(self, path: Path, files: ChunkFiles | None = None) -> None:
        self.path = path
        self.direct = False
        """Whether reads and writes bypass the page cache, if the file system supports it."""
        self.refusal: ConfigError | None = None
        """The error for which the folder is not used: another user could have planted what is in it."""
        self._files = files or PlainFiles(PlainIo())
        self._folder: Folder | None = None
        self._lock: int | None = None
        self._made = False
        self._buffer = ThreadBuffer()
        self._inputs: dict[bytes, KvInputs] = {}

    def inputs(self, writer: bytes) -> KvInputs | None:
        """The inputs of an engine's KV that the folder has, by their id."""
        return self._inputs.get(writer)

    def planned(self, chunk: DiskChunk) -> DiskChunk:
        """A chunk as it will be written, with the most bytes that its file may have."""
        return self._files.planned(chunk)

    def open(self) -> list[DiskChunk]:
        """Makes the folder if need be, removes what is of no use; the chunks in it, least recently used first.

        Of no use are incomplete files, files that should be encrypted and are not, and those of unknown keys or another
        codec.
        A folder that existed once is not created again if its parent is gone: a disk may have been mounted there.
        Sets `refusal` if the folder, or the one that it is in, is a link, of another user, or replaceable by others.
        """
        self.close()
        self.refusal = None
        try:
            with Folder.shared(self.path.parent, "local_disk", mode=None if self._made else 0o755) as shared:
                self._folder = shared.subfolder(self.path.name)
            self._made = True
            self._lock = self._folder.open(LOCK, os.O_RDWR | os.O_CREAT)
        except ConfigError as error:
            self.refusal = error
            raise OSError(errno.EPERM, str(error)) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another node uses it") from None
        self.direct = self._probe()
        return self._scan()

    def close(self) -> None:
        """Releases the folder for other nodes. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._folder = None  # closed when the last call has ended

    def write(self, chunk: DiskChunk, memory: memoryview, instead_of: Iterable[DiskChunk] = ()) -> DiskChunk:
        """Writes a chunk of which `memory` has the bytes, padded to whole pages, after removing others for it.

        `chunk` is as `planned`; returns it as it is written.
        """
        self.remove(instead_of)
        return self._write(chunk, memory, SUFFIX)

    def write_inputs(self, inputs: KvInputs) -> None:
        """Writes the inputs of an engine, unless the folder has them, or has enough."""
        if inputs.id in self._inputs or len(self._inputs) >= MAX_INPUT_FILES:
            return
        pages = self._buffer.get(align(len(inputs.packed)))[: align(len(inputs.packed))]
        pages[:] = inputs.packed.ljust(len(pages), b"\0")
        size_bytes = len(inputs.packed)
        described = DiskChunk(
            key=inputs_key(inputs.id),
            fingerprint=bytes(KEY_BYTES),
            token_count=1,
            size_bytes=size_bytes,
            checksum=checksum(pages[:size_bytes]),
            serial=time.time_ns(),
        )
        self._write(self.planned(described), pages, INPUTS)
        self._inputs[inputs.id] = inputs

    def _write(self, chunk: DiskChunk, memory: memoryview, suffix: str) -> DiskChunk:
        folder = self._opened()
        unfinished = str(Path(chunk.file_name).with_suffix(UNFINISHED))
        try:
            fd = self._open(folder, unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                written = self._files.write(fd, chunk, memory)
            finally:
                os.close(fd)
            folder.rename(unfinished, str(Path(written.file_name).with_suffix(suffix)))
        except OSError:
            with suppress(OSError):
                folder.unlink(unfinished)
            raise
        return written

    def read(self, chunk: DiskChunk, memory: memoryview) -> DiskChunk | None:
        """Reads a chunk into `memory`, which has its `memory_bytes`; the chunk with its checksum if that worked.

        The checksum is not verified. Counts as a use, also for a node that is started later. Raises only if the folder
        is gone: everything else concerns this chunk alone.
        """
        try:
            return self._read(chunk, memory, SUFFIX)
        except OSError as error:
            self._opened()
            logger.warning("%s cannot be read: %s", self.path / chunk.file_name, error.strerror)
            return None

    def _read(self, chunk: DiskChunk, memory: memoryview, suffix: str) -> DiskChunk | None:
        fd = self._open(self._opened(), str(Path(chunk.file_name).with_suffix(suffix)), os.O_RDONLY)
        try:
            found = self._files.read(fd, chunk, memory)
            with suppress(OSError):  # of a file system that is read-only by now
                os.utime(fd)
            return found if os.fstat(fd).st_size == chunk.file_bytes else None
        finally:
            os.close(fd)

    def remove(self, chunks: Iterable[DiskChunk]) -> None:
        """Removes the files of the chunks; missing files and those that cannot be removed are ignored."""
        folder = self._folder
        if folder is None:
            return
        for chunk in chunks:
            _unlink(folder, chunk.file_name)

    def _opened(self) -> Folder:
        """The folder. Raises `OSError` if it is closed, or not what its path names any more."""
        folder = self._folder
        if folder is None or not folder.is_in_place:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        return folder

    def _open(self, folder: Folder, name: str, flags: int) -> int:
        try:
            return folder.open(name, flags | (os.O_DIRECT if self.direct else 0))
        except ConfigError as error:
            raise OSError(errno.EPERM, str(error)) from None

    def _probe(self) -> bool:
        """Whether a file can be written past the page cache. Raises if none can be written at all."""
        folder, direct = self._opened(), False
        with mmap.mmap(-1, ALIGNMENT) as page, memoryview(page) as memory:
            for flag in (0, os.O_DIRECT):
                fd = -1
                try:
                    fd = self._open(folder, PROBE, os.O_WRONLY | os.O_CREAT | flag)
                    if flag:  # the first is only to see that there may be files: a full disk still has chunks to read
                        os.pwrite(fd, memory, 0)
                    direct = bool(flag)
                except OSError as error:
                    if not flag:
                        raise
                    direct = error.errno != errno.EINVAL
                finally:
                    if fd >= 0:
                        os.close(fd)
        folder.unlink(PROBE)
        return direct

    def _scan(self) -> list[DiskChunk]:
        found: list[tuple[int, int, DiskChunk]] = []
        inputs: list[tuple[int, str]] = []
        torn = unreadable = 0
        folder = self._opened()
        for entry in folder.scan():
            if entry.name.endswith(UNFINISHED):
                _unlink(folder, entry.name)
                continue
            if entry.name.endswith(INPUTS) and entry.is_file(follow_symlinks=False):
                inputs.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
                continue
            if not entry.name.endswith(SUFFIX) or not entry.is_file(follow_symlinks=False):
                continue  # not ours to remove
            chunk = parse_file_name(entry.name)
            status = entry.stat(follow_symlinks=False)
            if chunk is None or status.st_size != chunk.file_bytes:
                _unlink(folder, entry.name)
                torn += 1
            elif not self._files.can_read(chunk):
                _unlink(folder, entry.name)
                unreadable += 1
            else:
                found.append((status.st_mtime_ns, chunk.serial, chunk))
        if torn:
            logger.warning("%s: %d files of no whole chunk were removed", self.path, torn)
        if unreadable:
            what = "not encrypted, or of unknown keys," if self._files.key_id else "encrypted"
            logger.warning("%s: %d files that are %s or of another codec were removed", self.path, unreadable, what)
        self._load_inputs(name for _, name in sorted(inputs, reverse=True))
        found.sort(key=lambda each: each[:2])
        return [chunk for _, _, chunk in found]

    def _load_inputs(self, names: Iterable[str]) -> None:
        """Reads the files of inputs in this order, and removes those that are of no use."""
        self._inputs = {}
        for name in names:
            chunk = parse_file_name(name.removesuffix(INPUTS) + SUFFIX)
            inputs = None
            if chunk and len(self._inputs) < MAX_INPUT_FILES and chunk.size_bytes <= MAX_PACKED_BYTES:
                inputs = self._read_inputs(chunk)
            if inputs is None or inputs.id in self._inputs:
                _unlink(self._opened(), name)
            else:
                self._inputs[inputs.id] = inputs

    def _read_inputs(self, chunk: DiskChunk) -> KvInputs | None:
        pages = self._buffer.get(align(chunk.size_bytes))[: align(chunk.size_bytes)]
        with suppress(OSError):
            found = self._files.can_read(chunk) and self._read(chunk, pages, INPUTS)
            content = pages[: chunk.size_bytes]
            if found and not chunk.size_bytes % LENGTH_BYTES and checksum(content) == found.checksum:
                inputs = KvInputs.from_packed(content)
                return inputs if inputs and inputs_key(inputs.id) == chunk.key else None
        return None


def _unlink(folder: Folder, name: str) -> None:
    with suppress(OSError):
        folder.unlink(name)
