"""A Prometheus server on this host, which scrapes servers of this host every two seconds."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmkv_client.demo.process import CheckedServer, free_port

TIMEOUT_SECONDS = 60.0


class PrometheusProcess(CheckedServer):
    """Debian's `prometheus`, with its data in a folder."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        """Scrapes `host:port` addresses by job. Logs to `prometheus.log` in `folder`."""
        program = shutil.which("prometheus")
        assert program, "prometheus is missing: `make setup` installs it (Debian's package prometheus)"
        self.address = f"127.0.0.1:{free_port()}"
        self._target_count = sum(map(len, targets.values()))
        jobs = [{"job_name": job, "static_configs": [{"targets": list(of)}]} for job, of in targets.items()]
        file = folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump({"global": {"scrape_interval": "2s"}, "scrape_configs": jobs}))
        command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'prometheus'}"]
        super().__init__("prometheus", [*command, f"--web.listen-address={self.address}"], folder / "prometheus.log")

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            self._get("/-/ready")
        except OSError:
            return False
        return True

    def are_scraped(self) -> bool:
        """Whether every target was scraped without an error."""
        up = [target for target in self._api("targets")["activeTargets"] if target["health"] == "up"]
        return len(up) == self._target_count

    def values(self, label: str, series: str) -> list[str]:
        values: list[str] = self._api(f"label/{label}/values", **{"match[]": series})
        return values

    def has(self, expression: str) -> bool:
        """Whether an expression has series now."""
        return bool(self._api("query", query=expression)["result"])

    def query_range(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series that an expression has in a period, each with `metric`, its labels, and `values`, one a second."""
        found: list[dict[str, Any]] = self._api("query_range", query=expression, start=start, end=end, step=1)["result"]
        return found

    def _api(self, path: str, **parameters: object) -> Any:
        return json.loads(self._get(f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))["data"]

    def _get(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=TIMEOUT_SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            error.add_note(error.read().decode())
            raise
