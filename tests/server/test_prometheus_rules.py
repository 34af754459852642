"""`docs/prometheus`: the rules pass their own tests, and every queried metric exists."""

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

from lmkv.config import CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.proxy import Proxy

FOLDER = Path(__file__).parents[2] / "docs" / "prometheus"
RULES = FOLDER / "rules.yaml"
TESTS = FOLDER / "rules_test.yaml"
CONNECTOR_STATS = Path(__file__).parents[2] / "client" / "lmkv_client" / "connector" / "stats.py"
LABELS = {"rpc_method", "rpc_response_status_code"}


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> str:
    """What promtool says, whose exit code must be 0."""
    program = shutil.which("promtool")
    assert program, "promtool is missing: `make setup` installs it (Debian's package prometheus)"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300, check=False)
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


def test_every_alert_says_what_happened_what_to_do_and_where_its_runbook_is(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}


async def test_every_metric_that_a_rule_asks_for_is_measured(rules: list[dict[str, Any]], runtime_dir: Path) -> None:
    asked = {
        name for rule in rules for name in re.findall(r"\b(?:lmkv[_:]|rpc_)[a-z0-9_:]+(?=[{\[) ]|$)", rule["expr"])
    }
    asked -= LABELS
    assert len(asked) > 30
    assert {plain(name) for name in asked} - await measured(runtime_dir) == set()


async def measured(runtime_dir: Path) -> set[str]:
    """Every metric that a process measures, each in its fullest configuration, and what rules record of them."""
    config = NodeConfig(
        instance_id="n",
        runtime_dir=str(runtime_dir),
        max_local_cpu_size="16MB",  # type: ignore[arg-type]
        local_disk=(str(runtime_dir / "disk"),),
        max_local_disk_size="16MB",  # type: ignore[arg-type]
        persist_pool=True,
        pool_path=str(runtime_dir / "pool"),
        remote_url="redis://127.0.0.1:1",  # where no server listens
    )
    shared_map = "redis://127.0.0.1:1"  # no server here, either
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, layout_map_url=shared_map)) as coordinator,
        Node(config) as node,
    ):
        known = {*names(coordinator.metrics), *names(node.metrics.registry), *names(Proxy(ProxyConfig()).metrics)}
    known |= set(names(Picker(PickerConfig(engines=("http://localhost:8000",), policy="least_loaded")).metrics))
    known |= {f"lmkv:{name}" for name in engine_metrics()}
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return known | {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def engine_metrics() -> dict[str, str]:
    """What the connector counts, with what that is, read off its source: to import it takes vLLM."""
    return dict(re.findall(r'^    "([a-z_]+)": "(.+)",$', CONNECTOR_STATS.read_text(), re.MULTILINE))


def plain(name: str) -> str:
    """A metric's name without what Prometheus's text adds to it."""
    return re.sub("_(total|bucket|sum|count)$", "", name)


def names(registry: CollectorRegistry) -> Iterable[str]:
    """Families, also those that have no samples yet."""
    return [family.name for family in registry.collect()]
