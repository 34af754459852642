"""Moves, copies, clears and pins from the page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import expect

from lmkv.keys import join_keys
from lmkv.v1.cache_service_pb2 import DrainRequest
from lmkv_server.coordinator.operations import drains
from tests.server.coordinator.cases import CHUNKS, KEYS, LLAMA_FLOAT, QWEN
from tests.server.coordinator.http.page.visitor import REFUSED, Visitor, look_up, start_copy
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance, until


async def test_a_move_moves_and_is_seen_to_its_end(visitor: Visitor, fleet: dict[str, ScriptedInstance]) -> None:
    page = await visitor.open()
    await look_up(page)
    await page.get_by_role("button", name="Move…").click()
    dialog = page.get_by_role("dialog", name="Move this prompt")
    await expect(dialog.get_by_label("To")).to_have_value('{"instanceId":"c","tier":"host"}')
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


async def test_a_drain_is_shown_with_its_instance_and_progress(
    visitor: Visitor, cache: Any, fleet: dict[str, ScriptedInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "CONFIRM_SECONDS", 0.0)  # scripted instances report nothing by themselves
    for instance in fleet.values():
        instance.going.clear()
    page = await visitor.open()
    await cache.Drain(DrainRequest(instance_id="a"), timeout=60)
    await expect(page.locator(".operation .kind")).to_have_text("drain")
    await expect(page.locator(".operation h3")).to_have_text("a")
    await expect(page.get_by_role("progressbar", name="drain a")).to_have_attribute("aria-valuemax", "1")
    await expect(page.locator(".operation p.number")).to_contain_text("0 of 1 chunk")
    for instance in fleet.values():
        instance.going.set()
    await expect(page.locator(".operation .badge")).to_have_text("done")
    await expect(page.locator(".operation p.number")).to_contain_text(re.compile("^1 chunk · "))
    assert list(fleet["a"].chunks) == KEYS


async def test_failures_are_explained(visitor: Visitor, cache: Any, fleet: dict[str, ScriptedInstance]) -> None:
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
    await expect(page.locator(".operation .kind")).to_have_text(["clear"])
    await expect(page.locator(".operation h3")).to_have_text("a (dry run)")
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
