from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import lmkv
from lmkv import cli
from lmkv.cli import Command
from lmkv.config import CoordinatorConfig, NodeConfig, add_arguments, from_arguments
from lmkv.errors import ConfigError, LmkvError, Unreachable
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]

Action = Callable[[argparse.Namespace], int]


def run(argv: list[str], action: Action = lambda _: 0, name: str = "work") -> int:
    """Runs a command line with one command, which takes the coordinator's flags."""
    command = Command(
        name=name,
        help="do the work",
        add_arguments=lambda parser: add_arguments(parser, CoordinatorConfig),
        run=action,
        examples="  lmkv work --port 1   work on port 1",
    )
    return cli.main(argv, {name: lambda: command})


def raising(error: BaseException) -> Action:
    def action(_: argparse.Namespace) -> int:
        raise error

    return action


def test_alone_it_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert run(argv) == 0
        shown = capsys.readouterr().out
        assert "work          do the work" in shown
        assert "lmkv lookup --tokens" in shown
        assert "LMKV_CONFIG_FILE" in shown


def test_a_command_gets_its_arguments_and_gives_the_exit_code() -> None:
    seen: list[int] = []

    def action(args: argparse.Namespace) -> int:
        seen.append(from_arguments(args, CoordinatorConfig, env={}).port)
        return 7

    assert run(["work", "--port", "1234"], action) == 7
    assert seen == [1234]


