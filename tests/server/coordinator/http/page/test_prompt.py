"""The page's lookup of a prompt."""

from __future__ import annotations

import base64
import json
import shlex
from typing import Any

import pytest
from playwright.async_api import expect

from lmkv.keys import join_keys
from tests.server.coordinator.cases import CHUNKS, KEYS, LLAMA_FLOAT, PROMPT, QWEN, keys_of
from tests.server.coordinator.http.page.visitor import NAMES, REFUSED, TEXT, Visitor, look_up, near, parts, rounds
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance

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


async def test_an_explanation_names_what_is_missing_and_why(
    visitor: Visitor, fleet: dict[str, ScriptedInstance]
) -> None:
    page = await visitor.open()
    await page.fill("#prompt-input", json.dumps(PROMPT))
    await page.get_by_role("button", name="Explain").click()
    rows = page.locator("#prompt-spans tr")
    await expect(rows).to_have_count(4)
    table = [(await row.locator("td").all_inner_texts())[:3] for row in await rows.all()]
    assert table[:3] == [
        ["a", "0–39", "held in host"],
        ["b", "0–15", "held in host"],
        ["b", "16–39", "missing: never stored"],
    ]
    await look_up(page)
    await expect(page.locator("#prompt-explanation")).to_be_hidden()
    await expect(page.locator(".holder")).to_have_count(2)


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
        found = next(iter(selection.values()), None)
        assert (len(found or ()) if kind == "keys" else found) == content, pasted
    keys = await page.evaluate(read, join_keys(KEYS).hex())
    assert [base64.b64decode(key) for key in keys["keys"]] == KEYS


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
    await expect(page.locator(NAMES).first).to_have_text("a")
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
        await expect(page.locator("#prompt-summary")).to_contain_text("No instance holds a prefix of it.")
        await page.get_by_label("Cache salt").fill("")
        await page.get_by_role("button", name="Look up").click()
        await expect(page.locator(".holder .name")).to_have_text(["a"])


async def test_one_name_of_several_specs_needs_no_choice(visitor: Visitor, make: Make) -> None:
    async with make("a", CHUNKS), make("odd", spec=LLAMA_FLOAT):
        page = await visitor.open()
        await expect(page.locator(".instance")).to_have_count(2)
        await look_up(page)
        await expect(page.locator(".holder .name")).to_have_text(["a"])
