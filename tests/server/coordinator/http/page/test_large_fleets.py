"""The page with many instances, on a wide and on a narrow screen."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from playwright.async_api import expect

from lmkv.tiers import HOST
from lmkv.v1.registry_service_pb2 import TierUsage
from tests.server.coordinator.cases import LLAMA_FLOAT
from tests.server.coordinator.http.page.visitor import GIB, NAMES, SIZES, Visitor, report
from tests.server.coordinator.scripted_instance import Make


@pytest.fixture
def lease_ttl() -> float:
    """Long: no instance sends heartbeats here."""
    return 900.0


@pytest.fixture(params=[60, 500])
async def names(request: pytest.FixtureRequest, make: Make) -> AsyncIterator[list[str]]:
    """Registered instances; the pool of each is fuller than that of the one before, which it has fetched from."""
    names = [f"engine-{number:03}" for number in range(request.param)]
    async with AsyncExitStack() as stack:
        for number, name in enumerate(names):
            instance = await stack.enter_async_context(make(name))
            used = GIB * number // len(names)
            instance.stats.traffic.add(instance_id=names[number - 1], chunk_count=1, transferred_bytes=1 << 20)
            await report(instance, tiers=[TierUsage(tier=HOST, capacity_bytes=GIB, used_bytes=used)])
            await instance.report_stats()
        yield names


@pytest.mark.timeout(600)
async def test_many_instances_are_sorted_filtered_and_opened(visitor: Visitor, names: list[str]) -> None:
    page = await visitor.open()
    await expect(page.locator(NAMES)).to_have_text(names)
    host = page.get_by_role("columnheader", name="host")
    await host.get_by_role("button").click()
    await host.get_by_role("button").click()
    await expect(host).to_have_attribute("aria-sort", "descending")
    await expect(page.locator(NAMES)).to_have_text(names[::-1])
    await page.fill("#instances-filter", "engine-05")
    found = [name for name in names if name.startswith("engine-05")]
    await expect(page.locator("#instances-count")).to_have_text(f"{len(found)} of {len(names)}")
    await expect(page.locator(NAMES)).to_have_text(found[::-1])
    await expect(page.locator(".edge")).to_have_count(0)
    await expect(page.locator(".label text").filter(has_text=re.compile(r"^\d+ others$"))).not_to_have_count(0)
    await page.locator(NAMES).first.click()
    await expect(page.get_by_role("dialog")).to_contain_text(found[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES[:2], ids=["wide", "narrow"])
async def test_many_instances_fit_the_screen(visitor: Visitor, names: list[str], size: dict[str, int]) -> None:
    page = await visitor.open(viewport=size)
    await expect(page.locator(NAMES)).to_have_count(len(names))
    await expect(page.locator(".label text").first).to_be_visible()
    assert await page.locator(".label text").first.evaluate(FONT_SIZE) >= 9
    assert await page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    last = page.locator(".instance").first.locator("td:visible").last
    padding = await last.evaluate("cell => getComputedStyle(cell).paddingRight")
    table = await page.locator(".instances .scroll").evaluate("box => box.getBoundingClientRect().height")
    row = await page.locator(".instance").nth(1).evaluate("row => row.getBoundingClientRect().height")
    assert size["height"] < 600 or table / row > 13, "a row of headings, and more than twelve instances"
    title = await page.locator(".instances > header").evaluate("header => getComputedStyle(header).paddingRight")
    assert padding == title


FONT_SIZE = "text => text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize)"
"""In pixels of the screen, of a text that is not turned."""


async def test_details_name_some_of_many_instances_that_cannot_share(visitor: Visitor, make: Make) -> None:
    async with AsyncExitStack() as stack:
        for instance in (make("odd", spec=LLAMA_FLOAT), *(make(f"node-{number}") for number in range(1, 13))):
            await stack.enter_async_context(instance)
        page = await visitor.open("#instance=odd")
        await expect(page.locator("#detail-conflicts li")).to_have_text(
            [
                "Shares no chunks of llama with node-1, node-2, node-3, node-4 and others: "
                "kv_dtype is float32 here, bfloat16 there"
            ]
        )
