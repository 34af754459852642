"""Which values restart the pods that hold caches, and what nodes find again when their pods are replaced."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lmkv_kernels import checksum
from tests.helm.chart import Manifest, find, pods, render
from tests.helm.local_pod import LocalPod
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.whole_nodes import SPEC, mapped, store
from tests.waiting import is_listening

Values = Mapping[str, Any]
GROUPS = [{"name": "llama", "model": "m"}]
OTLP = "http://otel-collector:4317"


def holders(values: Values) -> dict[str, str]:
    """The pod templates that run nodes and engines, as text by owner."""
    found = {
        name: json.dumps(pod, sort_keys=True)
        for name, pod in pods(render({"engines": {"groups": GROUPS}, **values}))
        if name.startswith(("DaemonSet/demo-lmkv-node", "StatefulSet/demo-lmkv-engine"))
    }
    assert found
    return found


@pytest.mark.parametrize("mode", ["daemonSet", "sidecar"])
@pytest.mark.parametrize(
    "changed",
    [
        {"coordinator": {"replicas": 3}},
        {"coordinator": {"layoutMap": {"existingSecret": "m"}, "autoscaling": {"enabled": True}}},
        {"coordinator": {"config": {"lease_ttl": "7s"}, "resources": {"limits": {"memory": "9Gi"}}, "httpPort": 9301}},
        {"logLevel": "debug"},
        {"logFormat": "text"},
        {"otlpEndpoint": OTLP},
        {"proxy": {"enabled": True, "replicas": 2, "config": {"request_timeout": 60}}},
        {"engines": {"groups": [GROUPS[0] | {"replicas": 5}]}},
        {"monitoring": {"serviceMonitor": {"enabled": True}, "dashboard": {"enabled": True}}},
        {"networkPolicy": {"enabled": True}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_that_concern_no_cache_leave_its_pods_as_they_are(mode: str, changed: Values) -> None:
    assert holders({"node": {"mode": mode}, **changed}) == holders({"node": {"mode": mode}})


def test_settings_restart_the_pods_whose_processes_read_them_and_no_others() -> None:
    before = holders({})
    after = holders({"node": {"config": {"eviction_policy": "arc"}}})
    assert {name for name in before if before[name] != after[name]} == {"DaemonSet/demo-lmkv-node"}
    after = holders({"engines": {"groups": GROUPS, "config": {"chunk_size": 64}}})
    assert {name for name in before if before[name] != after[name]} == {"StatefulSet/demo-lmkv-engine-llama"}
    sidecar = {"mode": "sidecar"}
    assert holders({"node": sidecar}) != holders({"node": {**sidecar, "config": {"eviction_policy": "arc"}}})


def test_changed_logging_keys_and_endpoints_reach_the_processes_all_the_same(short_folder: Path) -> None:
    manifests = render({"engines": {"groups": GROUPS}, "logLevel": "debug", "otlpEndpoint": OTLP})
    for process in ("coordinator", "node"):
        text = find(manifests, f"ConfigMap/demo-lmkv-{process}")["data"]["lmkv.yaml"]
        assert yaml.safe_load(text)["log_level"] == "debug"
    for owner, container in (
        ("StatefulSet/demo-lmkv-coordinator", "coordinator"),
        ("DaemonSet/demo-lmkv-node", "node"),
        ("StatefulSet/demo-lmkv-engine-llama", "engine"),
    ):
        assert endpoint(manifests, owner, container, short_folder) == OTLP
        own = {"extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://own:4317"}]}
        values = {"coordinator": own, "node": own, "engines": {"groups": GROUPS, **own}, "otlpEndpoint": OTLP}
        assert endpoint(render(values), owner, container, short_folder) == "http://own:4317"


def endpoint(manifests: list[Manifest], owner: str, container: str, folder: Path) -> str:
    pod = LocalPod(dict(pods(manifests))[owner], manifests, folder, name=container)
    try:
        return pod.environment(container)["OTEL_EXPORTER_OTLP_ENDPOINT"]
    finally:
        pod.stop()


class Host:
    """One host on which pods of one owner replace each other."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder = folder
        self._ports = {"p2pPort": free_port(), "transferPort": free_port(), "metricsPort": free_port()}
        self._nothing = free_port()
        self.made: list[LocalPod] = []

    def pod(self, node: Values, owner: str = "DaemonSet/demo-lmkv-node", name: str = "") -> LocalPod:
        small = {"maxLocalCpuSize": 0.0625, "transferChannel": "tcp"}
        values = {
            "node": {**small, **self._ports, **node},
            "coordinator": {"port": self._nothing},
            "engines": {"groups": GROUPS},
            "logFormat": "text",
        }
        manifests = render(values)
        names = {"demo-lmkv-coordinator-headless.prod.svc": "127.0.0.1"}
        name = name or f"node-{len(self.made)}"
        self.made.append(LocalPod(dict(pods(manifests))[owner], manifests, self.folder, name=name, names=names))
        return self.made[-1]


