"""Each model finds faults: for one that is put into the real class, the shortest list of actions that shows it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmkv_server.coordinator.core.instances import Instances
from lmkv_server.coordinator.core.layout_map import LayoutMap, PartialChunkMap
from lmkv_server.coordinator.layout_store import scripts
from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.registry.registry import Registry, ReportStream
from lmkv_server.node.cache.events import PartialChunks
from lmkv_server.node.cache.eviction import EvictionQueue
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import Arrivals
from lmkv_server.node.fetch.pipeline import PendingWrites
from lmkv_server.node.handoff.state import Handoff
from lmkv_server.node.handoff.table import HandoffTable
from lmkv_server.node.sessions.session import EngineSession
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.models.explorer import Counterexample, explore
from tests.models.models import MODELS


def violation(name: str, depth: int = 6) -> Counterexample:
    """What the exploration of a model finds."""
    with MODELS[name].models() as make:
        found = explore(make, depth=depth).counterexample
    assert found is not None, "the fault was not found"
    assert isinstance(found.error, AssertionError), found
    return found


def names(found: Counterexample) -> Sequence[object]:
    return [action[0] for action in found.actions]


def test_an_extent_that_leaves_quarantine_before_its_transfer_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: PendingWrites) -> None:
        self._is_closed = True
        self._release()

    monkeypatch.setattr(PendingWrites, "close", close)
    found = violation("pool")
    assert names(found) == ["fetch", "fetch_cancelled"]


def test_the_grants_of_an_engine_that_end_while_its_worker_maps_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    detach = EngineSessions.detach

    def detach_and_revoke(self: EngineSessions, session: EngineSession) -> None:
        detach(self, session)
        session.revoke()

    monkeypatch.setattr(EngineSessions, "detach", detach_and_revoke)
    found = violation("pool")
    assert found.actions == (("reserve", "x"), ("detach", "x"))


def test_a_chunk_that_is_freed_while_a_grant_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "hold", lambda self, chunks: None)
    monkeypatch.setattr(HostTier, "unhold", lambda self, chunks: None)
    found = violation("pool")
    assert found.actions == (("acquire", "a"),)


def test_room_that_a_handoff_keeps_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handoff, "_release_room", lambda self: None)
    found = violation("handoff")
    assert (names(found), found.settling) == (["allocate"], True)


def test_a_handoff_that_begins_again_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandoffTable, "_remember", lambda self, handoff_id: None)
    assert names(violation("handoff")) == ["withdraw", "allocate"]


def test_an_end_that_replaces_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: Handoff, state: object) -> None:
        self.state = state  # type: ignore[assignment]
        self._release_room()

    monkeypatch.setattr(Handoff, "end", end)
    found = violation("handoff to a device buffer")
    assert names(found) == ["allocate", "time_passes", "withdraw"]


def test_an_old_epoch_that_replaces_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instances, "_refuse_impostor", lambda *_: None)
    found = violation("registration")
    assert found.actions == (("register", "new"), ("register", "old"))


def test_an_id_that_another_node_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instances, "check_secret", lambda *_: None)
    found = violation("registration")
    assert found.actions == (("register", "old"), ("register", "other"))


def test_a_report_of_a_stream_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Registry._begin_stream

    def begin_beside(self: Registry, instance: object, *rest: object) -> ReportStream:
        stream = begin(self, instance, *rest)  # type: ignore[arg-type]
        monkeypatch.setattr(stream._instance, "stream", stream)
        return stream

    monkeypatch.setattr(Registry, "_end_stream", lambda *_: None)
    monkeypatch.setattr(Registry, "_begin_stream", begin_beside)
    monkeypatch.setattr(ReportStream, "close", lambda self: None)
    found = violation("registration")
    assert names(found) == ["register", "open_stream", "deregister", "register", "snapshot"]


def test_chunks_of_an_instance_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutMap, "drop_instance", lambda *_: None)
    found = violation("registration")
    assert (names(found), found.settling) == (["register", "open_stream", "snapshot", "store"], True)


def test_an_old_term_that_writes_after_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "PUBLISH", scripts.PUBLISH.replace("reply = 'fenced'", "reply = 'ok'"))
    found = violation("shared map")
    assert (names(found), found.settling) == (["open_stream", "store"], True)
    assert "an old term was written" in str(found.error)


def test_a_follower_that_ignores_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InstanceFollower, "handle_entry", lambda *_: False)
    found = violation("shared map")
    assert (names(found), found.settling) == (["store"], True)


def test_a_move_that_drops_what_another_one_has_brought_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrivals, "since", lambda *_: set())
    found = violation("moves of two coordinators", depth=8)
    assert "the chunk is lost" in str(found.error)


def test_an_arrival_that_is_not_counted_since_the_chunk_was_here_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrivals, "add", lambda self, keys: self._serials.setdefault(next(iter(keys)), self.serial))
    found = violation("moves of two coordinators", depth=8)
    assert "the chunk is lost" in str(found.error)


def test_a_tail_that_stays_in_the_index_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialChunks, "removed", lambda *_: None)
    found = violation("tails of a node")
    assert (names(found), found.settling) == (["store"], True)


def test_a_superseded_tail_that_is_evicted_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvictionQueue, "supersede", lambda *_: None)
    found = violation("tails of a node")
    stored = [("store", name) for name in ("o", "s", "l", "f")]
    assert found.actions == (("drop", "f"), *stored)


def test_a_tail_that_the_map_forgets_while_an_instance_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutMap, "_is_held", lambda *_: False)
    found = violation("tails of a map")
    assert names(found) == ["store", "report"]


def test_memory_that_grows_with_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialChunkMap, "_trim", lambda self: None)
    found = violation("tails of a map")
    assert names(found) == ["store", "report", "evict", "report"]
