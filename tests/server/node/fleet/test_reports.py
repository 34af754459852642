"""Reports say what changed, once per chunk, in messages of bounded size."""

from __future__ import annotations

from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, digest, split_keys
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.tiers import DISK, HOST
from lmkv.v1 import chunk_pb2
from lmkv_server.node.fleet.reports import MAX_KEYS_PER_REPORT, ChunkChanges, HeldChunk, outcome_reports

ONE, TWO = b"fingerprint one!", b"fingerprint two!"
SIZES = {ONE: 256, TWO: 64}


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "little"))


def test_only_the_last_state_of_a_chunk_is_reported() -> None:
    changes = ChunkChanges()
    changes.admitted(HeldChunk(HOST, ONE, key(1), 256))
    changes.evicted(HOST, ONE, key(1))
    changes.evicted(HOST, ONE, key(2))
    changes.admitted(HeldChunk(HOST, ONE, key(2), 256))
    (report,) = changes.reports(SIZES)
    (change,) = report.changes
    assert (change.tier, change.fingerprint) == (HOST, ONE)
    assert split_keys(change.admitted_keys) == [key(2)]
    assert split_keys(change.evicted_keys) == [key(1)]


def test_nothing_to_report_is_one_empty_report() -> None:
    changes = ChunkChanges()
    assert not changes
    (report,) = changes.reports(SIZES)
    assert not report.changes


def test_tiers_and_specs_are_distinguished() -> None:
    changes = ChunkChanges(
        [
            HeldChunk(tier=HOST, fingerprint=ONE, key=key(1), token_count=256),
            HeldChunk(tier=DISK, fingerprint=ONE, key=key(1), token_count=256),
            HeldChunk(tier=HOST, fingerprint=TWO, key=key(2), token_count=64),
        ]
    )
    (report,) = changes.reports(SIZES)
    places = [(change.tier, change.fingerprint, change.admitted_keys) for change in report.changes]
    assert places == [(HOST, ONE, key(1)), (DISK, ONE, key(1)), (HOST, TWO, key(2))]


def test_chunks_shorter_than_their_spec_are_marked_by_their_place_among_the_admitted() -> None:
    changes = ChunkChanges()
    changes.evicted(HOST, ONE, key(0))
    changes.admitted(HeldChunk(HOST, ONE, key(1), 256, key(9)))
    changes.admitted(HeldChunk(HOST, ONE, key(2), 12, key(1)))
    changes.admitted(HeldChunk(HOST, ONE, key(4), 13))
    changes.admitted(HeldChunk(HOST, TWO, key(3), 64))
    (report,) = changes.reports(SIZES)
    assert [dict(change.partial_token_counts) for change in report.changes] == [{1: 12, 2: 13}, {}]
    assert [dict(change.partial_parent_keys) for change in report.changes] == [{1: key(1)}, {}]
    (report,) = changes.reports({})
    assert not report.changes[0].partial_parent_keys, "of an unknown spec any chunk may be a full one"


def test_every_report_fits_into_a_message() -> None:
    count = 2 * MAX_KEYS_PER_REPORT + 1
    changes = ChunkChanges(
        HeldChunk(tier=HOST, fingerprint=ONE, key=key(i), token_count=100_000 + i, parent=key(0)) for i in range(count)
    )
    reports = list(changes.reports(SIZES))
    assert len(reports) == 3
    assert max(report.ByteSize() for report in reports) < MAX_MESSAGE_BYTES
    admitted = [k for report in reports for change in report.changes for k in split_keys(change.admitted_keys)]
    assert admitted == [key(i) for i in range(count)]


def test_beyond_its_limit_it_keeps_nothing() -> None:
    changes = ChunkChanges(limit=3)
    for number in range(3):
        changes.admitted(HeldChunk(HOST, ONE, key(number), 256))
        changes.evicted(HOST, ONE, key(number))
    assert not changes.overflowed
    changes.evicted(DISK, ONE, key(0))
    assert changes.overflowed
    changes.admitted(HeldChunk(HOST, ONE, key(9), 256))
    assert len(changes) == 0


def test_digests_of_prefixes_are_reported_with_their_chunk() -> None:
    changes = ChunkChanges()
    changes.admitted(HeldChunk(HOST, ONE, key(2), 12, key(1), b"digests"))
    changes.admitted(HeldChunk(HOST, ONE, key(1), 256))
    (report,) = changes.reports(SIZES)
    (change,) = report.changes
    assert split_keys(change.admitted_keys) == [key(2), key(1)]
    assert (dict(change.partial_parent_keys), dict(change.prefix_digests)) == ({0: key(1)}, {0: b"digests"})


def test_digests_cover_every_tier_that_is_asked_for() -> None:
    changes = ChunkChanges(HeldChunk(tier=HOST, fingerprint=ONE, key=key(i), token_count=256) for i in range(3))
    found = {part.tier: (part.chunk_count, part.key_sum) for part in changes.digests([HOST, DISK])}
    expected = digest([key(i) for i in range(3)])
    assert found == {HOST: (3, expected.key_sum), DISK: (0, 0)}


def test_outcomes_travel_in_order_in_reports_that_fit() -> None:
    counts = [0, 32_768, 10, 10_000, 10_000, 1]
    failures = [[chunk_pb2.ChunkFailure(chunk_keys=[bytes(16)] * count)] if count else [] for count in counts]
    outcomes = [pb.OrderOutcome(order_id=str(index), failures=failed) for index, failed in enumerate(failures)]
    reports = list(outcome_reports(outcomes))
    assert [outcome for report in reports for outcome in report.outcomes] == outcomes
    assert [len(report.outcomes) for report in reports] == [1, 1, 2, 2]
    assert max(report.ByteSize() for report in reports) < MAX_MESSAGE_BYTES
    assert list(outcome_reports([])) == []
