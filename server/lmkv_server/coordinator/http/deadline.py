"""uvicorn's protocol with bounds: on time and size of a request's head, and on connections. For every HTTP server here.

uvicorn has none for the former: a client that sends a byte now and then, or nothing at all, would keep a connection
for ever. Its one limit of connections answers 503 to every request, health probes too, while idle ones take all places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lmkv.telemetry.log_limit import LimitedLogger
from lmkv_server.http.connections import Connections, client_of

if TYPE_CHECKING:
    Base = Any
else:
    Base = AutoHTTPProtocol

HEAD_SECONDS = 10.0
"""Most time from the connection, or from the first byte after an answer, until a request's headers are in."""
MAX_HEAD_BYTES = 64 << 10
"""Most bytes of these."""


CONNECTION = "lmkv_connection"
"""Key of a request's `state`: the connection that it came over."""


class Deadline(Base):  # type: ignore[misc]  # which of uvicorn's protocols it is, is known at run time
    """uvicorn's protocol, with a clock beside it. Bodies have deadlines of their own, where they are read."""

    def __init__(self, limits: Connections, log: LimitedLogger, *, app_state: dict[str, Any], **options: Any) -> None:
        super().__init__(app_state={**app_state, CONNECTION: self}, **options)
        self.logger = log
        self._limits = limits
        self.address = ""
        self._clock: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for a request."""
        super().connection_made(transport)
        self.address = client_of(self.client[0] if self.client else "")
        self._start()
        self._limits.opened(self)

    def data_received(self, data: bytes) -> None:
        """Takes in what came, and looks whether a request is there now."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
            self._limits.began(self)
            return
        if self.cycle is None or not self.cycle.more_body:  # else it may be the body of what was refused before
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()
        elif self._clock is None:
            self._start()

    def on_response_complete(self) -> None:
        """The connection is idle again, unless the client has sent the next request already."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._limits.ended(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._stop()
        self._limits.closed(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """Closes the connection, which has no request under way: there are too many."""
        self.transport.close()

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


class Limited:
    """An ASGI application whose requests count against the limits, except those for `probes`.

    What is refused is answered at once, and its connection closed.
    """

    def __init__(self, app: ASGIApp, limits: Connections, probes: Collection[str], log: LimitedLogger) -> None:
        self._app = app
        self._limits = limits
        self._probes = probes
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope["state"].pop(CONNECTION)
        refusal = None if scope["path"] in self._probes else self._limits.admit(connection)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._log.warning("refused a request from %s: %s", connection.address, refusal.message)
        content = {"detail": refusal.message, "error": {"code": refusal.status, "message": refusal.message}}
        headers = {"Connection": "close", "Retry-After": "1"}
        await JSONResponse(content, refusal.status, headers)(scope, receive, send)
