"""The handoffs of a decode's node against a model: any order of messages, deadlines and crashes, on either side."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from lmkv.errors import BadMessage, GrantNotFound, NoFreeExtents, RequestTooLarge
from lmkv_server.node.cache.host import Chunk, Reservation
from lmkv_server.node.handoff.state import Handoff, HandoffState
from tests.server.node.handoff_tables import (
    ABANDON,
    KEYS,
    SILENCE,
    SOURCE,
    assert_nothing_is_left,
    begin,
    commit,
    device_buffer,
    table,
)
from tests.server.node.peer_parts import SMALL


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
        self.under_way: list[tuple[Handoff, int, Reservation]] = []

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
    def end_read(self, read: tuple[Handoff, int, Reservation], is_sound: bool) -> None:
        handoff, index, reserved = read
        self.under_way.remove(read)
        if is_sound:
            commit(self.tier, handoff, index, reserved)
            if handoff.destination in (self.tier, self.buffer):
                self.landed[handoff.handoff_id].add(index)
        else:
            handoff.destination.give_back(reserved.offset)
            handoff.fail([index])

    @rule()
    def the_device_buffer_is_lost(self) -> None:
        """Reads into it continue without effect; the engine lends another one."""
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
                Chunk(
                    offset=reserved.offset,
                    key=key,
                    fingerprint=SMALL.fingerprint,
                    size_bytes=SMALL.chunk_bytes,
                    checksum=1,
                    token_count=SMALL.chunk_size,
                )
            )

    @invariant()
    def all_is_sound(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.handoffs.check()
        dropped = {id(chunk): chunk for handoff in self.handoffs for chunk in handoff.chunks if chunk.dropped}
        for tier in (self.tier, self.buffer):
            tier.check(chunk for chunk in dropped.values() if chunk.tier is tier)
        assert {handoff.handoff_id for handoff in self.handoffs} == set(self.known)
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
