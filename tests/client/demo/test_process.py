"""Server processes are started, watched and ended whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from lmkv.errors import LmkvError
from lmkv_client.demo.process import (
    PORT_CLASSES,
    ServerProcess,
    end_processes,
    free_port,
    pids_with_environment,
    session_pids,
)

SLEEP = "import time; time.sleep(60)"
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
WITH_DAEMON = (
    "import subprocess, sys\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}, 'node'], start_new_session=True).wait()"
)
SHARING = (
    "import mmap, os, sys; file = open(sys.argv[1], 'w+b'); file.truncate(4096)\n"
    "memory = mmap.mmap(file.fileno(), 4096); print('up', flush=True); import time; time.sleep(60)"
)
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"


def server(program: str, tmp_path: Path, **environment: str) -> ServerProcess:
    return ServerProcess("server", [sys.executable, "-c", program], tmp_path / "logs" / "server.log", environment)


def test_what_it_prints_is_in_its_log_also_after_a_second_start(tmp_path: Path) -> None:
    process = server("print('hello')", tmp_path)
    for _ in range(2):
        process.start()
        while process.alive:
            time.sleep(0.01)
    assert process.log() == "hello\nhello\n"


def test_a_process_that_ends_early_is_reported_with_the_cause_from_its_log(tmp_path: Path) -> None:
    with server("raise ValueError('no such port')", tmp_path) as process:
        process.start()
        with pytest.raises(LmkvError, match=r"server exited before it was ready: ValueError: no such port") as caught:
            process.wait_until(lambda: False, "ready", 60)
    assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "(EngineCore pid=7) ERROR 11-20 [core.py:1] lmkv.errors.ConfigError: chunk_size is odd\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "lmkv.errors.ConfigError: chunk_size is odd",
        ),
        (
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, it is too long",
            "pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, it is too long",
        ),
        ("lmkv: error: port 9000 is in use", "lmkv: error: port 9000 is in use"),
        ("", "the log is empty"),
    ],
)
def test_the_cause_is_what_a_person_would_pick_from_the_log(log: str, cause: str, tmp_path: Path) -> None:
    with server(f"print({log!r})", tmp_path) as process:
        process.start()
        with pytest.raises(LmkvError) as caught:
            process.wait_until(lambda: False, "ready", 60)
    assert str(caught.value) == f"server exited before it was ready: {cause}"


def test_a_process_that_never_gets_ready_is_reported_after_the_timeout(tmp_path: Path) -> None:
    with server(f"print('loading', flush=True); {SLEEP}", tmp_path) as process:
        process.start()
        process.wait_until(lambda: "loading" in process.log(), "up", 60)
        with pytest.raises(LmkvError, match="server was not ready within 0 s: loading"):
            process.wait_until(lambda: False, "ready", 0.2)


def test_stopping_ends_its_children_too_and_twice_is_once(tmp_path: Path) -> None:
    process = server(WITH_CHILD, tmp_path)
    process.start()
    process.wait_until(lambda: len(session_pids(process.pid)) == 2, "a parent", 60)
    process.stop()
    process.stop()
    assert session_pids(process.pid) == []
    assert not process.alive


def test_a_process_that_ignores_the_signal_is_killed_after_the_timeout(tmp_path: Path) -> None:
    process = server(STUBBORN, tmp_path)
    process.start()
    process.wait_until(lambda: "up" in process.log(), "up", 60)
    begin = time.monotonic()
    process.stop(timeout_seconds=0.3)
    assert time.monotonic() - begin >= 0.3
    assert session_pids(process.pid) == []


def test_a_child_in_a_session_of_its_own_outlives_a_kill_and_is_found_by_its_environment(tmp_path: Path) -> None:
    mark = {"RUNTIME_DIR_OF_TEST": str(tmp_path)}
    process = server(WITH_DAEMON, tmp_path, **mark)
    process.start()
    try:
        process.wait_until(lambda: len(pids_with_environment(mark, "node")) == 1, "a parent", 60)
        (child,) = pids_with_environment(mark, "node")
        process.kill()
        assert session_pids(process.pid) == []
        assert pids_with_environment(mark, "node") == [child]
    finally:
        process.kill()
        end_processes(pids_with_environment(mark, "node"))
    assert pids_with_environment(mark, "node") == []


def test_settings_of_the_user_do_not_reach_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKV_CONFIG_FILE", "/nowhere")
    program = "import os; print(sorted(name for name in os.environ if name.startswith('LMKV_')))"
    process = server(program, tmp_path, LMKV_CHUNK_SIZE="64")
    process.start()
    while process.alive:
        time.sleep(0.01)
    assert process.log() == "['LMKV_CHUNK_SIZE']\n"


def test_ending_processes_is_idempotent() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    end_processes([gone.pid])


def test_a_free_port_is_free() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_a_port_is_not_returned_again_soon() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50


def test_processes_with_close_ids_choose_from_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for pid in range(1000, 1000 + PORT_CLASSES):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        chosen.append(free_port())
    assert len({port % PORT_CLASSES for port in chosen}) == PORT_CLASSES


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_shared_memory_of_engines_goes_with_them_and_that_of_others_stays(tmp_path: Path, end: str) -> None:
    engines = Path(f"/dev/shm/vllm_dist_{uuid.uuid4().hex}")
    others = Path(f"/dev/shm/test-{uuid.uuid4().hex}")
    processes = [
        ServerProcess("server", [sys.executable, "-c", SHARING, str(file)], tmp_path / file.name)
        for file in (engines, others)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_until(lambda process=process: "up" in process.log(), "ready", 60)  # type: ignore[misc]
        assert engines.exists()
        for process in processes:
            getattr(process, end)()
        assert not engines.exists()
        assert others.exists()
    finally:
        for process in processes:
            process.kill()
        others.unlink(missing_ok=True)
        engines.unlink(missing_ok=True)
