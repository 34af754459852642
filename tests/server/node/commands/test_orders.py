"""Orders carried out: over real peers and NIXL, with sources that lose chunks, freeze and die."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.keys import ChunkKey, join_keys, split_keys
from lmkv.spec import KvSpec
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import DROP_BATCH_CHUNKS, MAX_ORDER_KEYS
from lmkv_server.node.commands.runner import MAX_FETCHES, MAX_RUNNING, OrderRunner
from lmkv_server.node.fleet.context import FleetContext
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.server.node import fleet_parts
from tests.server.node.cases import admit, chunk_keys, small_spec
from tests.server.node.ordering import Ordering, serving, until
from tests.server.node.peer_parts import LARGE, SMALL, Parts, Remote, keys_of
from tests.waiting import WAIT_SECONDS

KEYS = keys_of(16)
GIVER = "coordinator:9000"
NUMBERS = itertools.count(1)
SPEC = small_spec()
OTHER_SPEC = small_spec(layer_count=4)


def order(seconds: float = 10.0, **action: Any) -> pb.Order:
    """An order whose time is up so many seconds from now."""
    made = pb.Order(order_id=f"o{next(NUMBERS)}", **action)
    made.expire_time.FromNanoseconds(time.time_ns() + round(seconds * 1e9))
    return made


def fetch(holder: Holder, keys: Iterable[ChunkKey] = KEYS, spec: KvSpec = SMALL, seconds: float = 10.0) -> pb.Order:
    """An order to fetch from a holder."""
    return order(
        seconds,
        fetch=pb.FetchOrder(
            instance_id=holder.instance_id,
            epoch=holder.epoch,
            peer_address=holder.peer_address,
            fingerprint=spec.fingerprint,
            chunk_keys=join_keys(keys),
            tier=chunk_pb2.TIER_HOST,
        ),
    )


def pin(keys: Iterable[ChunkKey], pin_id: str = "p", seconds: float = 60.0, **fields: Any) -> pb.Order:
    """An order to pin."""
    ttl = Duration()
    ttl.FromNanoseconds(round(seconds * 1e9))
    return order(pin=pb.PinOrder(pin_id=pin_id, chunk_keys=join_keys(keys), ttl=ttl, **fields))


class Coordinating:
    """Gives orders to a node, and hears their outcomes."""

    def __init__(self, orders: OrderRunner) -> None:
        self.orders = orders

    def outcome(self, given: pb.Order) -> pb.OrderOutcome | None:
        """The outcome, if there is one; told until then."""
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
        instance_id=node.instance_id, tier=node.tier, engines=node.engines, fetcher=node.fetcher
    ) as orders:
        yield Coordinating(orders)
    await until(lambda: node.tier.reserved_count == 0)  # a transfer that was stopped may land for a moment
    node.check_nothing_left()


def reason(outcome: pb.OrderOutcome) -> str:
    """Why the order as a whole failed, if it did."""
    return rpc.from_status(outcome.status).reason if outcome.status.code else ""


def failed(outcome: pb.OrderOutcome) -> dict[str, list[ChunkKey]]:
    """The chunks that failed, by reason."""
    found = {rpc.from_status(failure.status).reason: split_keys(failure.chunk_keys) for failure in outcome.failures}
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


@pytest.fixture
async def reader() -> AsyncIterator[Parts]:
    async with Parts("reader") as parts:
        yield parts


@pytest.fixture
async def here(reader: Parts) -> AsyncIterator[Coordinating]:
    async with coordinating(reader) as giving:
        yield giving


@pytest.fixture
async def owner() -> AsyncIterator[Parts]:
    async with Parts("owner", chunk_count=64) as parts:
        for key in KEYS:
            parts.put(key)
        yield parts
        await until(lambda: len(parts.service.grants) == 0)
        parts.check_nothing_left()


class AtFirst:
    """A tier's listener that does something when the first chunk is there."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then: Callable[[], None] | None = then

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        then, self._then = self._then, None
        if then:
            then()

    def removed(self, tier: str, chunk: CachedChunk) -> None: ...


