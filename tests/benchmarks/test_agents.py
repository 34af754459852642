"""What the benchmark of agents sends, and what it makes of the answers. Nothing is measured here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import agents
from benchmarks.agents import Workload
from benchmarks.replay.sessions import SYSTEM_TOKENS, AgentRequest, made_sessions, prompt_lengths, traced_sessions
from benchmarks.support import bar_chart, charts, machine
from benchmarks.support.meanings import meaning_of
from benchmarks.support.rows import Report
from lmkv.errors import LmkvError
from lmkv.hints import parse
from lmkv_client.demo.endpoint import Completion, Endpoint
from tests.benchmarks.test_rows import make_report


def make_completion(ttft_ms: float, *, prompt: int = 1000, cached: int = 0, token: int = 1) -> Completion:
    return Completion(
        token_ids=(token, 2),
        text="",
        finish_reason="length",
        ttft_seconds=ttft_ms / 1e3,
        total_seconds=1.0,
        prompt_tokens=prompt,
        cached_tokens=cached,
    )


def line(timestamp: int, session: int, length: int, answer: int, ids: list[int]) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "session": session,
        "input_length": length,
        "output_length": answer,
        "hash_ids": ids,
    }


def write_trace(folder: Path, *lines: dict[str, Any]) -> Path:
    file = folder / "trace.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps(one) + "\n" for one in lines)
    return file


def test_made_sessions_are_the_same_each_time_and_mostly_continue() -> None:
    requests = made_sessions(6, 5)
    assert requests == made_sessions(6, 5)
    assert sorted(request.session for request in requests) == sorted(5 * list(range(6)))
    continuing = sum(request.kept_tokens is None for request in requests)
    assert len(requests) / 2 < continuing < len(requests)
    assert all(length > SYSTEM_TOKENS for length in prompt_lengths(requests, SYSTEM_TOKENS))


def test_a_trace_keeps_its_order_its_sessions_and_what_their_prompts_share(tmp_path: Path) -> None:
    file = write_trace(
        tmp_path,
        line(1, 7, 1000, 100, [1, 2, 3, 4]),
        line(2, 9, 512, 64, [5, 6]),
        line(3, 7, 1400, 100, [1, 2, 3, 9, 10, 11]),  # the fourth block was not full
        line(4, 7, 1024, 100, [1, 12, 13, 14]),
        line(5, 8, 512, 10, [20, 21]),
    )
    requests = traced_sessions(file, session_count=2, turn_count=8, max_tokens=10_000)
    assert requests == [
        AgentRequest(session=0, kept_tokens=None, new_tokens=1000, answer_tokens=6),
        AgentRequest(session=1, kept_tokens=None, new_tokens=512, answer_tokens=4),
        AgentRequest(session=0, kept_tokens=None, new_tokens=300, answer_tokens=6),
        AgentRequest(session=0, kept_tokens=256, new_tokens=768, answer_tokens=6),
    ]
    scaled = traced_sessions(file, session_count=2, turn_count=8, max_tokens=140)
    assert max(prompt_lengths(scaled)) <= 140


@pytest.mark.parametrize("text", ["", "no JSON\n", '{"timestamp": 1}\n'])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(LmkvError, match=r"--trace: .*trace\.jsonl is not a trace of sessions"):
        traced_sessions(file, 2, 2, 1000)


class RecordingEngine(Endpoint):
    """Answers every prompt with its length, and keeps the prompts. Named as a fake: nothing is measured."""

    def __init__(self) -> None:
        super().__init__("recording", 1, "")
        self.prompts: list[list[int]] = []
        self.extras: list[Any] = []

    def complete(self, prompt: Any, max_tokens: int = 16, *, extra: Any = None, **_: Any) -> Completion:
        self.prompts.append(list(prompt))
        self.extras.append(extra)
        return make_completion(1.0, prompt=len(prompt), token=max_tokens)


def test_prompts_continue_with_the_answers_of_their_own_system_and_are_cut_where_the_session_rewrites() -> None:
    requests = [
        AgentRequest(session=0, kept_tokens=None, new_tokens=10, answer_tokens=5),
        AgentRequest(session=1, kept_tokens=None, new_tokens=10, answer_tokens=5),
        AgentRequest(session=0, kept_tokens=None, new_tokens=3, answer_tokens=6),
        AgentRequest(session=0, kept_tokens=8, new_tokens=4, answer_tokens=7),
    ]
    workload = Workload(requests=requests, shared_tokens=6)
    own, other = RecordingEngine(), RecordingEngine()
    agents.play(make_run(), {"own": own, "other": other}, workload)
    first, second, third, fourth = own.prompts
    assert own.prompts == other.prompts
    assert first[:6] == second[:6]
    assert first[6:] != second[6:]
    assert third[:18] == [*first, 5, 2]
    assert fourth[:8] == first[:8]
    assert [len(prompt) for prompt in own.prompts] == [16, 16, 21, 12]


def test_hints_retain_a_session_until_its_last_request_evict_it_then_and_prefetch_the_next_one() -> None:
    numbers = (0, 1, 0, 0)
    requests = [AgentRequest(session=one, kept_tokens=None, new_tokens=9, answer_tokens=5) for one in numbers]
    systems = {name: RecordingEngine() for name in ("lmkv", "lmkv_hints", "lmkv_disk", "lmkv_disk_hints")}
    agents.play(make_run(), systems, Workload(requests=requests, shared_tokens=6))
    assert systems["lmkv"].extras == systems["lmkv_disk"].extras == [None] * 4

    def actions(name: str) -> list[list[str]]:
        parsed = [parse(extra["kv_transfer_params"]["lmkv"]["kv_hints"]) for extra in systems[name].extras]
        assert not any(one.rejected for one in parsed)
        return [[str(hint.action) for hint in one.hints] for one in parsed]

    assert actions("lmkv_hints") == [["retain"], ["evict"], ["retain"], ["evict"]]
    assert actions("lmkv_disk_hints") == [["retain"], ["evict", "prefetch"], ["retain"], ["evict"]]
    _, second, *_ = systems["lmkv_disk_hints"].extras
    prefetched = second["kv_transfer_params"]["lmkv"]["kv_hints"]["actions"][1]["payload"]["tokens"]
    assert prefetched == [*systems["lmkv_disk_hints"].prompts[0], 5, 2], "the session so far, answers included"


def make_run() -> Any:
    class Run:
        def say(self, _line: str) -> None:
            pass

    return Run()


def test_rows_compare_with_the_engine_alone_and_name_what_differs() -> None:
    rows = {
        row.name: row
        for row in agents.rows_of(
            {
                "alone": [make_completion(1000), make_completion(2000)],
                "lmkv": [make_completion(1000), make_completion(200, cached=500, token=9)],
            }
        )
    }
    assert rows["lmkv_ttft_p99_ms"].ratio == pytest.approx(0.5)
    assert rows["lmkv_hit_rate"].value == pytest.approx(25)
    assert rows["lmkv_hit_rate"].baseline is None  # the engine alone hit nothing
    assert rows["lmkv_tokens_per_s"].value == pytest.approx(1002)
    assert rows["lmkv_identical"].value == 50
    assert all(meaning_of(name, "agents") for name in rows)


def test_the_chart_shows_only_what_was_measured() -> None:
    report: Report = make_report()
    report.machine = machine.describe()
    report.settings = {"sessions": 4}
    for row in agents.rows_of({"alone": [make_completion(1000)], "lmkv": [make_completion(250)]}):
        report.add(row)
    chart = charts.agents(report)
    assert [group.label for group in chart.groups] == ["median, one engine", "p99, one engine"]
    assert ElementTree.fromstring(bar_chart.draw(chart)) is not None
