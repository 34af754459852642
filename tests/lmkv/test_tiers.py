"""Tiers and positions as people write them."""

from __future__ import annotations

import pytest

from lmkv.errors import BadRequest
from lmkv.tiers import NAMES, format_position, parse_position, parse_tier, tier_name
from lmkv.v1.chunk_pb2 import TIER_DISK, TIER_GPU, TIER_HOST, TIER_REMOTE, Position, Tier


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("host", TIER_HOST),
        ("HOST", TIER_HOST),
        ("Disk", TIER_DISK),
        ("remote", TIER_REMOTE),
        ("gpu", TIER_GPU),
    ],
)
def test_a_tier_goes_by_its_name(text: str, tier: int) -> None:
    assert parse_tier(text) == tier


@pytest.mark.parametrize("text", ["", "cpu", "TIER_HOST", "LocalCPUBackend", "2", "host "])
def test_what_is_no_tier_is_refused_with_the_names_that_are(text: str) -> None:
    with pytest.raises(BadRequest, match=r"use gpu, host, disk, remote$"):
        parse_tier(text)


def test_every_tier_of_the_contract_has_a_name() -> None:
    assert set(NAMES) == set(Tier.values()) - {0}
    assert [tier_name(tier) for tier in (TIER_HOST, 9)] == ["host", "9"]


def test_a_position_is_an_instance_and_perhaps_a_tier() -> None:
    assert parse_position("lmkv-1") == Position(instance_id="lmkv-1", tier=TIER_HOST)
    assert parse_position("lmkv-1/disk") == Position(instance_id="lmkv-1", tier=TIER_DISK)
    assert format_position(Position(instance_id="lmkv-1")) == "lmkv-1/host"
    assert format_position(parse_position("a/remote")) == "a/remote"


@pytest.mark.parametrize("text", ["", "/host", "lmkv-1/", "lmkv-1/attic", "a/b/host"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_position(text)
