"""Prefill and decode engines side by side, each pair by another system, started so that they can be measured alike."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.support import engines
from benchmarks.systems.calls import PdCalls
from benchmarks.systems.pairs import ROOT, PairPlan
from lmkv.errors import LmkvError, Unreachable
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion, CompletionToken
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import ServerProcess, free_port, session_pids
from tests.support.plain_nixl import plain_nixl
from tests.support.proxy import ProxyProcess

STEP_TOKENS = 2048
"""Maximum tokens per step of an engine. Longer prompts take several steps, with the transfer in parallel."""
PROMPTS_IN_CACHE = 2
PATIENCE = engines.PATIENCE | {"LMKV_PD_TIMEOUT": "60"}
"""Prefills take seconds here. A node calls every third of `pd_timeout` to say that one is still at work."""
ABORTED_TOKENS = 16
"""Tokens that a client asks for before it leaves."""
REQUEST_SECONDS = 120.0
NOTICE_SECONDS = 30.0
TO_BE_DECODED: Mapping[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""vLLM's toy proxy sends these parameters to a prefill engine with `NixlConnector`."""

Ask = Callable[[Sequence[int], int], Completion]
"""Completes a prompt with this number of tokens; several threads may call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedResponse:
    """What the client of a system got for one prompt. Seconds count from when it sent the prompt."""

    token_ids: tuple[int, ...]
    seconds: tuple[float, ...]
    """When each token was there."""
    seam: float = 0.0
    """Seconds from the prefill's answer to the decode's first token; 0 if one engine did both."""
    step: float = 0.0
    """TTFT of the same at the decode engine once more, which has all but the last token in its pages by then."""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.seconds[0]

    @property
    def second_token(self) -> float:
        """Time to the second token: the first one that is decoded."""
        return self.seconds[1]

    @property
    def itl(self) -> float:
        """Mean time between tokens, from the second one on."""
        return (self.seconds[-1] - self.seconds[1]) / (len(self.seconds) - 2)

    @property
    def total(self) -> float:
        """Time to the last token."""
        return self.seconds[-1]

    @property
    def transfer(self) -> float:
        """What it takes beyond prefill and decode to have the KV cache at the other engine."""
        return self.seam - self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """Engines that are ready, and how a client has a prompt completed by them."""

    ask: Callable[[Sequence[int], int], TimedResponse]
    """Takes a prompt and how many tokens to generate."""
    decode: EngineProcess
    """The engine that generates all tokens but the first."""
    is_frozen: bool = False
    """Whether the engines burn processor time while idle, and so are stopped while they have nothing to do."""
    calls: PdCalls | None = None
    """What its nodes count, if it has any."""
    abort: Callable[[Sequence[int]], None] | None = None
    """Sends a prompt and closes the connection after the first token, so that no decode loads the handoff."""


@contextmanager
def thawed(frozen: Sequence[ServerProcess]) -> Iterator[None]:
    """Lets frozen servers run for a while."""
    send(signal.SIGCONT, frozen)
    try:
        yield
    finally:
        send(signal.SIGSTOP, frozen)


def send(number: signal.Signals, to: Sequence[ServerProcess]) -> None:
    for pid in [pid for server in to if server.alive for pid in session_pids(server.pid)]:
        os.kill(pid, number)


def engine_options(plan: PairPlan, prompts_in_cache: int = PROMPTS_IN_CACHE) -> dict[str, Any]:
    """Arguments of all engines."""
    steps = ("--max-num-batched-tokens", str(STEP_TOKENS))
    return engines.options(plan.dtype, plan.context_tokens, prompts_in_cache) | {"extra_arguments": steps}


@contextmanager
def one_engine(plan: PairPlan) -> Iterator[System]:
    """One engine without a connector, which does both."""
    engine = EngineProcess(plan.model, plan.run.logs, name="one", transfer_config=None, **engine_options(plan))

    def ask(prompt: Sequence[int], token_count: int) -> TimedResponse:
        return whole_answer(engine.stream(prompt, token_count))

    with engine:
        plan.run.say(f"{engine.name} is ready")
        yield System(ask=ask, decode=engine)


@contextmanager
def lmkv_system(plan: PairPlan, buffer_bytes: int = 0) -> Iterator[System]:
    """lmkv, with its proxy; `buffer_bytes` bounds the handoffs that are not loaded yet, 0 is the default."""
    settings = PATIENCE | engines.pool_setting(plan.pool_bytes) | {"LMKV_PD_BUFFER_SIZE": str(buffer_bytes)}
    with Cluster(plan.run.folder, plan.model, logs=plan.run.logs, settings=settings, coordinator=False) as cluster:
        ports = (free_port(), free_port())
        for name, role, port in zip(("prefill", "decode"), ("kv_producer", "kv_consumer"), ports, strict=True):
            transfer_config = {"kv_connector": "LMKVConnector", "kv_role": role}
            own = {"LMKV_METRICS_PORT": str(port)}
            cluster.add_engine(name, settings=own, transfer_config=transfer_config, **engine_options(plan))
        cluster.start_engines(lambda engine: plan.run.say(f"{engine.name} is ready"))
        prefill, decode = cluster.engines.values()
        with ProxyProcess(plan.run.logs, [prefill], [decode]) as proxy:

            def ask(prompt: Sequence[int], token_count: int) -> TimedResponse:
                answer = whole_answer(proxy.stream(prompt, token_count))
                first, second = answer.seconds[:2]
                return TimedResponse(token_ids=answer.token_ids, seconds=answer.seconds, seam=second - first)

            def abort(prompt: Sequence[int]) -> None:
                with closing(proxy.stream(prompt, ABORTED_TOKENS)) as tokens:
                    next(tokens)

            yield System(ask=ask, decode=decode, calls=PdCalls(prefill=prefill, node_ports=ports), abort=abort)


@contextmanager
def nixl_system(plan: PairPlan) -> Iterator[System]:
    """vLLM's `NixlConnector`. The client does what vLLM's toy proxy does: the decode generates everything.

    Each engine keeps a core polling: the decode is frozen until the prefill has answered, and the prefill as soon as
    the decode has the prompt.
    """
    pair = [
        nixl_engine(plan, name, role, **engine_options(plan))
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    prefill, decode = pair

    def ask(prompt: Sequence[int], token_count: int) -> TimedResponse:
        with ExitStack() as until_decoded:
            with thawed([prefill]):
                began = time.perf_counter()
                params = prefilled(prefill, prompt, TO_BE_DECODED)["kv_transfer_params"]
                before = time.perf_counter() - began
                until_decoded.enter_context(thawed([decode]))
                tokens = decode.stream(prompt, token_count, extra={"kv_transfer_params": params})
                begun = next(tokens)
            rest = whole_answer(chain([begun], tokens))
        return TimedResponse(token_ids=rest.token_ids, seconds=later(rest, before), seam=rest.ttft)

    with started_and_frozen(plan, pair):
        yield System(ask=ask, decode=decode, is_frozen=True)


def nixl_engine(plan: PairPlan, name: str, role: str, **options: Any) -> EngineProcess:
    """An engine with vLLM's `NixlConnector`, not started."""
    return EngineProcess(
        plan.model,
        plan.run.logs,
        name=f"nixl-{name}",
        transfer_config={"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
        environment={
            "PYTHONPATH": str(plain_nixl(plan.run.folder)),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        },
        **options,
    )


@contextmanager
def lmkv_fan_in(plan: PairPlan, prefill_count: int) -> Iterator[Ask]:
    """Some prefill engines and one decode engine behind lmkv's proxy, for several clients."""
    settings = PATIENCE | engines.pool_setting(plan.pool_bytes)
    options = engine_options(plan, plan.prompts_in_cache)
    with Cluster(plan.run.folder, plan.model, logs=plan.run.logs, settings=settings, coordinator=False) as cluster:
        for name, role in fan_in_roles(prefill_count):
            transfer_config = {"kv_connector": "LMKVConnector", "kv_role": role}
            cluster.add_engine(name, transfer_config=transfer_config, **options)
        cluster.start_engines(lambda engine: plan.run.say(f"{engine.name} is ready"))
        *prefills, decode = cluster.engines.values()
        with ProxyProcess(plan.run.logs, prefills, [decode]) as proxy:
            yield proxy.complete


@contextmanager
def nixl_fan_in(plan: PairPlan, prefill_count: int) -> Iterator[Ask]:
    """The same engines with vLLM's `NixlConnector`; clients take the prefill engines in turn, as vLLM's toy proxy."""
    options = engine_options(plan, plan.prompts_in_cache)
    fleet = [nixl_engine(plan, name, role, **options) for name, role in fan_in_roles(prefill_count)]
    *prefills, decode = fleet
    turns = count()

    def ask(prompt: Sequence[int], token_count: int) -> Completion:
        began = time.perf_counter()
        params = prefilled(prefills[next(turns) % prefill_count], prompt, TO_BE_DECODED)["kv_transfer_params"]
        before = time.perf_counter() - began
        done = decode.complete(prompt, token_count, extra={"kv_transfer_params": params})
        return replace(done, ttft_seconds=before + done.ttft_seconds, total_seconds=before + done.total_seconds)

    with started_and_frozen(plan, fleet), thawed(fleet):
        yield ask


def fan_in_roles(prefill_count: int) -> list[tuple[str, str]]:
    """The names and roles of the engines, the decode last."""
    return [
        *((f"prefill-{number}", "kv_producer") for number in range(1, prefill_count + 1)),
        ("decode", "kv_consumer"),
    ]


@contextmanager
def lmcache_system(plan: PairPlan, python: Path) -> Iterator[System]:
    """LMCache's PD. The client does what LMCache's proxy does: it returns the first token after the transfer.

    The prefill writes into the decode's memory, with its help: both run until the decode has the prompt.
    """
    init_port, alloc_port, notice_port = (free_port() for _ in range(3))
    configs: dict[str, dict[str, object]] = {
        "prefill": {"pd_role": "sender", "pd_proxy_host": "127.0.0.1", "pd_proxy_port": notice_port},
        "decode": {
            "pd_role": "receiver",
            "pd_peer_host": "127.0.0.1",
            "pd_peer_init_port": [init_port],
            "pd_peer_alloc_port": [alloc_port],
        },
    }
    pair = [
        _lmcache_engine(plan, python, "prefill", "kv_producer", configs["prefill"]),
        _lmcache_engine(plan, python, "decode", "kv_consumer", configs["decode"]),
    ]
    prefill, decode = pair
    serial = count(1)

    def ask(prompt: Sequence[int], token_count: int) -> TimedResponse:
        request_id = f"r{next(serial)}"
        receiver = {
            "req_id": request_id,
            "receiver_host": "127.0.0.1",
            "receiver_init_port": [init_port],
            "receiver_alloc_port": [alloc_port],
        }
        with thawed([decode]):
            with thawed([prefill]):
                began = time.perf_counter()
                answer = prefilled(prefill, prompt, {"ret_first_tok": True, "disagg_spec": receiver})
                before = time.perf_counter() - began
                first = int(answer["kv_transfer_params"]["first_tok"])
                wait_for_notice(notices, request_id, NOTICE_SECONDS)
                handed = time.perf_counter() - began
                tokens = decode.stream([*prompt, first], token_count - 1)
                begun = next(tokens)
            rest = whole_answer(chain([begun], tokens))
        return TimedResponse(
            token_ids=(first, *rest.token_ids),
            seconds=(handed, *later(rest, handed)),
            seam=handed + rest.ttft - before,
        )

    with zmq.Context() as context, context.socket(zmq.PULL) as notices, started_and_frozen(plan, pair):
        notices.bind(f"tcp://127.0.0.1:{notice_port}")
        yield System(ask=ask, decode=decode, is_frozen=True)


def whole_answer(tokens: Iterator[CompletionToken]) -> TimedResponse:
    """An answer that came from one server."""
    pairs = [(token_id, token.seconds) for token in tokens for token_id in token.token_ids]
    return TimedResponse(
        token_ids=tuple(token_id for token_id, _ in pairs), seconds=tuple(seconds for _, seconds in pairs)
    )


def later(answer: TimedResponse, seconds: float) -> tuple[float, ...]:
    """When its tokens were there, counted from so much earlier."""
    return tuple(seconds + at for at in answer.seconds)


def prefilled(prefill: EngineProcess, prompt: Sequence[int], params: Mapping[str, object]) -> dict[str, Any]:
    """The answer of a prefill engine to a prompt of which it computes one token. Raises `LmkvError` without one."""
    body = {
        "model": prefill.model_name,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": params,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{prefill.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
    except (urllib.error.URLError, OSError) as error:
        raise Unreachable(f"{prefill.name} did not answer: {error}", address=f"127.0.0.1:{prefill.port}") from error
    return answer


@contextmanager
def started_and_frozen(plan: PairPlan, pair: Sequence[EngineProcess]) -> Iterator[None]:
    """Both engines, started one after the other, each frozen as soon as it is ready, and ended; see `thawed`."""
    try:
        for engine in pair:
            engine.start()
            engine.wait_ready()
            send(signal.SIGSTOP, [engine])
            plan.run.say(f"{engine.name} is ready")
        yield
    finally:
        send(signal.SIGCONT, list(pair))
        for engine in pair:
            engine.request_stop()
        for engine in pair:
            engine.stop()


def _lmcache_engine(plan: PairPlan, python: Path, name: str, role: str, own: Mapping[str, object]) -> EngineProcess:
    config = plan.run.folder / f"lmcache-{name}.yaml"
    common = {
        "chunk_size": engines.CHUNK_SIZE,
        "local_cpu": False,
        "max_local_cpu_size": 0,
        "enable_pd": True,
        "transfer_channel": "nixl",
        "nixl_backends": ["UCX"],
        "pd_buffer_size": PROMPTS_IN_CACHE * plan.context_tokens * engines.token_bytes(plan.dtype),
        "pd_buffer_device": "cpu",
    }
    config.write_text(json.dumps(common | dict(own)))  # JSON is YAML
    extra: dict[str, object] = {"discard_partial_chunks": False, "lmcache_rpc_port": f"pd-{name}-{os.getpid()}"}
    if role == "kv_consumer":
        extra["skip_last_n_tokens"] = 1
    engine = EngineProcess(
        plan.model,
        plan.run.logs,
        name=f"lmcache-{name}",
        transfer_config={
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_connector_module_path": "benchmarks.systems.lmcache_cpu",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        },
        environment={
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": "0",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "UCX_TLS": "tcp,sm,self",
            "LMCACHE_CONFIG_FILE": str(config),
        },
        **engine_options(plan),
    )
    engine.command[0] = str(python)
    return engine


def wait_for_notice(notices: zmq.Socket[bytes], request_id: str, timeout_seconds: float) -> None:
    """Waits until LMCache reports the end of a transfer. Raises `LmkvError` after a timeout."""
    deadline = time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0:
        if notices.poll(round(1e3 * left)) and msgspec.msgpack.decode(notices.recv()).get("req_id") == request_id:
            return
    raise LmkvError(f"LMCache did not report the transfer of {request_id} within {timeout_seconds:.0f} s")
