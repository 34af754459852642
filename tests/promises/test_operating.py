"""docs/operate: each alert has its runbook; metrics, queries and commands on these pages exist."""

from __future__ import annotations

import asyncio
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import drains
from tests.promises.commands import command_lines, takes
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.server.test_prometheus_rules import measured, plain, promtool
from tests.support.specs import LLAMA

RUNBOOK = re.compile(r"^### (Lmkv\w+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ENDS = ("", "_total", "_bucket", "_sum", "_count")
PROCESS_WAIT_SECONDS = 150


@pytest.fixture
def operate(root: Path) -> Path:
    """The folder of the pages."""
    return root / "docs" / "operate"


@pytest.fixture
def page(operate: Path) -> str:
    return (operate / "runbooks.md").read_text()


@pytest.fixture
def pages(operate: Path) -> str:
    """The pages that name metrics."""
    return "".join((operate / name).read_text() for name in ("monitoring.md", "runbooks.md", "sizing.md"))


@pytest.fixture
def alerts(root: Path) -> dict[str, dict[str, Any]]:
    """Every alert by its name."""
    groups = yaml.safe_load((root / "docs" / "prometheus" / "rules.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert(page: str, alerts: dict[str, Any]) -> None:
    sections = [name for name, _ in RUNBOOK.findall(page)]
    assert sorted(sections) == sorted(alerts)
    _, _, after = page.partition("\n## Alerts\n")
    table = after.partition("###")[0]
    listed = {
        name: severity
        for row in re.findall(r"^\| (\[Lmkv.*) \| .* \| (\w+) \|$", table, re.MULTILINE)
        for name, severity in ((name, row[1]) for name in re.findall(r"\[(\w+)\]", row[0]))
    }
    assert listed == {name: alert["labels"]["severity"] for name, alert in alerts.items()}


def test_every_alert_points_at_its_runbook(alerts: dict[str, Any]) -> None:
    for name, alert in alerts.items():
        docs = "https://github.com/lmkv/lmkv/blob/main/docs"
        assert alert["annotations"]["runbook_url"] == f"{docs}/operate/runbooks.md#{name.lower()}"


def test_every_runbook_says_what_it_means_who_notices_and_what_to_do(page: str) -> None:
    rows = re.findall(r"^\| (\[Lmkv[^|]*) \| ([^|]+) \| \w+ \|$", page, re.MULTILINE)
    stated = {name for names, _users_notice in rows for name in re.findall(r"\[(\w+)\]", names)}
    assert "| alert | users notice | severity |" in page
    for name, text in RUNBOOK.findall(page):
        assert re.findall(r"\*\*(Means|Do)\*\*", text) == ["Means", "Do"], name
        assert name in stated, f"the table does not say who notices {name}"
        assert "```" in text, f"{name} has nothing to type"


def test_every_alert_is_over_when_the_page_says(page: str, alerts: dict[str, Any], tmp_path: Path) -> None:
    """At the first evaluation without a result: no alert is kept, and one with `for` ends as early as one without."""
    assert "An alert ends at the first evaluation in which its expression" in page
    assert [name for name, alert in alerts.items() if "keep_firing_for" in alert] == []
    events, gauge = alerts["LmkvOperationsFail"], alerts["LmkvNodeAlone"]
    assert "[15m]" in events["expr"], "past events count for the time in brackets"
    assert gauge["for"] == "1m"
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "ends", "rules": [events, gauge]}]}))
    failed = 'lmkv_coordinator_operations_ended_total{state="failed", kind="move", instance="c", job="c"}'
    series = {failed: "0 3x30", 'lmkv_node_coordinators_connected{instance="n"}': "0x9 1x30"}
    firing = [("LmkvOperationsFail", "15m", 1), ("LmkvOperationsFail", "17m", 0)]
    firing += [("LmkvNodeAlone", "9m", 1), ("LmkvNodeAlone", "10m", 0)]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                "eval_time": minute,
                "exp_samples": [{"labels": "{}", "value": count}],
            }
            for name, minute, count in firing
        ],
    }
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(content))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "test.yaml"))


async def test_every_metric_on_the_pages_is_measured(pages: str, runtime_dir: Path) -> None:
    known = await measured(runtime_dir)
    metric = re.compile(r"\blmkv(?:_(?:coordinator|node|proxy|certificate)_|:)[a-z0-9_]*[a-z0-9](?:[:][a-z0-9_]+)*")
    named = set(metric.findall(pages))
    assert len(named) > 15
    assert {plain(name) for name in named} - known == set()


async def test_every_pattern_that_is_searched_for_finds_a_metric(page: str, runtime_dir: Path) -> None:
    known = await measured(runtime_dir)
    patterns = re.findall(r"/metrics \| grep (?:-E )?'?([^'\s]+)", page)
    assert len(patterns) > 10
    for pattern in patterns:
        for part in re.split(r"\|(?![^(]*\))", pattern):
            found = [name for name in known if any(re.search(part, f"{name}{end}") for end in ENDS)]
            assert found or part == "Lookup", f"nothing is called {part}"


def test_prometheus_understands_what_is_to_be_watched(operate: Path, tmp_path: Path) -> None:
    _, _, after = (operate / "monitoring.md").read_text().partition("## What to watch")
    cells = re.findall(r"^\| \d \| [^|]+ \| (.+) \| [^|]+ \|$", after.partition("\n## ")[0], re.MULTILINE)
    asked = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(asked) >= 8
    file = tmp_path / "asked.yaml"
    rules = [{"record": f"asked:{number}", "expr": text} for number, text in enumerate(asked)]
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", str(file))


def test_every_command_on_the_pages_exists_and_takes_its_flags(operate: Path, pyproject: dict[str, Any]) -> None:
    points = pyproject["project"]["entry-points"]["lmkv.commands"]
    lines = [line for page in sorted(operate.glob("*.md")) for line in command_lines(page, "lmkv")]
    assert {"doctor", "instances", "ops", "drain", "pin", "clear"} <= {line[1] for line in lines}
    for _, name, *arguments in lines:
        assert name in points, f"a page names `lmkv {name}`"
        takes(EntryPoint(name, points[name], "lmkv.commands"), arguments)


async def test_the_command_that_drains_a_host_leaves_nothing_on_it_alone(
    operate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "CONFIRM_SECONDS", 0.0)  # scripted instances report nothing by themselves
    line = next(line for line in command_lines(operate / "upgrades.md", "lmkv") if line[1] == "drain")
    held = dict.fromkeys(keys_of([1, 2, 3]), 3)
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=30.0)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        fleet: dict[str, ScriptedInstance] = {}
        async with (
            ScriptedInstance(channel, fleet, "engine-1", LLAMA, held),
            ScriptedInstance(channel, fleet, "engine-2", LLAMA, {}) as destination,
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *line, "--coordinator", coordinator.address, stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await asyncio.wait_for(process.communicate(), PROCESS_WAIT_SECONDS)
            assert process.returncode == 0
            assert printed.decode().endswith("safe to stop: all chunks of engine-1 are held elsewhere\n")
            assert len(destination.chunks) == 1
