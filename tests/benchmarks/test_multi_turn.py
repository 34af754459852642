"""What the benchmark of chats asks, and what it makes of the answers. Nothing is measured here."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import multi_turn
from benchmarks.multi_turn import ANSWER_TOKENS, MESSAGE_TOKENS, Turn, Workload
from benchmarks.support import bar_chart, charts, machine
from benchmarks.support.meanings import meaning_of
from benchmarks.support.rows import Report
from lmkv_client.demo.endpoint import Completion


def make_turn(ttft_ms: float, *, cached: int = 0, token: int = 1) -> Turn:
    completion = Completion(
        token_ids=(token, 2),
        text="",
        finish_reason="length",
        ttft_seconds=ttft_ms / 1e3,
        total_seconds=1.0,
        prompt_tokens=1000,
        cached_tokens=cached,
    )
    return Turn(completions=[completion] * 2)


def make_report(**systems: list[Turn]) -> Report:
    settings: dict[str, Any] = {"users": 6, "chats_in_cache": 2}
    report = Report(benchmark="multi_turn", command="", quick=False, machine=machine.describe(), settings=settings)
    for row in multi_turn.rows_of(systems, message_tokens=100):
        report.add(row)
    return report


def test_every_system_hears_the_same_and_no_two_users_say_the_same() -> None:
    workload = Workload(first_tokens=300, user_count=3, turn_count=4)
    messages = workload.messages()
    assert messages == workload.messages()
    assert [[len(message) for message in turn] for turn in messages] == [[300] * 3] + [[MESSAGE_TOKENS] * 3] * 3
    assert len({tuple(message[:50]) for turn in messages for message in turn}) == 12


def test_a_whole_chat_fits_into_the_context() -> None:
    workload = Workload(first_tokens=300, user_count=3, turn_count=4)
    assert workload.context_tokens >= 300 + 3 * MESSAGE_TOKENS + 4 * ANSWER_TOKENS


def test_turns_are_compared_with_those_of_the_engine_alone() -> None:
    rows = {
        row.name: row
        for row in make_report(
            alone=[make_turn(1000), make_turn(2000)],
            lmkv=[make_turn(1010), make_turn(200, cached=900)],
            lmcache_fine=[make_turn(1000), make_turn(400, cached=450, token=9)],
        ).rows
    }
    assert rows["lmkv_turn_2_ms"].ratio == pytest.approx(0.1)
    assert rows["lmcache_fine_turn_1_ms"].baseline_value == pytest.approx(1000)
    assert rows["alone_turn_2_ms"].ratio is None
    assert [rows[f"{name}_kept"].value for name in ("alone", "lmkv", "lmcache_fine")] == [0, 100, 50]
    assert [rows[f"{name}_identical"].value for name in ("lmkv", "lmcache_fine")] == [100, 50]
    assert "alone_identical" not in rows
    assert meaning_of("lmkv_turn_2_ms") == "lmkv: TTFT in turn 2 of a chat"
    assert all(meaning_of(name) for name in rows)
    assert meaning_of("lmcache_fine_turn_2_ms") == "LMCache, chunks of 32: TTFT in turn 2 of a chat"


def test_the_chart_has_a_bar_for_every_turn_of_every_system_that_was_measured() -> None:
    report = make_report(alone=[make_turn(1000), make_turn(2345)], lmkv=[make_turn(1010), make_turn(200)])
    groups = charts.multi_turn(report).groups
    assert [group.label for group in groups] == ["turn 1", "turn 2"]
    assert [[bar.value for bar in group.bars] for group in groups] == [[1000, 1010], [2345, 200]]
    drawn = ElementTree.fromstring(bar_chart.draw(charts.multi_turn(report)))
    titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert "lmkv: 200 ms" in titles
    assert not any("LMCache" in (title or "") for title in titles)
