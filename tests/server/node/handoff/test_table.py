"""The handoffs of a decode's node against a model: any order of messages, deadlines and crashes, on either side."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from lmkv.errors import BadMessage, Full, GrantNotFound, NoFreeExtents, RequestTooLarge
from lmkv.keys import ChunkKey
from lmkv_server.node.cache.host import Chunk, HostTier, Reserved
from lmkv_server.node.handoff import table as module
from lmkv_server.node.handoff.state import Handoff, HandoffSource, HandoffState
from lmkv_server.node.handoff.table import HandoffTable
from tests.server.node.peer_parts import SMALL, keys_of

SILENCE, ABANDON = 5.0, 60.0
SOURCE = HandoffSource(instance_id="prefill", epoch=1, address="127.0.0.1:1", session_id="session")
POOL_CHUNKS = 24
BUFFER_CHUNKS = 12
DEVICE_CHUNKS = 6
KEYS = keys_of(40)


def table(pool_chunks: int = POOL_CHUNKS, buffer_chunks: int = BUFFER_CHUNKS) -> tuple[HostTier, HandoffTable]:
    """A tier and its handoffs."""
    tier = HostTier(pool_chunks * SMALL.chunk_bytes)
    handoffs = HandoffTable(
        tier, buffer_bytes=buffer_chunks * SMALL.chunk_bytes, timeout_seconds=SILENCE, abandon_seconds=ABANDON
    )
    return tier, handoffs


def begin(
    handoffs: HandoffTable, name: str, keys: list[ChunkKey], now: float = 0.0, buffer: HostTier | None = None
) -> Handoff:
    """A prefill announces the prompt of these chunks, all of them full."""
    return handoffs.allocate(name, SOURCE, SMALL, keys, len(keys) * SMALL.chunk_size, now, buffer)


def device_buffer() -> HostTier:
    """An engine's."""
    return HostTier(DEVICE_CHUNKS * SMALL.chunk_bytes, region=1)


def commit(tier: HostTier, handoff: Handoff, index: int, reserved: Reserved) -> Chunk:
    """What the receiver does when a chunk has been read and is sound."""
    chunk = handoff.destination.commit(
        reserved.offset,
        key=handoff.keys[index],
        fingerprint=SMALL.fingerprint,
        size_bytes=handoff.size_bytes_of(index),
        checksum=1,
        token_count=handoff.token_count_of(index),
    ) or handoff.destination.get(handoff.keys[index])
    assert chunk
    handoff.commit(index, chunk, tier)
    return chunk


def take(tier: HostTier, handoff: Handoff, *indices: int) -> None:
    """The prefill says that these are computed; they are read."""
    for index, reserved in handoff.begin(indices, tier).items():
        commit(tier, handoff, index, reserved)


def assert_nothing_is_left(tier: HostTier, handoffs: HandoffTable) -> None:
    """No room, no hold and no byte of the buffer is taken."""
    assert len(handoffs) == handoffs.used_bytes == tier.reserved_bytes == 0
    assert all(chunk.holds == 0 for chunk in tier)
    assert tier.used_bytes == tier.chunk_bytes
    tier.check()


# ---- one by one -------------------------------------------------------------------------------------------------


def test_a_prompt_is_handed_over_chunk_by_chunk() -> None:
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
    assert second.missing == (0, 1), "a decode would read what nobody has written"
    commit(tier, first, 0, reserved)
    assert begin(handoffs, "c", KEYS[:2]).missing == (1,)


def test_what_somebody_else_brought_meanwhile_is_not_read_again() -> None:
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
    handoff = handoffs.allocate("r", SOURCE, SMALL, KEYS[:2], SMALL.chunk_size + 7, 0.0)
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
        handoffs.allocate("r", other, SMALL, KEYS[:3], 3 * SMALL.chunk_size, 0.0)


@pytest.mark.parametrize("token_count", [0, -1, 2 * 256, 3 * 256 + 1])
def test_tokens_that_do_not_fit_the_keys_are_refused(token_count: int) -> None:
    tier, handoffs = table()
    with pytest.raises(BadMessage, match="tokens"):
        handoffs.allocate("r", SOURCE, SMALL, KEYS[:3], token_count, 0.0)
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
    assert handoffs.abandoned_count == 1
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


def test_one_handoff_goes_wrong_and_others_go_on() -> None:
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


def test_the_number_of_handoffs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HANDOFFS", 2)
    _, handoffs = table()
    begin(handoffs, "a", KEYS[:1])
    begin(handoffs, "b", KEYS[1:2])
    with pytest.raises(Full, match="are running"):
        begin(handoffs, "c", KEYS[2:3])


# ---- at random ---------------------------------------------------------------------------------------------------


