"""The page of the HTTP API: Swagger UI under the coordinator's Content-Security-Policy, without any other server."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.server.coordinator.cases import PROMPT
from tests.server.coordinator.http.page.visitor import SIZES, Visitor


@pytest.mark.parametrize("viewport", SIZES[:2], ids=lambda size: str(size["width"]))
async def test_every_path_is_listed_and_can_be_tried(visitor: Visitor, viewport: dict[str, int]) -> None:
    page = await visitor.open("docs", viewport=viewport)
    description = await page.evaluate("fetch('/openapi.json').then((response) => response.json())")
    await expect(page.locator(".opblock")).to_have_count(sum(len(path) for path in description["paths"].values()))
    assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    lookup = page.locator(".opblock", has=page.locator("[data-path='/lookup']"))
    await lookup.locator(".opblock-summary-control").click()
    await expect(lookup.locator(".opblock-description, .opblock-section").first).to_be_visible()
    await lookup.get_by_role("button", name="Try it out").click()
    await lookup.locator("textarea").fill(f'{{"tokens": {PROMPT}}}')
    await lookup.get_by_role("button", name="Execute").click()
    await expect(lookup.locator(".live-responses-table tbody .response-col_status").first).to_contain_text("200")
    assert any(call.startswith("lookup {") for call in visitor.calls)