def test_help_of_a_command_shows_flags_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(["work", "--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: lmkv work" in shown
    assert "--lease-ttl TIME" in shown
    assert "lmkv work --port 1   work on port 1" in shown


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["wrok"], "there is no command 'wrok'; did you mean work?"),
        (["zzz"], "there is no command 'zzz'; `lmkv --help` lists them all"),
        (["work", "--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["work", "--port"], "argument --port: expected one argument; see `lmkv work --help`"),
        (["work", "more"], "unknown argument more; see `lmkv work --help`"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert captured.err == f"lmkv: error: {line}\n"
    assert captured.out == ""


def test_a_bad_configuration_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def action(args: argparse.Namespace) -> int:
        from_arguments(args, CoordinatorConfig, env={})
        return 0

    assert run(["work", "--port", "x"], action) == 2
    assert capsys.readouterr().err == (
        "lmkv: error: --port must be a port from 0 to 65535 (0: a free one), not 'x' (on the command line)\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("port 9000 is in use;\n  set port"), 2, "port 9000 is in use; set port"),
        (Unreachable("no answer"), 1, "no answer"),
        (LmkvError("no"), 1, "no"),
        (
            BaseExceptionGroup("in tasks", [ExceptionGroup("again", [ConfigError("port is in use")])]),
            2,
            "port is in use",
        ),
    ],
)
def test_a_refusal_is_one_line(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["work"], raising(error)) == code
    assert capsys.readouterr().err == f"lmkv: error: {line}\n"


def test_a_refusal_inside_a_task_group_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        raise ConfigError("port is in use")

    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            tasks.create_task(asyncio.sleep(10))

    def action(_: argparse.Namespace) -> int:
        asyncio.run(work())
        return 0

    assert run(["work"], action) == 2
    assert capsys.readouterr().err == "lmkv: error: port is in use\n"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(["work"], raising(ZeroDivisionError()))
    with pytest.raises(BrokenPipeError):
        run(["work"], raising(BrokenPipeError()))
    with pytest.raises(ExceptionGroup):
        run(["work"], raising(ExceptionGroup("both", [ZeroDivisionError(), ConfigError("no")])))


def test_an_interrupt_is_no_failure_to_talk_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["work"], raising(KeyboardInterrupt())) == 130
    assert run(["work"], raising(BaseExceptionGroup("tasks", [KeyboardInterrupt()]))) == 130
    assert capsys.readouterr().err == ""


def test_a_command_that_cannot_be_imported_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> Command:
        raise ImportError("No module named 'torch'")

    assert cli.main(["work"], {"work": load}) == 1
    assert capsys.readouterr().err == "lmkv: error: `lmkv work` cannot start here: No module named 'torch'\n"
    assert cli.main([], {"work": load}) == 0
    assert "No module named 'torch'" in capsys.readouterr().out


def test_without_installed_commands_it_still_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([], {}) == 0
    assert "usage: lmkv COMMAND" in capsys.readouterr().out


def test_version_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"], {"version": lambda: cli.version_command}) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["lmkv"] == lmkv.__version__
    assert lines["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "grpcio" in lines["grpc"]
    assert {"nixl", "torch", "vllm"} <= lines.keys()
    assert cli.main(["--version"], {}) == 0
    assert capsys.readouterr().out == f"lmkv {lmkv.__version__}\n"


def test_versions_as_json_have_every_component(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--json"], {"version": lambda: cli.version_command}) == 0
    versions = json.loads(capsys.readouterr().out)
    assert versions.keys() == {"lmkv", "python", "grpc", "nixl", "torch", "vllm"}
    assert versions["lmkv"] == lmkv.__version__


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert lmkv.__version__ == project["version"]


def test_the_table_of_contents_is_true() -> None:
    for name in lmkv.__all__:
        assert getattr(lmkv, name) is not None
    assert dir(lmkv) == sorted(lmkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lmkv.Nothing


def child_environment(*folders: Path) -> dict[str, str]:
    """An environment in which Python finds these folders, then everything that this process does."""
    path = os.pathsep.join([*map(str, folders), *filter(None, sys.path)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
    return kept | {"PYTHONPATH": path}


def test_import_brings_in_nothing_heavy() -> None:
    heavy = {"numpy", "grpc", "torch", "nixl", "vllm", "yaml", "rich", "google.protobuf"}
    code = f"import sys, lmkv, lmkv.cli, lmkv.config; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(ROOT),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"


SLOW_TO_IMPORT = {"numpy", "grpc", "google.protobuf", "asyncio", "rich", "torch", "vllm"}


def imported_by(code: str, **environment: str) -> set[str]:
    """The modules that a Python process has imported when it exits."""
    begin = "import atexit, sys\natexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr))\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        env=child_environment(ROOT) | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines())


def test_help_of_a_command_imports_its_flags_only() -> None:
    assert {"move", "doctor", "demo", "node", "picker", "version"} <= set(cli.find_commands())
    modules = imported_by(
        "from lmkv import cli\n"
        "for name in cli.find_commands():\n"
        "    try:\n"
        "        cli.main([name, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
    )
    assert {"lmkv_client.commands.flags", "lmkv_server.flags"} <= modules
    assert modules & SLOW_TO_IMPORT == set()


@pytest.mark.parametrize("line", ["lmkv mo", "lmkv move --to", "lmkv config check --process co", "lmkv node --p2p"])
def test_completion_imports_flags_only(line: str, tmp_path: Path) -> None:
    candidates = tmp_path / "candidates"
    modules = imported_by(
        "import os\nos._exit = sys.exit\nfrom lmkv import cli\ncli.main()\n",
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_STDOUT_FILENAME=str(candidates),
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
        COMP_TYPE="9",
    )
    assert line.split()[-1] in candidates.read_text()
    assert "argcomplete" in modules
    assert modules & SLOW_TO_IMPORT == set()


def test_a_command_whose_module_cannot_be_imported_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(name="work", add_arguments=lambda parser: None, run="no_such_module:run")
    assert cli.main(["work"], {"work": lambda: command}) == 1
    assert capsys.readouterr().err == "lmkv: error: `lmkv work` cannot start here: No module named 'no_such_module'\n"


COMMANDS = """
import time
from lmkv.cli import Command
from lmkv.config import NodeConfig, load

def speak(args):
    for _ in range(100_000):
        print("a line that is long enough to fill the pipe")
    return 0

def wait(args):
    print("waiting", flush=True)
    time.sleep(60)
    return 0

def check(args):
    print(load(NodeConfig).p2p_port)
    return 0

def make(name, run):
    return Command(name=name, help=name, add_arguments=lambda parser: None, run=run)

speak, wait, check = make("speak", speak), make("wait", wait), make("check", check)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that looks to Python like an installation of lmkv with three commands."""
    info = tmp_path / "lmkv-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmkv\nVersion: 0\n")
    points = "".join(f"{name} = some_commands:{name}\n" for name in ("speak", "wait", "check"))
    (info / "entry_points.txt").write_text(f"[lmkv.commands]\n{points}broken = no_such_module:command\n")
    (tmp_path / "some_commands.py").write_text(COMMANDS)
    return tmp_path


@contextmanager
def started(installed: Path, *argv: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m lmkv`, gone when the test is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lmkv", *argv],
        env=child_environment(installed, ROOT) | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_installed_commands_are_found_and_a_broken_one_breaks_no_other(installed: Path) -> None:
    with started(installed) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "  check         check" in out
    assert "  broken        (`lmkv broken` cannot start here: No module named 'no_such_module')" in out


def test_a_process_that_cannot_start_leaves_with_2_and_no_traceback(installed: Path) -> None:
    with started(installed, "check", LMKV_P2P_PRT="1") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "lmkv: error: unknown key LMKV_P2P_PRT in the environment; did you mean LMKV_P2P_PORT?\n"


def test_a_reader_that_goes_away_is_ignored(installed: Path) -> None:
    with started(installed, "speak") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


def test_ctrl_c_ends_it_quietly(installed: Path) -> None:
    with started(installed, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_every_command_of_the_project_reads_only_known_keys() -> None:
    """What the fallback order promises: an empty environment is a valid configuration of every process."""
    for cls in (NodeConfig, CoordinatorConfig):
        parser = argparse.ArgumentParser()
        add_arguments(parser, cls)
        assert from_arguments(parser.parse_args([]), cls, env={}) == cls()


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
