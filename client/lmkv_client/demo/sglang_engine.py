"""An SGLang server with lmkv on this host, for the demo, and how the demo finds SGLang."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmkv.errors import ConfigError, LmkvError, Unreachable
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.process import CheckedServer, free_port

CONTROL_DEVICE = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded."""
PROBE_SECONDS = 60.0
REQUEST_SECONDS = 300.0
FLUSH_SECONDS = 30.0
PAGE_SIZE = 128
CONTEXT_TOKENS = 8192

_STORAGE = {
    "backend_name": "lmkv",
    "module_path": "lmkv_client.sglang",
    "class_name": "LmkvStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    # A busy machine makes the demo slow; a lookup that is not waited for would make it a miss.
    "LMKV_LOOKUP_TIMEOUT": "5",
    "LMKV_COORDINATOR_TIMEOUT": "2",
    "LMKV_NODE_START_TIMEOUT": "60",
}


class SglangEngine(CheckedServer):
    """An SGLang server that keeps its pages in lmkv. To start several, call `start` on each, then `wait_ready`."""

    kind = "SGLang"
    ready_timeout_seconds = 600.0

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        name: str = "sglang",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`python` is the interpreter of an environment with SGLang and lmkv. Logs to `NAME.log` in `folder`."""
        self.port = free_port()
        flags: dict[str, object] = {
            "--model-path": model,
            "--served-model-name": model.name,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--nccl-port": free_port(),
            "--dist-init-addr": f"127.0.0.1:{free_port()}",
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--page-size": PAGE_SIZE,
            "--context-length": CONTEXT_TOKENS,
            "--max-total-tokens": 2 * CONTEXT_TOKENS,
            "--chunked-prefill-size": CONTEXT_TOKENS,
            "--max-running-requests": 8,
            "--random-seed": 1,
            "--hicache-ratio": 2,
            "--hicache-io-backend": "direct",
            "--hicache-mem-layout": "page_first_direct",
            "--hicache-write-policy": "write_through",
            "--hicache-storage-backend": "dynamic",
            "--hicache-storage-prefetch-policy": "wait_complete",
            "--hicache-storage-backend-extra-config": json.dumps(_STORAGE),
        }
        own = dict(_ENVIRONMENT)
        if not CONTROL_DEVICE.exists():
            flags["--device"] = "cpu"
            own["SGLANG_USE_CPU_ENGINE"] = "1"
        words = [str(word) for pair in flags.items() for word in pair]
        switches = ["--skip-tokenizer-init", "--disable-overlap-schedule", "--enable-cache-report"]
        command = [
            *(python, "-W", "ignore", "-m", "sglang.launch_server", *words, *switches),
            "--enable-hierarchical-cache",
        ]
        super().__init__(name, command, folder / f"{name}.log", own | dict(environment or {}))

    def is_ready(self) -> bool:
        """Whether it serves requests."""
        try:
            return self._request("GET", "/health", timeout_seconds=5.0)[0] == 200
        except LmkvError:
            return False

    def complete(self, prompt: Sequence[int], max_tokens: int = 16) -> Completion:
        """Completes a prompt greedily with exactly `max_tokens` tokens.

        Raises `Unreachable` if the engine is gone or does not answer in time, `LmkvError` if it refuses the request.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {"input_ids": [int(token) for token in prompt], "sampling_params": sampling, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        begin = time.perf_counter()
        first_seconds, last = 0.0, b""
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise self._refused("/generate", response.status, response.read())
            for line in response:
                if line.startswith(b"data: {"):
                    first_seconds = first_seconds or time.perf_counter() - begin
                    last = line
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.name} did not respond: {error!r}", address=f"127.0.0.1:{self.port}") from error
        finally:
            connection.close()
        event = json.loads(last.removeprefix(b"data: ") or b"{}")
        if "output_ids" not in event:
            raise self._refused("/generate", 200, last)
        about = event["meta_info"]
        return Completion(
            token_ids=tuple(event["output_ids"]),  # of the whole completion so far
            text="",
            finish_reason=(about.get("finish_reason") or {}).get("type", ""),
            ttft_seconds=first_seconds,
            total_seconds=time.perf_counter() - begin,
            prompt_tokens=int(about["prompt_tokens"]),
            cached_tokens=int(about["cached_tokens"]),
        )

    def reset_prefix_cache(self) -> None:
        """Empties SGLang's own caches, on the device and on the host. Raises `LmkvError` if it refuses."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while (answer := self._request("POST", "/flush_cache"))[0] != 200:  # refused while requests run
            if time.monotonic() > deadline:
                raise self._refused("/flush_cache", *answer)
            time.sleep(0.1)

    def _request(self, method: str, path: str, timeout_seconds: float = 30.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_seconds)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.name} did not respond: {error!r}", address=f"127.0.0.1:{self.port}") from error
        finally:
            connection.close()

    def _refused(self, path: str, status: int, answer: bytes) -> LmkvError:
        shown = answer.decode(errors="replace").strip()
        return LmkvError(f"{self.name} rejected {path} with HTTP {status}: {shown}", status=status)


def check_sglang(python: str) -> None:
    """Raises `ConfigError`, with the fix, unless the interpreter finds SGLang and lmkv. Imports neither."""
    program = "import importlib.util as u; print(*(n for n in ('sglang', 'lmkv_client') if u.find_spec(n) is None))"
    try:
        found = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--sglang-python: {python} does not run: {error}") from None
    missing = found.stdout.split() if found.returncode == 0 else ["sglang", "lmkv_client"]
    if missing:
        names = " and ".join({"sglang": "SGLang", "lmkv_client": "lmkv"}[name] for name in missing)
        raise ConfigError(
            f"{names} cannot be imported by {python}; install SGLang 0.5.23 and lmkv in one environment "
            "(docs/guides/sglang.md) and name its interpreter: --sglang-python PATH"
        )
