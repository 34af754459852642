"""A vLLM OpenAI server on this host, with a client: for the demo, the tests and the benchmarks."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.process import CheckedServer, free_port

LMKV_TRANSFER_CONFIG: Mapping[str, object] = {"kv_connector": "LMKVConnector", "kv_role": "kv_both"}
"""Value of `--kv-transfer-config` that enables lmkv."""

_ENVIRONMENT = {
    # One compute thread, and one process for scheduler and worker: on few cores, spinning threads slow each other.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # serves /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # the first request for logprobs would compile for seconds, also in eager mode
}


class EngineOptions(TypedDict, total=False):
    """The options of a vLLM server; `_DEFAULTS` has those that are left out."""

    port: int
    """0: a free port."""
    python: str
    """The interpreter."""
    transfer_config: Mapping[str, object] | None
    """None disables lmkv."""
    dtype: str
    block_size: int
    context_tokens: int
    kv_cache_bytes: int
    """Must hold `context_tokens` tokens; resident from the start."""
    extra_arguments: Sequence[str]
    environment: Mapping[str, str]
    """It takes precedence and may contain `LMKV_...`."""


_DEFAULTS = EngineOptions(
    port=0,
    python=sys.executable,
    transfer_config=LMKV_TRANSFER_CONFIG,
    dtype="float32",
    block_size=128,
    context_tokens=8192,
    kv_cache_bytes=128 << 20,
    extra_arguments=(),
    environment={},
)


class EngineProcess(Endpoint, CheckedServer):
    """A vLLM server. To start several concurrently, call `start` on each, then `wait_ready` on each."""

    kind = "vLLM"
    ready_timeout_seconds = 600.0

    def __init__(self, model: Path, folder: Path, *, name: str = "engine", **options: Unpack[EngineOptions]) -> None:
        """Logs to `NAME.log` in `folder`."""
        given: EngineOptions = {**_DEFAULTS, **options}
        assert given.keys() == _DEFAULTS.keys(), f"unknown options: {given.keys() - _DEFAULTS.keys()}"
        Endpoint.__init__(self, name, given["port"] or free_port(), model.name)
        self.model = model
        context_tokens = given["context_tokens"]
        arguments = [
            *("--model", str(model), "--served-model-name", model.name),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", given["dtype"], "--block-size", str(given["block_size"])),
            *("--max-model-len", str(context_tokens), "--max-num-batched-tokens", str(max(context_tokens, 2048))),
            *("--kv-cache-memory-bytes", str(given["kv_cache_bytes"]), "--max-num-seqs", "16"),
            *("--enforce-eager", "--enable-prompt-tokens-details", "--shutdown-timeout", "10"),
        ]
        if given["transfer_config"] is not None:
            arguments += ["--kv-transfer-config", json.dumps(dict(given["transfer_config"]))]
        # Not `vllm serve`: the command fails where vLLM was installed under another distribution name.
        command = [given["python"], "-m", "vllm.entrypoints.openai.api_server", *arguments, *given["extra_arguments"]]
        CheckedServer.__init__(self, name, command, folder / f"{name}.log", _ENVIRONMENT | dict(given["environment"]))
        self._scratch: Path | None = None

    def start(self) -> None:
        """Starts the server without waiting until it is ready, also again after it exited."""
        self._remove_scratch()
        self._scratch = Path(tempfile.mkdtemp(prefix="lmkv-engine-"))  # vLLM never removes its sockets
        self.environment["TMPDIR"] = str(self._scratch)
        super().start()

    def is_ready(self) -> bool:
        """Whether it serves requests."""
        return self.answers("/health")

    def kill(self) -> None:
        """Kills the processes of the server, but not its node, as `stop` does in the end. Idempotent."""
        super().kill()
        self._remove_scratch()

    def reset_prefix_cache(self, *, external: bool = False, timeout_seconds: float = 60.0) -> None:
        """Clears vLLM's prefix cache, and with `external` also lmkv's through the connector.

        vLLM rejects that while blocks are in use; retries until the timeout, then raises `LmkvError`.
        """
        deadline = time.monotonic() + timeout_seconds
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        while not json.loads(self._request("POST", path, timeout_seconds=timeout_seconds))["success"]:
            if time.monotonic() > deadline:
                raise LmkvError(f"{self.name}: its prefix cache was in use for {timeout_seconds:.0f} s")
            time.sleep(0.02)

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
