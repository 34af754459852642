"""Instances come, go, expire and conflict as `RegistryService` says."""

from __future__ import annotations

import dataclasses

import pytest

from lmkv.errors import Full, InstanceIdInUse, InstanceNotFound, ModelAmbiguous, ModelNotFound, StaleEpoch
from lmkv.spec import KvSpec
from lmkv_server.coordinator.core.instances import RETRY_SECONDS, Budget, Instances
from lmkv_server.coordinator.core.models import InstanceInfo, SpecConflict
from tests.support.specs import make_spec

LLAMA = make_spec(model_name="llama", model_id="llama@1", kv_dtype="bfloat16", head_size=64, chunk_size=256)
LLAMA_FLOAT = dataclasses.replace(LLAMA, kv_dtype="float32")
QWEN = dataclasses.replace(LLAMA, model_name="qwen", model_id="qwen@1")


def info_of(instance_id: str = "a", epoch: int = 1, port: int = 1000, *specs: KvSpec) -> InstanceInfo:
    return InstanceInfo(instance_id=instance_id, epoch=epoch, peer_address=f"host:{port}", specs=specs)


def test_an_instance_lives_as_long_as_its_lease() -> None:
    instances = Instances(lease_ttl=3)
    instance = instances.register(info_of(), now=10)
    assert instances.expire(12.9) == []
    instances.renew(instance, now=12)
    assert instances.next_expiry() == 15
    assert instances.expire(15) == [instance]
    assert instances.expire(15) == []
    assert len(instances) == 0
    assert instances.next_expiry() is None


def test_leases_can_be_postponed_together() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of("a"), now=0)
    instances.register(info_of("b"), now=1)
    instances.postpone(10)
    assert instances.expire(12.9) == []
    assert [instance.info.instance_id for instance in instances.expire(13)] == ["a"]


def test_registering_again_renews_and_takes_the_new_specs() -> None:
    instances = Instances(lease_ttl=3)
    first = instances.register(info_of("a", 1, 1000, LLAMA), now=0)
    again = instances.register(info_of("a", 1, 1000, QWEN), now=2)
    assert again is first
    assert first.expire_time == 5
    assert instances.models.specs() == [QWEN]
    instances.check()


def test_a_newer_epoch_replaces_an_older_one() -> None:
    instances = Instances(lease_ttl=3)
    old = instances.register(info_of(epoch=1), now=0)
    old.stream = object()
    new = instances.register(info_of(epoch=2), now=0)
    assert new is not old
    assert instances.get("a", 2) is new
    with pytest.raises(StaleEpoch):
        instances.get("a", 1)


def test_an_older_epoch_is_refused() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of(epoch=2), now=0)
    with pytest.raises(StaleEpoch) as caught:
        instances.register(info_of(epoch=1, port=2000), now=0)
    assert caught.value.metadata["newer_epoch"] == "2"
    assert caught.value.metadata["peer_address"] == "host:1000"
    with pytest.raises(StaleEpoch):
        instances.deregister("a", 1)
    assert len(instances) == 1


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_id_is_in_use_while_its_node_reports_from_another_address(epoch: int) -> None:
    instances = Instances(lease_ttl=3)
    living = instances.register(info_of(epoch=1, port=1000), now=0)
    living.stream = object()
    with pytest.raises(InstanceIdInUse) as caught:
        instances.register(info_of(epoch=epoch, port=2000), now=1)
    assert caught.value.metadata == {
        "instance_id": "a",
        "peer_address": "host:1000",
        "epoch": "1",
        "lease_ttl": "3",
    }
    assert instances.get("a", 1) is living


def test_an_id_can_be_taken_over_once_the_stream_is_gone() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of(epoch=1, port=1000), now=0)
    assert instances.register(info_of(epoch=2, port=2000), now=1).info.peer_address == "host:2000"


def test_an_id_can_be_taken_over_once_the_lease_has_run_out() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of(epoch=1, port=1000), now=0).stream = object()
    assert instances.register(info_of(epoch=2, port=2000), now=3).info.epoch == 2


