"""The scheduler side: hits of which chunks are computed again, and compared with what the cache holds."""

from __future__ import annotations

import pytest

from lmkv_client.connector.messages import LayerError
from lmkv_client.connector.scheduler.audits import MIN_HONEST, Tolerance
from lmkv_client.connector.stats import AUDIT_OUTCOMES, AUDITED_CHUNKS
from tests.client.connector.scheduler.serving import COLD, HIT, MakeEngine, filled, forget_pages, until
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK, MODELS, SimulatedModel

PROMPT = list(range(5, 205))
"""Three chunks and 8 tokens, of whose hits the first audit is of the last chunk."""
FULL_COUNT = len(PROMPT) // CHUNK


def outcomes(engine: SimulatedEngine) -> dict[str, int]:
    """Compared chunks by outcome, without outcomes of which there are none."""
    counts = {outcome: int(engine.count(f"{AUDITED_CHUNKS}:{outcome}")) for outcome in AUDIT_OUTCOMES}
    return {outcome: count for outcome, count in counts.items() if count}


def falsify(engine: SimulatedEngine, index: int) -> None:
    """The pool's chunk of the prompt has other bytes than its key says."""
    content = list(engine.node.chunks.values())[index].content
    for rows in content.values():
        rows[5] += 1


def serve_again(engine: SimulatedEngine, request_id: str) -> int:
    """Answers the prompt when vLLM has no pages of it; how many tokens were computed."""
    forget_pages(engine)
    computed = engine.serve(request_id, PROMPT, output=4)
    engine.settle()
    return computed


# ---- sampling


def test_the_last_chunk_of_an_audited_hit_is_computed_and_compared(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1, rank_count=2), PROMPT)
    commits = list(engine.node.commits)
    assert serve_again(engine, "a") == HIT + CHUNK + 2
    assert outcomes(engine) == {"equal": 1}
    assert engine.count("audited_tokens") == CHUNK
    assert engine.count("miss_tokens:audited") == CHUNK
    assert engine.node.commits == commits, "what is held is not stored again"
    assert engine.count("skipped_chunks") == 0
    engine.check_nothing_is_left()


def test_without_a_rate_nothing_is_audited(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=0), PROMPT)
    assert serve_again(engine, "a") == HIT + 2
    assert outcomes(engine) == {}


def test_chunks_that_may_be_rounded_are_not_audited(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1, accept_lossy=True), PROMPT)
    assert serve_again(engine, "a") == HIT + 2
    assert outcomes(engine) == {}


def test_some_audits_begin_earlier_so_that_every_chunk_is_audited(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1), PROMPT)
    computed = {serve_again(engine, str(number)) for number in range(60)}
    assert computed == {HIT + 2 + count * CHUNK for count in (1, 2, 3)}
    assert set(outcomes(engine)) == {"equal"}
    engine.check_nothing_is_left()


def test_audits_compute_less_than_a_hundredth_of_all_tokens(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=0.999), PROMPT)
    for number in range(40):
        engine.serve(f"other {number}", [number, *range(400)])
        serve_again(engine, str(number))
    computed = sum(engine.scheduled_tokens.values())
    assert 0 < engine.count("audited_tokens") <= computed / 100
    engine.check_nothing_is_left()


