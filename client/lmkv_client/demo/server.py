"""What every server has in common that the demo, the tests and the benchmarks run: started, waited for, ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from lmkv_client.demo.process import ServerProcess


class Server(ABC):
    """One server of this host: a context manager that starts it and waits until it is ready."""

    ready_timeout_seconds = 60.0
    """How long it may take until it is ready."""

    process: ServerProcess
    """What `__init__` describes, and nothing runs of before `start`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves now."""

    def start(self) -> None:
        """Starts it without waiting for it; also again after it ended."""
        self.process.start()

    def wait_ready(self) -> None:
        """Waits until it is ready. Raises `LmkvError` with the end of its log if it does not come up."""
        self.process.wait_until(self.is_ready, "ready", self.ready_timeout_seconds)

    def stop(self) -> None:
        """Ends it. Idempotent."""
        self.process.stop()

    def kill(self) -> None:
        """Kills it as a crash would, without notice. Idempotent."""
        self.process.kill()

    @property
    def pid(self) -> int:
        """Its process id; also that of the session that all its processes but a node belong to."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.alive

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
