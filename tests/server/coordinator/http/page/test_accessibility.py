"""The page by keyboard, in themes, without motion, for screen readers, and with a token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import PinRequest
from lmkv.v1.chunk_pb2 import Position
from tests.server.coordinator.cases import CHUNKS, LLAMA_FLOAT, PROMPT
from tests.server.coordinator.guarded import guarded, token_of
from tests.server.coordinator.http.page.visitor import SIZES, Visitor, look_up, start_copy
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance


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
    await expect(page.get_by_role("button", name="Explain")).to_be_focused()
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
    for key, heading in (("i", "Instances"), ("h", "History"), ("o", "Operations"), ("p", "Pins"), ("v", "Traffic")):
        await page.keyboard.press(key)
        await expect(page.get_by_role("heading", name=heading, exact=True)).to_be_focused()
    await page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard")
    assert {"/", "f", "i", "h", "v", "o", "p", "r", "t", "?"} <= set(await dialog.locator("kbd").all_inner_texts())
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
    await cache.Pin(PinRequest(prompt=by_tokens(PROMPT), position=Position(instance_id="a")), timeout=5)
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
        await expect(page.get_by_role("button", name="ours", exact=True)).to_be_visible()
        assert "theirs" not in await page.content()
        visitor.check()
