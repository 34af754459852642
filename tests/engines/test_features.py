"""vLLM's other features with the connector on: every answer is that of an engine without lmkv, token by token.

`bare` has no connector. `drafting` speculates by n-grams while it prefills in pieces, and publishes KV events.
`forgetful` has no prefix cache of its own, and is configured to fail requests whose loads fail.
docs/guides/vllm.md lists every feature with its test.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lmkv_client.demo.engine import LMKV_TRANSFER_CONFIG
from tests.engines.llm import LlmFleet, LlmProcess, Nursery, make_prompt, poison

pytestmark = pytest.mark.engine

EVENT_TIMEOUT_SECONDS = 120.0
BLOCK = 64
CHUNK = 256
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where `drafting` publishes."""
    return f"ipc://{tmp_path_factory.mktemp('ev') / 's'}"


@pytest.fixture(scope="module")
def fleet(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, events: str
) -> Iterator[LlmFleet]:
    """All three, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs")) as fleet:
        fleet.add("bare", transfer_config=None)
        fleet.add(
            "drafting",
            block_size=BLOCK,
            max_num_batched_tokens=300,
            speculative_config=NGRAMS,
            kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "topic": "kv"},
        )
        fleet.add(
            "forgetful",
            {"verify_loads": "true"},
            enable_prefix_caching=False,
            transfer_config={**LMKV_TRANSFER_CONFIG, "kv_load_failure_policy": "fail"},
        )
        fleet.start()
        yield fleet


@pytest.fixture(scope="module")
def bare(fleet: LlmFleet) -> LlmProcess:
    """The engine whose answers are right."""
    return fleet.engines["bare"]


def test_drafts_that_are_rejected_are_never_stored(fleet: LlmFleet, bare: LlmProcess, seed: int) -> None:
    """Answers fill the chunk that their prompt began: the next turn hits as if it had computed them."""
    drafting = fleet.engines["drafting"]
    few: dict[str, Any] = {"max_tokens": 60, "allowed_token_ids": [5, 6, 7]}  # so that some guesses are right
    prompts = [make_prompt(seed + number, CHUNK - 20) for number in range(3)]
    expected = bare.ask(*prompts, **few).token_ids
    first = drafting.ask(*prompts, **few)
    assert first.token_ids == expected
    drafted, accepted = (first.grown[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
    assert 0 < accepted < drafted, "drafts of both kinds"
    assert first.stored_tokens == 3 * CHUNK
    turns = [
        make_prompt(seed + 10 + number, 400, prefix=[*prompt, *said])
        for number, (prompt, said) in enumerate(zip(prompts, expected, strict=True))
    ]
    second = drafting.ask_again(*turns)
    assert second.token_ids == bare.ask(*turns).token_ids
    assert second.loaded_tokens == 3 * CHUNK


def test_without_a_prefix_cache_of_its_own_an_engine_has_lmkvs(fleet: LlmFleet, bare: LlmProcess, seed: int) -> None:
    forgetful = fleet.engines["forgetful"]
    prompt = make_prompt(seed, 1000)
    expected = bare.ask(prompt).token_ids
    for loaded in (0, 768, 768):
        answers = forgetful.ask(prompt)
        assert (answers.token_ids, answers.loaded_tokens, answers.cached_tokens) == (expected, loaded, loaded)


def test_a_load_that_fails_is_computed_whatever_the_policy_says(fleet: LlmFleet, bare: LlmProcess, seed: int) -> None:
    forgetful = fleet.engines["forgetful"]
    prompt = make_prompt(seed, 1000)
    forgetful.ask(prompt)
    poison(fleet.node_pid("forgetful"))
    answers = forgetful.ask(prompt)
    poison(fleet.node_pid("forgetful"))  # negative twice is as it was
    assert answers.grown["lmkv:load_failures_total"] == 1
    assert answers.token_ids == bare.ask(prompt).token_ids
    assert "kv_load_failure_policy" in forgetful.log()


@pytest.mark.parametrize("level", [0, 1])
def test_an_engine_that_has_slept_answers_as_before(fleet: LlmFleet, bare: LlmProcess, seed: int, level: int) -> None:
    """vLLM frees no memory on CPUs. From level 1 on it has the connector forget everything: weights may change."""
    forgetful = fleet.engines["forgetful"]
    prompt = make_prompt(seed, 1000)
    forgetful.ask(prompt)
    forgetful.sleep(level)
    for loaded in (0 if level else 768, 768):
        answers = forgetful.ask(prompt)
        assert (answers.token_ids, answers.loaded_tokens) == (bare.ask(prompt).token_ids, loaded)


def test_an_engine_whose_pages_were_released_and_restored_loads_again(
    fleet: LlmFleet, bare: LlmProcess, seed: int
) -> None:
    """The hooks of vLLM 0.33, called by hand: on CPUs it has no sleep mode."""
    forgetful = fleet.engines["forgetful"]
    prompt = make_prompt(seed, 1000)
    expected = bare.ask(prompt).token_ids
    forgetful.ask(prompt)
    forgetful.release_pages()
    answers = forgetful.ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens) == (expected, 0)
    assert answers.grown["lmkv:load_failures_total"] == 1
    forgetful.release_pages(False)
    for loaded in (0, 768):  # the node has dropped what could not be loaded
        answers = forgetful.ask(prompt)
        assert (answers.token_ids, answers.loaded_tokens) == (expected, loaded)


def test_vllms_kv_events_report_stores_by_vllms_hashes(fleet: LlmFleet, events: str, seed: int) -> None:
    drafting = fleet.engines["drafting"]
    prompt = make_prompt(seed, 3 * CHUNK + 100)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(events)
        socket.subscribe("kv")
        next(batches(drafting, socket))  # it is connected
        drafting.ask(prompt, max_tokens=1, salt="tenant")
        stored: dict[str, list[dict[str, Any]]] = {"CPU": [], "GPU": []}
        for batch in batches(drafting, socket):
            for event in batch:
                if event["type"] == "BlockStored":
                    stored[event["medium"]].append(event)
            if len(stored["CPU"]) == 3:
                break
    ours, theirs = ({hash_ for event in stored[medium] for hash_ in event["block_hashes"]} for medium in stored)
    assert ours <= theirs, "a router finds our blocks under the names that it knows"
    chunks = stored["CPU"]
    assert [token for event in chunks for token in event["token_ids"]] == prompt[: 3 * CHUNK]
    assert {event["block_size"] for event in chunks} == {BLOCK}
    assert chunks[0]["parent_block_hash"] is None
    for before, event in itertools.pairwise(chunks):
        assert event["parent_block_hash"] == before["block_hashes"][-1]
    assert chunks[0]["extra_keys"] == [["tenant"], None, None, None]


def batches(engine: LlmProcess, socket: zmq.Socket[bytes]) -> Iterator[list[dict[str, Any]]]:
    """Events as vLLM packs them. While none come the engine is kept busy: it publishes when it has taken a step."""
    deadline = time.monotonic() + EVENT_TIMEOUT_SECONDS
    while True:
        while not socket.poll(200):
            assert time.monotonic() < deadline, "nothing is published any more"
            engine.ask_again([3, 4, 5], max_tokens=1)
        _topic, _sequence, payload = socket.recv_multipart()
        _time, events, *_rank = msgspec.msgpack.decode(payload)
        yield events
