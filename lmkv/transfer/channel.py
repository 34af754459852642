"""The seam between a node and whatever moves its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from lmkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One run of bytes to bring from a peer's memory into the own; addresses as each side's process knows them."""

    remote_address: int
    local_address: int
    size_bytes: int


class Channel(Protocol):
    """One node's end: its registered memory, and the peers whose memory it may read. Belongs to one event loop."""

    @property
    def name(self) -> str:
        """What the channel is called in configuration and on the wire."""

    @property
    def metadata(self) -> bytes:
        """What a peer must know to read this memory; a secret for that reason."""

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        """Makes a peer's memory readable. Repeating it is safe.

        Raises `ChannelUnsupported` if the metadata is not of this channel, `WrongInstance` if it is another peer's,
        `Unreachable` if the peer does not answer.
        """

    async def remove_peer(self, peer_name: str) -> None:
        """Forgets a peer, once its running reads have ended. An unknown peer is no error."""

    async def read(
        self, peer_name: str, copies: Sequence[Copy], timeout_seconds: float, on_stopped: Callable[[], None]
    ) -> None:
        """Copies bytes out of a peer's memory. All of them are there when it returns.

        Raises `Unreachable` if that takes longer than `timeout_seconds`, or the peer is gone or was never added.

        However the call ends, returning, raising or cancelled, `on_stopped` is called exactly once, on the loop, when
        no more bytes can arrive: before a return, but perhaps long after an error or a cancellation, since nobody can
        call back bytes that a frozen peer has yet to send. Until then the memory of `copies` must not be used.
        """

    def serving(self) -> AbstractContextManager[None]:
        """While any such context is open, peers may read this memory: a read needs the owner to make progress too."""

    async def aclose(self) -> None:
        """Ends every read, then lets go of the memory and all peers. Idempotent."""


def open_channel(name: str, agent_name: str, address: int, size_bytes: int, backends: Sequence[str]) -> Channel:
    """The channel called `name` over the memory at `address`, which must stay mapped until it is closed.

    `agent_name` must be one that nobody else in the fleet has or ever had. Raises `ConfigError` if there is no such
    channel, or it cannot start.
    """
    if name != "nixl":
        raise ConfigError(f"transfer_channel: {name!r} is unknown; use 'nixl'", key="transfer_channel")
    from lmkv.transfer.nixl import NixlChannel  # NIXL stays out of processes that do not transfer

    return NixlChannel(agent_name, address, size_bytes, backends)
