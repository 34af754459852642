"""Keys of prompts by tokens: short ones are computed at once, and leave the event loop to others in between."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from lmkv.rpc.messages import by_tokens
from lmkv_server.coordinator.core.layout_map import LayoutMap
from lmkv_server.coordinator.core.models import InstanceInfo, Models
from lmkv_server.coordinator.registry.selection import SHORT_KEYS, Selector
from tests.support.specs import LLAMA

SPEC = replace(LLAMA, chunk_size=1)


async def test_short_prompts_in_a_row_leave_the_loop_to_others() -> None:
    """A stream may carry thousands in one message."""
    models = Models()
    models.add(InstanceInfo(instance_id="a", epoch=1, peer_address="host:1000", specs=(SPEC,)))
    selector = Selector(models, LayoutMap())
    iterations = itertools.count()

    async def others() -> None:
        while True:
            next(iterations)
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await asyncio.sleep(0)
    prompt = by_tokens(range(SHORT_KEYS // 64))
    for _ in range(64 * 5):
        (selected,) = await selector.select(prompt)
        assert len(selected.keys) == 16 * SHORT_KEYS // 64
    running.cancel()
    assert next(iterations) >= 5
