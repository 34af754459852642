"""The page at `/` and its files."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import Browser, expect
from prometheus_client.parser import text_string_to_metric_families

from lmkv_server.proxy.engine import DECODE, Engine, PrefixHits
from lmkv_server.proxy.engine_routes import _engine
from lmkv_server.proxy.routing.health import prefix_hits
from tests.server.coordinator.http.page.conftest import browser
from tests.server.coordinator.http.page.test_accessibility import NAMELESS, UNREADABLE
from tests.server.coordinator.http.page.visitor import SIZES
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
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


async def test_it_shows_that_an_engine_is_busy_or_unhealthy(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    decoder.going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, completion(PLAIN)))
    await until(lambda: decoder.waiting_count == 1)
    assert re.search(f'{decoder.url}.*<td class="number">1</td></tr>', (await front.client.get("/")).text)
    decoder.going.set()
    await asking
    await decoder.stop()
    await until(lambda: not front.proxy.pools.decode.engines[0].is_healthy)
    page = (await front.client.get("/")).text
    assert "1 of 2" in page
    assert "No engine available" not in page, "the prefill engine serves requests alone"
    await prefiller.stop()
    await until(lambda: not front.proxy.pools.engines[0].is_healthy)
    assert "No engine available" in (await front.client.get("/")).text


async def test_the_page_finds_all_it_is_made_of_and_nothing_elsewhere(front: Front) -> None:
    page = await front.client.get("/")
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"/static/page.css", "/static/theme.js", "/static/proxy.js", "/static/proxy.css"} <= set(parts)
    for part in parts:
        assert part.startswith("/")
        assert (await front.client.get(part)).status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "<script>" not in page.text


async def test_it_refreshes_itself(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine, browser: Browser
) -> None:
    page = await browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(front.proxy.url)
    await expect(page.get_by_text("No request yet.")).to_be_visible()
    await front.ask(COMPLETIONS, completion(PLAIN))
    await expect(page.get_by_role("rowheader", name="Time to first token")).to_be_visible()
    await asyncio.gather(prefiller.stop(), decoder.stop())
    await expect(page.get_by_text("No engine available")).to_be_visible()
    assert complaints == []
    await front.proxy.aclose()
    await expect(page.get_by_text("The proxy does not answer")).to_be_visible()


def test_what_engines_say_is_shown_as_text() -> None:
    engine = Engine("http://e:1", DECODE)
    engine.mark_healthy()
    engine.instance_id = "<script>alert(1)</script>"
    assert "<script>" not in _engine(engine)


async def test_it_shows_hit_rate_ttft_load_and_health_of_each_engine(
    make_engine: MakeEngine, make_proxy: MakeProxy, browser: Browser
) -> None:
    engines = [await make_engine(), await make_engine()]
    engines[0].metrics = VLLM_METRICS
    front = await make_proxy(engines=engines, policy="round_robin")
    page = await browser.new_page(viewport={"width": 390, "height": 844})
    await page.goto(front.proxy.url)
    cells = page.locator("#engines tr").nth(0).locator("td:visible")
    await expect(cells).to_have_text(["healthy", "62 %", "–", "0"])
    await expect(cells.nth(1).locator("span")).to_have_attribute(
        "title", "40 % in its own prefix cache, 22 % loaded, of 2,000 tokens"
    )
    await expect(page.locator("#engines tr").nth(1).locator("td:visible").nth(1)).to_have_text("–")
    region = page.locator("div.engines")
    await region.focus()
    for _ in range(2):
        await front.ask(COMPLETIONS, completion(PLAIN, max_tokens=20, stream=True))
    await expect(cells.nth(2)).to_have_text(re.compile(r"^[\d.,]+$"))
    await expect(region).to_be_focused()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    await engines[1].stop()
    await expect(page.locator("#engines tr").nth(1).locator(".failure")).to_contain_text("cannot be reached")
    await engines[0].stop()
    await expect(cells.first).to_have_text("unhealthy")
    await expect(cells.nth(1)).to_have_text("–")  # not the rate it had
    await page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["wide", "narrow", "narrowest"])
async def test_it_fits_the_screen_and_can_be_read(
    make_engine: MakeEngine, make_proxy: MakeProxy, browser: Browser, size: Any, theme: Any
) -> None:
    engines = [await make_engine(f"lmkv-{number}") for number in range(4)]
    for engine in engines:
        engine.metrics = VLLM_METRICS
    front = await make_proxy(engines[:2], engines[2:])
    await front.ask(COMPLETIONS, completion(PLAIN, max_tokens=20, stream=True))
    await engines[3].stop()
    page = await browser.new_page(viewport=size, color_scheme=theme)
    await page.goto(front.proxy.url)
    await expect(page.locator(".failure")).to_contain_text("cannot be reached")
    assert await page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert await page.evaluate(CUT) == []
    assert await page.evaluate(UNREADABLE) == []
    assert await page.evaluate(NAMELESS) == []
    colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour))) > 600) == (theme == "light")
    await expect(page.get_by_text("proxy", exact=True)).to_be_visible()
    # An address is one line; the columns end where the titles of their panels do.
    box = await page.locator("#engines .address").first.bounding_box()
    assert box is not None
    assert box["height"] < 24
    edges = [
        await page.locator(place).first.evaluate("cell => getComputedStyle(cell).paddingRight")
        for place in (".engines thead th:last-child", ".latencies td:last-child", ".panel > header")
    ]
    assert len(set(edges)) == 1
    await page.close()


CUT = """() => [...document.querySelectorAll(".scroll, .figures > div, .top")]
    .filter(element => element.scrollWidth > element.clientWidth)
    .map(element => `${element.className}: ${element.scrollWidth} in ${element.clientWidth}`)"""
"""Parts of the page whose content is wider than they are."""


def test_hits_are_summed_over_engine_cores() -> None:
    assert prefix_hits(VLLM_METRICS.encode()) == PrefixHits(
        asked_tokens=2000, own_tokens=800, external_tokens=440, prefill_seconds=2.5
    )
    assert prefix_hits(b"vllm:num_requests_running 1\n") is None


def test_tokens_that_a_prefill_engine_has_computed_are_not_hits_of_the_decode_engine() -> None:
    lines = 'lmkv:tier_tokens_total{engine="0",model_name="m",tier="peers"} 40.0\n'
    lines += 'lmkv:tier_tokens_total{engine="0",model_name="m",tier="handoff"} 400.0\n'
    lines += 'lmkv:peer_seconds_total{engine="0",model_name="m"} 0.5\n'
    hits = prefix_hits((VLLM_METRICS + lines).encode())
    assert hits == PrefixHits(
        asked_tokens=1600,
        own_tokens=800,
        external_tokens=40,
        prefill_seconds=2.5,
        pulled_tokens=40,
        pull_seconds=0.5,
    )


VLLM_METRICS = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1500.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 8e+02
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 1200.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 440.0
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.79e+09
vllm:request_prefill_time_seconds_bucket{engine="0",le="1.0",model_name="m"} 3.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.0
vllm:request_prefill_time_seconds_sum{engine="1",model_name="m"} 0.5
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 3.0
"""
"""Of an engine with two cores."""


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
