"""The event-loop side of the NIXL channel (docs/contribute/transfer.md)."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Self

from lmkv.errors import LmkvError, Unreachable
from lmkv.transfer.access import PeerReader
from lmkv.transfer.channel import ChannelEnd, Copy, Region, check_copies, unwrap, wrap
from lmkv.transfer.nixl.agent import STALL_SECONDS, AgentThread, Read, ReadOutcome

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
CLOSE_SECONDS = 3.0


class NixlChannel:
    """The `Channel` contract over NIXL. Created by `open`."""

    name = "nixl"

    def __init__(
        self,
        agent_name: str,
        region: Region,
        backends: Sequence[str],
        prepare_thread: Callable[[], object] = lambda: None,
    ) -> None:
        """Opens a channel that only reads, into host or device memory. `prepare_thread` is called on NIXL's thread.

        Raises `ConfigError` if NIXL is missing or does not start. Blocks for half a second.
        """
        self._metadata = b""
        self._own = region
        self._peers: dict[str, Region] = {}
        self._thread = AgentThread(agent_name, region, backends, prepare_thread)
        self._agent_metadata = self._thread.start()
        self._pid = os.getpid()
        atexit.register(self._exit)  # a thread inside NIXL would crash the exiting interpreter

    @classmethod
    async def open(cls, end: ChannelEnd) -> Self:
        """Opens the channel in a thread. Raises `ConfigError` as the constructor does."""
        channel = await asyncio.to_thread(cls, end.name, end.region, end.nixl_backends)
        channel._metadata = wrap(cls.name, end, channel._agent_metadata)
        return channel

    def metadata_for(self, _reader: PeerReader) -> bytes:
        """The same metadata for every reader: this channel cannot distinguish its readers."""
        return self._metadata

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        region, agent_metadata = unwrap(self.name, peer_name, metadata)
        await self._call(lambda: self._thread.add_peer(peer_name, agent_metadata))
        self._peers[peer_name] = region

    async def remove_peer(self, peer_name: str) -> None:
        self._peers.pop(peer_name, None)
        await self._call(lambda: self._thread.forget_peer(peer_name))

    async def read(
        self,
        peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",  # noqa: ARG002 # readers access the memory themselves
    ) -> None:
        try:
            region = self._peers.get(peer_name)
            if region is None:
                raise Unreachable(f"{peer_name} is not connected", peer=peer_name)
            check_copies(peer_name, copies, region, self._own)
            read = Read(peer_name, copies, on_stopped)
            self._thread.submit(lambda: self._thread.begin(read))
        except LmkvError:
            on_stopped()
            raise
        try:
            async with asyncio.timeout(timeout_seconds):
                await read.outcome.future
        except TimeoutError:
            read.abandoned_at = time.monotonic() - STALL_SECONDS
            raise Unreachable(
                f"{peer_name} did not deliver within {timeout_seconds:.3g} s", peer=peer_name, quarantined=True
            ) from None
        except asyncio.CancelledError:
            read.abandoned_at = time.monotonic()
            raise

    def serve(self, needed: bool) -> None:
        self._thread.serving = needed
        self._thread.wake()

    async def aclose(self) -> None:
        atexit.unregister(self._exit)
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, CLOSE_SECONDS):
            logger.warning("NIXL did not close within %.0f s; its thread is abandoned", CLOSE_SECONDS)

    async def _call(self, call: Callable[[], None]) -> None:
        """Runs a function on the agent's thread. Raises what it raises, or `Unreachable` if it takes too long."""
        outcome = ReadOutcome()

        def job() -> None:
            try:
                call()
            except LmkvError as error:
                outcome.resolve(error)
            else:
                outcome.resolve()

        self._thread.submit(job)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await outcome.future
        except TimeoutError:
            raise Unreachable(f"NIXL did not answer within {CALL_SECONDS:.0f} s") from None

    def _exit(self) -> None:
        if os.getpid() == self._pid:  # a forked process does not have the thread
            self._thread.stop()
            self._thread.join(CLOSE_SECONDS)