@pytest.mark.parametrize("with_ends", [True, False])
def test_a_request_of_one_token_is_audited_when_it_has_ended(make_engine: MakeEngine, with_ends: bool) -> None:
    """Its pages stay until the credits for the comparison have come."""
    engine = filled(make_engine(audit_rate=1, save_partial_chunks=with_ends), PROMPT)
    forget_pages(engine)
    engine.serve("a", PROMPT, output=1)
    engine.settle()
    assert outcomes(engine) == {"equal": 1 + with_ends}
    engine.check_nothing_is_left()


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(("first_output", "length"), [(1, 200), (1, 201), (1, 230), (30, 230), (30, 300), (30, 400)])
def test_the_end_of_a_hit_inside_a_chunk_is_compared(
    make_engine: MakeEngine, first_output: int, length: int, is_wrong: bool
) -> None:
    """Whether the prompt ends with the held tokens, later in the same chunk, or in a later chunk."""
    engine = make_engine(audit_rate=1, save_partial_chunks=True, rank_count=2)
    engine.serve("filler", PROMPT, output=first_output)
    forget_pages(engine)
    (*_, end) = (chunk for chunk in engine.node.chunks.values() if chunk.token_count < CHUNK)
    if is_wrong:
        for rows in end.content.values():
            rows[1] += 1
    engine.serve("a", [*PROMPT, *engine.said["filler"], *range(300)][:length])
    engine.settle()
    assert outcomes(engine) == ({"equal": 1, "suspect": 1} if is_wrong else {"equal": 2})
    (audited,) = (one.chunk for one in engine.node.audits if one.chunk.token_count < CHUNK)
    assert (audited.first_token, audited.token_count) == (FULL_COUNT * CHUNK, end.token_count)
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_wrong_end_of_a_hit_is_confirmed_and_dropped(make_engine: MakeEngine, asked_for: bool) -> None:
    engine = make_engine(audit_rate=0 if asked_for else 1, save_partial_chunks=True)
    engine.serve("filler", PROMPT, output=1)
    forget_pages(engine)
    key, end = list(engine.node.chunks.items())[-1]
    for rows in end.content.values():
        rows[1] += 1
    params = {"lmkv": {"audit": "mine"}} if asked_for else None
    for name in ("a", "b"):
        forget_pages(engine)
        engine.serve(name, PROMPT, output=4, transfer=params)
        engine.settle()
    counts = outcomes(engine)
    assert (counts["suspect"], counts["wrong"]) == (1, 1)
    (wrong,) = (audited for audited in engine.node.audits if audited.wrong_keys)
    assert wrong.chunk.chunk_key == key == wrong.wrong_keys[: len(key)]
    if asked_for:
        report = engine.transfer_params["b"]["lmkv"]["audit"]
        assert report["skipped"] == {}
    engine.check_nothing_is_left()


def test_chunks_that_only_a_peer_has_are_audited_once_they_are_in_the_pool(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1), PROMPT)
    engine.node.move_to_peer()
    assert serve_again(engine, "a") == HIT + 2
    assert serve_again(engine, "b") == HIT + CHUNK + 2
    assert outcomes(engine) == {"equal": 1}
    engine.check_nothing_is_left()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_hits_of_several_parts_are_computed_as_a_whole_unless_they_have_states(
    make_engine: MakeEngine, model: SimulatedModel
) -> None:
    engine = make_engine(audit_rate=1, model=model, block_count=256)
    filled(engine, PROMPT)
    computed = serve_again(engine, "a")
    if model.has_states:
        assert computed < COLD
        assert outcomes(engine) == {}
    else:
        assert computed == COLD + 2
        assert set(outcomes(engine)) == {"equal"}
    engine.check_nothing_is_left()


# ---- audits that are asked for


def test_a_request_has_its_prompt_audited_and_the_next_one_says_how_it_was(make_engine: MakeEngine) -> None:
    """Whatever `audit_rate` is, and without vLLM's own pages if the request does not read them."""
    engine = filled(make_engine(audit_rate=0, rank_count=2), PROMPT)
    params = {"lmkv": {"audit": "first"}}
    forget_pages(engine)
    assert engine.serve("a", PROMPT, output=4, transfer=params) == COLD + 2
    engine.settle()
    assert outcomes(engine) == {"equal": FULL_COUNT}
    forget_pages(engine)
    assert engine.serve("b", PROMPT, output=4, transfer=params) == HIT + 2, "the audit is made once"
    report = engine.transfer_params["b"]["lmkv"]["audit"]
    assert report["outcomes"] == {"equal": FULL_COUNT}
    assert report["pending_count"] == 0
    assert report["skipped"] == {"shorter than a chunk": 1}
    assert {layer["mean"] for layer in report["layers"]} == {0}
    engine.settle()
    engine.check_nothing_is_left()


def test_an_audit_that_is_asked_for_confirms_what_is_suspect(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=0), PROMPT)
    falsify(engine, FULL_COUNT - 1)
    wrong = list(engine.node.chunks)[FULL_COUNT - 1]
    params = {"lmkv": {"audit": "mine"}}
    for name in ("a", "b", "c"):
        forget_pages(engine)
        if name == "c":
            engine.node.evict()
        engine.serve(name, PROMPT, output=4, transfer=params)
        engine.settle()
    report = engine.transfer_params["c"]["lmkv"]["audit"]
    assert report["outcomes"] == {"equal": 2 * (FULL_COUNT - 1), "suspect": 1, "wrong": 1}
    assert report["wrong_keys"] == [wrong.hex()]
    assert max(layer["most"] for layer in report["layers"]) > 0.01
    assert all(audited.chunk.is_requested for audited in engine.node.audits)
    engine.check_nothing_is_left()


def test_every_hit_is_audited_while_the_node_wants_it(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=0), PROMPT)
    engine.node.have_hits_audited(seconds=600)
    assert serve_again(engine, "a") == HIT + CHUNK + 2
    engine.node.have_hits_audited(seconds=0)
    assert serve_again(engine, "b") == HIT + 2
    assert outcomes(engine) == {"equal": 1}
    engine.check_nothing_is_left()


