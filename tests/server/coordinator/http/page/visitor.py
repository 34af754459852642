"""A browser's visit to the page, and what tests of the page do and read there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from lmkv.v1.cache_service_pb2 import MoveRequest
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.support.prompts import with_prompt

GIB = 1 << 30
TEXT = " ".join(f"t{token}" for token in PROMPT)
"""What the tokenizer of these tests makes the prompt of."""
SIZES = ({"width": 1280, "height": 900}, {"width": 390, "height": 844}, {"width": 360, "height": 640})
NAMES = ".instance button.link"
"""The names in the table of instances."""
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

    async def open(self, path: str = "", **options: Any) -> Page:
        """A new page; the page of the fleet is connected to the coordinator."""
        context = await self._browser.new_context(**{"viewport": SIZES[0], **options})
        page = await context.new_page()
        page.set_default_timeout(120_000)
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self._hear("error", str(error)))
        page.on("dialog", lambda dialog: self._hear("error", f"a dialog of the browser: {dialog.message}"))
        page.on("request", self._note)
        await page.goto(self.url + path)
        if not path:
            await expect(page.locator("#state")).to_have_attribute("data-state", re.compile("live|rebuilding"))
        return page

    def check(self) -> None:
        """Asserts that nothing went wrong."""
        wrong = [text for text in self.complaints if not any(words in text for words in self.forgiven)]
        assert not wrong, wrong

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _note(self, request: Any) -> None:
        if not request.url.startswith(self.url):
            self.complaints.append(f"a request leaves the origin: {request.url}")
        self.calls.append(f"{request.url.removeprefix(self.url)} {request.post_data or ''}")


expect.set_options(timeout=60_000)


async def report(instance: ScriptedInstance, **fields: Any) -> None:
    """Has an instance say something more."""
    await instance._report(**fields)


async def look_up(page: Page, prompt: str = str(PROMPT)) -> None:
    """Asks who holds a prompt."""
    await page.fill("#prompt-input", prompt)
    await page.get_by_role("button", name="Look up").click()


async def start_copy(cache: Any, source: str = "a", destination: str = "c", **prompt: Any) -> None:
    """Has the prompt copied, or what else is named."""
    request = MoveRequest(copy=True, **with_prompt(**(prompt or {"tokens": PROMPT})))
    request.old_position.instance_id, request.new_position.instance_id = source, destination
    await cache.Move(request, timeout=60)


async def rounds(page: Page, number: int) -> None:
    """Waits until the page has asked for the instances again."""
    for _ in range(number):
        async with page.expect_response(re.compile("ListInstances")):
            pass


async def filled(bar: Any) -> float:
    """The part of a bar that is coloured, as it is drawn."""
    await bar.evaluate("bar => Promise.all(bar.getAnimations({subtree: true}).map(one => one.finished))")
    return float(await bar.evaluate("bar => parseFloat(getComputedStyle(bar, '::before').width) / bar.offsetWidth"))


async def parts(bar: Any, kind: str = "source") -> Any:
    """What a bar's segments stand for and the part of it that each takes, as it is drawn."""
    script = """(bar, kind) => Promise.all(bar.getAnimations({subtree: true}).map(one => one.finished)).then(() =>
        [...bar.children].map(part => [part.dataset[kind], part.getBoundingClientRect().width / bar.clientWidth]))"""
    return await bar.evaluate(script, kind)


def near(part: float) -> Any:
    """As near as pixels allow."""
    return pytest.approx(part, abs=0.01)
