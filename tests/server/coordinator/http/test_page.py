"""The page in a real browser, against a real coordinator and instances that obey it."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from lmkv import rpc
from lmkv.keys import join_keys
from lmkv.v1 import chunk_pb2
from lmkv.v1.cache_service_pb2 import ClearRequest, MoveRequest, PinRequest
from lmkv.v1.chunk_pb2 import Position
from lmkv.v1.registry_service_pb2 import ChunkChange, DeregisterRequest, InstanceStats, PeerTraffic, TierUsage
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.http.app import STATIC
from tests.server.coordinator.cases import CHUNKS, KEYS, LLAMA, LLAMA_FLOAT, PROMPT, QWEN, keys_of
from tests.server.coordinator.guarded import guarded, token_of
from tests.server.coordinator.scripted_instance import HOST, Make, ScriptedInstance, until

GIB = 1 << 30
PASTED: list[tuple[str, str, Any]] = [
    ("", "nothing", None),
    ("[]", "nothing", None),
    ("[1, 2,3]", "tokens", [1, 2, 3]),
    ("1 2 3", "tokens", [1, 2, 3]),
    ("1,2,3,", "tokens", [1, 2, 3]),
    ("(1; 2;\n3)", "tokens", [1, 2, 3]),
    ('{"count":2,"max_model_len":9,"tokens":[5,6],"token_strs":null}', "tokens", [5, 6]),
    ('{"prompt_token_ids":[7]}', "tokens", [7]),
    ("1 -2", "wrong", "-2 is no token id"),
    ("[1.5]", "wrong", "1.5 is no token id"),
    ("4294967296", "wrong", "4294967296 is no token id"),
    ("00" * 16, "keys", 1),
    ("ab" * 16 + ", " + "CD" * 16, "keys", 2),
    ("ab" * 32, "keys", 2),
    ("ab" * 15, "text", "ab" * 15),
    ("What is 1 2 3?", "text", "What is 1 2 3?"),
    ('{"prompt":"x"}', "text", '{"prompt":"x"}'),
]
"""What people paste, and what it is."""
TEXT = " ".join(f"t{token}" for token in PROMPT)
"""What the tokenizer of these tests makes the prompt of."""
SIZES = ({"width": 1280, "height": 900}, {"width": 390, "height": 844}, {"width": 360, "height": 640})
REFUSED = "the server responded with a status of 400"
"""What the browser itself logs of a request that is refused, as some tests mean it to be."""


class Visitor:
    """Opens the page, and takes down what goes wrong there; expect what is meant to go wrong in `forgiven`."""

    def __init__(self, browser: Browser, coordinator: Coordinator) -> None:
        self._browser = browser
        self.url = f"http://{coordinator.http_address}/"
        self.forgiven: list[str] = []
        self.complaints: list[str] = []
        self.calls: list[str] = []
        """Path and body of every request, in order."""

    async def open(self, **options: Any) -> Page:
        """A fresh page that has heard of the coordinator."""
        context = await self._browser.new_context(**{"viewport": SIZES[0], **options})
        page = await context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self._hear("error", str(error)))
        page.on("dialog", lambda dialog: self._hear("error", f"a dialog of the browser: {dialog.message}"))
        page.on("request", self._note)
        await page.goto(self.url)
        await expect(page.locator("#state")).to_have_attribute("data-state", re.compile("live|rebuilding"))
        return page

    def check(self) -> None:
        """Asserts that nothing went wrong."""
        wrong = [text for text in self.complaints if not any(words in text for words in self.forgiven)]
        assert not wrong

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _note(self, request: Any) -> None:
        if not request.url.startswith(self.url):
            self.complaints.append(f"a request leaves the origin: {request.url}")
        self.calls.append(f"{request.url.removeprefix(self.url)} {request.post_data or ''}")


expect.set_options(timeout=15_000)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("chromium is missing; `make setup` installs it, and so does `apt-get install chromium`")
    # Chromium's sandbox does not work for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=path, args=arguments)
        yield running
        await running.close()


@pytest.fixture
async def visitor(browser: Browser, coordinator: Coordinator) -> AsyncIterator[Visitor]:
    visitor = Visitor(browser, coordinator)
    yield visitor
    visitor.check()


@pytest.fixture
async def fleet(make: Make) -> AsyncIterator[dict[str, ScriptedInstance]]:
    """`a` holds the prompt, `b` its first two chunks, the second of them on disk; `c` nothing."""
    a, b, c = make("a", CHUNKS), make("b", KEYS[:1]), make("c")
    async with a, b, c:
        await report(
            b, changes=[ChunkChange(tier=chunk_pb2.TIER_DISK, fingerprint=LLAMA.fingerprint, admitted_keys=KEYS[1])]
        )
        await report(
            a,
            tiers=[
                TierUsage(tier=HOST, capacity_bytes=8 * GIB, used_bytes=6 * GIB, chunk_count=3),
                TierUsage(tier=chunk_pb2.TIER_DISK, capacity_bytes=100 * GIB, used_bytes=25 * GIB, chunk_count=1234),
            ],
            engine_count=2,
        )
        yield {"a": a, "b": b, "c": c}


async def report(instance: ScriptedInstance, **fields: Any) -> None:
    """Has an instance say something more."""
    await instance._report(**fields)


async def look_up(page: Page, prompt: str = str(PROMPT)) -> None:
    """Asks who holds a prompt."""
    await page.fill("#prompt-input", prompt)
    await page.get_by_role("button", name="Look up").click()


async def start_copy(cache: Any, source: str = "a", destination: str = "c", **prompt: Any) -> None:
    """Has the prompt copied, or what else is named."""
    request = MoveRequest(copy=True, **(prompt or {"tokens": PROMPT}))
    request.old_position.instance_id, request.new_position.instance_id = source, destination
    await cache.Move(request, timeout=5)


async def rounds(page: Page, number: int) -> None:
    """Waits until the page has asked for the instances again."""
    for _ in range(number):
        async with page.expect_response(re.compile("ListInstances")):
            pass


# --- What it is made of ----------------------------------------------------------------------------------------------


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
    files = {file.name for file in STATIC.iterdir() if file.stem != "docs"}  # /docs is a page of its own
    assert files == {path.rpartition("/")[2] or "index.html" for path in seen}


# --- What it shows ---------------------------------------------------------------------------------------------------


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
            ["6.0 of 8.0 GiB · 3 chunks", "25 of 100 GiB · 1,234 chunks"]
        )
        host = row.get_by_role("meter", name="host")
        await expect(host).to_have_attribute("aria-valuenow", "75")
        assert await filled(host) == pytest.approx(0.75, abs=0.01)
        await expect(row.locator(".how")).to_contain_text("2 engines")
        await expect(row.locator(".conflicts")).to_have_text(
            "Shares no llama with odd: kv_dtype is bfloat16 here, float32 there"
        )
        await expect(page.locator("#figure-instances")).to_have_text("4")
        await expect(page.locator("#figure-chunks")).to_have_text("1,238")


async def filled(bar: Any) -> float:
    """The part of a bar that is coloured, as it is drawn."""
    await bar.evaluate("bar => Promise.all(bar.getAnimations({subtree: true}).map(one => one.finished))")
    return float(await bar.evaluate("bar => parseFloat(getComputedStyle(bar, '::before').width) / bar.offsetWidth"))


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


async def parts(bar: Any, kind: str = "source") -> Any:
    """What a bar's segments stand for and the part of it that each takes, as it is drawn."""
    script = """(bar, kind) => Promise.all(bar.getAnimations({subtree: true}).map(one => one.finished)).then(() =>
        [...bar.children].map(part => [part.dataset[kind], part.getBoundingClientRect().width / bar.clientWidth]))"""
    return await bar.evaluate(script, kind)


