"""The contract of transfer channels, the values that they work with, and the access control of the local pool.

`PeerService` admits readers and opens grants, on the event loop. The servers of `tcp` and `ucx` check each read, in
threads of their own. `shm`, `nixl` and `mooncake` cannot check: readers access the memory themselves.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from lmkv.auth.credentials import Credentials
from lmkv.errors import ChannelUnsupported, Unreachable, WrongInstance
from lmkv.pool.pool import Pool

TOKEN_BYTES = 32
GRANT_ID_BYTES = 32
"""Length of a grant's id: 128 random bits in hexadecimal."""

ByteRange = tuple[int, int]
"""Address in the owner's process, and size in bytes."""


def new_grant_id() -> str:
    """A random id that cannot be guessed."""
    return secrets.token_hex(GRANT_ID_BYTES // 2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PeerReader:
    """One peer that may connect to this node's channels."""

    peer_name: str
    """`instance_id:epoch`, as the peer states it."""
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), repr=False)
    """The secret that it sends when it connects."""


@dataclass(frozen=True, slots=True)
class _OpenGrant:
    """The extents of one grant, sorted by address."""

    starts: Sequence[int]
    ends: Sequence[int]
    reader: PeerReader | None
    peer_name: str

    def is_for(self, reader: PeerReader) -> bool:
        return self.reader is reader or (self.reader is None and self.peer_name == reader.peer_name)

    def contains(self, address: int, size_bytes: int) -> bool:
        index = bisect_right(self.starts, address) - 1
        return index >= 0 and size_bytes >= 0 and address + size_bytes <= self.ends[index]


