"""The scheduler side: write credits, freed pages, and stores that fail."""

from __future__ import annotations

import pytest

from lmkv.keys import root_key
from lmkv_client.connector.scheduler.stores import MAX_FAILURES
from lmkv_client.engine.write_credits import KEPT_WHEN_IDLE
from tests.client.connector.scheduler.serving import COLD, PROMPT, MakeEngine, forget_pages, until
from tests.client.connector.simulated_models import CHUNK

# ---- write credits


def test_an_idle_engine_returns_the_credits_that_an_aborted_prompt_did_not_need(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", list(range(3, 3 + 12 * CHUNK)))  # looked up with a request for credits
    assert len(engine.node.credits_out) > KEPT_WHEN_IDLE
    engine.abort("a")
    engine.settle()
    assert len(engine.side._session.credits[0]) == len(engine.node.credits_out) == KEPT_WHEN_IDLE
    engine.check_nothing_is_left()


def test_credits_never_exceed_what_the_node_allows(make_engine: MakeEngine) -> None:
    engine = make_engine(credit_limit=3)
    for number in range(4):
        engine.add(str(number), [number, *range(600)], output=3)
    engine.run()
    assert engine.count("stored_tokens") > 0
    engine.check_nothing_is_left()


def test_a_chunk_for_which_there_was_no_credit_is_stored_in_a_later_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.generous = False
    engine.add("a", PROMPT, output=30)
    engine.step()
    engine.step()
    assert not engine.node.commits
    engine.node.generous = True
    engine.run("a")
    assert len(engine.node.commits) == 3
    assert engine.count("skipped_chunks") == 0
    engine.check_nothing_is_left()


def test_with_fewer_credits_than_chunks_all_are_stored_in_the_end(make_engine: MakeEngine) -> None:
    engine = make_engine(credit_limit=1)
    engine.serve("a", PROMPT, output=30)
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_chunks_that_never_found_a_credit_are_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.generous = False
    engine.serve("a", PROMPT, output=10)
    assert engine.count("skipped_chunks") == 3
    engine.check_nothing_is_left()


# ---- pages that vLLM frees while their request runs


def test_null_pages_of_a_local_hit_are_not_stored(make_engine: MakeEngine) -> None:
    """vLLM has the window of a prompt itself, the node has dropped all of it: null pages stand for the rest."""
    engine = make_engine(window=CHUNK)
    engine.serve("a", PROMPT)
    assert len(engine.node.commits) == 3
    engine.node.evict()
    assert engine.serve("b", PROMPT) < CHUNK, "vLLM has the window itself"
    assert not engine.node.chunks
    assert (engine.count("null_page_requests"), engine.count("skipped_chunks")) == (1, 3)
    forget_pages(engine)
    assert engine.serve("c", PROMPT) == COLD, "nothing wrong can be loaded"
    assert engine.count("null_page_requests") == 1
    engine.check_nothing_is_left()


def test_pages_that_were_freed_before_there_was_a_credit_are_not_stored(make_engine: MakeEngine) -> None:
    engine = make_engine(window=CHUNK, step_tokens=CHUNK)
    engine.node.generous = False
    engine.add("a", PROMPT, output=10)
    until(engine, lambda: len(engine.said["a"]) > 1)
    engine.node.generous = True
    engine.run("a")
    assert not engine.node.commits
    assert engine.count("null_page_requests") == 1
    engine.check_nothing_is_left()


def test_a_starving_engine_does_not_flood_its_node(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.generous = False
    engine.add("a", PROMPT, output=30)
    engine.step()
    engine.node.prompt = False
    for _ in range(20):
        engine.step()
    assert len(engine.node.unanswered) <= 1
    engine.run("a")
    engine.check_nothing_is_left()


# ---- writes that fail


def test_a_store_that_the_workers_skipped_is_tried_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (worker,) = engine.workers
    worker.skips_stores = True
    engine.add("a", PROMPT, output=10)
    engine.step()
    worker.skips_stores = False
    engine.run("a")
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_stores_that_keep_failing_are_given_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (worker,) = engine.workers
    worker.skips_stores = True
    engine.add("a", PROMPT, output=10)
    for _ in range(MAX_FAILURES + 2):
        engine.step()
    worker.skips_stores = False
    engine.run("a")
    assert not engine.node.commits
    assert engine.count("skipped_chunks") == 3
    engine.check_nothing_is_left()


@pytest.mark.parametrize("late_rank", [0, 1])
def test_ranks_may_report_a_store_after_different_steps(make_engine: MakeEngine, late_rank: int) -> None:
    engine = make_engine(rank_count=2)
    engine.workers[late_rank].reports_late = True
    engine.add("a", PROMPT, output=10)
    engine.step()
    assert not engine.node.commits
    engine.step()
    assert len(engine.node.commits) == 3
    engine.run("a")
    engine.check_nothing_is_left()


def test_a_store_that_one_rank_skipped_is_pending_until_the_other_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine(rank_count=2)
    engine.workers[0].skips_stores = engine.workers[1].reports_late = True
    engine.add("a", PROMPT, output=10)
    engine.step()
    assert engine.scheduler.connector.has_pending_push_work(), "the other rank still writes"
    engine.workers[0].skips_stores = engine.workers[1].reports_late = False
    engine.run("a")
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_what_one_of_two_ranks_has_skipped_is_not_committed(make_engine: MakeEngine) -> None:
    engine = make_engine(rank_count=2)
    engine.workers[1].skips_stores = True
    engine.add("a", PROMPT, output=10)
    engine.step()
    assert not engine.node.commits
    engine.workers[1].skips_stores = False
    engine.run("a")
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_a_commit_that_the_node_refuses_does_no_harm(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.refuses_commits = True
    engine.serve("a", PROMPT)
    assert not engine.node.chunks
    engine.check_nothing_is_left()


def test_commits_name_the_root_of_their_keys_as_owner(make_engine: MakeEngine) -> None:
    """What shares it shares a quota of the pool: one salt, model and adapter."""
    engine = make_engine()
    for request_id, salt in (("a", ""), ("b", "tenant"), ("c", "tenant")):
        engine.serve(request_id, [*range(CHUNK), *map(ord, request_id)] * 2, salt=salt)
        engine.settle()
    fingerprint = engine.kv.spec.fingerprint
    owners = {commit.owner_key for commit in engine.node.commit_messages}
    assert owners == {root_key(fingerprint), root_key(fingerprint, cache_salt="tenant")}
