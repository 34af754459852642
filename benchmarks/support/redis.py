"""A Redis server for benchmarks of stores that nodes or coordinators share."""

from __future__ import annotations

from pathlib import Path

from lmkv_client.demo.process import CheckedServer, free_port


class RedisProcess(CheckedServer):
    """A `redis-server` that keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        """Logs to `redis.log` in `folder`."""
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        command = ["redis-server", "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
        super().__init__("redis", command, folder / "redis.log")

    def is_ready(self) -> bool:
        """Whether it accepts connections."""
        return "Ready to accept" in self.log()
