"""`docs/prometheus`: the rules do what their own tests say, and ask for nothing that nobody measures."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from lmkv.config import NodeConfig
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node

FOLDER = Path(__file__).parents[2] / "docs" / "prometheus"
RULES = FOLDER / "rules.yaml"
TESTS = FOLDER / "rules_test.yaml"
CONNECTOR_STATS = Path(__file__).parents[2] / "client" / "lmkv_client" / "connector" / "stats.py"


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    """All rules."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> str:
    """What promtool says, whose exit code must be 0."""
    program = shutil.which("promtool")
    assert program, "promtool is missing: `make setup` installs it (Debian's package prometheus)"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_can_read_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


def test_the_rules_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))


def test_every_rule_is_tested(rules: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]}
    recorded = {case["expr"] for test in tests for case in test.get("promql_expr_test", ())}
    assert {rule["alert"] for rule in rules if "alert" in rule} == fired
    assert {rule["record"] for rule in rules if "record" in rule} == recorded


def test_every_alert_says_what_happened_and_what_to_do(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["annotations"].keys() == {"summary", "description"}


async def test_every_metric_that_a_rule_asks_for_is_measured(rules: list[dict[str, Any]], runtime_dir: Path) -> None:
    config = NodeConfig(instance_id="n", runtime_dir=str(runtime_dir), max_local_cpu_size="16MB")  # type: ignore[arg-type]
    async with Coordinator(port=0) as coordinator, Node(config) as node:
        measured = {*names(coordinator.metrics), *names(node.metrics.registry)}
    measured |= {
        f"lmkv:{name}" for name in re.findall(r'^    "([a-z_]+)": ', CONNECTOR_STATS.read_text(), re.MULTILINE)
    }
    measured |= {rule["record"] for rule in rules if "record" in rule}
    asked = {name for rule in rules for name in re.findall(r"\blmkv[_:][a-z0-9_:]+", rule["expr"])}
    assert len(asked) > 15
    assert {re.sub("_(total|bucket|sum|count)$", "", name) for name in asked} - measured == set()


def names(registry: CollectorRegistry) -> Iterable[str]:
    """Families, also those that have no samples yet."""
    return [family.name for family in registry.collect()]
