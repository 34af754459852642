"""An instance that tests make: it registers, reports and obeys over a real socket, but its chunks are only names."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from lmkv import rpc
from lmkv.errors import ChunkArrived, ChunkNotFound, ChunkPinned, LmkvError, NoFreeExtents, OperationCancelled
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import ChunkKey, join_keys, split_keys
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PromptSpan, RequestReport
from lmkv_server.node.commands.executor import Arrivals
from tests.support.node_stub import NodeStub, registration
from tests.waiting import until as until

_EPOCHS = itertools.count(1)
Hook = Callable[["ScriptedInstance", report_pb.Order], None]


class ScriptedInstance:
    """Holds chunks of one spec by key, with their tokens. Others of the same `fleet` are whom it fetches from.

    Set `before` to do something when an order has come, `paused` to hold orders back, `limit` to be full.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        fleet: dict[str, ScriptedInstance],
        instance_id: str,
        spec: KvSpec,
        chunks: Mapping[ChunkKey, int] | Iterable[ChunkKey] = (),
        served: Mapping[str, str] | None = None,
    ) -> None:
        """`served` are LoRA identities by served name, empty for further names of the model."""
        self.instance_id = instance_id
        self.spec = spec
        self.served = dict(served or {})
        is_counted = isinstance(chunks, Mapping)
        self.chunks: dict[ChunkKey, int] = dict(chunks) if is_counted else dict.fromkeys(chunks, spec.chunk_size)  # type: ignore[arg-type]
        self.pins: dict[str, chunk_pb2.PinnedChunks] = {}
        self.pinned: dict[str, list[ChunkKey]] = {}
        self.arrivals = Arrivals(time.time_ns())
        """Of chunks that orders brought; shared by those that stand for one node at several coordinators."""
        self.leaving: list[float] = []
        """For how many seconds each order said that it is going to stop."""
        self.orders: list[report_pb.Order] = []
        """All that came but those to leave, repeats too."""
        self.before: Hook | None = None
        self.going = asyncio.Event()
        self.going.set()
        self.limit = 1 << 30
        self.used_bytes = 0
        self.stats = pb.InstanceStats()
        """Its counters; traffic rises with what orders fetch. Reported when it joins, and by `report_stats`."""
        self.cancelled: set[str] = set()
        self.reports: list[RequestReport] = []
        """What its engines have reported of requests."""
        self.miss_reason = chunk_pb2.MISS_REASON_NEVER_STORED
        """Of chunks that it does not hold."""
        self.epoch = next(_EPOCHS)
        self.coordinator_count = 0
        """Coordinators that it says it reports to."""
        self._registry: Any = NodeStub(channel)
        self._fleet = fleet
        self._stream: Any = None
        self._sequence = 0
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._settled = asyncio.Event()
        fleet[instance_id] = self

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    async def join(self) -> None:
        """Registers, and reports all it holds."""
        instance = pb.Instance(
            instance_id=self.instance_id,
            epoch=self.epoch,
            peer_address="127.0.0.1:7000",
            specs=[self.spec.to_proto()],
            coordinator_count=self.coordinator_count,
            served_models=[
                chunk_pb2.ServedModel(name=name, fingerprint=self.spec.fingerprint, lora_identity=identity)
                for name, identity in self.served.items()
            ],
        )
        await self._registry.Register(registration(instance), timeout=60)
        self._stream = self._registry.Report()
        self._sequence = 0
        await self._report(
            snapshot=True,
            snapshot_end=True,
            changes=[self._change(self.chunks)],
            tiers=[
                pb.TierUsage(
                    tier=HOST,
                    capacity_bytes=1 << 30,
                    used_bytes=self.used_bytes,
                    chunk_count=len(self.chunks),
                )
            ],
            engine_count=1,
            stats=self.stats,
        )
        await self._report(pins=report_pb.PinList(pins=self.pins.values()))
        self._settled.clear()
        self._task = asyncio.create_task(self._obey(self._sequence))
        await asyncio.wait_for(self._settled.wait(), 5)

    async def restart(self) -> None:
        """Joins again with a newer epoch, as a process does that was killed and started."""
        await self.leave()
        self.epoch = next(_EPOCHS)
        await self.join()

    async def leave(self) -> None:
        """Ends the stream, as a process that is killed does."""
        task, self._task = self._task, None
        if task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._stream.cancel()

    async def evict(self, keys: Iterable[ChunkKey]) -> None:
        """Loses chunks, as if for room."""
        gone = [key for key in keys if self.chunks.pop(key, None)]
        await self._report(
            changes=[report_pb.ChunkChange(tier=HOST, fingerprint=self.spec.fingerprint, evicted_keys=join_keys(gone))]
        )

    async def store(self, chunks: Mapping[ChunkKey, int], tier: str = HOST) -> None:
        """Gains chunks, as if an engine had stored them. Of other tiers it keeps nothing but reports them."""
        if tier == HOST:
            self.chunks.update(chunks)
        await self._report(changes=[self._change(chunks, tier)])

    async def replace_each(self, pairs: Iterable[tuple[ChunkKey, ChunkKey]]) -> None:
        """Gains the first chunk of each pair and loses the second: two changes of one chunk each, in one report."""
        changes: list[report_pb.ChunkChange] = []
        for gained, lost in pairs:
            self.chunks[gained] = self.spec.chunk_size
            self.chunks.pop(lost, None)
            changes.append(self._change({gained: self.spec.chunk_size}))
            changes.append(report_pb.ChunkChange(tier=HOST, fingerprint=self.spec.fingerprint, evicted_keys=lost))
        await self._report(changes=changes)

    async def report_stats(self) -> None:
        """Reports what it has done."""
        await self._report(stats=self.stats)

    async def report_chunks(self, keys: Iterable[ChunkKey]) -> None:
        """Reports chunks that it holds."""
        await self._report(changes=[self._change({key: self.chunks[key] for key in keys})])

    async def report_outcomes(self, outcomes: Iterable[report_pb.OrderOutcome]) -> None:
        """Reports outcomes of orders, also of others."""
        await self._report(outcomes=outcomes)

    async def report_bytes(self, more: bytes) -> None:
        """Sends a report with further bytes behind its fields."""
        async with self._writing:
            self._sequence += 1
            report = report_pb.ReportRequest(instance_id=self.instance_id, epoch=self.epoch, sequence=self._sequence)
            await self._stream.write(report_pb.ReportRequest.FromString(report.SerializeToString() + more))

    async def report_leaving(self, seconds: int) -> None:
        """Reports that it is going to stop, as another coordinator has ordered."""
        await self._report(leaving=Duration(seconds=seconds))

    async def _report(self, **fields: Any) -> None:
        async with self._writing:  # a stream takes one message at a time
            await self._write(**fields)

    async def _write(self, **fields: Any) -> None:
        self._sequence += 1
        request = report_pb.ReportRequest(
            instance_id=self.instance_id,
            epoch=self.epoch,
            sequence=self._sequence,
            fetch_serial=self.arrivals.serial,
            **fields,
        )
        await self._stream.write(request)

    def _change(self, admitted: Mapping[ChunkKey, int], tier: str = HOST) -> report_pb.ChunkChange:
        return report_pb.ChunkChange(
            tier=tier,
            fingerprint=self.spec.fingerprint,
            admitted_keys=join_keys(admitted),
            partial_token_counts={
                index: tokens for index, tokens in enumerate(admitted.values()) if tokens != self.spec.chunk_size
            },
        )

    async def _obey(self, opening: int) -> None:
        done: dict[str, report_pb.OrderOutcome] = {}
        pending: set[asyncio.Task[None]] = set()
        try:
            with suppress(grpc.RpcError):
                while (response := await self._stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    if response.acked_sequence >= opening:
                        self._settled.set()
                    for order in response.orders:
                        if order.HasField("leave"):
                            self.leaving.append(order.leave.ttl.ToNanoseconds() / 1e9)
                            await self._report(outcomes=[report_pb.OrderOutcome(order_id=order.order_id)])
                            continue
                        self.orders.append(order)
                        if order.WhichOneof("action") == "cancel":
                            self.cancelled.add(order.cancel.order_id)
                        task = asyncio.create_task(self._carry_out(order, done))
                        pending.add(task)
                        task.add_done_callback(pending.discard)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _carry_out(self, order: report_pb.Order, done: dict[str, report_pb.OrderOutcome]) -> None:
        if self.before:
            self.before(self, order)
        kind = order.WhichOneof("action")
        if kind != "cancel":
            await until(lambda: self.going.is_set() or order.order_id in self.cancelled)
        if order.order_id not in done:
            outcome = report_pb.OrderOutcome(order_id=order.order_id)
            done[order.order_id] = outcome
            if order.order_id in self.cancelled:
                outcome.status.CopyFrom(rpc.to_status(OperationCancelled("cancelled")))
            else:
                assert kind
                await getattr(self, f"_{kind}")(getattr(order, kind), outcome)
        await self._report(outcomes=[done[order.order_id]])

    async def _fetch(self, order: report_pb.FetchOrder, outcome: report_pb.OrderOutcome) -> None:
        source = self._fleet[order.instance_id]
        gained = {}
        missing, refused = [], []
        for key in split_keys(order.chunk_keys):
            if key in self.chunks:
                tokens = self.chunks[key]
            elif key not in source.chunks:
                missing.append(key)
                continue
            elif len(self.chunks) >= self.limit:
                refused.append(key)
                continue
            else:
                tokens = gained[key] = self.chunks[key] = source.chunks[key]
                outcome.transferred_bytes += 1000
            outcome.chunk_count += 1
            outcome.token_count += tokens
        _fail(outcome, missing, ChunkNotFound("the peer does not hold it"))
        _fail(outcome, refused, NoFreeExtents("full"))
        self.arrivals.add(key for key in split_keys(order.chunk_keys) if key in self.chunks)
        if gained:
            self._count(order.instance_id, len(gained), outcome.transferred_bytes)
        await self._report(changes=[self._change(gained)], stats=self.stats)

    def _count(self, peer: str, chunk_count: int, transferred_bytes: int) -> None:
        known = [traffic for traffic in self.stats.traffic if traffic.instance_id == peer]
        traffic = known[0] if known else self.stats.traffic.add(instance_id=peer)
        traffic.chunk_count += chunk_count
        traffic.transferred_bytes += transferred_bytes

    async def _drop(self, order: report_pb.DropOrder, outcome: report_pb.OrderOutcome) -> None:
        assert order.chunk_keys or order.fingerprint or order.all, "nodes refuse it"
        named = split_keys(order.chunk_keys) if order.chunk_keys else list(self.chunks)
        if order.fingerprint not in (b"", self.spec.fingerprint) or order.tier not in ("", HOST):
            named = []
        if order.fetch_serial:
            arrived = self.arrivals.since(order.fetch_serial, named)
            _fail(outcome, sorted(arrived), ChunkArrived("it has arrived since"))
            named = [key for key in named if key not in arrived]
        kept = {key for keys in self.pinned.values() for key in keys}
        gone = [key for key in named if key in self.chunks and key not in kept]
        outcome.pinned_chunk_count = sum(key in self.chunks and key in kept for key in named)
        for key in gone:
            outcome.chunk_count += 1
            outcome.token_count += self.chunks[key]
        if order.chunk_keys:
            _fail(outcome, [key for key in named if key in kept], ChunkPinned("pinned"))
        if not order.dry_run:
            await self.evict(gone)

    async def _pin(self, order: report_pb.PinOrder, outcome: report_pb.OrderOutcome) -> None:
        held = list(itertools.takewhile(self.chunks.__contains__, split_keys(order.chunk_keys)))
        if not held:
            outcome.status.CopyFrom(rpc.to_status(ChunkNotFound("none of them is held")))
            return
        outcome.chunk_count = len(held)
        outcome.token_count = sum(self.chunks[key] for key in held)
        pin = chunk_pb2.PinnedChunks(
            pin_id=order.pin_id,
            position=chunk_pb2.Position(instance_id=self.instance_id, tier=HOST),
            chunk_count=outcome.chunk_count,
            token_count=int(outcome.token_count),
        )
        pin.expire_time.FromNanoseconds(time.time_ns() + order.ttl.ToNanoseconds())
        self.pins[order.pin_id] = pin
        self.pinned[order.pin_id] = held
        await self._report(pins=report_pb.PinList(pins=self.pins.values()))

    async def _hint(self, order: report_pb.HintOrder, outcome: report_pb.OrderOutcome) -> None:
        """Does nothing, and says that it was done for what is held."""
        count = sum(key in self.chunks for key in split_keys(order.chunk_keys))
        done = chunk_pb2.HINT_OUTCOME_ACCEPTED if count else chunk_pb2.HINT_OUTCOME_MISSING
        outcome.hint.CopyFrom(chunk_pb2.HintResult(outcome=done, chunk_count=count, ttl=order.ttl))

    async def _unpin(self, order: report_pb.UnpinOrder, outcome: report_pb.OrderOutcome) -> None:
        self.pins.pop(order.pin_id, None)
        self.pinned.pop(order.pin_id, None)
        await self._report(pins=report_pb.PinList(pins=self.pins.values()))

    async def _explain(self, order: report_pb.ExplainOrder, outcome: report_pb.OrderOutcome) -> None:
        outcome.explanation.start_time.FromNanoseconds(self.epoch)
        if order.engine_request_id:
            outcome.explanation.requests.extend(
                report for report in self.reports if order.engine_request_id in report.engine_request_id
            )
            return
        keys = split_keys(order.chunk_keys)
        held = len(list(itertools.takewhile(self.chunks.__contains__, keys)))
        for count, span in ((held, PromptSpan(tier="host")), (len(keys) - held, PromptSpan(reason=self.miss_reason))):
            if count:
                span.chunk_count, span.token_count = count, count * self.spec.chunk_size
                outcome.explanation.spans.append(span)

    async def _cancel(self, order: report_pb.CancelOrder, outcome: report_pb.OrderOutcome) -> None: ...


Make = Callable[..., ScriptedInstance]
"""Makes an instance by its id, chunks and spec."""


def _fail(outcome: report_pb.OrderOutcome, keys: list[ChunkKey], error: LmkvError) -> None:
    if keys:
        outcome.failures.add(chunk_keys=keys, status=rpc.to_status(error))


def unpacked(packed: Any, kind: type[Message]) -> Any:
    message = kind()
    assert packed.Unpack(message), f"it is no {kind.__name__}"
    return message
