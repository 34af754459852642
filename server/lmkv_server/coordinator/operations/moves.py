"""Moves and copies: the destination fetches, verifies and commits; then, and only then, the source drops.

Chunks are moved in batches. Whatever fails, each chunk is at its source, at its destination, or at both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import numpy as np
from google.rpc import code_pb2, status_pb2
from numpy.typing import NDArray

from lmkv import rpc
from lmkv.errors import (
    BadSelection,
    ChunkNotFound,
    KvSpecMismatch,
    LmkvError,
    OperationCancelled,
    P2pDisabled,
    Unreachable,
)
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv.prompt import HeldKeys, Hit, match
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.match import HeldAt, item_keys
from lmkv_server.coordinator.operations.operations import Operation, Operations, add_failure
from lmkv_server.coordinator.operations.orders import PendingOrders, Position, resolve_position
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import SelectedChunks, Selector

BATCH_CHUNKS = 1024
"""Chunks per order: progress is updated, and the source drops chunks, after each batch."""
MAX_MOVED_TOKENS = 2**63 - 1
TIMEOUT_SECONDS = 600.0
"""Timeout of a move."""


class Moves:
    """Starts moves."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders, operations: Operations) -> None:
        self.registry = registry
        self._selector = selector
        self.orders = orders
        self._operations = operations
        self.locks = ChunkLocks()

    async def start(self, request: pb.MoveRequest) -> Operation:
        """Starts a move. Raises the errors of `CacheService.Move`."""
        if known := self._operations.repeated(request):
            return known
        self._check_synced(*self._positions(request))
        selections = await self._selector.required(request.prompt)
        if known := self._operations.repeated(request):  # started meanwhile
            return known
        move = self._plan(request, selections)
        return self._operations.start(request, move, TIMEOUT_SECONDS)

    def _plan(self, request: pb.MoveRequest, selections: Sequence[SelectedChunks]) -> _Move:
        source, destination = self._positions(request)
        selection = self._choose(selections, source, destination)
        receiver = self.registry.instances.named(destination.instance_id, "new_position")
        if not receiver.is_standby:
            check_spec(receiver, selection)
        return _Move(self, source, destination, selection, request)

    def _positions(self, request: pb.MoveRequest) -> tuple[Position, Position]:
        instances = self.registry.instances
        source = resolve_position(instances, request.old_position, "old_position")
        destination = resolve_position(instances, request.new_position, "new_position")
        if source == destination:
            raise BadSelection("old_position and new_position are the same; nothing would move")
        if source.instance_id != destination.instance_id:
            check_p2p(instances.named(source.instance_id, "old_position"), "old_position")
            check_p2p(instances.named(destination.instance_id, "new_position"), "new_position")
        return source, destination

    def _check_synced(self, *positions: Position) -> None:
        """Raises `Unreachable` while an instance has yet to report what it holds, as after a coordinator's restart."""
        for position in positions:
            instance = self.registry.instances.find(position.instance_id)
            if instance is not None and not instance.synced:
                raise Unreachable(
                    f"instance {position.instance_id!r} has not reported what it holds yet; retry shortly",
                    instance_id=position.instance_id,
                )

    def _choose(self, selections: Sequence[SelectedChunks], source: Position, destination: Position) -> SelectedChunks:
        """The chunks as the source, or else the destination, holds them.

        If the model name has several specs: of the one that the source, then the destination, holds most of.
        """
        layout = self.registry.layout
        selections = [one.held_at(layout, *source) for one in selections]
        selections = [one if one.match_at(layout, *source) else one.held_at(layout, *destination) for one in selections]
        return max(selections, key=lambda one: (one.match_at(layout, *source), one.match_at(layout, *destination)))


