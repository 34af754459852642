"""Stores on loopback as processes: `redis-server`, started the same way by all tests."""

from __future__ import annotations

import signal
import subprocess
from typing import Any, Self

import valkey

from lmkv.config.remote_url import parse_remote_url
from lmkv_client.demo.process import free_port as find_free_port
from lmkv_server.node.tiers.remote.store import RemoteStore
from lmkv_server.node.tiers.remote.valkey import ValkeyStore


def redis_command(port: int) -> list[str]:
    """The command of a `redis-server` at this port of loopback that keeps nothing on disk."""
    return ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]


class Server:
    """A process that listens on a port of loopback. Its owner ends it."""

    process: subprocess.Popen[str]
    port: int

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        """`kill -9`, frozen or not."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    def freeze(self) -> None:
        """It does not answer, but keeps its connections."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class RedisServer(Server):
    """`redis-server` that keeps nothing; restarted it is at the same port, and empty."""

    def __init__(self, *arguments: str) -> None:
        self.port = find_free_port()
        self._arguments = arguments

    def start(self) -> None:
        command = [*redis_command(self.port), *self._arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/")
        assert self.process.stdout
        for line in self.process.stdout:
            if "Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def store(self, url: str = "", *, timeout_seconds: float = 30.0, ttl_seconds: float = 0.0) -> RemoteStore:
        return ValkeyStore(parse_remote_url(url or self.url), timeout_seconds=timeout_seconds, ttl_seconds=ttl_seconds)

    def client(self) -> Any:
        return valkey.Valkey(port=self.port)

    def names(self) -> set[str]:
        with self.client() as client:
            return {name.decode() for name in client.scan_iter()}

    def read(self, name: str) -> bytes:
        with self.client() as client:
            return bytes(client.get(name))

    def replace(self, name: str, content: bytes) -> None:
        with self.client() as client:
            client.set(name, content)

    def empty(self) -> None:
        with self.client() as client:
            client.flushall()
