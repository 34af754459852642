"""`lmkv proxy` on this host, in front of engines that run here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import Engine
from lmkv_client.demo.process import ServerProcess, free_port
from lmkv_client.demo.server import Server


class Proxy(Endpoint, Server):
    """One proxy process."""

    def __init__(
        self,
        folder: Path,
        prefills: Sequence[Engine],
        decodes: Sequence[Engine],
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` gets its log, `proxy.log`."""
        super().__init__("proxy", free_port(), (*prefills, *decodes)[0].model_name)
        command = [sys.executable, "-m", "lmkv", "proxy", "--port", str(self.port)]
        for side, engines in (("prefiller", prefills), ("decoder", decodes)):
            command += [f"--{side}-port", ",".join(str(engine.port) for engine in engines)]
        self.process = ServerProcess("proxy", [*command, *arguments], folder / "proxy.log", environment)

    def is_ready(self) -> bool:
        """Whether it knows an engine of each kind."""
        return self.answers("/readyz")
