"""Streams of reports change the layout map as `ReportService.Report` says, and nothing stays lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import sha256

import pytest

from lmkv.errors import BadChunkKey, BadMessage, Full, InstanceNotFound, ResyncRequired, StaleEpoch
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest, TierDigest
from lmkv.keys import ChunkKey, digest, join_keys
from lmkv.tiers import HOST
from lmkv_kernels import ChunkTable
from lmkv_server.coordinator.core.instances import JoinAdmission
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.layout_store.layout_store import NoSharedStore
from lmkv_server.coordinator.layout_store.records import MARKER
from lmkv_server.coordinator.registry.registry import Registry, ReportStream
from tests.support.specs import make_spec

SPEC = make_spec(model_name="llama", model_id="llama@1", kv_dtype="bfloat16", head_size=64, chunk_size=256)
KEYS = [ChunkKey(sha256(bytes([i])).digest()[:16]) for i in range(8)]


def joined(registry: Registry, instance_id: str = "a", epoch: int = 1, now: float = 0) -> ReportStream:
    registry.register(InstanceInfo(instance_id=instance_id, epoch=epoch, peer_address="host:1000", specs=(SPEC,)), now)
    return registry.open_stream(instance_id, epoch, now)


def change(admitted: Sequence[ChunkKey] = (), evicted: Sequence[ChunkKey] = ()) -> ChunkChange:
    return ChunkChange(
        tier=HOST,
        fingerprint=SPEC.fingerprint,
        admitted_keys=join_keys(admitted),
        evicted_keys=join_keys(evicted),
    )


def snapshot(sequence: int = 1, *changes: ChunkChange, end: bool = True, epoch: int = 1) -> ReportRequest:
    return ReportRequest(
        instance_id="a", epoch=epoch, sequence=sequence, snapshot=True, snapshot_end=end, changes=changes
    )


def delta(sequence: int, *changes: ChunkChange, epoch: int = 1) -> ReportRequest:
    return ReportRequest(instance_id="a", epoch=epoch, sequence=sequence, changes=changes)


def held(registry: Registry) -> dict[str, int]:
    registry.check()
    return {match.instance_id: match.token_count for match in registry.layout.lookup(join_keys(KEYS))}


@pytest.fixture
def registry() -> Registry:
    return Registry(lease_ttl=3, now=-100)


def test_a_snapshot_in_parts_shows_at_its_end(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(1, change(KEYS[:2]), end=False), 0)
    stream.apply(snapshot(2, change(KEYS[2:3]), end=False), 0)
    assert held(registry) == {}
    assert registry.is_partial(0)
    stream.apply(snapshot(3), 0)
    assert held(registry) == {"a": 768}
    assert not registry.is_partial(0)


def test_changes_follow_the_snapshot(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(1, change(KEYS[:1])), 0)
    stream.apply(delta(2, change(KEYS[1:4])), 0)
    assert held(registry) == {"a": 1024}
    stream.apply(delta(3, change(evicted=KEYS[2:4])), 0)
    assert held(registry) == {"a": 512}
    assert stream.sequence == 3


def test_changes_apply_in_order_and_evictions_last(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(), 0)
    stream.apply(delta(2, change(KEYS[:2], KEYS[:2]), change(KEYS[:1])), 0)
    assert held(registry) == {"a": 256}


def test_partial_chunks_count_their_tokens(registry: Registry) -> None:
    stream = joined(registry)
    part = change(KEYS[:2])
    part.partial_token_counts[1] = 12
    stream.apply(snapshot(1, part), 0)
    assert held(registry) == {"a": 268}


@pytest.mark.parametrize("sequence", [0, 2, 5])
def test_a_stream_begins_with_sequence_1(registry: Registry, sequence: int) -> None:
    with pytest.raises(ResyncRequired):
        joined(registry).apply(snapshot(sequence), 0)


def test_a_gap_requires_a_resync(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(1, change(KEYS[:1])), 0)
    with pytest.raises(ResyncRequired) as caught:
        stream.apply(delta(3, change(KEYS[1:2])), 0)
    assert caught.value.metadata == {"expected_sequence": "2", "sequence": "3"}
    assert held(registry) == {"a": 256}


def test_a_repeated_report_is_not_applied_again(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(1, change(KEYS[:1])), 0)
    stream.apply(delta(2, change(evicted=KEYS[:1])), 0)
    stream.apply(snapshot(1, change(KEYS[:1])), 2)
    assert stream.sequence == 2
    assert held(registry) == {}
    assert registry.instances.get("a", 1).expire_time == 5


def test_a_stream_without_a_snapshot_requires_a_resync(registry: Registry) -> None:
    with pytest.raises(ResyncRequired):
        joined(registry).apply(delta(1, change(KEYS[:1])), 0)


def test_a_second_snapshot_needs_a_second_stream(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(), 0)
    with pytest.raises(ResyncRequired):
        stream.apply(snapshot(2), 0)


def test_a_new_stream_replaces_what_was_known_when_its_snapshot_ends(registry: Registry) -> None:
    joined(registry).apply(snapshot(1, change(KEYS[:4])), 0)
    stream = registry.open_stream("a", 1, 1)
    stream.apply(snapshot(1, change(KEYS[:1]), end=False), 1)
    assert held(registry) == {"a": 1024}
    assert registry.is_partial(1)
    stream.apply(snapshot(2), 1)
    assert held(registry) == {"a": 256}


def test_a_second_stream_supersedes_the_first(registry: Registry) -> None:
    first = joined(registry)
    first.apply(snapshot(1, change(KEYS[:1])), 0)
    second = registry.open_stream("a", 1, 0)
    with pytest.raises(ResyncRequired):
        first.apply(delta(2, change(KEYS[1:2])), 0)
    first.close()
    assert registry.instances.get("a", 1).stream is second
    second.apply(snapshot(1, change(KEYS[:3])), 0)
    assert held(registry) == {"a": 768}


def test_a_broken_stream_changes_nothing_until_the_lease_runs_out(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(1, change(KEYS[:2])), 0)
    stream.close()
    stream.close()
    assert registry.expire(2.9) == []
    assert held(registry) == {"a": 512}
    assert [instance.info.instance_id for instance in registry.expire(3)] == ["a"]
    assert held(registry) == {}


def test_every_report_renews_the_lease(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(), 1)
    stream.apply(delta(2), 2)
    assert registry.expire(4.9) == []
    assert len(registry.expire(5)) == 1


def test_an_expired_instance_must_register_again(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(), 0)
    registry.expire(3)
    with pytest.raises(InstanceNotFound):
        stream.apply(delta(2), 4)
    with pytest.raises(InstanceNotFound):
        registry.open_stream("a", 1, 4)


def test_a_new_epoch_forgets_what_the_old_one_held_and_fences_it(registry: Registry) -> None:
    old = joined(registry)
    old.apply(snapshot(1, change(KEYS[:2])), 0)
    other = registry.register(InstanceInfo(instance_id="b", epoch=1, peer_address="host:2000"), 0)
    new = joined(registry, epoch=2)
    assert held(registry) == {}
    with pytest.raises(StaleEpoch):
        old.apply(delta(2, change(KEYS[2:3])), 0)
    new.apply(snapshot(1, change(KEYS[:1]), epoch=2), 0)
    assert held(registry) == {"a": 256}
    assert registry.instances.get("b", 1) is other


def test_a_departure_forgets_everything_at_once(registry: Registry) -> None:
    joined(registry).apply(snapshot(1, change(KEYS[:2])), 0)
    registry.deregister("a", 1)
    assert held(registry) == {}
    assert not registry.is_partial(0)


def test_matching_digests_are_accepted_and_drift_requires_a_resync(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(1, change(KEYS[:4])), 0)
    known = digest(KEYS[1:4])
    report = delta(2, change(evicted=KEYS[:1]))
    report.digests.append(TierDigest(tier=HOST, chunk_count=known.chunk_count, key_sum=known.key_sum))
    stream.apply(report, 0)
    report = delta(3)
    report.digests.append(TierDigest(tier=HOST, chunk_count=known.chunk_count, key_sum=known.key_sum + 1))
    with pytest.raises(ResyncRequired) as caught:
        stream.apply(report, 0)
    assert caught.value.metadata["tier"] == "host"
    assert stream.sequence == 2


def test_bad_reports_are_refused(registry: Registry) -> None:
    for bad, kind in (
        (ChunkChange(tier=HOST, admitted_keys=b"15 bytes, not 16"[:15]), BadChunkKey),
        (ChunkChange(tier=HOST, evicted_keys=b"x"), BadChunkKey),
        (ChunkChange(admitted_keys=KEYS[0]), BadMessage),
        (ChunkChange(tier="cellar", admitted_keys=KEYS[0]), BadMessage),
        (ChunkChange(admitted_keys=KEYS[0]), BadMessage),
        (ChunkChange(tier=HOST, admitted_keys=KEYS[0], partial_token_counts={1: 12}), BadMessage),
        (ChunkChange(tier=HOST, admitted_keys=KEYS[0], partial_token_counts={0: -1}), BadMessage),
        (ChunkChange(tier=HOST, admitted_keys=KEYS[0], partial_token_counts={0: 1 << 20}), BadMessage),
        (ChunkChange(tier=HOST, admitted_keys=KEYS[0], fingerprint=b"short"), BadMessage),
    ):
        with pytest.raises(kind):
            joined(registry).apply(snapshot(1, bad), 0)
        registry.check()
    with pytest.raises(BadMessage):
        joined(registry).apply(ReportRequest(instance_id="b", epoch=1, sequence=1), 0)


def test_chunks_of_more_specs_than_there_is_room_for_are_refused(registry: Registry) -> None:
    stream = joined(registry)
    stream.apply(snapshot(), 0)
    for number in range(ChunkTable.MAX_SPECS + 1):
        key = sha256(number.to_bytes(4, "little")).digest()[:16]
        report = delta(2 + number, ChunkChange(tier=HOST, fingerprint=key, admitted_keys=key))
        if number < ChunkTable.MAX_SPECS:
            stream.apply(report, 0)
    with pytest.raises(Full):
        stream.apply(report, 0)
    registry.check()


def test_chunks_that_are_too_long_are_refused(registry: Registry) -> None:
    endless = dataclasses.replace(SPEC, chunk_size=1 << 20)
    registry.register(InstanceInfo(instance_id="a", epoch=1, peer_address="host:1000", specs=(endless,)), 0)
    part = ChunkChange(tier=HOST, fingerprint=endless.fingerprint, admitted_keys=KEYS[0])
    with pytest.raises(BadMessage):
        registry.open_stream("a", 1, 0).apply(snapshot(1, part), 0)


def test_answers_are_partial_while_the_coordinator_is_young() -> None:
    registry = Registry(lease_ttl=3, now=10)
    assert registry.is_partial(12.9)
    assert not registry.is_partial(13)


def test_the_lease_of_an_instance_that_has_to_wait_to_join_lasts_until_it_may_return() -> None:
    admission = JoinAdmission(limit=1)
    registry = Registry(lease_ttl=3, now=-100, admission=admission.of())
    joined(registry).apply(snapshot(1, change(KEYS[:1])), 0)
    registry.instances.get("a", 1).stream = None  # it has lost its stream, and returns among others
    joined(registry, "b", now=2.9)
    with pytest.raises(Full) as refused:
        joined(registry, now=2.9)
    back = 2.9 + refused.value.retry_seconds
    assert back > 2.9
    assert registry.expire(max(3.0, back)) == []
    assert held(registry) == {"a": 256}
    assert [one.info.instance_id for one in registry.expire(100.0)] == ["a", "b"]


def test_an_instance_that_reports_its_chunks_elsewhere_leaves_room_to_join() -> None:
    registry = Registry(lease_ttl=3, now=-100, admission=JoinAdmission(limit=1).of())
    joined(registry)
    with pytest.raises(Full):
        joined(registry, "b")
    registry.follow("a", 1, 0, NoSharedStore())
    joined(registry, "b")


def test_an_instance_that_reports_elsewhere_and_returns_is_synced_if_all_that_it_publishes_is_installed() -> None:
    """Else answers would be partial for good: nothing more is loaded."""
    registry = Registry(lease_ttl=3, now=-100)
    joined(registry)
    registry.follow("a", 1, 0, NoSharedStore())
    assert registry.is_partial(0)
    follower = registry.followers["a"]
    load = follower.begin_load()
    assert follower.set_term(load, (1, 1))
    follower.add_records(load, MARKER)
    follower.finish_scan(load, (1, 0))
    follower.advance((1, 0))
    assert not registry.is_partial(0)
    registry.instances.get("a", 1).stream = None
    registry.register(InstanceInfo(instance_id="a", epoch=1, peer_address="host:1000", specs=(SPEC,)), 1)
    assert registry.is_partial(1)
    registry.follow("a", 1, 1, NoSharedStore())
    assert not registry.is_partial(1)
