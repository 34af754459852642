"""A prefill and a decode engine behind the proxy, all real, and what the tests ask of them and break."""

from __future__ import annotations

import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from lmkv.auth.credentials import NO_TOKEN
from lmkv.auth.handoff import HandoffKeys
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion, Endpoint
from lmkv_client.demo.process import free_port
from tests.engines.faults import eventually, kill, state, thaw
from tests.support.proxy import ProxyProcess

CHUNK_TOKENS = 256
CHUNK_BYTES = 1 << 20
"""Of the tiny model in float32."""
STEP_TOKENS = 512
"""Most tokens that an engine computes in one step, so that a long prompt takes several."""
OUTPUT_TOKENS = 16
ROOT = Path(__file__).parents[2]
"""Where engines find connectors of the tests."""
REQUEST_TIMEOUT_SECONDS = 60.0
HANDOFF_ATTEMPTS = 20
BUFFER_CHUNKS = 16

SETTINGS = {
    "LMKV_MAX_LOCAL_CPU_SIZE": "256MiB",
    "LMKV_NODE_LINGER": "600",
    "LMKV_NODE_START_TIMEOUT": "60",
    "LMKV_LOOKUP_TIMEOUT": "2",  # a busy machine makes tests slow, not wrong
    "LMKV_PD_BUFFER_SIZE": str(BUFFER_CHUNKS * CHUNK_BYTES),
    "LMKV_PD_TIMEOUT": "2",
    "LMKV_PD_ABANDON_TIMEOUT": "3",
    "LMKV_PD_LOAD_TIMEOUT": "4",
}


