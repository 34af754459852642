"""The transfer channels of a node, and which of them is used for each peer (docs/contribute/transfer.md)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from lmkv.errors import ChannelUnsupported, ConfigError, LmkvError, Unreachable
from lmkv.plugins import CHANNELS, load_plugin, plugin_names
from lmkv.transfer.channel import Channel, ChannelEnd, Copy, ReadAccess
from lmkv.transfer.choice import NEEDED_LINKS, SwitchingReader, find_links, missing_link, rank

logger = logging.getLogger(__name__)

AUTO = "auto"
BUILT_IN = {
    "shm": ("lmkv.transfer.shm", "ShmChannel"),
    "nixl": ("lmkv.transfer.nixl.channel", "NixlChannel"),
    "tcp": ("lmkv.transfer.tcp.channel", "TcpChannel"),
}
"""Module and class of each built-in channel, imported on first use. All others are plug-ins of the group `CHANNELS`."""
AUTO_NAMES = tuple(BUILT_IN)
"""The channels that `auto` stands for, best first where the hosts have the links that they need (`links`)."""
ALTERNATIVE = "tcp"
"""The channel that those which need a link are compared with, and that repeats a read which failed by one of them."""
PRIVATE = ("shm", "tcp")
"""The channels that send no bytes unencrypted to another host, with `ChannelEnd.tls`."""
MAX_NAMES_CHARACTERS = 200
"""Maximum length of the requested names that an error message repeats."""


def names_of(transfer_channel: str, links: Collection[str]) -> tuple[str, ...]:
    """The channels that a value of `transfer_channel` allows on a host with these links, best first."""
    return rank(AUTO_NAMES, links) if transfer_channel == AUTO else (transfer_channel,)


async def open_channel(name: str, end: ChannelEnd) -> Channel:
    """Opens the channel called `name` over an end. Raises `ConfigError` if it is unknown or does not start."""
    channel: Channel = await _find_class(name, end).open(end)
    return channel


def _find_class(name: str, end: ChannelEnd) -> Any:
    if name in BUILT_IN:
        if end.options:
            raise ConfigError(f"transfer_options: the channel {name} has none; unset it", key="transfer_options")
        module, cls = BUILT_IN[name]
        return getattr(import_module(module), cls)
    known = plugin_names(CHANNELS)
    if name not in known:
        names = ", ".join((AUTO, *BUILT_IN, *known))
        raise ConfigError(f"transfer_channel: {name!r} is unknown; use {names}", key="transfer_channel")
    try:
        return load_plugin(CHANNELS, name)
    except ConfigError as error:
        raise ConfigError(f"transfer_channel: {error}", key="transfer_channel") from error


GetMetadata = Callable[[str], Awaitable[bytes]]
"""Asks a peer for its metadata for the channel of this name. Raises an `LmkvError` if there is none."""


class Channels:
    """The channels of one node, and which of them is used for each peer. All methods are called on one event loop."""

    def __init__(self, transfer_channel: str, end: ChannelEnd, links: Collection[str] | None = None) -> None:
        """`links` are those of this host; None: those that are found."""
        self._links = find_links() if links is None else links
        names = names_of(transfer_channel, self._links)
        self.names = tuple(name for name in names if name in PRIVATE or not end.require_encryption)
        """Channels that the node uses and offers, best first. A channel that does not start is removed."""
        self._end = end
        self._opening: dict[str, asyncio.Task[Channel]] = {}
        self._peers: dict[str, Channel | SwitchingReader] = {}
        self._serving = False
        self._closed = False

    @property
    def requires_encryption(self) -> bool:
        """Whether channels that would send bytes unencrypted to another host are refused."""
        return self._end.require_encryption

    @property
    def access(self) -> ReadAccess:
        """Access control of the local pool."""
        return self._end.access

    def prefers(self, name: str) -> bool:
        """Whether this channel is no last resort: it is the only one allowed, or this host has the link it needs."""
        return name in self.names and (len(self.names) == 1 or missing_link(name, self._links) is None)

    async def start(self) -> None:
        """Opens the channel if only one is allowed. Of several, begins to open those that lack no link, so that no
        first read waits for them. The others are opened on first use.

        Raises `ConfigError` if the only one does not start.
        """
        if len(self.names) == 1:
            await self._open(self.names[0])
        else:
            self.prepare([name for name in self.names if missing_link(name, self._links) is None])

    async def offer(self, wanted: Sequence[str]) -> Channel:
        """The first channel of `wanted` that this node has and can start; one that needs a link that this host lacks
        is the last resort. Raises `ChannelUnsupported` if there is none.
        """
        for name in rank(wanted, self._links):
            with suppress(ConfigError):
                if name in self.names:
                    return await self._open(name)
        have, want = ", ".join(self.names), ", ".join(wanted)[:MAX_NAMES_CHARACTERS]
        raise ChannelUnsupported(
            f"{self._end.name} has the transfer channels {have or 'none'}, not {want or 'none'}; "
            "set the same transfer_channel on both nodes",
            channels=have,
            wanted=want,
        )

    def prepare(self, names: Sequence[str]) -> None:
        """Begins to open channels in the background."""
        for name in names:
            self._begin(name)

    async def add_peer(
        self, peer_name: str, name: str, metadata: bytes, get_metadata: GetMetadata | None = None
    ) -> None:
        """Connects to a peer by the channel called `name`. Raises as `Channel.add_peer` does.

        With `get_metadata` a channel that needs a link is compared with `ALTERNATIVE` while it is used, and replaced by
        it where it is slower or fails.
        """
        channel = await self._connect(peer_name, name, metadata)
        before = self._peers.get(peer_name)
        if name in NEEDED_LINKS and ALTERNATIVE in self.names and get_metadata:

            async def connect(other: str) -> Channel:
                return await self._connect(peer_name, other, await get_metadata(other))

            if isinstance(before, SwitchingReader) and before.preferred is channel:
                before.renew(connect)
                return
            self._peers[peer_name] = SwitchingReader(peer_name, channel, ALTERNATIVE, connect)
        else:
            self._peers[peer_name] = channel
        if isinstance(before, SwitchingReader):
            await before.close(keep=channel)
        elif before not in (None, channel):
            await before.remove_peer(peer_name)

    async def _connect(self, peer_name: str, name: str, metadata: bytes) -> Channel:
        try:
            channel = await self._open(name)
        except ConfigError as error:
            raise ChannelUnsupported(str(error), channel=name) from None
        await channel.add_peer(peer_name, metadata)
        return channel

    def of(self, peer_name: str) -> str:
        """Name of the channel to a peer; empty if the peer was not added."""
        channel = self._peers.get(peer_name)
        return channel.name if channel else ""

    async def remove_peer(self, peer_name: str) -> None:
        """Implements `Channel`, by the channel of the peer."""
        channel = self._peers.pop(peer_name, None)
        if isinstance(channel, SwitchingReader):
            await channel.close()
        elif channel:
            await channel.remove_peer(peer_name)

    async def read(
        self,
        peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",
    ) -> list[int] | None:
        """Implements `Channel`, by the channel of the peer."""
        channel = self._peers.get(peer_name)
        if channel is None:
            on_stopped()
            raise Unreachable(f"{peer_name} is not connected", peer=peer_name)
        return await channel.read(peer_name, copies, timeout_seconds, on_stopped, grant_id)

    def serve(self, needed: bool) -> None:
        """As `Channel.serve`, also for channels that are opened later."""
        if needed != self._serving:
            self._serving = needed
            for task in self._opening.values():
                if task.done() and not task.exception():
                    task.result().serve(needed)

    async def aclose(self) -> None:
        """Closes every channel. Idempotent."""
        self._closed = True
        for peer in self._peers.values():
            if isinstance(peer, SwitchingReader):
                peer.stop()
        for task in self._opening.values():
            with suppress(LmkvError):
                await (await task).aclose()
        self._peers.clear()

    def _begin(self, name: str) -> asyncio.Task[Channel]:
        if self._closed:
            raise Unreachable("the transfer channels are closed")
        if name not in self._opening:
            task = self._opening[name] = asyncio.create_task(self._start(name), name=f"open {name}")
            task.add_done_callback(lambda task: task.exception())  # the caller that awaits the task gets the error
        return self._opening[name]

    async def _open(self, name: str) -> Channel:
        return await asyncio.shield(self._begin(name))

    async def _start(self, name: str) -> Channel:
        try:
            channel = await open_channel(name, self._end)
        except ConfigError as error:
            self.names = tuple(other for other in self.names if other != name)
            if self.names:
                logger.info("the transfer channel %s is not available: %s", name, error)
            raise
        channel.serve(self._serving)
        return channel
