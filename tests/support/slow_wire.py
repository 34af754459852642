"""A TCP connection to a local port with slow answers, as over a long way or a slow link, or from a busy server."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Self


class SlowWire:
    """Passes on what clients send at once, and what the server sends after `seconds`. A context manager.

    It has threads of its own: the delay does not depend on what else the process of the tests does.
    """

    def __init__(self, port: int, seconds: float = 0.0) -> None:
        self.seconds = seconds
        """May be changed at any time; what is on its way arrives as it would have."""
        self.bytes_per_second = float("inf")
        """Of all answers together. May be changed at any time."""
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # no more connections
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.add(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:  # it does not run
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._sockets.add(server)
                late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                self._start(self._pass_on, client, server)
                self._start(self._receive, server, late)
                self._start(self._deliver, late, client)

    @staticmethod
    def _pass_on(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _receive(self, server: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = server.recv(1 << 16)
            except OSError:
                data = b""
            late.put((time.monotonic() + self.seconds, data))

    def _deliver(self, late: queue.SimpleQueue[tuple[float, bytes]], client: socket.socket) -> None:
        with suppress(OSError):
            while True:
                due, data = late.get()
                self._is_over.wait(max(0.0, self._take_turn(due, len(data)) - time.monotonic()))
                if not data:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)

    def _take_turn(self, due: float, size_bytes: int) -> float:
        """When an answer has passed behind those before it."""
        with self._lock:
            self._free_at = max(self._free_at, due) + size_bytes / self.bytes_per_second
            return self._free_at
