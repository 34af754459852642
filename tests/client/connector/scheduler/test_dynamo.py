"""Dynamo's indexer learns from vLLM's publisher what lmkv holds. Needs `pip install ai-dynamo-runtime` (75 MB)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import URLError

import pytest
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from lmkv_client.demo.process import free_port
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK
from tests.waiting import wait_until

pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed")

PROMPT = list(range(3, 203))
INDEXER = "import sys; from dynamo.llm import run_kv_indexer; run_kv_indexer(sys.argv[1:])"


class Indexer:
    """Dynamo's standalone indexer, which follows one worker."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: object = None) -> Any:
        """The answer; None while it does not listen."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except URLError:
            return None

    def cpu_tokens(self, prompt: list[int]) -> int:
        """Tokens of the prompt that the worker has in host memory."""
        answer = self.ask("/query", {"token_ids": prompt, "model_name": "default"})
        count: int = (answer or {}).get("instances", {}).get("1", {}).get("cpu", 0)
        return count


@contextmanager
def indexer(publisher_port: int) -> Iterator[Indexer]:
    """A running indexer."""
    port = free_port()
    arguments = ["--block-size", str(BLOCK), "--port", str(port), "--workers", f"1=tcp://127.0.0.1:{publisher_port}"]
    process = subprocess.Popen([sys.executable, "-c", INDEXER, *arguments], stdout=subprocess.DEVNULL)
    try:
        running = Indexer(port)
        wait_until(lambda: running.ask("/workers"), "the indexer listens")
        yield running
    finally:
        process.terminate()
        process.wait(60)


def test_dynamos_index_follows_stores_and_evictions(make_engine: Callable[..., SimulatedEngine]) -> None:
    engine = make_engine()
    port = free_port()
    publisher = ZmqEventPublisher(0, endpoint=f"tcp://*:{port}")
    published = 0

    def publish() -> None:
        """What vLLM's scheduler does after a step."""
        nonlocal published
        events = engine.events[published:] + engine.side.take_events()
        publisher.publish(KVEventBatch(ts=time.time(), events=events))
        published = len(engine.events)

    try:
        with indexer(port) as dynamo:
            engine.serve("probe", [7] * (CHUNK + 1))
            probe, published = list(engine.events), len(engine.events)

            def is_connected() -> bool:
                """PUB sockets drop what is sent before a subscriber has connected."""
                publisher.publish(KVEventBatch(ts=time.time(), events=probe))
                return dynamo.cpu_tokens([7] * CHUNK) == CHUNK

            wait_until(is_connected, "the indexer follows the publisher")
            engine.serve("a", PROMPT)
            publish()
            wait_until(lambda: dynamo.cpu_tokens(PROMPT) == 3 * CHUNK, "the index has the prompt")
            assert dynamo.cpu_tokens(PROMPT[1:]) == 0
            engine.node.evict()
            engine.serve("b", PROMPT[:20])
            publish()
            wait_until(lambda: dynamo.cpu_tokens(PROMPT) == 0, "the eviction reaches the index")
    finally:
        publisher.shutdown()
