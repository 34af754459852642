"""Names that the system itself resolves, without a network."""

from __future__ import annotations

import pytest

from lmkv.errors import Unreachable
from lmkv.rpc.resolver import resolve


async def test_a_host_with_addresses_of_both_kinds_is_one_host() -> None:
    assert await resolve("localhost:9000") == ["127.0.0.1:9000"]


@pytest.mark.parametrize("address", ["10.0.0.5:9000", "[::1]:9000"])
async def test_an_address_stands_for_itself(address: str) -> None:
    assert await resolve(address) == [address]


async def test_an_unknown_name_is_said() -> None:
    with pytest.raises(Unreachable, match=r"the name unknown\.invalid "):
        await resolve("unknown.invalid:9000")
