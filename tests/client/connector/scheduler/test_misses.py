"""Why requests in vLLM's real scheduler computed what they computed: counters, reports, answers."""

from __future__ import annotations

import pytest

from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason, reason_name
from lmkv.runtime.patience import TIMEOUTS_UNTIL_SUSPECT
from lmkv.tiers import OWN
from lmkv.v1.chunk_pb2 import MISS_REASON_EVICTED_BY_STORE
from lmkv_client.connector.scheduler import side
from tests.client.connector.scheduler.serving import PROMPT, REST, MakeEngine, filled, until, with_peer
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK

FULL = len(PROMPT) - REST


def spans(engine: SimulatedEngine, request_id: str) -> list[tuple[str, int]]:
    engine.settle()
    (report,) = (report for report in engine.node.reports if report.engine_request_id == request_id)
    assert sum(span.token_count for span in report.spans) == len(PROMPT)
    return [(reason_name(span.reason) or span.tier, span.token_count) for span in report.spans]


def test_a_new_prompt_was_never_stored_and_its_end_is_no_whole_chunk(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    assert spans(engine, "a") == [("never_stored", FULL), ("uncacheable", REST)]
    assert engine.count(f"miss_tokens:{MissReason.NEVER_STORED}") == FULL
    assert engine.count(f"miss_tokens:{MissReason.UNCACHEABLE}") == REST


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_loaded_is_reported_by_tier_and_only_the_rest_is_missed(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous), own_chunks=1)
    engine.serve("a", PROMPT)
    assert spans(engine, "a") == [("own", CHUNK), ("peers", 2 * CHUNK), ("uncacheable", REST)]


def test_what_vllm_has_itself_is_reported_as_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("filler", PROMPT)
    engine.serve("a", PROMPT)
    (name, count), *_ = spans(engine, "a")
    assert (name, count >= FULL) == ("engine", True)


def test_the_reason_of_the_node_is_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.miss_reason = MISS_REASON_EVICTED_BY_STORE
    engine.serve("a", PROMPT)
    assert engine.count(f"miss_tokens:{MissReason.EVICTED_BY_STORE}") == FULL


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_hit_that_is_too_small_is_below_the_minimum(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = filled(make_engine(min_retrieve_tokens=FULL + 1, enable_async_loading=asynchronous))
    engine.serve("a", PROMPT)
    assert spans(engine, "a") == [("below_minimum", FULL), ("uncacheable", REST)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_too_little_to_fetch_is_below_the_minimum_behind_what_is_here(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = with_peer(make_engine(min_fetch_tokens=CHUNK + 1, enable_async_loading=asynchronous), own_chunks=2)
    engine.serve("a", PROMPT)
    assert spans(engine, "a") == [("own", 2 * CHUNK), ("below_minimum", CHUNK), ("uncacheable", REST)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_fetch_that_fails_is_a_failed_load(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous), own_chunks=1)
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    engine.node.deliver(1)
    engine.node.fail()
    engine.run("a")
    assert spans(engine, "a") == [("own", CHUNK), ("peers", CHUNK), ("load_failed", CHUNK), ("uncacheable", REST)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_fetch_from_a_peer_that_does_not_answer_is_an_unreachable_peer(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous), own_chunks=1)
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    engine.node.fail(Unreachable("no answer"))
    engine.run("a")
    assert spans(engine, "a") == [("own", CHUNK), ("peer_unreachable", 2 * CHUNK), ("uncacheable", REST)]


def test_what_another_salt_has_is_reported_to_the_operator_and_not_to_the_client(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.add("a", PROMPT, salt="another", transfer={"lmkv": {"explain": True}})
    engine.run("a")
    assert spans(engine, "a") == [("other_salt", FULL), ("uncacheable", REST)]
    assert engine.count(f"miss_tokens:{MissReason.OTHER_SALT}") == FULL
    assert engine.transfer_params["a"]["lmkv"]["prompt"][0]["reason"] == "never_stored"


def test_what_the_node_refuses_to_fetch_is_slower(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine())
    engine.node.refuses_fetches = True
    engine.serve("a", PROMPT)
    assert spans(engine, "a")[0] == ("slower", FULL)


def test_without_a_node_the_node_is_lost(make_engine: MakeEngine) -> None:
    engine = make_engine(attached=False)
    engine.serve("a", PROMPT)
    assert engine.count(f"miss_tokens:{MissReason.NODE_LOST}") == len(PROMPT)


def test_lookups_without_an_answer_time_out_until_the_node_is_suspect(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.prompt = False
    for number in range(TIMEOUTS_UNTIL_SUSPECT + 1):
        engine.serve(str(number), [number, *PROMPT[1:]])
    assert engine.count(f"miss_tokens:{MissReason.LOOKUP_TIMEOUT}") == TIMEOUTS_UNTIL_SUSPECT * len(PROMPT)
    assert engine.count(f"miss_tokens:{MissReason.NODE_SUSPECT}") == len(PROMPT)


def test_a_request_that_does_not_read_caches_cannot_be_cached(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.add("a", PROMPT, reads_caches=False)
    engine.run("a")
    assert spans(engine, "a") == [("uncacheable", len(PROMPT))]


def test_what_lacked_a_write_credit_when_it_was_computed_was_skipped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.generous = False
    engine.serve("first", PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("a", PROMPT)
    assert spans(engine, "a") == [("skipped", FULL), ("uncacheable", REST)]


def test_what_was_skipped_is_remembered_of_a_bounded_number_of_chunks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "MAX_SKIPPED", 8)
    skipped = make_engine().side._stores._skipped
    keys = [ChunkKey(number.to_bytes(8, "big") * 2) for number in range(100)]
    for at, key in enumerate(keys):
        skipped.add(key, OWN, MissReason.SKIPPED, 1.0 + at)
        assert skipped.get(key)
    assert sum(skipped.get(key) is not None for key in keys) <= side.MAX_SKIPPED


def test_the_end_of_a_prompt_that_lacked_a_write_credit_was_skipped(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.node.grants_partial = False
    engine.serve("first", PROMPT)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("a", PROMPT)
    assert spans(engine, "a") == [("own", FULL), ("skipped", REST)]


def test_an_answer_explains_itself_only_if_asked_to(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.add("a", PROMPT, transfer={"lmkv": {"explain": True}})
    engine.add("b", [7, *PROMPT], transfer={"lmkv": {}})
    engine.run("a", "b")
    answer = engine.transfer_params["a"]["lmkv"]
    assert answer["prompt"] == [
        {"token_count": FULL, "tier": "own"},
        {"token_count": REST, "reason": "uncacheable"},
    ]
    assert "prompt" not in engine.transfer_params["b"]["lmkv"]


def test_an_aborted_request_that_has_not_begun_is_not_counted(make_engine: MakeEngine) -> None:
    engine = make_engine(lookup_timeout=1000.0)
    engine.node.prompt = False
    engine.add("a", PROMPT)
    engine.step()
    engine.abort("a")
    engine.settle()
    assert not [report for report in engine.node.reports if report.engine_request_id == "a"]
    assert all(engine.count(f"miss_tokens:{reason}") == 0 for reason in MissReason)
