"""Streams of reports, applied to the layout map: refused as documented, else as a plain model of the chunks says."""

from __future__ import annotations

from lmkv.errors import BadChunkKey, BadMessage, Full, InstanceNotFound, ResyncRequired, StaleEpoch
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest, TierDigest
from lmkv.keys import ChunkKey, digest, join_keys, split_keys
from lmkv.rpc.requests import checked
from lmkv.tiers import HOST
from lmkv_server.coordinator.core.layout_map import TIER_COUNT, tier_number
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.registry.registry import Registry, ReportStream
from lmkv_server.coordinator.services.registry import check_report, reported_pins, reported_stats, stats_message
from tests.fuzz.inputs import Input, calls
from tests.fuzz.promises import check_status
from tests.server.coordinator.cases import KEYS
from tests.support.specs import LLAMA

COVERS = (
    "lmkv_server.coordinator.registry.registry",
    "lmkv_server.coordinator.registry.registry",
    "lmkv_server.coordinator.core.layout_map",
    "lmkv_server.coordinator.core.layout_map",
    "lmkv_server.coordinator.services.registry",
)
MAX_REPORTS = 16
PROMISED = (InstanceNotFound, StaleEpoch, ResyncRequired, BadChunkKey, BadMessage, Full)
Held = dict[int, set[ChunkKey]]


def _report(sequence: int, *changes: ChunkChange, **fields: object) -> bytes:
    values = {"instance_id": "a", "epoch": 1, "sequence": sequence, "changes": changes} | fields
    return ReportRequest(**values).SerializeToString()  # type: ignore[arg-type]


def _change(admitted: list[ChunkKey], evicted: list[ChunkKey], tier: str = HOST, **fields: object) -> ChunkChange:
    return ChunkChange(
        tier=tier,
        fingerprint=LLAMA.fingerprint,
        admitted_keys=join_keys(admitted),
        evicted_keys=join_keys(evicted),
        **fields,  # type: ignore[arg-type]
    )


_PARTIAL = _change(KEYS, [], partial_token_counts={2: 8}, partial_parent_keys={2: KEYS[1]})
_DIGEST = TierDigest(tier=HOST, chunk_count=3, key_sum=digest(KEYS).key_sum)
SEEDS = [
    calls(
        (0, _report(1, _PARTIAL, snapshot=True, snapshot_end=True, digests=[_DIGEST])),
        (0, _report(2, _change([], KEYS[1:]))),
    ),
    calls((0, _report(1, _change(KEYS, []), snapshot=True)), (0, _report(2, snapshot=True, snapshot_end=True))),
    calls((0, _report(1, _PARTIAL, snapshot=True)), (1, b""), (0, _report(1, snapshot=True, snapshot_end=True))),
    calls((0, _report(1, snapshot_end=True, snapshot=True)), (0, _report(3))),
    calls((0, _report(1, reported_elsewhere=True))),
]


class _Model:
    """The chunks that the instance holds, by tier; those of a snapshot that is not complete are not visible."""

    def __init__(self) -> None:
        self.visible: Held = {}
        self.staged: Held | None = {}

    def apply(self, report: ReportRequest) -> None:
        held = self.visible if self.staged is None else self.staged
        for change in report.changes:
            tier = held.setdefault(tier_number(change.tier), set())
            tier |= set(split_keys(change.admitted_keys))
            tier -= set(split_keys(change.evicted_keys))
        if self.staged is not None and report.snapshot_end:
            self.visible, self.staged = self.staged, None


def run(data: bytes) -> None:
    """Number 0 is a report on the open stream; any other number opens a new stream first."""
    registry = Registry(lease_ttl=30, now=0)
    registry.register(InstanceInfo(instance_id="a", epoch=1, peer_address="host:1000", specs=(LLAMA,)), 0)
    stream = registry.open_stream("a", 1, 0)
    model, sequence, is_broken = _Model(), 0, False
    for number, message in Input(data).calls(MAX_REPORTS):
        if number:
            stream, sequence, is_broken = registry.open_stream("a", 1, 0), 0, False
            model.staged = {}
        if is_broken:
            continue
        try:
            report = checked(message, ReportRequest.FromString)
            check_report(report)
            is_new = report.sequence == sequence + 1
            stream.apply(report, 0)
        except PROMISED as error:
            check_status(error)
            is_broken = True
            stream.close()
            model.visible = _read(registry)  # applied in part, perhaps: the next snapshot replaces it
        else:
            if is_new:
                model.apply(report)
                sequence += 1
            _check_state(report)
        registry.check()
        _check(registry, model)
    _check_end(registry, stream)


def _read(registry: Registry) -> Held:
    """What the layout map holds."""
    held: Held = {}
    cursor = 0
    while True:
        cursor, parts = registry.layout.scan(cursor, 1 << 16)
        for _, tier, _, keys in parts:
            held.setdefault(tier, set()).update(split_keys(keys))
        if not cursor:
            return held


def _check(registry: Registry, model: _Model) -> None:
    for tier in range(1, TIER_COUNT + 1):
        assert registry.layout.digest("a", tier) == digest(model.visible.get(tier, set())), f"tier {tier}"
    tiers = range(1, TIER_COUNT + 1)
    for key in KEYS:
        found = [match.instance_id for match in registry.layout.lookup(key)]
        assert bool(found) == any(key in model.visible.get(tier, set()) for tier in tiers)


def _check_state(report: ReportRequest) -> None:
    """What else a report contains is read, and the statistics are written again as they were."""
    assert set(reported_pins(report.pins)) == {pin.pin_id for pin in report.pins.pins}
    stats = reported_stats(report.stats)
    again = reported_stats(stats_message(stats))
    assert again.traffic == stats.traffic
    assert not stats.load_count or abs(again.load_seconds - stats.load_seconds) <= 1e-6 * abs(stats.load_seconds) + 1e-9


def _check_end(registry: Registry, stream: ReportStream) -> None:
    """Nothing of the instance stays once it has left."""
    stream.close()
    registry.expire(1e9)
    while registry.layout.sweep(1 << 16):
        pass
    assert len(registry.layout) == 0
    registry.check()
