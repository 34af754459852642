"""A shared store as the backend of the remote tier: its calls run on threads, and its answers are remembered.

Objects contain the bytes of a chunk, plain, encoded, encrypted, or both.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import lmkv_kernels as kernels
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey
from lmkv.kv_inputs import MAX_PACKED_BYTES, KvInputs, inputs_key
from lmkv.misses import MissReason
from lmkv.runtime.patience import MOST_SECONDS
from lmkv.spec import KvSpec
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.eviction import EvictionQueue
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers import encryption_header
from lmkv_server.node.tiers.backend import BackendHealth, BackendTimes, WriteResult
from lmkv_server.node.tiers.backend_tier import BackendTier
from lmkv_server.node.tiers.codec import WORD_BYTES, ChunkCodec, most_encoded_bytes
from lmkv_server.node.tiers.encryption_header import STEP_BYTES
from lmkv_server.node.tiers.remote.store import (
    ENCODED_ROOT,
    ENCRYPTED_ROOT,
    HEADER_BYTES,
    INPUTS_ROOT,
    ROOT,
    RemoteChunk,
    RemoteObject,
    RemoteStore,
    StoreRefused,
    object_name,
)
from lmkv_server.node.tiers.threads import ThreadBuffer

if TYPE_CHECKING:  # it needs `cryptography`, which is optional
    from lmkv_server.node.tiers.encryption import ChunkEncryption

logger = logging.getLogger(__name__)


class ObjectFormat(Protocol):
    """Puts and gets chunks. Called on several threads at a time; raises what the store raises."""

    @property
    def root(self) -> str:
        """The beginning of the names of all objects."""

    @property
    def header_bytes(self) -> int:
        """The bytes that objects have besides those that are stored of their chunks."""

    def chunk_bytes(self, object_bytes: int, most_bytes: int) -> int:
        """Bytes of the chunk in an object of this size, or `most_bytes` if that is unknown; 0 if it is none."""

    def put(self, store: RemoteStore, chunk: RemoteObject, memory: memoryview) -> bool:
        """Puts a chunk of which `memory` has the bytes; False if the store has it already."""

    def get(self, store: RemoteStore, chunk: RemoteChunk, memory: memoryview) -> RemoteObject | None:
        """Gets a chunk into memory that it may fill in part; None if it is absent or not what it should be.

        Its checksum is not verified.
        """


_ENCRYPTED_HEADER_BYTES = HEADER_BYTES + encryption_header.HEADER_BYTES


class PlainObjects:
    """Objects of the bytes of chunks, which are copied directly from and to the pool."""

    def __init__(self, pads_headers: bool = False, prefix: str = "") -> None:
        """`pads_headers` is the store's; `prefix` is what names have before the root of plain objects."""
        self.root = prefix + ROOT
        self.header_bytes = align(HEADER_BYTES) if pads_headers else HEADER_BYTES

    def chunk_bytes(self, object_bytes: int, most_bytes: int) -> int:
        return _without(self.header_bytes, object_bytes, most_bytes)

    def put(self, store: RemoteStore, chunk: RemoteObject, memory: memoryview) -> bool:
        header = chunk.header.ljust(self.header_bytes, b"\0")
        return store.put(object_name(chunk.fingerprint, chunk.key, self.root), (memoryview(header), memory))

    def get(self, store: RemoteStore, chunk: RemoteChunk, memory: memoryview) -> RemoteObject | None:
        header = bytearray(self.header_bytes)
        size_bytes = store.get(chunk.name, (memoryview(header), memory))
        return chunk.described(bytes(header[:HEADER_BYTES]), size_bytes - self.header_bytes)


