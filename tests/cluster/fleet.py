"""A release of the chart as pods, with the calls by which its checks use it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Completion, Endpoint
from lmkv_client.demo.engine import _ENVIRONMENT as ENGINE_ENVIRONMENT
from lmkv_client.demo.model import make_model
from tests.cluster.cluster import Change, Cluster, unchanged
from tests.cluster.kubelet import RunningPod
from tests.cluster.translation import Manifest, Pod, find, pods_of, secret_data

MODEL = "tiny"
MODELS = "/models"
CACHE = "cache"
BUSY_SECONDS = 2.0
"""Timeouts of lookups and loads: pods that wait for a processor miss nothing."""
ENGINES = "StatefulSet/demo-lmkv-engine-"
COORDINATOR = "StatefulSet/demo-lmkv-coordinator"
PROXY = "Deployment/demo-lmkv-proxy"
NODES = "DaemonSet/demo-lmkv-node"


def engine_values(registry: str) -> dict[str, Any]:
    """Values of the smallest engines on CPUs, with a model of each host's folder."""
    # A restarted engine finds in its host's cache what vLLM else learns of the model in a process of its own.
    variables = {**ENGINE_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "0", "VLLM_CACHE_ROOT": f"{MODELS}/{CACHE}"}
    return {
        "image": {"registry": registry, "pullPolicy": "Never"},
        "engines": {
            "image": {"repository": "lmkv-vllm-cpu"},
            "args": [
                *("--served-model-name", MODEL, "--dtype", "float32", "--block-size", "128"),
                *("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--max-num-seqs", "4"),
                *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", "--enable-prompt-tokens-details"),
            ],
            "resources": {"limits": {"nvidia.com/gpu": None, "memory": "3Gi"}},
            "sharedMemory": 0.125,
            "config": {"lookup_timeout": BUSY_SECONDS, "load_timeout": BUSY_SECONDS},
            "startTimeout": 600,
            "podSpec": {
                "containers": [{"name": "engine", "startupProbe": {"periodSeconds": 1, "failureThreshold": 600}}]
            },
            "stopTimeout": 10,
            "modelVolume": {"hostPath": {"path": MODELS}},
            "extraEnv": [
                {"name": name, "value": text} for name, text in variables.items() if not name.startswith("VLLM_CPU_KV")
            ],
        },
        "node": {
            "config": {"coordinator_timeout": BUSY_SECONDS},
            "maxLocalCpuSize": 0.125,
            "memoryOverhead": 0.5,
            "resources": {"requests": {"cpu": "100m"}},
        },
        "proxy": {"config": {"lookup_timeout": BUSY_SECONDS}},
    }