# --- Fetch -------------------------------------------------------------------------------------------------------


async def test_chunks_come_whole_from_another_process() -> None:
    with Remote("owner") as remote:
        async with Parts("reader", spec=LARGE) as reader, coordinating(reader) as here:
            outcome = await here.carried_out(fetch(remote.holder, spec=LARGE))
            assert (reason(outcome), claimed(outcome)) == ("", KEYS)
            assert outcome.transferred_bytes == 16 * LARGE.chunk_bytes == here.orders.stats().transferred_bytes
            assert all(reader.tier.get(key) for key in KEYS)
            assert (here.orders.stats().done_counts["fetch"], here.orders.stats().chunk_counts["fetch"]) == (1, 16)


async def test_what_is_here_counts_and_is_not_transferred(owner: Parts, reader: Parts, here: Coordinating) -> None:
    for key in KEYS[3:5]:
        reader.put(key)
    outcome = await here.carried_out(fetch(owner.holder(0)))
    assert (reason(outcome), claimed(outcome)) == ("", KEYS)
    assert outcome.transferred_bytes == 14 * SMALL.chunk_bytes
    again = await here.carried_out(fetch(owner.holder(0)))
    assert (claimed(again), again.transferred_bytes) == (KEYS, 0)


async def test_partial_chunks_count_their_own_tokens(owner: Parts, here: Coordinating) -> None:
    owner.tier.drop([KEYS[15]])
    owner.put(KEYS[15], token_count=100)
    outcome = await here.carried_out(fetch(owner.holder(0)))
    assert (outcome.chunk_count, outcome.token_count) == (16, 15 * 256 + 100)


@pytest.mark.parametrize("seed", range(4))
async def test_what_the_source_lost_fails_and_nothing_else(
    owner: Parts, reader: Parts, here: Coordinating, seed: int
) -> None:
    lost = set(random.Random(seed).sample(KEYS, 5)) | {KEYS[0]}
    owner.tier.drop(lost)
    own = sorted(lost)[2]
    reader.put(own)
    outcome = await here.carried_out(fetch(owner.holder(0)))
    assert reason(outcome) == ""
    assert failed(outcome) == {"CHUNK_NOT_FOUND": [key for key in KEYS if key in lost and key != own]}
    assert all(reader.tier.get(key) for key in claimed(outcome))
    assert here.orders.stats().failed_chunks == {"CHUNK_NOT_FOUND": len(lost) - 1}


async def test_holes_in_every_window_stop_nothing(reader: Parts, here: Coordinating) -> None:
    async with Parts("owner", chunk_count=16) as owner:  # one peer's share is four chunks at a time
        for key in KEYS[::2]:
            owner.put(key)
        outcome = await here.carried_out(fetch(owner.holder(0)))
        assert claimed(outcome) == KEYS[::2]
        assert failed(outcome) == {"CHUNK_NOT_FOUND": KEYS[1::2]}


async def test_what_another_fetch_gave_up_behind_a_hole_is_brought(
    owner: Parts, reader: Parts, here: Coordinating
) -> None:
    owner.tier.drop([KEYS[2]])
    reader.fetcher.inflight.begin([KEYS[5]])  # as if another fetch were bringing it
    given = fetch(owner.holder(0))
    here.orders.start(given, GIVER)
    await until(lambda: len(reader.tier) == 14)
    reader.fetcher.inflight.end([KEYS[5]])
    outcome = await here.ended(given)
    assert failed(outcome) == {"CHUNK_NOT_FOUND": [KEYS[2]]}
    assert len(claimed(outcome)) == 15


async def test_a_damaged_chunk_fails_by_itself(owner: Parts, reader: Parts, here: Coordinating) -> None:
    owner.damage(KEYS[5])
    outcome = await here.carried_out(fetch(owner.holder(0)))
    assert failed(outcome) == {"UNREACHABLE": [KEYS[5]]}
    assert reader.tier.get(KEYS[5]) is None
    owner.tier.drop([KEYS[5]])


