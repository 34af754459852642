"""A session without a driver: what it sends, what it keeps, and what is left when the node is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey, as_tokens, chunk_keys, root_key
from lmkv.misses import MissReason, reason_name
from lmkv.runtime.patience import TIMEOUTS_UNTIL_SUSPECT
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.counters import Counters
from lmkv_client.engine.prompt_account import PromptAccount
from lmkv_client.engine.session import Lookup, LookupState, Session, SessionEvent
from tests.client.connector.scripted_node import ScriptedNode
from tests.promises.conftest import ROOT
from tests.support.specs import make_spec

CHUNK = 4
SPEC = make_spec(model_name="m", model_id="i", kv_dtype="bfloat16", layer_count=1, kv_head_count=1, chunk_size=CHUNK)
KEYS = chunk_keys(as_tokens(range(3 * CHUNK)), root_key(SPEC.fingerprint), CHUNK)
FIRST, LATE = 0.0, 100.0


class Talk:
    """A session with a scripted node."""

    def __init__(self, *, is_attached: bool = True) -> None:
        self.node = ScriptedNode(SPEC)
        self.session = Session[Lookup](ConnectorConfig(), SPEC, self.node, Counters())  # type: ignore[arg-type]
        if is_attached:
            self.node.attach()
            self.events()

    def events(self, now: float = FIRST) -> list[SessionEvent[Lookup]]:
        return list(self.session.events(now))

    def kinds(self, now: float = FIRST) -> list[str]:
        return [event.kind for event in self.events(now)]

    def lookup(self, keys: Sequence[ChunkKey] = KEYS, wanted: tuple[int, ...] = (0,)) -> Lookup:
        """A lookup that was sent, if it may be."""
        lookup = Lookup(keys=keys, account=PromptAccount(len(keys) * CHUNK, CHUNK))
        self.session.look_up(lookup, FIRST, wanted=wanted)
        return lookup

    def store(self, keys: Sequence[ChunkKey] = KEYS) -> None:
        """Commits chunks into credits of the node."""
        self.lookup(keys, wanted=(len(keys),))  # finds nothing
        self.events()
        offsets = [offset for _ in keys if (offset := self.session.credits[0].take()) is not None]
        self.session.commit(
            [
                pb.CommitChunk(chunk_key=key, offset=offset, size_bytes=SPEC.chunk_bytes, token_count=CHUNK)
                for key, offset in zip(keys, offsets, strict=True)
            ]
        )


def reason(lookup: Lookup) -> str:
    """Why the prompt is computed."""
    lookup.account.take(0, {})
    (span,) = lookup.account.spans()
    return reason_name(span.reason)


def test_a_hit_is_held_until_it_is_released() -> None:
    talk = Talk()
    talk.store()
    lookup = talk.lookup()
    assert "found" in talk.kinds()
    assert (lookup.state, len(lookup.chunks), lookup.tokens_in(3)) == (LookupState.FOUND, 3, 3 * CHUNK)
    assert talk.node.tickets
    talk.session.release(lookup)
    talk.session.release(lookup)
    assert not talk.node.tickets
    assert len(talk.node.releases) == 1
    assert not talk.session.lookups


def test_an_answer_that_no_lookup_waits_for_is_released_and_its_lookup_named() -> None:
    talk = Talk()
    talk.store()
    talk.node.prompt = False
    lookup = talk.lookup()
    talk.session.time_out(lookup, 1.0, LATE)
    assert (lookup.is_over, talk.session.counters.take()["lookup_timeouts"]) == (True, 1)
    talk.node.prompt = True
    talk.node.answer()
    (late,) = [event for event in talk.events(LATE) if event.kind == "late"]
    assert late.lookup is lookup
    assert not talk.node.tickets
    assert not talk.session.lookups


def test_what_was_granted_ends_with_the_node_and_nothing_of_it_is_sent_to_the_next() -> None:
    talk = Talk()
    talk.store()
    held = talk.lookup(wanted=(5,))
    talk.events()
    assert held.state is LookupState.FOUND
    talk.node.prompt = False
    asked = talk.lookup()
    talk.node.prompt = True
    talk.node.lose()
    (lost,) = talk.events()
    assert (lost.kind, set(lost.message)) == ("lost", {held, asked})
    assert held.is_over
    assert asked.is_over
    assert (talk.session.attachment, len(talk.session.credits[0])) == (None, 0)
    assert reason(asked) == MissReason.NODE_LOST
    assert talk.session.lose() == [], "nothing is lost twice"
    talk.node.attach()
    talk.events()
    talk.session.release(held)
    assert not talk.node.releases


def test_without_a_node_a_lookup_says_so_and_reports_wait_for_one() -> None:
    talk = Talk(is_attached=False)
    lookup = talk.lookup()
    assert lookup.is_over
    assert reason(lookup) == MissReason.NODE_LOST
    talk.session.accounts.close("r", lookup.account)
    talk.session.send_reports()
    talk.node.attach()
    talk.events()
    talk.session.send_reports()
    assert [report.engine_request_id for report in talk.node.reports] == ["r"]


def test_chunks_that_arrive_are_added_in_order_until_the_load_ends() -> None:
    talk = Talk()
    talk.store()
    talk.node.move_to_peer()
    talk.node.fetches_at_once = False
    lookup = talk.lookup()
    talk.events()
    assert (len(lookup.chunks), lookup.absent_count) == (0, 3)
    talk.session.load(lookup, 0, 3, 1.0)
    talk.node.deliver(2, done=False)
    talk.events()
    assert (lookup.state, len(lookup.chunks)) == (LookupState.LOADING, 2)
    talk.node.deliver()
    talk.events()
    assert (lookup.state, len(lookup.chunks), lookup.peer_id) == (LookupState.FOUND, 3, "peer")


def test_one_module_of_the_client_asks_loads_commits_and_releases() -> None:
    acts = re.compile(r"pb\.Act\((lookup|load|release|commit|drop_damaged|report|change_weights|serve_models)=")
    users = {
        str(path.relative_to(ROOT / "client/lmkv_client"))
        for path in (ROOT / "client/lmkv_client").rglob("*.py")
        if acts.search(path.read_text())
    }
    assert users == {"engine/session.py"}


def test_a_late_answer_or_another_node_ends_the_suspicion() -> None:
    talk = Talk()
    talk.node.prompt = False

    def time_out() -> None:
        for _ in range(TIMEOUTS_UNTIL_SUSPECT):
            talk.session.time_out(talk.lookup(), 0.1, FIRST)
        assert reason(talk.lookup()) == MissReason.NODE_SUSPECT

    time_out()
    talk.node.answer()
    assert set(talk.kinds()) == {"late"}
    assert talk.lookup().state is LookupState.ASKED, "it has answered"
    time_out()
    talk.node.lose()
    talk.events()
    talk.node.attach()
    talk.events()
    assert talk.lookup().state is LookupState.ASKED, "the next node is asked"