class Fleet:
    """The pods of one case."""

    def __init__(self, cluster: Cluster, other_channel: Sequence[Manifest] = ()) -> None:
        """`other_channel`: the manifests with the other channel between pods."""
        self.cluster = cluster
        self._other_channel = other_channel
        self._tls = client_context(cluster.manifests, cluster.places.disk)
        self._token = reader_token(cluster.manifests)

    async def start(self, change: Change = unchanged) -> None:
        """Gives each host the model and starts all pods, with what differs from the manifests.

        Hosts have what vLLM has cached of the model in earlier cases: it compares hashes before it uses that.
        """
        kept = logs_folder(".cache")
        folders = [self.cluster.places.of_host(host, MODELS) for host in self.cluster.hosts]
        for folder in folders:
            make_model(folder / MODEL)
            if kept.is_dir():
                shutil.copytree(kept, folder / CACHE)
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, 10001, 10001)
        await self.cluster.start_all(change)
        for folder in folders:
            if (folder / CACHE).is_dir():
                shutil.copytree(folder / CACHE, kept, dirs_exist_ok=True)

    def engines(self) -> list[RunningPod]:
        """All engines, in order of their names."""
        found = [each for each in self.cluster.running.values() if each.pod.owner.startswith(ENGINES)]
        return sorted(found, key=lambda each: each.pod.name)

    def producers(self) -> list[RunningPod]:
        """The engines that store."""
        return [each for each in self.engines() if "kv_consumer" not in engine_command(each.pod)]

    def consumers(self) -> list[RunningPod]:
        """The engines that load."""
        return [each for each in self.engines() if "kv_producer" not in engine_command(each.pod)]

    def node_of(self, engine: RunningPod) -> RunningPod:
        """The pod with the node of an engine: its own, or its host's."""
        if has_node(engine):
            return engine
        (found,) = (each for each in self.cluster.of(NODES) if each.pod.host == engine.pod.host)
        return found

    def instance_of(self, engine: RunningPod) -> str:
        """The instance of an engine's node."""
        return engine.pod.name if has_node(engine) else engine.pod.host

    @property
    def transfer_channel(self) -> str:
        """What the nodes are configured with."""
        return configured_channel(self.cluster.manifests)

    async def change_channel(self) -> None:
        """Gives the cluster the manifests with the other channel between pods; nodes use it once they are replaced."""
        assert self._other_channel, "the case has no other channel"
        await self.cluster.apply(self._other_channel)

    async def channel_of(self, node: RunningPod, source: str) -> str:
        """The channel by which a node reads from an instance since their last connection, by its log; empty: none."""
        channels = re.findall(rf"reading from {re.escape(source)}:\S+ by channel (\w+)", (await node.logs())["node"])
        return channels[-1] if channels else ""

    async def complete(self, running: RunningPod, prompt: str, **extra: object) -> Completion:
        """A completion by the API of a pod: of an engine, or of the proxy."""
        endpoint = self.endpoint(running)
        return await asyncio.to_thread(endpoint.complete, prompt, 8, extra=extra or None)

    async def tokens(self, engine: RunningPod, text: str) -> list[int]:
        body = {"model": MODEL, "prompt": text}
        answer = await asyncio.to_thread(self.endpoint(engine)._request, "POST", "/tokenize", body)
        return list(json.loads(answer)["tokens"])

    def endpoint(self, running: RunningPod) -> Endpoint:
        """The API of a pod; that of engines has no TLS."""
        (port,) = (
            port["containerPort"]
            for container in running.pod.containers
            for port in container["ports"]
            if port["name"] == "http"
        )
        tls = self._tls if running.pod.owner == PROXY else None
        return Endpoint(running.pod.name, port, MODEL, running.address, tls=tls)

    async def forget(self, running: RunningPod) -> None:
        """Empties the prefix cache of an engine, so that hits come from lmkv."""
        endpoint = self.endpoint(running)

        async def reset() -> bool:
            answer = await asyncio.to_thread(endpoint._request, "POST", "/reset_prefix_cache")
            return bool(json.loads(answer)["success"])

        await self.cluster.wait_for(reset, f"{running.pod.name} empties its prefix cache")

    async def metrics(self, running: RunningPod, port: int = 9202) -> Mapping[str, float]:
        """The metrics of a node."""
        endpoint = Endpoint(running.pod.name, port, MODEL, running.address, tls=self._tls, token=self._token)
        return await asyncio.to_thread(endpoint.metrics)

    async def instances(self) -> dict[str, int]:
        """The number of chunks of each instance, as the pod of `helm test` sees it. Raises `LmkvError`."""
        return {instance: sum(tiers.values()) for instance, tiers in (await self.tiers()).items()}

    async def tiers(self) -> dict[str, dict[str, int]]:
        """The number of chunks in each tier of each instance. Raises `LmkvError`."""
        found = json.loads(await self._lmkv(self._test_pod(), "instances", "--json"))["instances"]
        return {
            each["instance_id"]: {tier["tier"]: int(tier["chunk_count"]) for tier in each["tiers"]} for each in found
        }

    async def holders(self, chunks: list[str]) -> dict[str, int]:
        """The number of these chunks that each instance holds. Raises `LmkvError`."""
        found = json.loads(await self._lmkv(self._test_pod(), "lookup", "--json", *chunks))["holders"]
        return {each["instance_id"]: int(each["matched_chunk_count"]) for each in found}

    async def order(self, *words: str) -> None:
        """Runs a command of `lmkv` as an operator. Raises `LmkvError` if it is not done completely."""
        pod = self._test_pod()
        volumes = [
            {**each, "secret": {**each["secret"], "secretName": "operator"}} if each["name"] == "token" else each
            for each in pod.spec["volumes"]
        ]
        await self._lmkv(dataclasses.replace(pod, spec={**pod.spec, "volumes": volumes}), *words)

    def _test_pod(self) -> Pod:
        (pod,) = pods_of(find(self.cluster.manifests, "Pod", "demo-lmkv-test"), self.cluster.hosts)
        return pod

    async def _lmkv(self, pod: Pod, verb: str, *words: str) -> str:
        """What `lmkv` prints as JSON or text in a pod like that of `helm test`. Raises `LmkvError`."""
        (container,) = pod.containers
        program, _, *options = container["command"]
        command = [program, verb, *options]
        spec: Manifest = {**pod.spec, "containers": [{**container, "command": command, "args": list(words)}]}
        code, output = await self.cluster.run_to_end(dataclasses.replace(pod, spec=spec))
        if code:
            raise LmkvError(f"lmkv {verb} ended with exit code {code}: {output}")
        return output[output.find("{") :] if "--json" in words else output


def configured_channel(manifests: Sequence[Manifest]) -> str:
    config = yaml.safe_load(find(manifests, "ConfigMap", "demo-lmkv-node")["data"]["lmkv.yaml"])
    return str(config["transfer_channel"])


def engine_command(pod: Pod) -> str:
    """The command line of an engine."""
    (container,) = pod.containers
    return " ".join(container["command"])


def has_node(running: RunningPod) -> bool:
    """Whether a node runs in the pod."""
    return "node" in running.containers


def client_context(manifests: Sequence[Manifest], folder: Path) -> ssl.SSLContext | None:
    """TLS with the certificate of the fleet's clients; None: the fleet has no TLS. Pods are asked by their address."""
    try:
        files = secret_data(find(manifests, "Secret", "demo-lmkv-client-tls"))
    except LookupError:
        return None
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(files[name])
    context = ssl.create_default_context(cadata=files["ca.crt"].decode())
    context.check_hostname = False
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def reader_token(manifests: Sequence[Manifest]) -> str:
    """The token that reads metrics; empty: the fleet has no tokens."""
    try:
        return secret_data(find(manifests, "Secret", "reader"))["token"].decode()
    except LookupError:
        return ""


def prompt(name: str, length: int = 2000) -> str:
    """A prompt that no other name has: one token for each byte."""
    return " ".join(f"{name}-{index}" for index in range(length))[:length]


def logs_folder(case: str) -> Path:
    """Where the output of a case's pods is kept."""
    return Path("build") / "cluster" / case
