"""The page's files, and how it shows instances, traffic, operations and flows."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import expect

from lmkv.keys import join_keys, split_keys
from lmkv.rpc.messages import by_keys
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import PinRequest
from lmkv.v1.chunk_pb2 import Position
from lmkv.v1.registry_service_pb2 import DeregisterRequest, InstanceStats, PeerTraffic, TierUsage
from lmkv_server import http as shared
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.core.history import History
from lmkv_server.coordinator.http.app import STATIC
from tests.server.coordinator.cases import CHUNKS, HYBRID, KEYS, LLAMA_FLOAT
from tests.server.coordinator.http.page.visitor import (
    GIB,
    NAMES,
    Visitor,
    filled,
    look_up,
    near,
    parts,
    report,
    start_copy,
)
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance, until
from tests.support.specs import LLAMA


async def test_every_file_of_the_page_is_served_without_caching(http: httpx.AsyncClient) -> None:
    waiting, seen = ["/"], set[str]()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        response = await http.get(path)
        assert response.status_code == 200, path
        assert response.headers["cache-control"] == "no-cache"
        assert "default-src 'self'" in response.headers["content-security-policy"]
        again = await http.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert again.status_code == 304 or path == "/"
        named = re.findall(r"""(?:src|href)="(/static/[^"]+)"|from "\./([^"]+)";""", response.text)
        waiting += {whole or f"/static/{part}" for whole, part in named} - seen
    folders = (STATIC, Path(shared.__path__[0]) / "static")
    of_docs = ("docs", "swagger-ui")  # a page of its own
    files = {file.name for folder in folders for file in folder.iterdir() if not file.name.startswith(of_docs)}
    assert files == {path.rpartition("/")[2] or "index.html" for path in seen}


async def test_an_empty_fleet_shows_how_to_begin(visitor: Visitor) -> None:
    page = await visitor.open()
    await expect(page.locator("#instances-empty")).to_contain_text("lmkv node --instance-id")
    await expect(page.locator("#operations-empty")).to_be_visible()
    await expect(page.locator("#pins-empty")).to_be_visible()
    await expect(page.locator("#traffic-caption")).to_contain_text("No instance has fetched anything")
    await expect(page.locator("#traffic")).to_be_hidden()


async def test_instances_are_shown_with_their_tiers_and_what_keeps_them_apart(
    visitor: Visitor, make: Make, fleet: dict[str, ScriptedInstance]
) -> None:
    async with make("odd", spec=LLAMA_FLOAT):
        page = await visitor.open()
        row = page.locator(".instance", has=page.get_by_role("button", name="a", exact=True))
        await expect(page.locator(NAMES)).to_have_text(["a", "b", "c", "odd"])
        await expect(row.locator("[data-column=model]")).to_have_text("llama · bfloat16")
        await expect(row.locator("[data-column^=tier] .number")).to_have_text(["75 %", "25 %", "4.0 GiB"])
        titles = await row.locator("[data-column^=tier] > span").evaluate_all("all => all.map(one => one.title)")
        assert titles == ["6.0 of 8.0 GiB · 3 chunks", "25 of 100 GiB · 1,234 chunks", "4.0 GiB · 7 chunks"]
        await expect(page.locator("thead [data-column^=tier]")).to_have_text(["host", "disk", "example"])
        host = row.get_by_role("meter", name="host")
        await expect(host).to_have_attribute("aria-valuenow", "75")
        assert await filled(host) == pytest.approx(0.75, abs=0.01)
        await expect(row.locator("[data-column=engines]")).to_have_text("2")
        await expect(page.locator("#conflicts li")).to_have_text(
            "Instances of llama cannot share chunks: kv_dtype is bfloat16 on 3 instances (a, b, c), float32 on odd"
        )
        await expect(page.locator("#figure-instances")).to_have_text("4")
        await expect(page.locator("#figure-chunks")).to_have_text("1,245")
        await expect(page.locator("#figure-lookups")).to_have_text("–")
        await look_up(page)
        await expect(page.locator("#figure-lookups")).to_have_text(re.compile(r"^\d+$"))
        await expect(page.locator("#figure-hits")).to_have_text(re.compile(r"^\d+ % found a holder$"))
        await expect(page.locator("#figure-asked")).to_have_text("nothing looked up yet")


async def test_a_hit_rate_and_a_sample_are_shown_at_once(
    visitor: Visitor, coordinator: Coordinator, make: Make
) -> None:
    services = coordinator.tenants.unnamed
    services.history = samples = History()
    a = make("a")
    async with a:
        a.stats.CopyFrom(InstanceStats(asked_chunks=100, own_chunks=50, peer_chunks=25))
        await a.report_stats()
        await until(lambda: services.core.instances.named("a", "").stats.asked_chunks == 100)
        samples.take(services.core.instances, time.time())
        page = await visitor.open()
        await expect(page.locator("#figure-rate")).to_have_text("75 %")
        await expect(page.locator("#figure-asked")).to_have_text("of 100 chunks")
        await expect(page.locator("#history .chart").nth(1).locator(".legend li")).to_have_text(["host 0 B"])


async def test_an_instance_that_leaves_is_gone_and_its_successor_comes(
    visitor: Visitor, make: Make, registry: Any
) -> None:
    a = make("a", CHUNKS)
    async with a:
        page = await visitor.open()
        await expect(page.locator(".instance")).to_have_count(1)
        await registry.Deregister(DeregisterRequest(instance_id="a", epoch=a.epoch), timeout=60)
        await expect(page.locator(".instance")).to_have_count(0)
        await expect(page.locator("#instances-empty")).to_be_visible()
    async with make("b"):
        await expect(page.locator(NAMES)).to_have_text(["b"])
        await expect(page.locator("#instances-empty")).to_be_hidden()


@pytest.mark.parametrize("lease_ttl", [10.0])
async def test_an_instance_that_owes_a_report_is_said_to_be_silent(visitor: Visitor, make: Make) -> None:
    async with make("a"):  # reports once
        page = await visitor.open()
        await expect(page.locator(".instance .reports")).to_have_text("reporting")
        await expect(page.locator(".instance .reports")).to_have_text(re.compile("silent for"))
        await page.select_option("#instances-state", "live")
        await expect(page.locator("#instances-none")).to_be_visible()
        await page.select_option("#instances-state", "lost")
        await expect(page.locator(NAMES)).to_have_text(["a"])


async def test_hits_are_shown_by_where_they_were_found(visitor: Visitor, make: Make) -> None:
    a = make("a")
    a.stats.CopyFrom(InstanceStats(asked_chunks=1000, own_chunks=625, peer_chunks=250))
    async with a, make("new"):
        page = await visitor.open()
        bars, words = page.locator(".instance .hits .bar"), page.locator(".instance .hits .number")
        await expect(words).to_have_text(["87 %", "–"])
        await expect(
            page.get_by_role("img", name="Hits: 62 % own, 25 % from peers, of 1,000 chunks looked up")
        ).to_be_visible()
        await expect(bars.nth(1)).to_be_hidden()
        assert await parts(bars.nth(0)) == [["own", near(0.625)], ["peer", near(0.25)]]
        a.stats.CopyFrom(InstanceStats(asked_chunks=4, own_chunks=1))  # it has started again
        await a.report_stats()
        await expect(words.nth(0)).to_have_text("25 %")
        assert await parts(bars.nth(0)) == [["own", near(0.25)], ["peer", near(0)]]
        a.stats.Clear()
        await a.report_stats()
        await expect(words.nth(0)).to_have_text("–")
        await expect(bars.nth(0)).to_be_hidden()


async def test_traffic_is_what_instances_count(visitor: Visitor, make: Make) -> None:
    a, b = make("a"), make("b")
    a.stats.traffic.add(instance_id="b", chunk_count=9, transferred_bytes=9 << 20)
    a.stats.traffic.add(instance_id="gone", chunk_count=1, transferred_bytes=1 << 20)
    async with a, b:
        page = await visitor.open()
        titles, edges = page.locator(".edge title"), page.locator(".edge")
        await expect(titles).to_have_text(["b → a: 9 chunks, 9.0 MiB", "gone → a: 1 chunk, 1.0 MiB"])
        await expect(page.locator("#traffic-total")).to_have_text("10 MiB fetched")
        await expect(page.locator(".node[data-gone] text")).to_have_text("gone")
        await expect(edges.nth(0)).to_have_attribute("data-state", "past")  # it may be long ago
        widths = await page.locator(".edge .line").evaluate_all(
            "all => all.map(one => one.getAttribute('stroke-width'))"
        )
        assert float(widths[0]) > float(widths[1])
        b.stats.traffic.add(instance_id="a", chunk_count=2, transferred_bytes=2 << 20)
        await b.report_stats()
        await expect(titles.nth(1)).to_have_text("a → b: 2 chunks, 2.0 MiB")
        await expect(edges.nth(1)).to_have_attribute("data-state", "recent")
        await expect(edges.nth(0)).to_have_attribute("data-state", "past")
        del a.stats.traffic[1]  # a has started again, and has fetched a little since
        a.stats.traffic[0].CopyFrom(PeerTraffic(instance_id="b", chunk_count=1, transferred_bytes=1 << 20))
        await a.report_stats()
        await expect(titles).to_have_text(["a → b: 2 chunks, 2.0 MiB", "b → a: 1 chunk, 1.0 MiB"])
        await expect(page.locator("#traffic-total")).to_have_text("3.0 MiB fetched")
        await expect(edges.nth(1)).to_have_attribute("data-state", "recent")
        a.stats.Clear()
        await a.report_stats()
        await expect(titles).to_have_text(["a → b: 2 chunks, 2.0 MiB"])


async def test_operations_show_what_runs_and_add_no_bytes(visitor: Visitor) -> None:
    page = await visitor.open()
    script = """async given => {
        const { Flows } = await import("/static/flows.js");
        const flows = new Flows();
        const traffic = [{instanceId: "a", chunkCount: "5", transferredBytes: "50"}];
        flows.note([{instanceId: "b", stats: {traffic}}], 0);
        return given.map(([from, to, bytes, age]) => flows.list([{
            source: {instanceId: from}, destination: {instanceId: to}, bytes, done: age !== null,
            endTime: age === null ? null : Date.now() / 1000 - age,
        }]).map(flow => [flow.from, flow.to, flow.bytes, flow.isRunning, flow.isRecent]));
    }"""
    counted = ["a", "b", 50, False, False]
    operations_and_flows: list[tuple[list[Any], list[list[Any]]]] = [
        (["a", "b", 7, None], [["a", "b", 50, True, True]]),
        (["a", "b", 7, 0], [["a", "b", 50, False, True]]),
        (["a", "b", 7, 60], [counted]),
        (["a", "c", 0, None], [counted, ["a", "c", 0, True, True]]),
        (["a", "c", 7, 0], [counted, ["a", "c", 0, False, True]]),  # c has not reported yet
        (["a", "c", 0, 0], [counted]),  # c held it all
        (["a", "a", 7, None], [counted]),  # from one tier to another
    ]
    operations = [operation for operation, _ in operations_and_flows]
    assert await page.evaluate(script, operations) == [flows for _, flows in operations_and_flows]


async def test_flows_glow_after_a_rise_that_was_seen_to_happen(visitor: Visitor) -> None:
    page = await visitor.open()
    script = """async rounds => {
        const { Flows } = await import("/static/flows.js");
        const flows = new Flows();
        return rounds.map(([now, ...counts]) => {
            flows.note(counts.map((count, index) => ({
                instanceId: `i${index}`,
                stats: {traffic: [{instanceId: "p", chunkCount: String(count), transferredBytes: String(count)}]},
            })), now);
            return flows.list([]).map(({to, bytes, isRecent}) => [to, bytes, isRecent]);
        });
    }"""
    rounds_and_flows: list[tuple[list[int], list[list[Any]]]] = [
        ([0, 5], [["i0", 5, False]]),
        ([1, 6], [["i0", 6, True]]),  # since 0
        ([14, 6], [["i0", 6, True]]),
        ([15, 6, 7], [["i1", 7, False], ["i0", 6, False]]),  # i1 has come with a past of its own
        ([16, 2, 7], [["i1", 7, False], ["i0", 2, True]]),  # i0 has started again
        ([17, 0, 7], [["i1", 7, False]]),
        ([18, 3, 7], [["i1", 7, False], ["i0", 3, True]]),
        ([90, 4, 7], [["i1", 7, False], ["i0", 4, False]]),  # any time since 18
        ([91], []),
        ([92, 4], [["i0", 4, False]]),
    ]
    assert await page.evaluate(script, [asked for asked, _ in rounds_and_flows]) == [
        flows for _, flows in rounds_and_flows
    ]


async def test_a_larger_fleet_is_a_heat_map(visitor: Visitor, make: Make) -> None:
    a, b = make("a"), make("b")
    for peer in range(64):
        a.stats.traffic.add(instance_id=f"peer-{peer}", chunk_count=1, transferred_bytes=(peer + 1) << 20)
    b.stats.traffic.add(instance_id="a", chunk_count=3, transferred_bytes=1 << 30)
    async with a, b:
        page = await visitor.open()
        await expect(page.locator(".edge")).to_have_count(0)
        titles = page.locator(".cell title")
        await expect(titles).to_have_count(32)  # of a: 30 by name and the others together; of b: a
        assert {"a → b: 3 chunks, 1.0 GiB", "peer-63 → a: 1 chunk, 64 MiB"} <= set(await titles.all_text_contents())
        await expect(titles.filter(has_text="34 others → a: 34 chunks, 595 MiB")).to_have_count(1)
        await expect(page.locator(".label text").filter(has_text="34 others")).to_have_count(1)
        strong = await page.locator(".cell rect").evaluate_all(
            "all => all.map(one => Number(one.getAttribute('fill-opacity')))"
        )
        assert max(strong) == 1
        assert min(strong) > 0.1
        await expect(page.locator(".cell[data-state=recent]")).to_have_count(0)
        b.stats.traffic[0].transferred_bytes += 1
        await b.report_stats()
        await expect(page.locator(".cell[data-state=recent] title")).to_have_text("a → b: 3 chunks, 1.0 GiB")


async def test_the_table_is_sorted_by_any_column(
    visitor: Visitor, make: Make, fleet: dict[str, ScriptedInstance]
) -> None:
    async with make("a10"):
        page = await visitor.open()
        await expect(page.locator(NAMES)).to_have_text(["a", "a10", "b", "c"])
        header = page.get_by_role("columnheader", name="Instance")
        await expect(header).to_have_attribute("aria-sort", "ascending")
        await header.get_by_role("button").press("Enter")
        await expect(header).to_have_attribute("aria-sort", "descending")
        await expect(page.locator(NAMES)).to_have_text(["c", "b", "a10", "a"])
        host = page.get_by_role("columnheader", name="host")
        await host.get_by_role("button").click()
        await host.get_by_role("button").click()
        await expect(page.locator(NAMES)).to_have_text(["a", "a10", "b", "c"])  # 75 %, then all 0 %
        await expect(page.locator("th[aria-sort]")).to_have_count(1)
        await expect(page.locator("#announcement")).to_have_text("Sorted by host, descending")


async def test_a_name_keeps_the_focus_when_its_row_moves(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    await page.get_by_role("columnheader", name="host").get_by_role("button").click()
    await expect(page.locator(NAMES)).to_have_text(["b", "c", "a"])
    await page.get_by_role("button", name="b", exact=True).focus()
    full = TierUsage(tier=HOST, capacity_bytes=GIB, used_bytes=GIB)
    await report(fleet["b"], tiers=[full])
    await expect(page.locator(NAMES)).to_have_text(["c", "a", "b"])
    await expect(page.get_by_role("button", name="b", exact=True)).to_be_focused()


async def test_the_table_is_filtered_by_text_and_state(
    visitor: Visitor, make: Make, fleet: dict[str, ScriptedInstance]
) -> None:
    async with make("odd", spec=LLAMA_FLOAT):
        page = await visitor.open()
        await page.keyboard.press("f")
        await page.keyboard.type("LLAMA float32")
        await expect(page.locator(NAMES)).to_have_text(["odd"])
        await expect(page.locator("#instances-count")).to_have_text("1 of 4")
        await page.fill("#instances-filter", "none such")
        await expect(page.locator("#instances-none")).to_be_visible()
        await page.fill("#instances-filter", "")
        await page.select_option("#instances-state", "conflict")
        await expect(page.locator(NAMES)).to_have_count(4)
        await expect(page.locator("#instances-count")).to_have_text("")


async def test_conflicts_are_grouped_by_reason(visitor: Visitor) -> None:
    page = await visitor.open()
    script = """async given => {
        const { reasonsOf } = await import("/static/conflicts.js");
        const instances = given.map(([instanceId, fingerprint, fields]) => ({
            instanceId, specs: [{modelName: "m", fingerprint, ...fields}], conflicts: [{modelName: "m"}],
        }));
        return reasonsOf(instances).map(({field, values}) => [field, [...values]]);
    }"""
    common = {"kvDtype": "bfloat16", "chunkSize": 256}
    instances = [["a", "1", common], ["b", "1", common], ["c", "2", {**common, "kvDtype": "fp8"}]]
    instances += [["d", "3", {**common, "chunkSize": 16}], ["e", "4", {**common, "kvDtype": "fp8", "chunkSize": 16}]]
    assert await page.evaluate(script, instances) == [
        ["kvDtype", [["bfloat16", ["a", "b"]], ["fp8", ["c", "e"]]]],
        ["chunkSize", [["256", ["a", "b"]], ["16", ["d"]]]],
    ]
    window = {"rule": "PART_RULE_LAST", "span": 128}
    instances = [
        [name, name, {**common, "moreParts": [{**window, "span": span}]}] for name, span in (("f", 128), ("g", 64))
    ]
    assert await page.evaluate(script, instances) == [["moreParts[0].span", [["128", ["f"]], ["64", ["g"]]]]]


async def test_the_last_hour_is_drawn(visitor: Visitor, coordinator: Coordinator, make: Make) -> None:
    services = coordinator.tenants.unnamed
    services.history = samples = History()
    a = make("a")
    async with a:
        now = time.time()
        samples.take(services.core.instances, now - 60)
        a.stats.CopyFrom(InstanceStats(asked_chunks=100, own_chunks=50, peer_chunks=25, load_count=4))
        a.stats.load_duration.FromMilliseconds(1000)
        a.stats.avoided_prefill_duration.FromMilliseconds(9000)
        await a.report_stats()
        await until(lambda: services.core.instances.named("a", "").stats.asked_chunks == 100)
        samples.take(services.core.instances, now)
        page = await visitor.open()
        charts = page.locator("#history .chart")
        await expect(charts.locator("h3")).to_have_text(
            ["Hit rate of engines", "Bytes by tier", "TTFT saved by a load"]
        )
        await expect(charts.nth(0).locator(".legend li")).to_have_text(["all 75 %", "own 50 %"])
        await expect(charts.nth(0).locator(".caption")).to_have_text("75 % of 100 chunks")
        await expect(charts.nth(1).locator(".legend li")).to_have_text(["host 0 B"])
        await expect(charts.nth(2).locator(".legend li")).to_have_text(["average 2.0 s"])
        await expect(charts.nth(2).locator(".caption")).to_contain_text("8.0 s in 4 loads")
        await expect(page.get_by_role("img", name="Hit rate of engines. 75 %")).to_be_visible()
        drawn = (
            """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"""
        )
        assert await charts.nth(0).locator("canvas").evaluate(drawn)
        await page.locator(NAMES).click()
        await expect(page.locator("#detail-history .caption").nth(0)).to_have_text("75 % of 100 chunks")


async def test_a_name_opens_the_details_of_its_instance(
    visitor: Visitor, make: Make, registry: Any, fleet: dict[str, ScriptedInstance]
) -> None:
    fleet["a"].stats.CopyFrom(InstanceStats(asked_chunks=8, own_chunks=4, peer_chunks=2))
    fleet["a"].stats.traffic.add(instance_id="b", chunk_count=9, transferred_bytes=9 << 20)
    await fleet["a"].report_stats()
    async with make("odd", spec=LLAMA_FLOAT), make("hybrid", spec=HYBRID):
        page = await visitor.open()
        await page.goto(f"{visitor.url}#instance=hybrid")
        models = page.get_by_role("dialog", name="hybrid").locator("#detail-models")
        await expect(models).to_contain_text("16 tokens a chunk, 5 layers")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="a", exact=True).press("Enter")
        dialog = page.get_by_role("dialog", name="a")
        await expect(dialog.get_by_role("button", name="Close")).to_be_focused()
        await expect(dialog.locator(".tiers .number")).to_have_text(
            ["6.0 of 8.0 GiB · 3 chunks", "25 of 100 GiB · 1,234 chunks", "4.0 GiB · 7 chunks"]
        )
        await expect(dialog.locator("#detail-hits-text")).to_have_text("50 % own, 25 % from peers, of 8 chunks")
        await expect(dialog.locator("#detail-peers li")).to_have_text(["fetched from b: 9 chunks, 9.0 MiB"])
        await expect(dialog.locator("#detail-conflicts li")).to_have_text(
            ["Shares no chunks of llama with odd: kv_dtype is bfloat16 here, float32 there"]
        )
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await expect(page.get_by_role("button", name="a", exact=True)).to_be_focused()
        await page.goto(f"{visitor.url}#instance=c")
        await expect(page.get_by_role("dialog", name="c")).to_be_visible()
        visitor.forgiven.append("404 (Not Found)")  # its history, if the page asks for it just then
        await registry.Deregister(DeregisterRequest(instance_id="c", epoch=fleet["c"].epoch), timeout=60)
        await expect(page.locator("#detail-gone")).to_be_visible()


async def test_names_that_look_like_html_are_only_text(visitor: Visitor, make: Make, cache: Any) -> None:
    evil = "<img src=x onerror=alert(1)>"
    spec = dataclasses.replace(LLAMA, model_name="<script>alert(2)</script>")
    async with make(evil, CHUNKS, spec), make("b", spec=spec) as b:
        keys = join_keys(KEYS)
        await start_copy(cache, evil, "b", chunk_keys=keys)
        await cache.Pin(PinRequest(prompt=by_keys(split_keys(keys)), position=Position(instance_id=evil)), timeout=60)
        await until(lambda: b.chunks == CHUNKS)
        page = await visitor.open()
        await look_up(page, join_keys(KEYS).hex())
        await expect(page.locator(NAMES).first).to_have_text(evil)
        await expect(page.locator(".holder .name").first).to_have_text(evil)
        await expect(page.locator(".operation h3")).to_have_text(f"{evil} / host → b / host")
        await expect(page.locator(".pin h3")).to_have_text(f"{evil} / host")
        await page.locator("#traffic-details summary").click()
        await expect(page.locator("#traffic-list")).to_contain_text(evil)
        await page.get_by_role("button", name="Clear…").click()
        await expect(page.locator("#dialog .lead")).to_be_visible()
        assert await page.locator("img").count() == 1  # the mark in the head
        assert await page.locator("main script, dialog script").count() == 0
