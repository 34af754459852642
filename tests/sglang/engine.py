"""SGLang servers on this host, with and without lmkv."""

from __future__ import annotations

import http.client
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkv.errors import LmkvError
from lmkv_client.demo.process import POLL_SECONDS, CheckedServer, free_port

SHIM = Path(__file__).parent / "shim"
PAGE_SIZE = 16
ANSWER_TOKENS = 12
ANSWER_TIMEOUT_SECONDS = 120.0
FLUSH_SECONDS = 60.0

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


def install_shims() -> None:
    """Has this process import SGLang with its shims, as the servers do."""
    os.environ |= {name: ENVIRONMENT[name] for name in ("HF_HUB_OFFLINE", "SGLANG_USE_CPU_ENGINE")}
    sys.path.insert(0, str(SHIM))
    runpy.run_path(str(SHIM / "sitecustomize.py"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangAnswer:
    """What an engine answers to one prompt."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    """Tokens of the prompt that SGLang did not compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedAnswer(SglangAnswer):
    seconds: float
    """From the request to the first token."""


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


def linker_flags(**settings: Any) -> dict[str, str]:
    """The flags by which an engine loads its pages from lmkv without HiCache, with these settings of lmkv."""
    linker = {"linker": "LmkvLinker", "linker_module_path": "lmkv_client.sglang", "linker_extra_config": settings}
    return {
        "--enable-unified-cache-external-linker": "",
        "--unified-cache-external-linker-backend": "dynamic",
        "--unified-cache-external-linker-config": json.dumps(linker),
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

    def answer(
        self, prompt: Sequence[int], *, cache_salt: str | None = None, adapter: str | None = None
    ) -> SglangAnswer:
        """The greedy completion of a prompt, by the LoRA adapter of this name."""
        sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        request = {"input_ids": list(prompt), "sampling_params": sampling, "cache_salt": cache_salt}
        request |= {"lora_path": adapter} if adapter else {}
        status, body = self._call("POST", "/generate", request)
        assert status == 200, body
        answer = json.loads(body)
        return SglangAnswer(
            token_ids=tuple(answer["output_ids"]), cached_tokens=int(answer["meta_info"]["cached_tokens"])
        )

    def stream(self, prompt: Sequence[int], token_count: int) -> StreamedAnswer:
        """The greedy completion of a prompt, of this number of tokens, and the time to its first token.

        Raises `LmkvError` if the server sends another number of tokens.
        """
        sampling = {"temperature": 0, "max_new_tokens": token_count, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_TIMEOUT_SECONDS)
        seconds = 0.0
        event: dict[str, Any] = {}
        try:
            begin = time.perf_counter()
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    seconds = seconds or time.perf_counter() - begin
                    event = json.loads(line.removeprefix(b"data: "))
        finally:
            connection.close()
        if len(ids := event.get("output_ids", ())) != token_count:  # each event has all tokens so far
            raise LmkvError(f"{self.name} sent {len(ids)} tokens, not {token_count}: {event}")
        return StreamedAnswer(
            token_ids=tuple(ids), cached_tokens=int(event["meta_info"]["cached_tokens"]), seconds=seconds
        )

    def update_weights(self, model: Path) -> None:
        """Loads the weights of another model of the same shape, and empties SGLang's own caches."""
        status, body = self._call("POST", "/update_weights_from_disk", {"model_path": str(model)})
        assert status == 200, body
        assert json.loads(body)["success"], body

    def flush(self) -> None:
        """Empties SGLang's own caches, on the device and on the host. SGLang refuses while it is busy: waits for it.

        Raises `LmkvError` after a deadline.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while (answer := self._call("POST", "/flush_cache"))[0] != 200:
            if time.monotonic() > deadline:
                raise LmkvError(f"{self.name} does not empty its caches: {answer[1]!r}")
            time.sleep(POLL_SECONDS)

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
