"""Bytes that instances store at a coordinator: limits of one instance and of all."""

from __future__ import annotations

import pytest

from lmkv.errors import Full
from lmkv_server.coordinator.core.budget import RETRY_SECONDS, Budget


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
