"""Fetching from peers: over real sockets and NIXL."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import Any

import pytest

from lmkv.errors import BadMessage, KvSpecMismatch, NoFreeExtents, Unreachable
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from tests.server.node.peer_parts import LARGE, SMALL, Parts, Remote, Taken, keys_of, lets_go, no_grants
from tests.waiting import WAIT_SECONDS, until

KEYS = keys_of(16)
FOREVER = 600.0
"""What a fetch may take that must end long before."""
LONG = 60.0
"""What a fetch may take on a busy machine."""


async def test_chunks_arrive_bit_for_bit_from_another_process_and_in_order(large_reader: Parts) -> None:
    with Remote("owner") as owner:
        taken = Taken(large_reader)
        fetched = await large_reader.fetch(LARGE, KEYS, [owner.holder], LONG, taken)
        assert taken.keys() == KEYS
        assert (fetched.chunk_count, fetched.error, fetched.instance_ids) == (16, None, ("owner",))
        assert fetched.size_bytes == large_reader.pipeline.stats().transferred_bytes == 16 * LARGE.chunk_bytes
        assert large_reader.pipeline.stats().chunk_count == 16
        (traffic,) = large_reader.traffic().values()
        assert (traffic.instance_id, traffic.chunk_count) == ("owner", 16)
        assert traffic.transferred_bytes == fetched.size_bytes
        assert fetched.seconds > 0
        taken.let_go()
        await lets_go(owner)


async def test_the_first_chunks_are_handed_out_while_the_last_are_on_their_way(large_reader: Parts) -> None:
    with Remote("owner") as owner:
        for _ in range(10):  # on a machine that is busy the last may be here before the first has been verified
            taken = Taken(large_reader)
            await large_reader.fetch(LARGE, KEYS, [owner.holder], LONG, taken)
            taken.let_go()
            if taken.call_count > 2:
                return
            large_reader.tier.drop(KEYS)
        raise AssertionError("it comes all at once")


async def test_only_what_is_asked_for_and_not_here_yet_is_transferred(owner: Parts, reader: Parts) -> None:
    own = reader.put(KEYS[4])
    taken = Taken(reader, first=3)
    fetched = await reader.fetch(SMALL, KEYS[:8], [owner.holder(16)], LONG, taken, first=3)
    assert taken.keys() == KEYS[3:8]
    assert own in taken.chunks
    assert fetched.chunk_count == 5
    assert fetched.size_bytes == 4 * SMALL.chunk_bytes
    assert [reader.tier.get(key) for key in KEYS[:3]] == [None] * 3
    taken.let_go()


async def test_a_fetch_opens_the_session_again_that_the_holder_has_dropped(owner: Parts, reader: Parts) -> None:
    for _ in range(3):
        taken = Taken(reader)
        fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken)
        assert (fetched.chunk_count, fetched.error) == (16, None)
        taken.let_go()
        reader.tier.drop(KEYS)
        await no_grants(owner)
        for own in list(owner.service.sessions._by_identity.values()):
            for session in list(own.values()):
                owner.service.sessions._drop(session)


async def test_a_partial_chunk_keeps_its_token_count(owner: Parts, reader: Parts) -> None:
    owner.tier.drop([KEYS[15]])
    owner.put(KEYS[15], token_count=100)
    taken = Taken(reader)
    assert (await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken)).error is None
    assert taken.chunks[-1].token_count == 100
    taken.let_go()


async def test_a_holder_matches_only_the_reported_prefix(owner: Parts, reader: Parts) -> None:
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(5)], LONG, taken)
    assert (fetched.chunk_count, fetched.error) == (5, None)
    taken.let_go()


async def test_what_one_holder_has_lost_another_gives(owner: Parts, reader: Parts) -> None:
    owner.tier.drop([KEYS[2], KEYS[3], KEYS[9]])
    async with Parts("second") as second:
        for key in KEYS[:10]:
            second.put(key)
        taken = Taken(reader)
        holders = [second.holder(10), owner.holder(16)]
        fetched = await reader.fetch(SMALL, KEYS, holders, LONG, taken)
        assert taken.keys() == KEYS
        assert fetched.error is None
        assert set(fetched.instance_ids) == {"owner", "second"}
        taken.let_go()


async def test_nothing_is_assigned_behind_a_missing_chunk(owner: Parts, reader: Parts) -> None:
    owner.tier.drop([KEYS[6]])
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken)
    assert (fetched.chunk_count, fetched.error) == (6, None)
    assert taken.keys() == KEYS[:6]
    taken.let_go()


async def test_a_long_prompt_is_split_over_those_who_hold_it(large_reader: Parts) -> None:
    with Remote("one") as one, Remote("other") as other:
        for attempt in range(10):  # on a machine that is busy one may bring all before the other begins
            taken = Taken(large_reader)
            fetched = await large_reader.fetch(LARGE, KEYS, [one.holder, other.holder], LONG, taken)
            assert taken.keys() == KEYS
            assert fetched.error is None
            taken.let_go()
            if not large_reader.fetcher.stats().hedge_count:  # no holder was late
                counts = {name: traffic.chunk_count for name, traffic in large_reader.traffic().items()}
                assert sum(counts.values()) == 16 * (attempt + 1), "nothing was brought twice"
            if set(fetched.instance_ids) == {"one", "other"}:
                break
            large_reader.tier.drop(KEYS)
        else:
            raise AssertionError("it is never split")
        for owner in (one, other):
            await lets_go(owner)


async def test_a_short_prompt_is_asked_of_one_holder_alone(owner: Parts, reader: Parts) -> None:
    async with Parts("second") as second:
        for key in KEYS:
            second.put(key)
        taken = Taken(reader)
        fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16), second.holder(16)], LONG, taken)
        assert (fetched.chunk_count, len(fetched.instance_ids)) == (16, 1)
        taken.let_go()


async def test_a_peer_at_the_own_address_or_at_loopback_is_near(reader: Parts) -> None:
    def is_near(address: str) -> bool:
        holder = Holder(instance_id=address, epoch=1, peer_address=address, matched_chunk_count=1)
        connection = connections.get(holder)
        assert connection
        return connections.is_near(connection)

    connections = PeerConnectionPool(instance_id="here", epoch=1, channels=reader.channels, host="10.0.0.7")
    assert is_near("10.0.0.7:9000")
    assert is_near("127.0.0.1:9000")
    assert not is_near("10.0.0.70:9000")
    await connections.aclose()


async def test_a_damaged_chunk_is_a_miss_and_never_committed(owner: Parts, reader: Parts) -> None:
    owner.damage(KEYS[5])
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken)
    assert (fetched.chunk_count, taken.keys()) == (5, KEYS[:5])
    assert reader.pipeline.stats().checksum_mismatches == 1
    assert reader.tier.get(KEYS[5]) is None
    async with Parts("second") as second:
        second.put(KEYS[5])
        rest = Taken(reader)
        holders = [owner.holder(16), second.holder(6)]
        fetched = await reader.fetch(SMALL, KEYS, holders, LONG, rest)
        assert (fetched.chunk_count, fetched.error) == (16, None)
    taken.let_go()
    rest.let_go()


async def test_a_damaged_chunk_behind_one_that_the_owner_lacks_is_the_one_that_the_owner_drops(
    owner: Parts, reader: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    owner.tier.drop([KEYS[2]])
    owner.damage(KEYS[5])
    async with Parts("second") as second:
        for index in (2, 5):
            second.put(KEYS[index])
        taken = Taken(reader)
        fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16), second.holder(6)], FOREVER, taken)
        assert (fetched.chunk_count, fetched.error) == (16, None)
    await until(lambda: owner.tier.get(KEYS[5]) is None)
    assert owner.inspector.damaged_count == reader.pipeline.stats().checksum_mismatches == 1
    assert [index for index, key in enumerate(KEYS) if owner.tier.get(key) is None] == [2, 5]
    assert (
        caplog.text.count(f"chunk {KEYS[5].hex()} from peer owner does not match its checksum and was discarded") == 1
    )
    assert caplog.text.count(f"chunk {KEYS[5].hex()} is damaged in this node's memory and was dropped") == 1
    assert "is intact here" not in caplog.text, "another chunk was looked at"
    taken.let_go()


async def test_unlike_specs_never_exchange_a_byte_and_are_not_asked_again(
    owner: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(SMALL, kv_dtype="bfloat16")
    async with Parts("reader", spec=other) as reader:
        for _ in range(3):
            taken = Taken(reader)
            fetched = await reader.fetch(other, KEYS, [owner.holder(16)], LONG, taken)
            assert isinstance(fetched.error, KvSpecMismatch)
            assert fetched.error.metadata["field"] == "kv_dtype"
            assert (fetched.chunk_count, fetched.size_bytes, taken.chunks) == (0, 0, [])
        assert reader.fetcher.stats().failure_count == 0
        lines = [record.message for record in caplog.records if "kv_dtype" in record.message]
        assert len([line for line in lines if "no chunks are shared with owner" in line]) == 1
        reader.check_nothing_left()


async def test_two_fetches_of_the_same_keys_share_one_transfer(owner: Parts, reader: Parts) -> None:
    both = [Taken(reader), Taken(reader)]
    fetched = await asyncio.gather(*(reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken) for taken in both))
    assert [taken.keys() for taken in both] == [KEYS, KEYS]
    assert [one.chunk_count for one in fetched] == [16, 16]
    assert reader.pipeline.stats().chunk_count == 16
    for taken in both:
        taken.let_go()


async def test_when_the_fetch_that_brings_is_cancelled_the_one_that_waits_takes_over(
    owner: Parts, reader: Parts
) -> None:
    for delay in (0.0, 0.001, 0.003, 0.006):
        first = Taken(reader)
        bringing = asyncio.create_task(reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, first))
        await asyncio.sleep(delay)
        second = Taken(reader)
        waiting = asyncio.create_task(reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, second))
        await asyncio.sleep(0)
        bringing.cancel()
        await asyncio.wait([bringing])
        assert (await waiting).chunk_count == 16
        assert second.keys() == KEYS
        first.let_go()
        second.let_go()
        reader.tier.drop(KEYS)


async def test_a_cancelled_fetch_leaves_nothing_behind(owner: Parts, reader: Parts) -> None:
    for step in range(25):
        taken = Taken(reader)
        fetch = asyncio.create_task(reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken))
        await asyncio.sleep(step * 0.0007)
        fetch.cancel()
        await asyncio.wait([fetch])
        taken.let_go()
        await until(lambda: reader.tier.reserved_count == 0)
        reader.check_nothing_left()
        reader.tier.drop(KEYS)
    assert reader.pipeline.stats().quarantined_batches == 0


async def test_a_cancelled_fetch_from_several_holders_leaves_nothing_behind(large_reader: Parts) -> None:
    with Remote("one") as one, Remote("other") as other:
        for step in range(12):
            taken = Taken(large_reader)
            fetching = large_reader.fetch(LARGE, KEYS, [one.holder, other.holder], LONG, taken)
            fetch = asyncio.create_task(fetching)
            await asyncio.sleep(step * 0.005)
            fetch.cancel()
            await asyncio.wait([fetch])
            taken.let_go()
            await until(lambda: large_reader.tier.reserved_count == 0)
            large_reader.check_nothing_left()
            large_reader.tier.drop(KEYS)
        for owner in (one, other):
            await lets_go(owner)


async def test_what_was_read_before_a_peer_failed_is_kept(large_reader: Parts) -> None:
    with Remote("owner") as owner:
        taken = Taken(large_reader, then=lambda: owner.signal(signal.SIGKILL))
        fetched = await large_reader.fetch(LARGE, KEYS, [owner.holder], 5.0, taken)
        assert fetched.chunk_count == len(taken.chunks) > 0
        assert large_reader.pipeline.stats().chunk_count == len(large_reader.tier)
        taken.let_go()
        await until(lambda: large_reader.tier.reserved_count == 0)  # what was under way may land for a moment


async def test_a_full_tier_takes_what_fits_and_reserves_nothing_more(owner: Parts) -> None:
    async with Parts("reader", chunk_count=5) as reader:
        taken = Taken(reader)
        fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken)
        assert isinstance(fetched.error, NoFreeExtents)
        assert (fetched.chunk_count, taken.keys()) == (5, KEYS[:5])
        taken.let_go()
        reader.check_nothing_left()


async def test_an_owner_that_grants_little_at_a_time_gives_everything_in_the_end(reader: Parts) -> None:
    async with Parts("owner", chunk_count=16) as owner:  # one peer's share is four chunks
        for key in KEYS:
            owner.put(key)
        taken = Taken(reader)
        fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken)
        assert (fetched.chunk_count, fetched.error) == (16, None)
        taken.let_go()
        await no_grants(owner)


async def test_a_restarted_holder_is_introduced_again_and_its_old_epoch_is_not_used(
    owner: Parts, reader: Parts
) -> None:
    gone = owner.holder(16)
    gone.epoch -= 1
    async with asyncio.timeout(WAIT_SECONDS):  # far less than the fetch may take
        fetched = await reader.fetch(SMALL, KEYS, [gone], FOREVER, Taken(reader))
    assert fetched.chunk_count == 0
    assert fetched.error is not None
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, taken)  # no back-off: another epoch
    assert fetched.chunk_count == 16
    taken.let_go()
    reader.tier.drop(KEYS)
    assert (await reader.fetch(SMALL, KEYS, [gone], LONG, Taken(reader))).chunk_count == 0


async def test_no_node_fetches_from_itself_or_without_holders(reader: Parts) -> None:
    nowhere = Holder(instance_id="nowhere", epoch=1, peer_address="127.0.0.1:9", matched_chunk_count=16)
    empty = Holder(instance_id="empty", epoch=1, matched_chunk_count=16)
    async with asyncio.timeout(WAIT_SECONDS):  # far less than the fetch may take
        fetched = await reader.fetch(SMALL, KEYS, [reader.holder(16), empty, nowhere], FOREVER, Taken(reader))
    assert fetched.chunk_count == 0
    assert isinstance(fetched.error, Unreachable)
    assert reader.fetcher.stats().failure_count == 1
    assert (await reader.fetch(SMALL, [], [], LONG, Taken(reader))).chunk_count == 0


@pytest.mark.parametrize("present", [[99], [-1], [1, 0], [0, 0]])
async def test_a_peer_that_grants_other_chunks_has_failed_and_its_grant_is_released(
    owner: Parts, reader: Parts, present: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = PeerConnection.acquire

    async def twisted(*args: Any) -> pb.AcquireResponse:
        response = await acquire(*args)
        del response.grant.chunks[len(present) :]
        response.present[:] = present
        return response

    monkeypatch.setattr(PeerConnection, "acquire", twisted)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(16)], LONG, Taken(reader))
    assert (fetched.chunk_count, reader.fetcher.stats().failure_count) == (0, 1)
    assert isinstance(fetched.error, BadMessage)
    await no_grants(owner)


async def test_a_fetch_is_expected_to_wait_for_what_others_wait_for_at_the_same_holder(large_reader: Parts) -> None:
    fetcher, other = large_reader.fetcher, Holder(instance_id="other")
    with Remote("owner") as owner:
        for _ in range(2):  # the first one connects
            taken = Taken(large_reader)
            await large_reader.fetch(LARGE, KEYS, [owner.holder], LONG, taken)
            taken.let_go()
            large_reader.tier.drop(KEYS)
        await lets_go(owner)
        alone = fetcher.expected_seconds([owner.holder], LARGE, 1 << 20)
        all_bytes = len(KEYS) * LARGE.chunk_bytes
        behind = fetcher.expected_seconds([owner.holder], LARGE, (1 << 20) + all_bytes)
        assert alone is not None
        owner.signal(signal.SIGSTOP)
        taken = Taken(large_reader)
        fetching = asyncio.create_task(large_reader.fetch(LARGE, KEYS, [owner.holder], LONG, taken))
        while not fetcher._running:  # noqa: ASYNC110  # nothing of it has come
            await asyncio.sleep(0)
        assert fetcher.expected_seconds([owner.holder], LARGE, 1 << 20) == pytest.approx(behind)
        assert fetcher.expected_seconds([owner.holder, other], LARGE, 1 << 20) is None
        owner.signal(signal.SIGCONT)
        await fetching
        taken.let_go()
        assert not fetcher._running
        await lets_go(owner)
