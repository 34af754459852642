"""Imports vLLM once, then forks an engine for each connection. Run by `llm.Nursery`.

Importing takes most of an engine's start. The first line of JSON on a connection says what the new process becomes:

- an `LLM`: schedules and computes in its one process, executes the lines that follow, and ends with its connection;
- vLLM's API server, as `python -m vllm.entrypoints.openai.api_server` is. Its own children are forked as well, which is
  vLLM's default on GPUs; on CPUs it would spawn them, and import everything again.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.device_communicators import shm_broadcast
from vllm.entrypoints.openai import api_server  # noqa: F401 # to be forked with it
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import llama  # noqa: F401
from vllm.v1.engine import coordinator, utils
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

import lmkv_client.connector.vllm_connector  # noqa: F401

FREE_TIMEOUT_SECONDS = 30.0
"""How long pages may stay in use after the last request."""


SERVER = "vllm.entrypoints.openai.api_server"

RANK_POLL_SECONDS = 0.0005
# Ranks wait for each step in a loop that yields, which takes all of two cores from nodes and whatever else runs.
shm_broadcast.sched_yield = lambda: time.sleep(RANK_POLL_SECONDS)


class Worker:
    """The commands, by method name. Each gets the fields of its line and returns what goes back."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = LLM(**options, enforce_eager=True, disable_log_stats=False)
        self._engine = self._llm.llm_engine
        if options.get("pipeline_parallel_size", 1) > 1:
            self._llm.collective_rpc("warm_up", args=(options["max_num_batched_tokens"],))
        self._begun_count = 0

    def ask(self, prompts: list[list[int]], salt: str, sampling: dict[str, Any], lora: list[str]) -> Any:
        """Completes all prompts at once; the answers, and by how much the counters have grown."""
        inputs = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        adapter = LoRARequest(lora[0], int(lora[1]), lora[2]) if lora else None
        before = self.metrics()
        outputs = self._llm.generate(inputs, SamplingParams(**sampling), use_tqdm=False, lora_request=adapter)
        grown = {name: value - before.get(name, 0.0) for name, value in self.metrics().items()}
        return {"answers": [answer(output) for output in outputs], "grown": grown}

    def forget(self, external: bool) -> bool:
        """Empties vLLM's prefix cache, and with `external` lmkv's; whether that was done."""
        return bool(self._llm.reset_prefix_cache(reset_connector=external))

    def sleep(self, level: int) -> bool:
        """Puts the engine to sleep and wakes it up; whether it is awake again."""
        self._llm.sleep(level)
        self._llm.wake_up()
        return not self._engine.is_sleeping()

    def metrics(self) -> dict[str, float]:
        """Current values by sample name, summed over their labels; of each tier too, where there is such a label."""
        from prometheus_client import REGISTRY

        values: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                tier = sample.labels.get("tier")
                for name in (sample.name, f'{sample.name}{{tier="{tier}"}}') if tier else (sample.name,):
                    values[name] = values.get(name, 0.0) + sample.value
        return values

    def kv_cache(self) -> dict[str, Any]:
        """The groups of the KV cache, by their kind, and the number of its pages."""
        config = self._engine.engine_core.engine_core.scheduler.kv_cache_config
        groups = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
        return {"groups": groups, "block_count": config.num_blocks}

    def begin(self, prompt: list[int], seconds: float) -> dict[str, Any]:
        """Lets a request run for so long; its id, the tokens that it has by then, and the share of pages in use."""
        self._begun_count += 1
        request_id = f"begun-{self._begun_count}"
        sampling = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        tokens: list[int] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
        return {"request_id": request_id, "token_ids": tokens, "used": self._used()}

    def abort(self, request_id: str) -> float:
        """Aborts a request that was begun, and steps until no page is in use; the share of pages still in use."""
        self._engine.abort_request([request_id])
        deadline = time.monotonic() + FREE_TIMEOUT_SECONDS
        while self._used() and time.monotonic() < deadline:
            self._engine.step()
        return self._used()

    def _used(self) -> float:
        return float(self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.engine_core.shutdown()


def answer(output: Any) -> dict[str, Any]:
    """What the tests want to know of one request's output."""
    first = output.outputs[0]
    prompt_logprobs = [
        entry and entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    ]
    return {
        "samples": [list(sample.token_ids) for sample in output.outputs],
        "finish_reason": first.finish_reason,
        "cached_tokens": output.num_cached_tokens,
        "logprobs": [entry[token].logprob for token, entry in zip(first.token_ids, first.logprobs or (), strict=False)],
        "prompt_logprobs": prompt_logprobs,
    }


def run_server(arguments: list[str], environment: dict[str, str]) -> None:
    """Becomes vLLM's API server, in exactly this environment."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of the environment
    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it is imported already
    sys.argv = [SERVER, *arguments]
    try:
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()


def run_engine(connection: socket.socket) -> None:
    """Becomes the engine that the first line describes; sends its process id, and an `LLM` then whether it is ready."""
    with connection, connection.makefile("rw") as lines:

        def say(what: Any) -> None:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

        description = json.loads(lines.readline())
        os.setsid()
        log = os.open(description["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        say(os.getpid())
        if "serve" in description:
            connection.close()
            run_server(description["serve"], description["environment"])
            return
        os.environ.update(description["environment"])
        try:
            worker = Worker(description["options"])
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
        say({})
        for line in lines:
            command = json.loads(line)
            name = command.pop("do")
            say(getattr(worker, name)(**command))
        worker.close()


def main(path: str) -> None:
    """Listens at `path` as soon as vLLM is imported."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended engines leave no zombies
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                try:
                    run_engine(connection)
                except BaseException:
                    traceback.print_exc()
                os._exit(0)  # all that Python would tidy up is the nursery's
            connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
