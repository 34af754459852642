"""One vLLM `LLM` in this process, told what to do over a unix socket: a line of JSON each way. Run by `llm.LlmProcess`.

In the process that it schedules and computes in, an engine starts in half the time that a server takes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

FREE_TIMEOUT_SECONDS = 30.0
"""How long pages may stay in use after the last request."""


class Worker:
    """The commands, by method name. Each gets the fields of its line and returns what goes back."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options, enforce_eager=True, disable_log_stats=False)
        self._engine = self._llm.llm_engine
        self._request_number = 0

    def ask(self, prompts: list[list[int]], salt: str, sampling: dict[str, Any], lora: list[str]) -> Any:
        """Completes all prompts at once; the answers, and by how much the counters have grown."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        inputs = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        adapter = LoRARequest(lora[0], int(lora[1]), lora[2]) if lora else None
        before = self.metrics()
        outputs = self._llm.generate(inputs, SamplingParams(**sampling), use_tqdm=False, lora_request=adapter)
        grown = {name: value - before.get(name, 0.0) for name, value in self.metrics().items()}
        return {"answers": [answer(output) for output in outputs], "grown": grown}

    def forget(self, external: bool) -> bool:
        """Empties vLLM's prefix cache, and with `external` lmkv's; whether that was done."""
        return bool(self._llm.reset_prefix_cache(reset_connector=external))

    def metrics(self) -> dict[str, float]:
        """Current values by sample name, summed over their labels."""
        from prometheus_client import REGISTRY

        values: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def begin(self, prompt: list[int], seconds: float) -> dict[str, Any]:
        """Lets a request run for so long; its id, the tokens that it has by then, and the share of pages in use."""
        from vllm import SamplingParams

        self._request_number += 1
        request_id = f"begun-{self._request_number}"
        sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        tokens: list[int] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
            time.sleep(0.001)
        return {"request_id": request_id, "token_ids": tokens, "used": self._used()}

    def abort(self, request_id: str) -> float:
        """Aborts a request that was begun, and steps until no page is in use; the share of pages still in use."""
        self._engine.abort_request([request_id])
        deadline = time.monotonic() + FREE_TIMEOUT_SECONDS
        while self._used() and time.monotonic() < deadline:
            self._engine.step()
            time.sleep(0.001)
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


def serve(listener: socket.socket, worker: Worker) -> None:
    """Carries out commands, one client after the other, until one says `close`."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                command = json.loads(line)
                name = command.pop("do")
                method: Callable[..., Any] = getattr(worker, name)
                lines.write(json.dumps(method(**command)) + "\n")
                lines.flush()
                if name == "close":
                    return


def main(path: str, options: str) -> None:
    """Makes the engine, then listens at `path`: who can connect finds it ready."""
    worker = Worker(json.loads(options))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        serve(listener, worker)
    os.unlink(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
