"""A real vLLM OpenAI server on this host, with what the demo and the tests ask of it."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lmkv.errors import LmkvError, Unreachable
from lmkv_client.demo.completion import Completion, Token, make_completion, read_token
from lmkv_client.demo.process import ServerProcess, free_port

LMKV_TRANSFER_CONFIG: Mapping[str, object] = {"kv_connector": "LMKVConnector", "kv_role": "kv_both"}
"""What `--kv-transfer-config` takes to put lmkv into an engine."""

READY_TIMEOUT_SECONDS = 180.0
REQUEST_TIMEOUT_SECONDS = 300.0

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


class Engine:
    """One vLLM server: a context manager that starts it and waits until it answers.

    Several may start at once: call `start` on each, then `wait_ready`. Methods are synchronous and safe to call from
    several threads, each request on a connection of its own.
    """

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
        self.name = name
        self.port = port or free_port()
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
        self.process.start()

    def wait_ready(self, timeout_seconds: float = READY_TIMEOUT_SECONDS) -> None:
        """Waits until it serves requests. Raises `LmkvError` with the end of its log if it does not come up."""
        self.process.wait_until(self._healthy, "ready", timeout_seconds)

    def stop(self) -> None:
        """Ends the server and everything it started but its node. Idempotent."""
        self.process.stop()
        self._remove_scratch()

    def kill(self) -> None:
        """Kills the server's processes as a crash would, without notice; its node lives on. Idempotent."""
        self.process.kill()
        self._remove_scratch()

    @property
    def pid(self) -> int:
        """Process id of the server; the id of the session that all its processes but the node belong to."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self.process.alive

    def log(self) -> str:
        """Everything it has logged."""
        return self.process.log()

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def complete(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 16,
        *,
        stream: bool = True,
        logprobs: bool = False,
        extra: Mapping[str, object] | None = None,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Completion:
        """Completes a prompt greedily, `max_tokens` tokens whatever they are.

        `extra` goes into the request's body (`cache_salt`, `kv_transfer_params`, ...). Without `stream` the time to
        the first token is the total time. Raises `Unreachable` if the engine is gone or does not answer in time,
        `LmkvError` if it refuses the request.
        """
        body = self._body(prompt, max_tokens, logprobs, extra)
        return self._complete_stream(body, timeout_seconds) if stream else self._complete_whole(body, timeout_seconds)

    def stream(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 16,
        *,
        extra: Mapping[str, object] | None = None,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Iterator[Token]:
        """Yields the completion as it comes. Closing the iterator closes the connection: the engine aborts the request.

        The request is sent when the first token is asked for. Raises as `complete` does.
        """
        for event, seconds in self._events(self._body(prompt, max_tokens, False, extra), timeout_seconds):
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    yield read_token(choice, seconds)

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

    def metrics(self, **labels: str) -> dict[str, float]:
        """Current values at /metrics by sample name, summed over all samples that carry these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self._request("GET", "/metrics", timeout_seconds=10.0).decode()):
            for sample in family.samples:
                if labels.items() <= sample.labels.items():
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _healthy(self) -> bool:
        try:
            self._request("GET", "/health", timeout_seconds=2.0)
        except LmkvError:
            return False
        return True

    def _body(
        self, prompt: Sequence[int] | str, max_tokens: int, logprobs: bool, extra: Mapping[str, object] | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model.name,
            "prompt": prompt if isinstance(prompt, str) else [int(token) for token in prompt],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if logprobs:
            body["logprobs"] = 0  # only those of the chosen tokens
        return body | dict(extra or {})

    def _complete_whole(self, body: dict[str, Any], timeout_seconds: float) -> Completion:
        begin = time.perf_counter()
        answer = json.loads(self._request("POST", "/v1/completions", body, timeout_seconds))
        seconds = time.perf_counter() - begin
        choice = answer["choices"][0]
        return make_completion([read_token(choice, seconds)], choice, answer["usage"], seconds)

    def _complete_stream(self, body: dict[str, Any], timeout_seconds: float) -> Completion:
        begin = time.perf_counter()
        tokens: list[Token] = []
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        for event, seconds in self._events(body, timeout_seconds):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                last = choice
                if choice.get("token_ids"):
                    tokens.append(read_token(choice, seconds))
        return make_completion(tokens, last, usage, time.perf_counter() - begin)

    def _events(self, body: dict[str, Any], timeout_seconds: float) -> Iterator[tuple[dict[str, Any], float]]:
        """Events of a streamed completion, with seconds since the request was sent."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_seconds)
        begin = time.perf_counter()
        finished = False
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise self._refused("/v1/completions", response.status, response.read())
            for line in response:
                seconds = time.perf_counter() - begin
                if line.startswith(b"data: [DONE]"):
                    finished = True
                elif line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise self._refused("/v1/completions", 200, line)
                    yield event, seconds
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.name} did not answer: {error!r}", address=f"127.0.0.1:{self.port}") from error
        finally:
            connection.close()
        if not finished:
            raise Unreachable(f"{self.name} broke off its answer", address=f"127.0.0.1:{self.port}")

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None, timeout_seconds: float = 30.0
    ) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_seconds)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.name} did not answer: {error!r}", address=f"127.0.0.1:{self.port}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise self._refused(path, response.status, answer)
        return answer

    def _refused(self, path: str, status: int, answer: bytes) -> LmkvError:
        return LmkvError(
            f"{self.name} refused {path} with HTTP {status}: {answer.decode(errors='replace').strip()}", status=status
        )
