"""LMCache's paths with the shapes of its manual: the same answers that the RPCs give."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import pytest

from lmkv import tiers
from tests.server.coordinator import parted
from tests.server.coordinator.cases import CHUNKS, HYBRID, KEYS, PROMPT
from tests.server.coordinator.scripted_instance import Make
from tests.waiting import WAIT_SECONDS

HOST = "LocalCPUBackend"


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refusal(http: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, str]:
    response = await http.post(path, json=body)
    answer = response.json()
    assert answer["error"]["message"] == answer["detail"]
    return response.status_code, answer["detail"]


async def finished(http: httpx.AsyncClient, event_id: str) -> dict[str, Any]:
    """The answer of `/check_finish` once the operation is over."""
    await post(http, "/google.longrunning.Operations/WaitOperation", name=event_id)
    return await post(http, "/check_finish", event_id=event_id)


async def test_lookup_answers_nested_and_flat_at_once(http: httpx.AsyncClient, make: Make) -> None:
    async with make("lmcache_instance_1", CHUNKS), make("lmcache_instance_2", KEYS[:2]):
        answer = await post(http, "/lookup", tokens=PROMPT)
    event_id = answer.pop("event_id")
    layout = {"lmcache_instance_1": [HOST, 40], "lmcache_instance_2": [HOST, 32]}
    assert answer == {"layout_info": layout, **layout}
    assert list(answer["layout_info"]) == ["lmcache_instance_1", "lmcache_instance_2"]
    assert await post(http, "/check_finish", event_id=event_id) == {"status": "done"}


@pytest.mark.parametrize(
    ("tier", "location"),
    [
        (tiers.GPU, "GPU"),
        (tiers.HOST, HOST),
        (tiers.DISK, "LocalDiskBackend"),
        (tiers.REMOTE, "RemoteBackend"),
    ],
)
async def test_a_location_is_lmcaches_name_of_the_tier(
    http: httpx.AsyncClient, make: Make, tier: str, location: str
) -> None:
    async with make("a") as instance:
        await instance.store(CHUNKS, tier)
        await instance.report_stats()
        async with asyncio.timeout(WAIT_SECONDS):
            while "a" not in (answer := await post(http, "/lookup", tokens=PROMPT)):
                pass
        assert answer["a"] == [location, 40]


async def test_tokens_of_chunks_with_several_parts_count_once(http: httpx.AsyncClient, make: Make) -> None:
    prompt = {"tokens": parted.PROMPT}
    held = [*parted.items(4), *parted.items(2)]
    async with make("a", held, HYBRID), make("b", parted.items(4)[:-1], HYBRID), make("c", spec=HYBRID):
        assert (await post(http, "/lookup", **prompt))["layout_info"] == {"a": [HOST, 64]}
        assert (await post(http, "/pin", instance_id="a", location=HOST, **prompt))["num_tokens"] == 64
        moved = await post(http, "/move", old_position=["a", HOST], new_position=["c", HOST], copy=True, **prompt)
        assert moved["num_tokens"] == 64
        assert await finished(http, moved["event_id"]) == {"status": "done", "num_tokens": 64}
        assert (await post(http, "/clear", instance_id="c", location=HOST, **prompt))["num_tokens"] == 64


async def test_an_instance_cannot_take_the_place_of_another_field(http: httpx.AsyncClient, make: Make) -> None:
    async with make("event_id", CHUNKS), make("layout_info", CHUNKS):
        answer = await post(http, "/lookup", tokens=PROMPT)
    assert re.fullmatch(r"lookup-[0-9a-f]{32}", answer["event_id"])
    assert answer["layout_info"] == {"event_id": [HOST, 40], "layout_info": [HOST, 40]}


@pytest.mark.parametrize("tokens", [[], [7, 7, 7], PROMPT[1:]])
async def test_an_uncached_prompt_is_an_empty_answer(http: httpx.AsyncClient, make: Make, tokens: list[int]) -> None:
    async with make("a", CHUNKS):
        answer = await post(http, "/lookup", tokens=tokens)
    assert answer.keys() == {"event_id", "layout_info"}
    assert answer["layout_info"] == {}


async def test_suffix_holders_are_not_listed_and_gaps_end_the_match(http: httpx.AsyncClient, make: Make) -> None:
    async with make("suffix", KEYS[1:]), make("gap", [KEYS[0], KEYS[2]]):
        assert (await post(http, "/lookup", tokens=PROMPT))["layout_info"] == {"gap": [HOST, 16]}


@pytest.mark.parametrize(
    ("flags", "source_keeps"),
    [({}, False), ({"copy": False}, False), ({"copy": True}, True), ({"should_copy": True}, True),
     ({"copy": True, "should_copy": True}, True)],
)  # fmt: skip
async def test_move_says_how_much_moves_and_can_be_followed(
    http: httpx.AsyncClient, make: Make, flags: dict[str, bool], source_keeps: bool
) -> None:
    async with make("a", CHUNKS) as source, make("b") as destination:
        answer = await post(http, "/move", old_position=["a", HOST], new_position=["b", HOST], tokens=PROMPT, **flags)
        assert answer["num_tokens"] == 40
        assert await finished(http, answer["event_id"]) == {"status": "done", "num_tokens": 40}
        assert destination.chunks == CHUNKS
        assert source.chunks == (CHUNKS if source_keeps else {})
        layout = (await post(http, "/lookup", tokens=PROMPT))["layout_info"]
        assert layout == {"b": [HOST, 40], **({"a": [HOST, 40]} if source_keeps else {})}


async def test_a_move_is_running_until_it_is_over_and_may_be_cancelled(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a", CHUNKS), make("b") as destination:
        destination.going.clear()
        event_id = (await post(http, "/move", old_position=["a", HOST], new_position=["b", HOST], tokens=PROMPT))[
            "event_id"
        ]
        assert await post(http, "/check_finish", event_id=event_id) == {"status": "running", "num_tokens": 40}
        assert (await http.post("/google.longrunning.Operations/CancelOperation", json={"name": event_id})).json() == {}
        answer = await finished(http, event_id)
        assert answer["status"] == "cancelled"
        assert "cancelled" in answer["detail"]


async def test_a_move_that_does_nothing_failed_and_one_that_does_less_says_what_is_missing(
    http: httpx.AsyncClient, make: Make
) -> None:
    async with make("a", CHUNKS), make("b") as destination:
        move = {"old_position": ["a", HOST], "new_position": ["b", HOST], "tokens": PROMPT}
        destination.limit = 0
        answer = await finished(http, (await post(http, "/move", **move))["event_id"])
        assert answer == {"status": "failed", "detail": "full"}
        destination.limit = 2
        answer = await finished(http, (await post(http, "/move", **move))["event_id"])
        assert (answer["status"], answer["num_tokens"]) == ("done", 32)
        assert answer["failures"][0]["status"]["message"] == "full"


async def test_clear_says_how_much_was_forgotten(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a", CHUNKS) as one, make("b", CHUNKS) as other:
        answer = await post(http, "/clear", instance_id="a", location=HOST, tokens=PROMPT[:16])
        assert answer["num_tokens"] == 16
        assert await post(http, "/check_finish", event_id=answer["event_id"]) == {"status": "done", "num_tokens": 16}
        assert set(one.chunks) == set(KEYS[1:])
        assert (await post(http, "/clear", instance_id="a", location=HOST))["num_tokens"] == 24
        assert (one.chunks, other.chunks) == ({}, CHUNKS)


async def test_a_pin_keeps_chunks_until_unpin(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a", CHUNKS) as instance:
        answer = await post(http, "/pin", instance_id="a", location=HOST, tokens=PROMPT, ttl=60)
        assert answer["num_tokens"] == 40
        event_id = answer["event_id"]
        left = instance.pins[event_id].expire_time.ToSeconds() - time.time()
        assert 50 < left <= 60
        assert await post(http, "/check_finish", event_id=event_id) == {"status": "done"}
        cleared = await post(http, "/clear", instance_id="a", location=HOST, tokens=PROMPT)
        assert cleared["num_tokens"] == 0
        assert cleared["failures"]
        assert await post(http, "/unpin", event_id=event_id) == {"event_id": event_id}
        assert await post(http, "/unpin", pin_id=event_id) == {"event_id": event_id}
        assert instance.pins == {}
        assert (await refusal(http, "/check_finish", event_id=event_id))[0] == 404
        assert (await post(http, "/clear", instance_id="a", location=HOST, tokens=PROMPT))["num_tokens"] == 40


async def test_health_is_per_instance_and_an_unknown_one_is_404_with_the_known(
    http: httpx.AsyncClient, make: Make
) -> None:
    async with make("a"):
        answer = await post(http, "/health", instance_id="a")
        assert answer["error_codes"] == {"0": 0}
        code, detail = await refusal(http, "/health", instance_id="b")
        assert code == 404
        assert "registered are: a" in detail


async def test_instances_are_found_by_address_and_listed_as_workers(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a"), make("b"):
        found = await post(http, "/query_instance", event_id="mine", ip="127.0.0.1")
        assert found == {"event_id": "mine", "res": "a"}
        for ip in ("localhost", "::1", "[::1]", "127.0.0.2"):  # other names of the machine
            assert (await post(http, "/query_instance", event_id="mine", ip=ip))["res"] == "a"
        for ip in ("192.0.2.1", "0.0.0.0", "example.invalid"):  # nothing is bound
            assert (await refusal(http, "/query_instance", event_id="mine", ip=ip))[0] == 404
        infos = (await post(http, "/query_worker_info", instance_id="all"))["worker_infos"]
        assert [info["instance_id"] for info in infos] == ["a", "b"]
        (info,) = (await post(http, "/query_worker_info", instance_id="b"))["worker_infos"]
        now = time.time()
        assert now - 60 < info.pop("registration_time") <= info.pop("last_heartbeat_time") + 0.1 <= now + 0.2
        assert info == {
            "instance_id": "b",
            "worker_id": 0,
            "ip": "127.0.0.1",
            "port": 7000,
            "peer_init_url": "127.0.0.1:7000",
        }
        assert (await post(http, "/query_worker_info", instance_id="b", worker_ids=[1]))["worker_infos"] == []
        assert (await refusal(http, "/query_worker_info", instance_id="c"))[0] == 404


MOVE = {"old_position": ["a", HOST], "new_position": ["b", HOST], "tokens": PROMPT}


@pytest.mark.parametrize(
    ("path", "body", "code", "says"),
    [
        ("/lookup", {}, 400, "tokens"),
        ("/lookup", {"tokens": [1, -1]}, 400, "not '-1]'"),
        ("/lookup", {"tokens": [1 << 70]}, 400, "tokens"),
        ("/lookup", {"tokens": [1.5]}, 400, "tokens"),
        ("/lookup", {"tokens": "1"}, 400, "tokens"),
        ("/lookup", {"tokens": [True]}, 400, "tokens"),
        ("/lookup", {"tokens": [200_000]}, 400, "beyond the vocabulary"),
        ("/lookup", {"tokens": PROMPT, "model_name": "qwen"}, 404, "llama"),
        ("/lookup", {"tokens": PROMPT, "modle": "qwen"}, 400, "modle"),
        ("/move", {**MOVE, "old_position": ["c", HOST]}, 404, "'c' is not registered"),
        ("/move", {**MOVE, "old_position": ["a"]}, 400, "old_position"),
        ("/move", {**MOVE, "old_position": "a"}, 400, "old_position"),
        ("/move", {**MOVE, "new_position": ["b", "Cellar"]}, 400, "'Cellar' is no tier"),
        ("/move", {**MOVE, "new_position": ["b", "LocalDiskBackend"]}, 400, "disk"),
        ("/move", {**MOVE, "new_position": ["a", HOST]}, 400, "the same"),
        ("/move", {**MOVE, "copy": True, "should_copy": False}, 400, "contradict"),
        ("/move", {**MOVE, "should_cpy": True}, 400, "should_cpy"),
        ("/move", {**MOVE, "tokens": []}, 400, "no chunk is named"),
        ("/clear", {"location": HOST}, 400, "instance_id"),
        ("/clear", {"instance_id": "", "location": HOST}, 400, "instance_id"),
        ("/clear", {"instance_id": "c", "location": HOST}, 404, "'c' is not registered"),
        ("/pin", {"instance_id": "a", "location": HOST}, 400, "no chunk is named"),
        ("/pin", {"instance_id": "a", "location": HOST, "tokens": PROMPT, "ttl": -1}, 400, "ttl"),
        ("/pin", {"instance_id": "a", "location": HOST, "tokens": PROMPT, "ttl": 1e300}, 400, "ttl"),
        ("/pin", {"instance_id": "b", "location": HOST, "tokens": PROMPT}, 404, "held"),
        ("/unpin", {}, 400, "event_id"),
        ("/check_finish", {"event_id": "Move-1"}, 404, "Move-1"),
        ("/check_finish", {"event_id": "a/0123456789abcdef"}, 404, "no pin"),
        ("/check_finish", {"event_id": 7}, 400, "event_id"),
        ("/compress", {"instance_id": "a"}, 404, "/compress"),
    ],
)
async def test_what_cannot_be_done_is_4xx_with_the_reason(
    http: httpx.AsyncClient, make: Make, path: str, body: dict[str, Any], code: int, says: str
) -> None:
    async with make("a", CHUNKS), make("b"):
        actual, detail = await refusal(http, path, **body)
    assert (actual, says in detail) == (code, True), f"{actual}: {detail}"


async def test_a_misspelt_header_or_body_is_4xx_here_too(http: httpx.AsyncClient) -> None:
    assert (await http.post("/lookup", content=b'{"tokens":[1]}')).status_code == 415
    assert (await http.post("/lookup", json=[1])).status_code == 400
    assert (await http.post("/lookup", content=b"{", headers={"Content-Type": "application/json"})).status_code == 400
    assert (await http.get("/lookup")).status_code == 405


async def test_the_manuals_words_for_tiers_are_known(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a", CHUNKS), make("b"):
        for word in (HOST, "host", "HOST", "localcpubackend"):
            answer = await post(
                http, "/move", old_position=["a", word], new_position=["b", word], tokens=PROMPT, copy=True
            )
            assert (await finished(http, answer["event_id"]))["status"] == "done"