class EncryptedObjects:
    """Objects of encrypted bytes. Each thread that writes has a buffer of the largest chunk that it has written."""

    def __init__(self, encryption: ChunkEncryption, pads_headers: bool = False, prefix: str = "") -> None:
        self.root = f"{prefix}{ENCRYPTED_ROOT}{encryption.scope}/"
        self.header_bytes = align(_ENCRYPTED_HEADER_BYTES) if pads_headers else _ENCRYPTED_HEADER_BYTES
        self._encryption = encryption
        self._buffer = ThreadBuffer()

    def chunk_bytes(self, object_bytes: int, most_bytes: int) -> int:
        return _without(self.header_bytes, object_bytes, most_bytes)

    def put(self, store: RemoteStore, chunk: RemoteObject, memory: memoryview) -> bool:
        buffer = self._buffer.get(len(memory))
        encryptor = self._encryption.encryptor(chunk)
        for at in range(0, len(memory), STEP_BYTES):
            encryptor.update_into(memory[at : at + STEP_BYTES], buffer[at : min(at + STEP_BYTES, len(memory))])
        header = (replace(chunk, checksum=0).header + encryptor.header()).ljust(self.header_bytes, b"\0")
        name = object_name(chunk.fingerprint, chunk.key, self.root)
        return store.put(name, (memoryview(header), buffer[: len(memory)]))

    def get(self, store: RemoteStore, chunk: RemoteChunk, memory: memoryview) -> RemoteObject | None:
        """Decrypts in place, step by step. If this returns None, `memory` may contain anything."""
        header = bytearray(self.header_bytes)
        size_bytes = store.get(chunk.name, (memoryview(header), memory)) - self.header_bytes
        described = chunk.described(bytes(header[:HEADER_BYTES]), size_bytes)
        decryptor = (
            self._encryption.decryptor(described, bytes(header[HEADER_BYTES:_ENCRYPTED_HEADER_BYTES]))
            if described
            else None
        )
        if described is None or decryptor is None:
            return None
        memory = memory[:size_bytes]
        buffer = self._buffer.get(min(STEP_BYTES, len(memory)))
        for at in range(0, len(memory), STEP_BYTES):
            part = memory[at : at + STEP_BYTES]
            decryptor.update_into(part, buffer[: len(part)])
            part[:] = buffer[: len(part)]
        checksum = decryptor.checksum()
        return None if checksum is None else replace(described, checksum=checksum)


class StoredInputs:
    """The inputs of engines in a store, each as an object. Called on several threads at a time."""

    def __init__(self, store: RemoteStore, encryption: ChunkEncryption | None) -> None:
        self._objects = unencoded_objects(encryption, store.pads_headers, INPUTS_ROOT)
        self._store = store
        self._known: dict[bytes, KvInputs | None] = {}

    def get(self, writer: bytes) -> KvInputs | None:
        """The inputs of this id, if they have been put or fetched."""
        return self._known.get(writer)

    def put(self, chunk: Chunk) -> None:
        """Puts the inputs of the engine that has stored a chunk, once. Raises what the store raises."""
        inputs = chunk.origin.writer
        if inputs is None or self._known.get(inputs.id):
            return
        described = RemoteObject(
            key=inputs_key(inputs.id),
            fingerprint=chunk.fingerprint,
            token_count=1,
            size_bytes=len(inputs.packed),
            checksum=kernels.checksum(inputs.packed),
        )
        self._objects.put(self._store, described, memoryview(inputs.packed))
        self._note(inputs.id, inputs)

    def fetch(self, writer: bytes, spec: KvSpec) -> None:
        """Gets the inputs that a chunk names, once."""
        if not writer or writer in self._known:
            return
        inputs, memory = None, memoryview(bytearray(MAX_PACKED_BYTES))
        asked = RemoteChunk(key=inputs_key(writer), spec=spec, size_bytes=len(memory), root=self._objects.root)
        with suppress(OSError):  # the chunk is of use without them
            found = self._objects.get(self._store, asked, memory)
            if found and not found.size_bytes % WORD_BYTES:
                content = memory[: found.size_bytes]
                is_intact = kernels.checksum(content) == found.checksum
                inputs = KvInputs.from_packed(content) if is_intact else None
        self._note(writer, inputs if inputs and inputs.id == writer else None)

    def _note(self, writer: bytes, inputs: KvInputs | None) -> None:
        if len(self._known) >= MAX_KNOWN_INPUTS:
            self._known.clear()
        self._known[writer] = inputs


