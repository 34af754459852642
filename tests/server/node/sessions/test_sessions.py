"""What a node grants its engines, and when it takes that back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmkv import rpc
from lmkv.errors import BadKvSpec, BadMessage, EngineNotFound, GrantNotFound
from lmkv.spec import KvSpec, ServedModel
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import Extent
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.sessions.session import HOLD_SHARE, MAX_EXTENTS, EngineSession
from lmkv_server.node.sessions.sessions import CREDIT_SHARE, MAX_CREDITS, EngineSessions
from tests.server.node.cases import admit, chunk_key, chunk_keys, put
from tests.server.node.hybrid_engine import HYBRID, PROMPT, item_key
from tests.server.node.pool_lookups import open_lookup
from tests.support.specs import small_spec

SPEC = small_spec()
CAPACITY = 12
"""Chunks that the pool has room for."""


@pytest.fixture
def tier() -> HostTier:
    return HostTier(CAPACITY * SPEC.chunk_bytes)


@pytest.fixture
def engines(tier: HostTier) -> EngineSessions:
    return EngineSessions(tier)


def holds(tier: HostTier, number: int) -> int:
    chunk = tier.get(chunk_key(number))
    assert chunk is not None
    return chunk.holds


def written(offset: int, number: int, size_bytes: int, token_count: int = SPEC.chunk_size) -> Chunk:
    return Chunk(
        key=chunk_key(number),
        fingerprint=SPEC.fingerprint,
        offset=offset,
        size_bytes=size_bytes,
        checksum=number,
        token_count=token_count,
    )


def commit(session: EngineSession, offset: int, number: int, token_count: int = SPEC.chunk_size) -> object:
    return session.commit(written(offset, number, SPEC.size_bytes(token_count), token_count))


def test_a_lookup_finds_no_more_than_an_answer_can_name() -> None:
    spec = small_spec(layer_count=1, kv_head_count=1, head_size=1, chunk_size=16)
    count = MAX_EXTENTS + 3
    tier = HostTier(2 * HOLD_SHARE * count * max(spec.chunk_bytes, 4096))
    for number in range(count):
        admit(tier, spec, number)
    lease = open_lookup(EngineSessions(tier).attach("e", spec), tier, "1", chunk_keys(*range(count)))
    assert lease.own_count == len(lease.chunks) == MAX_EXTENTS
    assert sum(chunk.holds for chunk in tier) == MAX_EXTENTS


def test_as_many_extents_as_a_message_may_have_fit_whatever_their_numbers() -> None:
    largest = pb.HeldChunk(
        extent=Extent(region=2**31 - 1, offset=2**63 - 1, size_bytes=2**63 - 1),
        checksum=2**64 - 1,
        generation=2**63 - 1,
        token_count=2**31 - 1,
    )
    found = pb.FoundChunks(lookup_id="1" * 64, own=[largest] * MAX_EXTENTS, peer_instance_id="p" * 256)
    loaded = pb.LoadedChunks(lookup_id="1" * 64, chunks=[largest] * MAX_EXTENTS)
    for event in (pb.Event(found=found), pb.Event(loaded=loaded)):
        assert pb.AttachResponse(events=[event]).ByteSize() < rpc.MAX_MESSAGE_BYTES


def test_credits_are_bounded_by_the_engines_share_of_the_pool(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    assert session.credit_limit == CAPACITY // CREDIT_SHARE
    assert len(session.reserve(100)) == session.credit_limit
    assert session.reserve(1) == []
    tier.check()


def test_credits_are_bounded_however_large_the_pool() -> None:
    session = EngineSessions(HostTier(CREDIT_SHARE * (MAX_CREDITS + 10) * SPEC.chunk_bytes)).attach("e", SPEC)
    assert session.credit_limit == MAX_CREDITS


def test_a_pool_of_two_chunks_still_gives_one_credit() -> None:
    session = EngineSessions(HostTier(2 * SPEC.chunk_bytes)).attach("e", SPEC)
    assert len(session.reserve(5)) == 1


@pytest.mark.parametrize("count", [0, -1])
def test_asking_for_no_credits_gives_none(engines: EngineSessions, count: int) -> None:
    assert engines.attach("e", SPEC).reserve(count) == []


def test_credits_evict_only_chunks_that_are_not_held(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    for number in range(CAPACITY):
        admit(tier, SPEC, number)
    open_lookup(session, tier, "r", chunk_keys(*range(CAPACITY)))
    held = CAPACITY // HOLD_SHARE
    assert len(session.reserve(100)) == session.credit_limit
    assert all(tier.get(chunk_key(number)) for number in range(held))
    tier.check()


def test_a_credit_can_be_given_back_once(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    (credit,) = session.reserve(1)
    session.return_credit(credit.offset)
    assert tier.used_bytes == 0
    with pytest.raises(GrantNotFound):
        session.return_credit(credit.offset)


def test_a_committed_credit_makes_its_chunk_visible_and_is_spent(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    (credit,) = session.reserve(1)
    commit(session, credit.offset, 7)
    (chunk,) = tier.find(chunk_keys(7))
    assert (chunk.offset, chunk.size_bytes, chunk.token_count) == (credit.offset, SPEC.chunk_bytes, SPEC.chunk_size)
    assert (chunk.fingerprint, chunk.checksum, chunk.generation) == (SPEC.fingerprint, 7, credit.generation)
    assert session.credit_count == 0
    with pytest.raises(GrantNotFound):
        commit(session, credit.offset, 8)


def test_a_partial_chunk_is_committed_with_its_own_size(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    (credit,) = session.reserve(1)
    commit(session, credit.offset, 1, token_count=5)
    assert tier.used_bytes == 4096  # one block instead of two
    tier.check()


@pytest.mark.parametrize(
    ("size_bytes", "token_count"),
    [
        (SPEC.chunk_bytes, SPEC.chunk_size + 1),
        (SPEC.chunk_bytes, 0),
        (SPEC.chunk_bytes, -1),
        (SPEC.chunk_bytes - 8, SPEC.chunk_size),
        (2 * SPEC.chunk_bytes, SPEC.chunk_size),
        (0, SPEC.chunk_size),
        (SPEC.chunk_bytes, 5),
    ],
)
def test_a_commit_whose_sizes_do_not_fit_the_spec_is_refused_and_keeps_its_credit(
    tier: HostTier, engines: EngineSessions, size_bytes: int, token_count: int
) -> None:
    session = engines.attach("e", SPEC)
    (credit,) = session.reserve(1)
    with pytest.raises(BadMessage):
        session.commit(written(credit.offset, 1, size_bytes, token_count))
    assert session.credit_count == 1
    assert len(tier) == 0
    commit(session, credit.offset, 1)


@pytest.mark.parametrize("part", [-1, 1])
def test_a_commit_of_a_part_that_the_spec_lacks_is_refused_and_keeps_its_credit(
    tier: HostTier, engines: EngineSessions, part: int
) -> None:
    """The protos allow negative numbers, which would count parts from the last one."""
    session = engines.attach("e", SPEC)
    (credit,) = session.reserve(1)
    with pytest.raises(BadMessage, match=f"no part {part}"):
        session.commit(written(credit.offset, 1, SPEC.chunk_bytes), part=part)
    assert session.credit_count == 1
    assert len(tier) == 0
    commit(session, credit.offset, 1)


def test_a_chunk_that_is_larger_than_its_credit_is_refused_and_leaves_the_credit_to_be_returned(
    tier: HostTier, engines: EngineSessions
) -> None:
    spec = small_spec(chunk_size=128)
    session = engines.attach("e", spec)
    (credit,) = session.reserve_partial(1)
    with pytest.raises(GrantNotFound):
        session.commit(written(credit.offset, 1, spec.chunk_bytes, spec.chunk_size))
    assert (session.credit_count, tier.reserved_count) == (1, 1)
    session.return_credit(credit.offset)
    assert (session.credit_count, tier.used_bytes) == (0, 0)
    tier.check()


def test_an_engine_cannot_commit_what_another_was_granted(tier: HostTier, engines: EngineSessions) -> None:
    (credit,) = engines.attach("one", SPEC).reserve(1)
    other = engines.attach("other", SPEC)
    with pytest.raises(GrantNotFound):
        commit(other, credit.offset, 1)
    with pytest.raises(GrantNotFound):
        other.return_credit(credit.offset)
    assert len(tier) == 0
    assert tier.reserved_count == 1


def test_of_two_engines_that_store_one_chunk_the_second_gets_none_and_its_extent_goes_back(
    tier: HostTier, engines: EngineSessions
) -> None:
    for name in ("one", "other"):
        session = engines.attach(name, SPEC)
        (credit,) = session.reserve(1)
        assert (commit(session, credit.offset, 1) is None) == (name == "other")
        assert session.credit_count == 0
    assert tier.used_bytes == SPEC.chunk_bytes
    assert tier.reserved_count == 0


def test_a_lookup_holds_what_it_found_until_it_is_released(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    for number in (0, 1, 3):
        admit(tier, SPEC, number)
    lease = open_lookup(session, tier, "r", chunk_keys(0, 1, 2, 3))
    assert lease.own_count == 2
    assert session.lease("r") is lease
    assert [holds(tier, number) for number in (0, 1, 3)] == [1, 1, 0]
    assert session.release("r") == 2
    assert [holds(tier, number) for number in (0, 1, 3)] == [0, 0, 0]
    assert session.lease("r") is None
    assert session.release("r") == 0


def test_a_ticket_is_used_once(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    open_lookup(session, tier, "r", chunk_keys(0))
    with pytest.raises(BadMessage):
        open_lookup(session, tier, "r", chunk_keys(0))
    session.release("r")
    open_lookup(session, tier, "r", chunk_keys(0))


def test_one_engines_holds_are_bounded_over_all_its_lookups(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    for number in range(CAPACITY):
        admit(tier, SPEC, number)
    limit = CAPACITY // HOLD_SHARE
    first = open_lookup(session, tier, "first", chunk_keys(*range(limit - 1)))
    second = open_lookup(session, tier, "second", chunk_keys(*range(limit - 1, CAPACITY)))
    assert (first.own_count, second.own_count) == (limit - 1, 1)
    session.release("first")
    third = open_lookup(session, tier, "third", chunk_keys(*range(CAPACITY)))
    assert third.own_count == limit - 1


def test_chunks_that_were_fetched_for_a_lookup_stay_until_its_release(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    open_lookup(session, tier, "r", chunk_keys(0))
    fetched = admit(tier, SPEC, 0)
    tier.hold([fetched])
    assert session.hold("r", [fetched])
    assert fetched.holds == 1
    assert session.release("r") == 1
    assert fetched.holds == 0


def test_chunks_that_arrive_after_the_release_are_not_held(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    open_lookup(session, tier, "r", chunk_keys(0))
    session.release("r")
    late = admit(tier, SPEC, 0)
    tier.hold([late])
    assert not session.hold("r", [late])
    assert late.holds == 0


def test_an_engine_id_is_used_once_at_a_time(engines: EngineSessions) -> None:
    session = engines.attach("e", SPEC)
    with pytest.raises(BadMessage):
        engines.attach("e", SPEC)
    with pytest.raises(BadMessage):
        engines.attach("", SPEC)
    engines.detach(session)
    engines.attach("e", SPEC)


def test_a_spec_of_which_not_two_chunks_fit_is_refused_and_the_message_names_the_key() -> None:
    engines = EngineSessions(HostTier(2 * SPEC.chunk_bytes - 1))
    with pytest.raises(BadKvSpec, match="max_local_cpu_size"):
        engines.attach("e", SPEC)
    assert engines.mapped_count == 0


def test_specs_are_remembered_after_their_engine_is_gone(engines: EngineSessions) -> None:
    other: KvSpec = small_spec(model_id="other-weights")
    engines.detach(engines.attach("e", SPEC))
    engines.attach("o", other)
    assert list(engines.specs) == [SPEC, other]
    assert engines.spec(SPEC.fingerprint) == SPEC
    assert engines.spec(bytes(16)) is None


def granted(tier: HostTier, engines: EngineSessions) -> EngineSession:
    """A session that holds a chunk and two credits."""
    session = engines.attach("e", SPEC)
    admit(tier, SPEC, 0)
    open_lookup(session, tier, "r", chunk_keys(0))
    session.reserve(2)
    return session


def everything_is_back(tier: HostTier) -> bool:
    tier.check()
    return tier.reserved_count == 0 and holds(tier, 0) == 0


def test_an_engine_without_workers_is_over_when_its_stream_is_gone(tier: HostTier, engines: EngineSessions) -> None:
    session = granted(tier, engines)
    assert engines.attached_count == engines.mapped_count == 1
    engines.detach(session)
    assert engines.attached_count == engines.mapped_count == 0
    assert everything_is_back(tier)


def test_nothing_is_taken_back_while_a_worker_may_still_touch_the_pool(tier: HostTier, engines: EngineSessions) -> None:
    session = granted(tier, engines)
    for rank in range(2):
        engines.worker_connected("e", rank)
    engines.detach(session)
    assert (engines.attached_count, engines.mapped_count) == (0, 1)
    assert not everything_is_back(tier)
    engines.worker_disconnected("e", 0)
    assert not everything_is_back(tier)
    engines.worker_disconnected("e", 1)
    assert everything_is_back(tier)
    assert engines.mapped_count == 0


def test_nothing_is_taken_back_while_the_stream_lives(tier: HostTier, engines: EngineSessions) -> None:
    session = granted(tier, engines)
    engines.worker_connected("e", 0)
    engines.worker_disconnected("e", 0)
    assert not everything_is_back(tier)
    engines.detach(session)
    assert everything_is_back(tier)


def test_a_worker_that_reconnects_before_its_old_connection_ends_still_counts(
    tier: HostTier, engines: EngineSessions
) -> None:
    session = granted(tier, engines)
    engines.worker_connected("e", 0)
    engines.worker_connected("e", 0)
    engines.worker_disconnected("e", 0)
    engines.detach(session)
    assert not everything_is_back(tier)
    engines.worker_disconnected("e", 0)
    assert everything_is_back(tier)


def test_a_worker_that_comes_too_late_is_turned_away(engines: EngineSessions) -> None:
    with pytest.raises(EngineNotFound):
        engines.worker_connected("e", 0)
    engines.detach(engines.attach("e", SPEC))
    with pytest.raises(EngineNotFound):
        engines.worker_connected("e", 0)
    engines.worker_disconnected("e", 0)  # of a session that is over: nothing to do


def test_detaching_twice_takes_back_once(tier: HostTier, engines: EngineSessions) -> None:
    session = granted(tier, engines)
    engines.detach(session)
    again = engines.attach("e", SPEC)
    engines.detach(session)
    assert engines.mapped_count == 1
    assert engines.session("e") is again


def test_asking_for_an_engine_that_is_not_there_says_so(engines: EngineSessions) -> None:
    with pytest.raises(EngineNotFound):
        engines.session("unknown")


# ---- chunks of several parts


def item(tier: HostTier, part: int, chunk: int) -> Chunk:
    return put(
        tier,
        item_key(part, chunk),
        HYBRID.part_bytes(part),
        fingerprint=HYBRID.fingerprint,
        token_count=HYBRID.chunk_size,
    )


def test_items_behind_a_gap_are_held_once_until_the_lookup_is_released() -> None:
    tier = HostTier(20 * HYBRID.chunk_bytes)
    session = EngineSessions(tier).attach("e", HYBRID)
    own, gap, behind = (item(tier, 0, chunk) for chunk in range(3))
    tier.drop([gap.key])
    most = session.holdable_bytes
    session.keep(session.begin("r"), [item_key(0, chunk) for chunk in range(3)], [own], [behind])
    assert session.holdable_bytes == most - own.size_bytes - behind.size_bytes
    fetched = item(tier, 0, 1)
    tier.hold([fetched, behind])
    assert session.hold("r", [fetched, behind])
    assert [chunk.holds for chunk in (own, fetched, behind)] == [1, 1, 1]
    assert session.holdable_bytes == most - 3 * own.size_bytes
    assert session.release("r") == 3
    assert [chunk.holds for chunk in (own, fetched, behind)] == [0, 0, 0]
    assert session.holdable_bytes == most


def test_whatever_a_detached_engine_held_of_several_parts_is_free() -> None:
    tier = HostTier(20 * HYBRID.chunk_bytes)
    engines = EngineSessions(tier)
    session = engines.attach("e", HYBRID)
    assert [len(session.reserve(2, part)) for part in range(3)] == [2, 2, 2]
    session.keep(session.begin("r"), [], [item(tier, 0, 0)], [item(tier, 2, 5)])
    engines.detach(session)
    assert tier.reserved_count == 0
    assert not any(chunk.holds for chunk in tier)
    tier.check()


def test_only_windows_and_states_are_superseded() -> None:
    tier = HostTier(20 * HYBRID.chunk_bytes)
    session = EngineSessions(tier).attach("e", HYBRID)
    for part in range(3):
        item(tier, part, 0)
    for part in range(3):
        (credit,) = session.reserve(1, part)
        chunk = replace(written(credit.offset, 1, HYBRID.part_bytes(part), HYBRID.chunk_size), key=PROMPT[1])
        session.commit(chunk, part=part, superseded=PROMPT[0])
    while len(tier) > 4:
        assert tier.reserve(4096)
    assert {chunk.key for chunk in tier} == {item_key(0, 0), *(item_key(part, 1) for part in range(3))}


def versions(engines: EngineSessions) -> list[str]:
    return [spec.weight_version for spec in engines.specs]


def test_an_engine_whose_weights_change_keeps_what_it_was_granted(tier: HostTier, engines: EngineSessions) -> None:
    session = engines.attach("a", SPEC)
    (credit,) = session.reserve(1)
    engines.served.announce("a", [ServedModel(name="model", fingerprint=SPEC.fingerprint)])
    engines.change_weights(session, "2")
    changed = replace(SPEC, weight_version="2")
    assert session.spec == changed
    assert engines.attached(changed.fingerprint) == [session]
    assert ServedModel(name="model", fingerprint=changed.fingerprint) in set(engines.served)
    commit(session, credit.offset, 0)
    assert [chunk.fingerprint for chunk in tier] == [changed.fingerprint]


def test_of_old_versions_the_last_named_ones_are_kept_and_none_that_is_private(engines: EngineSessions) -> None:
    other = replace(SPEC, model_id="another")
    engines.attach("b", other)
    stays = engines.attach("c", replace(SPEC, weight_version="1"))
    session = engines.attach("a", SPEC)
    dropped = []
    for version in ("private:x", "2", "3", "4", "5", "private:y", "6"):
        engines.change_weights(session, version)
        dropped += [spec.weight_version for spec in engines.drop_old_versions(session.spec)]
    assert dropped == ["private:x", "", "private:y"]
    assert versions(engines) == ["", "1", "2", "3", "4", "5", "6"]
    assert next(iter(engines.specs)) == other
    assert stays.spec.weight_version == "1", "an engine has it"
