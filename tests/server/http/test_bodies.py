"""Bodies of requests: their memory is taken before they are read, and those that are refused are not kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from lmkv.errors import TooManyRequests
from lmkv.runtime.memory_budget import (
    CALLER_FRACTION,
    MAX_JSON_OBJECTS,
    MAX_JSON_VALUES,
    Lease,
    MemoryBudget,
)
from lmkv_server.http.guard import COPIES, PART_BYTES, BodyTooLarge, read_body

PART = b"x" * PART_BYTES
MAX_BYTES = 16 * PART_BYTES
CAPACITY = 4 * CALLER_FRACTION * COPIES * MAX_BYTES


class Client:
    """A client that sends parts of a body, one whenever the server reads."""

    def __init__(self, budget: MemoryBudget, parts: Sequence[bytes], **headers: str) -> None:
        self._budget = budget
        self._left = list(parts)
        self.held_bytes: list[int] = []
        """What requests held of the budget whenever the server read."""
        fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.request = Request({"type": "http", "method": "POST", "headers": fields}, self._receive)

    @property
    def left_count(self) -> int:
        """Parts that the server has not read."""
        return len(self._left)

    async def _receive(self) -> dict[str, Any]:
        self.held_bytes.append(self._budget.held_bytes)
        if not self._left:
            return {"type": "http.disconnect"}
        part = self._left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._left)}


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(CAPACITY)


async def test_a_body_of_a_known_length_is_counted_whole_before_it_is_read(budget: MemoryBudget) -> None:
    client = Client(budget, [PART] * 4, content_length=str(4 * PART_BYTES))
    with Lease(budget, "one") as lease:
        assert (await read_body(client.request, lease, MAX_BYTES)).text == PART * 4
    assert client.held_bytes == [COPIES * 4 * PART_BYTES] * 4
    assert budget.held_bytes == 0


async def test_a_body_in_chunks_is_counted_ahead_of_each_part(budget: MemoryBudget) -> None:
    client = Client(budget, [PART] * 9, transfer_encoding="chunked")
    with Lease(budget, "one") as lease:
        assert (await read_body(client.request, lease, MAX_BYTES)).text == PART * 9
    for number, held in enumerate(client.held_bytes):
        assert held >= COPIES * (number + 1) * PART_BYTES, "the part that is about to be read, too"


async def test_no_body_takes_no_memory(budget: MemoryBudget) -> None:
    client = Client(budget, [b""])
    with Lease(budget, "one") as lease:
        assert (await read_body(client.request, lease, MAX_BYTES)).text == b""
    assert client.held_bytes == [0]


async def test_a_body_without_room_is_left_with_its_client_until_there_is_some(budget: MemoryBudget) -> None:
    others = budget.take("one", CAPACITY // CALLER_FRACTION)
    client = Client(budget, [PART], content_length=str(PART_BYTES))
    budget.take("one", budget.small_bytes)  # else it would be a small one
    with Lease(budget, "one") as lease:
        reading = asyncio.create_task(read_body(client.request, lease, MAX_BYTES))
        await asyncio.sleep(0)
        assert client.left_count == 1
        others.close()
        assert (await reading).text == PART


@pytest.mark.parametrize("headers", [{"content_length": str(MAX_BYTES + 1)}, {"transfer_encoding": "chunked"}])
async def test_what_is_too_large_is_discarded_and_holds_nothing(budget: MemoryBudget, headers: dict[str, str]) -> None:
    client = Client(budget, [PART] * 40, **headers)
    with Lease(budget, "one") as lease, pytest.raises(BodyTooLarge):
        await read_body(client.request, lease, MAX_BYTES)
    assert client.left_count == 0, "else the client would not read the answer"
    assert client.held_bytes[-1] == 0


async def test_a_body_in_chunks_without_room_is_discarded_and_holds_nothing(budget: MemoryBudget) -> None:
    with budget.take("one", CAPACITY // CALLER_FRACTION - COPIES * 2 * PART_BYTES):
        client = Client(budget, [PART] * 16, transfer_encoding="chunked")
        with Lease(budget, "one") as lease, pytest.raises(TooManyRequests):
            await read_body(client.request, lease, MAX_BYTES)
        assert client.left_count == 0
        assert client.held_bytes[-1] < client.held_bytes[0]


async def test_a_client_that_waits_before_it_sends_a_body_is_answered_at_once(budget: MemoryBudget) -> None:
    client = Client(budget, [PART] * 40, content_length=str(40 * PART_BYTES), expect="100-continue")
    with Lease(budget, "one") as lease, pytest.raises(BodyTooLarge):
        await read_body(client.request, lease, MAX_BYTES)
    assert client.left_count == 40


async def test_a_client_that_leaves_returns_what_it_held(budget: MemoryBudget) -> None:
    client = Client(budget, [], content_length=str(PART_BYTES))
    with Lease(budget, "one") as lease, pytest.raises(ClientDisconnect):
        await read_body(client.request, lease, MAX_BYTES)
    assert budget.held_bytes == 0


async def test_a_body_whose_values_take_long_to_decode_is_refused_and_a_text_of_such_characters_is_not() -> None:
    budget = MemoryBudget(1 << 40)
    for begin, end in ((b'"', b'"'), (b"[", b"1]")):
        whole = begin + b"{},1:[," * (MAX_JSON_OBJECTS // 2) + end
        parts = [whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES)]
        client = Client(budget, parts, content_length=str(len(whole)))
        with Lease(budget, "one") as lease:
            if begin == b'"':
                assert (await read_body(client.request, lease, len(whole))).text == whole
                continue
            with pytest.raises(BodyTooLarge, match=f"more than {MAX_JSON_VALUES} values"):
                await read_body(client.request, lease, len(whole))
    assert budget.held_bytes == 0


async def test_bodies_that_are_discarded_are_read_a_part_at_a_time_in_an_iteration_of_the_loop(
    budget: MemoryBudget,
) -> None:
    clients = [Client(budget, [PART] * 20, content_length=str(MAX_BYTES + 1)) for _ in range(8)]

    async def refused(client: Client) -> None:
        with Lease(budget, "one") as lease, pytest.raises(BodyTooLarge):
            await read_body(client.request, lease, MAX_BYTES)

    left = sum(client.left_count for client in clients)
    tasks = [asyncio.create_task(refused(client)) for client in clients]
    most = len(clients) + 1  # the first part of each is there
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        before, left = left, sum(client.left_count for client in clients)
        assert before - left <= most
        most = 1
    await asyncio.gather(*tasks)
    assert left == 0