async def test_a_full_pool_takes_what_fits_and_the_rest_fails(owner: Parts) -> None:
    async with Parts("reader", chunk_count=7) as reader, coordinating(reader) as here:
        reader.put(KEYS[9])
        held = reader.put(keys_of(20)[19])
        reader.tier.hold([held])
        reader.put(keys_of(21)[20])  # gives way
        outcome = await here.carried_out(fetch(owner.holder(0)))
        assert reason(outcome) == ""
        assert list(failed(outcome)) == ["NO_FREE_EXTENTS"]
        assert claimed(outcome) == [*KEYS[:5], KEYS[9]]
        assert all(reader.tier.get(key) for key in claimed(outcome))
        reader.tier.unhold([held])


async def test_what_an_order_claims_is_evicted_last(owner: Parts) -> None:
    async with Parts("reader", chunk_count=20) as reader, coordinating(reader) as here:
        reader.put(KEYS[0])
        for number in range(4):
            reader.put(keys_of(30)[20 + number])
        outcome = await here.carried_out(fetch(owner.holder(0)))
        assert claimed(outcome) == KEYS
        for number in range(4):  # what was there before makes room for more
            reader.put(keys_of(40)[30 + number])
        assert all(reader.tier.get(key) for key in KEYS)


async def test_when_the_source_is_killed_the_outcome_claims_what_came() -> None:
    with Remote("owner") as remote:
        listener = AtFirst(lambda: remote.signal(signal.SIGKILL))
        async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
            outcome = await here.carried_out(fetch(remote.holder, spec=LARGE))
            assert reason(outcome) == ""
            came = claimed(outcome)
            assert 0 < len(came) < 16
            assert list(failed(outcome)) == ["UNREACHABLE"]
            assert all(reader.tier.get(key) for key in came)
            assert outcome.transferred_bytes == len(came) * LARGE.chunk_bytes
            again = await here.carried_out(fetch(remote.holder, spec=LARGE))
            assert claimed(again) == came


async def test_an_order_ends_at_its_time_and_tells_how_far_it_came() -> None:
    with Remote("owner") as remote:
        async with Parts("reader", spec=LARGE) as reader, coordinating(reader) as here:
            reader.put(KEYS[3])
            remote.signal(signal.SIGSTOP)
            outcome = await here.carried_out(fetch(remote.holder, spec=LARGE, seconds=0.3))
            assert reason(outcome) == "UNREACHABLE"
            assert claimed(outcome) == [KEYS[3]]
            assert list(failed(outcome)) == ["UNREACHABLE"]


async def test_an_order_that_came_too_late_is_not_begun(owner: Parts, reader: Parts, here: Coordinating) -> None:
    outcome = await here.carried_out(fetch(owner.holder(0), seconds=-5))
    assert reason(outcome) == "UNREACHABLE"
    assert "are the clocks in sync?" in outcome.status.message
    assert claimed(outcome) == []
    assert len(reader.tier) == 0
    assert here.orders.stats().failed_counts["fetch"] == 1


async def test_a_repeat_is_not_begun_again_and_has_the_same_outcome(
    owner: Parts, reader: Parts, here: Coordinating
) -> None:
    given = fetch(owner.holder(0))
    here.orders.start(given, GIVER)
    here.orders.start(given, GIVER)
    outcome = await here.ended(given)
    here.orders.acknowledge(GIVER, [given.order_id])
    assert here.orders.unacknowledged(GIVER) == []
    reader.tier.drop(KEYS)
    assert await here.carried_out(given) == outcome
    assert reader.pipeline.stats().chunk_count == 16
    assert here.orders.stats().done_counts["fetch"] == 1


async def test_two_orders_for_the_same_chunks_share_one_transfer(
    owner: Parts, reader: Parts, here: Coordinating
) -> None:
    both = [fetch(owner.holder(0)), fetch(owner.holder(0), KEYS[::-1])]
    for given in both:
        here.orders.start(given, GIVER)
    for given in both:
        assert len(claimed(await here.ended(given))) == 16
    assert reader.pipeline.stats().chunk_count == 16


