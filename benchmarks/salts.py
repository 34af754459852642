"""What response times reveal of another tenant's prompts: `python -m benchmarks.salts`, docs/performance/salts.md.

Tenant A sends prompts. Then tenant B sends the same prompts (`other`) and prompts that were never sent (`cold`), and A
repeats its own (`own`), in random order. An observer that sees one TTFT of a cold prompt and one of the other kind,
and takes the shorter one for a hit, is right with the probability `..._guess`: 50 % is chance, 100 % certainty. The
proxy with the policy `none` is the control: it shows that the measurement would find a difference.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from lmkv.auth.cache_salts import NONE, TENANT
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import CheckedServer, free_port

KINDS = ("cold", "other", "own")
STORE_TIMEOUT_SECONDS = 60.0
POOLS = 2
"""Size of the pool, in prompts of one policy: half of it is for credits, so that no prompt is evicted."""
Z_LIMIT = 3.3
"""Standard errors by which a guess may differ from chance: one run in a thousand exceeds them by chance."""


class SaltingProxy(Endpoint, CheckedServer):
    """An `lmkv proxy` with a policy, in front of one engine."""

    def __init__(self, run: BenchmarkRun, engine: EngineProcess, policy: str) -> None:
        self.policy = policy
        Endpoint.__init__(self, policy, free_port(), engine.model_name)
        path = run.folder / "clients.json"  # which is YAML, too
        clients = [
            {"name": name, "role": "client", "tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}
            for name in ("a", "b")
        ]
        path.write_text(json.dumps({"tokens": clients}))
        command = [sys.executable, "-m", "lmkv", "proxy", "--port", str(self.port), "--mode", "route"]
        command += ["--engine", f"http://127.0.0.1:{engine.port}", "--auth-tokens", str(path)]
        command += ["--cache-salt-policy", policy]
        secret = os.environ | {"LMKV_CLUSTER_SECRET": "of this run"}
        CheckedServer.__init__(self, f"proxy-{policy}", command, run.logs / f"proxy-{policy}.log", secret)

    def is_ready(self) -> bool:
        """Whether the engine is available."""
        return self.answers("/readyz")

    def seconds(self, tenant: str, prompt: Sequence[int], cached_tokens: int) -> float:
        """TTFT of a tenant's prompt. Raises `LmkvError` unless this number of tokens was cached."""
        self.headers["Authorization"] = f"Bearer {tenant}"
        completion = self.complete(prompt, 1)
        if completion.cached_tokens != cached_tokens:
            raise LmkvError(
                f"{self.name}, tenant {tenant}: {completion.cached_tokens} tokens cached, not {cached_tokens}"
            )
        return completion.ttft_seconds


def measure(run: BenchmarkRun) -> None:
    """Both policies, with one engine."""
    prompt_tokens, count = 513, 20 if run.quick else 100
    dtype = engines.choose_dtype(run)
    run.report.settings |= {"prompt_tokens": prompt_tokens, "prompts": count}
    pool_bytes = POOLS * len(KINDS) * count * prompt_tokens * engines.token_bytes(dtype)
    engines.check_memory(pool_bytes + engines.ENGINE_BYTES)
    settings = engines.PATIENCE | engines.pool_setting(pool_bytes)
    with Cluster(run.folder, engines.model_of(run), logs=run.logs, settings=settings, coordinator=False) as cluster:
        engine = cluster.add_engine("engine", **engines.options(dtype, engines.context_for(prompt_tokens)))
        cluster.start_engines()
        prompts = Prompts(seed=7)
        for policy in (TENANT, NONE):
            engine.reset_prefix_cache(external=True)  # the pool has room for the prompts of one policy
            with SaltingProxy(run, engine, policy) as proxy:
                run.say(f"policy {policy}: {count} prompts of {prompt_tokens} tokens")
                for name, row in _rows(policy, _times(proxy, engine, prompts, prompt_tokens, count)):
                    run.add(row)
                    if policy == TENANT and name == "other_guess" and _z(row.value, count) > Z_LIMIT:
                        run.fail(f"response times reveal prompts of another tenant: a guess is {row.value:.1f} % right")


def _times(
    proxy: SaltingProxy, engine: EngineProcess, prompts: Prompts, prompt_tokens: int, count: int
) -> dict[str, list[float]]:
    """TTFTs by kind."""
    sent = [prompts.make(prompt_tokens) for _ in range(count)]
    stored = engines.full_chunks(prompt_tokens)
    with _stores(engine, count * stored):
        for prompt in sent:
            proxy.seconds("a", prompt, 0)
    order = [(kind, number) for kind in KINDS for number in range(count)]
    random.Random(11).shuffle(order)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind, number in order:
        engine.reset_prefix_cache()  # hits come from lmkv
        is_shared = kind == "own" or (kind == "other" and proxy.policy == NONE)
        prompt = prompts.make(prompt_tokens) if kind == "cold" else sent[number]
        times[kind].append(proxy.seconds("a" if kind == "own" else "b", prompt, stored if is_shared else 0))
    return times


@contextmanager
def _stores(engine: EngineProcess, token_count: int) -> Iterator[None]:
    """Ends once this number of tokens was stored."""
    name = "lmkv:stored_tokens_total"
    before = engine.metrics().get(name, 0.0)
    yield
    deadline = time.monotonic() + STORE_TIMEOUT_SECONDS
    while engine.metrics().get(name, 0.0) < before + token_count:
        if time.monotonic() > deadline:
            raise LmkvError(f"the prompts were not stored within {STORE_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.05)


def _rows(policy: str, times: dict[str, list[float]]) -> Iterator[tuple[str, Row]]:
    cold = times["cold"]
    for kind in KINDS:
        median = statistics.median(times[kind]) * 1000
        row = Row(name=f"{policy}_cold_ttft_ms", value=median, unit="ms")
        if kind != "cold":
            row = compare(f"{policy}_{kind}_ttft_ms", median, "ms", "cold", statistics.median(cold) * 1000)
        yield f"{kind}_ttft", row
        deciles = statistics.quantiles(times[kind], n=10)
        yield f"{kind}_p90", Row(name=f"{policy}_{kind}_ttft_p90_ms", value=deciles[-1] * 1000, unit="ms")
        if kind != "cold":
            guess = guess_rate(cold, times[kind]) * 100
            yield f"{kind}_guess", Row(name=f"{policy}_{kind}_guess", value=guess, unit="%")


def guess_rate(cold: Sequence[float], other: Sequence[float]) -> float:
    """The probability that a random time of `other` is shorter than one of `cold`; equal ones count half."""
    wins = sum((one < reference) + (one == reference) / 2 for one in other for reference in cold)
    return wins / (len(cold) * len(other))


def _z(percent: float, count: int) -> float:
    """By how many standard errors a guess differs from chance, if both samples have this size."""
    return abs(percent / 100 - 0.5) / math.sqrt((2 * count + 1) / (12 * count * count))


BENCHMARK = Benchmark(
    name="salts",
    description="Measures what the TTFT of a prompt reveals of the prompts of another tenant, behind proxies with and "
    "without salts by identity.",
    measure=measure,
    add_arguments=engines.add_dtype_argument,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
