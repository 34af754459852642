"""Grafana's dashboards, and the queries of a page, over a real Prometheus and fleet: every query has series."""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.process import free_port
from lmkv_client.sync import Coordinator
from tests.engines.faults import eventually
from tests.engines.llm import make_prompt
from tests.engines.pd import OUTPUT_TOKENS, SETTINGS
from tests.helm.chart import CHART
from tests.promises.conftest import ROOT
from tests.support.prometheus import PrometheusProcess
from tests.support.proxy import ProxyProcess

DASHBOARD: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
PAYS: dict[str, Any] = json.loads((CHART / "files" / "dashboard-pays.json").read_text())
TARGETS: dict[str, dict[str, Any]] = {
    f"{board['title']}: {panel['title']} {target['refId']}": target
    for board in (DASHBOARD, PAYS)
    for panel in board["panels"]
    for target in panel.get("targets", ())
}
PAGE = (ROOT / "docs/operate/monitoring.md").read_text().partition("## PromQL you will want")[2].partition("\n## ")[0]
QUERIES = re.findall(r"^\| .* \| `(.*)` \|$", PAGE, re.MULTILINE)
TARGETS |= {query: {"expr": query, "legendFormat": ""} for query in QUERIES}
VARIABLES = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
PROMPT_TOKENS = 1100
"""Four chunks and a part of one."""
RATE_INTERVAL = "1m"
"""What Grafana makes of `$__rate_interval`: four scrapes and more, however busy the host is."""
LAST = ("lmkv_proxy_requests_total", "lmkv:loaded_tokens_total", "lmkv_coordinator_operations_ended_total")
"""Counters that appear or grow late in the run: two scrapes later all queries have what they need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What Prometheus has recorded of a run."""

    prometheus: PrometheusProcess
    start: float
    end: float

    def series(self, target: dict[str, Any], **chosen: str) -> list[dict[str, Any]]:
        """Series of a query that have a number at any time of the run; `chosen` are values of variables."""
        expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
        for name in VARIABLES:
            expression = expression.replace(f"${name}", chosen.get(name, ".*"))
        assert "$" not in expression
        found = self.prometheus.query_range(expression, self.start, self.end + 1)  # its last step is not after the end
        return [one for one in found if any(math.isfinite(float(value)) for _, value in one["values"])]


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A prefill and a decode engine with their nodes and disks, a proxy and a coordinator; prompts, hits and a copy."""
    logs = tmp_path_factory.mktemp("dashboard-logs")
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as name,
        Cluster(Path(name), tiny_model, logs=logs, settings=SETTINGS | {"LMKV_MAX_LOCAL_DISK_SIZE": "64MiB"}) as fleet,
    ):
        assert fleet.coordinator
        ports = {engine: free_port() for engine in ("prefill", "decode")}
        prefill, decode = (
            fleet.add_engine(
                engine,
                settings={"LMKV_METRICS_PORT": str(port), "LMKV_LOCAL_DISK": str(Path(name) / f"disk-{engine}")},
                transfer_config={"kv_connector": "LMKVConnector", "kv_role": role},
                extra_arguments=("--shutdown-timeout", "0"),
            )
            for (engine, port), role in zip(ports.items(), ("kv_producer", "kv_consumer"), strict=True)
        )
        targets = {
            "coordinators": [fleet.coordinator.http_address],
            "nodes": [f"127.0.0.1:{port}" for port in ports.values()],
            "engines": [f"127.0.0.1:{engine.port}" for engine in (prefill, decode)],
        }
        proxy = ProxyProcess(logs, [prefill], [decode])
        targets["proxies"] = [f"127.0.0.1:{proxy.port}"]
        fleet.start_engines()
        with proxy, PrometheusProcess(logs, targets) as prometheus:
            prometheus.wait_until(prometheus.are_scraped, "done with its first scrapes", 60.0)
            start = time.time()
            prompts = [make_prompt(seed, PROMPT_TOKENS) for seed in range(3)]
            for prompt in prompts:
                proxy.complete(prompt, OUTPUT_TOKENS)
            decode.reset_prefix_cache()
            for prompt in prompts:
                assert decode.complete(prompt, OUTPUT_TOKENS).cached_tokens > 0
            fleet.coordinator.wait_for_holder(prompts[0], "prefill", 1024, 60.0)
            with Coordinator(fleet.coordinator.address) as coordinator:
                coordinator.copy(source="prefill", destination="decode", tokens=prompts[0]).wait()
            for last in LAST:
                rate = f"rate({last}[{RATE_INTERVAL}])"
                eventually(lambda rate=rate: prometheus.has(rate), f"{rate} has series")  # type: ignore[misc]
            yield Recorded(prometheus=prometheus, start=start, end=time.time())


@pytest.mark.parametrize("name", TARGETS)
def test_every_query_of_a_panel_has_series(recorded: Recorded, name: str) -> None:
    target = TARGETS[name]
    found = recorded.series(target)
    assert found, f"no series: {target['expr']}"
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    for one in found:
        assert shown <= one["metric"].keys(), f"the legend of {target['expr']} names labels that {one['metric']} lacks"


def test_variables_have_the_values_of_the_fleet(recorded: Recorded) -> None:
    values = {}
    for name in ("model", "instance"):
        match = LABEL_VALUES.fullmatch(VARIABLES[name]["query"]["query"])
        assert match
        values[name] = recorded.prometheus.values(match[2], match[1])
    assert len(values["model"]) == 1
    assert len(values["instance"]) == 4, "two nodes and two engines"


def test_variables_select_what_panels_show(recorded: Recorded) -> None:
    chosen = [target for target in TARGETS.values() if "$instance" in target["expr"]]
    assert len(chosen) > 20
    of_models = [target for target in chosen if "$model" in target["expr"]]
    assert of_models
    assert not any(recorded.series(target, instance="no-such") for target in chosen)
    assert not any(recorded.series(target, model="no-such") for target in of_models)