async def test_a_chunk_that_is_dropped_meanwhile_is_not_claimed() -> None:
    with Remote("owner") as remote:
        remote.signal(signal.SIGSTOP)
        async with Parts("reader", spec=LARGE) as reader, coordinating(reader) as here:
            reader.put(KEYS[3])
            given = fetch(remote.holder, KEYS[:4], spec=LARGE)
            here.orders.start(given, GIVER)
            await until(lambda: any(chunk.holds for chunk in reader.tier))
            assert (await here.carried_out(order(drop=pb.DropOrder(all=True)))).chunk_count == 1
            remote.signal(signal.SIGCONT)
            outcome = await here.ended(given)
            assert failed(outcome) == {"CHUNK_NOT_FOUND": [KEYS[3]]}
            assert claimed(outcome, KEYS[:4]) == KEYS[:3]


async def test_a_source_that_restarted_or_is_not_there_is_named(owner: Parts, here: Coordinating) -> None:
    gone = owner.holder(0)
    gone.epoch -= 1
    assert failed(await here.carried_out(fetch(gone))) == {"WRONG_INSTANCE": KEYS}
    nowhere = Holder(instance_id="nowhere", epoch=1, peer_address="127.0.0.1:9")
    outcome = await here.carried_out(fetch(nowhere))
    assert failed(outcome) == {"UNREACHABLE": KEYS}


async def test_a_spec_that_no_engine_here_has_is_refused_by_name(owner: Parts, here: Coordinating) -> None:
    outcome = await here.carried_out(fetch(owner.holder(0), spec=LARGE))
    assert reason(outcome) == "KV_SPEC_MISMATCH"
    assert LARGE.fingerprint.hex() in outcome.status.message
    assert claimed(outcome) == []


# --- Cancel, and what is bounded ---------------------------------------------------------------------------------


async def test_a_fetch_may_be_cancelled_at_any_moment(owner: Parts, reader: Parts, here: Coordinating) -> None:
    reasons = set()
    for step in range(25):
        given = fetch(owner.holder(0))
        here.orders.start(given, GIVER)
        await asyncio.sleep(step * 0.0007)
        cancel = await here.carried_out(order(cancel=pb.CancelOrder(order_id=given.order_id)))
        assert reason(cancel) == ""
        outcome = await here.ended(given)
        reasons.add(reason(outcome))
        assert set(failed(outcome)) <= {"OPERATION_CANCELLED"}
        assert all(reader.tier.get(key) for key in claimed(outcome))
        await until(lambda: reader.tier.reserved_count == 0)
        reader.check_nothing_left()
        reader.tier.drop(KEYS)
    assert "OPERATION_CANCELLED" in reasons


async def test_what_came_before_a_fetch_was_cancelled_is_kept_and_claimed() -> None:
    with Remote("owner") as remote:
        listener = AtFirst(lambda: remote.signal(signal.SIGSTOP))
        async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
            given = fetch(remote.holder, spec=LARGE)
            here.orders.start(given, GIVER)
            await until(lambda: len(reader.tier) > 0)
            here.orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
            outcome = await here.ended(given)
            assert (reason(outcome), list(failed(outcome))) == ("OPERATION_CANCELLED", ["OPERATION_CANCELLED"])
            assert 0 < len(claimed(outcome)) == len(reader.tier) < 16
            assert outcome.transferred_bytes == len(reader.tier) * LARGE.chunk_bytes
            remote.signal(signal.SIGCONT)


async def test_cancelling_what_is_over_or_unknown_is_no_error(owner: Parts, here: Coordinating) -> None:
    given = fetch(owner.holder(0))
    assert reason(await here.carried_out(given)) == ""
    for order_id in (given.order_id, "never heard of"):
        assert reason(await here.carried_out(order(cancel=pb.CancelOrder(order_id=order_id)))) == ""
    here.orders.start(given, GIVER)
    assert len([o for o in here.orders.unacknowledged(GIVER) if o.order_id == given.order_id]) == 1


