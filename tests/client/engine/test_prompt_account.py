"""The account of one prompt: where its tokens came from, and why the others were computed."""

from __future__ import annotations

from lmkv.keys import ChunkKey, as_tokens
from lmkv.misses import MissReason, reason_name, reason_to_proto
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.v1.chunk_pb2 import PromptSpan
from lmkv.v1.engine_service_pb2 import Act, AttachRequest
from lmkv_client.engine.counters import Counters
from lmkv_client.engine.prompt_account import (
    MAX_BEGINNINGS,
    MAX_REPORTS,
    Beginnings,
    PromptAccount,
    PromptAccounts,
    spans_in_answer,
)

CHUNK = 4


def account(token_count: int, hit_tokens: int | None = None, *missed: tuple[MissReason, int]) -> PromptAccount:
    """The account of a prompt whose lookup was answered, unless there is no hit."""
    made = PromptAccount(token_count, CHUNK)
    if hit_tokens is not None:
        spans = [PromptSpan(reason=reason_to_proto(reason), chunk_count=count) for reason, count in missed]
        made.answered(hit_tokens, spans)
    return made


def summary(account: PromptAccount) -> list[tuple[str, int]]:
    return [(reason_name(span.reason) or span.tier, span.token_count) for span in account.spans()]


def test_a_prompt_that_is_not_asked_for_cannot_be_cached() -> None:
    prompt = account(10)
    assert prompt.take(3, {})
    assert summary(prompt) == [("engine", 3), ("uncacheable", 7)]


def test_a_prompt_without_an_answer_says_why_there_is_none() -> None:
    for reason in (MissReason.LOOKUP_TIMEOUT, MissReason.NODE_SUSPECT):
        prompt = account(10)
        prompt.unanswered(reason)
        prompt.take(0, {})
        assert summary(prompt) == [(reason, 10)]


def test_a_node_that_is_lost_answers_no_lookup_and_brings_nothing_of_a_hit() -> None:
    waiting = account(10)
    waiting.unanswered(MissReason.LOOKUP_TIMEOUT)
    waiting.node_lost()
    waiting.take(0, {})
    assert summary(waiting) == [("node_lost", 10)]
    found = account(8, 4, (MissReason.NEVER_STORED, 1))
    found.node_lost()
    found.take(0, {})
    assert summary(found) == [("node_lost", 4), ("never_stored", 4)]


def test_behind_the_hit_the_reasons_are_those_of_the_node() -> None:
    prompt = account(13, 4, (MissReason.SLOWER, 1), (MissReason.EVICTED_BY_STORE, 2))
    prompt.take(0, {"own": 4})
    assert summary(prompt) == [("own", 4), ("slower", 4), ("evicted_by_store", 5)]


def test_a_hit_that_ends_inside_a_chunk_misses_the_rest_of_it() -> None:
    prompt = account(13, 6, (MissReason.NEVER_STORED, 3))
    prompt.take(0, {"own": 4, "peers": 2})
    assert summary(prompt) == [("own", 4), ("peers", 2), ("never_stored", 7)]


def test_what_vllm_has_itself_is_not_missed() -> None:
    prompt = account(13, 4, (MissReason.EVICTED_BY_STORE, 1), (MissReason.BEHIND_GAP, 2))
    prompt.take(8, {})
    assert summary(prompt) == [("engine", 8), ("behind_gap", 5)]
    whole = account(13, 4, (MissReason.NEVER_STORED, 3))
    whole.take(13, {})
    assert summary(whole) == [("engine", 13)]


def test_what_was_found_and_not_loaded_says_why() -> None:
    prompt = account(12, 8, (MissReason.NEVER_STORED, 1))
    prompt.unused = MissReason.BELOW_MINIMUM
    prompt.take(0, {"own": 4})
    assert summary(prompt) == [("own", 4), ("below_minimum", 4), ("never_stored", 4)]


def test_the_token_that_vllm_must_compute_is_not_missed() -> None:
    prompt = account(8, 8)
    prompt.take(0, {"own": 7})
    assert summary(prompt) == [("own", 7)]
    two = account(8, 8)
    two.take(0, {"own": 6})
    assert summary(two) == [("own", 6), ("load_failed", 2)]


def test_the_end_of_a_prompt_cannot_be_cached_where_it_has_no_key() -> None:
    prompt = account(10, 0, (MissReason.NEVER_STORED, 2))
    prompt.take(0, {})
    assert summary(prompt) == [("never_stored", 8), ("uncacheable", 2)]


