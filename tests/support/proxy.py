"""An `lmkv proxy` process on this host, in front of engines on this host."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import CheckedServer, free_port


class ProxyProcess(Endpoint, CheckedServer):
    """An `lmkv proxy` process with a client."""

    def __init__(
        self,
        folder: Path,
        prefills: Sequence[EngineProcess],
        decodes: Sequence[EngineProcess],
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        Endpoint.__init__(self, "proxy", free_port(), (*prefills, *decodes)[0].model_name)
        command = [sys.executable, "-m", "lmkv", "proxy", "--port", str(self.port)]
        for side, engines in (("prefiller", prefills), ("decoder", decodes)):
            command += [f"--{side}-port", ",".join(str(engine.port) for engine in engines)]
        CheckedServer.__init__(self, "proxy", [*command, *arguments], folder / "proxy.log", environment)

    def is_ready(self) -> bool:
        """Whether all engines are healthy. The proxy itself is ready with one, and sends all requests there.

        One that knows its callers shows engines to operators only: there, to be ready itself is enough.
        """
        if not self.answers("/readyz"):
            return False
        try:
            engines = json.loads(self._request("GET", "/engines", timeout_seconds=2.0))["engines"]
        except LmkvError as error:
            return error.metadata.get("status") in ("401", "403")
        return all(engine["state"] == "healthy" for engine in engines)