async def test_only_so_many_run_and_wait_and_those_that_wait_can_be_cancelled() -> None:
    with Remote("owner") as remote:
        async with Parts("reader", spec=LARGE) as reader, coordinating(reader) as here:
            remote.signal(signal.SIGSTOP)
            running = [fetch(remote.holder, [key], LARGE) for key in KEYS[:MAX_FETCHES]]
            waiting = [fetch(remote.holder, KEYS[:2], LARGE) for _ in range(MAX_RUNNING - MAX_FETCHES)]
            for given in running + waiting:
                here.orders.start(given, GIVER)
            await until(lambda: here.orders.stats().fetching_count > 0)
            assert (here.orders.stats().fetching_count, here.orders.stats().running_count) == (MAX_FETCHES, MAX_RUNNING)
            refused = await here.carried_out(fetch(remote.holder, KEYS[:2], LARGE))
            assert reason(refused) == "FULL"
            assert claimed(refused, KEYS[:2]) == []
            for given in waiting[:1]:
                here.orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
                await here.ended(given)
            late = await here.carried_out(fetch(remote.holder, KEYS[:2], LARGE, seconds=0.2))
            assert (reason(late), failed(late)) == ("UNREACHABLE", {"UNREACHABLE": KEYS[:2]})
            for given in waiting:
                here.orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
            await until(lambda: here.orders.stats().failed_counts["fetch"] == 2 + len(waiting))
            assert here.orders.stats().failed_chunks == {
                "FULL": 2,
                "UNREACHABLE": 2,
                "OPERATION_CANCELLED": 2 * len(waiting),
            }
            remote.signal(signal.SIGCONT)
            for given in running:
                assert reason(await here.ended(given)) == ""
            assert len(reader.tier) == 16
            assert (here.orders.stats().fetching_count, here.orders.stats().running_count) == (0, 0)


async def test_an_order_goes_on_while_the_stream_is_broken_and_is_told_over_the_next() -> None:
    with Remote("owner") as remote:
        listener = AtFirst(lambda: remote.signal(signal.SIGSTOP))
        async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
            ordering, given = Ordering(), fetch(remote.holder, spec=LARGE)
            context = FleetContext(node=fleet_parts.Shelf("reader", specs=[LARGE]), orders=here.orders)
            async with (
                serving(ordering) as address,
                FleetMembership([address], context),
            ):
                ordering.give_again(given)
                await until(lambda: len(reader.tier) > 0)
                ordering.break_stream()
                await until(lambda: ordering.stream_count == 2)
                ordering.give_again(given)
                remote.signal(signal.SIGCONT)
                outcome = await ordering.ended(given.order_id)
                assert claimed(outcome) == KEYS
                assert reader.pipeline.stats().chunk_count == 16
                await until(lambda: here.orders.unacknowledged(address) == [])


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_meanwhile_no_outcome_claims_what_is_not_here(owner: Parts, seed: int) -> None:
    dice = random.Random(seed)
    async with Parts("reader", chunk_count=12) as reader, coordinating(reader) as here:
        given: dict[str, pb.Order] = {}
        checked: set[str] = set()

        def check_claims() -> None:  # within the step that makes the outcome
            for outcome in here.orders.unacknowledged(GIVER):
                made = given[outcome.order_id]
                if outcome.order_id not in checked and made.HasField("fetch"):
                    assert all(reader.tier.get(key) for key in claimed(outcome, split_keys(made.fetch.chunk_keys)))
                checked.add(outcome.order_id)

        def give(made: pb.Order) -> None:
            given[made.order_id] = made
            here.orders.start(made, GIVER)

        here.orders.add_listener(GIVER, check_claims)
        for _ in range(120):
            some = dice.sample(KEYS, dice.randint(1, 10))
            match dice.choice(["fetch", "fetch", "fetch", "cancel", "drop", "pin", "unpin", "store", "reset", "lose"]):
                case "fetch":
                    give(fetch(owner.holder(0), some, seconds=dice.choice([0.002, 10.0])))
                case "cancel" if given:
                    give(order(cancel=pb.CancelOrder(order_id=dice.choice(list(given)))))
                case "drop":
                    give(order(drop=pb.DropOrder(chunk_keys=join_keys(some))))
                case "pin":
                    give(pin(some, pin_id=dice.choice("abc"), seconds=dice.choice([0.001, 60])))
                case "unpin":
                    give(order(unpin=pb.UnpinOrder(pin_id=dice.choice("abc"))))
                case "store":
                    if reserved := reader.tier.reserve(SMALL.chunk_bytes):
                        reader.tier.give_back(reserved.offset)
                case "reset":
                    reader.tier.clear(SMALL.fingerprint)
                case "lose":
                    lost = owner.tier.get(some[0])
                    owner.tier.drop([some[0]]) if lost else owner.put(some[0])
            here.orders.check()
            await asyncio.sleep(dice.choice([0, 0, 0.001, 0.004]))
        await until(lambda: checked == set(given))


