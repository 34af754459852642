"""`lmkv demo` as far as it goes without engines."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv_client.demo.command import command
from lmkv_client.demo.process import pids_with_environment

ENGINE = "vllm.entrypoints.openai.api_server"


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prompt-tokens", "100"], "--prompt-tokens must be 512 to 16000, not 100"),
        (["--rounds", "0"], "--rounds must be 1 to 100, not 0"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--json", "/nowhere/at/all.json"], "--json: there is no folder /nowhere/at"),
        (["--prompt-tokens", "16000", "--rounds", "100"], "GB of memory"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_starts(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run(*arguments)


def test_a_coordinator_that_cannot_start_is_told_in_one_line_with_the_place_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = "import sys\nif 'coordinator' in sys.orig_argv: raise SystemExit('PortError: taken')\n"
    (tmp_path / "sitecustomize.py").write_text(fault)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert run("--model-size", "tiny", "--keep-logs", str(tmp_path / "logs")) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("lmkv demo: coordinator ended before it was ready: PortError: taken; the logs are in ")
    assert last.endswith(str(tmp_path / "logs"))
    assert not list(tmp_path.glob("lmkv-demo-*"))


def test_an_interrupt_ends_everything_that_was_started(tmp_path: Path) -> None:
    mark = {"TEST_OF_DEMO": str(tmp_path)}
    demo = subprocess.Popen(
        [sys.executable, "-m", "lmkv", "demo", "--model-size", "tiny"],
        env=os.environ | mark | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with demo:
        try:
            assert demo.stdout is not None
            while "starting two vLLM engines" not in demo.stdout.readline():
                assert demo.poll() is None
            deadline = time.monotonic() + 20
            while len(pids_with_environment(mark, ENGINE)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            demo.send_signal(signal.SIGINT)
        output = demo.stdout.read()
    assert demo.returncode == 130
    assert output.endswith("lmkv demo: interrupted; everything it started has ended\n")
    assert [pids_with_environment(mark, word) for word in ("demo", "coordinator", "node", ENGINE)] == [[]] * 4
    assert not list(tmp_path.iterdir())
