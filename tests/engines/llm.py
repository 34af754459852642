"""vLLM engines in processes of their own, with what the tests ask of them; and fleets of such engines."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from lmkv_client.demo.cluster import Coordinator
from lmkv_client.demo.engine import LMKV_TRANSFER_CONFIG
from lmkv_client.demo.process import ServerProcess, end_processes, pids_with_environment

READY_TIMEOUT_SECONDS = 180.0
ANSWER_TIMEOUT_SECONDS = 120.0

CALM = {
    "LMKV_MAX_LOCAL_CPU_SIZE": "256MiB",
    "LMKV_NODE_LINGER": "30",
    # A busy machine makes tests slow, not wrong.
    "LMKV_NODE_START_TIMEOUT": "60",
    "LMKV_LOOKUP_TIMEOUT": "5",
    "LMKV_COORDINATOR_TIMEOUT": "2",
    "LMKV_LOAD_TIMEOUT": "10",
    "LMKV_FETCH_TIMEOUT": "10",
}
"""Settings of lmkv in every engine of the tests."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in the process of the LLM
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # log probabilities would be compiled for seconds
}


def make_prompt(seed: int, token_count: int, *, prefix: Sequence[int] = ()) -> list[int]:
    """Token ids of `prefix`, then random ones, the same for every seed: `token_count` in all."""
    choose = random.Random(seed)
    return [*prefix, *(choose.randrange(2, 500) for _ in range(token_count - len(prefix)))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an engine says to one prompt."""

    samples: tuple[tuple[int, ...], ...]
    finish_reason: str
    cached_tokens: int
    """Tokens of the prompt that vLLM did not compute."""
    prompt_logprobs: tuple[float | None, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first, and mostly the only, completion."""
        return self.samples[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What an engine says to prompts that it got at the same time, and what lmkv had to do with it."""

    answers: tuple[Answer, ...]
    grown: Mapping[str, float]
    """How much each counter at /metrics has grown."""

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The completions, in the order of the prompts."""
        return [answer.token_ids for answer in self.answers]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that vLLM did not compute."""
        return sum(answer.cached_tokens for answer in self.answers)

    @property
    def loaded_tokens(self) -> int:
        """Those among them whose KV lmkv has loaded."""
        return int(self.grown["lmkv:loaded_tokens_total"])

    @property
    def peer_tokens(self) -> int:
        """Those among them that came from a peer."""
        return int(self.grown["lmkv:peer_tokens_total"])

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV was stored meanwhile."""
        return int(self.grown["lmkv:stored_tokens_total"])


class LlmProcess:
    """A vLLM `LLM`, float32 unless told otherwise, in a process of its own."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        name: str = "engine",
        logs: Path,
        settings: Mapping[str, str],
        transfer_config: Mapping[str, object] | None = LMKV_TRANSFER_CONFIG,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`settings` are `LMKV_...` variables; `options` those of `vllm.LLM`. `folder` gets a socket."""
        self.name = name
        self._path = folder / f"{name}.sock"
        arguments = {
            "model": str(model),
            "served_model_name": model.name,
            "dtype": "float32",
            "block_size": 128,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 << 20,
        } | options
        if transfer_config is not None:
            arguments["kv_transfer_config"] = dict(transfer_config)
        script = Path(__file__).with_name("llm_worker.py")
        command = [sys.executable, str(script), str(self._path), json.dumps(arguments)]
        environment = ENVIRONMENT | dict(settings) | dict(environment or {})
        self.process = ServerProcess(name, command, logs / f"{name}.log", environment)
        self._connection: socket.socket | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.alive

    def start(self) -> None:
        """Starts it without waiting; also again after it ended."""
        self._path.unlink(missing_ok=True)
        self.process.start()

    def wait_ready(self) -> None:
        """Waits until it answers. Raises `LmkvError` with the end of its log if it does not come up."""
        self.process.wait_until(self._connects, "ready", READY_TIMEOUT_SECONDS)

    def stop(self) -> None:
        """Ends the engine as its owner would. Idempotent."""
        if self._connection and self.alive:
            self._do("close")
        self._disconnect()
        self.process.stop()

    def kill(self) -> None:
        """Kills it as a crash would. Idempotent."""
        self._disconnect()
        self.process.kill()

    def log(self) -> str:
        """Everything that it has logged."""
        return self.process.log()

    def ask(
        self, *prompts: Sequence[int], max_tokens: int = 16, salt: str = "", lora: Sequence[str] = (), **sampling: Any
    ) -> Answers:
        """Completes prompts, greedily unless `sampling` says otherwise, all at once.

        `lora` is an adapter's name, number and folder.
        """
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | sampling
        said = self._do("ask", prompts=prompts, salt=salt, sampling=sampling, lora=lora)
        answers = tuple(
            Answer(
                samples=tuple(map(tuple, answer["samples"])),
                finish_reason=answer["finish_reason"],
                cached_tokens=answer["cached_tokens"],
                prompt_logprobs=tuple(answer["prompt_logprobs"]),
            )
            for answer in said["answers"]
        )
        return Answers(answers=answers, grown=said["grown"])

    def compute(self, *prompts: Sequence[int], max_tokens: int = 16, **sampling: Any) -> list[tuple[int, ...]]:
        """What the engine says where nothing can be cached: each prompt alone, under a salt that nobody has used."""
        tokens = []
        for prompt in prompts:
            answers = self.ask(prompt, max_tokens=max_tokens, salt=uuid.uuid4().hex, **sampling)
            assert answers.cached_tokens == 0
            tokens += answers.token_ids
        return tokens

    def forget(self, *, external: bool = False) -> None:
        """Empties vLLM's own prefix cache, and lmkv's through the connector if `external`."""
        assert self._do("forget", external=external)

    def ask_again(self, *prompts: Sequence[int], **options: Any) -> Answers:
        """As `ask`, after vLLM has forgotten what it knew: what is cached then is lmkv's."""
        self.forget()
        return self.ask(*prompts, **options)

    def metrics(self) -> dict[str, float]:
        """Values by sample name, as /metrics would show them."""
        return dict(self._do("metrics"))

    def begin(self, prompt: Sequence[int], seconds: float) -> dict[str, Any]:
        """Lets a request run for so long: `request_id`, `token_ids` so far, `used`, the share of pages in use."""
        return dict(self._do("begin", prompt=prompt, seconds=seconds))

    def abort(self, request_id: str) -> float:
        """Aborts it; the share of pages that stay in use, after waiting for zero."""
        return float(self._do("abort", request_id=request_id))

    def _connects(self) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            return False
        connection.settimeout(ANSWER_TIMEOUT_SECONDS)
        self._connection = connection
        return True

    def _do(self, name: str, **fields: Any) -> Any:
        assert self._connection is not None, f"{self.name} does not run"
        with self._connection.makefile("rw") as lines:
            lines.write(json.dumps({"do": name, **fields}) + "\n")
            lines.flush()
            line = lines.readline()
        assert line, f"{self.name} failed:\n{self.log()[-4000:]}"
        return json.loads(line)

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None


class Fleet:
    """Engines around one runtime folder, with a coordinator if asked for: a context manager that leaves nothing."""

    def __init__(self, model: Path, logs: Path, *, coordinator: bool = False) -> None:
        """Engines use `model` unless told otherwise; `logs` gets everybody's log."""
        self._model = model
        self._logs = logs
        self._folder = Path(tempfile.mkdtemp(prefix="lmkv-", dir="/tmp"))
        self.engines: dict[str, LlmProcess] = {}
        self._coordinator = Coordinator(logs) if coordinator else None

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that was asked for."""
        assert self._coordinator is not None
        return self._coordinator

    @property
    def runtime_dir(self) -> Path:
        """Where the nodes' sockets are."""
        return self._folder

    def add(self, name: str, settings: Mapping[str, str] | None = None, **options: Any) -> LlmProcess:
        """Describes an engine whose node is the instance `name`; nothing runs yet. See `LlmProcess`."""
        own = {"LMKV_INSTANCE_ID": name, "LMKV_RUNTIME_DIR": str(self._folder)}
        if self._coordinator:
            own["LMKV_COORDINATOR_ADDRESS"] = self._coordinator.address
        settings = CALM | own | dict(settings or {})
        model = options.pop("model", self._model)
        self.engines[name] = LlmProcess(
            model, self._folder, name=name, logs=self._logs, settings=settings, **options
        )
        return self.engines[name]

    def start(self) -> None:
        """Starts every engine that does not run, all at once, and waits for them."""
        waiting = [engine for engine in self.engines.values() if not engine.alive]
        for engine in waiting:
            engine.start()
        for engine in waiting:
            engine.wait_ready()

    def node_pid(self, name: str) -> int:
        """Process id of the one node of an instance."""
        (pid,) = self._node_pids({"LMKV_INSTANCE_ID": name})
        return pid

    def _node_pids(self, variables: Mapping[str, str]) -> list[int]:
        return pids_with_environment({"LMKV_RUNTIME_DIR": str(self._folder)} | dict(variables), "node")

    def __enter__(self) -> Self:
        try:
            if self._coordinator:
                self._coordinator.start()
                self._coordinator.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.kill()  # at once: what it leaves is the nodes' to clean up, and they end next
        end_processes(self._node_pids({}))
        if self._coordinator:
            self._coordinator.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def poison(node_pid: int) -> None:
    """Turns every number in the pool of a running node into its negative. Everything in it must be float32."""
    descriptors = Path(f"/proc/{node_pid}/fd").iterdir()
    path = next(path for path in descriptors if "lmkv-pool" in os.readlink(path))
    pool = np.memmap(path, dtype=np.uint8, mode="r+")
    pool[3::4] ^= 0x80  # the sign bits