async def test_a_node_that_stops_leaves_its_orders() -> None:
    with Remote("owner") as remote:
        listener = AtFirst(lambda: remote.signal(signal.SIGSTOP))
        async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
            here.orders.start(pin(KEYS[:1]), GIVER)
            for _ in range(MAX_FETCHES + 3):
                here.orders.start(fetch(remote.holder, spec=LARGE), GIVER)
            await until(lambda: len(reader.tier) > 0)
            async with asyncio.timeout(WAIT_SECONDS):
                await here.orders.aclose()
                await here.orders.aclose()
            assert len(here.orders.pins) == 0
            here.orders.check()
            remote.signal(signal.SIGCONT)


# --- Drop --------------------------------------------------------------------------------------------------------


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


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    tier = HostTier(64 * SPEC.chunk_bytes)
    async with OrderRunner(instance_id="n", tier=tier, engines=EngineSessions(tier), fetcher=None) as orders:
        yield Shelf(orders, tier)
    tier.check()
    assert not any(chunk.holds for chunk in tier)


async def test_chunks_are_dropped_by_key_and_what_is_not_held_is_not_counted(shelf: Shelf) -> None:
    outcome = await shelf.drop(chunk_keys=join_keys(chunk_keys(1, 3, 77, 3, 11)))
    assert (reason(outcome), outcome.chunk_count, outcome.token_count) == ("", 3, 3 * 32)
    assert shelf.numbers() == [0, 2, 4, 5, 10, 12, 13]
    outcome = await shelf.drop(chunk_keys=join_keys(chunk_keys(0, 10)), fingerprint=SPEC.fingerprint)
    assert outcome.chunk_count == 1
    assert shelf.numbers() == [2, 4, 5, 10, 12, 13]


async def test_chunks_are_dropped_by_spec_or_all(shelf: Shelf) -> None:
    assert (await shelf.drop(fingerprint=OTHER_SPEC.fingerprint, tier=chunk_pb2.TIER_HOST)).chunk_count == 4
    assert shelf.numbers() == [0, 1, 2, 3, 4, 5]
    assert (await shelf.drop(all=True)).chunk_count == 6
    assert shelf.numbers() == []
    assert (await shelf.drop(all=True)).chunk_count == 0


async def test_a_dry_run_counts_what_it_would_drop_and_drops_nothing(shelf: Shelf) -> None:
    await shelf.here.carried_out(pin(chunk_keys(0)))
    dry = await shelf.drop(all=True, dry_run=True)
    assert shelf.numbers() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    real = await shelf.drop(all=True)
    assert (dry.chunk_count, dry.token_count) == (real.chunk_count, real.token_count) == (9, 9 * 32)


async def test_pinned_chunks_stay_and_are_failures_if_they_were_named(shelf: Shelf) -> None:
    await shelf.here.carried_out(pin(chunk_keys(0, 1)))
    named = await shelf.drop(chunk_keys=join_keys(chunk_keys(0, 1, 2)))
    assert (reason(named), named.chunk_count) == ("", 1)
    assert failed(named) == {"CHUNK_PINNED": chunk_keys(0, 1)}
    would = await shelf.drop(all=True, dry_run=True)
    everything = await shelf.drop(all=True)
    assert (everything.chunk_count, list(everything.failures)) == (7, [])
    assert named.pinned_chunk_count == would.pinned_chunk_count == everything.pinned_chunk_count == 2
    assert shelf.numbers() == [0, 1]


