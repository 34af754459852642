"""Imports vLLM once, then forks a process with an `LLM` for each connection. Run by `llm.Fleet`.

Importing takes most of an engine's start. The engine schedules and computes in its one process, and carries out what
comes over its connection, a line of JSON each way; it ends with its connection.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.device_communicators import shm_broadcast
from vllm.lora.request import LoRARequest
from vllm.v1.worker import cpu_worker  # noqa: F401 # half of what is left of a start

FREE_TIMEOUT_SECONDS = 30.0
"""How long pages may stay in use after the last request."""


RANK_POLL_SECONDS = 0.0005
# Ranks wait for each step in a loop that yields, which takes all of two cores from nodes and whatever else runs.
shm_broadcast.sched_yield = lambda: time.sleep(RANK_POLL_SECONDS)


class Worker:
    """The commands, by method name. Each gets the fields of its line and returns what goes back."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = LLM(**options, enforce_eager=True, disable_log_stats=False)
        self._engine = self._llm.llm_engine
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
    logprobs = [
        entry and entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    ]
    return {
        "samples": [list(sample.token_ids) for sample in output.outputs],
        "finish_reason": output.outputs[0].finish_reason,
        "cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": logprobs,
    }


def run_engine(connection: socket.socket) -> None:
    """Becomes the engine that the first line describes; says its process id, and then whether it is ready."""
    with connection, connection.makefile("rw") as lines:

        def say(what: Any) -> None:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

        description = json.loads(lines.readline())
        os.setsid()
        log = os.open(description["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(description["environment"])
        say(os.getpid())
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
