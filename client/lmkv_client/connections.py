"""The lines to all coordinators of a fleet, of which one is asked until it does not answer. For the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from lmkv.auth.credentials import Credentials
from lmkv.errors import Unreachable
from lmkv.rpc.failover import Failover
from lmkv_client.connection import Connection

Response = TypeVar("Response")
Method = Callable[..., Awaitable[Response]]


class Connections:
    """One `Connection` for each address. Every coordinator knows the same, so any will do for a new question.

    A stream that began at one of them is that one's: it keeps the `Connection` that it began on.
    """

    def __init__(self, addresses: Sequence[str], timeout_seconds: float, credentials: Credentials) -> None:
        self._all = [Connection(address, timeout_seconds, credentials) for address in addresses]
        self._turns = Failover(self._all)

    async def aclose(self) -> None:
        """Closes them; calls still running are cancelled. Repeating it is safe."""
        await asyncio.gather(*(connection.aclose() for connection in self._all))

    @property
    def current(self) -> Connection:
        """Whom to ask."""
        return self._turns.current

    def failed(self, connection: Connection) -> None:
        """A coordinator did not answer: the next one is asked from here on."""
        self._turns.report_failure(connection)

    async def call(self, method: Callable[[Connection], Method[Response]], request: object) -> Response:
        """The answer of the first that gives one, each within its time. Raises as `Connection.call` does."""
        return await self.ask(lambda connection: connection.call(method(connection), request))

    async def pages(
        self, method: Callable[[Connection], Method[Any]], kind: Callable[..., Any], field: str
    ) -> list[Any]:
        """All pages of a list, from the first that answers. Raises as `Connection.pages` does."""
        return await self.ask(lambda connection: connection.pages(method(connection), kind, field))

    async def ask(self, question: Callable[[Connection], Awaitable[Response]]) -> Response:
        """Asks one after the other, each once, until one answers."""
        for _ in self._all[1:]:
            connection = self.current
            try:
                return await question(connection)
            except Unreachable as error:
                if error.metadata.get("address") != connection.address:  # it is an answer: somebody else is
                    raise
                self.failed(connection)
        return await question(self.current)
