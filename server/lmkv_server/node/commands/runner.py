"""Runs the orders that arrive over report streams, and keeps their outcomes until they are acknowledged.

    start ──► waiting ──► running ──► outcome, reported until the coordinator acknowledges it
                 │           ├── expire_time ──► Unreachable           with its progress
                 └───────────┴── CancelOrder ──► OperationCancelled    with its progress

An order is executed once, however often and over how many streams it arrives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lmkv import rpc, telemetry
from lmkv.errors import BadMessage, Full, LmkvError, OperationCancelled, Unreachable
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.rpc.messages import to_proto
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.tiers import HOST
from lmkv.v1 import chunk_pb2
from lmkv_server.node.cache.pins import Pins
from lmkv_server.node.commands.executor import Arrivals, OrderContext, OrderExecutor, OrderProgress, new_progress
from lmkv_server.node.commands.journal import OrderJournal, kind_of, log_outcome

logger = logging.getLogger(__name__)

MAX_RUNNING = 1024
"""Most orders that run or wait at a time; more are refused as `Full`."""
LASTING = ("fetch", "drop", "hint", "explain")
"""The other kinds end in one step and are always accepted, so that `cancel` always works."""
MAX_FETCHES = 16
"""Most fetches that run at a time; the others wait."""
MAX_ORDER_SECONDS = 3600.0
"""Upper bound for the time of an order, and its time if it names none."""
MAX_LEAVING_SECONDS = 3600.0
"""Longest time for which the node reports that it is about to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderStats:
    """Orders since the start, and now."""

    done_counts: Mapping[str, int]
    """Executed orders, by kind; single chunks may have failed."""
    failed_counts: Mapping[str, int]
    """Refused or stopped orders, by kind."""
    chunk_counts: Mapping[str, int]
    """Chunks that orders were executed for, by kind."""
    failed_chunks: Mapping[str, int]
    """Chunks for which an order failed, by reason."""
    transferred_bytes: int
    """Bytes fetched from peers."""
    running_count: int
    """Orders that run or wait now."""
    fetching_count: int
    """Fetches that run now."""