class _Move:
    """A running move."""

    def __init__(
        self,
        moves: Moves,
        source: Position,
        destination: Position,
        selection: SelectedChunks,
        request: pb.MoveRequest,
    ) -> None:
        self._layout = moves.registry.layout
        self._instances = moves.registry.instances
        self._orders = moves.orders
        self._locks = moves.locks
        self._source = source
        self._destination = destination
        self._copy = request.copy
        self._fingerprint = selection.fingerprint
        self._deadline = time.monotonic() + TIMEOUT_SECONDS
        self._result = pb.MoveResult()
        self._parted = selection.parted
        prompt = selection.prompt
        self._most_tokens = prompt.tokens.size if prompt and prompt.tokens is not None else MAX_MOVED_TOKENS
        """Tokens of the prompt: its last chunk may have others behind them."""
        keys, hit = selection.keys, Hit()
        if self._parted:
            # An earlier call may have moved some of it: what both hold together is one hit. What the source holds of a
            # shorter one goes with it.
            own = match(self._parted, HeldAt(self._layout, self._parted, source))
            hit = match(self._parted, HeldAt(self._layout, self._parted, source, destination))
            keys = item_keys(self._parted, hit) + item_keys(self._parted, own)
        named = np.array(list(dict.fromkeys(_keys_of(keys))), dtype=f"V{KEY_BYTES}")  # without duplicates
        held = self._layout.held_mask(*source, named.tobytes())
        self._keys = named[held]
        """Chunks to move, in prompt order."""
        arrived = ~held & self._layout.held_mask(*destination, named.tobytes())
        self._moved = named[arrived]
        """Chunks that only the destination holds, in prompt order."""
        if request.prompt.HasField("keys"):  # a prompt may be held in part, but a key names one chunk
            absent = named[~held & ~arrived]
            missing = ChunkNotFound(f"instance {source.instance_id!r} does not hold it", instance_id=source.instance_id)
            self._fail(absent, rpc.to_status(missing))
        if request.prompt.HasField("keys") and self._parted:
            beyond = np.frombuffer(selection.keys[hit.chunk_count * KEY_BYTES :], dtype=named.dtype)
            missing = ChunkNotFound(
                f"instance {source.instance_id!r} does not hold all parts that a hit needs",
                instance_id=source.instance_id,
            )
            self._fail(beyond, rpc.to_status(missing))
        # An earlier call may have moved them: they count as done.
        _, done_tokens = self._layout.match_at(*destination, self._moved.tobytes())
        self._result.chunk_count = self._result.arrived_before_chunk_count = len(self._moved)
        self._result.token_count = min(done_tokens, self._most_tokens)
        if self._parted:
            token_count = self._parted.end(hit)
        else:
            _, token_count = self._layout.match_at(*source, self._keys.tobytes())
            token_count = min(done_tokens + token_count, self._most_tokens)
        self.progress = pb.MoveProgress(
            chunk_count=len(self._moved) + len(self._keys),
            done_chunk_count=len(self._moved),
            token_count=token_count,
            old_position=source.to_proto(),
            new_position=destination.to_proto(),
        )
        self.progress.create_time.GetCurrentTime()
        self.progress.expire_time.FromNanoseconds(time.time_ns() + round(TIMEOUT_SECONDS * 1e9))

    @property
    def size_bytes(self) -> int:
        """Size of its keys."""
        return int(self._keys.nbytes + self._moved.nbytes)

    async def run(self, operation: Operation) -> pb.MoveResult:
        """Runs it to its end. Raises the error if nothing was moved, or `OperationCancelled`."""
        arrived = [self._moved]
        for start in range(0, len(self._keys), BATCH_CHUNKS):
            if operation.cancelled.is_set():
                break
            batch = self._keys[start : start + BATCH_CHUNKS]
            if self._copy:
                arrived.append(await self._fetch(batch, operation))
                continue
            async with self._locks.hold(batch, self._deadline):
                serial = self._fetch_serial()
                fetched = await self._fetch(batch, operation)
                arrived.append(fetched)
                if len(fetched):
                    await self._drop(fetched, serial, operation)
        if operation.cancelled.is_set():
            raise OperationCancelled(
                f"cancelled after {self._result.chunk_count} of {self.progress.chunk_count} chunks; "
                "those stay where they are",
                chunk_count=self._result.chunk_count,
            )
        if self._result.failures and not self._result.chunk_count:
            raise rpc.from_status(self._result.failures[0].status)
        if self._parted:
            held = HeldKeys(self._parted, set(_keys_of(np.concatenate(arrived).tobytes())))
            self._result.token_count = self._parted.end(match(self._parted, held))
        return self._result

    async def _fetch(self, batch: NDArray[np.void], operation: Operation) -> NDArray[np.void]:
        """Has the destination fetch a batch; returns the chunks that it committed."""
        try:
            source = self._instances.named(self._source.instance_id, "old_position").info
            fetch = report_pb.FetchOrder(
                instance_id=source.instance_id,
                epoch=source.epoch,
                peer_address=source.peer_address,
                fingerprint=self._fingerprint,
                chunk_keys=batch.tobytes(),
                tier=self._destination.tier_id,
                spec=spec_message(self._instances, self._fingerprint),
            )
            order = report_pb.Order(fetch=fetch)
            outcome = await self._order(self._destination.instance_id, order, operation, operation.cancelled)
        except LmkvError as error:
            return self._fail(batch, rpc.to_status(error))
        failed = self._add_failures(outcome)
        arrived = batch[~np.isin(batch, failed)]
        if len(arrived) != outcome.chunk_count:  # it stopped early: what it committed is unknown, so nothing is dropped
            status = outcome.status if outcome.status.code else _contradiction(self._destination.instance_id)
            self._result.chunk_count += outcome.chunk_count
            return self._fail(arrived, status)
        self._result.chunk_count += outcome.chunk_count
        self._result.token_count = min(self._result.token_count + outcome.token_count, self._most_tokens)
        self._result.transferred_bytes += outcome.transferred_bytes
        self.progress.done_chunk_count = self._result.chunk_count
        self.progress.transferred_bytes = self._result.transferred_bytes
        return arrived

    def _fetch_serial(self) -> int:
        """Returns the source's count of fetch orders, as last reported; to be read before the destination fetches."""
        source = self._instances.find(self._source.instance_id)
        return source.fetch_serial if source else 0

    async def _drop(self, arrived: NDArray[np.void], serial: int, operation: Operation) -> None:
        """Has the source drop the chunks that the destination committed.

        Those stay that another operation has brought to the source since: it may drop them at the destination.
        """
        drop = report_pb.DropOrder(
            tier=self._source.tier_id,
            chunk_keys=arrived.tobytes(),
            fingerprint=self._fingerprint,
            fetch_serial=serial,
        )
        try:
            outcome = await self._order(self._source.instance_id, report_pb.Order(drop=drop), operation)
        except LmkvError as error:
            self._fail(arrived, rpc.to_status(error))
            return
        self._add_failures(outcome)
        self._result.dropped_chunk_count += outcome.chunk_count

    async def _order(
        self, instance_id: str, order: report_pb.Order, operation: Operation, cancelled: asyncio.Event | None = None
    ) -> report_pb.OrderOutcome:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise Unreachable(f"the move took longer than {TIMEOUT_SECONDS:g} s")
        order.operation_name = operation.name
        return await self._orders.execute(instance_id, order, seconds, cancelled)

    def _add_failures(self, outcome: report_pb.OrderOutcome) -> NDArray[np.void]:
        for failure in outcome.failures:
            add_failure(self._result.failures, failure.chunk_keys, failure.status)
        return np.frombuffer(
            b"".join(key for failure in outcome.failures for key in failure.chunk_keys), dtype=f"V{KEY_BYTES}"
        )

    def _fail(self, keys: NDArray[np.void], status: status_pb2.Status) -> NDArray[np.void]:
        add_failure(self._result.failures, keys.tolist(), status)
        return keys[:0]


