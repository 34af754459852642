"""The store of a shared layout map: a real `redis-server`, killed and frozen like all other processes."""

from __future__ import annotations

from pathlib import Path

from lmkv_client.demo.process import ServerProcess, free_port
from tests.chaos.clock import Clock
from tests.chaos.victim import Victim
from tests.support.redis_server import redis_command

READY_SECONDS = 120.0
_READY = "Ready to accept connections"


class Store(Victim):
    """It keeps nothing: whenever it starts it is empty, at the same port."""

    def __init__(self, name: str, folder: Path, clock: Clock) -> None:
        self.port = free_port()
        super().__init__(ServerProcess(name, redis_command(self.port), folder / f"{name}.log"), clock)

    def wait_ready(self) -> None:
        """Waits until it answers, after each start. Raises `LmkvError` if it does not."""
        self.process.wait_until(lambda: self.process.log().count(_READY) >= self.life, "ready", READY_SECONDS)
