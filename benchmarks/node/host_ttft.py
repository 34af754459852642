"""What a hit and a handoff cost when the node that holds the prompt is on another host instead of the same one.

Three engines: the first computes the prompts; the node of the second is on the same host, that of the third on another
one, which shares no memory with it. The engines themselves are on one host, with their nodes' sockets: nothing but what
nodes say to each other crosses the network.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from benchmarks.node.hosts import Host, HostNode, NoHosts, this_host_and_another
from benchmarks.support import engines, timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import compare
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster, CoordinatorProcess
from lmkv_client.demo.engine import EngineProcess
from tests.support.proxy import ProxyProcess

TOKENS = 4000
OUTPUT_TOKENS = 4
ROUNDS = 5
STORE_SECONDS = 20.0
FIRST, SAME, OTHER = "first", "same", "other"
SAME_HOST = "same host"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fleet:
    coordinator: CoordinatorProcess
    engines: Mapping[str, EngineProcess]


def measure(run: BenchmarkRun, dtype: str) -> None:
    """Adds the rows."""
    try:
        with this_host_and_another() as (here, there), _fleet(run, dtype, here, there) as fleet:
            prompts = Prompts(seed=7)
            _hits(run, fleet, prompts)
            _handoffs(run, fleet, prompts)
            run.say("stopping everything")
    except NoHosts as error:
        run.note(f"Engines with nodes on two hosts were not measured: {error}")


@contextmanager
def _fleet(run: BenchmarkRun, dtype: str, here: Host, there: Host) -> Iterator[_Fleet]:
    """The engines, all ready; the node of the last one runs on the other host."""
    context_tokens = engines.context_for(TOKENS)
    prompt_bytes = context_tokens * engines.token_bytes(dtype)
    pool_bytes = 2 * ROUNDS * prompt_bytes
    engines.check_memory(3 * (engines.ENGINE_BYTES + 3 * prompt_bytes + pool_bytes))
    model = engines.model_of(run)
    run.say(f"starting 3 engines, {dtype}; half a minute or more")
    with CoordinatorProcess(run.logs, arguments=["--host", "0.0.0.0"]) as coordinator:
        settings = engines.PATIENCE | engines.pool_setting(pool_bytes)
        settings |= {"LMKV_COORDINATOR_ADDRESS": f"{here.address}:{coordinator.port}", "LMKV_P2P_HOST": here.address}
        with Cluster(run.folder, model, logs=run.logs, settings=settings, coordinator=False) as cluster:
            folder = run.folder / "there"
            (folder / OTHER).mkdir(mode=0o700, parents=True)
            (folder / OTHER / "peers.sock").mkdir()  # where its socket would be: the node has no channel `shm` then
            own = {"LMKV_RUNTIME_DIR": str(folder), "LMKV_INSTANCE_ID": OTHER, "LMKV_P2P_HOST": there.address}
            for name in (FIRST, SAME, OTHER):
                extra = own if name == OTHER else {}
                cluster.add_engine(name, settings=extra, **engines.options(dtype, context_tokens))
            with HostNode(there, OTHER, folder, run.logs, settings | own) as node:
                cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))
                yield _Fleet(coordinator=coordinator, engines=cluster.engines)
                if "by channel shm" in node.log():
                    raise LmkvError("the node of the other host has read shared memory")
                cluster.stop()


def _hits(run: BenchmarkRun, fleet: _Fleet, prompts: Prompts) -> None:
    seconds: dict[str, list[float]] = {FIRST: [], SAME: [], OTHER: []}
    rounds = 2 if run.quick else ROUNDS
    for number in range(rounds + 1):  # the first one connects
        prompt = prompts.make(TOKENS)
        miss = fleet.engines[FIRST].complete(prompt, OUTPUT_TOKENS)
        engines.check_miss("the first engine", miss)
        held = fleet.coordinator.wait_for_holder(prompt, FIRST, len(prompt), STORE_SECONDS)
        answers = {FIRST: miss}
        for name in (SAME, OTHER) if number % 2 else (OTHER, SAME):
            answers[name] = fleet.engines[name].complete(prompt, OUTPUT_TOKENS)
            engines.check_hit(f"the prompt of another node, {name} host", answers[name], held - 1)
        if number:
            for name, answer in answers.items():
                seconds[name].append(answer.ttft_seconds)
            run.say(f"hits, {number} of {rounds}: {_in_words(seconds)}")
    _add(run, "hosts_peer_ttft_ms", seconds)


def _handoffs(run: BenchmarkRun, fleet: _Fleet, prompts: Prompts) -> None:
    seconds: dict[str, list[float]] = {SAME: [], OTHER: []}
    rounds = 2 if run.quick else ROUNDS
    with ExitStack() as stack:
        proxies = {
            name: stack.enter_context(
                ProxyProcess(run.logs / f"proxy-{name}", [fleet.engines[FIRST]], [fleet.engines[name]])
            )
            for name in seconds
        }
        for number in range(rounds + 1):
            for name in (SAME, OTHER) if number % 2 else (OTHER, SAME):
                tokens = list(proxies[name].stream(prompts.make(TOKENS), OUTPUT_TOKENS))
                if len(tokens) != OUTPUT_TOKENS:
                    raise LmkvError(f"disaggregated prefill, {name} host: {len(tokens)} tokens")
                if number:
                    seconds[name].append(tokens[1].seconds - tokens[0].seconds)
            if number:
                run.say(f"handoffs, {number} of {rounds}: {_in_words(seconds)}")
    _add(run, "hosts_pd_seam_ms", seconds)


def _add(run: BenchmarkRun, name: str, seconds: Mapping[str, Sequence[float]]) -> None:
    other, same = (1000 * statistics.median(seconds[place]) for place in (OTHER, SAME))
    row = compare(name, other, "ms", SAME_HOST, same)
    run.add(replace(row, ratio=timing.median_ratio(seconds[OTHER], seconds[SAME])))


def _in_words(seconds: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{name} {1000 * values[-1]:.0f} ms" for name, values in seconds.items())