def test_who_is_not_registered_is_not_found() -> None:
    instances = Instances(lease_ttl=3)
    with pytest.raises(InstanceNotFound):
        instances.get("a", 1)
    instances.register(info_of(epoch=1), now=0)
    with pytest.raises(InstanceNotFound):
        instances.get("a", 2)
    instances.deregister("a", 1)
    with pytest.raises(InstanceNotFound):
        instances.deregister("a", 1)


def test_an_expired_epoch_is_forgotten_and_may_come_again() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of(epoch=5), now=0)
    instances.expire(3)
    assert instances.register(info_of(epoch=1), now=4).info.epoch == 1


def test_fifty_instances_that_all_leave_leave_nothing() -> None:
    instances = Instances(lease_ttl=3)
    for number in range(50):
        instances.register(info_of(f"instance-{number}", 1, 1000, LLAMA, QWEN), now=0)
    for number in reversed(range(50)):
        instances.deregister(f"instance-{number}", 1)
        instances.check()
    assert len(instances) == 0
    assert instances.models.specs() == []


def test_instances_of_one_model_that_cannot_share_say_why() -> None:
    instances = Instances(lease_ttl=3)
    a = instances.register(info_of("a", 1, 1000, LLAMA, QWEN), now=0)
    b = instances.register(info_of("b", 1, 2000, LLAMA_FLOAT), now=0)
    c = instances.register(info_of("c", 1, 3000, QWEN), now=0)
    assert instances.models.conflicts(a.info, 10) == [
        SpecConflict(instance_id="b", model_name="llama", field="kv_dtype", own_value="bfloat16", other_value="float32")
    ]
    assert instances.models.conflicts(b.info, 10) == [
        SpecConflict(instance_id="a", model_name="llama", field="kv_dtype", own_value="float32", other_value="bfloat16")
    ]
    assert instances.models.conflicts(c.info, 10) == []
    instances.deregister("b", 1)
    assert instances.models.conflicts(a.info, 10) == []


def test_a_divided_fleet_names_a_few_of_the_others() -> None:
    instances = Instances(lease_ttl=3)
    a = instances.register(info_of("a", 1, 1000, LLAMA), now=0)
    for number in range(9, 0, -1):
        instances.register(info_of(f"b-{number}", 1, 2000, LLAMA_FLOAT), now=0)
    assert [conflict.instance_id for conflict in instances.models.conflicts(a.info, 3)] == ["b-1", "b-2", "b-3"]


def test_instances_that_share_one_of_several_specs_do_not_conflict() -> None:
    instances = Instances(lease_ttl=3)
    a = instances.register(info_of("a", 1, 1000, LLAMA), now=0)
    b = instances.register(info_of("b", 1, 2000, LLAMA_FLOAT, LLAMA), now=0)
    assert instances.models.conflicts(a.info, 10) == []
    assert instances.models.conflicts(b.info, 10) == []


def test_a_model_is_known_while_an_engine_serves_it() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of("a", 1, 1000, LLAMA), now=0)
    instances.register(info_of("b", 1, 2000, LLAMA), now=0)
    assert instances.models.specs() == [LLAMA]
    assert instances.models.specs("llama") == [LLAMA]
    instances.deregister("a", 1)
    assert instances.models.specs("llama") == [LLAMA]
    instances.deregister("b", 1)
    assert instances.models.specs() == []
    with pytest.raises(ModelNotFound):
        instances.models.specs("llama")


def test_several_specs_need_a_name() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of("a", 1, 1000, LLAMA), now=0)
    instances.register(info_of("b", 1, 2000, QWEN), now=0)
    with pytest.raises(ModelAmbiguous) as caught:
        instances.models.specs()
    assert caught.value.metadata == {"known_models": "llama, qwen"}
    assert instances.models.specs("qwen") == [QWEN]
    with pytest.raises(ModelNotFound) as missing:
        instances.models.specs("mistral")
    assert missing.value.metadata == {"model_name": "mistral", "known_models": "llama, qwen"}


