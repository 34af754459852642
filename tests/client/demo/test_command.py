"""The parts of `lmkv demo` that need no engines."""

from __future__ import annotations

import argparse
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv_client.commands import flags
from lmkv_client.demo import command
from lmkv_client.demo.process import ServerProcess, launch, pids_with_environment

ENGINE = "vllm.entrypoints.openai.api_server"
EXIT_SECONDS = 120.0


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    flags.demo.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "100"], "--prompt-tokens must be 512 to 16000, not 100"),
        (["--rounds", "0"], "--rounds must be 1 to 100, not 0"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--json", "/nowhere/at/all.json"], "--json: the folder does not exist: /nowhere/at"),
        (["--prompt-tokens", "16000", "--rounds", "100"], "GiB of memory"),
        (["--engines", "vllm"], "--engines must be two of vllm and sglang, such as vllm,sglang, .* not 'vllm'"),
        (["--engines", "vllm,trt"], "--engines must be two of vllm and sglang"),
        (["--sglang-python", sys.executable], "--sglang-python is for --engines with sglang"),
        (
            ["--engines", "sglang,vllm", "--sglang-python", "/nowhere/python"],
            "--sglang-python: /nowhere/python does not",
        ),
        (
            ["--engines", "sglang,sglang"],
            f"SGLang cannot be imported by {sys.executable}; install SGLang .*docs/guides/sglang.md.* --sglang-python",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_a_coordinator_that_cannot_start_is_one_line_with_the_path_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = "import sys\nif 'coordinator' in sys.orig_argv: raise SystemExit('PortError: taken')\n"
    (tmp_path / "sitecustomize.py").write_text(fault)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(ServerProcess, "launch", staticmethod(launch))  # a forked process reads no `sitecustomize`
    assert run("--model-size", "tiny", "--keep-logs", str(tmp_path / "logs")) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("lmkv demo: coordinator exited before it was ready: PortError: taken; the logs are in ")
    assert last.endswith(str(tmp_path / "logs"))
    assert not list(tmp_path.glob("lmkv-demo-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_everything_that_was_started(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path) as (demo, terminal):
        demo.send_signal(number)
        output = read_all(terminal)
        assert demo.wait(EXIT_SECONDS) == 130
    assert output.endswith("lmkv demo: interrupted; all its processes have exited\r\n")
    assert left(tmp_path) == [[]] * 4
    assert not list(tmp_path.iterdir())


def test_a_terminal_that_is_closed_ends_everything_that_was_started(tmp_path: Path) -> None:
    with started(tmp_path) as (demo, terminal):
        os.close(terminal)  # the kernel sends SIGHUP, and nothing can be printed any more
        assert demo.wait(EXIT_SECONDS) == 130
    assert left(tmp_path) == [[]] * 4
    assert not list(tmp_path.iterdir())


def test_a_demo_that_is_started_with_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with started(tmp_path, "nohup") as (demo, _):
        demo.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            demo.wait(1.0)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(EXIT_SECONDS) == 130
    assert left(tmp_path) == [[]] * 4


@contextmanager
def started(folder: Path, *wrapper: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A demo on a terminal of its own whose engines run, and that terminal's other end."""
    terminal, its_end = pty.openpty()
    name = os.ttyname(its_end)

    def take_terminal() -> None:
        os.close(os.open(name, os.O_RDWR))  # the first terminal that a session's leader opens becomes its own

    with subprocess.Popen(
        [*wrapper, sys.executable, "-m", "lmkv", "demo", "--model-size", "tiny"],
        env=os.environ | {"TEST_OF_DEMO": str(folder), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        cwd=folder,  # where nohup writes
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as demo:
        os.close(its_end)
        try:
            deadline = time.monotonic() + EXIT_SECONDS
            while len(pids_with_environment({"TEST_OF_DEMO": str(folder)}, ENGINE)) < 2:
                assert demo.poll() is None, read_all(terminal)
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield demo, terminal
        finally:
            demo.terminate()
            with suppress(OSError):
                os.close(terminal)


def read_all(terminal: int) -> str:
    """Everything that is printed until the last process has closed the terminal."""
    parts: list[bytes] = []
    with suppress(OSError):  # EIO is a terminal's end
        while part := os.read(terminal, 4096):
            parts.append(part)
    return b"".join(parts).decode()


def left(folder: Path) -> list[list[int]]:
    """Processes of a demo that still run."""
    variables = {"TEST_OF_DEMO": str(folder)}
    return [pids_with_environment(variables, word) for word in ("demo", "coordinator", "node", ENGINE)]
