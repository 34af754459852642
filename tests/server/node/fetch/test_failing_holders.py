"""Holders that are killed, freeze or are late while a fetch reads from them: in processes of their own."""

from __future__ import annotations

import asyncio
import signal

import pytest

from lmkv.errors import Unreachable
from lmkv_server.node.peers import connection as peer_connection
from tests.lmkv.transfer.ends import in_new_process
from tests.server.node.peer_parts import LARGE, Parts, Remote, Taken, keys_of, lets_go
from tests.waiting import WAIT_SECONDS, until

KEYS = keys_of(16)
FOREVER = 600.0
"""What a fetch may take that must end long before."""


def forget_failures(reader: Parts, owner: Remote) -> None:
    """Has a reader ask an owner again at once that has failed it."""
    connection = reader.connections.get(owner.holder)
    assert connection
    connection._retry_at = 0.0


async def test_if_the_best_holder_is_killed_midway_the_next_one_continues(large_reader: Parts) -> None:
    with Remote("best") as best, Remote("next") as second:
        second.holder.matched_chunk_count = 15
        taken = Taken(large_reader, then=lambda: best.signal(signal.SIGKILL))
        async with asyncio.timeout(WAIT_SECONDS):  # far less than the fetch may take
            fetched = await large_reader.fetch(LARGE, KEYS, [best.holder, second.holder], 60.0, taken)
        assert taken.keys() == KEYS[: fetched.chunk_count]
        assert fetched.chunk_count >= 15
        assert set(fetched.instance_ids) == {"best", "next"}
        assert large_reader.fetcher.stats().failure_count == 1
        taken.let_go()


async def test_a_frozen_holder_costs_the_time_allowed_and_is_then_left_alone(
    large_reader: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connection, "FIRST_BACKOFF_SECONDS", FOREVER)
    monkeypatch.setattr(peer_connection, "LAST_BACKOFF_SECONDS", FOREVER)
    with Remote("owner") as owner:
        taken = Taken(large_reader)
        await large_reader.fetch(LARGE, KEYS[:4], [owner.holder], FOREVER, taken)
        owner.signal(signal.SIGSTOP)
        fetched = await large_reader.fetch(LARGE, KEYS[4:], [owner.holder], 0.6, Taken(large_reader))
        assert fetched.chunk_count == 0
        assert isinstance(fetched.error, Unreachable)
        async with asyncio.timeout(WAIT_SECONDS):  # far less than the fetch may take: nothing is asked
            again = await large_reader.fetch(LARGE, KEYS[8:], [owner.holder], FOREVER, Taken(large_reader))
        assert isinstance(again.error, Unreachable)
        owner.signal(signal.SIGCONT)
        forget_failures(large_reader, owner)
        rest = Taken(large_reader)
        fetched = await large_reader.fetch(LARGE, KEYS, [owner.holder], FOREVER, rest)
        assert (fetched.chunk_count, fetched.error) == (16, None)
        taken.let_go()
        rest.let_go()


async def test_a_frozen_holder_leaves_time_for_the_next_one(large_reader: Parts) -> None:
    with Remote("best") as best, Remote("next") as second:
        best.signal(signal.SIGSTOP)
        taken = Taken(large_reader)
        fetched = await large_reader.fetch(LARGE, KEYS[:2], [best.holder, second.holder], 20.0, taken)
        assert (fetched.chunk_count, fetched.instance_ids) == (2, ("next",))
        taken.let_go()


async def test_when_the_best_holder_freezes_between_fetches_the_next_one_is_asked_long_before_it_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmkv_server.node.fetch.holder_reader.MAX_STEP_SECONDS", FOREVER)
    async with Parts("reader", spec=LARGE, transfer_channel="tcp") as reader:
        with Remote("best", transfer_channel="tcp") as best, Remote("next", transfer_channel="tcp") as second:
            second.holder.matched_chunk_count = 15
            first = Taken(reader)
            await reader.fetch(LARGE, KEYS[:3], [best.holder, second.holder], 60.0, first)
            assert set(reader.traffic()) == {"best"}
            await lets_go(best)
            best.signal(signal.SIGSTOP)
            for _ in range(2):  # the second time it is known to be late, and not even begun with
                taken = Taken(reader)
                fetched = await reader.fetch(LARGE, KEYS[3:15], [best.holder, second.holder], 60.0, taken)
                assert (fetched.chunk_count, fetched.error, fetched.instance_ids) == (12, None, ("next",))
                assert reader.fetcher.stats().failure_count == 0, "it waited until the best holder had failed"
                assert reader.fetcher.stats().hedge_count == 1
                taken.let_go()
                reader.tier.drop(KEYS[3:15])
            best.signal(signal.SIGCONT)
            await lets_go(best)  # what it grants to the call that was cancelled, too
            rest = Taken(reader)  # it is still good for what no other holder has
            fetched = await reader.fetch(LARGE, KEYS, [best.holder, second.holder], 60.0, rest)
            assert (fetched.chunk_count, fetched.error) == (16, None)
            first.let_go()
            rest.let_go()
        reader.check_nothing_left()


