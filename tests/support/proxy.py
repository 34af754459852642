"""An `lmkv proxy` process on this host, in front of engines on this host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
        """Whether an engine is available."""
        return self.answers("/readyz")
