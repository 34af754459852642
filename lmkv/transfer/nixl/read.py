"""One read over the NIXL channel, between the loop that asks for it and the thread that carries it out."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lmkv.errors import LmkvError
from lmkv.transfer.channel import Copy
from lmkv.transfer.nixl.api import Descriptors, descriptor_batches

logger = logging.getLogger(__name__)


def settle(outcome: asyncio.Future[None], error: LmkvError | None) -> None:
    """Ends a future, unless its waiter has left. On its loop."""
    if outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


class Outcome:
    """How something that the thread does ends, told to the loop that waits for it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def resolve(self, error: LmkvError | None = None, before: Callable[[], None] | None = None) -> None:
        """Ends the future on its loop, after `before`."""

        def end() -> None:
            if before:
                before()
            settle(self.future, error)

        try:
            self.loop.call_soon_threadsafe(end)
        except RuntimeError:
            logger.debug("the loop closed before the transfer thread could answer")


class Read:
    """One read. Its caller may abandon it; all else belongs to the thread."""

    def __init__(self, peer_name: str, copies: Sequence[Copy], on_stopped: Callable[[], None]) -> None:
        self.peer_name = peer_name
        self.batches: deque[tuple[Descriptors, Descriptors]] = deque()
        """What is yet to be posted."""
        self.outcome = Outcome()
        self.stopped = False
        """Whether no more bytes can arrive; set on the loop."""
        self.abandoned_at: float | None = None
        """When the caller left, on the monotonic clock; no further batch is posted."""
        self.handle: Any = None
        """NIXL's handle of the batch that runs."""
        self.settled_at: float | None = None
        """When a failed read will have stopped, on the monotonic clock."""
        self._copies = copies
        self._on_stopped = on_stopped

    def split(self) -> None:
        """Makes the batches."""
        self.batches.extend(descriptor_batches(self._copies))

    @property
    def wants_more(self) -> bool:
        """Whether another batch is to be posted."""
        return bool(self.batches) and self.abandoned_at is None

    def end(self, error: LmkvError | None = None) -> None:
        """Tells the loop that no more bytes can arrive."""
        self.outcome.resolve(error, before=self._stop)

    def _stop(self) -> None:
        self.stopped = True
        self._on_stopped()
