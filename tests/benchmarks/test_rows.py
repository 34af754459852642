"""What benchmarks write and show: rows, reports, tables, command lines. Nothing is measured here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmarks import doc_qa, tables
from benchmarks.node import ttft
from benchmarks.node.steps import Steps
from benchmarks.support import bar_chart, charts, machine, timing
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.meanings import meaning_of
from benchmarks.support.rows import Report, Row, compare, make_table, markdown_table, number, read_report
from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Completion
from tests.support.fork_server import start_module

ROOT = Path(__file__).parents[2]
BENCHMARKS = (
    "agents",
    "channels",
    "codecs",
    "concurrency",
    "control_plane",
    "data_path",
    "doc_qa",
    "encoder",
    "engines_gpu",
    "eviction",
    "floods",
    "hosts",
    "hybrid",
    "kernels_cpu",
    "kernels_gpu",
    "loading",
    "multi_turn",
    "pd",
    "prefetch",
    "quotas",
    "rivals",
    "routing",
    "salts",
    "scale",
    "sglang",
    "shared_map",
    "tiers",
)
ROW_FIELDS = ["name", "value", "unit", "baseline", "baseline_value", "ratio"]
RESULTS = sorted(tables.RESULTS.glob("*.json"))


def make_report(*rows: Row, **fields: Any) -> Report:
    return Report(
        benchmark="data_path",
        command="python -m benchmarks.data_path",
        quick=False,
        machine=machine.describe(),
        rows=list(rows),
        **fields,
    )


def test_a_row_is_written_with_all_six_fields_in_order() -> None:
    assert list(Row(name="a", value=1.0, unit="ms").to_json()) == ROW_FIELDS
    assert list(compare("a", 1.0, "ms", "b", 2.0).to_json().values()) == ["a", 1.0, "ms", "b", 2.0, 0.5]


@pytest.mark.parametrize(
    "fields",
    [
        {"value": float("nan")},
        {"value": 1.0, "ratio": float("inf")},
        {"value": 1.0, "baseline": "cold"},
        {"value": 1.0, "baseline_value": 1.0},
    ],
)
def test_a_row_of_nonsense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a"):
        Row(name="a", unit="ms", **fields)


def test_two_rows_of_one_name_are_refused() -> None:
    report = make_report(Row(name="a", value=1.0, unit="ms"))
    with pytest.raises(ValueError, match="two rows called a"):
        report.add(Row(name="a", value=2.0, unit="ms"))


def test_a_report_that_is_written_can_be_read(tmp_path: Path) -> None:
    report = make_report(compare("a", 1.0, "ms", "b", 3.0), settings={"dtype": "float32"}, notes=["left out"])
    report.write(tmp_path / "r.json")
    again = read_report(tmp_path / "r.json")
    assert again.to_json() == report.to_json()
    head = json.loads((tmp_path / "r.json").read_text())["machine"]
    assert head["cpu"]
    assert head["cores"] > 0
    assert head["load_average"] >= 0


@pytest.mark.parametrize("text", ["{}", "[]", '{"rows": [{"name": 1}]}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match="is no report"):
        read_report(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (0.00123456, "0.00123"),
        (0.5, "0.500"),
        (9.876, "9.88"),
        (99.94, "99.9"),
        (2345.6, "2,346"),
    ],
)
def test_numbers_are_shown_with_three_digits_that_count(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_table_shows_every_row_and_what_it_is_compared_with() -> None:
    rows = [compare("first", 12.0, "ms", "memcpy", 6.0), Row(name="second", value=1.0, unit="GB/s")]
    console = Console(width=100, record=True, quiet=False, file=None)
    with console.capture() as shown:
        console.print(make_table("title", rows))
    assert all(word in shown.get() for word in ("title", "first", "12.0", "memcpy", "2.00", "second", "GB/s"))
    lines = markdown_table(rows, {"first": "a copy", "second": "a read"}).splitlines()
    assert lines[2] == "| a copy<br>`first` | 12.0 ms | memcpy: 6.00 | 2.00 |"
    assert lines[3] == "| a read<br>`second` | 1.00 GB/s |  |  |"
    assert len({line.count("|") for line in lines}) == 1
    assert markdown_table(rows[1:], {"second": "a read"}).splitlines() == [
        "| row | value |",
        "|---|---:|",
        "| a read<br>`second` | 1.00 GB/s |",
    ]


def test_acts_are_timed_in_turns_that_change_sides() -> None:
    done: list[str] = []
    times = timing.in_turns([lambda: done.append("a"), lambda: done.append("b")], rounds=3)
    assert [len(seconds) for seconds in times] == [3, 3]
    assert "".join(done) == "ba" + "ab" + "ba" + "ab"


def test_ratios_are_medians_of_pairs() -> None:
    assert timing.median_ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0
    assert timing.percentile(range(100), 99) == 99
    assert timing.percentile([5.0], 50) == 5.0


def test_processor_time_is_counted_and_the_dead_have_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        deadline = time.monotonic() + 60
        while machine.cpu_seconds([busy.pid]) < 0.1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert machine.cpu_seconds([busy.pid]) >= 0.1
        busy.kill()
    assert machine.cpu_seconds([busy.pid]) == 0


def make_round(*, cold: float = 2.0) -> ttft.TtftRound:
    parts = Steps(lookup=0.01, fetch=0.1, load=0.02, compute=0.05, rest=0.02)
    steps = {"prefix": replace(parts, fetch=0.0, load=0.0), "own": replace(parts, fetch=0.0), "peer": parts}
    return ttft.TtftRound(
        cold=cold, prefix_hit=0.1, own=0.2, peer=0.4, identical=True, hits_identical=True, steps=steps
    )


def test_the_rows_asked_for_by_name_say_hit_over_cold() -> None:
    rows = {row.name: row for row in ttft.rows_of([make_round(), make_round(cold=4.0), make_round()], 4000)}
    assert rows["peer_ttft_ratio"].value == rows["peer_ttft_ratio"].ratio == pytest.approx(0.2)
    assert rows["own_ttft_ratio"].value == pytest.approx(0.1)
    assert rows["ttft_cold_ms_4000"].value == pytest.approx(2000)
    assert rows["ttft_own_ms_4000"].baseline_value == pytest.approx(100)
    assert rows["ttft_identical_4000"].value == 100
    assert all(meaning_of(name) for name in rows)
    assert rows["step_peer_fetch_ms"].value == pytest.approx(100)
    assert rows["step_peer_fetch_ms"].ratio == pytest.approx(0.5)
    assert "step_own_fetch_ms" not in rows, "what takes no time is no step"
    assert "peer_ttft_ratio_2000" in {row.name for row in ttft.rows_of([make_round()], 2000)}


SVG = "{http://www.w3.org/2000/svg}"


def test_the_chart_of_the_data_path_has_a_bar_for_every_step() -> None:
    report = make_report()
    with pytest.raises(KeyError):
        charts.data_path(report)
    for row in ttft.rows_of([make_round()], 4000):
        report.add(row)
    drawn = ElementTree.fromstring(bar_chart.draw(charts.data_path(report)))
    bars = [title.text for title in drawn.iter(f"{SVG}title")]
    assert len(bars) == 3 + 4 + 5
    assert "fetch from the peer, verified: 100 ms" in bars


def test_a_bar_is_as_long_as_its_value_and_shows_its_limit() -> None:
    series = bar_chart.Series("a", "#111111")
    bars = (bar_chart.Bar(((series, 1.0),), limit=4.0), bar_chart.Bar(((series, 2.0),)))
    chart = bar_chart.Chart(title="t", unit="s", groups=[bar_chart.Group("g", bars)], limit="most")
    drawn = ElementTree.fromstring(bar_chart.draw(chart))
    widths = [float(bar.attrib["width"]) for bar in drawn.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert widths[1] == 2 * widths[0]
    assert "most" in [text.text for text in drawn.iter(f"{SVG}text")]


def test_there_is_no_chart_of_nothing() -> None:
    with pytest.raises(KeyError):
        bar_chart.draw(bar_chart.Chart(title="t", unit="s", groups=[]))


def test_every_result_has_a_chart_that_a_page_shows() -> None:
    # The two rounds of one differ by more than a chart may hide; of the other, one bar would hide all others.
    without = {"rivals", "loading"} | {"codecs", "quotas", "tiers_folder"}  # those of the latter are tables
    shown = {file.stem for file in RESULTS if not file.stem.startswith("concurrency_")}  # tables of several files
    assert {name for name, _ in charts.CHARTS.values()} == shown - without
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "performance").glob("*.md"))
    assert [file.name for file in tables.PICTURES if f"(../images/{file.name})" not in pages] == []


def make_answers(ttft_seconds: float, round_seconds: float) -> doc_qa.DocumentRound:
    completion = Completion(
        token_ids=(1, 2),
        text="",
        finish_reason="length",
        ttft_seconds=ttft_seconds,
        total_seconds=round_seconds,
        prompt_tokens=2052,
        cached_tokens=0,
    )
    return doc_qa.DocumentRound(seconds=round_seconds, completions=[completion] * 2)


def test_the_gain_of_a_round_is_what_it_saves_of_the_first() -> None:
    rounds = [make_answers(2.0, 10.0), make_answers(0.4, 3.0), make_answers(1.0, 5.0), make_answers(0.5, 4.0)]
    values = {row.name: row.value for row in doc_qa.rows_of(*rounds)}
    assert values["doc_qa_ttft_gain"] == pytest.approx(80)
    assert values["doc_qa_round_gain"] == pytest.approx(70)
    assert values["doc_qa_query_ttft_gain"] == pytest.approx(75)
    assert values["doc_qa_own_query_round_gain"] == pytest.approx(50)
    assert values["doc_qa_identical"] == 100
    assert all(meaning_of(name) for name in values)


@pytest.mark.parametrize("name", [*BENCHMARKS, "tables"])
def test_every_benchmark_says_how_it_is_used(name: str, tmp_path: Path) -> None:
    shown = tmp_path / "help"
    with shown.open("wb") as log:
        done = start_module(f"benchmarks.{name}", "--help", environment=os.environ, log=log)
    assert done.wait(150) == 0, shown.read_text()
    assert f"python -m benchmarks.{name}" in shown.read_text()
    if name in BENCHMARKS:
        assert {"--quick", "--json", "--keep-logs"} <= set(re.split(r"[\[\]\s]+", shown.read_text()))


def test_a_benchmark_that_is_interrupted_ends_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.data_path", "--only", "fetches", "--json", str(tmp_path / "r.json")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        assert "fetches" in process.stdout.readline()
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert not (tmp_path / "r.json").exists()


def test_a_benchmark_that_fails_keeps_what_it_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(run: BenchmarkRun) -> None:
        run.add(Row(name="hook_idle_us", value=1.0, unit="us"))
        raise LmkvError("no engine")

    file = tmp_path / "r.json"
    assert Benchmark(name="hooks", description="", measure=measure).main(["--json", str(file)]) == 1
    assert "hook_idle_us" in capsys.readouterr().out
    assert not file.exists()
    kept = read_report(tmp_path / "r.json.partial")
    assert [row.name for row in kept.rows] == ["hook_idle_us"]
    assert kept.notes == ["The run failed: no engine."]


def test_every_row_of_the_committed_results_says_what_it_is() -> None:
    for file in RESULTS:
        report = read_report(file)
        assert file.stem == report.benchmark or file.stem.startswith(f"{report.benchmark}_")  # a part of its cells
        assert all(meaning_of(row.name, report.benchmark) for row in report.rows)
        assert list(json.loads(file.read_text())["rows"][0]) == ROW_FIELDS


def test_an_unexplained_row_is_found() -> None:
    assert meaning_of("ttft_own_ms_4000") == "TTFT of a hit in the node's pool; 4000 tokens"
    assert meaning_of("lookup_400_p50_ms") == "the engine asks its node: hit in the node's pool; 400 chunks"
    assert meaning_of("lookup_400_p50_ms", "control_plane") == "400 chunks among a million, over a stream"
    assert meaning_of("http_lookup_131072_ms") == "`POST /lookup` by tokens, as JSON; 131072 tokens"
    with pytest.raises(KeyError):
        meaning_of("whatever")


def test_the_pages_show_what_the_results_say() -> None:
    for page in tables.PAGES:
        assert tables.fill(page.read_text()) == page.read_text(), "run: python -m benchmarks.tables"
    for file in tables.PICTURES:
        assert tables.draw(file) == file.read_text(), "run: python -m benchmarks.tables"


def test_a_page_gets_the_rows_that_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    make_report(compare("miss_overhead", 1.0, "%", "none", 2.0), Row(name="hook_idle_us", value=1.0, unit="us")).write(
        tmp_path / "data_path.json"
    )
    page = "before\n<!-- benchmark data_path: hook_idle_us -->\nold\n<!-- end of benchmark -->\nafter\n"
    filled = tables.fill(page, tmp_path)
    assert filled.startswith("before\n<!-- benchmark data_path: hook_idle_us -->\n")
    assert filled.endswith("<!-- end of benchmark -->\nafter\n")
    assert "<br>`hook_idle_us` |" in filled
    assert "miss_overhead" not in filled
    assert "old" not in filled
    assert tables.fill(filled, tmp_path) == filled
    assert filled.count("python -m benchmarks.data_path") == 1
    assert tables.fill(page + page, tmp_path).count("python -m benchmarks.data_path") == 1, "once per page"
    with pytest.raises(ValueError, match="no row nothing"):
        tables.fill(page.replace("hook_idle_us", "nothing"), tmp_path)
    with pytest.raises(ValueError, match=r"there is no doc_qa\.json; make it with"):
        tables.fill(page.replace("data_path", "doc_qa"), tmp_path)