class EncodedObjects:
    """Objects of encoded chunks, which others put and get, plain or encrypted."""

    def __init__(self, codec: ChunkCodec, encryption: ChunkEncryption | None, pads_headers: bool = False) -> None:
        prefix = f"{ENCODED_ROOT}{codec.scope}/"
        self._objects = unencoded_objects(encryption, pads_headers, prefix)
        self._codec = codec
        self._buffer = ThreadBuffer()

    @property
    def root(self) -> str:
        return self._objects.root

    @property
    def header_bytes(self) -> int:
        return self._objects.header_bytes

    def chunk_bytes(self, object_bytes: int, most_bytes: int) -> int:
        return most_bytes if self._objects.chunk_bytes(object_bytes, most_encoded_bytes(most_bytes)) else 0

    def put(self, store: RemoteStore, chunk: RemoteObject, memory: memoryview) -> bool:
        pages, encoded_bytes = self._codec.encode(chunk, memory)
        encoded = pages[:encoded_bytes]
        stored = replace(chunk, size_bytes=encoded_bytes, checksum=kernels.checksum(encoded))
        return self._objects.put(store, stored, encoded)

    def get(self, store: RemoteStore, chunk: RemoteChunk, memory: memoryview) -> RemoteObject | None:
        """Verifies the stored bytes, and decodes them. If this returns None, `memory` may contain anything."""
        most = most_encoded_bytes(chunk.size_bytes)
        buffer = self._buffer.get(most)
        stored = self._objects.get(store, chunk, buffer[:most])
        if stored is None or stored.size_bytes % WORD_BYTES:
            return None
        encoded = buffer[: stored.size_bytes]
        if kernels.checksum(encoded) != stored.checksum:
            return None
        size_bytes = self._codec.decode(chunk.fingerprint, encoded, memory)
        if size_bytes is None:
            return None
        checksum = kernels.checksum(memory[:size_bytes])
        encoded_bytes = stored.size_bytes
        return replace(stored, size_bytes=size_bytes, checksum=checksum, is_verified=True, encoded_bytes=encoded_bytes)


def unencoded_objects(encryption: ChunkEncryption | None, pads_headers: bool, prefix: str = "") -> ObjectFormat:
    """The format of objects that contain the bytes of chunks as they are, or encrypted."""
    if encryption:
        return EncryptedObjects(encryption, pads_headers, prefix)
    return PlainObjects(pads_headers, prefix)


def _without(header_bytes: int, object_bytes: int, most_bytes: int) -> int:
    size_bytes = object_bytes - header_bytes
    return size_bytes if 0 < size_bytes <= most_bytes else 0


READ_THREADS = 8
WRITE_THREADS = 2
LOOKUP_THREADS = 2
KNOWN_SECONDS = 10.0
"""The time for which the answer that the store holds a chunk is used: from a lookup to its load."""
MAX_KNOWN = 65_536
MAX_KNOWN_INPUTS = 256
"""Engines whose inputs are remembered."""
MAX_WRITTEN = 262_144
"""Objects that the node counts towards quotas of their owners; of more, those that were not used for longest are not
counted any more."""
REMOVED_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenObject:
    """An object that this node has written for an owner."""

    key: ChunkKey
    parent: ChunkKey | None
    owner: bytes
    extent_bytes: int
    name: str