def test_a_load_that_brings_less_is_corrected_and_nothing_else_changes_what_is_taken() -> None:
    prompt = account(12, 8, (MissReason.NEVER_STORED, 1))
    assert prompt.take(0, {"own": 4, "peers": 4})
    assert not prompt.take(4, {})
    prompt.node_lost()
    prompt.unanswered(MissReason.NODE_LOST)
    prompt.answered(0, ())
    assert summary(prompt) == [("own", 4), ("peers", 4), ("never_stored", 4)]
    prompt.correct({"own": 4, "peers": 1}, MissReason.PEER_UNREACHABLE)
    assert summary(prompt) == [("own", 4), ("peers", 1), ("peer_unreachable", 3), ("never_stored", 4)]


def test_a_closed_account_is_counted_and_reported_once_and_one_that_never_ran_is_not() -> None:
    accounts = PromptAccounts(counters := Counters())
    accounts.close("aborted", account(12, 8, (MissReason.NEVER_STORED, 1)))
    prompt = account(12, 8, (MissReason.NEVER_STORED, 1))
    prompt.take(0, {"own": 8})
    accounts.close("r", prompt)
    assert counters.take() == {"miss_tokens:never_stored": 4}
    (report,) = accounts.take_reports()
    assert (report.engine_request_id, sum(span.token_count for span in report.spans)) == ("r", 12)
    assert report.create_time.ToMilliseconds() == round(prompt.create_time * 1000)
    assert accounts.take_reports() == []


def test_reports_that_wait_fit_into_a_message_whatever_ids_clients_choose() -> None:
    accounts = PromptAccounts(Counters())
    for _ in range(MAX_REPORTS + 1):
        prompt = account(12, 8, (MissReason.NEVER_STORED, 1))
        prompt.take(0, {"own": 8})
        accounts.close("\N{GRINNING FACE}" * 100_000, prompt)
    message = AttachRequest(acts=[Act(report=report) for report in accounts.take_reports()])
    assert len(message.acts) == MAX_REPORTS
    assert message.ByteSize() < MAX_MESSAGE_BYTES // 2


def test_an_answer_has_the_spans_as_json() -> None:
    evicted = PromptSpan(reason=reason_to_proto(MissReason.EVICTED_BY_STORE), tier="own", token_count=5)
    evicted.remove_time.FromSeconds(1_700_000_000)
    assert spans_in_answer([PromptSpan(tier="disk", token_count=8), evicted]) == [
        {"token_count": 8, "tier": "disk"},
        {
            "token_count": 5,
            "tier": "own",
            "reason": "evicted_by_store",
            "remove_time": "2023-11-14T22:13:20Z",
        },
    ]


def test_an_answer_does_not_show_clients_that_there_are_other_salts() -> None:
    other = PromptSpan(reason=reason_to_proto(MissReason.OTHER_SALT), token_count=5)
    never = PromptSpan(reason=reason_to_proto(MissReason.NEVER_STORED), token_count=5)
    assert spans_in_answer([other]) == spans_in_answer([never])


def test_the_same_beginning_is_known_from_another_root_or_another_salt() -> None:
    beginnings, tokens = Beginnings(), as_tokens([1, 2, 3, 4])
    base, adapter, salted = (ChunkKey(bytes([number] * 16)) for number in range(3))
    assert beginnings.note("", tokens, b"", base) is None
    assert beginnings.note("", tokens, b"", base) is None
    assert beginnings.note("", tokens, b"", adapter) is MissReason.OTHER_NAMESPACE
    assert beginnings.note("other", tokens, b"", salted) is MissReason.OTHER_SALT
    assert beginnings.note("", tokens, b"", base) is MissReason.OTHER_NAMESPACE
    assert beginnings.note("", tokens, b"image", base) is None
    assert beginnings.note("", as_tokens([1, 2, 3]), b"", base) is None


def test_the_beginnings_that_were_noted_first_are_forgotten() -> None:
    beginnings, tokens, root = Beginnings(), as_tokens([1, 2, 3, 4]), ChunkKey(bytes(16))
    beginnings.note("", tokens, b"", root)
    for number in range(MAX_BEGINNINGS):
        beginnings.note(f"salt {number}", as_tokens([number]), b"", root)
    assert beginnings.note("other", tokens, b"", root) is None
    assert len(beginnings._salts) == len(beginnings._roots) == MAX_BEGINNINGS
