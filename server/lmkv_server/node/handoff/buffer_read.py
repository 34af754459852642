"""One read into an engine's device buffer, which all of its workers carry out. Pure but for the waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from lmkv import rpc
from lmkv.errors import BadMessage, LmkvError
from lmkv.v1 import engine_service_pb2 as pb

MODULUS = 1 << 64


class BufferRead:
    """What the workers say of it, put together: it is done when all of them are, and failed when one has."""

    def __init__(self, ranks: Iterable[int], sum_count: int, on_stopped: Callable[[], None]) -> None:
        """`on_stopped` is called once, when no worker can receive any more bytes of it."""
        self.outcome: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        """The checksum of each chunk."""
        self._reading = set(ranks)
        self._writing = set(self._reading)
        self._sums = [0] * sum_count
        self._on_stopped = on_stopped

    @property
    def stopped(self) -> bool:
        """Whether no more bytes can arrive."""
        return not self._writing

    def told(self, rank: int, result: pb.BufferReadResult) -> None:
        """A worker says how it went. Raises `BadMessage` if that makes no sense."""
        if rank in self._reading:
            self._reading.discard(rank)
            if result.HasField("status"):
                self.fail(rpc.from_status(result.status))
            elif len(result.checksums) != len(self._sums) or not result.stopped:
                raise BadMessage("a read that is done names a checksum per chunk, and has stopped", field="checksums")
            self._sums = [
                (own + more) % MODULUS for own, more in zip(self._sums, result.checksums or self._sums, strict=True)
            ]
        if result.stopped and rank in self._writing:
            self._writing.discard(rank)
            if not self._writing:
                self._on_stopped()
        if not self._reading and not self.outcome.done():
            self.outcome.set_result(self._sums)

    def fail(self, error: LmkvError) -> None:
        """It has failed, though bytes may still arrive."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # perhaps nobody waits any more

    def stop(self) -> None:
        """Nobody will use the buffer again: whatever arrives does no harm."""
        if self._writing:
            self._writing.clear()
            self._on_stopped()
