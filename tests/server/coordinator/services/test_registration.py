"""What the coordinator keeps of registrations and reports."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.tiers import HOST
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.coordinator.core.instance_info import (
    InstanceInfo,
    ReportedPin,
    ReportedStats,
    ReportedTier,
    ReportedTraffic,
)
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.services.registration import reported_pins, reported_stats, set_state, stats_message


@pytest.mark.parametrize("seconds", [0, 1, 253_402_300_799, 1 << 62])
def test_any_time_that_a_node_reports_as_its_end_can_be_listed(seconds: int) -> None:
    instance = Instance(InstanceInfo(instance_id="a", epoch=1, peer_address=""), now=0, expire_time=3)
    usage = pb.TierUsage(tier=HOST)
    set_state(instance, report_pb.ReportRequest(tiers=[usage], end_time=Timestamp(seconds=seconds)))
    Timestamp().FromNanoseconds(instance.end_time_ns)
    set_state(instance, report_pb.ReportRequest(tiers=[usage]))
    assert instance.end_time_ns == 0, "an engine has attached"


def test_usage_and_statistics_are_kept_until_a_report_carries_others() -> None:
    instance = Instance(InstanceInfo(instance_id="a", epoch=1, peer_address=""), now=0, expire_time=3)
    report = report_pb.ReportRequest(tiers=[pb.TierUsage(tier=HOST, capacity_bytes=100, used_bytes=10)], engine_count=2)
    report.stats.CopyFrom(
        pb.InstanceStats(asked_chunks=5, traffic=[pb.PeerTraffic(instance_id="b", chunk_count=1, transferred_bytes=7)])
    )
    set_state(instance, report)
    set_state(instance, report_pb.ReportRequest())
    assert instance.engine_count == 2
    assert instance.tiers == (ReportedTier(tier=HOST, capacity_bytes=100, used_bytes=10),)
    traffic = (ReportedTraffic(instance_id="b", chunk_count=1, transferred_bytes=7),)
    assert instance.stats == ReportedStats(asked_chunks=5, traffic=traffic)


def test_every_number_of_the_statistics_is_kept() -> None:
    message = pb.InstanceStats(traffic=[pb.PeerTraffic(instance_id="b", chunk_count=1, transferred_bytes=7)])
    for number, field in enumerate(message.DESCRIPTOR.fields, 1):
        if field.message_type is None:
            setattr(message, field.name, number)
        elif field.message_type.name == "Duration":
            getattr(message, field.name).FromMilliseconds(1250 * number)
    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)
    assert stats_message(reported_stats(message)) == message


def test_pins_are_kept_by_their_ids() -> None:
    pins = report_pb.PinList()
    pin = pins.pins.add(pin_id="a/1", chunk_count=3, token_count=768)
    pin.position.tier = HOST
    pin.expire_time.FromNanoseconds(5)
    assert reported_pins(pins) == {
        "a/1": ReportedPin(pin_id="a/1", tier=HOST, chunk_count=3, token_count=768, expire_time_ns=5)
    }