def near(part: float) -> Any:
    """As near as pixels allow."""
    return pytest.approx(part, abs=0.01)


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


# --- Who holds a prompt ----------------------------------------------------------------------------------------------


async def test_a_prompt_has_a_bar_per_holder_with_a_part_per_tier(
    visitor: Visitor, fleet: dict[str, ScriptedInstance]
) -> None:
    page = await visitor.open()
    await look_up(page)
    await expect(page.locator("#prompt-understood")).to_have_text("40 tokens")
    await expect(page.locator("#prompt-summary")).to_contain_text("2 instances hold a beginning of it")
    await expect(page.locator(".holder .name")).to_have_text(["a", "b"])
    await expect(page.locator(".holder .number")).to_have_text(["40 of 40 tokens · 100 %", "32 of 40 tokens · 80 %"])
    bars = page.locator(".holder .bar")
    await expect(bars.nth(1)).to_have_attribute("aria-label", "16 in host, 16 in disk")
    assert await parts(bars.nth(0), "tier") == [["host", near(1)]]
    assert await parts(bars.nth(1), "tier") == [["host", near(0.4)], ["disk", near(0.4)]]
    colours = await page.evaluate(
        "['.segment[data-tier=disk]', '.swatch[data-tier=disk]', '.segment[data-tier=host]']"
        ".map(one => getComputedStyle(document.querySelector(one)).backgroundColor)"
    )
    assert colours[0] == colours[1] != colours[2]


