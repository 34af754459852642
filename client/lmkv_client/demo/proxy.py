"""`lmkv proxy` on this host, in front of engines that run here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import Engine
from lmkv_client.demo.process import ServerProcess, free_port


class Proxy(Endpoint):
    """One proxy process: a context manager that starts it and waits until it is ready."""

    def __init__(
        self, folder: Path, prefills: Sequence[Engine], decodes: Sequence[Engine], *, arguments: Sequence[str] = ()
    ) -> None:
        """`folder` gets its log, `proxy.log`."""
        super().__init__("proxy", free_port(), (*prefills, *decodes)[0].model_name)
        command = [sys.executable, "-m", "lmkv", "proxy", "--port", str(self.port)]
        for side, engines in (("prefiller", prefills), ("decoder", decodes)):
            command += [f"--{side}-port", ",".join(str(engine.port) for engine in engines)]
        self.process = ServerProcess("proxy", [*command, *arguments], folder / "proxy.log")

    def start(self) -> None:
        """Starts it without waiting; also again after it ended."""
        self.process.start()

    def wait_ready(self, timeout_seconds: float = 60.0) -> None:
        """Waits until it knows an engine of each kind. Raises `LmkvError` if it does not come up."""
        self.process.wait_until(lambda: self.answers("/readyz"), "ready", timeout_seconds)

    def stop(self) -> None:
        """Ends it. Idempotent."""
        self.process.stop()

    def kill(self) -> None:
        """Kills it as a crash would. Idempotent."""
        self.process.kill()

    def log(self) -> str:
        """Everything it has logged."""
        return self.process.log()

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
