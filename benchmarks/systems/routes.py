"""Two engines with lmkv behind `lmkv proxy --mode route`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support import engines
from benchmarks.systems.chats import ChatPlan
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import CheckedServer, free_port

ENGINE_COUNT = 2


class RoutingProxy(Endpoint, CheckedServer):
    """An `lmkv proxy` in mode `route`, with a client."""

    def __init__(self, folder: Path, policy: str, targets: Sequence[EngineProcess], coordinator_address: str) -> None:
        """Logs to `proxy-POLICY.log` in `folder`."""
        Endpoint.__init__(self, policy, free_port(), targets[0].model_name)
        command = [sys.executable, "-m", "lmkv", "proxy", "--port", str(self.port)]
        command += ["--mode", "route", "--policy", policy, "--coordinator-address", coordinator_address]
        command += [part for engine in targets for part in ("--engines", f"http://127.0.0.1:{engine.port}")]
        CheckedServer.__init__(self, f"proxy-{policy}", command, folder / f"proxy-{policy}.log")

    def is_ready(self) -> bool:
        """Whether an engine is available."""
        return self.answers("/readyz")


@contextmanager
def fleet(plan: ChatPlan) -> Iterator[Cluster]:
    """Two engines, each with half of the plan's memory for chunks, and a coordinator; all are ready."""
    run = plan.run
    settings = engines.PATIENCE | engines.pool_setting(plan.pool_bytes // ENGINE_COUNT)
    with Cluster(run.folder / "fleet", plan.model, logs=run.logs, settings=settings) as cluster:
        for number in range(ENGINE_COUNT):
            cluster.add_engine(f"fleet-{number + 1}", **plan.options)
        cluster.start_engines()
        yield cluster


@contextmanager
def routed(plan: ChatPlan, cluster: Cluster, policy: str) -> Iterator[RoutingProxy]:
    """A proxy with this policy in front of a fleet whose caches are empty."""
    assert cluster.coordinator is not None
    targets = list(cluster.engines.values())
    for engine in targets:
        engine.reset_prefix_cache(external=True)
    with RoutingProxy(plan.run.logs, policy, targets, cluster.coordinator.address) as proxy:
        yield proxy