@pytest.mark.parametrize("audit", ["", "a" * 257, "line\nend", 7, None])
def test_a_malformed_name_of_an_audit_asks_for_none(make_engine: MakeEngine, audit: object) -> None:
    engine = filled(make_engine(audit_rate=0), PROMPT)
    forget_pages(engine)
    assert engine.serve("a", PROMPT, output=4, transfer={"lmkv": {"audit": audit}}) == HIT + 2
    engine.settle()
    assert outcomes(engine) == {}


EXPECTED_HITS = 1000
"""Hits for each audit at the default rate."""


def test_the_default_rate_finds_a_wrong_chunk_within_a_few_times_the_expected_hits(make_engine: MakeEngine) -> None:
    """Which hits are audited follows from their keys and their number, so that a run repeats. The next hit confirms."""
    engine = filled(make_engine(audit_rate=1 / EXPECTED_HITS), PROMPT)
    falsify(engine, FULL_COUNT - 1)
    hits = 0
    while not outcomes(engine) and hits < 4 * EXPECTED_HITS:  # a fault is missed so long once in 55 times
        hits += 1
        forget_pages(engine)
        engine.mixed_requests.add(str(hits))  # it gets the wrong chunk
        engine.add(str(hits), PROMPT, output=4)
        engine.run(str(hits))
    engine.settle()
    assert outcomes(engine) == {"suspect": 1}, f"none of {hits} hits was audited"
    serve_again(engine, "confirmed")
    assert outcomes(engine)["wrong"] == 1


# ---- judging


def test_a_wrong_chunk_is_suspect_first_and_wrong_when_it_differs_again(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1, rank_count=2), PROMPT)
    falsify(engine, FULL_COUNT - 1)
    serve_again(engine, "a")
    assert outcomes(engine) == {"suspect": 1}
    assert serve_again(engine, "b") == COLD + 2, "the second audit loads nothing"
    assert outcomes(engine) == {"suspect": 1, "equal": 2, "wrong": 1}
    reported = [audited for audited in engine.node.audits if audited.wrong_keys]
    assert [audited.wrong_keys for audited in reported] == [list(engine.node.chunks)[FULL_COUNT - 1]]
    (wrong,) = reported
    assert (wrong.chunk.first_token, wrong.chunk.token_count, wrong.chunk.tier) == (2 * CHUNK, CHUNK, "own")
    assert [layer.mean > 0 for layer in wrong.chunk.layers] == [True] * len(wrong.chunk.layers)
    assert sum(audited.chunk_count for audited in engine.node.audits) == 4
    engine.check_nothing_is_left()


def test_a_suspicion_that_is_not_confirmed_ends(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1), PROMPT)
    falsify(engine, FULL_COUNT - 1)
    serve_again(engine, "a")
    for rows in list(engine.node.chunks.values())[FULL_COUNT - 1].content.values():
        rows[5] -= 1
    serve_again(engine, "b")
    assert outcomes(engine) == {"suspect": 1, "equal": 3}
    assert serve_again(engine, "c") < COLD
    engine.check_nothing_is_left()


def test_an_aborted_second_audit_is_made_by_the_next_request(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1, step_tokens=CHUNK), PROMPT)
    falsify(engine, FULL_COUNT - 1)
    serve_again(engine, "a")
    forget_pages(engine)
    engine.add("b", PROMPT, output=4)
    until(engine, lambda: engine.scheduled_tokens.get("b", 0) > 0)
    engine.abort("b")
    assert serve_again(engine, "c") == COLD + 2
    assert outcomes(engine)["wrong"] == 1
    engine.check_nothing_is_left()


def test_a_chunk_that_was_overwritten_meanwhile_says_nothing(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(audit_rate=1, step_tokens=8), PROMPT)
    forget_pages(engine)
    engine.add("a", PROMPT, output=4)
    until(engine, lambda: engine.scheduled_tokens.get("a", 0) > 0)
    engine.node.evict()
    engine.run("a")
    engine.settle()
    assert outcomes(engine) == {"void": 1}
    engine.check_nothing_is_left()


def test_the_tolerance_follows_from_honest_errors() -> None:
    tolerance = Tolerance("bfloat16")
    assert tolerance.covers(LayerError(0.15, 0.4))
    for _ in range(MIN_HONEST):
        assert tolerance.covers(LayerError(0.003, 0.03))
    assert not tolerance.covers(LayerError(0.15, 0.1))
    assert not tolerance.covers(LayerError(0.003, 0.4))
    assert tolerance.covers(LayerError(0.02, 0.2))
