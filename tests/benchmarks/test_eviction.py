"""The traces are what their docstring says, and every policy that is replayed keeps what the queue promises."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks.eviction import CANDIDATES, replay, size_name
from benchmarks.replay import files
from benchmarks.replay.files import read_trace
from benchmarks.replay.optimal import optimal
from benchmarks.replay.traces import CHUNK_TOKENS, MAX_PROMPT_CHUNKS, TRACES, Request, Trace
from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey
from tests.server.node.cache.test_eviction import machine

TestS3Fifo = machine("s3_fifo", CANDIDATES["s3_fifo"])
TestSieve = machine("sieve", CANDIDATES["sieve"])
TestTwoQueues = machine("two_queues", CANDIDATES["two_queues"])
TestGdsf = machine("gdsf", CANDIDATES["gdsf"])


def synthetic(name: str, scale: float) -> Trace:
    return Trace(requests=TRACES[name](scale), chunk_tokens=CHUNK_TOKENS)


def trace_of(*prompts: Iterable[int]) -> Trace:
    keys = [tuple(ChunkKey(number.to_bytes(16, "big")) for number in prompt) for prompt in prompts]
    return Trace(
        requests=[Request(keys=prompt, token_count=len(prompt), stored=prompt) for prompt in keys], chunk_tokens=1
    )


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
    trace = synthetic("tool_agent", 0.01)
    bound = sent_before(list(trace.requests))
    assert replay(trace, policy, 10**12) == pytest.approx(bound) == pytest.approx(optimal(trace, 10**12))
    assert 0 < replay(trace, policy, 60_000) < optimal(trace, 60_000) < bound


def test_a_loop_that_does_not_fit_is_the_worst_case_of_lru() -> None:
    trace = synthetic("loop", 0.1)
    assert replay(trace, "lru", 2_000_000) == 0
    assert replay(trace, "arc", 2_000_000) > 10


def test_the_default_policy_finds_more_in_recorded_conversations_than_lru() -> None:
    excerpt = read_trace(Path(files.__file__).with_name("data") / "conversation_excerpt.jsonl.gz")
    assert excerpt.chunk_tokens == 512
    assert len(excerpt.requests) == 2000
    found = {policy: replay(excerpt, policy, 500_000) for policy in (NodeConfig().eviction_policy, "lru")}
    assert found["learned"] > 1.3 * found["lru"]


def test_the_default_policy_is_not_the_worst_case_of_lru() -> None:
    assert replay(synthetic("loop", 0.5), NodeConfig().eviction_policy, 2_000_000) > 20


def test_the_optimum_keeps_what_is_requested_first() -> None:
    trace = trace_of([1, 2], [3, 4], [5, 6], [1, 2], [3, 4])
    assert optimal(trace, 2) == pytest.approx(20)  # 1 and 2; nothing is left for 3 and 4
    assert optimal(trace, 3) == pytest.approx(30)
    assert optimal(trace, 4) == pytest.approx(40)


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [7, 8]},
        {"timestamp": 5, "input_length": 1500, "output_length": 9, "hash_ids": [7, 9, 10]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(plain)
    assert trace == read_trace(packed)
    assert trace.chunk_tokens == 512
    assert replay(trace, "lru", 10_000) == optimal(trace, 10_000) == pytest.approx(100 * 512 / 2500)


def test_a_partial_block_counts_its_tokens_only(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"input_length": 900, "hash_ids": [1, 2]}\n' * 2)
    assert replay(read_trace(file), "lru", 10_000) == optimal(read_trace(file), 10_000) == pytest.approx(50)


@pytest.mark.parametrize("text", ["", "no JSON", '{"input_length": 5}\n', '{"input_length": 5, "hash_ids": [-1]}\n'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"^--trace: "):
        read_trace(file)


def test_pool_sizes_have_short_names() -> None:
    assert [size_name(count) for count in (500_000, 2_000_000, 1_500_000, 1234)] == ["500k", "2m", "1500k", "1234"]
