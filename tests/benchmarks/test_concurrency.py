"""How requests come at the benchmark of concurrency, and what it makes of the answers. No engine runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import concurrency
from benchmarks.concurrency import CELLS, IN_POOL, LEVELS, MISSES, workload_of
from benchmarks.support import clients
from benchmarks.support.clients import Measured
from benchmarks.support.meanings import meaning_of
from benchmarks.systems import places
from lmkv.errors import LmkvError, Unreachable
from lmkv_client.demo.endpoint import Completion, CompletionToken, Endpoint, make_completion
from tests.waiting import wait_until


def make(ttft_ms: float, *, cached: int = 0, token: int = 1) -> Completion:
    tokens = [CompletionToken(token_ids=(token,), text="", seconds=(ttft_ms + at) / 1e3) for at in (0, 10, 30)]
    usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": cached}}
    return make_completion(tokens, {"finish_reason": "length"}, usage, 1.0)


def measured(*completions: Completion, seconds: float = 2.0, gaps: Sequence[float] = ()) -> Measured:
    return Measured(completions=completions, seconds=seconds, stream_gaps=gaps, engine_seconds=0.5, engine_steps=9)


def test_a_completion_has_the_gaps_between_its_tokens() -> None:
    assert make(100).gaps == pytest.approx((0.01, 0.02))


def test_a_closed_loop_has_as_many_requests_under_way_as_clients_and_answers_in_order() -> None:
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(3)

    def ask(prompt: Sequence[int]) -> Completion:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(10)  # passes only if three are under way
        with lock:
            running -= 1
        return make(prompt[0])

    found = clients.closed_loop(ask, [[number] for number in range(9)], 3)
    assert most == 3
    assert [1e3 * one.ttft_seconds for one in found.completions] == pytest.approx(list(range(9)))
    assert found.requests_per_second == 9 / found.seconds


def test_an_open_loop_does_not_wait_for_answers_and_counts_from_when_a_request_was_due() -> None:
    all_came = threading.Barrier(20)

    def ask(prompt: Sequence[int]) -> Completion:
        all_came.wait(10)  # none is answered before the last one has come
        return make(100)

    found = clients.open_loop(ask, [[1]] * 20, per_second=1000)
    assert len(found.completions) == 20
    assert min(one.ttft_seconds for one in found.completions) >= 0.1


def test_requests_of_an_open_loop_come_at_the_rate_and_unevenly() -> None:
    times = clients.arrivals(2000, 5.0, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0
    assert times == clients.arrivals(2000, 5.0, seed=1)
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.1)
    assert sum(gap < 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.63, abs=0.05)  # 1 - 1/e


class Decoding(Endpoint):
    """Streams tokens until it is closed."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("decoding", 1, "model")
        self.fails, self.closed_count = fails, 0

    def stream(self, prompt: Any, max_tokens: int = 16, **_: Any) -> Iterator[CompletionToken]:  # type: ignore[override]
        try:
            for number in range(max_tokens):
                if self.fails:
                    raise Unreachable("gone", address="")
                yield CompletionToken(token_ids=(1,), text="", seconds=number / 10)
        finally:
            self.closed_count += 1


def test_streams_decode_while_others_are_measured_and_end_with_them() -> None:
    engine = Decoding()
    with clients.streams(engine, [[1], [2]], 50) as decoding:
        wait_until(lambda: len(decoding.gaps) >= 100)
    assert {round(gap, 6) for gap in decoding.gaps} == {0.1}
    assert engine.closed_count > 2  # one followed another
    threads = [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
    assert not threads


def test_a_stream_that_fails_fails_the_measurement() -> None:
    with pytest.raises(LmkvError, match="gone"), clients.streams(Decoding(fails=True), [[1]], 50):
        pass


def test_rows_are_compared_with_the_engine_alone() -> None:
    alone = measured(make(1000), make(2000), seconds=4)
    lmkv = measured(make(100, cached=900), make(200, cached=700, token=9), gaps=(0.01, 0.02))
    rows = {row.name: row for row in lmkv.rows("own_lmkv_c4", "the engine alone", alone)}
    assert rows["own_lmkv_c4_ttft_p50_ms"].value == pytest.approx(200)
    assert rows["own_lmkv_c4_ttft_p99_ms"].ratio == pytest.approx(0.1)
    assert rows["own_lmkv_c4_itl_p99_ms"].value == pytest.approx(20)
    assert rows["own_lmkv_c4_requests_per_s"].ratio == pytest.approx(2)
    assert rows["own_lmkv_c4_hit_rate"].value == 80
    assert rows["own_lmkv_c4_hit_rate"].ratio is None  # the engine alone has none
    assert rows["own_lmkv_c4_identical"].value == 50
    assert rows["own_lmkv_c4_engine_cpu_ms"].value == 250
    assert rows["own_lmkv_c4_engine_steps"].value == 4.5
    assert rows["own_lmkv_c4_stream_gap_p50_ms"].baseline is None  # it had no streams


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_row_is_described(cell: str, level: str) -> None:
    one = measured(make(1), gaps=(0.1,))
    for system in places.SYSTEMS:
        for row in one.rows(f"{cell}_{system}_{level}", "the engine alone", one):
            assert meaning_of(row.name, "concurrency")


def asked(cell: str) -> Mapping[str, list[list[int]]]:
    workload = workload_of(cell)
    return {name: workload.prompts(name, level.request_count) for name, level in LEVELS.items()}


@pytest.mark.parametrize("cell", CELLS)
def test_every_system_is_asked_the_same_and_no_prompt_twice(cell: str) -> None:
    prompts = asked(cell)
    assert prompts == asked(cell)
    flat = [tuple(prompt) for level in prompts.values() for prompt in level]
    assert len(set(flat)) == len(flat)
    lengths = {len(prompt) for prompt in flat}
    assert lengths == {concurrency.DOCUMENT_TOKENS + concurrency.QUESTION_TOKENS}


def test_documents_behind_the_memory_come_again_only_when_it_has_forgotten_them() -> None:
    documents = [
        tuple(prompt[: concurrency.DOCUMENT_TOKENS]) for level in asked(places.DISK).values() for prompt in level
    ]
    last: dict[tuple[int, ...], int] = {}
    for at, document in enumerate(documents):
        assert at - last.get(document, -1000) > IN_POOL
        last[document] = at


def test_new_prompts_have_nothing_in_common_with_any_other() -> None:
    beginnings = [tuple(prompt[:8]) for level in asked(MISSES).values() for prompt in level]
    assert len(set(beginnings)) == len(beginnings)
    assert len({tuple(prompt[:8]) for level in asked(places.OWN).values() for prompt in level}) == 40


def test_fewer_requests_are_never_fewer_than_the_clients() -> None:
    assert concurrency.scaled(LEVELS["c64"], 0.1) == 64
    assert concurrency.scaled(LEVELS["c1"], 0.5) == 8
