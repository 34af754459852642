"""What an encoder makes of a picture is loaded by every engine that sees the picture: the encoder runs once a fleet.

vLLM names the pictures of all engines here by counters of their processes, so that no engine finds its own outputs in
vLLM's cache, and equal names of different pictures meet in the node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.engines.llm import LlmFleet, LlmProcess, Nursery, Picture, make_prompt
from tests.support.models import PICTURE_SIZE, PICTURE_TOKENS, make_unusual
from tests.waiting import POLL_SECONDS, WAIT_SECONDS

PROMPT = make_prompt(1, 100)
OUTPUT_BYTES = PICTURE_TOKENS * 128 * 4
"""Of one picture: float32 embeddings of 128 elements."""
ENGINE: Mapping[str, Any] = {
    "transfer_config": None,
    "ec_transfer_config": {"ec_connector": "LMKVECConnector", "ec_role": "ec_both"},
    "block_size": 32,
    "max_model_len": 1024,
    "mm_processor_cache_gb": 0,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """Two engines with nodes of their own that share by a coordinator; `first` has a disk."""
    model = make_unusual(tmp_path_factory.mktemp("models") / "pictures", "pictures")
    disk = tmp_path_factory.mktemp("disk")
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("first", {"local_disk": str(disk), "max_local_disk_size": "64MiB"}, **ENGINE)
        fleet.add("second", **ENGINE)
        fleet.start()
        yield fleet


def picture(seed: int, uuid: str = "", processor: Mapping[str, Any] | None = None) -> Picture:
    return Picture(seed=seed, size=PICTURE_SIZE, uuid=uuid, processor=processor or {})


class Seen:
    """What an engine answers to a prompt with a picture, and what lmkv did."""

    def __init__(self, engine: LlmProcess, shown: Picture, **options: Any) -> None:
        runs = engine.encoder_runs()
        answers = engine.ask(PROMPT, picture=shown, logprobs=0, **options)
        self.tokens = answers.token_ids[0]
        self.logprobs = answers.answers[0].logprobs
        self.runs = engine.encoder_runs() - runs
        self.hits = int(answers.grown["lmkv:encoder_hits_total"])
        self.misses = int(answers.grown["lmkv:encoder_misses_total"])


def stored_bytes(engine: LlmProcess) -> float:
    engine.ask(PROMPT[:8], max_tokens=1)  # a step reports what workers have stored
    return engine.metrics()["lmkv:encoder_stored_bytes_total"]


def encoded(engine: LlmProcess, shown: Picture, **options: Any) -> Seen:
    """The answer with a run of the encoder, whose output is stored then."""
    before = stored_bytes(engine)
    seen = Seen(engine, shown, **options)
    assert (seen.runs, seen.hits, seen.misses) == (1, 0, 1)
    deadline = time.monotonic() + WAIT_SECONDS
    while stored_bytes(engine) < before + OUTPUT_BYTES:
        assert time.monotonic() < deadline, "the output is not stored"
        time.sleep(POLL_SECONDS)
    return seen


def loaded(engine: LlmProcess, shown: Picture, **options: Any) -> Seen:
    """The answer without a run of the encoder."""
    seen = Seen(engine, shown, **options)
    assert (seen.runs, seen.hits, seen.misses) == (0, 1, 0)
    return seen


def test_a_picture_is_encoded_once_and_the_answer_is_the_same(fleet: LlmFleet) -> None:
    first = fleet.engines["first"]
    one, other = encoded(first, picture(1)), encoded(first, picture(2))
    assert one.tokens != other.tokens, "the pictures make no difference"
    again = loaded(first, picture(1))
    assert (again.tokens, again.logprobs) == (one.tokens, one.logprobs)
    assert loaded(first, picture(2)).tokens == other.tokens


def test_another_engine_loads_from_its_peer(fleet: LlmFleet) -> None:
    first, second = fleet.engines["first"], fleet.engines["second"]
    assert loaded_in_time(second, picture(1)).tokens == Seen(first, picture(1)).tokens
    own = encoded(second, picture(3))
    assert loaded_in_time(first, picture(3)).tokens == own.tokens
    assert loaded(first, picture(3)).tokens == own.tokens, "it is in the own node now"


def test_options_of_the_processor_and_other_salts_miss(fleet: LlmFleet) -> None:
    first = fleet.engines["first"]
    usual = loaded(first, picture(1))
    changed = encoded(first, picture(1, processor={"image_mean": [0.0, 0.0, 0.0]}))
    assert changed.tokens != usual.tokens, "the option makes no difference"
    assert encoded(first, picture(1), salt="of a tenant").tokens == usual.tokens
    assert loaded(first, picture(1), salt="of a tenant").tokens == usual.tokens
    assert loaded(first, picture(1)).tokens == usual.tokens


def test_several_requests_for_one_picture_at_once(fleet: LlmFleet) -> None:
    first = fleet.engines["first"]
    runs = first.encoder_runs()
    answers = first.ask(PROMPT, PROMPT[:50], PROMPT, picture=picture(1))
    assert first.encoder_runs() == runs
    assert answers.grown["lmkv:encoder_hits_total"] == 3
    assert answers.token_ids[0] == answers.token_ids[2] == loaded(first, picture(1)).tokens


def test_a_name_that_a_caller_chose_for_two_pictures_is_not_trusted(fleet: LlmFleet) -> None:
    first = fleet.engines["first"]
    loaded(first, picture(1, uuid="chosen"))
    confused = Seen(first, picture(2, uuid="chosen"))
    assert (confused.hits, confused.misses) == (0, 0)
    assert loaded(first, picture(2)).tokens != loaded(first, picture(1)).tokens


def test_a_restarted_node_loads_from_its_disk(fleet: LlmFleet) -> None:
    """The second engine has no part: its node has dropped the picture's output, which only the disk has."""
    first = fleet.engines["first"]
    before = encoded(first, picture(4))
    os.kill(fleet.node_pid("first"), signal.SIGKILL)
    assert Seen(first, picture(5)).hits == 0, "a picture without a node is encoded"
    assert loaded_in_time(first, picture(4)).tokens == before.tokens


