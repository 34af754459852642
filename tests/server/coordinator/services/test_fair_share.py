"""A tenant beyond its limits: its further calls are refused before they are worked on, and answered late."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.auth import authenticator, token_bucket
from lmkv.auth.caller import current_caller
from lmkv.auth.token_bucket import MIN_REFUSALS_PER_SECOND
from lmkv.errors import TooManyRequests
from lmkv.rpc.messages import by_keys
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupStreamRequest, WatchRequest
from lmkv_server.coordinator import coordinator
from lmkv_server.coordinator.http import app
from lmkv_server.coordinator.registry.selection import Selector
from tests.server.coordinator.cases import KEYS
from tests.server.coordinator.guarded import Guarded, guarded, token_of
from tests.support.tokens import Entry, entry
from tests.waiting import until

QUOTA = 5
EXCESS = 10
CLIENTS = 16
"""Tasks of a tenant that repeat a refused call at once."""
OTHER_LOOKUPS = 50
"""Lookups of another tenant in the meantime."""
DEADLINE_SECONDS = 60.0
SHORT_DEADLINE_SECONDS = 8.0
LOOKUP = LookupRequest(prompt=by_keys(KEYS))
HTTP_LOOKUP = "/lmkv.v1.CacheService/Lookup"


@asynccontextmanager
async def limited(folder: Path, *of_b: Entry) -> AsyncIterator[Guarded]:
    """A coordinator with a node of tenant a, which has no limits. `of_b`: the tokens of tenant b."""
    async with guarded(folder, [entry("engine", "a"), entry("reader", "a"), *of_b]) as fleet:
        await fleet.instance("a", "n1", KEYS)
        yield fleet


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    """Tenant b has a quota. The clock of quotas stands still: nothing is earned while the test runs."""
    monkeypatch.setattr(authenticator, "time", SimpleNamespace(monotonic=lambda: 100.0))
    async with limited(tmp_path, entry("reader", "b", max_requests_per_second=QUOTA)) as fleet:
        yield fleet


@pytest.fixture
async def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    """Tenant b may have one call in flight, and refusals are due in an hour."""
    monkeypatch.setattr(token_bucket, "MIN_REFUSALS_PER_SECOND", 1 / 3600)
    async with limited(tmp_path, entry("reader", "b", max_concurrent_requests=1)) as fleet:
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
    theirs = await fleet.cache(token_of("reader", "b"))
    flood = [asyncio.ensure_future(theirs.Lookup(LOOKUP, timeout=DEADLINE_SECONDS)) for _ in range(EXCESS * QUOTA)]
    await others_are_served(fleet, EXCESS)
    ends = await asyncio.gather(*flood, return_exceptions=True)
    assert count_refused(ends) == (EXCESS - 1) * QUOTA
    assert work == {"a": EXCESS, "b": QUOTA}, "refused calls are not worked on"


async def test_a_stream_gets_no_more_than_its_quota_either(fleet: Guarded, work: Counter[str]) -> None:
    theirs = await fleet.cache(token_of("reader", "b"))
    call = theirs.LookupStream(timeout=DEADLINE_SECONDS)
    await call.write(LookupStreamRequest(requests=[LOOKUP] * EXCESS * QUOTA))
    await call.done_writing()
    results = [result async for message in call for result in message.results]
    errors = [rpc.from_status(result.error) for result in results if result.HasField("error")]
    assert len(results) == EXCESS * QUOTA
    assert all(isinstance(error, TooManyRequests) for error in errors)
    assert len(results) - len(errors) == work["b"] == QUOTA - 1, "the stream itself counts as one"


async def test_clients_that_repeat_refused_calls_at_once_are_slowed_down(tmp_path: Path) -> None:
    async with limited(tmp_path, entry("reader", "b", max_requests_per_second=QUOTA)) as fleet:
        theirs = await fleet.cache(token_of("reader", "b"))
        ends: list[Any] = []

        async def repeat() -> None:
            while True:
                ends.extend(await asyncio.gather(theirs.Lookup(LOOKUP), return_exceptions=True))

        begin = time.monotonic()
        clients = [asyncio.create_task(repeat()) for _ in range(CLIENTS)]
        await until(lambda: count_refused(ends), "the quota is used up")
        await others_are_served(fleet)
        seconds = time.monotonic() - begin
        refused = count_refused(ends)
        await cancel(clients)
    assert refused <= MIN_REFUSALS_PER_SECOND * seconds + 1
    assert len(ends) - refused <= QUOTA * (seconds + 1) + 1


async def test_refusals_wait_while_other_calls_are_answered(busy: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "STOP_SECONDS", 3600.0)
    theirs = await busy.cache(token_of("reader", "b"))
    watch = theirs.Watch(WatchRequest())
    await watch.read()
    waiting = [asyncio.ensure_future(theirs.Lookup(LOOKUP)) for _ in range(CLIENTS)]
    await until(lambda: counted_refusals(busy) == CLIENTS, "all are refused")
    await others_are_served(busy)
    watch.cancel()
    await until_admitted(theirs)
    assert not any(call.done() for call in waiting), "the tenant's own admitted calls are served first, too"
    await busy.coordinator.aclose()  # for which it would wait, were refusals counted as calls in flight
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_refusal_arrives_before_the_deadline_of_its_call(busy: Guarded) -> None:
    theirs = await busy.cache(token_of("reader", "b"))
    watch = theirs.Watch(WatchRequest())
    await watch.read()
    ends = await asyncio.gather(theirs.Lookup(LOOKUP, timeout=SHORT_DEADLINE_SECONDS), return_exceptions=True)
    assert count_refused(ends) == 1
    watch.cancel()


async def test_a_stream_beyond_its_quota_is_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_bucket, "MIN_REFUSALS_PER_SECOND", 1 / 3600)
    async with limited(tmp_path, entry("reader", "b", max_requests_per_second=1)) as fleet:
        theirs = await fleet.cache(token_of("reader", "b"))
        call = theirs.LookupStream()
        await call.write(LookupStreamRequest(requests=[LOOKUP] * EXCESS * QUOTA))
        answer = asyncio.create_task(call.read())
        await others_are_served(fleet)
        assert not answer.done()
        call.cancel()
        await cancel([answer])


async def test_refused_requests_over_http_wait_too(busy: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    are_due = asyncio.Event()

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        await are_due.wait()

    monkeypatch.setattr(app, "asyncio", SimpleNamespace(sleep=sleep))
    theirs = await busy.cache(token_of("reader", "b"))
    watch = theirs.Watch(WatchRequest())
    await watch.read()
    async with busy.http(token_of("reader", "b")) as refused, busy.http(token_of("reader", "a")) as served:
        waiting = asyncio.create_task(refused.post(HTTP_LOOKUP, json={}, timeout=None))
        await until(lambda: delays, "the request is refused")
        assert (await served.post(HTTP_LOOKUP, json={})).status_code == 200
        assert not waiting.done()
        are_due.set()
        assert (await waiting).status_code == 429
    assert delays == [app.MAX_REFUSAL_DELAY_SECONDS]
    watch.cancel()


async def others_are_served(fleet: Guarded, count: int = OTHER_LOOKUPS) -> None:
    """Tenant a makes lookups, one after another, each of which finds its chunks."""
    ours = await fleet.cache(token_of("reader", "a"))
    for _ in range(count):
        answer = await ours.Lookup(LOOKUP, timeout=DEADLINE_SECONDS)
        assert answer.holders[0].matched_chunk_count == len(KEYS)


async def until_admitted(cache: Any) -> None:
    """Makes lookups with a short deadline until one is admitted."""
    ends: list[Any] = [None]

    async def admitted() -> bool:
        ends[:] = await asyncio.gather(cache.Lookup(LOOKUP, timeout=0.5), return_exceptions=True)
        return not isinstance(ends[0], BaseException)

    for _ in range(100):
        if await admitted():
            return
    raise AssertionError(f"not admitted: {ends[0]}")


def count_refused(ends: Iterable[Any]) -> int:
    """How many calls were refused. Fails if one has another error."""
    errors = [rpc.from_rpc_error(end) for end in ends if isinstance(end, grpc.RpcError)]
    assert all(isinstance(error, TooManyRequests) for error in errors), errors
    return len(errors)


def counted_refusals(fleet: Guarded) -> int:
    """Refused calls that the coordinator's metrics have counted."""
    samples = [sample for metric in fleet.coordinator.metrics.collect() for sample in metric.samples]
    refused = [sample for sample in samples if sample.labels.get("rpc_response_status_code") == "RESOURCE_EXHAUSTED"]
    return int(sum(sample.value for sample in refused if sample.name.endswith("_count")))


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Ends tasks, with whatever result."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