async def test_the_answer_follows_the_layout(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    await look_up(page)
    await expect(page.locator(".holder")).to_have_count(2)
    await fleet["a"].evict(KEYS[1:])
    await expect(page.locator(".holder .number").nth(1)).to_have_text("16 of 40 tokens · 40 %")
    await fleet["a"].evict(KEYS)
    await expect(page.locator(".holder .name")).to_have_text(["b"])


async def test_prompts_are_understood_however_they_are_pasted(visitor: Visitor) -> None:
    page = await visitor.open()
    read = "async text => (await import('/static/selection.js')).readSelection(text)"
    for pasted, kind, content in PASTED:
        selection = await page.evaluate(read, pasted)
        assert selection.pop("kind") == kind, pasted
        selection.pop("base64", None)
        assert next(iter(selection.values()), None) == content, pasted
    keys = await page.evaluate(read, join_keys(KEYS).hex())
    assert base64.b64decode(keys["base64"]) == join_keys(KEYS)


async def test_keys_are_looked_up_and_counted_in_chunks(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    await look_up(page, ",".join(key.hex() for key in KEYS))
    await expect(page.locator("#prompt-understood")).to_have_text("3 chunk keys")
    await expect(page.locator(".holder .number")).to_have_text(["3 of 3 chunks · 100 %", "2 of 3 chunks · 66 %"])


async def test_text_gets_commands_that_make_tokens_of_it(visitor: Visitor) -> None:
    page = await visitor.open()
    text = """It's "quoted"; $HOME `id`"""
    await page.fill("#prompt-input", text)
    commands = await page.locator("#prompt-commands").inner_text()
    for line, option in zip(commands.splitlines(), ("-d", "--prompt"), strict=True):
        words = shlex.split(line)
        value = words[words.index(option) + 1]
        assert (json.loads(value)["prompt"] if option == "-d" else value) == text
    await page.get_by_role("button", name="Look up").click()
    await expect(page.locator("#prompt-error")).to_contain_text("tokenizer")
    await page.fill("#prompt-input", "")
    await page.get_by_role("button", name="Look up").click()
    await expect(page.locator("#prompt-error")).to_contain_text("Paste a prompt")


@pytest.mark.parametrize("tokenizers", [["llama"]], indirect=True)
async def test_text_is_looked_up_where_the_coordinator_has_the_models_tokenizer(
    visitor: Visitor, fleet: dict[str, ScriptedInstance]
) -> None:
    page = await visitor.open()
    await page.fill("#prompt-input", f"  {TEXT}\n")
    await expect(page.locator("#prompt-understood")).to_have_text(f"{len(TEXT)} characters of text")
    await expect(page.locator("#prompt-text")).to_be_hidden()
    await page.get_by_role("button", name="Look up").click()
    await expect(page.locator("#prompt-understood")).to_have_text("40 tokens")
    await expect(page.locator(".holder .number")).to_have_text(["40 of 40 tokens · 100 %", "32 of 40 tokens · 80 %"])
    await fleet["b"].evict(KEYS[:1])  # the answer follows the map, as one to tokens does
    await expect(page.locator(".holder .name")).to_have_text(["a"])
    await page.get_by_role("button", name="Pin…").click()
    await expect(page.locator("#dialog .lead")).to_contain_text("40 tokens")


@pytest.mark.parametrize("tokenizers", [["llama"]], indirect=True)
async def test_text_is_looked_up_though_the_map_changes_while_its_tokens_are_made(
    visitor: Visitor, fleet: dict[str, ScriptedInstance]
) -> None:
    page = await visitor.open()
    await look_up(page)
    await expect(page.locator(".holder .name")).to_have_text(["a", "b"])

    async def answer_late(route: Any) -> None:
        await fleet["b"].evict(KEYS[:1])
        await rounds(page, 3)
        await route.continue_()

    await page.route("**/tokenize", answer_late)
    await look_up(page, TEXT)
    await expect(page.locator("#prompt-understood")).to_have_text("40 tokens")
    await expect(page.locator(".holder .name")).to_have_text(["a"])


@pytest.mark.parametrize("tokenizers", [["llama", "qwen"]], indirect=True)
async def test_text_for_one_of_several_models_asks_which(visitor: Visitor, make: Make) -> None:
    visitor.forgiven.append(REFUSED)
    async with make("a", CHUNKS), make("q", keys_of(PROMPT, QWEN), QWEN):
        page = await visitor.open()
        await look_up(page, TEXT)
        await expect(page.locator("#prompt-error")).to_contain_text("tokenizers of several models")
        await page.locator("#prompt-offers").get_by_role("button", name="qwen").click()
        await expect(page.locator(".holder .name")).to_have_text(["q"])


@pytest.mark.parametrize("tokenizers", [["another"]], indirect=True)
async def test_a_tokenizer_of_another_model_does_not_serve(
    visitor: Visitor, fleet: dict[str, ScriptedInstance]
) -> None:
    page = await visitor.open()
    await expect(page.locator(".instance h3").first).to_have_text("a")
    await page.fill("#prompt-input", TEXT)
    await expect(page.locator("#prompt-text")).to_contain_text("no tokenizer of this model")


async def test_a_prompt_of_several_models_offers_them(visitor: Visitor, make: Make) -> None:
    visitor.forgiven.append(REFUSED)
    async with make("a", CHUNKS), make("q", keys_of(PROMPT, QWEN), QWEN):
        page = await visitor.open()
        await look_up(page)
        await expect(page.locator("#prompt-error")).to_contain_text("select one by model_name")
        await page.locator("#prompt-offers").get_by_role("button", name="qwen").click()
        await expect(page.locator(".holder .name")).to_have_text(["q"])
        await expect(page.get_by_label("Model", exact=True)).to_have_value("qwen")
        await page.get_by_label("Model", exact=True).select_option("llama")
        await page.get_by_label("Cache salt").fill("other")
        await page.get_by_role("button", name="Look up").click()
        await expect(page.locator("#prompt-summary")).to_contain_text("Nobody holds a beginning of it.")
        await page.get_by_label("Cache salt").fill("")
        await page.get_by_role("button", name="Look up").click()
        await expect(page.locator(".holder .name")).to_have_text(["a"])


async def test_one_name_of_several_specs_needs_no_choice(visitor: Visitor, make: Make) -> None:
    async with make("a", CHUNKS), make("odd", spec=LLAMA_FLOAT):
        page = await visitor.open()
        await expect(page.locator(".instance")).to_have_count(2)
        await look_up(page)
        await expect(page.locator(".holder .name")).to_have_text(["a"])


# --- What it does ----------------------------------------------------------------------------------------------------


async def test_a_move_moves_and_is_seen_to_its_end(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    await look_up(page)
    await page.get_by_role("button", name="Move…").click()
    dialog = page.get_by_role("dialog", name="Move this prompt")
    await expect(dialog.get_by_label("To")).to_have_value('{"instanceId":"c","tier":"TIER_HOST"}')
    await dialog.get_by_role("button", name="Move").click()
    await expect(dialog).to_be_hidden()
    await expect(page.locator(".operation h3")).to_have_text("a / host → c / host")
    await expect(page.locator(".operation .badge")).to_have_text("done")
    await expect(page.locator(".operation p.number")).to_contain_text("3 chunks · 40 tokens · 2.9 KiB")
    await expect(page.locator(".holder .name")).to_have_text(["c", "b"])
    assert (fleet["a"].chunks, fleet["c"].chunks) == ({}, CHUNKS)
    edge = page.locator(".edge")
    await expect(edge.locator("title")).to_have_text("a → c: 3 chunks, 2.9 KiB")
    await expect(page.locator("#traffic-total")).to_have_text("2.9 KiB fetched")


async def test_a_copy_from_a_chosen_holder_leaves_it_as_it_is(
    visitor: Visitor, fleet: dict[str, ScriptedInstance]
) -> None:
    page = await visitor.open()
    await look_up(page)
    await page.get_by_role("radio", name=re.compile("^b ")).check()
    await expect(page.locator("#prompt-chosen")).to_have_text("The copy on b:")
    await page.get_by_role("button", name="Copy…").click()
    dialog = page.get_by_role("dialog", name="Copy this prompt")
    await expect(dialog.get_by_label("From").locator("option")).to_have_text(["b / host", "b / disk"])
    await dialog.get_by_role("button", name="Copy").click()
    await expect(page.locator(".operation .badge")).to_have_text("done")
    assert (list(fleet["b"].chunks), list(fleet["c"].chunks)) == (KEYS[:1], KEYS[:1])


async def test_a_place_that_cannot_take_the_chunks_cannot_be_chosen(visitor: Visitor, make: Make) -> None:
    async with make("a", CHUNKS), make("odd", spec=LLAMA_FLOAT), make("q", spec=QWEN):
        page = await visitor.open()
        await look_up(page, join_keys(KEYS).hex())
        await page.get_by_role("button", name="Move…").click()
        await expect(page.locator("#dialog")).to_contain_text("There is no other instance that could hold these chunks")
        await page.get_by_role("button", name="Close").click()
        async with make("b"):
            await expect(page.locator(".instance")).to_have_count(4)
            await page.get_by_role("button", name="Move…").click()
            places = page.get_by_label("To").locator("option")
            await expect(places).to_have_text(["b / host", "odd / host (kv_dtype differs)", "q / host (other model)"])
            assert await places.evaluate_all("all => all.map(one => one.disabled)") == [False, True, True]


async def test_an_operation_that_runs_is_cancelled(
    visitor: Visitor, cache: Any, fleet: dict[str, ScriptedInstance]
) -> None:
    fleet["c"].going.clear()
    page = await visitor.open()
    await start_copy(cache)
    progress = page.get_by_role("progressbar", name="copy a / host → c / host")
    await expect(progress).to_have_attribute("aria-valuemax", "3")
    await expect(page.locator("#figure-running")).to_have_text("1")
    await expect(page.locator(".edge")).to_have_attribute("data-state", "running")
    await page.get_by_role("button", name="Cancel the copy a / host → c / host").click()
    await expect(page.locator(".operation .badge")).to_have_text("cancelled")
    await expect(page.locator(".operation .error")).to_contain_text("cancelled after 0 of 3 chunks")
    await expect(progress).to_be_hidden()
    assert await page.evaluate("document.activeElement.id") == "operations-title"
    assert fleet["c"].chunks == {}


async def test_what_failed_is_told_in_words(visitor: Visitor, cache: Any, fleet: dict[str, ScriptedInstance]) -> None:
    fleet["c"].limit = 2
    await start_copy(cache)
    page = await visitor.open()
    await expect(page.locator(".operation .badge")).to_have_text("done in part")
    await page.get_by_text("What was left undone").click()
    await expect(page.locator(".operation details li")).to_have_text("1 chunk: full")
    fleet["c"].limit = 0
    await fleet["c"].evict(KEYS)
    await start_copy(cache)
    await expect(page.locator(".operation .badge").first).to_have_text("failed")
    await expect(page.locator(".operation .error").first).to_have_text("full")


async def test_a_pin_is_made_shown_and_ended(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    await look_up(page)
    await page.get_by_role("button", name="Pin…").click()
    dialog = page.get_by_role("dialog", name="Pin this prompt")
    await dialog.get_by_label("Minutes").fill("90")
    await dialog.get_by_role("button", name="Pin").click()
    await expect(page.locator(".pin h3")).to_have_text("a / host")
    await expect(page.locator(".pin p.number")).to_contain_text(
        re.compile(r"3 chunks · 40 tokens · 1 h (29|30) min left")
    )
    assert len(fleet["a"].pins) == 1
    await page.get_by_role("button", name="Unpin 3 chunks on a / host").click()
    await expect(page.locator(".pin")).to_have_count(0)
    assert await page.evaluate("document.activeElement.id") == "pins-title"
    assert fleet["a"].pins == {}


async def test_a_clear_asks_first_and_can_only_count(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    await look_up(page)
    await page.get_by_role("button", name="Clear…").click()
    dialog = page.get_by_role("dialog", name="Clear this prompt")
    await dialog.get_by_label("Only count what would go").check()
    await dialog.get_by_role("button", name="Clear").click()
    await expect(page.locator(".operation .kind")).to_have_text(["dry run"])
    await expect(page.locator(".operation p.number")).to_contain_text("3 chunks")
    await page.get_by_role("button", name="Clear…").click()
    await dialog.get_by_role("button", name="Not now").click()
    assert fleet["a"].chunks == CHUNKS
    await page.get_by_role("button", name="Clear…").click()
    await dialog.get_by_label("Where").select_option("Every instance")
    await dialog.get_by_role("button", name="Clear").click()
    await expect(page.locator(".operation h3").first).to_have_text("every instance")
    await until(lambda: not fleet["a"].chunks and not fleet["b"].chunks)


async def test_a_refusal_stays_in_the_dialog(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    visitor.forgiven.append(REFUSED)
    page = await visitor.open()
    await look_up(page)
    await page.get_by_role("radio", name=re.compile("^b ")).check()
    await page.get_by_role("button", name="Pin…").click()
    dialog = page.get_by_role("dialog", name="Pin this prompt")
    await dialog.get_by_label("Minutes").evaluate("input => { input.removeAttribute('min'); input.value = -1; }")
    await dialog.get_by_role("button", name="Pin").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("ttl")
    await dialog.get_by_label("Minutes").fill("1")
    await dialog.get_by_role("button", name="Pin").click()
    await expect(dialog).to_be_hidden()


# --- How it lasts ----------------------------------------------------------------------------------------------------


async def test_the_page_recovers_when_the_coordinator_comes_back(
    visitor: Visitor, coordinator: Coordinator, make: Make
) -> None:
    visitor.forgiven += ["net::ERR_"]
    async with make("a", CHUNKS):
        page = await visitor.open()
        await expect(page.locator(".instance h3")).to_have_text(["a"])
        await look_up(page)
        await expect(page.locator(".holder")).to_have_count(1)
        ports = coordinator.http_ports
        await coordinator.aclose()
        await expect(page.locator("#state")).to_have_text("Connection lost")
        await expect(page.locator("#lost")).to_contain_text("The coordinator does not answer.")
        await expect(page.locator(".instance h3")).to_have_text(["a"])
    async with (
        Coordinator(port=0, http_ports=ports, cluster_secret="hush") as successor,
        rpc.open_channel(successor.address) as channel,
        ScriptedInstance(channel, {}, "anew", LLAMA, CHUNKS),
    ):
        await expect(page.locator("#state")).to_have_text(re.compile("Live|Rebuilding"))
        await expect(page.locator("#lost")).to_be_hidden()
        await expect(page.locator(".instance h3")).to_have_text(["anew"])
        await expect(page.locator(".holder .name")).to_have_text(["anew"])
        await page.close()


@pytest.mark.parametrize("lease_ttl", [1.0])
async def test_it_says_when_the_map_is_being_rebuilt(visitor: Visitor) -> None:
    page = await visitor.open()
    await look_up(page)
    await expect(page.locator("#prompt-summary")).to_contain_text("Nobody holds a beginning of it.")
    # A lease after the start all are back who would come.
    await expect(page.locator("#state")).to_have_text("Live")
    await expect(page.locator("#prompt-summary")).to_have_text("Nobody holds a beginning of it.")


async def test_rows_are_changed_in_place(visitor: Visitor, cache: Any, fleet: dict[str, ScriptedInstance]) -> None:
    await start_copy(cache)
    page = await visitor.open()
    await look_up(page)
    await expect(page.locator(".operation .badge")).to_have_text("done")
    await expect(page.locator(".holder .name").first).to_have_text("a")
    everything = page.locator(".instance, .instance .tiers li, .operation, .node, .edge, .holder, .segment")
    count = await everything.evaluate_all("all => all.map(one => { one.isOld = true; }).length")
    await report(fleet["a"], tiers=[TierUsage(tier=HOST, capacity_bytes=8 * GIB, used_bytes=GIB)])
    await fleet["b"].evict(KEYS)
    await expect(page.locator(".instance .tiers .number").first).to_have_text("1.0 of 8.0 GiB · 0 chunks")
    await rounds(page, 2)
    old = await everything.evaluate_all("all => all.filter(one => one.isOld).length")
    assert 0 < count - old <= 4  # the disk of a and the copy of b are gone
    assert await everything.count() == old


async def test_it_keeps_the_newest_operations_and_reads_only_what_is_new(
    visitor: Visitor, cache: Any, make: Make
) -> None:
    async with make("a", CHUNKS):
        for _ in range(230):
            await cache.Clear(ClearRequest(instance_id="a", all=True, dry_run=True), timeout=5)
        page = await visitor.open()
        await expect(page.locator(".operation")).to_have_count(200)
        await expect(page.locator(".operation .badge").last).to_have_text("done")
        await rounds(page, 1)
        visitor.calls.clear()
        await rounds(page, 2)
        asked = [call.partition(" ")[2] for call in visitor.calls if "ListOperations" in call]
        assert set(asked) == {'{"pageSize":20,"pageToken":""}'}
        await cache.Clear(ClearRequest(instance_id="a", all=True), timeout=5)
        await expect(page.locator(".operation .kind").first).to_have_text("clear")
        await expect(page.locator(".operation")).to_have_count(200)


async def test_it_does_not_ask_while_nobody_looks(visitor: Visitor, make: Make) -> None:
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
        await expect(page.locator(".instance h3")).to_have_text(["a"])


# --- Who uses it -----------------------------------------------------------------------------------------------------


async def test_everything_goes_by_keyboard(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    keyboard = page.keyboard
    await expect(page.locator(".instance")).to_have_count(3)
    await keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the instances")).to_be_focused()
    await keyboard.press("/")
    await expect(page.locator("#prompt-input")).to_be_focused()
    await keyboard.type(" ".join(map(str, PROMPT)))
    await keyboard.press("Control+Enter")
    await expect(page.locator(".holder")).to_have_count(2)
    for name in ("prompt-salt", "prompt-lora"):
        await keyboard.press("Tab")
        await expect(page.locator(f"#{name}")).to_be_focused()
    await keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Look up")).to_be_focused()
    await keyboard.press("Tab")
    await expect(page.get_by_role("radio", name=re.compile("^a "))).to_be_focused()
    await keyboard.press("ArrowDown")
    await expect(page.locator("#prompt-chosen")).to_have_text("The copy on b:")
    await keyboard.press("ArrowUp")
    await keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Move…")).to_be_focused()
    assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    await keyboard.press("Enter")
    for _ in range(8):  # round and round
        await keyboard.press("Tab")
        place = "document.activeElement === document.body || Boolean(document.activeElement.closest('dialog'))"
        assert await page.evaluate(place)
    await keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await expect(page.get_by_role("button", name="Move…")).to_be_focused()
    await keyboard.press("Enter")
    for _ in range(3):
        await keyboard.press("Tab")
    await keyboard.press("Enter")
    await expect(page.locator(".operation .badge")).to_have_text("done")
    assert fleet["c"].chunks == CHUNKS


async def test_shortcuts_are_listed_and_can_be_switched_off(visitor: Visitor) -> None:
    page = await visitor.open()
    for key, heading in (("i", "Instances"), ("o", "Operations"), ("p", "Pins"), ("v", "Traffic")):
        await page.keyboard.press(key)
        await expect(page.get_by_role("heading", name=heading, exact=True)).to_be_focused()
    await page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard")
    assert {"/", "i", "v", "o", "p", "r", "t", "?"} <= set(await dialog.locator("kbd").all_inner_texts())
    await dialog.get_by_label("Shortcuts of a single key are on").uncheck()
    await page.keyboard.press("Escape")
    await page.keyboard.press("?")
    await expect(dialog).to_be_hidden()
    await page.get_by_role("button", name="Keyboard shortcuts").click()
    await expect(dialog).to_be_visible()


async def test_the_theme_follows_the_system_until_it_is_chosen(visitor: Visitor) -> None:
    page = await visitor.open(color_scheme="dark")

    async def brightness() -> int:
        colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)))

    assert await brightness() < 150
    await page.emulate_media(color_scheme="light")
    assert await brightness() > 600
    await page.keyboard.press("t")
    await page.keyboard.press("t")
    await expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert await brightness() < 150
    await page.reload()
    assert await brightness() < 150


async def test_nothing_moves_for_those_who_want_no_motion(
    visitor: Visitor, cache: Any, fleet: dict[str, ScriptedInstance]
) -> None:
    fleet["c"].going.clear()
    await start_copy(cache)
    for motion, moving in (("no-preference", True), ("reduce", False)):
        page = await visitor.open(reduced_motion=motion)
        await expect(page.locator(".edge")).to_have_attribute("data-state", "running")
        name = await page.locator(".edge .line").evaluate("line => getComputedStyle(line).animationName")
        assert (name != "none") == moving
    fleet["c"].going.set()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_everything_can_be_read_and_has_a_name(
    visitor: Visitor, cache: Any, make: Make, fleet: dict[str, ScriptedInstance], theme: str
) -> None:
    fleet["c"].limit = 2
    await start_copy(cache)
    await cache.Pin(PinRequest(position=Position(instance_id="a"), tokens=PROMPT), timeout=5)
    async with make("odd", spec=LLAMA_FLOAT):
        page = await visitor.open(color_scheme=theme, reduced_motion="reduce")
        await expect(page.locator(".operation .badge")).to_have_text("done in part")
        await look_up(page)
        await expect(page.locator(".holder")).to_have_count(3)
        for size in SIZES:
            await page.set_viewport_size(size)  # type: ignore[arg-type]
            assert await page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert await page.evaluate(UNREADABLE) == []
        assert await page.evaluate(NAMELESS) == []
        await page.get_by_role("button", name="Clear…").click()
        assert await page.evaluate(UNREADABLE) == []
        assert await page.evaluate(NAMELESS) == []


UNREADABLE = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const parse = colour => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = rgb => rgb.slice(0, 3).map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = element => {
        for (let at = element; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour[3] === 255) return colour;
        }
        return [255, 255, 255, 255];
    };
    const found = [];
    const shell = document.querySelector("dialog[open]") ?? document.body;
    for (const element of shell.querySelectorAll("*")) {
        const text = [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("").trim();
        const content = element.placeholder || text;
        if (!content || !element.checkVisibility() || element.closest(".hidden, .skip, option, title")) continue;
        const style = getComputedStyle(element);
        const front = parse(element instanceof SVGElement ? style.fill : style.color);
        const [bright, dark] = [light(front), light(behind(element))].sort((one, other) => other - one);
        const ratio = (bright + 0.05) / (dark + 0.05);
        if (ratio < 4.5) found.push(`${content.slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
    return found;
}"""
"""Texts whose contrast is less than WCAG's AA asks of small ones."""

NAMELESS = """() => [...document.querySelectorAll(
    "button, a, input, select, textarea, [tabindex='0'], [role=meter], [role=progressbar], [role=img], [role=region]"
)].filter(element => element.checkVisibility()).filter(element => {
    const ids = (element.getAttribute("aria-labelledby") ?? "").split(" ");
    const by = ids.map(id => document.getElementById(id)?.textContent);
    const labels = [...(element.labels ?? [])].map(label => label.textContent);
    const own = element.matches("button, a") ? element.textContent : "";
    return ![element.getAttribute("aria-label"), ...by, ...labels, own].some(name => name?.trim());
}).map(element => element.outerHTML.slice(0, 120))"""
"""Things that can be used or mean something, and that a screen reader has no name for."""


async def test_who_shows_a_token_sees_the_fleet_of_its_tenant(browser: Browser, tmp_path: Path) -> None:
    async with guarded(tmp_path) as fleet:
        await fleet.instance("a", "ours", CHUNKS)
        await fleet.instance("b", "theirs", CHUNKS)
        visitor = Visitor(browser, fleet.coordinator)
        page = await visitor.open(http_credentials={"username": "me", "password": token_of("reader", "a")})
        await expect(page.get_by_role("heading", name="ours", exact=True)).to_be_visible()
        assert "theirs" not in await page.content()
        visitor.check()
