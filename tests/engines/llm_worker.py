"""Imports vLLM once, then forks engines. Run by `llm.Nursery`.

Importing takes most of an engine's start. A process becomes

- an `LLM`, if it gets a socket: schedules and computes in its one process, executes the lines of JSON that come there,
  and ends with them;
- or a program of vLLM, such as `python -m vllm.entrypoints.openai.api_server`. Its own children are forked as well,
  which is vLLM's default on GPUs; on CPUs it would spawn them, and import everything again.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.entrypoints.openai import api_server  # noqa: F401 # to be forked with it
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import llama  # noqa: F401
from vllm.v1.engine import coordinator, utils
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

import lmkv_client.connector.vllm_connector  # noqa: F401
from lmkv_client import model_identity
from tests.support.fork_server import Request, run_module, serve

FREE_TIMEOUT_SECONDS = 60.0
"""How long pages may stay in use after the last request, and how long a new one may have none."""

RANK_POLL_SECONDS = 0.0005
# Ranks wait for each step in a loop that yields, which takes all of two cores from nodes and whatever else runs.
shm_broadcast.sched_yield = lambda: time.sleep(RANK_POLL_SECONDS)


class Worker:
    """The commands, by method name. Each gets the fields of its line and returns what goes back."""

    def __init__(self, options: dict[str, Any]) -> None:
        """`unnamed` among the options: entries of the model's configuration that its identity lacks, as by a fault."""
        model_identity.VOLATILE += tuple(options.pop("unnamed", ()))
        if encoders := options.pop("ec_transfer_config", None):
            options["ec_transfer_config"] = ECTransferConfig(**encoders)
        self._llm = LLM(**options, enforce_eager=True, disable_log_stats=False)
        self._engine = self._llm.llm_engine
        if options.get("pipeline_parallel_size", 1) > 1:
            executor = self._engine.engine_core.engine_core.model_executor  # the LLM's own call could change weights
            executor.collective_rpc("warm_up", args=(options["max_num_batched_tokens"],))
        self._begun_count = 0
        if encoders:
            self._engine.engine_core.engine_core.model_executor.collective_rpc(_count_encoder_runs)

    def ask(
        self,
        prompts: list[list[int]],
        salt: str,
        sampling: dict[str, Any],
        lora: list[str],
        pictures: list[dict[str, Any] | None],
        priorities: list[int] | None,
        first_begins: bool,
    ) -> Any:
        """Completes all prompts at once, or once the first has begun; the answers, and how much counters have grown."""
        more = {"cache_salt": salt} if salt else {}
        inputs = [
            {"prompt_token_ids": prompt, **more, **(with_picture(**picture) if picture else {})}
            for prompt, picture in zip(prompts, pictures, strict=True)
        ]
        adapter = LoRARequest(lora[0], int(lora[1]), lora[2]) if lora else None
        before = self.metrics()
        began = time.perf_counter()
        if first_begins:
            outputs = self._generate_after_first(inputs, SamplingParams(**sampling), priorities or [0] * len(inputs))
        else:
            outputs = self._llm.generate(
                inputs, SamplingParams(**sampling), use_tqdm=False, lora_request=adapter, priority=priorities
            )
        seconds = time.perf_counter() - began
        self._settle()
        grown = {name: value - before.get(name, 0.0) for name, value in self.metrics().items()}
        return {"answers": [answer(output) for output in outputs], "grown": grown, "seconds": seconds}

    def _generate_after_first(self, inputs: list[Any], sampling: SamplingParams, priorities: list[int]) -> list[Any]:
        """As `generate`; the other requests arrive once the first one has an output token."""
        names = [f"after-{number}" for number in range(len(inputs))]
        begun, finished = set[str](), dict[str, Any]()
        for index, (name, prompt, priority) in enumerate(zip(names, inputs, priorities, strict=True)):
            self._engine.add_request(name, prompt, sampling, priority=priority)
            while len(finished) < len(names) if index == len(names) - 1 else names[0] not in begun:
                for output in self._engine.step():
                    begun.add(output.request_id)
                    finished |= {output.request_id: output} if output.finished else {}
        return [finished[name] for name in names]

    def _settle(self) -> None:
        """Steps until finished requests have no pages: the step after their last one stores their tails."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        deadline = time.monotonic() + FREE_TIMEOUT_SECONDS
        while scheduler.has_requests() and time.monotonic() < deadline:
            self._engine.step()

    def forget(self, external: bool) -> bool:
        """Empties vLLM's prefix cache, and with `external` lmkv's; whether that was done."""
        return bool(self._llm.reset_prefix_cache(reset_connector=external))

    def load_weights(self, folder: str, version: str, seen: bool) -> None:
        """Replaces the weights through vLLM's `reload_weights`, unless `seen` past all that lmkv can see; names their
        version unless it is empty."""
        caller = self._llm if seen else self._engine.engine_core.engine_core.model_executor
        caller.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if version:
            self._llm.update_weight_version(version)

    def sleep(self, level: int) -> bool:
        """Puts the engine to sleep and wakes it up; whether it is awake again."""
        self._llm.sleep(level)
        self._llm.wake_up()
        return not self._engine.is_sleeping()

    def pages(self, released: bool) -> None:
        """Calls what vLLM calls before it frees the memory of the KV cache, which it never does on CPUs, or after."""
        self._engine.engine_core.engine_core.model_executor.collective_rpc(_release_pages, args=(released,))

    def metrics(self) -> dict[str, float]:
        """Current values by sample name, summed over their labels; also by tier, reason or outcome."""
        from prometheus_client import REGISTRY

        values: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                labelled = [label for label in ("tier", "reason", "outcome") if label in sample.labels]
                for name in (sample.name, *(f'{sample.name}{{{one}="{sample.labels[one]}"}}' for one in labelled)):
                    values[name] = values.get(name, 0.0) + sample.value
        return values

    def encoder_runs(self) -> int:
        """Media that the encoder was run for so far."""
        executor = self._engine.engine_core.engine_core.model_executor
        counts: list[int] = executor.collective_rpc(lambda worker: worker.lmkv_encoder_runs)
        return counts[0]

    def kv_cache(self) -> dict[str, Any]:
        """The groups of the KV cache, by their kind, and the number of its pages."""
        config = self._engine.engine_core.engine_core.scheduler.kv_cache_config
        groups = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
        return {"groups": groups, "block_count": config.num_blocks}

    def begin(self, prompt: list[int], seconds: float) -> dict[str, Any]:
        """Runs a request for `seconds`, and until it has pages. Returns id, tokens and share of pages in use."""
        self._begun_count += 1
        request_id = f"begun-{self._begun_count}"
        sampling = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        tokens: list[int] = []
        end = time.monotonic() + seconds
        deadline = end + FREE_TIMEOUT_SECONDS
        while (now := time.monotonic()) < end or (not self._used() and now < deadline):
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


def with_picture(seed: int, size: int, uuid: str, processor: dict[str, Any]) -> dict[str, Any]:
    """The entries of a prompt with a picture of random pixels, named `uuid` unless that is empty."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    entries: dict[str, Any] = {"multi_modal_data": {"image": Image.fromarray(pixels)}}
    if uuid:
        entries["multi_modal_uuids"] = {"image": uuid}
    if processor:
        entries["mm_processor_kwargs"] = processor
    return entries


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
        "transfer_params": output.kv_transfer_params or {},
    }


