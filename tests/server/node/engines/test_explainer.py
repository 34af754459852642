"""What a node says of prompts and of requests when a coordinator asks why they missed."""

from __future__ import annotations

import asyncio

import pytest

from lmkv.errors import KvSpecMismatch
from lmkv.internal.v1.report_service_pb2 import ExplainOrder
from lmkv.keys import join_keys
from lmkv.misses import reason_name
from lmkv.prompt import Prompt
from lmkv.v1.chunk_pb2 import PromptExplanation, PromptSpan, RequestReport
from lmkv_server.node.engines.explainer import MAX_LISTED, MAX_REPORTS, MAX_RUNNING
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.node import Node
from tests.server.node.cases import hashed_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import SPEC, is_clean
from tests.waiting import until


async def explain(node: Node, *numbers: int, engine_request_id: str = "") -> PromptExplanation:
    order = ExplainOrder(
        fingerprint=SPEC.fingerprint, chunk_keys=join_keys(hashed_keys(*numbers)), engine_request_id=engine_request_id
    )
    return await node.service.explainer.explain(order)


def summary(found: PromptExplanation) -> list[tuple[str, int]]:
    return [(reason_name(span.reason) or span.tier, span.token_count) for span in found.spans]


async def test_the_spans_of_a_prompt_name_tiers_and_reasons(node: Node, engine: EngineClient) -> None:
    await engine.store(hashed_keys(0, 1, 2, 3))
    await engine.say(drop_damaged=hashed_keys(2))
    await until(lambda: len(node.tier) == 3)
    found = await explain(node, 0, 1, 2, 3, 4)
    size = SPEC.chunk_size
    assert summary(found) == [("host", 2 * size), ("damaged", size), ("behind_gap", 2 * size)]
    assert found.start_time.ToNanoseconds() == node.epoch
    assert summary(await explain(node, 7)) == [("never_stored", size)]
    assert is_clean(node), "nothing is held"


async def test_a_spec_of_no_engine_is_refused(node: Node) -> None:
    with pytest.raises(KvSpecMismatch):
        await explain(node, 0)


async def test_the_last_requests_are_kept_and_found_by_a_part_of_their_ids(node: Node, engine: EngineClient) -> None:
    names = [f"chat-{number}" for number in range(MAX_REPORTS + 1)]
    for start in range(0, len(names), 100):
        reports = [
            RequestReport(engine_request_id=name, spans=[PromptSpan(token_count=9)]) for name in names[start:][:100]
        ]
        await engine.say(report=reports)
    kept = node.service.explainer._reports
    await until(lambda: len(kept) == MAX_REPORTS and kept[-1].engine_request_id == names[-1])
    found = await explain(node, engine_request_id="chat-")
    assert [report.engine_request_id for report in found.requests] == names[: -MAX_LISTED - 1 : -1]
    assert [report.engine_request_id for report in (await explain(node, engine_request_id="at-77")).requests] == [
        *[f"chat-{number}" for number in range(779, 769, -1)],
        "chat-77",
    ]
    assert not (await explain(node, engine_request_id="chat-0")).requests, "it was the first"
    assert not (await explain(node, engine_request_id="other")).requests


async def test_reports_that_are_too_large_are_not_kept(node: Node, engine: EngineClient) -> None:
    await engine.say(report=[RequestReport(engine_request_id="large" * 1000), RequestReport(engine_request_id="small")])
    await until(lambda: len(node.service.explainer._reports) == 1)
    assert [report.engine_request_id for report in (await explain(node, engine_request_id="small")).requests] == [
        "small"
    ]


@pytest.mark.usefixtures("engine")
async def test_only_a_few_prompts_are_explained_at_a_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, tiers_answer = node.service.explainer._stack, asyncio.Event()
    find, asked = stack.find, 0

    async def late(prompt: Prompt) -> Found:
        nonlocal asked
        asked += 1
        await tiers_answer.wait()
        return await find(prompt)

    monkeypatch.setattr(stack, "find", late)
    running = [asyncio.create_task(explain(node, 0)) for _ in range(MAX_RUNNING)]
    await asyncio.sleep(0)
    of_another = asyncio.create_task(explain(node, 0))
    await until(lambda: node.service.explainer._slots.waiting_count == 1)
    assert asked == MAX_RUNNING
    tiers_answer.set()
    for found in await asyncio.gather(*running, of_another):
        assert summary(found) == [("never_stored", SPEC.chunk_size)]
