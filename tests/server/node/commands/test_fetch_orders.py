"""Fetch orders: chunks arrive whole or fail one by one, whatever the source does."""

from __future__ import annotations

import random
import signal
from functools import partial

import pytest

from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.commands import executor as module
from lmkv_server.node.commands.executor import Arrivals
from tests.server.node.commands.order_parts import (
    GIVER,
    KEYS,
    AtFirst,
    Coordinating,
    Shelf,
    claimed,
    coordinating,
    failed,
    fetch,
    order,
    reason,
)
from tests.server.node.hybrid_engine import HYBRID, PROMPT
from tests.server.node.ordering import until
from tests.server.node.peer_parts import LARGE, SMALL, Parts, Remote, keys_of


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


async def test_an_order_that_keeps_others_uses_free_memory_only(owner: Parts) -> None:
    async with Parts("reader", chunk_count=7) as reader, coordinating(reader) as here:
        others = [reader.put(key) for key in keys_of(24)[20:24]]
        keeping = fetch(owner.holder(0))
        keeping.fetch.keep_others = True
        outcome = await here.carried_out(keeping)
        assert list(failed(outcome)) == ["NO_FREE_EXTENTS"]
        assert claimed(outcome) == KEYS[:3]
        assert all(reader.tier.get(one.key) for one in others)
        evicting = await here.carried_out(fetch(owner.holder(0)))
        assert len(claimed(evicting)) == 7


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
    for _ in range(10):  # on a machine that is busy all may be here before it is killed
        with Remote("owner") as remote:
            listener = AtFirst(partial(remote.signal, signal.SIGKILL))
            async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
                outcome = await here.carried_out(fetch(remote.holder, spec=LARGE))
                assert reason(outcome) == ""
                came = claimed(outcome)
                assert all(reader.tier.get(key) for key in came)
                assert outcome.transferred_bytes == len(came) * LARGE.chunk_bytes
                if len(came) == 16:
                    continue
                assert len(came) > 0
                assert list(failed(outcome)) == ["UNREACHABLE"]
                again = await here.carried_out(fetch(remote.holder, spec=LARGE))
                assert claimed(again) == came
                return
    raise AssertionError("it was never killed in time")


async def test_an_order_ends_at_its_deadline_and_reports_its_progress() -> None:
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


async def test_items_of_any_part_come_by_their_keys() -> None:
    async with Parts("owner", spec=HYBRID) as owner, Parts("reader", spec=HYBRID) as reader:
        chunks = [owner.put_item(item, PROMPT) for item in HYBRID.items(5)]
        async with coordinating(reader) as here:
            keys = [chunk.key for chunk in chunks]
            outcome = await here.carried_out(fetch(owner.holder(0), keys, HYBRID))
            assert (reason(outcome), outcome.chunk_count, failed(outcome)) == ("", len(keys), {})
            assert outcome.transferred_bytes == sum(chunk.size_bytes for chunk in chunks)
            assert [reader.tier.get(key) is not None for key in keys] == [True] * len(keys)


def test_the_last_arrival_of_each_chunk_counts() -> None:
    here = Arrivals(10)
    here.add(KEYS[:2])
    here.add(KEYS[1:3])
    assert here.serial == 12
    assert here.since(10, KEYS[:4]) == set(KEYS[:3])
    assert here.since(11, KEYS[:4]) == set(KEYS[1:3])
    assert here.since(12, KEYS[:4]) == set()
    here.add([])
    assert here.serial == 12
    here.check()


def test_of_chunks_that_are_forgotten_the_latest_time_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ARRIVALS", 2)
    here = Arrivals(0)
    for key in KEYS[:3]:
        here.add([key])
    assert here.since(0, KEYS[:5]) == set(KEYS[:5]), "the first one arrived at 1, and is forgotten"
    assert here.since(1, KEYS[:5]) == set(KEYS[1:3])
    here.check()


async def test_a_drop_spares_what_a_fetch_has_brought_or_found_since(owner: Parts, here: Coordinating) -> None:
    before = here.orders.arrivals.serial
    assert claimed(await here.carried_out(fetch(owner.holder(3), KEYS[:3])), KEYS[:3]) == KEYS[:3]
    between = here.orders.arrivals.serial
    assert between == before + 1
    again = await here.carried_out(fetch(owner.holder(1), KEYS[2:3]))
    assert claimed(again, KEYS[2:3]) == KEYS[2:3], "it is here already"
    drop = pb.DropOrder(chunk_keys=join_keys(KEYS[:3]), fetch_serial=before)
    assert failed(await here.carried_out(order(drop=drop))) == {"CHUNK_ARRIVED": KEYS[:3]}
    drop.fetch_serial = between
    outcome = await here.carried_out(order(drop=drop))
    assert (outcome.chunk_count, failed(outcome)) == (2, {"CHUNK_ARRIVED": KEYS[2:3]})
    drop.fetch_serial = here.orders.arrivals.serial
    assert (await here.carried_out(order(drop=drop))).chunk_count == 1


async def test_a_drop_without_a_serial_drops_all(shelf: Shelf) -> None:
    shelf.here.orders.arrivals.add([ChunkKey(number.to_bytes(16, "big")) for number in range(6)])
    keys = join_keys(ChunkKey(number.to_bytes(16, "big")) for number in range(6))
    assert (await shelf.drop(chunk_keys=keys)).chunk_count == 6


async def test_a_node_that_is_going_to_stop_says_so_until_it_stays(shelf: Shelf) -> None:
    orders = shelf.here.orders
    assert orders.leaving_seconds == 0
    leave = pb.LeaveOrder()
    leave.ttl.FromSeconds(600)
    await shelf.here.carried_out(order(leave=leave))
    assert 0 < orders.leaving_seconds <= 600
    leave.ttl.FromSeconds(0)
    await shelf.here.carried_out(order(leave=leave))
    assert orders.leaving_seconds == 0
