"""The seam between a node and whatever moves its bytes: what a channel stands on, and what it can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from lmkv.errors import Unreachable
from lmkv.pool.pool import Pool
from lmkv.transfer.access import PeerReader, ReadAccess


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Memory that bytes are copied from or to."""

    address: int
    size_bytes: int
    device: int | None = None
    """The CUDA device whose memory it is; None: host memory."""

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether all of these bytes lie in it."""
        return size_bytes >= 0 and self.address <= address <= self.address + self.size_bytes - size_bytes


SummedCopy = Callable[[int, int, int, int], int]
"""Copies a run of a chunk's fields: to this address, from that one, so many bytes, the first of them the word of this
index. Returns what they add to the chunk's checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """One node's end, which a channel is opened over. The pool must stay mapped until the channel is closed."""

    name: str
    """What peers call it; nobody else in the fleet may have it, or ever have had it."""
    pool: Pool
    host: str = "127.0.0.1"
    """Address of this machine that peers reach."""
    port: int = 0
    """Where a channel that listens does so; 0: at a free one."""
    socket_path: Path | None = None
    """Where processes of this host are given the pool; None: they are not."""
    summed_copy: SummedCopy | None = None
    """How a channel copies that does so itself, so that nobody need go over the bytes once more; None: plainly."""
    access: ReadAccess = field(default_factory=ReadAccess)
    """Who may read what of the pool; asked by the channels whose owner sends the bytes itself."""
    nixl_backends: tuple[str, ...] = ("UCX",)
    options: Mapping[str, str] = field(default_factory=dict)
    """`transfer_options`: options of a channel that is a plug-in, which refuses those that it does not know."""

    @property
    def region(self) -> Region:
        """The pool's memory."""
        return Region(address=self.pool.address, size_bytes=self.pool.size_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One run of bytes to bring from a peer's memory into the own; addresses as each side's process knows them."""

    remote_address: int
    local_address: int
    size_bytes: int


class Channel(Protocol):
    """One way for bytes into one node's pool, out of those of its peers. Belongs to one event loop."""

    @property
    def name(self) -> str:
        """What the channel is called in configuration and on the wire."""

    def metadata_for(self, reader: PeerReader) -> bytes:
        """What this reader must know to read this memory; a secret. Other readers get other secrets where the channel
        can tell its readers apart.
        """

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        """Makes a peer's memory readable. Repeating it is safe.

        Raises `ChannelUnsupported` if the metadata is not of this channel or the peer is out of its reach,
        `WrongInstance` if it is another peer's, `Unreachable` if the peer does not answer or refuses.
        """

    async def remove_peer(self, peer_name: str) -> None:
        """Forgets a peer, once its running reads have ended. An unknown peer is no error."""

    async def read(
        self,
        peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",
    ) -> list[int] | None:
        """Copies bytes out of a peer's memory, under a grant of that peer. All of them are there when it returns.

        Returns the checksum of each copy, a whole chunk, where the channel has summed on the way.

        Raises `Unreachable` if that takes longer than `timeout_seconds`, the peer is gone or was never added, the
        peer refuses since the grant does not cover the bytes (`tcp` and `ucx` can), or bytes lie outside of its pool
        or of the own one: then none of them is written.

        However the call ends, returning, raising or cancelled, `on_stopped` is called exactly once, on the loop, when
        no more bytes can arrive: before a return, but perhaps long after an error or a cancellation, since nobody can
        call back bytes that a frozen peer has yet to send. Until then the memory of `copies` must not be used.
        """

    def serve(self, needed: bool) -> None:
        """Says whether a peer may read this memory now: some channels make progress for it only then."""

    async def aclose(self) -> None:
        """Ends every read, then lets go of the memory and all peers. Idempotent."""


class Peer(Protocol):
    """What a channel knows of a peer, at the least."""

    @property
    def region(self) -> Region:
        """Its pool, where it is in its own process."""


P = TypeVar("P", bound=Peer)


def find_peer(
    peers: Mapping[str, P], peer_name: str, copies: Sequence[Copy], own: Region, on_stopped: Callable[[], None]
) -> P:
    """The peer that a read may begin from.

    Raises `Unreachable`, and says that the read has stopped, if there is no such peer, or as `check_copies` does.
    """
    try:
        if peer_name not in peers:
            raise Unreachable(f"{peer_name} is not connected", peer=peer_name)
        check_copies(peer_name, copies, peers[peer_name].region, own)
    except Unreachable:
        on_stopped()
        raise
    return peers[peer_name]


def check_copies(peer_name: str, copies: Sequence[Copy], peer: Region, own: Region) -> None:
    """Raises `Unreachable` if bytes would come from outside a peer's memory, or land outside the own."""
    for copy in copies:
        if not peer.holds(copy.remote_address, copy.size_bytes):
            raise Unreachable(f"{peer_name} has no such memory: {copy}", peer=peer_name)
        if not own.holds(copy.local_address, copy.size_bytes):
            raise Unreachable(f"what is read from {peer_name} would land outside of the own pool: {copy}")
