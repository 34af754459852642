"""Processes that outlive the process that started them."""

from __future__ import annotations

import os
from pathlib import Path

from lmkv_client.engine.node.launcher import NodeProcess
from tests.client.engine.nodes import kill, until


def test_it_is_nobodys_child_and_its_words_go_to_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    script = "echo $$ $PPID $NAME; echo wrong >&2; exec sleep 60"
    process = NodeProcess.start(["/bin/sh", "-c", script], {"NAME": "a b"}, log)
    try:
        until(lambda: log.read_text().endswith("wrong\n"))
        before, words, _ = log.read_text().splitlines()
        assert before == "before"
        assert words.split()[0] == str(process.pid)
        assert words.split()[1] != str(os.getpid())
        assert words.endswith("a b")
        assert os.getsid(process.pid) != os.getsid(0)
        assert process.running
    finally:
        kill(process.pid)
    assert not process.running


def test_a_command_that_is_not_there_has_ended_with_a_word(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = NodeProcess.start(["/none"], {}, log)
    until(lambda: not process.running)
    assert "/none" in log.read_text()


def test_another_process_that_got_its_id_does_not_count() -> None:
    process = NodeProcess(os.getpid())
    assert process.running
    process._start_time = "1"
    assert not process.running
    assert not NodeProcess(2**22 + 1).running
