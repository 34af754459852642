"""A prompt for models of several KV-cache groups, and engines that serve them. For tests of the scheduler side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from lmkv.spec import KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_LAST
from tests.client.connector.scheduler.serving import DECODED, MakeEngine, forget_pages
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK, MODELS

REST = 8
CHUNKS = 6
PROMPT = [(7 * at) % 491 for at in range(CHUNKS * CHUNK + REST)]
COLD = len(PROMPT) + DECODED
HIT = REST + DECODED
PAGES = 200
"""More than any test needs."""

every_model = pytest.mark.parametrize("name", MODELS)
"""For what depends on where windows, local chunks and states begin and end; `test_side_at_random` has all, too."""
one_of_each_kind = pytest.mark.parametrize(
    "name",
    [
        "full and a window that ends inside a chunk",
        "llama4: local chunks",
        "old mistral: all layers slide",
        "states",
        "states and a window",
    ],
)
WITH_FULL = [name for name, model in MODELS.items() if "full" in name or "llama" in name or "gemma" in name]


def engine_of(make_engine: MakeEngine, name: str, **options: object) -> SimulatedEngine:
    return make_engine(**{"model": MODELS[name], "block_count": PAGES} | options)


def filled(engine: SimulatedEngine, prompt: list[int] = PROMPT) -> SimulatedEngine:
    """The engine, once it has stored the prompt and forgotten its own pages of it."""
    engine.serve("filler", prompt)
    forget_pages(engine)
    return engine


def parts_of(engine: SimulatedEngine) -> range:
    return range(len(engine.kv.spec.parts))


def committed(engine: SimulatedEngine) -> Counter[int]:
    """The number of chunks whose part the node has, by part."""
    return Counter(stored.part for stored in engine.node.chunks.values())


def stored_chunks(spec: KvSpec, part: int, ends: Collection[int] = ()) -> set[int]:
    """The chunks of the prompt of which a part is stored, states apart. Prompts are known to part at `ends`."""
    kind, interval = spec.parts[part], spec.window_interval
    if kind.rule != PART_RULE_LAST or interval == 1:
        return {chunk for chunk in range(CHUNKS) if kind.is_needed(chunk, CHUNK)}
    ends = {CHUNKS, *range(interval, CHUNKS + 1, interval), *ends}
    return {chunk for end in ends for chunk in kind.needed(end * CHUNK, CHUNK)}


def hit_of(tokens: int) -> int:
    """Tokens of the longest hit for a prompt that is stored: at least one is left to compute."""
    return (tokens - 1) // CHUNK * CHUNK


def steps_at_chunks(name: str) -> dict[str, object]:
    """Options of an engine whose steps end with chunks, so that it has the states there."""
    return {"step_tokens": CHUNK} if MODELS[name].has_states else {}