class Trio:
    """Engines `prefill` and `decode` with their nodes, and the proxy, all ready. A context manager that ends it all."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        logs: Path,
        *,
        seed: int,
        decode_connector: Mapping[str, str] = {},  # never changed
        secret: str = "",
        settings: Mapping[str, str] = {},  # never changed
        dtype: str = "float32",
    ) -> None:
        """`decode_connector` extends the decode engine's `kv_transfer_config`; `secret` is the fleet's.

        `settings` are environment variables of all engines, `dtype` that of their weights.
        """
        self.secret = secret
        own = {"LMKV_CLUSTER_SECRET": secret} if secret else {}
        self.cluster = Cluster(folder, model, logs=logs, settings={**SETTINGS, **own, **settings}, coordinator=False)
        self._ports = {"prefill": free_port(), "decode": free_port()}
        self.prefill, self.decode = (
            self.cluster.add_engine(
                name,
                settings={"LMKV_METRICS_PORT": str(self._ports[name]), "PYTHONPATH": str(ROOT)},
                transfer_config={"kv_connector": "LMKVConnector", "kv_role": role, **more},
                dtype=dtype,
                extra_arguments=("--max-num-batched-tokens", str(STEP_TOKENS), "--shutdown-timeout", "0"),
            )
            for name, role, more in (("prefill", "kv_producer", {}), ("decode", "kv_consumer", decode_connector))
        )
        self.proxy = ProxyProcess(
            logs,
            [self.prefill],
            [self.decode],
            arguments=("--health-interval", "200ms", "--health-timeout", "2"),
            environment=own,
        )
        self._random = random.Random(seed)
        self._requests = ThreadPoolExecutor(16)

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        try:
            self.cluster.start_engines()
            self.proxy.start()
            self.proxy.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        thaw(self.cluster.node_pids())
        self.proxy.stop()
        self.cluster.stop()
        self._requests.shutdown()
        assert not (pids := self.cluster.node_pids()), f"nodes {pids} are left"

    # --- Asking --------------------------------------------------------------------------------------------------

    def prompt(self, token_count: int) -> list[int]:
        """A prompt that no engine has seen."""
        return [self._random.randrange(2, 500) for _ in range(token_count)]

    def expected(self, prompt: list[int], max_tokens: int = OUTPUT_TOKENS) -> tuple[int, ...]:
        """What one engine says: under a salt of its own, so that nothing cached can be used."""
        salt = {"cache_salt": f"oracle {self._random.random()}"}
        completion = self.decode.complete(prompt, max_tokens, extra=salt)
        assert completion.cached_tokens == 0
        return completion.token_ids

    def expected_with_hit(self, prompt: list[int], hit_tokens: int) -> tuple[int, ...]:
        """What one engine says if it splits the prompt as a handoff of `hit_tokens` does.

        It computes the first token, as a prefill does, then continues behind a hit of this length in vLLM's own prefix
        cache, as a decode does behind the handoff.
        """
        first = self.expected(prompt, 1)
        salt = {"cache_salt": f"split oracle {self._random.random()}"}
        if hit_tokens:
            self.decode.complete(prompt[: hit_tokens + 1], 1, extra=salt)
        rest = self.decode.complete([*prompt, *first], OUTPUT_TOKENS - 1, extra=salt)
        assert rest.cached_tokens == hit_tokens
        return first + rest.token_ids

    def ask(self, prompt: list[int], max_tokens: int = OUTPUT_TOKENS, **options: Any) -> Future[Completion]:
        """Sends a prompt to the proxy, without waiting for the answer."""
        options = {"timeout_seconds": REQUEST_TIMEOUT_SECONDS} | options
        return self._requests.submit(self.proxy.complete, prompt, max_tokens, **options)

    def start_handoff(
        self, token_count: int, max_tokens: int = OUTPUT_TOKENS
    ) -> tuple[Future[Completion], tuple[int, ...]]:
        """Sends a new prompt to the proxy, and returns while the decode's node receives it, with the right answer.

        A fast handoff may end between two samples of the node's metrics: then another prompt is sent.
        """
        for _ in range(HANDOFF_ATTEMPTS):
            prompt = self.prompt(token_count)
            expected = self.expected(prompt, max_tokens)
            asked = self.ask(prompt, max_tokens)
            if self._is_receiving(asked):
                return asked, expected
            asked.result(REQUEST_TIMEOUT_SECONDS)
        raise AssertionError(f"none of {HANDOFF_ATTEMPTS} handoffs was seen while it was received")

    def _is_receiving(self, asked: Future[Completion]) -> bool:
        """Waits until the decode's node has some chunks of a handoff, and wants more; False if it ends first."""
        start: float | None = None
        while not asked.done():
            time.sleep(0.005)
            if not self.node_metric("decode", "handoffs_receiving"):
                start = None
                continue
            received = self.node_metric("decode", "handoff_received_bytes_total")
            start = received if start is None else start
            if received > start:
                return True
        return False

    def check(self, prompt: list[int]) -> Completion:
        """Asks, and asserts that the answer is that of one engine."""
        expected = self.expected(prompt)
        completion = self.proxy.complete(prompt, OUTPUT_TOKENS)
        assert completion.token_ids == expected
        return completion

    def vouched(self, handoff_id: str, **more: object) -> dict[str, object]:
        """Parameters of a handoff to the decode engine, as the proxy makes them."""
        proof = HandoffKeys(self.secret, NO_TOKEN).prove(handoff_id, "decode")
        return {
            "kv_transfer_params": {"lmkv": {"handoff_id": handoff_id, "decode_instance": "decode", **proof, **more}}
        }

    # --- Looking -------------------------------------------------------------------------------------------------

    def node_metric(self, engine: str, name: str) -> float:
        """A metric of the node beside an engine, summed over its labels; 0 while it does not answer."""
        address = f"http://127.0.0.1:{self._ports[engine]}/metrics"
        with suppress(OSError), urllib.request.urlopen(address, timeout=2) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return sum(sample.value for one in families for sample in one.samples if sample.name == f"lmkv_node_{name}")
        return 0.0

    @contextmanager
    def counting(self, endpoint: Endpoint) -> Iterator[Mapping[str, float]]:
        """Yields a mapping that is filled at the end: by how much each counter has grown in here."""
        before = endpoint.metrics()
        grown: dict[str, float] = {}
        yield grown
        grown.update({name: value - before.get(name, 0.0) for name, value in endpoint.metrics().items()})

    def check_nothing_is_left(self) -> None:
        """Waits until all requests, handoffs and reservations have ended."""
        for engine in (self.prefill, self.decode):
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
                eventually(lambda engine=engine, name=name: engine.metrics()[name] == 0, f"{engine.name}: {name} is 0")  # type: ignore[misc]
            for name in ("handoffs_sending", "handoffs_receiving", "handoff_buffer_bytes", "quarantined_bytes"):
                eventually(
                    lambda engine=engine, name=name: self.node_metric(engine.name, name) == 0,  # type: ignore[misc]
                    f"{engine.name}: {name} is 0",
                )

    def node_log(self, name: str) -> str:
        """What the node beside an engine has logged."""
        (log,) = (self.cluster.runtime_dir / name).glob("node.log")
        return log.read_text()

    def check_no_crash(self) -> None:
        """Asserts that no process has logged what it did not expect."""
        logs = [*self.cluster.logs.glob("*.log"), *self.cluster.runtime_dir.glob("*/node.log")]
        assert len(logs) >= 5
        for log in logs:
            text = log.read_text(errors="replace")
            bad = [line for line in text.splitlines() if "Traceback" in line or "unexpectedly" in line]
            assert not bad, f"{log}:\n{text[max(0, text.find(bad[0]) - 2000) :][:8000]}"

    # --- Breaking and healing ------------------------------------------------------------------------------------

    def kill_engine(self, name: str) -> None:
        """Kills an engine, whose node lives on, and waits until it is gone."""
        self.cluster.engines[name].kill()

    def kill_node(self, name: str) -> None:
        """Kills the node beside an engine, which starts another."""
        (pid,) = self.cluster.node_pids(name)
        kill(pid)

    @contextmanager
    def frozen_node(self, name: str) -> Iterator[None]:
        """Freezes the node beside an engine."""
        (pid,) = self.cluster.node_pids(name)
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: state(pid) == "T", f"the node of {name} is frozen")
        try:
            yield
        finally:
            thaw([pid])

    def heal(self) -> None:
        """Restarts killed processes, and waits until a handoff of a new prompt works and its answer is correct."""
        self.cluster.start_engines()
        if not self.proxy.alive:
            self.proxy.start()
        self.proxy.wait_ready()
        eventually(self._has_handoff, "handoffs work again", 60.0)
        self.check_nothing_is_left()

    def _has_handoff(self) -> bool:
        prompt = self.prompt(600)
        try:
            with self.counting(self.decode) as grown:
                self.proxy.complete(prompt, 2)
        except LmkvError:
            return False
        return grown["lmkv:loaded_tokens_total"] == 600