def test_an_engine_with_a_killed_node_encodes_and_stores_again_later(fleet: LlmFleet) -> None:
    second = fleet.engines["second"]
    before = encoded(second, picture(6))
    os.kill(fleet.node_pid("second"), signal.SIGKILL)
    after = Seen(second, picture(6))
    assert (after.runs, after.tokens) == (1, before.tokens)
    assert loaded_in_time(second, picture(6)).tokens == before.tokens


def loaded_in_time(engine: LlmProcess, shown: Picture) -> Seen:
    """The first answer without a run of the encoder, once reports have arrived or a node was started again."""
    deadline = time.monotonic() + 2 * WAIT_SECONDS
    while (seen := Seen(engine, shown)).runs:
        assert time.monotonic() < deadline, f"the encoder runs each time:\n{engine.log()[-3000:]}"
        time.sleep(POLL_SECONDS)
    return seen


@pytest.fixture(scope="module")
def roles(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """A producer, a consumer, and an engine that keeps KV in the same node as outputs; each with a node of its own."""
    model = make_unusual(tmp_path_factory.mktemp("models") / "pictures", "pictures")
    apart = {"ec_connector": "LMKVECConnector"}
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        for role in ("producer", "consumer"):
            fleet.add(role, **{**ENGINE, "ec_transfer_config": apart | {"ec_role": f"ec_{role}"}})
        with_kv = {name: value for name, value in ENGINE.items() if name != "transfer_config"}
        fleet.add("with-kv", {"chunk_size": "64"}, **with_kv)
        fleet.start()
        yield fleet


def test_a_consumer_loads_what_a_producer_has_encoded(roles: LlmFleet) -> None:
    producer, consumer = roles.engines["producer"], roles.engines["consumer"]
    own = Seen(consumer, picture(1))
    assert (own.runs, own.hits) == (1, 0), "without an output it encodes"
    assert Seen(consumer, picture(1)).runs == 1, "and stores nothing"
    runs = producer.encoder_runs()
    producer.ask(PROMPT, picture=picture(1), max_tokens=1)
    assert producer.encoder_runs() == runs + 1
    assert loaded_in_time(consumer, picture(1)).tokens == own.tokens


def test_a_producer_encodes_nothing_that_the_fleet_has(roles: LlmFleet) -> None:
    producer, with_kv = roles.engines["producer"], roles.engines["with-kv"]
    encoded(with_kv, picture(2))
    deadline = time.monotonic() + WAIT_SECONDS
    runs = producer.encoder_runs() - 1
    while runs < producer.encoder_runs():
        assert time.monotonic() < deadline, "the encoder runs each time"
        runs = producer.encoder_runs()
        producer.ask(PROMPT, picture=picture(2), max_tokens=1)
    assert loaded_in_time(roles.engines["consumer"], picture(2)).tokens == Seen(with_kv, picture(2)).tokens


def test_kv_and_outputs_share_a_node(roles: LlmFleet) -> None:
    """What KV covers needs no output."""
    with_kv, consumer = roles.engines["with-kv"], roles.engines["consumer"]
    first = encoded(with_kv, picture(3))
    again = with_kv.ask(PROMPT, picture=picture(3))
    assert (again.loaded_tokens, again.token_ids[0]) == (128, first.tokens)
    assert (again.grown["lmkv:encoder_hits_total"], again.grown["lmkv:encoder_misses_total"]) == (0, 0)
    assert loaded_in_time(consumer, picture(3)).tokens == first.tokens


def test_ranks_load_what_the_first_of_them_has_stored(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Scheduler and workers are processes of their own: outputs are copied from one to the others."""
    model = make_unusual(tmp_path_factory.mktemp("models") / "pictures", "pictures")
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs")) as fleet:
        engine = fleet.add("ranks", tensor_parallel_size=2, **ENGINE)
        fleet.start()
        one, other = encoded(engine, picture(1)), encoded(engine, picture(2))
        assert one.tokens != other.tokens
        assert loaded(engine, picture(1)).tokens == one.tokens


def test_no_output_of_old_weights_is_loaded(roles: LlmFleet, tmp_path: Any) -> None:
    with_kv = roles.engines["with-kv"]
    encoded(with_kv, picture(4))
    with_kv.load_weights(make_unusual(tmp_path / "pictures", "pictures"))
    with_kv.forget(external=True)
    seen = Seen(with_kv, picture(4))
    assert (seen.runs, seen.hits, seen.misses) == (1, 0, 0)
