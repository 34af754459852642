"""Grafana's dashboards: Prometheus understands every panel, and every queried metric exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART
from tests.server.test_prometheus_rules import measured, plain

DASHBOARD = CHART / "files" / "dashboard.json"


PAYS = CHART / "files" / "dashboard-pays.json"


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    """Panels of both dashboards with something to show."""
    everything = [panel for file in (DASHBOARD, PAYS) for panel in json.loads(file.read_text())["panels"]]
    return [panel for panel in everything if panel["type"] != "row"]


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    """What all panels ask Prometheus."""
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_prometheus_understands_every_question(panels: list[dict[str, Any]], tmp_path: Path) -> None:
    asked = [text.replace("$__rate_interval", "5m") for text in expressions(panels)]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(asked)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: `make setup` installs it (Debian's package prometheus)"
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(asked)} rules found" in done.stdout


def test_every_panel_has_a_description_whose_alerts_exist(panels: list[dict[str, Any]]) -> None:
    groups = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    named = [name for panel in panels for name in re.findall(r"\bLmkv\w+", panel["description"])]
    assert len(named) > 15
    assert set(named) - alerts == set()


def test_rows_cover_tiers_disaggregated_prefill_and_coordinators() -> None:
    everything = json.loads(DASHBOARD.read_text())["panels"]
    rows = [panel["title"] for panel in everything if panel["type"] == "row"]
    assert {"Engines", "Nodes", "Tiers", "Disaggregated prefill", "Coordinators", "Proxy"} <= set(rows)


def test_the_second_one_shows_what_is_saved_before_what_it_costs() -> None:
    rows = [panel["title"] for panel in json.loads(PAYS.read_text())["panels"] if panel["type"] == "row"]
    assert rows == ["Does it pay?", "What it brings", "What it costs"]


@pytest.mark.parametrize("file", [DASHBOARD, PAYS], ids=lambda file: file.stem)
def test_panels_have_names_and_places_of_their_own(file: Path) -> None:
    everything = json.loads(file.read_text())["panels"]
    assert len({panel["title"] for panel in everything}) == len(everything) > 10
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [
        (x, y)
        for panel in everything
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))


async def test_every_metric_that_a_panel_shows_is_measured(panels: list[dict[str, Any]], runtime_dir: Path) -> None:
    shown = {name for text in expressions(panels) for name in re.findall(r"\blmkv[_:][a-z0-9_]+", text)}
    assert len(shown) > 20
    assert {plain(name) for name in shown} - await measured(runtime_dir) == set()
