"""Writes the pictures of the page in docs/images.

`python -m tests.server.coordinator.http.page.images [FOLDER] [COUNT]`

The instances and their numbers are made up: nothing is measured.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import math
import random
import sys
import time
from pathlib import Path

from playwright.async_api import async_playwright

from lmkv.config import CoordinatorConfig
from lmkv.tiers import DISK, HOST
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.core.history import MAX_SAMPLES, PERIOD_SECONDS
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.core.models import InstanceInfo, ReportedStats, ReportedTier, ReportedTraffic
from lmkv_server.coordinator.services.services import Services
from tests.server.coordinator.http.page.conftest import arguments
from tests.support.specs import LLAMA

GIB = 1 << 30
CHUNK_BYTES = 9 << 20
HOUR = 3600.0
AS_WEBP = """async picture => {
    const image = new Image();
    image.src = `data:image/png;base64,${picture}`;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height);
    canvas.getContext("2d").drawImage(image, 0, 0);
    const blob = await canvas.convertToBlob({type: "image/webp", quality: 0.8});
    return new Uint8Array(await blob.arrayBuffer()).toBase64();
}"""
"""A PNG picture as WebP, both in base64."""


def add_instances(services: Services, count: int, random: random.Random) -> list[Instance]:
    """Registers instances that are alive for an hour; one in 15 has another dtype."""
    made = []
    for number in range(count):
        spec = dataclasses.replace(LLAMA, model_name="Qwen/Qwen3-8B", chunk_size=256, layer_count=36)
        if number % 15 == 9:
            spec = dataclasses.replace(spec, kv_dtype="float32")
        info = InstanceInfo(
            instance_id=f"lmkv-{number + 1}",
            epoch=1,
            peer_address=f"10.0.{number // 250}.{number % 250 + 1}:7000",
            specs=(spec,),
            version="0.1.0",
        )
        instance = services.core.instances.register(info, time.monotonic() - random.uniform(1, 3) * HOUR)
        instance.expire_time = time.monotonic() + HOUR
        instance.synced = number % 15 != 5
        instance.engine_count = random.choice((1, 1, 2, 4))
        made.append(instance)
    return made


def add_hour(services: Services, instances: list[Instance], random: random.Random) -> None:
    """Fills caches for an hour, and takes the samples."""
    moods = [random.uniform(0.3, 1) for _ in instances]
    begin = time.time() - MAX_SAMPLES * PERIOD_SECONDS
    for step in range(1, MAX_SAMPLES + 1):
        for instance, mood in zip(instances, moods, strict=True):
            warm = mood * (1 - math.exp(-step / 30))
            asked, loads = random.randrange(200, 400), random.randrange(1, 9)
            own = int(asked * warm * random.uniform(0.6, 0.7))
            last = instance.stats
            instance.stats = ReportedStats(
                asked_chunks=last.asked_chunks + asked,
                own_chunks=last.own_chunks + own,
                peer_chunks=last.peer_chunks + int((asked - own) * warm * 0.3),
                load_count=last.load_count + loads,
                load_seconds=last.load_seconds + 0.12 * loads,
                avoided_prefill_seconds=last.avoided_prefill_seconds + loads * random.uniform(0.5, 1.3),
                evicted_chunks=last.evicted_chunks,
            )
            instance.tiers = [
                tier(HOST, warm, 64 * GIB),
                tier(DISK, warm * step / 150, 1024 * GIB),
            ]
        services.history.take(services.core.instances, begin + step * PERIOD_SECONDS)


def tier(tier_id: str, fill: float, capacity_bytes: int) -> ReportedTier:
    """A tier that is filled to a fraction."""
    used_bytes = int(fill * capacity_bytes)
    return ReportedTier(
        tier=tier_id,
        capacity_bytes=capacity_bytes,
        used_bytes=used_bytes,
        chunk_count=used_bytes // CHUNK_BYTES,
    )


def add_traffic(instances: list[Instance], random: random.Random) -> None:
    """Lets each instance have fetched from a few others."""
    ids = [instance.info.instance_id for instance in instances]
    for instance in instances:
        peers = random.sample([one for one in ids if one != instance.info.instance_id], min(len(ids) - 1, 3))
        counts = [int(4 * random.paretovariate(0.8)) for _ in peers]
        traffic = [
            ReportedTraffic(instance_id=peer, chunk_count=count, transferred_bytes=count * CHUNK_BYTES)
            for peer, count in zip(peers, counts, strict=True)
        ]
        instance.stats = dataclasses.replace(instance.stats, traffic=tuple(traffic))


async def write(folder: Path, count: int) -> None:
    """Writes `page-light.webp` and `page-dark.webp`."""
    numbers = random.Random(7)
    async with Coordinator(CoordinatorConfig(port=0, http_port=0, lease_ttl=HOUR)) as coordinator:
        services = coordinator.tenants.unnamed
        instances = add_instances(services, count, numbers)
        add_hour(services, instances, numbers)
        add_traffic(instances, numbers)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(**arguments())
            for theme in ("light", "dark"):
                page = await browser.new_page(
                    viewport={"width": 1280, "height": 1560},
                    device_scale_factor=1.5,
                    color_scheme="dark" if theme == "dark" else "light",
                )
                await page.goto(f"http://{coordinator.http_address}/")
                await page.locator("#history canvas").nth(2).wait_for()
                await page.evaluate("document.getElementById('prompt-title').closest('section').hidden = true")
                picture = base64.b64encode(await page.screenshot()).decode()
                blank = await browser.new_page()
                webp = await blank.evaluate(AS_WEBP, picture)
                (folder / f"page-{theme}.webp").write_bytes(base64.b64decode(webp))
            await browser.close()


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1] if sys.argv[1:] else "docs/images"), int(sys.argv[2]) if sys.argv[2:] else 12))
