"""Tables of results with a column for each system, size or percentile."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.support import column_table, machine
from benchmarks.support.rows import Report, Row, compare


def make_report(benchmark: str, *rows: Row) -> Report:
    command = f"python -m benchmarks.{benchmark}"
    return Report(benchmark=benchmark, command=command, quick=False, machine=machine.describe(), rows=list(rows))


RIVALS = make_report(
    "rivals",
    Row(name="lmkv_cold_ms_4097", value=100.0, unit="ms"),
    compare("lmcache_cold_ms_4097", 250.0, "ms", "lmkv", 100.0),
    Row(name="lmkv_idle_cpu_percent", value=5.0, unit="% of a core"),
)


def test_a_column_has_the_rows_with_its_name() -> None:
    assert column_table.render(RIVALS, ["lmkv", "lmcache"], ["*_cold_ms_4097"]).splitlines() == [
        "| row | lmkv | LMCache |",
        "|---|---:|---:|",
        "| TTFT of a miss; 4097 tokens (ms)<br>`*_cold_ms_4097` | 100 | 250 (2.50) |",
    ]


def test_a_missing_row_is_an_error_unless_the_page_leaves_its_cell_empty() -> None:
    with pytest.raises(ValueError, match="rivals has no row lmcache_idle_cpu_percent"):
        column_table.render(RIVALS, ["lmkv", "lmcache"], ["*_idle_cpu_percent"])
    table = column_table.render(RIVALS, ["lmkv", "lmcache"], ["*_idle_cpu_percent-lmcache"])
    assert table.endswith("idle (% of a core)<br>`*_idle_cpu_percent` | 5.00 |  |")


def test_the_first_row_of_a_name_has_the_baseline_of_the_column() -> None:
    report = make_report(
        "channels",
        compare("shm_fetch_vs_memcpy", 8.0, "GB/s", "memcpy", 16.0),
        compare("nixl_fetch_vs_raw", 2.0, "GB/s", "bare NIXL read", 4.0),
        compare("nixl_fetch_vs_memcpy", 2.0, "GB/s", "memcpy", 16.0),
        compare("nixl_fetch_512_vs_raw", 1.0, "GB/s", "bare NIXL read", 4.0),
        compare("shm_fetch_512_vs_memcpy", 4.0, "GB/s", "memcpy", 16.0),
    )
    assert column_table.render(report, ["shm", "nixl"], ["*_fetch", "*_fetch_512"]).splitlines()[2:] == [
        "| fetch (GB/s)<br>`*_fetch` | 8.00 (0.500) | 2.00 (0.500) |",
        "| fetch; 512 tokens (GB/s)<br>`*_fetch_512` | 4.00 (0.250) | 1.00 (0.250) |",
    ]


def test_columns_that_are_baselines_follow_the_value() -> None:
    report = make_report(
        "pd",
        compare("pd_ttft_vs_one_engine_4096", 20.0, "ms", "one engine", 10.0),
        compare("pd_ttft_vs_lmcache_4096", 20.0, "ms", "LMCache", 40.0),
        Row(name="pd_transfer_vs_lmcache", value=2.0, unit="ms", baseline="LMCache", baseline_value=8.0),
        compare("pd_itl_vs_one_engine", 3.0, "ms", "one engine", 3.0),
        compare("pd_itl_vs_lmcache", 4.0, "ms", "LMCache", 3.0),
    )
    names = ["pd_ttft_vs_*_4096", "pd_transfer_vs_*-one_engine"]
    assert column_table.render(report, ["one_engine", "lmcache"], names).splitlines() == [
        "| row | lmkv | one engine | LMCache |",
        "|---|---:|---:|---:|",
        "| TTFT; 4096 tokens (ms)<br>`pd_ttft_vs_*_4096` | 20.0 | 10.0 (2.00) | 40.0 (0.500) |",
        "| latency that the transfer adds (ms)<br>`pd_transfer_vs_*` | 2.00 |  | 8.00 |",
    ]
    with pytest.raises(ValueError, match=r"pd_itl_vs_.* has different units, values or meanings"):
        column_table.render(report, ["one_engine", "lmcache"], ["pd_itl_vs_*"])
    with pytest.raises(ValueError, match="columns are baselines of some rows only"):
        column_table.render(report, ["one_engine", "lmcache"], ["pd_itl_vs_*", "pd_*_ms"])


def test_sizes_and_percentiles_are_columns_too() -> None:
    report = make_report("scale", *(Row(name=f"scale_join_s_{count}", value=1.0, unit="s") for count in (250, 500)))
    heading, _, line = column_table.render(report, ["250", "500"], ["scale_join_s_*"]).splitlines()
    assert heading == "| row | 250 nodes | 500 nodes |"
    assert line.startswith("| start of a fleet: time until a coordinator knows every chunk (s)<br>`scale_join_s_*` |")
    report = make_report("data_path", *(Row(name=f"lookup_p{p}_ms", value=float(p), unit="ms") for p in (50, 99)))
    assert column_table.render(report, ["p50", "p99"], ["lookup_*_ms"]).endswith("`lookup_*_ms` | 50.0 | 99.0 |")


def test_rows_with_different_units_are_refused() -> None:
    report = make_report(
        "rivals",
        Row(name="lmkv_idle_cpu_percent", value=5.0, unit="% of a core"),
        Row(name="lmcache_idle_cpu_percent", value=5.0, unit="s"),
    )
    with pytest.raises(ValueError, match="has different units"):
        column_table.render(report, ["lmkv", "lmcache"], ["*_idle_cpu_percent"])


def test_a_page_gets_the_columns_that_it_names(tmp_path: Path) -> None:
    RIVALS.write(tmp_path / "rivals.json")
    mark = "<!-- benchmark rivals by lmkv lmcache: *_cold_ms_4097 *_idle_cpu_percent-lmcache -->\n"
    filled = tables.fill(f"before\n{mark}former\n<!-- end of benchmark -->\nafter\n", tmp_path)
    assert filled.startswith(f"before\n{mark}\n| row | lmkv | LMCache |\n")
    assert "| 100 | 250 (2.50) |" in filled
    assert filled.count("python -m benchmarks.rivals") == 1
    assert "former" not in filled
    assert tables.fill(filled, tmp_path) == filled
