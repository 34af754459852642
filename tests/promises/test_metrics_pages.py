"""docs/reference/metrics.md lists every metric that a process exports, as the code defines it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.promises.conftest import Run
from tests.server.test_prometheus_rules import engine_metrics, measured, plain

PAGES = ("reference/metrics.md", "reference/telemetry.md", "reference/http.md", "guides/proxy.md", "guides/gateway.md")


def test_the_page_is_what_the_code_says_now(root: Path, run: Run, tmp_path: Path) -> None:
    run(sys.executable, "scripts/metrics-reference", tmp_path / "metrics.md")
    page = Path("docs", "reference", "metrics.md")
    made, committed = (tmp_path / page.name).read_text(), (root / page).read_text()
    assert made == committed, "run `make fix-metrics`: docs/reference/metrics.md is stale"


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
    page = (root / "docs" / "reference" / "metrics.md").read_text()
    assert len(engine_metrics()) > 20
    for name, words in engine_metrics().items():
        assert re.search(rf"^\| `lmkv:{name}(_total)?({{.*}})?` \| {re.escape(words)} \|$", page, re.MULTILINE), name
