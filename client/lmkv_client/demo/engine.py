"""A real vLLM OpenAI server on this host, with what the demo and the tests ask of it."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.process import ServerProcess, free_port
from lmkv_client.demo.server import Server

LMKV_TRANSFER_CONFIG: Mapping[str, object] = {"kv_connector": "LMKVConnector", "kv_role": "kv_both"}
"""What `--kv-transfer-config` takes to put lmkv into an engine."""

_ENVIRONMENT = {
    # One compute thread and one process for scheduler and worker: on few cores everything else spins against itself.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # serves /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # the first request for logprobs would compile for seconds, also in eager mode
}


class Engine(Endpoint, Server):
    """One vLLM server. Several may start at once: call `start` on each, then `wait_ready`."""

    ready_timeout_seconds = 180.0

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        name: str = "engine",
        port: int = 0,
        transfer_config: Mapping[str, object] | None = LMKV_TRANSFER_CONFIG,
        dtype: str = "float32",
        block_size: int = 128,
        context_tokens: int = 8192,
        kv_cache_bytes: int = 128 << 20,
        extra_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describes an engine; `transfer_config=None` leaves lmkv out.

        `folder` gets its log, `NAME.log`. `port` 0 takes a free one. `kv_cache_bytes` must hold `context_tokens` tokens
        and is resident from the start. `environment` is added last, `LMKV_...` among it.
        """
        super().__init__(name, port or free_port(), model.name)
        self.model = model
        arguments = [
            *("--model", str(model), "--served-model-name", model.name),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", dtype, "--block-size", str(block_size)),
            *("--max-model-len", str(context_tokens), "--max-num-batched-tokens", str(max(context_tokens, 2048))),
            *("--kv-cache-memory-bytes", str(kv_cache_bytes), "--max-num-seqs", "16"),
            *("--enforce-eager", "--enable-prompt-tokens-details", "--shutdown-timeout", "10"),
        ]
        if transfer_config is not None:
            arguments += ["--kv-transfer-config", json.dumps(dict(transfer_config))]
        # Not `vllm serve`: the command fails where vLLM was installed under another distribution name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *extra_arguments]
        self.process = ServerProcess(name, command, folder / f"{name}.log", _ENVIRONMENT | dict(environment or {}))
        self._scratch: Path | None = None

    def start(self) -> None:
        """Starts the server without waiting for it; also again after it ended."""
        self._remove_scratch()
        self._scratch = Path(tempfile.mkdtemp(prefix="lmkv-engine-"))  # vLLM never removes its sockets
        self.process.environment["TMPDIR"] = str(self._scratch)
        super().start()

    def is_ready(self) -> bool:
        """Whether it serves requests."""
        return self.answers("/health")

    def stop(self) -> None:
        """Ends the server and everything it started but its node. Idempotent."""
        super().stop()
        self._remove_scratch()

    def kill(self) -> None:
        """Kills the server's processes as a crash would, without notice; its node lives on. Idempotent."""
        super().kill()
        self._remove_scratch()

    def reset_prefix_cache(self, *, external: bool = False, timeout_seconds: float = 10.0) -> None:
        """Empties vLLM's own prefix cache, and lmkv's through the connector if `external`.

        vLLM refuses while blocks are in use; this asks again until it agrees. Raises `LmkvError` if it never does.
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
