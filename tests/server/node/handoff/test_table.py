"""The handoffs of a decode's node, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmkv.errors import BadMessage, Full, GrantNotFound, NoFreeExtents, RequestTooLarge
from lmkv_server.node.handoff import table as module
from lmkv_server.node.handoff.state import HandoffSource, HandoffState
from tests.server.node.handoff_tables import (
    ABANDON,
    BUFFER_CHUNKS,
    KEYS,
    SILENCE,
    SOURCE,
    assert_nothing_is_left,
    begin,
    commit,
    device_buffer,
    handed,
    table,
    take,
)
from tests.server.node.peer_parts import SMALL


def test_a_handoff_transfers_chunk_by_chunk() -> None:
    tier, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:3])
    assert (handoff.state, handoff.missing) == (HandoffState.ALLOCATED, (0, 1, 2))
    take(tier, handoff, 0)
    states = [handoff.state]
    assert tier.find(KEYS[:3])
    assert not tier.get(KEYS[1])
    take(tier, handoff, 1, 2)
    assert [*states, handoff.state] == [HandoffState.TRANSFERRING, HandoffState.COMMITTED]
    handoffs.claim("r")
    handoffs.unclaim("r")
    assert_nothing_is_left(tier, handoffs)
    assert len(tier.find(KEYS[:3])) == 3  # what came stays, as any other chunk


def test_what_is_held_is_not_sent_again_and_stays_in_place() -> None:
    tier, handoffs = table()
    take(tier, begin(handoffs, "first", KEYS[:2]), 0, 1)
    handoffs.unclaim("first")
    handoff = begin(handoffs, "second", KEYS[:4])
    assert handoff.missing == (2, 3)
    assert all(chunk.holds == 1 for chunk in tier)
    take(tier, handoff, 2, 3)
    assert handoff.state is HandoffState.COMMITTED


def test_what_is_still_on_its_way_is_not_held_yet_and_is_asked_for_again() -> None:
    tier, handoffs = table()
    first = begin(handoffs, "a", KEYS[:2])
    (reserved,) = first.begin([0], tier).values()
    second = begin(handoffs, "b", KEYS[:2])
    assert second.missing == (0, 1), "a decode engine would read unwritten memory"
    commit(tier, first, 0, reserved)
    assert begin(handoffs, "c", KEYS[:2]).missing == (1,)


def test_chunks_that_another_fetch_committed_are_not_read_again() -> None:
    tier, handoffs = table()
    first, second = begin(handoffs, "first", KEYS[:3]), begin(handoffs, "second", KEYS[:4])
    take(tier, first, 0, 1, 2)
    assert not second.begin([0, 1, 2], tier)
    assert second.buffer_bytes == 4 * SMALL.chunk_bytes
    take(tier, second, 3)
    assert second.state is HandoffState.COMMITTED


def test_a_prompt_that_is_here_whole_is_committed_at_once() -> None:
    tier, handoffs = table()
    take(tier, begin(handoffs, "first", KEYS[:2]), 0, 1)
    assert begin(handoffs, "second", KEYS[:2]).state is HandoffState.COMMITTED


def test_the_last_chunk_has_the_size_of_its_tokens() -> None:
    tier, handoffs = table()
    handoff = handoffs.allocate(handed("r", KEYS[:2], SMALL.chunk_size + 7), SOURCE, 0.0)
    assert handoff.token_count_of(1) == 7
    assert tier.reserved_bytes < 2 * SMALL.chunk_bytes


def test_announcing_twice_is_announcing_once() -> None:
    _, handoffs = table()
    assert begin(handoffs, "r", KEYS[:3]) is begin(handoffs, "r", KEYS[:3], now=1.0)
    assert len(handoffs) == 1


@pytest.mark.parametrize("other", [replace(SOURCE, epoch=2), replace(SOURCE, instance_id="another")])
def test_a_name_belongs_to_one_prefill(other: HandoffSource) -> None:
    _, handoffs = table()
    begin(handoffs, "r", KEYS[:3])
    with pytest.raises(BadMessage, match="names another handoff"):
        handoffs.allocate(handed("r", KEYS[:3]), other, 0.0)


@pytest.mark.parametrize("token_count", [0, -1, 2 * 256, 3 * 256 + 1])
def test_tokens_that_do_not_fit_the_keys_are_refused(token_count: int) -> None:
    tier, handoffs = table()
    with pytest.raises(BadMessage, match="tokens"):
        handoffs.allocate(handed("r", KEYS[:3], token_count), SOURCE, 0.0)
    assert_nothing_is_left(tier, handoffs)


# ---- the leaks of others, one by one ----------------------------------------------------------------------------


def test_a_prompt_larger_than_the_buffer_is_refused_for_ever_and_leaves_nothing() -> None:
    tier, handoffs = table()
    with pytest.raises(RequestTooLarge, match="pd_buffer_size"):
        begin(handoffs, "r", KEYS[: BUFFER_CHUNKS + 1])
    assert_nothing_is_left(tier, handoffs)


def test_a_full_buffer_refuses_at_once_and_says_when_to_come_back() -> None:
    _, handoffs = table()
    begin(handoffs, "first", KEYS[:8])
    with pytest.raises(NoFreeExtents) as refusal:
        begin(handoffs, "second", KEYS[8:16])
    assert float(refusal.value.metadata["retry_seconds"]) > 0
    handoffs.unclaim("first")
    begin(handoffs, "second", KEYS[8:16])


def test_a_pool_full_of_chunks_in_use_refuses_and_gives_back_what_it_had_taken() -> None:
    tier, handoffs = table(pool_chunks=6)
    take(tier, begin(handoffs, "first", KEYS[:4]), *range(4))
    with pytest.raises(NoFreeExtents):
        begin(handoffs, "second", KEYS[4:8])
    assert tier.reserved_bytes == 0


def test_a_decode_frees_when_the_prefill_never_reports() -> None:
    tier, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:3])
    assert not handoffs.expire(SILENCE - 0.1)
    assert handoffs.expire(SILENCE) == [handoff]
    assert handoff.state is HandoffState.EXPIRED
    assert tier.reserved_bytes == 0
    handoffs.expire(SILENCE + ABANDON)
    assert_nothing_is_left(tier, handoffs)


def test_a_sign_of_life_keeps_a_handoff() -> None:
    _, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:3])
    handoffs.renew(handoff, 4.0)
    assert not handoffs.expire(8.9)
    assert handoff.is_open
    assert handoffs.next_expiry() == 9.0


def test_a_prompt_that_no_decode_comes_for_is_let_go() -> None:
    tier, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:2])
    take(tier, handoff, 0, 1)
    handoffs.renew(handoff, 1.0)
    handoffs.expire(1.0 + ABANDON)
    assert handoffs.stats().abandoned_count == 1
    assert_nothing_is_left(tier, handoffs)


def test_a_claimed_prompt_is_kept_as_long_as_its_request_wants() -> None:
    tier, handoffs = table()
    handoffs.claim("r")  # the decode's request may come first
    handoff = begin(handoffs, "r", KEYS[:2])
    take(tier, handoff, 0, 1)
    handoffs.renew(handoff, 1.0)
    handoffs.expire(10 * ABANDON)
    assert len(handoffs) == 1
    assert handoffs.next_expiry() is None
    handoffs.unclaim("r")
    assert_nothing_is_left(tier, handoffs)


def test_an_aborted_decode_ends_a_handoff_under_way() -> None:
    tier, handoffs = table()
    handoffs.claim("r")
    handoff = begin(handoffs, "r", KEYS[:3])
    begun = handoff.begin([0], tier)
    handoffs.unclaim("r")
    with pytest.raises(GrantNotFound):
        handoffs.get(handoff.grant_id, SOURCE.session_id)
    commit(tier, handoff, 0, begun[0])  # its read was under way: it stays as any other chunk
    assert_nothing_is_left(tier, handoffs)


def test_a_decode_that_gave_up_before_the_prefill_announced_begins_nothing() -> None:
    tier, handoffs = table()
    handoffs.claim("r")
    handoffs.unclaim("r")
    with pytest.raises(GrantNotFound):
        begin(handoffs, "r", KEYS[:3])
    assert_nothing_is_left(tier, handoffs)


def test_an_aborted_prefill_frees_the_room_and_leaves_what_came() -> None:
    tier, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:4])
    take(tier, handoff, 0, 1)
    assert handoffs.end(handoff.grant_id, SOURCE.session_id, 1.0)
    assert handoff.state is HandoffState.ABORTED
    assert tier.reserved_bytes == 0
    assert handoff.promised(0) == 2
    handoffs.expire(1.0 + ABANDON)
    assert_nothing_is_left(tier, handoffs)


def test_a_late_commit_and_a_second_release_are_harmless() -> None:
    tier, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:3])
    handoffs.end(handoff.grant_id, SOURCE.session_id, 1.0)
    assert not handoff.begin([0, 1], tier)
    handoffs.end(handoff.grant_id, SOURCE.session_id, 2.0)
    handoffs.unclaim("r")
    assert not handoffs.end(handoff.grant_id, SOURCE.session_id, 3.0)
    with pytest.raises(GrantNotFound):
        begin(handoffs, "r", KEYS[:3])
    assert_nothing_is_left(tier, handoffs)


def test_a_chunk_that_comes_damaged_ends_the_handoff() -> None:
    tier, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:3])
    begun = handoff.begin([0, 1], tier)
    commit(tier, handoff, 0, begun[0])
    tier.give_back(begun[1].offset)
    handoff.fail([0, 1])
    assert handoff.state is HandoffState.ABORTED
    assert tier.reserved_bytes == 0
    assert handoff.promised(0) == 1


def test_one_handoff_fails_and_others_continue() -> None:
    tier, handoffs = table()
    bad, good = begin(handoffs, "bad", KEYS[:2]), begin(handoffs, "good", KEYS[2:4])
    handoffs.end(bad.grant_id, SOURCE.session_id, 0.0)
    take(tier, good, 0, 1)
    assert good.state is HandoffState.COMMITTED


def test_the_names_of_ended_handoffs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 3)
    _, handoffs = table()
    for number in range(10):
        handoffs.unclaim(f"r{number}")
    assert [handoffs.is_closed(f"r{number}") for number in range(10)] == [False] * 7 + [True] * 3


def test_a_prompt_goes_into_the_device_buffer_while_that_has_room() -> None:
    tier, handoffs = table()
    buffer = device_buffer()
    first, second = begin(handoffs, "a", KEYS[:4], buffer=buffer), begin(handoffs, "b", KEYS[10:14], buffer=buffer)
    assert (first.destination, second.destination) == (buffer, tier)
    assert handoffs.used_bytes == 4 * SMALL.chunk_bytes, "the bound is on the pool"
    with pytest.raises(RequestTooLarge):
        begin(handoffs, "c", KEYS[:20], buffer=buffer)
    take(tier, first, 0, 1, 2, 3)
    assert not tier.get(KEYS[0])
    handoffs.unclaim("a")
    again = begin(handoffs, "d", KEYS[:5], buffer=buffer)
    assert again.missing == (4,), "what is in the buffer still need not be sent again"


def test_what_is_in_a_device_buffer_is_for_its_engine_only() -> None:
    _, handoffs = table()
    buffer = device_buffer()
    handoff, in_pool = begin(handoffs, "a", KEYS[:4], buffer=buffer), begin(handoffs, "b", KEYS[10:14])
    handoffs.claim("a", device_buffer())
    assert not handoffs.is_loadable(handoff)
    handoffs.claim("a", buffer)
    assert handoffs.is_loadable(handoff)
    assert handoffs.is_loadable(in_pool)


def test_a_device_buffer_that_is_lost_takes_what_it_held() -> None:
    tier, handoffs = table()
    buffer = device_buffer()
    take(tier, begin(handoffs, "before", KEYS[:1]), 0)
    handoff = begin(handoffs, "a", KEYS[:3], buffer=buffer)
    take(tier, handoff, 1)
    (late,) = handoff.begin([2], tier).values()
    handoffs.detach_buffer(buffer, 0.0)
    assert (handoff.state, [chunk.key for chunk in handoff.chunks]) == (HandoffState.ABORTED, KEYS[:1])
    commit(tier, handoff, 2, late)
    assert [chunk.key for chunk in handoff.chunks] == KEYS[:1]


def test_a_handoff_that_has_expired_stays_expired_when_its_device_buffer_closes() -> None:
    tier, handoffs = table()
    buffer = device_buffer()
    handoff = begin(handoffs, "a", KEYS[:2], buffer=buffer)
    take(tier, handoff, 0)
    assert handoffs.expire(SILENCE) == [handoff]
    handoffs.detach_buffer(buffer, SILENCE)
    assert handoff.state is HandoffState.EXPIRED
    assert not handoff.chunks


def test_the_number_of_handoffs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HANDOFFS", 2)
    _, handoffs = table()
    begin(handoffs, "a", KEYS[:1])
    begin(handoffs, "b", KEYS[1:2])
    with pytest.raises(Full, match="handoffs are taken"):
        begin(handoffs, "c", KEYS[2:3])
    assert handoffs.stats().refused_count == 1
    assert handoffs.withdraw("a", 0.0)
    begin(handoffs, "c", KEYS[2:3])
    handoffs.check()


def test_a_grant_is_of_use_to_its_session_only() -> None:
    _, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:3])
    assert handoffs.get(handoff.grant_id, SOURCE.session_id) is handoff
    for grant_id, session_id in ((handoff.grant_id, "another"), (handoff.grant_id, ""), ("another", SOURCE.session_id)):
        with pytest.raises(GrantNotFound):
            handoffs.get(grant_id, session_id)
        assert not handoffs.end(grant_id, session_id, 0.0)
    assert handoff.is_open


def test_a_prompt_that_has_arrived_waits_for_its_request_longer_than_an_open_handoff_for_its_prefill() -> None:
    tier, handoffs = table()
    handoff = begin(handoffs, "r", KEYS[:1])
    take(tier, handoff, 0)
    handoffs.renew(handoff, 1.0)
    assert ABANDON > SILENCE
    assert handoffs.next_expiry() == 1.0 + ABANDON
    assert not handoffs.expire(1.0 + SILENCE)
    assert len(handoffs) == 1
    handoffs.expire(1.0 + ABANDON)
    assert_nothing_is_left(tier, handoffs)
