"""What a client gets that takes it, and that one which does not is not waited for."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message

from lmkv_server.proxy import reply
from lmkv_server.proxy.events import DONE
from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.reply import Reply
from lmkv_server.proxy.statistics import Statistics
from lmkv_server.proxy.upstream import Answer


async def test_an_error_in_a_stream_is_one_event_whatever_the_engine_wrote() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    told = Reply(send, Statistics(), Metrics([]))
    await told.event(b'data: {"choices":[{"index":0}]}\n\n')
    await told.refuse(Answer(status=400, body=b'{\n\n"error": {}\n}'))
    begin, first, error, done, end = sent
    assert (begin["status"], first["more_body"], done["body"], end) == (200, True, DONE, {**end, "body": b""})
    assert error["body"].count(b"\n\n") == 1
    assert json.loads(error["body"].removeprefix(b"data: ")) == {"error": {}}


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    monkeypatch.setattr(reply, "LAST_WORD_SECONDS", 0.01)
    is_stuck = asyncio.Event()

    async def send(_: Message) -> None:
        if is_stuck.is_set():
            await asyncio.get_running_loop().create_future()

    told = Reply(send, Statistics(), Metrics([]))
    if has_begun:
        await told.event(b"data: {}\n\n")
    is_stuck.set()
    await told.fail(504, "no answer")


async def test_times_are_counted_once_per_token_and_answer() -> None:
    async def send(_: Message) -> None: ...

    statistics = Statistics()
    told = Reply(send, statistics, Metrics([]))
    for data in (b'{"choices":[{"index":0}]}', b'{"choices":[{"index":0}]}', b'{"choices":[],"usage":{}}', b"[DONE]"):
        await told.event(b"data: " + data + b"\n\n")
    await told.end()
    assert statistics.request_count == 1
    assert set(statistics.summaries()) == {"TTFT", "ITL", "Total"}