def check_p2p(instance: Instance, field: str) -> None:
    """Raises `P2pDisabled` if other instances cannot fetch from this one, nor it from them."""
    if not instance.info.peer_address:
        raise P2pDisabled(
            f"{field}: instance {instance.info.instance_id!r} does not transfer chunks to or from other nodes; set "
            "enable_p2p to true there",
            instance_id=instance.info.instance_id,
            field=field,
        )


def spec_message(instances: Instances, fingerprint: bytes) -> chunk_pb2.KvSpec | None:
    """The message of a registered spec; None if it is not registered any more."""
    spec = instances.models.find_spec(fingerprint) if fingerprint else None
    return spec.to_proto() if spec else None


def check_spec(instance: Instance, selection: SelectedChunks) -> None:
    """Raises `KvSpecMismatch` if an instance cannot hold these chunks."""
    fingerprints = {spec.fingerprint for spec in instance.info.specs}
    if selection.fingerprint and selection.fingerprint not in fingerprints:
        raise KvSpecMismatch(
            f"instance {instance.info.instance_id!r} does not serve the spec of these chunks; it cannot hold them "
            "(`lmkv instances` says what differs)",
            instance_id=instance.info.instance_id,
        )


def _keys_of(keys: bytes) -> Iterable[ChunkKey]:
    return (ChunkKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES))


def _contradiction(instance_id: str) -> status_pb2.Status:
    return status_pb2.Status(
        code=code_pb2.INTERNAL, message=f"instance {instance_id!r} reports a chunk count that contradicts its failures"
    )


class ChunkLocks:
    """Locks by chunk key. One event loop owns it."""

    def __init__(self) -> None:
        self._locked: set[bytes] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, batch: NDArray[np.void], deadline: float) -> AsyncIterator[None]:
        """Locks all chunks of a batch together. Raises `Unreachable` after the deadline."""
        keys = {key.tobytes() for key in batch}
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                async with self._changed:
                    await self._changed.wait_for(lambda: keys.isdisjoint(self._locked))
                    self._locked |= keys
        except TimeoutError:
            raise Unreachable("waited too long for other moves of the same chunks") from None
        try:
            yield
        finally:
            self._locked -= keys
            async with self._changed:
                self._changed.notify_all()
