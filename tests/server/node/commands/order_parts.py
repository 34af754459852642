"""What tests of orders are made of: orders of each kind, a coordinator that sends them, and nodes that run them."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, join_keys
from lmkv.misses import MissReason
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import OrderContext
from lmkv_server.node.commands.runner import OrderRunner
from tests.server.node.cases import admit
from tests.server.node.ordering import until
from tests.server.node.peer_parts import SMALL, Parts, keys_of
from tests.support.specs import small_spec

KEYS = keys_of(16)
GIVER = "coordinator:9000"
NUMBERS = itertools.count(1)
SPEC = small_spec()
OTHER_SPEC = small_spec(layer_count=4)


def order(seconds: float = 60.0, **action: Any) -> pb.Order:
    made = pb.Order(order_id=f"o{next(NUMBERS)}", **action)
    made.expire_time.FromNanoseconds(time.time_ns() + round(seconds * 1e9))
    return made


def fetch(holder: Holder, keys: Iterable[ChunkKey] = KEYS, spec: KvSpec = SMALL, seconds: float = 60.0) -> pb.Order:
    return order(
        seconds,
        fetch=pb.FetchOrder(
            instance_id=holder.instance_id,
            epoch=holder.epoch,
            peer_address=holder.peer_address,
            fingerprint=spec.fingerprint,
            chunk_keys=join_keys(keys),
            tier=HOST,
        ),
    )


def pin(keys: Iterable[ChunkKey], pin_id: str = "p", seconds: float = 60.0, **fields: Any) -> pb.Order:
    ttl = Duration()
    ttl.FromNanoseconds(round(seconds * 1e9))
    return order(pin=pb.PinOrder(pin_id=pin_id, chunk_keys=join_keys(keys), ttl=ttl, **fields))


class Coordinating:
    """Gives orders to a node, and hears their outcomes."""

    def __init__(self, orders: OrderRunner) -> None:
        self.orders = orders

    def outcome(self, given: pb.Order) -> pb.OrderOutcome | None:
        """The outcome, or the progress so far."""
        found = [outcome for outcome in self.orders.unacknowledged(GIVER) if outcome.order_id == given.order_id]
        assert len(found) <= 1
        return found[0] if found else None

    async def ended(self, given: pb.Order) -> pb.OrderOutcome:
        """Waits for the outcome."""
        await until(lambda: self.outcome(given) is not None)
        outcome = self.outcome(given)
        assert outcome
        self.orders.check()
        return outcome

    async def carried_out(self, given: pb.Order) -> pb.OrderOutcome:
        """Gives an order and waits for its outcome."""
        self.orders.start(given, GIVER)
        return await self.ended(given)


@asynccontextmanager
async def coordinating(node: Parts) -> AsyncIterator[Coordinating]:
    async with OrderRunner(
        OrderContext(instance_id=node.instance_id, tier=node.tier, engines=node.engines, fetcher=node.fetcher)
    ) as orders:
        yield Coordinating(orders)
    await until(lambda: node.tier.reserved_count == 0)  # a transfer that was stopped may land for a moment
    node.check_nothing_left()


def reason(outcome: pb.OrderOutcome) -> str:
    """Why the order as a whole failed, if it did."""
    return rpc.from_status(outcome.status).reason if outcome.status.code else ""


def failed(outcome: pb.OrderOutcome) -> dict[str, list[ChunkKey]]:
    found = {
        rpc.from_status(failure.status).reason: [*map(ChunkKey, failure.chunk_keys)] for failure in outcome.failures
    }
    assert len(found) == len(outcome.failures)
    return found


def claimed(outcome: pb.OrderOutcome, keys: Sequence[ChunkKey] = KEYS) -> list[ChunkKey]:
    """The chunks that a fetch says are here now."""
    failures = {key for keys in failed(outcome).values() for key in keys}
    assert failures <= set(keys)
    left = [key for key in keys if key not in failures]
    assert len(left) == outcome.chunk_count
    assert outcome.token_count == 256 * len(left)
    return left


class AtFirst:
    """A tier's listener that does something when the first chunk is there."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then: Callable[[], None] | None = then

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        then, self._then = self._then, None
        if then:
            then()

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None: ...


class Shelf:
    """A node without peers: its tier holds chunks 0 to 5 of one spec and 10 to 13 of another."""

    def __init__(self, orders: OrderRunner, tier: HostTier) -> None:
        self.tier = tier
        self.here = Coordinating(orders)
        for number in range(6):
            admit(tier, SPEC, number)
        for number in range(10, 14):
            admit(tier, OTHER_SPEC, number)

    def numbers(self) -> list[int]:
        return sorted(int.from_bytes(chunk.key, "big") for chunk in self.tier)

    async def drop(self, **fields: Any) -> pb.OrderOutcome:
        return await self.here.carried_out(order(drop=pb.DropOrder(**fields)))
