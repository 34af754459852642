"""Secrets, epochs and leases of registrations, and what errors about them contain."""

from __future__ import annotations

import dataclasses

import pytest

from lmkv.errors import InstanceIdInUse, InstanceNotFound, StaleEpoch
from lmkv_server.coordinator.core.instances import NO_ADDRESS, Instances
from lmkv_server.coordinator.core.models import MAX_SHOWN, InstanceInfo, ReportedStats


def info_of(instance_id: str = "a", epoch: int = 1, port: int = 1000) -> InstanceInfo:
    return InstanceInfo(instance_id=instance_id, epoch=epoch, peer_address=f"host:{port}")


def test_an_instance_begins_without_reports() -> None:
    instance = Instances(lease_ttl=3).register(info_of(), now=7)
    assert (instance.register_time, instance.expire_time) == (7, 10)
    assert instance.stream is None
    assert not instance.synced
    assert (instance.tiers, instance.pins, instance.engine_count) == ((), {}, 0)
    assert instance.stats == ReportedStats()
    assert instance.layout_map_id == ""


def test_an_id_belongs_to_the_secret_of_its_registration() -> None:
    instances = Instances(lease_ttl=3)
    living = instances.register(info_of(port=1000), now=0, secret=b"own")
    living.stream = object()
    for other in (b"", b"other"):
        with pytest.raises(InstanceIdInUse):
            instances.register(info_of(port=1000), now=3, secret=other)
        with pytest.raises(InstanceIdInUse):
            instances.check_secret("a", other)
        assert not living.has_secret(other)
    instances.check_secret("a", b"own")
    instances.check_secret("b", b"other")
    assert instances.register(info_of(port=2000), now=1, secret=b"own") is living, "its owner may move"
    instances.expire(4)
    assert instances.register(info_of(port=3000), now=4, secret=b"other").has_secret(b"other")


def test_an_instance_without_a_secret_has_the_empty_one() -> None:
    instance = Instances(lease_ttl=3).register(info_of(), now=0)
    assert instance.has_secret(b"")
    assert not instance.has_secret(b"any")


def test_an_older_epoch_is_admitted_once_the_lease_of_the_newer_one_has_expired() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of(epoch=2), now=0)
    with pytest.raises(StaleEpoch):
        instances.register(info_of(epoch=1), now=2.9)
    assert instances.register(info_of(epoch=1), now=3).info.epoch == 1


def test_a_restart_drops_what_the_older_epoch_reported() -> None:
    instances = Instances(lease_ttl=3)
    first = dataclasses.replace(info_of(epoch=1), size_bytes=100)
    instances.register(first, now=0)
    for number, item in enumerate(("tiers", "stats", "pins", "other")):
        instances.budget.charge("a", item, 1 << number)
    instances.register(dataclasses.replace(first, size_bytes=200), now=0)
    assert instances.budget.used_bytes == 200 + 1 + 2 + 4 + 8, "the same epoch keeps its reports"
    instances.register(dataclasses.replace(first, epoch=2, size_bytes=300), now=0)
    assert instances.budget.used_bytes == 300 + 8
    instances.deregister("a", 2)
    assert instances.budget.used_bytes == 0


def test_a_field_that_names_an_unknown_instance_is_refused_with_those_that_are_known() -> None:
    instances = Instances(lease_ttl=3)
    with pytest.raises(InstanceNotFound, match=r"^target: instance 'c' is not registered; registered are: none$"):
        instances.named("c", "target")
    registered = [instances.register(info_of(one), now=0) for one in ("b", "a")]
    assert instances.named("b", "target") is registered[0]
    with pytest.raises(InstanceNotFound, match=r"registered are: a, b$") as caught:
        instances.named("x" * (MAX_SHOWN + 1), "target")
    assert caught.value.metadata == {"instance_id": "x" * MAX_SHOWN}
    assert list(instances) == registered


def test_errors_name_the_epochs_and_the_address() -> None:
    instances = Instances(lease_ttl=3)
    with pytest.raises(InstanceNotFound, match=r"^instance 'a' of epoch 7 is not registered$") as missing:
        instances.get("a", 7)
    assert missing.value.metadata == {"instance_id": "a", "epoch": "7"}
    instances.register(dataclasses.replace(info_of(epoch=2), peer_address=""), now=0)
    with pytest.raises(StaleEpoch, match=r"^epoch 1 of instance 'a' is stale: epoch 2 registered from") as stale:
        instances.get("a", 1)
    assert NO_ADDRESS in str(stale.value)
    assert stale.value.metadata == {
        "instance_id": "a",
        "epoch": "1",
        "newer_epoch": "2",
        "peer_address": "",
        "lease_ttl": "3",
    }


@pytest.mark.parametrize(("address", "shown"), [("host:1000", "at host:1000;"), ("", f"at {NO_ADDRESS};")])
def test_an_id_in_use_is_refused_with_the_address_of_its_node(address: str, shown: str) -> None:
    instances = Instances(lease_ttl=3)
    instances.register(dataclasses.replace(info_of(), peer_address=address), now=0, secret=b"own")
    with pytest.raises(InstanceIdInUse) as refusal:
        instances.check_secret("a", b"other")
    assert shown in str(refusal.value)


def test_each_renewal_counts_from_its_own_time() -> None:
    instances = Instances(lease_ttl=3)
    for number, one in enumerate(("a", "b", "c")):
        instances.register(info_of(one), now=10 - number)
    assert instances.next_expiry() == 11
    instances.renew(instances.named("c", ""), now=20)
    assert instances.next_expiry() == 12
    assert [one.info.instance_id for one in instances.expire(13)] == ["a", "b"]
