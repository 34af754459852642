"""Configuration keys as flags, in help texts and in the documentation."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from lmkv.config import (
    Config,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    add_arguments,
    from_arguments,
    keys,
)
from lmkv.errors import ConfigError
from tests.lmkv.config.files import EMPTY, PROCESSES, written

DOCS = Path(__file__).parents[3] / "docs"


def parsed(cls: type[Config], *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, cls)
    return parser.parse_args(argv)


def test_every_key_is_a_flag() -> None:
    args = parsed(
        ConnectorConfig,
        "--max-local-cpu-size",
        "512MB",
        "--enable-p2p",
        "false",
        "--verify-loads",
        "--p2p-init-ports",
        "9",
    )
    config = from_arguments(args, ConnectorConfig, env={"LMKV_P2P_PORT": "7"})
    assert (config.max_local_cpu_size, config.enable_p2p, config.verify_loads, config.p2p_port) == (0.5, False, True, 9)


def test_the_command_lines_of_lmcache_work_as_they_stand() -> None:
    ports = '{"pull": 8300, "reply": 8400, "heartbeat": 8082}'
    args = parsed(CoordinatorConfig, "--host", "localhost", "--port", "9000", "--monitor-ports", ports)
    assert from_arguments(args, CoordinatorConfig, env=EMPTY).monitor_ports == {
        "pull": 8300,
        "reply": 8400,
        "heartbeat": 8082,
    }
    args = parsed(CoordinatorConfig, "--host", "localhost", "--port", "9000", "--monitor-port", "9001")
    assert from_arguments(args, CoordinatorConfig, env=EMPTY).monitor_ports == {"pull": 9001}


def test_a_flag_names_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "p2p_port: 4\n")
    assert from_arguments(parsed(NodeConfig, "--config", str(file)), NodeConfig, env=EMPTY).p2p_port == 4


def test_flags_that_contradict_each_other_are_refused() -> None:
    args = parsed(NodeConfig, "--p2p-port", "1", "--p2p-init-ports", "2")
    with pytest.raises(ConfigError, match="--p2p-port and --p2p-init-ports contradict each other on the command line"):
        from_arguments(args, NodeConfig, env=EMPTY)


@pytest.mark.parametrize("cls", PROCESSES)
def test_help_explains_every_key(cls: type[Config]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    shown = " ".join(parser.format_help().split())
    for name, declared in keys(cls).items():
        assert declared.doc.endswith(".")
        if declared.kind.secret:
            assert f"--{name.replace('_', '-')} " not in shown
        else:
            assert f"--{name.replace('_', '-')} " in shown
            assert declared.doc in shown


@pytest.mark.parametrize("cls", PROCESSES)
def test_the_documentation_lists_every_key_with_its_default(cls: type[Config]) -> None:
    page = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    for name, declared in keys(cls).items():
        assert f"| `{name}` | {declared.default} | {declared.doc} |" in page


@pytest.mark.parametrize("cls", PROCESSES)
def test_the_documentation_lists_every_other_spelling(cls: type[Config]) -> None:
    page = (DOCS / "guides" / "migrate-from-lmcache.md").read_text(encoding="utf-8")
    own = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    for name, declared in keys(cls).items():
        for alias in declared.aliases:
            row = re.search(rf"^\| .*`{alias.name}`.* \| `{name}` \|$", page, re.MULTILINE)
            assert row or re.search(rf"`{alias.name}`(?: is short)? for\s`{name}`", own), alias.name
