"""Completion of `lmkv` in shells, with a real bash on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv import cli
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
INPUTRC = "set show-all-if-ambiguous on\nset enable-bracketed-paste off\nset page-completions off\n"


class Bash:
    """An interactive bash, whose keyboard and screen are the file `terminal`."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._seen = ""

    def press(self, keys: str) -> None:
        """Types the keys; what was on the screen before is forgotten."""
        self._seen = ""
        os.write(self._terminal, keys.encode())

    def expect(self, pattern: str) -> str:
        """Reads until the pattern is on the screen, and returns the screen."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not re.search(pattern, self._seen):
            ready, _, _ = select.select([self._terminal], [], [], deadline - time.monotonic())
            assert ready, f"{pattern!r} is not on the screen: {self._seen!r}"
            self._seen += os.read(self._terminal, 10_000).decode()
        return self._seen


@pytest.fixture
def bash(tmp_path: Path) -> Iterator[Bash]:
    """A bash that completes lmkv as the documentation says."""
    line = re.search(r"^\| bash \| `(.*?)` \|", (ROOT / "docs/reference/cli.md").read_text(), re.MULTILINE)
    assert line
    (tmp_path / "inputrc").write_text(INPUTRC)
    (tmp_path / "bashrc").write_text(f'{line[1]}\nPS1="ready: "\n')
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", tmp_path / "bashrc", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        cwd=tmp_path,
        env={"PATH": path, "HOME": str(tmp_path), "INPUTRC": str(tmp_path / "inputrc"), "TERM": "dumb"},
    )
    os.close(theirs)
    with process:
        try:
            shell = Bash(ours)
            shell.expect("ready: ")
            yield shell
        finally:
            process.kill()
            os.close(ours)


def test_bash_completes_commands(bash: Bash) -> None:
    bash.press("lmkv dr\t")
    bash.expect("lmkv drain ")


def test_bash_completes_flags_and_values_of_a_command(bash: Bash) -> None:
    bash.press("lmkv lookup --tok\t")
    shown = bash.expect("\nready: ")
    assert set(shown.split("\n")[1].split()) == {"--tokens", "--tokens-file", "--tokenizer"}
    bash.press("\x15lmkv ops ca\t")
    bash.expect("lmkv ops cancel ")


@pytest.mark.parametrize(("shell", "registers"), [("zsh", "compdef _python_argcomplete lmkv"), ("fish", "complete ")])
def test_other_shells_get_scripts_of_their_own(shell: str, registers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert registers in capsys.readouterr().out


def test_nothing_of_it_is_imported_unless_the_shell_asks() -> None:
    code = "import sys; from lmkv import cli; cli.main(['version']); sys.exit('argcomplete' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
