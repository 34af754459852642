"""Requests whose tokens do not say all there is to know of them, in vLLM's real scheduler: they go without lmkv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK

PROMPT = list(range(3, 3 + 3 * CHUNK))
OUTPUT = 2


@pytest.mark.parametrize(
    "more", [{"prompt_embeds": torch.zeros(len(PROMPT), 8)}, {"resumable": True}], ids=["embeddings", "resumable"]
)
def test_what_is_more_than_its_tokens_is_neither_looked_up_nor_loaded_nor_stored(
    make_engine: Callable[..., SimulatedEngine], more: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.serve("filler", PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    lookups, commits = len(engine.node.lookups), len(engine.node.commits)
    engine.add("a", PROMPT, output=OUTPUT, **more)
    while len(engine.said["a"]) < OUTPUT:
        engine.step()
    assert engine.scheduled_tokens["a"] == len(PROMPT) + OUTPUT - 1
    assert (len(engine.node.lookups), len(engine.node.commits)) == (lookups, commits)
    engine.abort("a")
    engine.check_nothing_is_left()
