"""`CacheService.Explain` over a socket: each instance is asked what it holds of a prompt, and why not more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from lmkv.errors import LmkvError
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import ExplainRequest, InstanceExplanation
from lmkv.v1.chunk_pb2 import (
    MISS_REASON_EVICTED_BY_STORE,
    MISS_REASON_NEVER_STORED,
    PromptSpan,
    RequestReport,
)
from lmkv_server.coordinator.operations import explanations
from tests.server.coordinator.cases import KEYS, PROMPT, QWEN, keys_of
from tests.server.coordinator.guarded import guarded, token_of
from tests.server.coordinator.scripted_instance import Make, until
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA


async def explain(cache: Any, **fields: Any) -> list[InstanceExplanation]:
    return list((await cache.Explain(ExplainRequest(**with_prompt(**fields)), timeout=60)).explanations)


async def refused(cache: Any, **fields: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await explain(cache, **fields)
    return from_rpc_error(caught.value)


def spans(found: InstanceExplanation) -> list[tuple[str, int, int]]:
    return [(span.tier, span.reason, span.token_count) for span in found.explanation.spans]


async def test_each_instance_says_what_it_holds_and_why_the_rest_is_missing(make: Make, cache: Any) -> None:
    async with make("b", KEYS[:1]) as b, make("a"):
        b.miss_reason = MISS_REASON_EVICTED_BY_STORE
        of_a, of_b = await explain(cache, tokens=PROMPT, model_name="llama")
    assert (of_a.instance_id, of_b.instance_id) == ("a", "b")
    assert spans(of_a) == [("", MISS_REASON_NEVER_STORED, len(PROMPT))]
    assert spans(of_b) == [("host", 0, 16), ("", MISS_REASON_EVICTED_BY_STORE, len(PROMPT) - 16)]
    assert of_b.fingerprint == LLAMA.fingerprint


async def test_one_instance_is_asked_alone_and_only_instances_of_the_model_are(make: Make, cache: Any) -> None:
    async with make("a", KEYS), make("b", KEYS), make("c", spec=QWEN):
        assert [one.instance_id for one in await explain(cache, tokens=PROMPT, model_name="llama")] == ["a", "b"]
        (found,) = await explain(cache, tokens=PROMPT, model_name="llama", instance_id="b")
        assert (found.instance_id, spans(found)) == ("b", [("host", 0, len(PROMPT))])
        error = await refused(cache, tokens=PROMPT, model_name="llama", instance_id="d")
        assert error.reason == "INSTANCE_NOT_FOUND"


async def test_the_salt_decides_which_chunks_are_meant(make: Make, cache: Any) -> None:
    async with make("a", keys_of(PROMPT, cache_salt="mine")):
        (mine,) = await explain(cache, tokens=PROMPT, cache_salt="mine")
        (other,) = await explain(cache, tokens=PROMPT, cache_salt="other")
    assert spans(mine) == [("host", 0, len(PROMPT))]
    assert spans(other) == [("", MISS_REASON_NEVER_STORED, len(PROMPT))]


async def test_keys_are_looked_for_under_each_spec_of_an_instance(make: Make, cache: Any) -> None:
    async with make("a", KEYS):
        (found,) = await explain(cache, chunk_keys=b"".join(KEYS))
    assert (found.fingerprint, spans(found)) == (LLAMA.fingerprint, [("host", 0, 16 * len(KEYS))])


async def test_requests_are_found_by_a_part_of_their_ids(make: Make, cache: Any) -> None:
    async with make("a") as a, make("b"):
        a.reports = [
            RequestReport(engine_request_id=name, spans=[PromptSpan(token_count=3)]) for name in ("cmpl-1", "chat-2")
        ]
        of_a, of_b = await explain(cache, engine_request_id="cmpl")
    assert [report.engine_request_id for report in of_a.explanation.requests] == ["cmpl-1"]
    assert not of_b.explanation.requests


async def test_instances_whose_answers_have_no_room_are_named(
    make: Make, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "ANSWER_BYTES", 1500)
    async with make("a") as a, make("b") as b:
        a.reports = b.reports = [RequestReport(engine_request_id="r" * 1000)]
        of_a, of_b = await explain(cache, engine_request_id="r")
    assert (len(of_a.explanation.requests), of_a.HasField("error")) == (1, False)
    assert (of_b.HasField("explanation"), from_status(of_b.error).reason) == (False, "FULL")


async def test_an_instance_that_does_not_answer_is_named_with_the_error(
    make: Make, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "EXPLAIN_SECONDS", 0.05)
    async with make("a", KEYS) as a, make("b", KEYS):
        a.going.clear()
        of_a, of_b = await explain(cache, tokens=PROMPT)
        assert of_a.HasField("error")
        assert "'a' did not report the outcome" in of_a.error.message
        assert spans(of_b) == [("host", 0, len(PROMPT))]
        a.going.set()


async def test_what_names_nothing_or_too_much_is_refused(
    make: Make, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make("a", KEYS):
        assert (await refused(cache)).reason == "BAD_SELECTION"
        monkeypatch.setattr(explanations, "MAX_KEYS", 2)
        assert (await refused(cache, tokens=PROMPT)).reason == "BAD_SELECTION"


async def test_an_instance_explains_a_few_prompts_at_a_time_and_callers_take_turns(tmp_path: Path) -> None:
    async with guarded(tmp_path) as fleet:
        instance = await fleet.instance("a", "n1", KEYS)
        hog, honest = [await fleet.cache(token_of(role, "a")) for role in ("reader", "operator")]
        instance.going.clear()
        many = ExplainRequest(prompt=by_tokens(PROMPT))
        flood = [asyncio.ensure_future(hog.Explain(many, timeout=60)) for _ in range(10)]
        await until(lambda: len(instance.orders) == explanations.MAX_ASKED_OF_INSTANCE)
        asked = asyncio.ensure_future(honest.Explain(ExplainRequest(prompt=by_tokens(PROMPT[:16])), timeout=60))
        (slots,) = fleet.coordinator.tenants.of("a").fleet_operations.explanations._slots.values()
        await until(lambda: slots.waiting_count == len(flood) + 1 - explanations.MAX_ASKED_OF_INSTANCE)
        assert len(instance.orders) == explanations.MAX_ASKED_OF_INSTANCE, "the others wait for these"
        instance.going.set()
        await asyncio.gather(asked, *flood)
        sizes = [len(order.explain.chunk_keys) for order in instance.orders]
        assert len(sizes) == 11
        assert sizes.index(min(sizes)) <= explanations.MAX_ASKED_OF_INSTANCE + 1
