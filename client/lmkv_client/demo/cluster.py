"""A coordinator and engines that use it, on this host: for the demo, the tests and the benchmarks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lmkv.errors import LmkvError
from lmkv.rpc.endpoints import CHANNEL_OPTIONS
from lmkv.rpc.error_status import from_rpc_error
from lmkv.rpc.messages import by_tokens
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc, registry_service_pb2, registry_service_pb2_grpc
from lmkv_client.demo.engine import EngineOptions, EngineProcess
from lmkv_client.demo.process import POLL_SECONDS, CheckedServer, end_processes, free_port, pids_with_environment
from lmkv_client.demo.sglang_engine import SglangEngine

RPC_TIMEOUT_SECONDS = 60.0
"""Deadline of an RPC; a busy host may respond only after seconds."""
HEALTH_TIMEOUT_SECONDS = 2.0
"""Deadline of one health check."""


class CoordinatorProcess(CheckedServer):
    """An `lmkv coordinator` process with a synchronous client."""

    ready_timeout_seconds = 120.0

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Logs to `coordinator.log` in `folder`. `port` 0 selects a free port, which restarts keep."""
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.http_address = f"127.0.0.1:{free_port()}"
        ports = ["--port", str(self.port), "--http-port", self.http_address.rpartition(":")[2]]
        command = [sys.executable, "-m", "lmkv", "coordinator", *ports, *arguments]
        super().__init__("coordinator", command, folder / "coordinator.log", environment)

    def holders(self, tokens: Sequence[int]) -> dict[str, int]:
        """Number of prompt tokens that each instance holds, by instance id. Raises the coordinator's error."""
        request = cache_service_pb2.LookupRequest(prompt=by_tokens(tokens))
        try:
            with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                stub = cache_service_pb2_grpc.CacheServiceStub(channel)
                response = stub.Lookup(request, timeout=RPC_TIMEOUT_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return {holder.instance_id: holder.matched_token_count for holder in response.holders}

    def instances(self) -> dict[str, registry_service_pb2.Instance]:
        """The registered instances by id, at most 1000. Raises the coordinator's error."""
        request = registry_service_pb2.ListInstancesRequest(page_size=1000)
        try:
            with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                stub = registry_service_pb2_grpc.RegistryServiceStub(channel)
                response = stub.ListInstances(request, timeout=RPC_TIMEOUT_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return {instance.instance_id: instance for instance in response.instances}

    def wait_for_holder(self, tokens: Sequence[int], instance_id: str, token_count: int, timeout_seconds: float) -> int:
        """Waits until an instance holds at least `token_count` tokens of a prompt; returns the number it holds.

        An engine stores chunks after its response. Raises `LmkvError` on timeout.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            held = self._held(tokens, instance_id)
            if held >= token_count:
                return held
            if time.monotonic() > deadline:
                raise LmkvError(
                    f"{instance_id} holds {held} of {len(tokens)} tokens, not {token_count}, "
                    f"{timeout_seconds:.0f} s after it computed them"
                )
            time.sleep(POLL_SECONDS)

    def _held(self, tokens: Sequence[int], instance_id: str) -> int:
        try:
            return self.holders(tokens).get(instance_id, 0)
        except LmkvError as error:
            if error.code == "NOT_FOUND":  # no engine has registered its model yet
                return 0
            raise

    def is_ready(self) -> bool:
        """Whether its health check reports SERVING."""
        request = health_pb2.HealthCheckRequest(service="lmkv.v1.CacheService")
        try:
            with grpc.insecure_channel(self.address) as channel:
                response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_TIMEOUT_SECONDS)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class Cluster:
    """A coordinator and engines with one runtime folder. Exiting it ends all their processes.

    Entering it starts the coordinator, if there is one. The caller adds and starts engines.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        logs: Path | None = None,
        coordinator: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are `LMKV_...` variables for every engine.

        `folder` has the sockets, and the logs unless `logs` is set. Its path must be short: the path of a socket is
        limited to 100 bytes.
        """
        self.model = model
        self.logs = logs or folder / "logs"
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.coordinator = CoordinatorProcess(self.logs) if coordinator else None
        self.settings = dict(settings or {})
        self.engines: dict[str, EngineProcess] = {}
        self.sglang_engines: dict[str, SglangEngine] = {}

    def add_engine(
        self,
        name: str,
        settings: Mapping[str, str] | None = None,
        *,
        model: Path | None = None,
        **options: Unpack[EngineOptions],
    ) -> EngineProcess:
        """Adds an engine, not started, whose node is the instance `name`.

        `settings` override the cluster's settings, and `model` replaces the cluster's model.
        """
        own = self._environment(name) | dict(settings or {})
        options["environment"] = own | dict(options.get("environment", {}))
        engine = EngineProcess(model or self.model, self.logs, name=name, **options)
        self.engines[name] = engine
        return engine

    def add_sglang_engine(self, name: str, **options: Any) -> SglangEngine:
        """The same for an SGLang server; `options` are passed to `SglangEngine`."""
        self.sglang_engines[name] = SglangEngine(
            self.model, self.logs, name=name, environment=self._environment(name), **options
        )
        return self.sglang_engines[name]

    def _environment(self, name: str) -> dict[str, str]:
        own = {"LMKV_INSTANCE_ID": name, "LMKV_RUNTIME_DIR": str(self.runtime_dir)}
        if self.coordinator:
            own["LMKV_COORDINATOR_ADDRESS"] = self.coordinator.address
        return own | self.settings

    @property
    def _all(self) -> list[EngineProcess | SglangEngine]:
        return [*self.engines.values(), *self.sglang_engines.values()]

    def start_engines(self, ready: Callable[[EngineProcess | SglangEngine], None] = lambda _: None) -> None:
        """Starts all stopped engines concurrently and waits for them; calls `ready` with each."""
        waiting = [engine for engine in self._all if not engine.alive]
        for engine in waiting:
            engine.start()
        for engine in waiting:
            engine.wait_ready()
            ready(engine)

    def node_pids(self, instance_id: str = "") -> list[int]:
        """Process ids of running nodes that engines started: of one instance, or of all."""
        variables = {"LMKV_RUNTIME_DIR": str(self.runtime_dir)}
        if instance_id:
            variables["LMKV_INSTANCE_ID"] = instance_id
        return pids_with_environment(variables, "node")

    def kill_node(self, instance_id: str) -> None:
        """Kills the node of an instance with SIGKILL."""
        for pid in self.node_pids(instance_id):
            os.kill(pid, 9)

    def stop(self) -> None:
        """Stops engines, nodes and the coordinator, in any state. Idempotent."""
        for engine in self._all:
            engine.request_stop()  # concurrently: each takes seconds
        for engine in self._all:
            engine.stop()
        end_processes(self.node_pids())
        if self.coordinator:
            self.coordinator.stop()

    def __enter__(self) -> Self:
        try:
            if self.coordinator:
                self.coordinator.start()
                self.coordinator.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