@pytest.fixture
def host(short_folder: Path, free_port: Callable[[], int]) -> Iterator[Host]:
    host = Host(short_folder, free_port)
    yield host
    for pod in host.made:
        pod.stop()


async def use(pod: LocalPod, instance: str, *, stored: bool) -> int:
    """Runs the pod's node; how many of two chunks it finds, after storing them if that is asked for."""
    pod.start("node")
    socket = pod.volumes["runtime"] / instance / "engine.sock"
    try:
        await asyncio.to_thread(
            pod.processes["node"].wait_until, partial(is_listening, socket), "ready for engines", 120.0
        )
        async with EngineClient(socket, spec=SPEC) as engine:
            with mapped(engine) as worker:
                if stored:
                    await store(engine, worker.pool, 0, 1)
            deadline = time.monotonic() + 60.0
            while True:  # chunks of an earlier life are found once they are verified
                found = (await engine.lookup("1", chunk_keys(0, 1))).own
                if len(found) == 2 or time.monotonic() > deadline or not (stored or kept(pod)):
                    break
                await engine.release("1")
                await asyncio.sleep(0.05)
            with mapped(engine) as worker:
                for number, chunk in enumerate(found):
                    extent = chunk.extent
                    words = np.frombuffer(worker.pool.buffer, np.uint64, SPEC.chunk_bytes // 8, extent.offset)
                    assert (words == number).all(), "wrong bytes"
                    assert checksum(worker.pool.buffer, extent.offset, SPEC.chunk_bytes)
                    del words
            return len(found)
    finally:
        await asyncio.to_thread(pod.processes["node"].stop)


def kept(pod: LocalPod) -> list[Path]:
    """Files of pools that the pod's volumes hold."""
    return [file for volume in pod.volumes.values() for file in volume.glob("*.pool")]


async def test_by_default_chunks_outlive_a_nodes_pod_that_is_replaced(host: Host) -> None:
    assert await use(host.pod({}), "host-1", stored=True) == 2
    replacement = host.pod({})
    assert [file.name for file in kept(replacement)] == ["host-1.pool"]
    assert kept(replacement)[0].stat().st_mode & 0o077 == 0
    assert await use(replacement, "host-1", stored=False) == 2


async def test_a_sidecars_chunks_outlive_its_container(host: Host) -> None:
    name = "demo-lmkv-engine-llama-0"
    pod = host.pod({"mode": "sidecar"}, "StatefulSet/demo-lmkv-engine-llama", name)
    assert await use(pod, name, stored=True) == 2
    assert await use(pod, name, stored=False) == 2


async def test_without_persistence_nothing_outlives_a_pod_and_what_was_kept_is_removed(host: Host) -> None:
    assert await use(host.pod({}), "host-1", stored=True) == 2
    pod = host.pod({"persistPool": False})
    (file,) = kept(pod)
    drop = pod.container("drop-pool")
    assert drop["volumeMounts"] == [{"name": "kept-pool", "mountPath": "/pool"}]
    command = [pod.here(drop, word) for word in drop["command"]]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=150)
    assert not file.exists()
    assert await use(pod, "host-1", stored=True) == 2
    assert not kept(pod)
    assert await use(host.pod({"persistPool": False}), "host-1", stored=False) == 0


def test_folders_of_hosts_are_given_to_the_nodes_user(host: Host) -> None:
    """Of a folder of the host that Kubernetes has created, as root's."""
    pods_with_folders: list[tuple[Values, str, Manifest]] = []
    for node, owner in (
        ({}, "DaemonSet/demo-lmkv-node"),
        ({"persistPool": False}, "DaemonSet/demo-lmkv-node"),
        ({"mode": "sidecar", "poolVolume": {"hostPath": {"path": "/p"}}}, "StatefulSet/demo-lmkv-engine-llama"),
    ):
        pod = host.pod(node, owner)
        container = pod.container("own-folders")
        pods_with_folders.append((node, owner, container))
        if os.geteuid() == 0:
            program, user, *folders = (pod.here(container, word) for word in container["command"])
            subprocess.run([program, user, *folders], check=True, timeout=150)
            assert {(Path(folder).stat().st_uid, Path(folder).stat().st_gid) for folder in folders} == {(10001, 10001)}
    mounts = [{mount["name"] for mount in container["volumeMounts"]} for _, _, container in pods_with_folders]
    assert mounts == [{"runtime", "pool"}, {"runtime", "kept-pool"}, {"pool"}]