class HandoffsMachine(RuleBasedStateMachine):
    """Prefills, decodes and the clock act in any order. The model knows what each handoff should have."""

    reads = Bundle("reads")

    @initialize()
    def start(self) -> None:
        self.tier, self.handoffs = table()
        self.buffer = device_buffer()
        self.now = 0.0
        self.known: dict[str, Handoff] = {}
        self.landed: dict[str, set[int]] = {}
        self.claims: Counter[str] = Counter()
        self.over: set[str] = set()
        self.under_way: list[tuple[Handoff, int, Reserved]] = []

    names = st.sampled_from("abcd")

    @rule(name=names, first=st.integers(0, 6), count=st.integers(1, 8), to_device=st.booleans())
    def announce(self, name: str, first: int, count: int, to_device: bool) -> None:
        keys = KEYS[: first + count] if name in "ab" else KEYS[20 + first : 20 + first + count]
        try:
            handoff = begin(self.handoffs, name, keys, self.now, self.buffer if to_device else None)
        except GrantNotFound:
            assert name in self.over
        except BadMessage:
            assert list(self.known[name].keys) != keys
        except (NoFreeExtents, RequestTooLarge):
            assert name not in self.known
        else:
            assert name not in self.over
            assert self.known.setdefault(name, handoff) is handoff
            self.landed.setdefault(name, {*range(len(keys))} - {*handoff.missing})

    @rule(target=reads, name=names, data=st.data())
    def read(self, name: str, data: st.DataObject) -> object:
        """Late and repeated words included: an index that is not wanted begins nothing."""
        handoff = self.known.get(name)
        if handoff is None:
            return multiple()
        indices = data.draw(st.sets(st.integers(0, len(handoff.keys) - 1), min_size=1))
        begun = handoff.begin(indices, self.tier)
        here = {chunk.key for chunk in handoff.chunks}
        self.landed[name] |= {index for index in indices if handoff.keys[index] in here}
        assert not begun or (handoff.is_open and name not in self.over)
        self.handoffs.renew(handoff, self.now + SILENCE)
        self.under_way += [(handoff, index, reserved) for index, reserved in begun.items()]
        return multiple(*((handoff, index, reserved) for index, reserved in begun.items()))

    @rule(read=consumes(reads), is_sound=st.booleans())
    def end_read(self, read: tuple[Handoff, int, Reserved], is_sound: bool) -> None:
        handoff, index, reserved = read
        self.under_way.remove(read)
        if is_sound:
            commit(self.tier, handoff, index, reserved)
            if handoff.destination in (self.tier, self.buffer):
                self.landed[handoff.request_id].add(index)
        else:
            handoff.destination.give_back(reserved.offset)
            handoff.fail([index])

    @rule()
    def the_device_buffer_is_lost(self) -> None:
        """Reads into it go on in vain; the engine lends another one."""
        lost, self.buffer = self.buffer, device_buffer()
        self.handoffs.detach_buffer(lost, self.now)
        for name, handoff in self.known.items():
            if handoff.destination is lost:
                here = {chunk.key for chunk in handoff.chunks}
                assert not any(chunk.tier is lost for chunk in handoff.chunks)
                self.landed[name] = {index for index in self.landed[name] if handoff.keys[index] in here}

    @rule(name=names)
    def prefill_is_done(self, name: str) -> None:
        if handoff := self.known.get(name):
            self.handoffs.end(handoff.grant_id, SOURCE.session_id, self.now)

    @rule(name=names)
    def prefill_withdraws(self, name: str) -> None:
        self.handoffs.withdraw(name, self.now)
        if name in self.known and self.claims[name]:
            assert not self.known[name].is_open
        else:
            self.over.add(name)
            self.known.pop(name, None)

    @rule(name=names)
    def decode_comes(self, name: str) -> None:
        self.handoffs.claim(name)
        self.claims[name] += 1

    @rule(name=names)
    def decode_goes(self, name: str) -> None:
        self.handoffs.unclaim(name)
        self.claims[name] = max(0, self.claims[name] - 1)
        if not self.claims[name]:
            self.over.add(name)
            self.known.pop(name, None)

    @rule(seconds=st.sampled_from([1.0, SILENCE, 2 * SILENCE, ABANDON]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for handoff in self.handoffs.expire(self.now):
            assert handoff.state is HandoffState.EXPIRED
        gone = {name for name, handoff in self.known.items() if handoff not in list(self.handoffs)}
        assert not any(self.claims[name] for name in gone), "a claimed handoff was let go"
        self.over |= gone
        for name in gone:
            del self.known[name]

    @rule(data=st.data())
    def something_else_is_stored(self, data: st.DataObject) -> None:
        """An engine stores chunks of its own: it may evict what no handoff keeps."""
        key = data.draw(st.sampled_from(KEYS))
        if reserved := self.tier.reserve(SMALL.chunk_bytes):
            self.tier.commit(
                reserved.offset,
                key=key,
                fingerprint=SMALL.fingerprint,
                size_bytes=SMALL.chunk_bytes,
                checksum=1,
                token_count=SMALL.chunk_size,
            )

    @invariant()
    def all_is_sound(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.handoffs.check()
        dropped = {id(chunk): chunk for handoff in self.handoffs for chunk in handoff.chunks if chunk.dropped}
        for tier in (self.tier, self.buffer):
            tier.check(chunk for chunk in dropped.values() if chunk.tier is tier)
        assert {handoff.request_id for handoff in self.handoffs} == set(self.known)
        for name, handoff in self.known.items():
            here = {chunk.key for chunk in handoff.chunks}
            assert here == {handoff.keys[index] for index in self.landed[name]}
            assert (handoff.state is HandoffState.COMMITTED) == (
                len(here) == len(handoff.keys) and handoff.state not in (HandoffState.ABORTED, HandoffState.EXPIRED)
            )
            if handoff.is_open:
                assert handoff.promised(0) == len(handoff.keys)

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for handoff, index, reserved in self.under_way:
            handoff.destination.give_back(reserved.offset)
            handoff.fail([index])
        self.handoffs.clear()
        assert not any(chunk.holds for chunk in self.buffer)
        assert_nothing_is_left(self.tier, self.handoffs)


TestHandoffsAtRandom = HandoffsMachine.TestCase
