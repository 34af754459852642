"""`lmkv completion`: prints the script that makes a shell ask `lmkv` for completions, by argcomplete."""

from __future__ import annotations

import argparse

from lmkv.cli import Command

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