class OrderRunner:
    """Runs the orders of all coordinators. An async context manager, inside that of the node's peers, on its loop."""

    def __init__(self, context: OrderContext) -> None:
        self.pins = Pins(context.tier)
        self.arrivals = Arrivals(time.time_ns())
        self._listeners: dict[str, Callable[[], None]] = {}
        self._done_counts: Counter[str] = Counter()
        self._failed_counts: Counter[str] = Counter()
        self._failed_chunks: Counter[str] = Counter()
        self._chunk_counts: Counter[str] = Counter()
        self._transferred_bytes = 0
        self._fetching_count = 0
        self._context = context
        self._executor = OrderExecutor(context, self.pins, self.arrivals)
        self._leaves_until = 0.0
        self._journal: OrderJournal[pb.OrderOutcome] = OrderJournal()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)
        self._pin_timer = DeadlineTimer(self._expire_pins)
        self._is_closing = False

    async def __aenter__(self) -> OrderRunner:
        await self._pin_timer.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops every order and ends every pin. Idempotent."""
        self._is_closing = True
        await self._pin_timer.aclose()
        while tasks := list(self._running.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)  # a task group may swallow a cancellation
        self.pins.clear()

    def stats(self) -> OrderStats:
        """Orders since the start, and now."""
        return OrderStats(
            done_counts=dict(self._done_counts),
            failed_counts=dict(self._failed_counts),
            chunk_counts=dict(self._chunk_counts),
            failed_chunks=dict(self._failed_chunks),
            transferred_bytes=self._transferred_bytes,
            running_count=len(self._running),
            fetching_count=self._fetching_count,
        )

    def pins_changed(self) -> None:
        """Reports pins that were made without an order, and ends them in time."""
        self._pin_timer.changed()

    # --- For report streams --------------------------------------------------------------------------------------

    def add_listener(self, coordinator: str, notify: Callable[[], None]) -> None:
        """Calls `notify` whenever there are outcomes or pins to report, until `remove_listener`."""
        self._listeners[coordinator] = notify

    def remove_listener(self, coordinator: str) -> None:
        """The reports to a coordinator ended."""
        self._listeners.pop(coordinator, None)

    @property
    def leaving_seconds(self) -> float:
        """The seconds within which the node is about to stop; 0 if no drain has announced it."""
        return max(self._leaves_until - time.monotonic(), 0.0)

    def unacknowledged(self, coordinator: str) -> list[pb.OrderOutcome]:
        """Outcomes of a coordinator's orders that it has not acknowledged, oldest first."""
        return self._journal.unacknowledged(coordinator)

    def acknowledge(self, coordinator: str, order_ids: Iterable[str]) -> None:
        """A coordinator has received the outcomes of these orders."""
        self._journal.acknowledge(coordinator, order_ids)

    def pin_list(self) -> pb.PinList:
        """The pins in force."""
        position = chunk_pb2.Position(instance_id=self._context.instance_id, tier=HOST)
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

    async def drop(self, order: pb.DropOrder) -> int:
        """Carries out an order of this node itself; returns the number of chunks. Raises as `OrderExecutor.drop`."""
        progress = OrderProgress()
        await self._executor.drop(order, progress)
        return progress.outcome("", None).chunk_count

    def start(self, order: pb.Order, coordinator: str) -> None:
        """Starts an order unless it is a repeat. Never raises: an error is the order's outcome."""
        with telemetry.bound(order_id=order.order_id):  # adds the id to log records
            if self._journal.begin(order.order_id, coordinator):
                self._start_new(order)
            else:
                self._notify()

    def _notify(self) -> None:
        for notify in list(self._listeners.values()):
            notify()

    # --- Execution -----------------------------------------------------------------------------------------------

    def _start_new(self, order: pb.Order) -> None:
        began = time.monotonic()
        progress = OrderProgress()
        try:
            progress = new_progress(order)
            if kind_of(order) in LASTING and len(self._running) >= MAX_RUNNING:
                raise Full(f"{MAX_RUNNING} orders are running here already", limit=MAX_RUNNING)
            seconds = seconds_left(order)
        except LmkvError as error:
            self._end(order, progress, error, began)
            return
        execution = self._execute(order, progress, seconds)
        task = asyncio.create_task(execution, name=f"lmkv-order-{order.order_id}")
        self._running[order.order_id] = task
        task.add_done_callback(lambda done: self._ended(done, order, progress, began))

    async def _execute(self, order: pb.Order, progress: OrderProgress, seconds: float) -> None:
        with telemetry.follow("lmkv.order", order.traceparent, order_id=order.order_id, action=kind_of(order)):
            try:
                async with asyncio.timeout(seconds):
                    await self._dispatch(order, progress)
            except TimeoutError:
                raise Unreachable("the order expired before it was done") from None

    async def _dispatch(self, order: pb.Order, progress: OrderProgress) -> None:
        match kind_of(order):
            case "fetch":
                await self._fetch(order.fetch, progress)
            case "drop":
                await self._executor.drop(order.drop, progress)
            case "explain":
                await self._executor.explain(order.explain, progress)
            case "pin":
                self._executor.pin(order.pin, progress)
                self._pin_timer.changed()
            case "unpin":
                self._executor.unpin(order.unpin, progress)
                self._pin_timer.changed()
            case "cancel":
                self._cancel(order.cancel)
            case "hint" if self._context.host:
                progress.hint = to_proto(await self._context.host.carry_out_hint(order.hint))
            case "leave":
                seconds = min(order.leave.ttl.ToNanoseconds() / 1e9, MAX_LEAVING_SECONDS)
                self._leaves_until = time.monotonic() + seconds
            case _:
                raise BadMessage("this version knows no such order", field="action")

    async def _fetch(self, order: pb.FetchOrder, progress: OrderProgress) -> None:
        async with self._fetch_slots:
            self._fetching_count += 1
            try:
                await self._executor.fetch(order, progress)
            finally:
                self._fetching_count -= 1

    def _cancel(self, order: pb.CancelOrder) -> None:
        """Stops another order that runs here."""
        if task := self._running.get(order.order_id):
            task.cancel()

    def _ended(self, task: asyncio.Task[None], order: pb.Order, progress: OrderProgress, began: float) -> None:
        """The task is done, or was cancelled, perhaps before its first step."""
        del self._running[order.order_id]
        error: LmkvError | None = None
        if task.cancelled():
            cause = "the node stopped" if self._is_closing else "the order was cancelled"
            error = OperationCancelled(f"{cause} before it was done")
        elif failure := task.exception():
            if not isinstance(failure, LmkvError):
                logger.error("order %s failed unexpectedly", order.order_id, exc_info=failure)
                failure = LmkvError(f"it failed unexpectedly: {failure!r}; see the node's log")
            error = failure
        self._end(order, progress, error, began)

    def _end(self, order: pb.Order, progress: OrderProgress, error: LmkvError | None, began: float) -> None:
        outcome = progress.outcome(order.order_id, error)
        self.arrivals.add(chunk.key for chunk in progress.fetched if not chunk.dropped)
        self._context.tier.unhold(progress.fetched)
        kind = kind_of(order)
        (self._failed_counts if error else self._done_counts)[kind] += 1
        self._chunk_counts[kind] += outcome.chunk_count
        self._transferred_bytes += outcome.transferred_bytes
        for failure in outcome.failures:
            self._failed_chunks[rpc.from_status(failure.status).reason] += len(failure.chunk_keys)
        log_outcome(order, outcome, time.monotonic() - began)
        self._journal.end(order.order_id, outcome)
        self._notify()

    # --- Timers --------------------------------------------------------------------------------------------------

    def _expire_pins(self) -> float | None:
        """Ends expired pins, and reports all changes of pins; when to call it again."""
        for pin in self.pins.expire(time.monotonic()):
            logger.info("pin %s expired; it kept %d chunks", pin.pin_id, len(pin.chunks))
        self._notify()
        return self.pins.next_expiry()

    def check(self) -> None:
        """Asserts the invariants of journal, arrivals and pins."""
        self._journal.check()
        self.arrivals.check()
        self.pins.check()


def seconds_left(order: pb.Order) -> float:
    """Seconds until the order expires, by this node's clock. Raises `Unreachable` if it has expired."""
    if not order.HasField("expire_time"):
        return MAX_ORDER_SECONDS
    seconds = order.expire_time.ToNanoseconds() / 1e9 - time.time()
    if seconds <= 0:
        raise Unreachable(
            f"the order arrived {-seconds:.3g} s after its expire_time by this node's clock; are the clocks in sync?"
        )
    return min(seconds, MAX_ORDER_SECONDS)
