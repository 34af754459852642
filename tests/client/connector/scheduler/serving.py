"""Prompts, and engines that have stored them, for tests of the scheduler side."""

from __future__ import annotations

from collections.abc import Callable

from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK

MakeEngine = Callable[..., SimulatedEngine]

PROMPT = list(range(3, 203))
"""200 tokens: three chunks and 8 tokens."""
REST = len(PROMPT) % CHUNK
OUTPUT = 2
DECODED = OUTPUT - 1
"""The last token of an answer is never computed."""
COLD = len(PROMPT) + DECODED
"""Tokens computed where nothing is loaded."""
HIT = REST + DECODED
"""Tokens computed where every chunk is loaded."""
FOREVER = 10_000.0


def filled(engine: SimulatedEngine, prompt: list[int] = PROMPT) -> SimulatedEngine:
    """The engine, once it has stored the prompt and forgotten its own pages of it."""
    engine.serve("filler", prompt)
    forget_pages(engine)
    return engine


def forget_pages(engine: SimulatedEngine) -> None:
    """vLLM forgets all pages, once finished requests have none that are still stored."""
    until(engine, engine.scheduler.reset_prefix_cache)


def until(engine: SimulatedEngine, condition: Callable[[], bool]) -> None:
    """Steps until something is so."""
    for _ in range(50):
        if condition():
            return
        engine.step()
    raise AssertionError("it never came to that")


def with_peer(engine: SimulatedEngine, own_chunks: int = 0) -> SimulatedEngine:
    """The engine, after its node has moved all but the first chunks of the prompt to a peer."""
    filled(engine)
    engine.node.move_to_peer()
    if own_chunks:
        engine.node.peer_chunks, kept = {}, engine.node.peer_chunks
        engine.serve("own", PROMPT[: own_chunks * CHUNK])
        forget_pages(engine)
        engine.node.peer_chunks = kept
    return engine


SLOW = 1000.0
"""Seconds of a load that computing beats."""


def slowed(engine: SimulatedEngine, *, fetches_only: bool = False) -> SimulatedEngine:
    """The engine, after it has seen loads that were slow."""
    costs = engine.side._loads.costs
    for times in (costs.fetched,) if fetches_only else (costs.own, costs.fetched):
        for count in (1, 1, 3):  # the first one connects, and is not measured
            times.add(count * CHUNK, SLOW)
    return engine
