"""What the coordinator wants this node to do: taken from report streams, carried out over the node's own loop.

    take ──► waiting ──► running ──► outcome, told until the coordinator has heard it
                │           ├── expire_time ──► Unreachable           with how far it came
                └───────────┴── CancelOrder ──► OperationCancelled    with how far it came

An order is carried out once, however often and over how many streams it comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from lmkv import rpc, telemetry
from lmkv.errors import BadMessage, Full, LmkvError, OperationCancelled, Unreachable
from lmkv.keys import KEY_BYTES
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.pins import Pins
from lmkv_server.node.commands.executor import OrderExecutor, goal
from lmkv_server.node.commands.journal import OrderJournal
from lmkv_server.node.commands.log import kind_of, log_outcome
from lmkv_server.node.commands.operation_log import OperationLog
from lmkv_server.node.commands.progress import OrderProgress
from lmkv_server.node.fetch.fetcher import Peers
from lmkv_server.node.sessions.sessions import Engines
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.tier import RemoteTier

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 1024
"""Most orders that run or wait at a time; more are refused as `Full`."""
LASTING = ("fetch", "drop")
"""The others are over in one step, and always let in: so that there is a way to cancel."""
MAX_FETCHES = 16
"""Most fetches that run at a time; the others wait."""
MAX_ORDER_SECONDS = 3600.0
"""Time of an order that names none, or more."""
OFFER_SECONDS = 3.0
"""How long a coordinator has to take over an operation before the next one is asked."""


class Orders:
    """The orders of one node. To be used as an async context manager, inside that of its peers; one loop owns it."""

    def __init__(
        self,
        *,
        instance_id: str,
        tier: HostTier,
        engines: Engines,
        peers: Peers | None,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        self.pins = Pins(tier)
        self.records = OperationLog()
        self.listeners: dict[str, Callable[[], None]] = {}
        """Called when there is something to tell: outcomes, pins, records. By the address of each coordinator that is
        reported to."""
        self.done_counts: Counter[str] = Counter()
        """Orders carried out to their end, by kind, since the start; single chunks may have failed."""
        self.failed_counts: Counter[str] = Counter()
        """Orders that were refused or stopped, by kind."""
        self.failed_chunks: Counter[str] = Counter()
        """Chunks that an order was not carried out for, by reason."""
        self.chunk_counts: Counter[str] = Counter()
        """Chunks that orders were carried out for, by kind."""
        self.transferred_bytes = 0
        """Bytes that came from peers for orders."""
        self.fetching_count = 0
        """Fetches that run now."""
        self._instance_id = instance_id
        self._tier = tier
        self._acts = OrderExecutor(tier=tier, engines=engines, peers=peers, pins=self.pins, disk=disk, remote=remote)
        self._book = OrderJournal()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._may_fetch = asyncio.Semaphore(MAX_FETCHES)
        self._alarm = DeadlineTimer(self._expire_pins)
        self._record_alarm = DeadlineTimer(self._pass_on_records)
        self._is_closing = False

    async def __aenter__(self) -> Orders:
        await self._alarm.__aenter__()
        await self._record_alarm.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops every order and ends every pin. Idempotent."""
        self._is_closing = True
        await self._alarm.aclose()
        await self._record_alarm.aclose()
        while tasks := list(self._running.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)  # a task group may swallow a cancellation
        self.pins.clear()

    @property
    def under_way_count(self) -> int:
        """Orders that run or wait now."""
        return len(self._running)

    # --- What report streams tell and ask ------------------------------------------------------------------------

    def untold(self, coordinator_address: str) -> list[pb.OrderOutcome]:
        """Outcomes of a coordinator's orders that it is not known to have heard, oldest first."""
        return self._book.untold(coordinator_address)

    def acknowledge(self, coordinator_address: str, order_ids: Iterable[str]) -> None:
        """A coordinator has heard the outcomes of these orders."""
        self._book.acknowledge(coordinator_address, order_ids)

    def lost(self, coordinator_address: str, lease_ttl: float) -> None:
        """The reports to a coordinator ended: unless it is back soon, another one sees its operations through."""
        self.listeners.pop(coordinator_address, None)
        self.records.lost(coordinator_address, time.monotonic() + lease_ttl)
        self._record_alarm.changed()

    def pin_list(self) -> pb.PinList:
        """The pins in force."""
        position = chunk_pb2.Position(instance_id=self._instance_id, tier=chunk_pb2.TIER_HOST)
        clock_offset = time.time() - time.monotonic()
        pins = pb.PinList()
        for pin in self.pins:
            kept = pin.kept
            listed = pins.pins.add(
                pin_id=pin.pin_id,
                position=position,
                chunk_count=len(kept),
                token_count=sum(chunk.token_count for chunk in kept),
            )
            listed.expire_time.FromNanoseconds(round((pin.expire_at + clock_offset) * 1e9))
        return pins

    def take(self, order: pb.Order, coordinator_address: str) -> None:
        """Begins an order unless it is a repeat. Raises nothing: whatever is wrong with it is its outcome."""
        with telemetry.bound(order_id=order.order_id):  # whatever is logged of it carries its id
            if self._book.begin(order.order_id, coordinator_address):
                self._begin(order, coordinator_address)
            else:
                self._tell()

    def _tell(self) -> None:
        for listener in list(self.listeners.values()):
            listener()

    def _begin(self, order: pb.Order, giver: str) -> None:
        began = time.monotonic()
        achieved = OrderProgress()
        try:
            self.records.check_current(order.operation_name, order.attempt)
            achieved = goal(order)
            if kind_of(order) in LASTING and self.under_way_count >= MAX_UNDER_WAY:
                raise Full(f"{MAX_UNDER_WAY} orders are under way here already", limit=MAX_UNDER_WAY)
            seconds = seconds_left(order)
        except LmkvError as error:
            self._end(order, achieved, error, began)
            return
        carrying_out = self._carry_out(order, giver, achieved, seconds)
        task = asyncio.create_task(carrying_out, name=f"lmkv-order-{order.order_id}")
        self._running[order.order_id] = task
        task.add_done_callback(lambda done: self._ended(done, order, achieved, began))

    # --- Carrying out --------------------------------------------------------------------------------------------

    async def _carry_out(self, order: pb.Order, giver: str, achieved: OrderProgress, seconds: float) -> None:
        with telemetry.follow("lmkv.order", order.traceparent, order_id=order.order_id, action=kind_of(order)):
            await self._act(order, giver, achieved, seconds)

    async def _act(self, order: pb.Order, giver: str, achieved: OrderProgress, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                match kind_of(order):
                    case "fetch":
                        await self._fetch(order.fetch, achieved)
                    case "drop":
                        await self._acts.drop(order.drop, achieved)
                    case "pin":
                        self._acts.pin(order.pin, achieved)
                        self._alarm.changed()
                    case "unpin":
                        self._acts.unpin(order.unpin, achieved)
                        self._alarm.changed()
                    case "cancel":
                        self._cancel(order.cancel)
                    case "record":
                        self.records.put(order.record.record, giver)
                        self.records.expire(time.time_ns())
                    case _:
                        raise BadMessage("this version knows no such order", field="action")
        except TimeoutError:
            raise Unreachable("the order's time was up before it was done") from None

    async def _fetch(self, order: pb.FetchOrder, achieved: OrderProgress) -> None:
        async with self._may_fetch:
            self.fetching_count += 1
            try:
                await self._acts.fetch(order, achieved)
            finally:
                self.fetching_count -= 1

    def _cancel(self, order: pb.CancelOrder) -> None:
        """Stops another order, if it is under way, or has an operation stopped, whoever sees it through."""
        self.records.cancel(order.operation_name)
        if task := self._running.get(order.order_id):
            task.cancel()

    def _ended(self, task: asyncio.Task[None], order: pb.Order, achieved: OrderProgress, began: float) -> None:
        """The task is done, or was cancelled, perhaps before its first step."""
        del self._running[order.order_id]
        error: LmkvError | None = None
        if task.cancelled():
            who = "the node stopped" if self._is_closing else "somebody cancelled the order"
            error = OperationCancelled(f"{who} before it was done")
        elif failure := task.exception():
            if not isinstance(failure, LmkvError):
                logger.error("order %s failed unexpectedly", order.order_id, exc_info=failure)
                failure = LmkvError(f"it failed unexpectedly: {failure!r}; see the node's log")
            error = failure
        self._end(order, achieved, error, began)

    def _end(self, order: pb.Order, achieved: OrderProgress, error: LmkvError | None, began: float) -> None:
        outcome = achieved.outcome(order.order_id, error)
        self._tier.unhold(achieved.brought)
        kind = kind_of(order)
        (self.failed_counts if error else self.done_counts)[kind] += 1
        self.chunk_counts[kind] += outcome.chunk_count
        self.transferred_bytes += outcome.transferred_bytes
        for failure in outcome.failures:
            self.failed_chunks[rpc.from_status(failure.status).reason] += len(failure.chunk_keys) // KEY_BYTES
        log_outcome(order, outcome, time.monotonic() - began)
        self._book.end(outcome)
        self._tell()

    def _expire_pins(self) -> float | None:
        """Ends pins whose time has come, and tells of all changes; when the next time is."""
        for pin in self.pins.expire(time.monotonic()):
            logger.info("pin %s ended after its time; it kept %d chunks", pin.pin_id, len(pin.chunks))
        self._tell()
        return self.pins.next_expiry()

    def _pass_on_records(self) -> float | None:
        """Has other coordinators see through what theirs no longer does; when to look again."""
        now = time.monotonic()
        revision = self.records.revision
        self.records.pass_on(now, now + OFFER_SECONDS, list(self.listeners))
        if self.records.revision != revision:
            self._tell()
        return self.records.next_due()

    def check(self) -> None:
        """Asserts that books and pins are sound."""
        self._book.check()
        self.records.check()
        self.pins.check()


def seconds_left(order: pb.Order) -> float:
    """How long the coordinator waits for the outcome, by this node's clock. Raises `Unreachable` if no longer."""
    if not order.HasField("expire_time"):
        return MAX_ORDER_SECONDS
    seconds = order.expire_time.ToNanoseconds() / 1e9 - time.time()
    if seconds <= 0:
        raise Unreachable(
            f"the order came {-seconds:.3g} s after its expire_time by this node's clock; do the clocks agree?"
        )
    return min(seconds, MAX_ORDER_SECONDS)
