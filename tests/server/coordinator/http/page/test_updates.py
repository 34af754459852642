"""How the page follows the coordinator."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import expect

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import ClearRequest
from lmkv.v1.registry_service_pb2 import TierUsage
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import CHUNKS, KEYS
from tests.server.coordinator.http.page.visitor import GIB, NAMES, Visitor, look_up, report, rounds, start_copy
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance
from tests.support.specs import LLAMA


async def test_the_page_recovers_when_the_coordinator_comes_back(
    visitor: Visitor, coordinator: Coordinator, make: Make
) -> None:
    visitor.forgiven += ["net::ERR_", "status of 503"]  # it refuses requests while it ends
    async with make("a", CHUNKS):
        page = await visitor.open()
        await expect(page.locator(NAMES)).to_have_text(["a"])
        await look_up(page)
        await expect(page.locator(".holder")).to_have_count(1)
        port = coordinator.http_ports["http_port"]
        await coordinator.aclose()
        await expect(page.locator("#state")).to_have_text("Connection lost")
        await expect(page.locator("#lost")).to_contain_text("The coordinator does not answer.")
        await expect(page.locator(NAMES)).to_have_text(["a"])
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=port, cluster_secret="hush")) as successor,
        rpc.open_channel(successor.address) as channel,
        ScriptedInstance(channel, {}, "restarted", LLAMA, CHUNKS),
    ):
        await expect(page.locator("#state")).to_have_text(re.compile("Live|Rebuilding"))
        await expect(page.locator("#lost")).to_be_hidden()
        await expect(page.locator(NAMES)).to_have_text(["restarted"])
        await expect(page.locator(".holder .name")).to_have_text(["restarted"])
        await page.close()


@pytest.mark.parametrize("lease_ttl", [1.0])
async def test_it_says_when_the_map_is_being_rebuilt(visitor: Visitor) -> None:
    page = await visitor.open()
    await look_up(page)
    await expect(page.locator("#prompt-summary")).to_contain_text("No instance holds a prefix of it.")
    # A lease after the start all are back who would come.
    await expect(page.locator("#state")).to_have_text("Live")
    await expect(page.locator("#prompt-summary")).to_have_text("No instance holds a prefix of it.")


async def test_rows_are_changed_in_place(visitor: Visitor, cache: Any, fleet: dict[str, ScriptedInstance]) -> None:
    await start_copy(cache)
    page = await visitor.open()
    await look_up(page)
    await expect(page.locator(".operation .badge")).to_have_text("done")
    await expect(page.locator(".holder .name").first).to_have_text("a")
    everything = page.locator(".instance, .instance td, .instance .bar, .operation, .node, .edge, .holder, .segment")
    count = await everything.evaluate_all("all => all.map(one => { one.isOld = true; }).length")
    await report(fleet["a"], tiers=[TierUsage(tier=HOST, capacity_bytes=8 * GIB, used_bytes=GIB)])
    await fleet["b"].evict(KEYS)
    await expect(page.locator("[data-column^=tier] .number:visible").first).to_have_text("12 %")
    await rounds(page, 2)
    old = await everything.evaluate_all("all => all.filter(one => one.isOld).length")
    assert 0 < count - old <= 20  # the columns of two tiers and the copy of b are gone
    assert await everything.count() == old


async def test_it_keeps_the_newest_operations_and_reads_only_what_is_new(
    visitor: Visitor, cache: Any, make: Make
) -> None:
    async with make("a", CHUNKS):
        for _ in range(230):
            await cache.Clear(ClearRequest(instance_id="a", all=True, dry_run=True), timeout=60)
        page = await visitor.open()
        await expect(page.locator(".operation")).to_have_count(200)
        await expect(page.locator(".operation .badge").last).to_have_text("done")
        await rounds(page, 1)
        visitor.calls.clear()
        await rounds(page, 2)
        asked = [call.partition(" ")[2] for call in visitor.calls if "ListOperations" in call]
        assert set(asked) == {'{"pageSize":20,"pageToken":""}'}
        await cache.Clear(ClearRequest(instance_id="a", all=True), timeout=60)
        await expect(page.locator(".operation .kind").first).to_have_text("clear")
        await expect(page.locator(".operation")).to_have_count(200)


async def test_a_hidden_page_does_not_poll(visitor: Visitor, make: Make) -> None:
    page = await visitor.open()
    await rounds(page, 1)
    look = "isHidden => { Object.defineProperty(document, 'hidden', {value: isHidden, configurable: true}); }"
    await page.evaluate(look, True)
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await page.wait_for_load_state("networkidle")  # no request for half a second
    visitor.calls.clear()
    await page.get_by_role("heading", name="Pins").press("r")
    async with make("a"):
        assert visitor.calls == []
        await page.evaluate(look, False)
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await expect(page.locator(NAMES)).to_have_text(["a"])
