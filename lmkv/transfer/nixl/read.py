"""The state of one read over the NIXL channel, shared by the event loop and the agent's thread."""

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
    """Completes a future unless it is done. Must be called on its event loop."""
    if outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


class ReadOutcome:
    """The result of a job on the thread, for the event loop that awaits it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def resolve(self, error: LmkvError | None = None, before: Callable[[], None] | None = None) -> None:
        """Completes the future on its event loop, after calling `before`."""

        def end() -> None:
            if before:
                before()
            settle(self.future, error)

        try:
            self.loop.call_soon_threadsafe(end)
        except RuntimeError:
            logger.debug("the loop closed before the transfer thread could answer")


class Read:
    """One read. The caller may set `abandoned_at`; everything else is used by the thread only."""

    def __init__(self, peer_name: str, copies: Sequence[Copy], on_stopped: Callable[[], None]) -> None:
        self.peer_name = peer_name
        self.batches: deque[tuple[Descriptors, Descriptors]] = deque()
        """Batches not yet posted."""
        self.outcome = ReadOutcome()
        self.stopped = False
        """Whether no more bytes can arrive; set on the event loop."""
        self.abandoned_at: float | None = None
        """When the caller stopped waiting, on the monotonic clock; no further batch is posted."""
        self.handle: Any = None
        """NIXL's handle of the batch in flight."""
        self.settled_at: float | None = None
        """When a failed read has certainly stopped, on the monotonic clock."""
        self._copies = copies
        self._on_stopped = on_stopped

    def split(self) -> None:
        """Splits the copies into batches."""
        self.batches.extend(descriptor_batches(self._copies))

    @property
    def wants_more(self) -> bool:
        """Whether another batch must be posted."""
        return bool(self.batches) and self.abandoned_at is None

    def end(self, error: LmkvError | None = None) -> None:
        """Completes the read: no more bytes can arrive."""
        self.outcome.resolve(error, before=self._stop)

    def _stop(self) -> None:
        self.stopped = True
        self._on_stopped()
