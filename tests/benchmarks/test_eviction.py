"""The traces are what their docstring says, and every policy that is replayed keeps what the queue promises."""

from __future__ import annotations

from itertools import takewhile

import pytest

from benchmarks.eviction import CANDIDATES, replay
from benchmarks.replay.traces import CHUNK_TOKENS, MAX_PROMPT_CHUNKS, TRACES, Request
from lmkv.keys import ChunkKey
from tests.server.node.cache.test_eviction import machine

TestS3Fifo = machine("s3_fifo", CANDIDATES["s3_fifo"])
TestSieve = machine("sieve", CANDIDATES["sieve"])
TestTwoQueues = machine("two_queues", CANDIDATES["two_queues"])


def sent_before(trace: list[Request]) -> float:
    """The share of the tokens that was sent before, in percent."""
    sent: set[ChunkKey] = set()
    found = 0
    for request in trace:
        found += CHUNK_TOKENS * len(list(takewhile(sent.__contains__, request.keys)))
        sent.update(request.stored)
    return 100 * found / sum(request.token_count for request in trace)


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "percent"),
    [("conversation", 12_031, 12_035, 40), ("tool_agent", 23_608, 8_596, 59), ("api", 30_000, 3_100, 54)],
)
def test_the_traces_have_the_shape_that_was_published(
    name: str, requests: int, prompt_tokens: int, percent: int
) -> None:
    trace = TRACES[name](1.0)
    assert len(trace) == requests
    assert sum(request.token_count for request in trace) / requests == pytest.approx(prompt_tokens, rel=0.05)
    assert sent_before(trace) == pytest.approx(percent, abs=2.5)


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_each_time_and_made_of_prompts(name: str) -> None:
    trace = TRACES[name](0.02)
    assert trace == TRACES[name](0.02)
    for request in trace:
        assert list(request.stored[: len(request.keys)]) == list(request.keys)
        assert 0 <= request.token_count - CHUNK_TOKENS * len(request.keys) < CHUNK_TOKENS
        assert len(set(request.stored)) == len(request.stored) <= MAX_PROMPT_CHUNKS


@pytest.mark.parametrize("policy", CANDIDATES)
def test_what_fits_is_found_whatever_the_policy(policy: str) -> None:
    trace = TRACES["tool_agent"](0.01)
    assert replay(trace, policy, 10**12) == pytest.approx(sent_before(trace))
    assert 0 < replay(trace, policy, 200_000) < sent_before(trace)


def test_a_loop_that_does_not_fit_is_the_worst_case_of_lru() -> None:
    trace = TRACES["loop"](0.1)
    assert replay(trace, "lru", 2_000_000) == 0
    assert replay(trace, "arc", 2_000_000) > 10
