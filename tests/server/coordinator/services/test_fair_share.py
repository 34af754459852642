"""A tenant beyond its quota: its further calls are refused before they cost anything, and other tenants' are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.auth import authenticator
from lmkv.auth.caller import current_caller
from lmkv.errors import TooManyRequests
from lmkv.keys import join_keys
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupStreamRequest
from lmkv_server.coordinator.registry.selection import Selector
from tests.server.coordinator.cases import KEYS
from tests.server.coordinator.guarded import Guarded, guarded, token_of
from tests.support.tokens import entry

QUOTA = 5
EXCESS = 10
LOOKUP = LookupRequest(chunk_keys=join_keys(KEYS))


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    """Tenant b has a quota. The clock of quotas stands still: nothing is earned while the test runs."""
    monkeypatch.setattr(authenticator, "time", SimpleNamespace(monotonic=lambda: 100.0))
    entries = [entry("engine", "a"), entry("reader", "a"), entry("reader", "b", max_requests_per_second=QUOTA)]
    async with guarded(tmp_path, entries) as fleet:
        yield fleet


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Lookups that the coordinator has worked on, by tenant."""
    counts: Counter[str] = Counter()
    select = Selector.select

    async def counting(self: Selector, *arguments: Any, **options: Any) -> Any:
        counts[current_caller().tenant] += 1
        return await select(self, *arguments, **options)

    monkeypatch.setattr(Selector, "select", counting)
    return counts


async def test_ten_times_the_quota_costs_the_work_of_the_quota(fleet: Guarded, work: Counter[str]) -> None:
    await fleet.instance("a", "n1", KEYS)
    ours, theirs = [await fleet.cache(token_of("reader", tenant)) for tenant in ("a", "b")]
    flood = [asyncio.ensure_future(theirs.Lookup(LOOKUP, timeout=60)) for _ in range(EXCESS * QUOTA)]
    found = [await ours.Lookup(LOOKUP, timeout=60) for _ in range(EXCESS)]
    ends = await asyncio.gather(*flood, return_exceptions=True)
    refused = [end for end in ends if isinstance(end, grpc.RpcError)]
    assert all(isinstance(rpc.from_rpc_error(end), TooManyRequests) for end in refused)
    assert len(refused) == (EXCESS - 1) * QUOTA
    assert work == {"a": EXCESS, "b": QUOTA}, "refused calls are not worked on"
    assert all(answer.holders[0].matched_chunk_count == len(KEYS) for answer in found)


async def test_a_stream_gets_no_more_than_its_quota_either(fleet: Guarded, work: Counter[str]) -> None:
    theirs = await fleet.cache(token_of("reader", "b"))
    call = theirs.LookupStream(timeout=60)
    await call.write(LookupStreamRequest(requests=[LOOKUP] * EXCESS * QUOTA))
    await call.done_writing()
    results = [result async for message in call for result in message.results]
    errors = [rpc.from_status(result.error) for result in results if result.HasField("error")]
    assert len(results) == EXCESS * QUOTA
    assert all(isinstance(error, TooManyRequests) for error in errors)
    assert len(results) - len(errors) == work["b"] == QUOTA - 1, "the stream itself counts as one"