def test_one_spec_under_two_names_is_not_ambiguous() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of("a", 1, 1000, LLAMA), now=0)
    instances.register(info_of("b", 1, 2000, dataclasses.replace(LLAMA, model_name="alias")), now=0)
    assert [spec.fingerprint for spec in instances.models.specs()] == [LLAMA.fingerprint]
    assert [spec.fingerprint for spec in instances.models.specs("alias")] == [LLAMA.fingerprint]


def test_one_name_for_two_specs_gives_both() -> None:
    instances = Instances(lease_ttl=3)
    instances.register(info_of("a", 1, 1000, LLAMA), now=0)
    instances.register(info_of("b", 1, 2000, LLAMA_FLOAT), now=0)
    assert instances.models.specs("llama") == [LLAMA, LLAMA_FLOAT]


def test_a_chunk_size_is_that_of_the_spec_else_of_the_first() -> None:
    other = dataclasses.replace(LLAMA, chunk_size=64)
    instance = Instances(lease_ttl=3).register(info_of("a", 1, 1000, LLAMA, other), now=0)
    assert instance.chunk_size(other.fingerprint) == 64
    assert instance.chunk_size(b"unheard of") == 256
    assert Instances(lease_ttl=3).register(info_of(), now=0).chunk_size(b"") == 0


def test_a_refusal_contains_the_item_its_limit_and_a_delay() -> None:
    budget = Budget(owner_bytes=10, total_bytes=15)
    with pytest.raises(Full, match=r"^pins of 11 bytes: the limit of one instance is 10 bytes") as caught:
        budget.charge("a", "pins", 11)
    assert caught.value.metadata == {"field": "pins", "limit": "10", "retry_seconds": str(RETRY_SECONDS)}
    budget.charge("a", "pins", 10)
    with pytest.raises(Full, match=r"^stats of 6 bytes: the limit of all instances is 15 bytes") as caught:
        budget.charge("b", "stats", 6)
    assert caught.value.metadata == {"field": "stats", "limit": "15", "retry_seconds": str(RETRY_SECONDS)}
    assert list(budget.items("b")) == []


def test_limits_are_inclusive() -> None:
    budget = Budget(owner_bytes=10, total_bytes=15)
    assert budget.fits("a", "pins", 10)
    assert not budget.fits("a", "pins", 11)
    budget.charge("a", "pins", 10)
    assert budget.fits("b", "pins", 5)
    assert not budget.fits("b", "pins", 6)
    assert budget.owner_fits("b", "pins", 6)


def test_an_item_may_grow_by_what_is_left() -> None:
    budget = Budget(owner_bytes=10, total_bytes=15)
    budget.charge("a", "pins", 4)
    budget.charge("a", "stats", 4)
    assert budget.fits("a", "pins", 6)
    assert not budget.fits("a", "pins", 7)


def test_the_coordinator_is_limited_by_the_total_only() -> None:
    budget = Budget(owner_bytes=10, total_bytes=15)
    budget.charge("", "operations", 15)
    assert not budget.fits("", "operations", 16)
    with pytest.raises(Full, match="all instances"):
        budget.charge("", "operations", 16)


def test_a_size_is_set_also_beyond_the_limits() -> None:
    budget = Budget(owner_bytes=10, total_bytes=15)
    budget.set("a", "pins", 20)
    assert budget.used_bytes == 20
    budget.set("a", "pins", 1)
    assert budget.used_bytes == 1
    budget.check()


def test_items_are_removed_one_by_one_or_with_their_owner() -> None:
    budget = Budget(owner_bytes=10, total_bytes=15)
    for item in ("tiers", "stats", "pins"):
        budget.charge("a", item, 3)
    assert list(budget.items("a")) == ["tiers", "stats", "pins"]
    budget.drop("a", "stats")
    budget.drop("a", "stats")
    budget.drop("b", "stats")
    assert budget.used_bytes == 6
    budget.check()
    assert budget.fits("a", "stats", 4)
    assert not budget.fits("a", "stats", 5)
    budget.drop_owner("a")
    assert budget.used_bytes == 0
    assert list(budget.items("a")) == []
    budget.check()