class ReadAccess:
    """The readers and grants of one pool. `find` and `check` may be called on any thread."""

    def __init__(self) -> None:
        self.refused_count = 0
        """Number of reads refused because no live grant of the reader covered them."""
        self._readers: dict[bytes, PeerReader] = {}  # by digest, so that the duration of a lookup reveals nothing
        self._grants: dict[bytes, _OpenGrant] = {}
        self._lock = threading.Lock()

    def admit(self, peer_name: str) -> PeerReader:
        """Admits a reader, until `revoke`. It cannot read anything before a grant is opened."""
        reader = PeerReader(peer_name=peer_name)
        self._readers[_digest(reader.token)] = reader
        return reader

    def revoke(self, reader: PeerReader) -> None:
        """Refuses further connections of a reader. Idempotent."""
        self._readers.pop(_digest(reader.token), None)

    def open(
        self, grant_id: str, ranges: Iterable[ByteRange], *, reader: PeerReader | None = None, peer_name: str = ""
    ) -> None:
        """Permits reads of these ranges under a grant, until `close`.

        They are for `reader`; without one, for the reader named `peer_name` that knows the grant's id.
        """
        ordered = sorted(ranges)
        starts, ends = [start for start, _ in ordered], [start + size for start, size in ordered]
        self._grants[grant_id.encode()] = _OpenGrant(starts, ends, reader, peer_name)

    def close(self, grant_id: str) -> None:
        """Closes a grant. A read that has begun may still be sent. Idempotent."""
        self._grants.pop(grant_id.encode(), None)

    def find(self, token: bytes) -> PeerReader | None:
        return self._readers.get(_digest(token))

    def check(self, reader: PeerReader, grant_id: bytes, ranges: Iterable[ByteRange]) -> bool:
        """Whether a live grant of this reader covers all ranges; a refusal is counted."""
        grant = self._grants.get(grant_id)
        if grant and grant.is_for(reader) and all(grant.contains(address, size) for address, size in ranges):
            return True
        with self._lock:
            self.refused_count += 1
        return False


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A range of memory that bytes are copied from or to."""

    address: int
    size_bytes: int
    device: int | None = None
    """Ordinal of the CUDA device that has the memory; None: host memory."""

    def contains(self, address: int, size_bytes: int) -> bool:
        """Whether the range contains all of these bytes."""
        return size_bytes >= 0 and self.address <= address <= self.address + self.size_bytes - size_bytes


SummedCopy = Callable[[int, int, int, int], int]
"""Copies a range of a chunk: target address, source address, size in bytes, index of its first word in the chunk.
Returns what the range adds to the chunk's checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelEnd:
    """The local node, as a channel needs it. The pool must stay mapped until the channel is closed."""

    name: str
    """The name of the node for peers; unique in the fleet, also over time."""
    pool: Pool
    host: str = "127.0.0.1"
    """Address of this machine that peers can reach."""
    port: int = 0
    """Port of a channel that listens; 0: a free one."""
    socket_path: Path | None = None
    """Unix socket that passes the pool to processes of this host; None: it is not passed."""
    summed_copy: SummedCopy | None = None
    """Copy function that also computes checksums, for channels that copy themselves; None: `memmove`."""
    access: ReadAccess = field(default_factory=ReadAccess)
    """Access control, for channels whose owner sends the bytes itself."""
    tls: Credentials | None = None
    """This node's certificate and the CAs of its peers, for a channel that encrypts; None: it does not."""
    require_encryption: bool = False
    """Whether channels that would send bytes unencrypted to another host are refused."""
    nixl_backends: tuple[str, ...] = ("UCX",)
    options: Mapping[str, str] = field(default_factory=dict)
    """`transfer_options`: options of a channel that is a plug-in, which refuses those that it does not know."""

    @property
    def region(self) -> Region:
        """The pool's memory."""
        return Region(address=self.pool.address, size_bytes=self.pool.size_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A range of bytes to copy from a peer's memory into the local pool; each address is valid in its own process."""

    remote_address: int
    local_address: int
    size_bytes: int


class Channel(Protocol):
    """Reads bytes from the pools of peers into the local pool. All methods are called on one event loop."""

    @property
    def name(self) -> str:
        """Name of the channel in configuration and messages."""

    def metadata_for(self, reader: PeerReader) -> bytes:
        """The bytes by which this reader can read the local pool. They are a secret.

        Channels that can distinguish their readers give each reader its own.
        """

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        """Connects to a peer, so that its memory can be read. Idempotent.

        Raises `ChannelUnsupported` if the metadata is of another channel or the channel cannot reach the peer,
        `WrongInstance` if the metadata is of another peer, `Unreachable` if the peer does not answer or refuses.
        """

    async def remove_peer(self, peer_name: str) -> None:
        """Disconnects from a peer after its reads in flight have ended. Idempotent."""

    async def read(
        self,
        peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",
    ) -> list[int] | None:
        """Copies bytes from a peer's memory, under a grant of that peer. All bytes have arrived when it returns.

        Returns the checksum of each copy, a whole chunk, if the channel computes checksums while copying.

        Raises `Unreachable` if the read takes longer than `timeout_seconds`, the peer is lost or was never added, the
        peer refuses because the grant does not cover the bytes (only `tcp` and `ucx` can), or bytes are outside of its
        pool or of the local one: then nothing is written.

        `on_stopped` is called exactly once, on the event loop, when no more bytes can arrive: before a return, but
        possibly long after an error or a cancellation, because bytes that a frozen peer has yet to send cannot be
        revoked. Until then the memory of `copies` must not be used.
        """

    def serve(self, needed: bool) -> None:
        """Sets whether peers may read the local pool now: some channels make progress for peers only then."""

    async def aclose(self) -> None:
        """Ends all reads, then releases the memory and disconnects from all peers. Idempotent."""


def check_copies(peer_name: str, copies: Sequence[Copy], peer: Region, own: Region) -> None:
    """Raises `Unreachable` if a copy is outside of the peer's memory or of the local pool."""
    for copy in copies:
        if not peer.contains(copy.remote_address, copy.size_bytes):
            raise Unreachable(f"{copy} is outside of the memory of {peer_name}", peer=peer_name)
        if not own.contains(copy.local_address, copy.size_bytes):
            raise Unreachable(f"{copy}, read from {peer_name}, is outside of the local pool")


_DIGEST_BYTES = 8
_HEAD = struct.Struct("!HHQQ")  # sizes of channel name and owner name, address and size of the owner's pool


def wrap(channel: str, end: ChannelEnd, payload: bytes) -> bytes:
    """Encodes the metadata of a channel of the local node."""
    names = channel.encode(), end.name.encode()
    head = _HEAD.pack(*map(len, names), end.pool.address, end.pool.size_bytes)
    return _sealed(b"".join((head, *names, payload)))


def unwrap(channel: str, owner: str, metadata: bytes) -> tuple[Region, bytes]:
    """Decodes the owner's pool and the payload.

    Raises `ChannelUnsupported` if the metadata is damaged or of another channel, `WrongInstance` if not of `owner`.
    """
    content = metadata[_DIGEST_BYTES:]
    if len(content) < _HEAD.size or _sealed(content) != metadata:
        raise ChannelUnsupported("the channel metadata is damaged, or of another version of lmkv", channel=channel)
    channel_size, owner_size, address, size_bytes = _HEAD.unpack_from(content)
    names = content[_HEAD.size : _HEAD.size + channel_size + owner_size]
    found, found_owner = (part.decode(errors="replace") for part in (names[:channel_size], names[channel_size:]))
    if found != channel:
        raise ChannelUnsupported(f"the channel metadata is of {found!r}, not of {channel!r}", channel=channel)
    if found_owner != owner:
        raise WrongInstance(f"the channel metadata is of {found_owner}, not of {owner}", peer=owner)
    return Region(address=address, size_bytes=size_bytes), content[_HEAD.size + len(names) :]


def _sealed(content: bytes) -> bytes:
    return sha256(content).digest()[:_DIGEST_BYTES] + content