async def frozen_while_it_is_read_and_another_holder_is_there() -> None:
    with Remote("best") as best, Remote("next") as second:
        async with Parts("reader", spec=LARGE) as reader:
            warm = Taken(reader)
            await reader.fetch(LARGE, KEYS[:3], [best.holder], FOREVER, warm)
            for _ in range(10):  # on a busy machine the reads that are under way may end before it is frozen
                taken = Taken(reader, first=3)
                holders = [best.holder, second.holder]
                fetching = asyncio.create_task(
                    reader.fetch(LARGE, KEYS, holders, 60.0, taken, first=3),
                )
                while not reader.tier.reserved_count and not fetching.done():  # noqa: ASYNC110 # freezes it at once
                    await asyncio.sleep(0)
                best.signal(signal.SIGSTOP)
                failed = reader.fetcher.stats().failure_count
                fetched = await fetching
                assert (fetched.chunk_count, fetched.error) == (13, None)
                assert "next" in fetched.instance_ids
                assert reader.fetcher.stats().failure_count == failed, "it waited until the best holder had failed"
                if quarantined := reader.pipeline.stats().quarantined_bytes:
                    assert reader.fetcher.stats().hedge_count >= 1
                    assert quarantined == reader.tier.reserved_bytes
                    await asyncio.sleep(0.3)
                    assert reader.pipeline.stats().quarantined_bytes == quarantined, "released under a read"
                best.signal(signal.SIGCONT)
                taken.let_go()  # compares every byte
                reader.tier.drop(KEYS[3:])
                async with asyncio.timeout(WAIT_SECONDS):
                    while True:  # with a grant the owner sends what it owes, however long that takes
                        more = Taken(reader, first=3)
                        await reader.fetch(LARGE, KEYS[:4], [best.holder], FOREVER, more, first=3)
                        more.let_go()
                        reader.tier.drop(KEYS[3:])
                        if more.chunks and not reader.tier.reserved_count:
                            break
                        await asyncio.sleep(0.05)
                if quarantined:
                    break
            else:
                raise AssertionError("no read was under way")
            warm.let_go()
            reader.check_nothing_left()


def test_what_a_late_read_may_still_write_to_is_quarantined_when_another_holder_was_faster() -> None:
    in_new_process(frozen_while_it_is_read_and_another_holder_is_there, UCX_TLS="tcp,cuda_copy")


async def frozen_while_read_over_tcp() -> None:
    with Remote("owner") as owner:
        async with Parts("reader", spec=LARGE) as reader:
            for _ in range(10):  # on a busy machine the reads that are under way may end before it is frozen
                taken = Taken(reader, then=lambda: owner.signal(signal.SIGSTOP))
                fetched = await reader.fetch(LARGE, KEYS, [owner.holder], 4.0, taken)
                if fetched.chunk_count < 16 and reader.pipeline.stats().quarantined_batches:
                    break
                owner.signal(signal.SIGCONT)
                await until(lambda: reader.tier.reserved_count == 0)
                forget_failures(reader, owner)
                taken.let_go()
                reader.tier.drop(KEYS)
            else:
                raise AssertionError("no read was under way")
            assert fetched.chunk_count > 0
            assert reader.tier.reserved_count > 0
            await asyncio.sleep(0.2)
            assert reader.tier.reserved_count > 0  # no clock frees them
            owner.signal(signal.SIGCONT)
            await until(lambda: reader.tier.reserved_count == 0)
            assert reader.pipeline.stats().quarantined_batches == 0
            forget_failures(reader, owner)
            rest = Taken(reader)
            assert (await reader.fetch(LARGE, KEYS, [owner.holder], FOREVER, rest)).error is None
            taken.let_go()
            rest.let_go()
            reader.check_nothing_left()


def test_extents_that_a_frozen_owner_may_still_write_to_are_kept_until_it_has() -> None:
    in_new_process(frozen_while_read_over_tcp, UCX_TLS="tcp,cuda_copy")
