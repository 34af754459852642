"""Engines join, drain and leave while the proxy serves: by HTTP, by a file, and by DNS."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv.config import ProxyConfig
from lmkv.errors import ConfigError
from lmkv_server.proxy import engines as engines_module
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.engine_routes import MAX_BODY_BYTES
from lmkv_server.proxy.proxy import Proxy
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine
from tests.support.tokens import entry, write

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 6, "temperature": 0}
CHANGES = 1_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESOLVE_SECONDS", "FILE_SECONDS", "DRAIN_POLL_SECONDS"):
        monkeypatch.setattr(engines_module, name, 0.01)


async def change(front: Front, action: str, engine: ScriptedEngine | str, **more: str) -> httpx.Response:
    url = engine if isinstance(engine, str) else engine.url
    return await front.ask(f"/engines/{action}", {"url": url, **more})


def states(front: Front) -> dict[str, str]:
    return {
        engine.url: "draining" if engine.is_draining else "healthy" if engine.is_healthy else "unhealthy"
        for engine in front.proxy.pools.engines
    }


async def only(front: Front, *engines: ScriptedEngine) -> None:
    """Waits until these are the engines, and all are healthy."""
    await until(lambda: states(front) == {engine.url: "healthy" for engine in engines})


async def completed(front: Front, count: int = 4) -> None:
    answers = await asyncio.gather(*(front.ask("/v1/completions", BODY) for _ in range(count)))
    assert [answer.status_code for answer in answers] == [200] * count


async def test_an_added_engine_serves_and_adding_is_idempotent(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    first, second = await make_engine("i-0"), await make_engine("i-1")
    front = await make_proxy(engines=[first], policy="round_robin")
    for _ in range(3):
        added = await change(front, "add", second)
        assert added.status_code == 200
        assert [engine["url"] for engine in added.json()["engines"]] == [first.url, second.url]
    await only(front, first, second)
    await completed(front)
    assert len(first.asked) == len(second.asked) == 2
    assert (await front.ask("/v1/models", {})).status_code == 405
    await front.counts("lmkv_proxy_engine_healthy", 2)
    (await front.client.get("/engines")).raise_for_status()


async def test_a_drained_engine_ends_its_streams_and_gets_no_new_request(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    first, second = await make_engine("i-0"), await make_engine("i-1")
    front = await make_proxy(engines=[first], policy="round_robin")
    whole = (await front.ask("/v1/completions", BODY)).json()["choices"][0]["text"]
    first.going.clear()
    first.hold_after = 2
    running = asyncio.create_task(front.ask("/v1/completions", BODY | {"stream": True}))
    await until(lambda: first.waiting_count == 1)
    await change(front, "add", second)
    await until(lambda: states(front)[second.url] == "healthy")
    assert (await change(front, "drain", first)).status_code == 200
    asked = len(first.asked)
    await completed(front, 8)
    assert states(front) == {first.url: "draining", second.url: "healthy"}
    page = (await front.client.get("/")).text
    assert "draining" in page
    assert len(first.asked) == asked, "no new request"
    first.going.set()
    answer = await running
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == whole
    await only(front, second)
    await front.counts("lmkv_proxy_engine_healthy", 1)
    assert front.metric("lmkv_proxy_retries_total") == 0


async def test_a_drain_ends_if_the_engine_is_added_again(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine])
    engine.going.clear()
    running = asyncio.create_task(front.ask("/v1/completions", BODY))
    await until(lambda: engine.waiting_count == 1)
    await change(front, "drain", engine)
    assert (await front.client.get("/readyz")).json()["detail"].endswith("it is draining")
    await change(front, "add", engine)
    assert states(front) == {engine.url: "healthy"}
    engine.going.set()
    assert (await running).status_code == 200
    await completed(front)


async def test_requests_of_a_removed_engine_are_repeated_elsewhere(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    first, second = await make_engine("i-0"), await make_engine("i-1")
    front = await make_proxy(engines=[first])
    first.going.clear()
    running = [asyncio.create_task(front.ask("/v1/completions", BODY)) for _ in range(3)]
    await until(lambda: first.waiting_count == 3)
    await change(front, "add", second)
    await until(lambda: states(front)[second.url] == "healthy")
    assert (await change(front, "remove", first)).status_code == 200
    assert states(front) == {second.url: "healthy"}
    assert [(await one).status_code for one in running] == [200] * 3
    assert len(second.asked) == 3
    await front.counts("lmkv_proxy_engine_requests_in_flight", 0)
    assert (await change(front, "remove", first)).status_code == 404
    assert (await change(front, "drain", "http://127.0.0.1:1")).status_code == 404
    await change(front, "remove", second)
    assert (await front.ask("/v1/completions", BODY)).status_code == 503
    assert (await front.client.get("/readyz")).json()["detail"] == "there is no engine"


async def test_a_decode_engine_removed_during_the_prefill_is_replaced(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    prefiller, first, second = await make_engine("p-0"), await make_engine("d-0"), await make_engine("d-1")
    front = await make_proxy([prefiller], [first])
    prefiller.going.clear()
    running = asyncio.create_task(front.ask("/v1/completions", BODY))
    await until(lambda: prefiller.waiting_count == 1)
    await change(front, "add", second, role="decode")
    await until(lambda: states(front)[second.url] == "healthy")
    await change(front, "remove", first)
    prefiller.going.set()
    assert (await running).status_code == 200
    assert len(second.asked) == 1
    assert not first.asked


async def test_a_prefill_engine_drains_until_its_handoff_is_claimed(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, front: Front
) -> None:
    decoder.going.clear()
    running = asyncio.create_task(front.ask("/v1/completions", BODY))
    await until(lambda: decoder.waiting_count == 1)
    (engine,) = [one for one in front.proxy.pools.engines if one.url == prefiller.url]
    assert engine.in_flight_count == 0
    await change(front, "drain", prefiller)
    assert states(front)[prefiller.url] == "draining", "the decode engine may still read from its node"
    decoder.going.set()
    assert (await running).status_code == 200
    await only(front, decoder)
    assert engine.handoff_count == 0
    assert (await front.ask("/v1/completions", BODY)).status_code == 200, "the decode engine serves alone"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"url": "http://127.0.0.1:1", "role": "both"}, 400, "must be decode or prefill"),
        ({"url": "http://127.0.0.1:1"}, 400, "must be decode or prefill"),
        ({"url": "ftp://127.0.0.1:1", "role": "decode"}, 400, "url must be"),
        ({"url": 7, "role": "decode"}, 400, "url must be"),
        ({"url": "http://no-such-host.invalid:1", "role": "decode"}, 400, "cannot be resolved"),
        ({"url": "http://127.0.0.1:1", "role": "decode", "more": 1}, 400, "url and role"),
        ([], 400, "url and role"),
        ({"url": "x" * MAX_BODY_BYTES}, 400, f"more than {MAX_BODY_BYTES} bytes"),
    ],
)
async def test_what_cannot_be_added_is_refused(front: Front, body: Any, status: int, reason: str) -> None:
    before = states(front)
    answer = await front.ask("/engines/add", body)
    assert (answer.status_code, reason in answer.text) == (status, True), answer.text
    assert states(front) == before


async def test_an_engine_keeps_its_role(prefiller: ScriptedEngine, front: Front) -> None:
    answer = await change(front, "add", prefiller, role="decode")
    assert answer.status_code == 409
    assert "is a prefill engine; remove it before" in answer.text


async def test_the_number_of_added_engines_is_bounded(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "MAX_ENGINES", 1)
    urls = [f"http://127.0.0.1:{port}" for port in (1, 1, 2)]
    added = [await change(front, "add", url, role="decode") for url in urls]
    assert [answer.status_code for answer in added] == [200, 200, 409]
    assert "1 engines were added; remove some" in added[-1].text


async def test_operators_change_engines_and_readers_list_them(
    make_engine: MakeEngine, make_proxy: MakeProxy, tmp_path: Path
) -> None:
    engine = await make_engine()
    path = write(tmp_path / "tokens.yaml", *(entry(role) for role in ("reader", "operator", "engine")))
    front = await make_proxy(engines=[engine], auth_tokens=path)
    expected = {"": (401, 401), "reader": (200, 403), "engine": (403, 403), "operator": (200, 200)}
    for role, (listed, changed) in expected.items():
        headers = {"Authorization": f"Bearer {role}-token"} if role else {}
        assert (await front.client.get("/engines", headers=headers)).status_code == listed
        body = {"url": engine.url}
        assert (await front.client.post("/engines/add", json=body, headers=headers)).status_code == changed


async def test_without_tokens_only_a_proxy_on_loopback_is_changed(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engine = await make_engine()
    front = await make_proxy(engines=[engine], host="0.0.0.0")  # refused for this
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.proxy.port}", trust_env=False) as client:
        for action in ("add", "drain", "remove"):
            answer = await client.post(f"/engines/{action}", json={"url": engine.url})
            assert answer.status_code == 403
            assert "set auth_tokens" in answer.text
    assert states(front) == {engine.url: "healthy"}


async def test_engines_follow_the_file_and_a_bad_file_changes_nothing(
    make_engine: MakeEngine, make_proxy: MakeProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [await make_engine(f"i-{number}") for number in range(3)]
    path = tmp_path / "engines.yaml"

    def listed(*chosen: ScriptedEngine) -> str:
        return "engines:\n" + "".join(f"- {engine.url}\n" for engine in chosen)

    path.write_text(listed(*engines[:1]))
    front = await make_proxy(engines=[], engines_file=str(path))
    await only(front, engines[0])
    replace(path, listed(*engines[:2]))
    await only(front, *engines[:2])
    bad = [
        "engines: [",
        "",
        "engines: 7",
        listed(engines[2], engines[2]),
        f"engines: [{{url: '{engines[2].url}', role: prefill}}]",
        "engines: [http://no-such-host.invalid:8000]",
        "engine: []",
    ]
    for number, text in enumerate(bad, 1):
        caplog.clear()
        replace(path, text)
        await front.counts("lmkv_proxy_engines_file_failures_total", number)
        await completed(front)
        assert states(front) == {engine.url: "healthy" for engine in engines[:2]}, text
        assert len([one for one in caplog.records if "keeping the" in one.getMessage()]) == 1, text
    replace(path, listed(*engines[1:]))
    await only(front, *engines[1:])
    replace(path, "engines: []")
    await until(lambda: not states(front))
    replace(path, listed(engines[0]))
    await only(front, engines[0])
    await change(front, "remove", engines[0])
    await until(lambda: not states(front))
    replace(path, listed(engines[1]))
    await only(front, engines[1])
    replace(path, listed(*engines[:2]))  # what was removed returns once it is listed again
    await only(front, *engines[:2])


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_a_file_gives_roles_and_an_engine_may_change_its_role(
    make_engine: MakeEngine, make_proxy: MakeProxy, tmp_path: Path
) -> None:
    first, second = await make_engine("i-0"), await make_engine("i-1")
    path = tmp_path / "engines.yaml"

    def text(*roles: str) -> str:
        listed = zip((first, second), roles, strict=True)
        return json.dumps({"engines": [{"url": engine.url, "role": role} for engine, role in listed]})

    path.write_text(text("prefill", "decode"))
    front = await make_proxy(engines_file=str(path))
    await completed(front)
    replace(path, text("decode", "prefill"))
    await until(
        lambda: (
            [(one.url, one.role, one.is_healthy) for one in front.proxy.pools.engines]
            == [(second.url, "prefill", True), (first.url, "decode", True)]
        )
    )
    await completed(front)


def test_a_bad_file_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    with pytest.raises(ConfigError, match="cannot read"):
        Proxy(ProxyConfig(engines_file=str(path)))
    path.write_text("engines: [http://a:1, http://a:1]")
    with pytest.raises(ConfigError, match=r"engine 2 of .*: http://a:1 is listed twice"):
        Proxy(ProxyConfig(mode="route", engines_file=str(path)))
    with pytest.raises(ConfigError, match="set one of them"):
        ProxyConfig(mode="route", engines_file=str(path), engines=("http://a:1",)).check_complete()


async def test_each_address_of_a_name_is_an_engine(
    make_engine: MakeEngine, make_proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [await make_engine(f"i-{number}") for number in range(3)]
    found = {engine.url for engine in engines[:2]}

    async def resolve(url: str) -> frozenset[str]:
        return frozenset(found) if url == "http://pods:8000" else await engines_module.resolve(url)

    monkeypatch.setattr(Proxy, "__init__", partialmethod(Proxy.__init__, resolve=resolve))
    front = await make_proxy(engines=["dns://pods:8000"])
    await only(front, *engines[:2])
    found -= {engines[0].url}
    found |= {engines[2].url}
    await only(front, *engines[1:])
    found.clear()  # DNS fails
    await completed(front)
    await only(front, *engines[1:])
    await change(front, "remove", engines[1])  # though DNS named it
    found |= {engine.url for engine in engines[1:]}
    await completed(front)
    await only(front, engines[2])
    await change(front, "drain", "dns://pods:8000")
    await until(lambda: not states(front))
    await change(front, "add", "dns://pods:8000")
    await only(front, *engines[1:])


async def test_nothing_is_left_of_many_engines(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    stays, leaves = await make_engine("i-0"), await make_engine("i-1")
    front = await make_proxy(engines=[stays], session_ttl=600.0)
    seen: list[weakref.ref[Engine]] = []
    tasks = len(asyncio.all_tasks())
    for number in range(CHANGES):
        url = leaves.url if number % 100 == 0 else f"http://127.0.0.1:{1 + number}"
        await change(front, "add", url)
        (engine,) = [one for one in front.proxy.pools.engines if one.url == url]
        seen.append(weakref.ref(engine))
        if url == leaves.url:
            await until(lambda: states(front)[leaves.url] == "healthy")
            await completed(front, 2)
        del engine
        await change(front, "drain" if number % 2 else "remove", url)
    await only(front, stays)

    def gone() -> bool:
        gc.collect()
        return not any(one() for one in seen) and len(asyncio.all_tasks()) <= tasks

    await until(gone)
    labels = {s.labels["engine"] for f in front.proxy.metrics.collect() for s in f.samples if "engine" in s.labels}
    assert labels == {stays.url}