def run_engine(commands: socket.socket) -> None:
    """Becomes the engine that the first line describes; sends whether it is ready, and executes the lines after it."""
    with commands, commands.makefile("rw") as lines:

        def say(what: Any) -> None:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

        options = json.loads(lines.readline())
        try:
            worker = Worker(options)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
        say({})
        for line in lines:
            command = json.loads(line)
            name = command.pop("do")
            say(getattr(worker, name)(**command))
        worker.close()


def _count_encoder_runs(worker: Any) -> None:
    model = worker.model_runner.get_model()
    embed = model.embed_multimodal
    worker.lmkv_encoder_runs = 0

    def embed_and_count(**inputs: Any) -> Any:
        outputs = embed(**inputs)
        worker.lmkv_encoder_runs += len(outputs)
        return outputs

    model.embed_multimodal = embed_and_count


def _release_pages(_worker: Any, released: bool) -> None:
    connector = get_kv_transfer_group()
    connector.unregister_kv_caches() if released else connector.restore_kv_caches()


def run(request: Request, files: list[int]) -> None:
    """An engine if there is a socket for its commands, else a program of vLLM."""
    if files:
        run_engine(socket.socket(fileno=files[0]))
        return
    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    run_module(request)


if __name__ == "__main__":
    serve(sys.argv[1], run)
