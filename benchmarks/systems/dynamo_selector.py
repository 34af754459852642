"""Dynamo's KV router as a placement of the simulated fleet: `python -m dynamo.select_service`, with its defaults.

It learns from KV events, as vLLM publishes them, what each engine holds, and counts the prompts and answers that it
has placed. Its timers run by the clock, the fleet by simulated time; none of them acts in a replay. Made for 1.6.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from benchmarks.replay.traces import Trace
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv_client.demo.process import CheckedServer, free_port

MODEL = "trace"
WAIT_SECONDS = 30.0
VERSION = "import dynamo.llm; from importlib.metadata import version; print(version('ai-dynamo-runtime'))"
TOKEN_BYTES = 4
MARK = b"\xff" * 12
"""How the keys of marks begin: blocks that no prompt has."""


def dynamo_problem(python: Path | None) -> str | None:
    """Why Dynamo's router cannot be measured; None if it can."""
    if python is None:
        return "Dynamo's router was not measured: --dynamo-python was not given"
    if not python.exists():
        return f"Dynamo's router was not measured: there is no {python.name} where --dynamo-python says"
    if not dynamo_version(python):
        return "Dynamo's router was not measured: the environment of --dynamo-python does not have it"
    return None


def dynamo_version(python: Path) -> str:
    """The version that this Python has, or nothing."""
    return subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=False).stdout.strip()


class _Service(CheckedServer):
    """The service's process."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.port = free_port()
        command = [str(python.absolute()), "-m", "dynamo.select_service", "--port", str(self.port)]
        super().__init__("dynamo", command, folder / "dynamo.log", environment={"DYN_LOG": "error"})

    def is_ready(self) -> bool:
        """Whether it answers."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


class DynamoSelector:
    """A running service with simulated engines as its workers. A context manager; for one replay of one trace."""

    def __init__(self, python: Path, folder: Path, trace: Trace, instance_ids: Sequence[str]) -> None:
        """Logs to `dynamo.log` in `folder`. An instance's id is a number."""
        self._service = _Service(python, folder)
        self._block_tokens = trace.chunk_tokens
        self._parents: dict[ChunkKey, ChunkKey] = {}
        for request in trace.requests:
            self._parents |= {key: parent for parent, key in pairwise(request.stored)}
        self._instance_ids = instance_ids
        self._numbers: dict[ChunkKey, int] = {}
        self._publishers: dict[str, _Publisher] = {}
        self._changed: set[str] = set()
        """Instances with events that the service may not have read."""
        self._mark_count = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self._service)
            self._connection = HTTPConnection("127.0.0.1", self._service.port, timeout=WAIT_SECONDS)
            self._stack.callback(self._connection.close)
            context = self._stack.enter_context(zmq.Context())
            for instance in self._instance_ids:
                publisher = self._stack.enter_context(_Publisher(context))
                self._publishers[instance] = publisher
                worker = {"worker_id": int(instance), "model_name": MODEL, "block_size": self._block_tokens}
                self._ask("POST", "/workers", worker | publisher.as_described)
            self._changed.update(self._instance_ids)
            self._await_events()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def choose(self, name: str, keys: Sequence[ChunkKey]) -> str:
        """The instance for a request, which is counted as its load from now on."""
        self._await_events()
        tokens = [token for key in keys for token in self._tokens(key)]
        request = {"model_name": MODEL, "selection_id": name, "token_ids": tokens}
        return str(self._ask("POST", "/select_and_reserve", request)["worker_id"])

    def computed(self, name: str) -> None:
        """A request's prompt is computed."""
        self._ask("POST", f"/reservations/{name}/prefill_complete")

    def answered(self, name: str) -> None:
        """A request is answered."""
        self._ask("DELETE", f"/reservations/{name}")

    def change(self, instance: str, new: Sequence[ChunkKey], evicted: Sequence[ChunkKey]) -> None:
        """Publishes a change of a cache."""
        events: list[dict[str, Any]] = [self._stored(key) for key in new]
        if evicted:
            events.append({"type": "BlockRemoved", "block_hashes": [self._hash(key) for key in evicted]})
        if events:
            self._publishers[instance].publish(events)
            self._changed.add(instance)

    def _stored(self, key: ChunkKey) -> dict[str, Any]:
        parent = self._parents.get(key)
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash(key)],
            "parent_block_hash": None if parent is None else self._hash(parent),
            "token_ids": self._tokens(key),
            "block_size": self._block_tokens,
            "lora_id": None,
        }

    def _await_events(self) -> None:
        """Returns once the service has applied all events: it knows a mark that each publisher sends after them."""
        if not self._changed:
            return
        mark = self._mark(self._mark_count + 1)
        asked = {"model_name": MODEL, "token_ids": self._tokens(mark)}
        waiting = set(self._changed)
        deadline = time.monotonic() + WAIT_SECONDS
        sent_at = 0.0
        while waiting:
            if time.monotonic() - sent_at > 1:  # again: a publisher drops what it sends before its subscriber is there
                sent_at = time.monotonic()
                for instance in waiting:
                    self._publishers[instance].publish([self._stored(mark)])
            scores = self._ask("POST", "/overlap_scores", asked)["workers"]
            waiting -= {str(score["worker_id"]) for score in scores if score["device_blocks"]}
            if time.monotonic() > deadline:
                raise LmkvError(f"Dynamo's router has not read the events of {len(waiting)} engines")
        for instance in self._changed:
            self._publishers[instance].publish([{"type": "BlockRemoved", "block_hashes": [self._hash(mark)]}])
        self._changed.clear()
        self._mark_count += 1

    @staticmethod
    def _mark(number: int) -> ChunkKey:
        return ChunkKey(MARK + number.to_bytes(4, "big"))

    def _hash(self, key: ChunkKey) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def _tokens(self, key: ChunkKey) -> list[int]:
        """A block's tokens, which differ from those of all others."""
        words = [int.from_bytes(key[at : at + TOKEN_BYTES], "big") for at in range(0, len(key), TOKEN_BYTES)]
        return words + [1] * (self._block_tokens - len(words))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer."""
        content = None if body is None else msgspec.json.encode(body)
        try:
            self._connection.request(method, path, content, {"content-type": "application/json"})
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, HTTPException) as error:
            raise LmkvError(f"Dynamo's router did not answer {path}: {error!r}") from None
        if answer.status >= 300:
            raise LmkvError(f"Dynamo's router refused {path}: {text.decode(errors='replace')}")
        return msgspec.json.decode(text)


class _Publisher:
    """An engine's KV events. A context manager."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.as_described = {"endpoint": f"http://127.0.0.1:{port}", "kv_events_endpoint": f"tcp://127.0.0.1:{port}"}
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Sends a batch, as vLLM does."""
        batch = msgspec.msgpack.encode([time.time(), events, 0])
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1
