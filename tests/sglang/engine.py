"""SGLang servers on this host, with and without lmkv."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkv.errors import LmkvError
from lmkv_client.demo.process import CheckedServer, free_port

SHIM = Path(__file__).parent / "shim"
PAGE_SIZE = 16
ANSWER_TOKENS = 12
ANSWER_TIMEOUT_SECONDS = 120.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    # A busy machine makes tests slow, not wrong.
    "LMKV_MAX_LOCAL_CPU_SIZE": "64MiB",
    "LMKV_NODE_LINGER": "600",
    "LMKV_NODE_START_TIMEOUT": "60",
    "LMKV_LOOKUP_TIMEOUT": "5",
    "LMKV_COORDINATOR_TIMEOUT": "2",
    "LMKV_LOAD_TIMEOUT": "10",
    "LMKV_REFUSE_SLOW_FETCHES": "false",
}
FLAGS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "torch_native",
    "--page-size": str(PAGE_SIZE),
    "--max-total-tokens": "8192",
    "--context-length": "2048",
    "--max-running-requests": "8",
    "--chunked-prefill-size": "1024",
    "--random-seed": "1",
}
STORAGE = {
    "backend_name": "lmkv",
    "module_path": "lmkv_client.sglang",
    "class_name": "LmkvStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "prefetch_threshold": PAGE_SIZE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangAnswer:
    """What an engine answers to one prompt."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    """Tokens of the prompt that SGLang did not compute."""


def storage_flags(layout: str = "page_first_direct", **changes: Any) -> dict[str, str]:
    """The flags by which an engine keeps its pages in lmkv."""
    return {
        "--enable-hierarchical-cache": "",
        "--hicache-ratio": "2",
        "--hicache-io-backend": "direct",
        "--hicache-mem-layout": layout,
        "--hicache-write-policy": "write_through",
        "--hicache-storage-backend": "dynamic",
        "--hicache-storage-prefetch-policy": "wait_complete",
        "--hicache-storage-backend-extra-config": json.dumps(STORAGE | changes),
    }


class SglangProcess(CheckedServer):
    """An SGLang server. Entering it starts it."""

    ready_timeout_seconds = 420.0

    def __init__(
        self,
        name: str,
        model: Path,
        logs: Path,
        *,
        flags: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        rank_count: int = 1,
    ) -> None:
        """`flags` and `environment` are besides the usual ones, or instead of them."""
        self.port = free_port()
        ports = {"--port": self.port, "--nccl-port": free_port(), "--dist-init-addr": f"127.0.0.1:{free_port()}"}
        own = {"--model-path": model, "--served-model-name": "tiny", "--host": "127.0.0.1", "--tp-size": rank_count}
        words = [word for pair in {**FLAGS, **own, **ports, **(flags or {})}.items() for word in map(str, pair) if word]
        switches = ["--skip-tokenizer-init", "--disable-overlap-schedule", "--enable-cache-report"]
        command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *words, *switches]
        path = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(rank_count))}
        everything = ENVIRONMENT | {"PYTHONPATH": path} | (cores if rank_count > 1 else {}) | dict(environment or {})
        super().__init__(name, command, logs / f"{name}.log", everything)

    def is_ready(self) -> bool:
        """Whether it serves requests."""
        try:
            return self._call("GET", "/health", timeout_seconds=5.0)[0] == 200
        except OSError:
            return False

    def answer(self, prompt: Sequence[int]) -> SglangAnswer:
        """The greedy completion of a prompt."""
        sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        status, body = self._call("POST", "/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        assert status == 200, body
        answer = json.loads(body)
        return SglangAnswer(
            token_ids=tuple(answer["output_ids"]), cached_tokens=int(answer["meta_info"]["cached_tokens"])
        )

    def first_token_seconds(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Time from a request to its first token, and the tokens of the prompt that SGLang did not compute."""
        body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_TIMEOUT_SECONDS)
        try:
            begin = time.perf_counter()
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    seconds = time.perf_counter() - begin
                    return seconds, int(json.loads(line.removeprefix(b"data: "))["meta_info"]["cached_tokens"])
        finally:
            connection.close()
        raise LmkvError(f"{self.name} sent no token")

    def flush(self) -> None:
        """Empties SGLang's own caches, on the device and on the host."""
        status, body = self._call("POST", "/flush_cache")
        assert status == 200, body

    def _call(
        self, method: str, path: str, body: object = None, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_seconds)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
