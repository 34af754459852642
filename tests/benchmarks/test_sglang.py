"""What the benchmark of SGLang makes of its times. No server runs."""

from __future__ import annotations

import pytest

from benchmarks.sglang import Answers, HitTimes, rows_of
from benchmarks.support.meanings import meaning_of
from benchmarks.systems import sglang_copies


def times(**cases: float) -> HitTimes:
    return HitTimes(seconds={case: [seconds, seconds + 0.5, 9.0] for case, seconds in cases.items()})


def test_each_system_is_compared_with_lmkv_and_lmkv_with_its_misses() -> None:
    found = {
        "lmkv": times(cold=4.0, device=0.5, own=1.0, peer=1.5),
        "file": times(cold=4.0, device=0.5, own=2.0, peer=2.5),
        "linker": times(device=0.5, own=0.75),
        "plain": times(cold=3.5, device=0.5),
    }
    rows = {row.name: row for row in rows_of(found)}
    assert all(meaning_of(name) for name in rows)
    assert rows["sglang_lmkv_own_ms"].value == pytest.approx(1500)
    assert rows["sglang_lmkv_own_ms"].ratio == pytest.approx(1500 / 4500)
    assert rows["sglang_file_own_ms"].baseline == "lmkv"
    assert rows["sglang_file_own_ms"].ratio == pytest.approx(2500 / 1500)
    assert rows["sglang_lmkv_peer_added_ms"].value == pytest.approx(1000)
    assert rows["sglang_linker_own_added_ms"].ratio == pytest.approx(250 / 500)
    assert rows["sglang_plain_cold_ms"].ratio == pytest.approx(4000 / 4500)
    assert "sglang_plain_own_ms" not in rows


def test_an_answer_that_differs_from_the_first_one_is_counted() -> None:
    answers = Answers()
    for prompt, answer in (([1], (5,)), ([2], (6,)), ([1], (5,)), ([2], (7,))):
        answers.add(prompt, answer)
    assert (answers.same_count, answers.count) == (3, 4)


def test_direct_copies_are_compared_with_those_through_the_host_pool() -> None:
    rows = {row.name: row for row in sglang_copies.rows_of([0.04], [0.2, 0.3], [0.1, 0.1])}
    assert all(meaning_of(name) for name in rows)
    assert rows["sglang_direct_read_ms"].ratio == pytest.approx((1 / 2 + 1 / 3) / 2)
