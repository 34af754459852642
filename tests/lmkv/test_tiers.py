"""Tiers and positions as people write them."""

from __future__ import annotations

import pytest

from lmkv.errors import BadRequest
from lmkv.tiers import DISK, HOST, format_position, parse_position
from lmkv.v1.chunk_pb2 import Position


def test_a_position_is_an_instance_and_perhaps_a_tier() -> None:
    assert parse_position("lmkv-1") == Position(instance_id="lmkv-1", tier=HOST)
    assert parse_position("lmkv-1/disk") == Position(instance_id="lmkv-1", tier=DISK)
    assert format_position(Position(instance_id="lmkv-1")) == "lmkv-1/host"
    assert format_position(parse_position("a/remote:cold")) == "a/remote:cold"


@pytest.mark.parametrize("text", ["", "/host", "lmkv-1/"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_position(text)
