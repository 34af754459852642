"""Audits of the node's engines: wrong chunks are dropped everywhere, and a spec with too many of them is not served.

An engine computes some chunks again that the node holds (`docs/concepts/audit.md`), and reports how many, and which of
them were wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from lmkv.errors import LmkvError
from lmkv.internal.v1 import report_service_pb2
from lmkv.keys import ChunkKey, join_keys, part_key
from lmkv.spec import KvSpec
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.stack import TierStack

logger = logging.getLogger(__name__)

LAST_AUDITS = 1000
"""Chunks of a spec that count, the last ones that were compared."""
MIN_WRONG = 3
"""Wrong chunks among these up to which a spec is served in any case."""
MAX_WRONG_SHARE = 0.01
"""Share of them up to which it is served."""


class CircuitBreaker:
    """Opens, for good, when too many of the last compared chunks were wrong."""

    def __init__(self) -> None:
        self._were_wrong: deque[bool] = deque(maxlen=LAST_AUDITS)
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether too many were wrong."""
        return self._is_open

    def add(self, audited_count: int, wrong_count: int) -> bool:
        """Adds compared chunks; returns whether that opens it."""
        self._were_wrong.extend([False] * min(max(0, audited_count - wrong_count), LAST_AUDITS) + [True] * wrong_count)
        wrong = sum(self._were_wrong)
        opens = not self._is_open and wrong >= MIN_WRONG and wrong > MAX_WRONG_SHARE * len(self._were_wrong)
        self._is_open |= opens
        return opens


class Audits:
    """The results of audits, and what follows from them. One event loop owns it."""

    def __init__(self, stack: TierStack, orders: OrderRunner, fleet: FleetMembership) -> None:
        self._stack = stack
        self._orders = orders
        self._fleet = fleet
        self._breakers: dict[bytes, CircuitBreaker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wrong_count = 0
        self.stopped: dict[bytes, str] = {}
        """The model names of the specs that are not served any more, by fingerprint."""

    @property
    def wrong_count(self) -> int:
        """Chunks that were wrong, without those behind them."""
        return self._wrong_count

    def note(self, spec: KvSpec, audited_count: int, wrong_keys: Sequence[ChunkKey]) -> None:
        """Notes compared chunks of a spec; `wrong_keys` are those of a wrong one and of chunks behind it."""
        wrong_count = int(bool(wrong_keys))
        self._wrong_count += wrong_count
        if wrong_keys:
            keys = [part_key(key, part) for key in wrong_keys for part in range(len(spec.parts))]
            self._begin(keys)
            if not self._fleet.report_wrong(wrong_keys) and self._fleet.is_configured:
                logger.error("no coordinator is connected: other instances keep the wrong chunks")
        if self._breakers.setdefault(spec.fingerprint, CircuitBreaker()).add(audited_count, wrong_count):
            self.stopped[spec.fingerprint] = spec.model_name
            self._stack.stop(spec.fingerprint)
            logger.critical(
                "nothing of %s is stored or found here any more, until this node is started again: audits have found "
                "too many wrong chunks (docs/concepts/audit.md)",
                spec.model_name,
            )

    async def aclose(self) -> None:
        """Ends what still runs. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, keys: Sequence[ChunkKey]) -> None:
        task = asyncio.create_task(self._drop(keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop(self, keys: Sequence[ChunkKey]) -> None:
        order = report_service_pb2.DropOrder(chunk_keys=join_keys(keys), wrong=True)
        try:
            logger.error("an audit has found a wrong chunk; %d chunks are dropped", await self._orders.drop(order))
        except LmkvError as error:
            logger.error("cannot drop wrong chunks: %s", error)