class StoreBackend:
    """A `RemoteStore`, and which chunks it is known to hold. One event loop owns it."""

    def __init__(
        self,
        tier: BackendTier[RemoteChunk],
        store: RemoteStore,
        objects: ObjectFormat,
        times: BackendTimes,
        encryption: ChunkEncryption | None = None,
    ) -> None:
        """`objects` are encoded with the codec of the tier, if it has one, and encrypted with its `encryption`."""
        name = tier.name
        threads = {"read": READ_THREADS, "write": WRITE_THREADS, "lookup": LOOKUP_THREADS}
        self.health = BackendHealth(name, store.shown, self, threads, times)
        self._tier = tier
        self.one_per_request = store.one_per_request
        self.objects = objects
        """The format of objects and of their names."""
        self._name = name
        self._store = store
        self._inputs = StoredInputs(store, encryption)
        self._known: OrderedDict[ChunkKey, tuple[RemoteChunk, float]] = OrderedDict()  # until when
        self._owed: set[str] = set()
        """Prefixes of names that are still to be removed; until then nothing is read."""
        self._written: dict[ChunkKey, WrittenObject] = {}
        """The objects that count towards quotas, if there are any."""
        self._written_queue = EvictionQueue()
        self.refusal: ConfigError | None = None
        """Why the store cannot be used as it is configured."""
        self._background: set[asyncio.Task[None]] = set()
        self._removals: set[asyncio.Task[None]] = set()
        """The tasks of `_background` that remove single objects."""

    @property
    def evicted_count(self) -> int:
        """Chunks that this node has removed from the store to make room."""
        return self._store.evicted_count

    @property
    def usable(self) -> bool:
        """Whether chunks can be looked up and read now, if there is time enough for the store to answer."""
        return self.health.answers_within(MOST_SECONDS) and not self._owed

    @property
    def writable(self) -> bool:
        """Whether chunks can be written now."""
        return self.health.usable and not self.health.is_full

    def has_room(self, _size_bytes: int, /) -> bool:
        """True: the store evicts by itself."""
        return True

    def find(self, key: ChunkKey) -> RemoteChunk | None:
        """The chunk, if the store answered a short while ago that it holds it."""
        found = self._known.get(key)
        return found[0] if found and time.monotonic() < found[1] else None

    def holds(self, chunk: RemoteChunk) -> bool:
        """Whether the chunk was not dropped since it was found."""
        found = self._known.get(chunk.key)
        return self.health.is_open and found is not None and found[0] is chunk

    def note(self, spec: KvSpec, keys: Sequence[ChunkKey], sizes: Sequence[int]) -> int:
        """Remembers chunks by their sizes, up to the first that has none; returns how many these are."""
        until = time.monotonic() + KNOWN_SECONDS
        for index, (key, size_bytes) in enumerate(zip(keys, sizes, strict=False)):
            if not size_bytes:
                return index
            chunk = RemoteChunk(key=key, spec=spec, size_bytes=size_bytes, root=self.objects.root)
            if (known := self._known.pop(key, None)) and known[0] == chunk:
                chunk = known[0]  # a read of it may run
            self._known[key] = (chunk, until)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return min(len(keys), len(sizes))

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Forgets that the store holds these chunks."""
        for key in keys:
            self._known.pop(key, None)
            self._refund(key)

    @property
    def written_count(self) -> int:
        """Objects that count towards quotas."""
        return len(self._written)

    def inputs(self, writer: bytes) -> KvInputs | None:
        """The inputs of an engine, by their id."""
        return self._inputs.get(writer)

    def keeps(self, key: ChunkKey) -> bool:
        """Whether this node has written the chunk."""
        return key in self._written

    def is_free(self, key: ChunkKey) -> bool:
        """Whether this node has written the chunk, and no chunk behind it."""
        return key in self._written and self._written_queue.is_free(key)

    def evict(self, key: ChunkKey) -> None:
        """Removes an object, if this node has written it, in the background."""
        if written := self._written.get(key):
            self.forget([key])
            self._tier.count_evicted()
            self._remove_in_background([written.name])

    def check(self) -> None:
        """Asserts that quotas count what was written, and no more."""
        self._written_queue.check()
        assert len(self._written_queue) == len(self._written) <= MAX_WRITTEN
        if self._tier.quotas is not None:
            self._tier.quotas.check(self._written.values())

    def _charge(self, chunk: Chunk) -> None:
        """Counts an object that was written towards its owner's quota."""
        if self._tier.quotas is None or not chunk.owner or chunk.key in self._written:
            return
        written = WrittenObject(
            key=chunk.key,
            parent=chunk.parent,
            owner=chunk.owner,
            extent_bytes=chunk.size_bytes,
            name=object_name(chunk.fingerprint, chunk.key, self.objects.root),
        )
        while len(self._written) >= MAX_WRITTEN and (key := self._written_queue.pop()) is not None:
            self._tier.refund(self._written.pop(key))
        self._written[chunk.key] = written
        self._written_queue.add(chunk.key, chunk.parent)
        self._tier.charge(written)

    def _refund(self, key: ChunkKey) -> None:
        if written := self._written.pop(key, None):
            self._written_queue.remove(key)
            self._tier.refund(written)

    def _use(self, key: ChunkKey) -> None:
        if self._tier.quotas is not None and (written := self._written.get(key)):
            self._written_queue.use([key])
            self._tier.quotas.use([written])

    async def sizes(self, names: Sequence[str], seconds: float) -> list[int]:
        """Sizes of objects, 0 of absent objects; empty if the store fails or does not answer in time."""
        try:
            return await self.health.run_within(seconds, "lookup", self._store.sizes, names) or []
        except OSError as error:
            self.health.close(error)
            return []

    async def read(
        self, chunk: RemoteChunk, memory: memoryview, is_intact: Callable[[RemoteObject], bool]
    ) -> RemoteObject | None:
        """Reads a chunk; None if it is gone, not what its header says, or not intact, or if the store fails."""

        def read() -> RemoteObject | None:
            described = self.objects.get(self._store, chunk, memory)
            if described is None or not chunk.is_whole(described):
                return None
            self._inputs.fetch(described.writer, chunk.spec)
            return described if described.is_verified or is_intact(described) else None

        self._use(chunk.key)
        try:
            return await self.health.run("read", read)
        except OSError as error:
            self.health.close(error)
            return None

    async def write(self, chunk: Chunk, memory: memoryview, is_wanted: Callable[[], bool]) -> WriteResult:
        """Writes a chunk, unless the store holds it."""
        described = RemoteObject(
            key=chunk.key,
            parent=chunk.parent,
            fingerprint=chunk.fingerprint,
            token_count=chunk.token_count,
            size_bytes=chunk.size_bytes,
            checksum=chunk.checksum,
            writer=writer.id if (writer := chunk.origin.writer) else b"",
        )

        def put() -> bool:
            self._inputs.put(chunk)
            return self.objects.put(self._store, described, memory[: chunk.size_bytes])

        if self._removals:  # what was damaged is removed first: its removal would take the new object
            await asyncio.wait(set(self._removals))
        try:
            is_new = await self.health.run("write", put)
        except StoreRefused as error:
            self.health.full(error)
            return WriteResult.SKIPPED
        except OSError as error:
            self.health.close(error)
            return WriteResult.SKIPPED
        if not is_wanted():
            self._remove_in_background([object_name(chunk.fingerprint, chunk.key, self.objects.root)])
            return WriteResult.UNWANTED
        if is_new:
            self._charge(chunk)
        return WriteResult.WRITTEN if is_new else WriteResult.PRESENT

    def discard(self, chunks: Sequence[RemoteChunk], _reason: MissReason, /) -> None:
        """Forgets chunks, and removes their objects in the background.

        Where the store fails they stay, and are verified when they are read again.
        """
        self.forget([chunk.key for chunk in chunks])
        self._remove_in_background([chunk.name for chunk in chunks])

    async def remove(self, names: Sequence[str], *, dry_run: bool = False) -> int:
        """Removes, or only counts, objects; returns how many there were.

        Raises `StoreRefused`, or another `OSError` and is closed then.
        """

        def remove(part: Sequence[str]) -> int:
            count = sum(size > 0 for size in self._store.sizes(part))
            if not dry_run:
                self._store.remove(part)
            return count

        count = 0
        try:
            for start in range(0, len(names), REMOVED_AT_ONCE):
                count += await self.health.run("lookup", remove, names[start : start + REMOVED_AT_ONCE])
        except StoreRefused:  # it answers
            raise
        except OSError as error:
            self.health.close(error)
            raise
        return count

    async def remove_all(self, prefix: str, *, dry_run: bool = False) -> int:
        """Removes all objects whose name begins with `prefix`, as `remove` does.

        Nothing is read until they are removed: if the store fails, until it is open again and has removed them.
        """
        if not dry_run:
            self._known.clear()
            for written in [one for one in self._written.values() if one.name.startswith(prefix)]:
                self._refund(written.key)
            self._owed.add(prefix)
        try:
            count, pages = 0, self._store.names(prefix)
            while page := await self.health.run("lookup", lambda: list(islice(pages, 1))):
                count += len(page[0])
                if page[0] and not dry_run:
                    await self.health.run("lookup", self._store.remove, page[0])
        except OSError as error:
            self.health.close(error)
            raise
        if not dry_run:
            self._owed.discard(prefix)
        return count

    async def settle(self) -> None:
        """Returns once removals that were started have ended."""
        if self._removals:
            await asyncio.wait(set(self._removals))

    async def aclose(self) -> None:
        """Ends running calls within a bounded time, and releases the store. Idempotent."""
        await self.health.aclose()
        self._store.close()
        for task in self._background:  # their calls have ended, or are left behind
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)

    def lost(self) -> None:
        """Reports the loss; what the store holds is asked again when it is open."""
        self._tier.lost()

    async def open(self) -> None:
        """Returns once the store has answered. Raises `OSError`, and sets `refusal`."""
        self.refusal = None
        try:
            await self.health.run("lookup", self._store.open)
        except ConfigError as error:
            self.refusal = error
            raise OSError(errno.EINVAL, str(error)) from None
        self._known.clear()
        self.health.opened()
        logger.info("%s: chunks are kept in %s, too", self._name, self.health.name)
        self._run_in_background(self._remove_owed())
        self._tier.opened(self)

    async def _remove_owed(self) -> None:
        for prefix in list(self._owed):
            await self.remove_all(prefix)

    def _remove_in_background(self, names: Sequence[str]) -> None:
        async def remove() -> None:
            await self.remove(names)

        removal = self._run_in_background(remove())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            with suppress(OSError):
                await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
