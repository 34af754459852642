"""An actor that acts until the test ends. Each actor has its own random generator, seeded by its name.

What they do is the same for the same seed; how far each thing comes is up to the machine.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any

import grpc

from lmkv.errors import LmkvError
from tests.chaos.tap import ACTOR

TROUBLE = (LmkvError, grpc.RpcError, TimeoutError, OSError, AssertionError, asyncio.InvalidStateError)
"""Errors that an engine may get from a killed or frozen node; `EngineClient` asserts that its stream continues."""


CLEAN_UP_SECONDS = 30.0
"""After this time, an actor that still runs is cancelled again."""


class Actor(ABC):
    """Something that acts until the test ends."""

    def __init__(self, name: str, seed: int, counts: Counter[str]) -> None:
        self.name = name
        self.chance = random.Random(f"{seed}/{name}")
        self.counts = counts
        """How often each thing was done, for the report."""

    @abstractmethod
    async def run(self) -> None:
        """Acts until it is cancelled. Raises what must never be."""


async def act(actors: Iterable[Actor], story: Coroutine[Any, Any, None]) -> None:
    """Runs all actors until the story is over. Raises what it raises, or the first fault that an actor finds."""
    tasks = [asyncio.create_task(_run(actor), name=actor.name) for actor in actors]
    tasks.append(asyncio.create_task(story))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        running = set(tasks)
        while running:  # an actor that suppresses an error of its clean-up suppresses its cancellation with it
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=CLEAN_UP_SECONDS)


async def _run(actor: Actor) -> None:
    ACTOR.set(actor.name)
    await actor.run()
