"""`lmkv coordinator` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lmkv.auth.tokens import entry, write
from tests.lmkv.certificates import issue

RUN = [
    sys.executable,
    "-c",
    "import sys\n"
    "from lmkv.cli import main\n"
    "from lmkv_server.coordinator.command import command\n"
    "sys.exit(main(sys.argv[1:], {'coordinator': lambda: command}))",
    "coordinator",
]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")} | {
    "PYTHONPATH": os.pathsep.join(sys.path)
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_says_when_it_is_ready_and_ends_cleanly(number: signal.Signals) -> None:
    with subprocess.Popen([*RUN, "--port", "0"], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            ready = re.search(r"lmkv coordinator ready on 127\.0\.0\.1:(\d+)$", line.strip())
            assert ready, line
            socket.create_connection(("127.0.0.1", int(ready[1])), timeout=5).close()
            process.send_signal(number)
            rest = process.stderr.read()
            assert process.wait(timeout=10) == 0, rest
            assert "Traceback" not in rest
            assert f"stopping: {number.name} from process {os.getpid()} (" in rest
        finally:
            process.kill()


def test_a_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*RUN, "--port", str(port)], capture_output=True, text=True, timeout=20, check=False, env=ENVIRONMENT
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"lmkv: error: port {port} on 127.0.0.1 is in use; set port to a free port, or stop who uses it\n"
    )


def test_one_that_others_reach_warns_unless_it_asks_for_tokens_over_tls(tmp_path: Path) -> None:
    tokens = write(tmp_path / "tokens.yaml", entry("reader"))
    pair = issue(tmp_path / "tls")
    for flags, first in (
        ([], "WARNING whoever reaches 0.0.0.0 may call it: set auth_tokens, or tls_client_ca, or bind 127.0.0.1"),
        (["--auth-tokens", tokens], "WARNING tokens reach 0.0.0.0 in the clear: set tls_cert and tls_key"),
        (["--auth-tokens", tokens, "--tls-cert", pair.cert, "--tls-key", pair.key], "INFO lmkv coordinator ready"),
    ):
        command = [*RUN, "--port", "0", "--host", "0.0.0.0", *flags]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
            try:
                assert process.stderr is not None
                assert first in process.stderr.readline()
            finally:
                process.kill()


def test_a_tokens_file_that_is_wrong_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens: [{name: a, role: reader, token: s3cret}]")
    done = subprocess.run(
        [*RUN, "--port", "0", "--auth-tokens", str(path)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"lmkv: error: auth_tokens: {path}: Object contains unknown field `token`")
    assert "s3cret" not in done.stderr


def test_a_layout_map_url_that_is_none_is_one_line_and_exit_code_2() -> None:
    for url, expected in (
        (
            "s3://bucket",
            "LMKV_LAYOUT_MAP_URL must be valkey://HOST:PORT/DB, redis:// or rediss:// the same, not what it is",
        ),
        ("redis://:s3cret@127.0.0.1:1?nonsense=1", "layout_map_url: redis://127.0.0.1:1/0 has an option that is none"),
    ):
        done = subprocess.run(
            [*RUN, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={**ENVIRONMENT, "LMKV_LAYOUT_MAP_URL": url},
        )
        assert done.returncode == 2
        assert expected in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert "s3cret" not in done.stderr
