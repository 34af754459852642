"""Responses to clients, also to clients that do not read."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message

from lmkv_server.proxy import response
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import DONE
from lmkv_server.proxy.response import ResponseWriter, TokenCounter
from lmkv_server.proxy.upstream.client import HttpResponse


async def test_an_error_in_a_stream_is_one_event() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    writer = ResponseWriter(send, ProxyMetrics([]))
    await writer.send_event(b'data: {"choices":[{"index":0}]}\n\n')
    await writer.fail_with(HttpResponse(status=400, body=b'{\n\n"error": {}\n}'))
    begin, first, error, done, end = sent
    assert (begin["status"], first["more_body"], done["body"], end) == (200, True, DONE, {**end, "body": b""})
    assert error["body"].count(b"\n\n") == 1
    assert json.loads(error["body"].removeprefix(b"data: ")) == {"error": {}}


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    monkeypatch.setattr(response, "ERROR_TIMEOUT_SECONDS", 0.01)
    is_stuck = asyncio.Event()

    async def send(_: Message) -> None:
        if is_stuck.is_set():
            await asyncio.get_running_loop().create_future()

    writer = ResponseWriter(send, ProxyMetrics([]))
    if has_begun:
        await writer.send_event(b"data: {}\n\n")
    is_stuck.set()
    await writer.fail(504, "no answer")


async def test_times_are_counted_once_per_token_and_answer() -> None:
    async def send(_: Message) -> None: ...

    metrics = ProxyMetrics([])
    statistics = metrics.latencies
    writer = ResponseWriter(send, metrics)
    for data in (b'{"choices":[{"index":0}]}', b'{"choices":[{"index":0}]}', b'{"choices":[],"usage":{}}', b"[DONE]"):
        await writer.send_event(b"data: " + data + b"\n\n")
    await writer.end_stream()
    assert statistics.request_count == 1
    assert set(statistics.summaries()) == {"TTFT", "ITL", "Total"}


def completion(text: str = "a", **more: object) -> dict[str, object]:
    """An event of a completion's stream."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def chat(**delta: object) -> dict[str, object]:
    """An event of a chat's stream."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


EVENTS: list[tuple[dict[str, object], int]] = [
    (completion(), 1),
    (completion(""), 1),  # its text ends within a character, or is a stop token
    (completion(token_ids=[1, 2, 3]), 3),
    (completion(token_ids=[]), 0),
    (chat(role="assistant", content=""), 0),
    (chat(role="assistant", content="", reasoning=None, tool_calls=[]), 0),
    (chat(role="assistant", content="a"), 1),
    (chat(content="a"), 1),
    (chat(reasoning="a"), 1),
    (chat(role="assistant", tool_calls=[{"index": 0}]), 1),
    ({"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}, 2),
    ({"choices": [], "usage": {"completion_tokens": 7}}, 0),
    ({"usage": {"completion_tokens": 7}}, 0),
    ({"error": {"message": "choices"}}, 0),
    ({"choices": "many"}, 0),
]


@pytest.mark.parametrize(("event", "count"), EVENTS)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\t", "  :  ")])
@pytest.mark.parametrize("is_turned", [False, True])
def test_tokens_are_counted_however_their_json_is_written(
    event: dict[str, object], count: int, separators: tuple[str, str], is_turned: bool
) -> None:
    fields = {"id": "cmpl-1", "object": "chunk"} | event
    if is_turned:
        fields = dict(reversed(fields.items()))
    data = json.dumps(fields, separators=separators).encode()
    assert TokenCounter().count(b"data: " + data + b"\n\n") == count


def test_tokens_are_what_the_engine_counts_where_it_does() -> None:
    tokens = TokenCounter()
    counts = [tokens.count(event({"usage": {"completion_tokens": total}} | completion())) for total in (1, 4, 4, 9)]
    assert counts == [1, 3, 0, 5]
    assert tokens.count(event({"usage": {"completion_tokens": 9}, "choices": []})) == 0
    assert tokens.count(event({"usage": None} | completion())) == 1
    assert tokens.count(event({"usage": {"completion_tokens": 1 << 60}} | completion())) == 1024


def event(content: dict[str, object]) -> bytes:
    """An event as engines send it."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@pytest.mark.parametrize(
    "data", [b"data: [DONE]\n\n", b': ping "choices"\n\n', b'data: {"choices\n\n', b'data: \xff"choices"\n\n']
)
def test_what_is_no_answer_carries_no_token(data: bytes) -> None:
    assert TokenCounter().count(data) == 0


async def test_tokens_that_leave_together_share_their_time() -> None:
    async def send(_: Message) -> None: ...

    metrics = ProxyMetrics([])
    statistics = metrics.latencies
    writer = ResponseWriter(send, metrics)
    for ids in ([1], [2, 3, 4, 5], [6]):
        await writer.send_event(event(completion(token_ids=ids)))
    assert statistics.request_count == 1
    assert len(statistics._kinds["ITL"]) == 5
