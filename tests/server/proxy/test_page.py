"""The page at `/` and its files."""

from __future__ import annotations

import asyncio
import re

from playwright.async_api import Browser, expect
from prometheus_client.parser import text_string_to_metric_families

from lmkv_server.proxy.engine import DECODE, Engine
from lmkv_server.proxy.page import _engine
from tests.server.coordinator.http.page.conftest import browser
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import Front
from tests.server.proxy.pd.test_prefill_decode import COMPLETIONS, PLAIN, completion
from tests.server.proxy.scripted_engine import ScriptedEngine

__all__ = ["browser"]  # a fixture of the coordinator's page


async def test_it_shows_latencies_and_engines(front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine) -> None:
    assert "No request yet." in (await front.client.get("/")).text
    await front.ask(COMPLETIONS, completion(PLAIN, max_tokens=20, stream=True))
    page = (await front.client.get("/")).text
    rows = re.findall(r'<th scope="row">(.*?)</th><td>([\d.,]+)</td><td>([\d.,]+)</td><td>([\d.,]+)</td>', page)
    assert [name for name, *_ in rows] == ["Prefill", "Time to first token", "Inter-token latency", "Total"]
    assert all(float(value) > 0 for _, *values in rows[:2] for value in values)
    assert "2 of 2" in page
    for url in (prefiller.url, decoder.url):
        assert url in page


async def test_it_shows_that_an_engine_is_busy_or_unhealthy(front: Front, decoder: ScriptedEngine) -> None:
    decoder.going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, completion(PLAIN)))
    await until(lambda: decoder.waiting_count == 1)
    assert "1 in flight" in (await front.client.get("/")).text
    decoder.going.set()
    await asking
    await decoder.stop()
    await until(lambda: not front.proxy.pools.decode.engines[0].is_healthy)
    page = (await front.client.get("/")).text
    assert "1 of 2" in page
    assert "No engine available" in page


async def test_the_page_finds_all_it_is_made_of_and_nothing_elsewhere(front: Front) -> None:
    page = await front.client.get("/")
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"/static/page.css", "/static/theme.js", "/static/proxy.js", "/static/proxy.css"} <= set(parts)
    for part in parts:
        assert part.startswith("/")
        assert (await front.client.get(part)).status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "<script>" not in page.text


async def test_it_refreshes_itself(front: Front, decoder: ScriptedEngine, browser: Browser) -> None:
    page = await browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(front.proxy.url)
    await expect(page.get_by_text("No request yet.")).to_be_visible()
    await front.ask(COMPLETIONS, completion(PLAIN))
    await expect(page.get_by_role("rowheader", name="Time to first token")).to_be_visible()
    await decoder.stop()
    await expect(page.get_by_text("No engine available")).to_be_visible()
    assert complaints == []
    await front.proxy.aclose()
    await expect(page.get_by_text("The proxy does not answer")).to_be_visible()


def test_what_engines_say_is_shown_as_text() -> None:
    engine = Engine("http://e:1", DECODE)
    engine.mark_healthy()
    engine.instance_id = "<script>alert(1)</script>"
    assert "<script>" not in _engine(engine)


async def test_metrics_are_prometheus_text(front: Front) -> None:
    await front.ask(COMPLETIONS, completion(PLAIN))
    response = await front.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    healthy = families["lmkv_proxy_engine_healthy"]
    assert {sample.labels["role"]: sample.value for sample in healthy.samples} == {"prefill": 1.0, "decode": 1.0}
    assert families["lmkv_proxy_prefill_seconds"].samples[-2].value == 1


async def test_probes_are_answered(front: Front) -> None:
    for path in ("/health", "/healthz", "/readyz"):
        assert (await front.client.get(path)).json() == {"status": "ok"}
