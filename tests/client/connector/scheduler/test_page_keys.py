"""Chunks that are named as SGLang names its pages (`hash_scheme: sha256-pages`), in vLLM's real scheduler."""

from __future__ import annotations

import pytest

from lmkv.keys import PAGE_HASH_SCHEME, ChunkKey, as_tokens, page_keys, page_seed, root_key, split_keys
from tests.client.connector.scheduler.serving import COLD, DECODED, HIT, PROMPT, MakeEngine, forget_pages
from tests.client.connector.scheduler.test_hints import action, hinted
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK


@pytest.fixture
def engine(make_engine: MakeEngine) -> SimulatedEngine:
    return make_engine(hash_scheme=PAGE_HASH_SCHEME, save_partial_chunks=True)


def pages(engine: SimulatedEngine, tokens: list[int], salt: str = "") -> list[ChunkKey]:
    packed, _ = page_keys(as_tokens(tokens), root_key(engine.kv.spec.fingerprint), CHUNK, page_seed(salt))
    return split_keys(packed)


def test_chunks_have_the_names_of_pages_and_only_full_ones_are_stored(engine: SimulatedEngine) -> None:
    assert engine.serve("a", PROMPT) == COLD
    assert engine.node.lookups[0].tokens == b"", "the end of a prompt has no key to be found by"
    assert list(engine.node.commits) == pages(engine, PROMPT)
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


def test_answers_are_stored_under_the_names_of_pages(engine: SimulatedEngine) -> None:
    engine.serve("a", PROMPT, output=2 * CHUNK)
    turn = [*PROMPT, *engine.said["a"]]
    assert set(pages(engine, turn[:-1])) == set(engine.node.chunks)
    forget_pages(engine)
    stored = (len(turn) - 1) // CHUNK * CHUNK
    assert engine.serve("b", [*turn, 7]) == len(turn) + 1 - stored + DECODED
    engine.check_nothing_is_left()


def test_a_salt_separates_tenants(engine: SimulatedEngine) -> None:
    engine.serve("a", PROMPT)
    forget_pages(engine)
    assert engine.serve("b", PROMPT, salt="tenant") == COLD
    assert set(pages(engine, PROMPT, "tenant")) <= set(engine.node.commits)
    engine.check_nothing_is_left()


def test_hints_about_tokens_name_pages_and_tenants_have_quotas_of_their_own(engine: SimulatedEngine) -> None:
    other = list(range(500, 500 + CHUNK + 1))
    for request_id, salt in (("a", "mine"), ("b", "")):
        engine.add(request_id, PROMPT, salt=salt, transfer=hinted(action("evict", tokens=other)))
        engine.run(request_id)
    first, second = engine.node.hints
    assert split_keys(first.chunk_keys) == pages(engine, other, "mine")
    assert split_keys(second.chunk_keys) == pages(engine, other)
    assert first.root_key != second.root_key
    engine.check_nothing_is_left()
