"""What the benchmark of prefill and decode makes of answers, and how it freezes others. Nothing is measured here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from benchmarks import pd
from benchmarks.support.clients import Measured
from benchmarks.support.meanings import meaning_of
from benchmarks.systems import prefill_decode
from benchmarks.systems.calls import SERVICE, PdCounts
from benchmarks.systems.prefill_decode import System, TimedResponse
from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import ServerProcess, session_pids


def make_round(*, scale: float = 1.0) -> dict[str, TimedResponse]:
    one = TimedResponse(token_ids=(1, 2, 3, 4), seconds=tuple(scale * at for at in (1.0, 1.1, 1.2, 1.3)))
    lmkv = TimedResponse(token_ids=one.token_ids, seconds=(1.0, 1.4, 1.5, 1.8), seam=0.4, step=0.3)
    return {
        "one_engine": one,
        "lmkv": lmkv,
        "nixlconnector": replace(lmkv, seconds=(2.0, 2.1, 2.2, 2.3)),
        "lmcache": replace(lmkv, seam=0.9),
    }


def test_an_answer_says_when_its_tokens_came() -> None:
    answer = make_round()["lmkv"]
    assert (answer.ttft, answer.second_token, answer.total) == (1.0, 1.4, 1.8)
    assert answer.itl == pytest.approx(0.2)
    assert answer.transfer == pytest.approx(0.1)
    assert prefill_decode.later(answer, 1.0) == (2.0, 2.4, 2.5, 2.8)


def test_rows_compare_lmkv_with_every_system() -> None:
    rows = {row.name: row for row in pd.rows_of([make_round(), make_round(scale=2.0), make_round()], "")}
    assert rows["pd_ttft_vs_nixlconnector"].ratio == pytest.approx(0.5)
    assert rows["pd_second_token_vs_nixlconnector"].ratio == pytest.approx(1.4 / 2.1)
    assert rows["pd_itl_vs_one_engine"].ratio == pytest.approx(2.0), "the median of the ratios, not of the times"
    assert rows["pd_total_vs_lmcache"].value == pytest.approx(1800)
    assert rows["pd_transfer_share_of_ttft"].value == pytest.approx(10)
    assert rows["pd_transfer_vs_lmcache"].baseline_value == pytest.approx(600)
    assert rows["pd_transfer_vs_lmcache"].ratio is None
    assert rows["pd_seam_ms"].baseline_value == pytest.approx(300)
    assert "pd_transfer_vs_one_engine" not in rows
    assert all(meaning_of(name) for name in rows)


def test_every_row_of_several_clients_has_a_meaning() -> None:
    done = Completion(
        token_ids=(1, 2),
        text="",
        finish_reason="length",
        prompt_tokens=9,
        cached_tokens=0,
        ttft_seconds=0.1,
        total_seconds=0.2,
        gaps=(0.1,),
    )
    found = Measured(completions=[done], seconds=1.0)
    rows = [*found.rows("pd_fan_in_nixlconnector_c16"), *found.rows("pd_fan_in_lmkv_c16", "NixlConnector", found)]
    assert all(meaning_of(row.name) for row in rows)
    assert meaning_of("pd_fan_in_lmkv_c16_identical").endswith("equal with both systems")


def test_answers_that_differ_are_counted() -> None:
    odd = make_round() | {"lmcache": replace(make_round()["lmcache"], token_ids=(1, 2, 3, 5))}
    rows = {row.name: row.value for row in pd.rows_of([make_round(), odd], "_4096")}
    assert rows["pd_identical_4096"] == 50


def test_an_answer_with_too_few_tokens_ends_the_benchmark(tmp_path: Path) -> None:
    answer = TimedResponse(token_ids=(1, 2), seconds=(1.0, 1.1))
    systems = {"lmkv": System(ask=lambda *_: answer, decode=EngineProcess(tmp_path, tmp_path))}
    with pytest.raises(LmkvError, match="2 tokens instead of 3"):
        pd.ask_all(systems, [5, 6], 3)


def test_a_handoff_that_took_no_time_on_the_clock_has_no_speed() -> None:
    none = dict.fromkeys((method.name for method in SERVICE.methods), 0.0)
    counts = PdCounts(rpcs=none | {"Init": 2}, handed_bytes=1 << 20, handed_seconds=0.0)
    assert [row.name for row in counts.rows(1, "")] == ["pd_rpcs_per_request"]


def test_calls_are_those_of_the_requests_between_two_moments() -> None:
    none = dict.fromkeys((method.name for method in SERVICE.methods), 0.0)
    before = PdCounts(rpcs=none | {"Init": 2, "Allocate": 3, "Commit": 3}, handed_bytes=1 << 30, handed_seconds=1.0)
    after = PdCounts(rpcs=none | {"Init": 2, "Allocate": 5, "Commit": 7}, handed_bytes=3 << 30, handed_seconds=1.5)
    rows = {row.name: row.value for row in (after - before).rows(2, "_4096")}
    assert rows == {"pd_rpcs_per_request_4096": 3.0, "pd_handoff_gb_per_s_4096": 4.0}
    assert (after - before).in_words(2) == "Allocate 1, Commit 2"
    assert all(meaning_of(name) for name in rows)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A process with a child, as engines have."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with ServerProcess("busy", [sys.executable, "-c", code], tmp_path / "busy.log") as server:
        server.start()
        server.wait_until(lambda: len(session_pids(server.pid)) == 2, "whole", 60.0)
        yield server


def states(server: ServerProcess) -> set[str]:
    """States of all processes of a server, as /proc names them."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in session_pids(server.pid)]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_a_frozen_system_runs_only_while_it_is_awake(server: ServerProcess) -> None:
    prefill_decode.send(signal.SIGSTOP, [server])
    server.wait_until(lambda: states(server) == {"T"}, "frozen", 60.0)
    with prefill_decode.thawed([server]):
        server.wait_until(lambda: "T" not in states(server), "awake", 60.0)
    server.wait_until(lambda: states(server) == {"T"}, "frozen again", 60.0)


def test_the_notice_of_another_request_is_passed_over() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as notices, context.socket(zmq.PUSH) as sender:
        sender.connect(f"tcp://127.0.0.1:{notices.bind_to_random_port('tcp://127.0.0.1')}")
        for request_id in ("r1", "r2"):
            sender.send(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": request_id}))
        prefill_decode.wait_for_notice(notices, "r2", 60.0)
        with pytest.raises(LmkvError, match="did not report the transfer"):
            prefill_decode.wait_for_notice(notices, "r3", 0.01)