async def test_bytes_that_a_peer_reads_stay_until_it_is_done(shelf: Shelf) -> None:
    chunks = shelf.tier.find(chunk_keys(0))
    shelf.tier.hold(chunks)
    used = shelf.tier.used_bytes
    assert (await shelf.drop(chunk_keys=join_keys(chunk_keys(0)))).chunk_count == 1
    assert shelf.tier.used_bytes == used
    shelf.tier.unhold(chunks)
    assert shelf.tier.used_bytes < used


async def test_a_large_drop_lets_others_have_a_turn_and_may_be_cancelled() -> None:
    tier = HostTier(3 * DROP_BATCH_CHUNKS * SPEC.chunk_bytes)
    for number in range(3 * DROP_BATCH_CHUNKS):
        admit(tier, SPEC, number)
    async with OrderRunner(instance_id="n", tier=tier, engines=EngineSessions(tier), fetcher=None) as orders:
        here, given = Coordinating(orders), order(drop=pb.DropOrder(all=True))
        orders.start(given, GIVER)
        orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
        outcome = await here.ended(given)
        assert reason(outcome) == "OPERATION_CANCELLED"
        assert outcome.chunk_count == DROP_BATCH_CHUNKS
        assert len(tier) == 2 * DROP_BATCH_CHUNKS
        rest = await here.carried_out(order(drop=pb.DropOrder(all=True)))
        assert (rest.chunk_count, len(tier)) == (2 * DROP_BATCH_CHUNKS, 0)
        tier.check()


# --- Pin and unpin -----------------------------------------------------------------------------------------------


async def test_the_head_that_is_held_is_pinned_until_it_is_unpinned(shelf: Shelf) -> None:
    outcome = await shelf.here.carried_out(pin(chunk_keys(3, 4, 77, 5)))
    assert (reason(outcome), outcome.chunk_count, outcome.token_count) == ("", 2, 64)
    room = [reserved for _ in range(64) if (reserved := shelf.tier.reserve(SPEC.chunk_bytes))]
    assert shelf.numbers() == [3, 4]
    assert shelf.tier.reserve(SPEC.chunk_bytes) is None
    unpinned = await shelf.here.carried_out(order(unpin=pb.UnpinOrder(pin_id="p")))
    assert (reason(unpinned), unpinned.chunk_count) == ("", 2)
    room += [reserved for _ in range(64) if (reserved := shelf.tier.reserve(SPEC.chunk_bytes))]
    assert shelf.numbers() == []
    again = await shelf.here.carried_out(order(unpin=pb.UnpinOrder(pin_id="p")))
    assert (reason(again), again.chunk_count) == ("", 0)
    assert shelf.here.orders.pins.unpinned_count == 1
    for reserved in room:
        shelf.tier.give_back(reserved.offset)


async def test_nothing_held_is_nothing_pinned(shelf: Shelf) -> None:
    outcome = await shelf.here.carried_out(pin(chunk_keys(77, 0)))
    assert (reason(outcome), outcome.status.code, outcome.chunk_count) == ("CHUNK_NOT_FOUND", 5, 0)


async def test_a_pin_that_is_repeated_lasts_longer(shelf: Shelf) -> None:
    await shelf.here.carried_out(pin(chunk_keys(0), seconds=50))
    await shelf.here.carried_out(pin(chunk_keys(0, 1), seconds=500))
    (listed,) = shelf.here.orders.pin_list().pins
    assert (listed.pin_id, listed.chunk_count) == ("p", 2)
    assert 500 - WAIT_SECONDS < listed.expire_time.seconds - time.time() < 501


async def test_a_pin_ends_by_itself(shelf: Shelf) -> None:
    news = 0

    def heard() -> None:
        nonlocal news
        news += 1

    await shelf.here.carried_out(pin(chunk_keys(0), seconds=3600, pin_id="long"))
    await shelf.here.carried_out(pin(chunk_keys(0, 1), seconds=0.1, pin_id="short"))
    shelf.here.orders.add_listener(GIVER, heard)
    pins = shelf.here.orders.pins
    await until(lambda: pins.expired_count == 1)
    await until(lambda: news > 0)
    assert [listed.pin_id for listed in shelf.here.orders.pin_list().pins] == ["long"]
    assert (await shelf.drop(all=True)).chunk_count == 9


