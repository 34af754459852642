"""Every metric that a process exports has its line in our pages."""

from __future__ import annotations

import re
from pathlib import Path

from tests.server.test_prometheus_rules import engine_metrics, measured, plain

PAGES = ("reference/telemetry.md", "reference/http.md", "guides/proxy.md", "guides/gateway.md")


async def test_every_metric_is_documented_once(root: Path, runtime_dir: Path) -> None:
    pages = "".join((root / "docs" / page).read_text() for page in PAGES)
    rows = "".join(re.findall(r"^\| (`.+?) \|", pages, re.MULTILINE))
    documented = [plain(name) for name in re.findall(r"`((?:lmkv|rpc)[a-z_:]+)[`{]", rows)]
    recorded = re.compile(r"lmkv:\w+:\w+")
    known = {name for name in await measured(runtime_dir) if not recorded.fullmatch(name)}
    known = {name for name in known if not name.startswith("process_")}
    assert len(known) > 80
    assert known - set(documented) == set()
    assert {name for name in documented if documented.count(name) > 1} <= {
        "rpc_server_call_duration_seconds"
    }  # OTLP's name, too


def test_engine_counters_are_shown_under_their_names(root: Path) -> None:
    page = (root / "docs" / "reference" / "telemetry.md").read_text()
    for name, words in engine_metrics().items():
        assert f"| `lmkv:{name}_total` | {words} |\n" in page
