"""The page's files, and how it shows instances, traffic, operations and flows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import expect

from lmkv.keys import join_keys
from lmkv.v1.cache_service_pb2 import PinRequest
from lmkv.v1.chunk_pb2 import Position
from lmkv.v1.registry_service_pb2 import DeregisterRequest, InstanceStats, PeerTraffic
from lmkv_server import http as shared
from lmkv_server.coordinator.http.app import STATIC
from tests.server.coordinator.cases import CHUNKS, KEYS, LLAMA, LLAMA_FLOAT
from tests.server.coordinator.http.page.visitor import Visitor, filled, look_up, near, parts, start_copy
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance, until


async def test_every_file_that_the_page_names_is_served_and_asked_for_anew(http: httpx.AsyncClient) -> None:
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
    files = {file.name for folder in folders for file in folder.iterdir() if file.stem != "docs"}  # a page of its own
    assert files == {path.rpartition("/")[2] or "index.html" for path in seen}


async def test_an_empty_fleet_is_told_how_to_begin(visitor: Visitor) -> None:
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
        row = page.locator(".instance", has=page.get_by_role("heading", name="a", exact=True))
        await expect(page.locator(".instance h3")).to_have_text(["a", "b", "c", "odd"])
        await expect(row.locator(".chips")).to_have_text("llama · bfloat16")
        await expect(row.locator(".tiers .number")).to_have_text(
            ["6.0 of 8.0 GiB · 3 chunks", "25 of 100 GiB · 1,234 chunks", "4.0 GiB · 7 chunks"]
        )
        await expect(row.locator(".tiers .name")).to_have_text(["host", "disk", "example"])
        host = row.get_by_role("meter", name="host")
        await expect(host).to_have_attribute("aria-valuenow", "75")
        assert await filled(host) == pytest.approx(0.75, abs=0.01)
        await expect(row.locator(".how")).to_contain_text("2 engines")
        await expect(row.locator(".conflicts")).to_have_text(
            "Shares no llama with odd: kv_dtype is bfloat16 here, float32 there"
        )
        await expect(page.locator("#figure-instances")).to_have_text("4")
        await expect(page.locator("#figure-chunks")).to_have_text("1,245")


async def test_an_instance_that_leaves_is_gone_and_its_successor_comes(
    visitor: Visitor, make: Make, registry: Any
) -> None:
    a = make("a", CHUNKS)
    async with a:
        page = await visitor.open()
        await expect(page.locator(".instance")).to_have_count(1)
        await registry.Deregister(DeregisterRequest(instance_id="a", epoch=a.epoch), timeout=5)
        await expect(page.locator(".instance")).to_have_count(0)
        await expect(page.locator("#instances-empty")).to_be_visible()
    async with make("b"):
        await expect(page.locator(".instance h3")).to_have_text(["b"])
        await expect(page.locator("#instances-empty")).to_be_hidden()


@pytest.mark.parametrize("lease_ttl", [10.0])
async def test_an_instance_that_owes_a_report_is_said_to_be_silent(visitor: Visitor, make: Make) -> None:
    async with make("a"):  # reports once
        page = await visitor.open()
        await expect(page.locator(".reports")).to_have_text("reporting")
        await expect(page.locator(".reports")).to_have_text(re.compile("silent for"))


async def test_hits_are_shown_by_where_they_were_found(visitor: Visitor, make: Make) -> None:
    a = make("a")
    a.stats.CopyFrom(InstanceStats(asked_chunks=1000, own_chunks=625, peer_chunks=250))
    async with a, make("new"):
        page = await visitor.open()
        bars, words = page.locator(".hits .bar"), page.locator(".hits .number")
        await expect(words).to_have_text(["62 % own + 25 % peer of 1,000", "nothing looked up yet"])
        await expect(
            page.get_by_role("img", name="Hits: 62 % own, 25 % from peers, of 1,000 chunks looked up")
        ).to_be_visible()
        await expect(bars.nth(1)).to_be_hidden()
        assert await parts(bars.nth(0)) == [["own", near(0.625)], ["peer", near(0.25)]]
        a.stats.CopyFrom(InstanceStats(asked_chunks=4, own_chunks=1))  # it has started again
        await a.tell_stats()
        await expect(words.nth(0)).to_have_text("25 % own + 0 % peer of 4")
        assert await parts(bars.nth(0)) == [["own", near(0.25)], ["peer", near(0)]]
        a.stats.Clear()
        await a.tell_stats()
        await expect(words.nth(0)).to_have_text("nothing looked up yet")
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
        await b.tell_stats()
        await expect(titles.nth(1)).to_have_text("a → b: 2 chunks, 2.0 MiB")
        await expect(edges.nth(1)).to_have_attribute("data-state", "recent")
        await expect(edges.nth(0)).to_have_attribute("data-state", "past")
        del a.stats.traffic[1]  # a has started again, and has fetched a little since
        a.stats.traffic[0].CopyFrom(PeerTraffic(instance_id="b", chunk_count=1, transferred_bytes=1 << 20))
        await a.tell_stats()
        await expect(titles).to_have_text(["a → b: 2 chunks, 2.0 MiB", "b → a: 1 chunk, 1.0 MiB"])
        await expect(page.locator("#traffic-total")).to_have_text("3.0 MiB fetched")
        await expect(edges.nth(1)).to_have_attribute("data-state", "recent")
        a.stats.Clear()
        await a.tell_stats()
        await expect(titles).to_have_text(["a → b: 2 chunks, 2.0 MiB"])


async def test_operations_show_what_runs_and_add_no_bytes(visitor: Visitor) -> None:
    page = await visitor.open()
    script = """async told => {
        const { Flows } = await import("/static/flows.js");
        const flows = new Flows();
        const traffic = [{instanceId: "a", chunkCount: "5", transferredBytes: "50"}];
        flows.note([{instanceId: "b", stats: {traffic}}], 0);
        return told.map(([from, to, bytes, age]) => flows.list([{
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
        (["a", "c", 7, 0], [counted, ["a", "c", 0, False, True]]),  # c has yet to tell
        (["a", "c", 0, 0], [counted]),  # c held it all
        (["a", "a", 7, None], [counted]),  # from one tier to another
    ]
    told = [operation for operation, _ in operations_and_flows]
    assert await page.evaluate(script, told) == [flows for _, flows in operations_and_flows]


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


async def test_of_many_flows_the_largest_and_the_newest_are_drawn(visitor: Visitor, make: Make) -> None:
    many = make("many"), make("more"), make("most"), make("few")
    for index, instance in enumerate(many):
        for peer in range(64):
            size = (index + 1) * 1000 + peer
            instance.stats.traffic.add(instance_id=f"peer-{index}-{peer}", chunk_count=1, transferred_bytes=size)
    async with many[0], many[1], many[2], many[3]:
        page = await visitor.open()
        await expect(page.locator(".edge")).to_have_count(200)
        await expect(page.locator("#traffic-caption")).to_contain_text("These are 200 of 256 flows.")
        smallest = page.locator(".edge title", has_text="peer-0-0 → many")
        await expect(smallest).to_have_count(0)
        many[0].stats.traffic[0].transferred_bytes += 1
        await many[0].tell_stats()
        await expect(smallest).to_have_text("peer-0-0 → many: 1 chunk, 1001 B")
        await expect(page.locator(".edge")).to_have_count(200)


async def test_names_that_look_like_html_are_only_text(visitor: Visitor, make: Make, cache: Any) -> None:
    evil = "<img src=x onerror=alert(1)>"
    spec = dataclasses.replace(LLAMA, model_name="<script>alert(2)</script>")
    async with make(evil, CHUNKS, spec), make("b", spec=spec) as b:
        keys = join_keys(KEYS)
        await start_copy(cache, evil, "b", chunk_keys=keys)
        await cache.Pin(PinRequest(position=Position(instance_id=evil), chunk_keys=keys), timeout=5)
        await until(lambda: b.chunks == CHUNKS)
        page = await visitor.open()
        await look_up(page, join_keys(KEYS).hex())
        await expect(page.locator(".instance h3").first).to_have_text(evil)
        await expect(page.locator(".holder .name").first).to_have_text(evil)
        await expect(page.locator(".operation h3")).to_have_text(f"{evil} / host → b / host")
        await expect(page.locator(".pin h3")).to_have_text(f"{evil} / host")
        await page.locator("#traffic-details summary").click()
        await expect(page.locator("#traffic-list")).to_contain_text(evil)
        await page.get_by_role("button", name="Clear…").click()
        await expect(page.locator("#dialog .lead")).to_be_visible()
        assert await page.locator("img").count() == 1  # the mark in the head
        assert await page.locator("main script, dialog script").count() == 0