# --- What makes no sense -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ({"fetch": pb.FetchOrder(chunk_keys=b"x" * 17)}, "BAD_CHUNK_KEY"),
        ({"fetch": pb.FetchOrder(chunk_keys=bytes(16 * (MAX_ORDER_KEYS + 1)))}, "BAD_CHUNK_KEY"),
        ({"fetch": pb.FetchOrder(chunk_keys=KEYS[0], tier=chunk_pb2.TIER_DISK)}, "TIER_UNSUPPORTED"),
        ({"fetch": pb.FetchOrder(chunk_keys=KEYS[0], tier=chunk_pb2.Tier.ValueType(99))}, "TIER_UNSUPPORTED"),
        ({"fetch": pb.FetchOrder(chunk_keys=KEYS[0])}, "KV_SPEC_MISMATCH"),
        ({"drop": pb.DropOrder(chunk_keys=b"x")}, "BAD_CHUNK_KEY"),
        ({"drop": pb.DropOrder()}, "BAD_MESSAGE"),
        ({"drop": pb.DropOrder(tier=chunk_pb2.TIER_HOST)}, "BAD_MESSAGE"),
        ({"drop": pb.DropOrder(all=True, tier=chunk_pb2.TIER_REMOTE)}, "TIER_UNSUPPORTED"),
        ({"pin": pb.PinOrder(pin_id="p", chunk_keys=b"x", ttl=Duration(seconds=1))}, "BAD_CHUNK_KEY"),
        ({"pin": pb.PinOrder(pin_id="p", chunk_keys=bytes(16))}, "BAD_SELECTION"),
        ({"pin": pb.PinOrder(chunk_keys=bytes(16), ttl=Duration(seconds=1))}, "BAD_MESSAGE"),
        ({"pin": pb.PinOrder(pin_id="p", tier=chunk_pb2.TIER_GPU)}, "TIER_UNSUPPORTED"),
        ({}, "BAD_MESSAGE"),
    ],
)
async def test_an_order_that_makes_no_sense_is_refused(shelf: Shelf, action: dict[str, Any], expected: str) -> None:
    before = shelf.numbers()
    outcome = await shelf.here.carried_out(order(**action))
    assert reason(outcome) == expected
    assert (outcome.chunk_count, shelf.numbers()) == (0, before)
    assert sum(shelf.here.orders.stats().failed_counts.values()) == 1


async def test_without_peers_a_fetch_says_so(shelf: Shelf) -> None:
    engines = EngineSessions(shelf.tier)
    engines.attach("engine", SPEC)
    async with OrderRunner(instance_id="n", tier=shelf.tier, engines=engines, fetcher=None) as orders:
        given = order(fetch=pb.FetchOrder(chunk_keys=KEYS[0], fingerprint=SPEC.fingerprint))
        outcome = await Coordinating(orders).carried_out(given)
        assert reason(outcome) == "UNREACHABLE"
        assert "enable_p2p" in outcome.status.message


async def test_operators_read_one_line_per_order(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fine = order(drop=pb.DropOrder(chunk_keys=join_keys(chunk_keys(1, 2))))
    await shelf.here.carried_out(fine)
    bad = order(fetch=pb.FetchOrder(instance_id="b", chunk_keys=join_keys(KEYS[:2])))
    await shelf.here.carried_out(bad)
    (first,) = [record for record in caplog.records if fine.order_id + ":" in record.message]
    (second,) = [record for record in caplog.records if bad.order_id + ":" in record.message]
    assert (first.levelname, second.levelname) == ("INFO", "WARNING")
    assert re.search(r"drop: 2 chunks in \d+", first.message)
    assert "fetch from b: 0 chunks" in second.message
    assert "2 chunks KV_SPEC_MISMATCH" in second.message
