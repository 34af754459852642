"""A bound on how long, and how much, a client may take to say what it wants. For every HTTP server here.

uvicorn has none: whoever sends a byte now and then, or nothing at all, would keep a connection for ever.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lmkv.telemetry.log_limit import LimitedLogger

if TYPE_CHECKING:
    Base = Any
else:
    Base = AutoHTTPProtocol

HEAD_SECONDS = 10.0
"""Most time from the connection, or from the first byte after an answer, until a request's headers are in."""
MAX_HEAD_BYTES = 64 << 10
"""Most bytes of these."""


class Deadline(Base):  # type: ignore[misc]  # which of uvicorn's protocols it is, is known at run time
    """uvicorn's protocol, with a clock beside it. Bodies have deadlines of their own, where they are read."""

    def __init__(self, log: LimitedLogger, **options: Any) -> None:
        super().__init__(**options)
        self.logger = log
        self._clock: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        """Takes in what came, and looks whether a request is there now."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
            return
        if self.cycle is None or not self.cycle.more_body:  # else it may be the body of what was refused before
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()
        elif self._clock is None:
            self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._stop()
        super().connection_lost(exc)

    def _start(self) -> None:
        self._clock = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._give_up)

    def _stop(self) -> None:
        self._head_bytes = 0
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _give_up(self) -> None:
        self._clock = None
        self.transport.close()
