"""What the chart renders is run: commands, variables, files, ports, probes and metrics are the processes' own."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmkv.config import ConnectorConfig, NodeConfig, load
from tests.helm.chart import Manifest, find, pods, render
from tests.helm.local_pod import LocalPod, Secrets, fetch
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.whole_nodes import SPEC, mapped, store
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine
from tests.server.webhook.test_server import applied, review_of
from tests.support.certificates import Certificates, issue
from tests.waiting import is_listening, wait_until

COORDINATOR = "demo-lmkv-coordinator-headless.prod.svc"
SECRET = {"fleet": {"cluster-secret": b"one for all"}, "engines": {"api-key": b"key-of-engines"}}
OPEN_FILES = {"ca.crt", "tls.crt", "tokens.yaml"}
"""Files in secrets that hold none."""


class Fleet:
    """Pods of one release on this host."""

    def __init__(self, values: dict[str, Any], folder: Path, free_port: Callable[[], int], secrets: Secrets) -> None:
        ports = {
            "coordinator": {"port": free_port(), "httpPort": free_port()},
            "node": {"p2pPort": free_port(), "transferPort": free_port(), "metricsPort": free_port()},
            "proxy": {"port": free_port()},
        }
        values = {key: {**ports.get(key, {}), **(values.get(key) or {})} for key in {*values, *ports}}
        values |= {"bindAddress": "127.0.0.1", "logFormat": "text", "logLevel": "debug"}
        values["clusterSecret"] = {"existingSecret": "fleet"}
        values["node"] = {"maxLocalCpuSize": 0.0625, "transferChannel": "tcp"} | values["node"]
        self.coordinator_port: int = values["coordinator"]["port"]
        self.manifests: list[Manifest] = render(values)
        self._pods = dict(pods(self.manifests))
        self._folder = folder
        self._secrets = {**SECRET, **secrets}
        self._made: list[LocalPod] = []
        self._stack = ExitStack()

    def pod(self, owner: str, *, name: str, ip: str = "127.0.0.1", **names: str) -> LocalPod:
        """A pod that runs as long as the fleet exists."""
        known = {COORDINATOR: "127.0.0.1", **names}
        pod = LocalPod(
            self._pods[owner], self.manifests, self._folder, name=name, ip=ip, secrets=self._secrets, names=known
        )
        self._stack.callback(pod.stop)
        self._made.append(pod)
        return pod

    def know(self, secrets: Secrets) -> None:
        """Adds secrets that exist once the release is installed."""
        self._secrets = {**self._secrets, **secrets}

    def adopt(self, owner: str, pod: Manifest) -> None:
        """Adds a pod that others create."""
        self._pods[owner] = pod

    def started(self, owner: str, container: str, *, name: str, ip: str = "127.0.0.1", **names: str) -> LocalPod:
        """Such a pod, one container of which runs and is well."""
        pod = self.pod(owner, name=name, ip=ip, **names)
        pod.start(container)
        pod.wait_probed(container)
        if container == "node":  # its probes know of peers alone, and engines' socket comes last
            sockets = pod.volumes["runtime"]
            pod.processes["node"].wait_until(
                lambda: any(map(is_listening, sockets.glob("*/engine.sock"))), "ready for engines", 120.0
            )
        return pod

    def ask(self, *arguments: str) -> Any:
        """The JSON answer that the pod of `helm test` gets, with additional arguments."""
        command = self.pod("Pod/demo-lmkv-test", name="test").command("instances")
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def chunk_counts(self) -> dict[str, int]:
        """The chunks of each instance that the coordinator knows."""
        instances = self.ask("--json")["instances"]
        return {each["instance_id"]: sum(int(tier["chunk_count"]) for tier in each["tiers"]) for each in instances}

    def announced_secrets(self) -> list[str]:
        """Secrets that a process has written into its log, which has all that there is to log."""
        logs = [process.log() for pod in self._made for process in pod.processes.values()]
        assert all(logs), "a process logs nothing"
        hidden = [file for secret in self._secrets.values() for name, file in secret.items() if name not in OPEN_FILES]
        # Of a key its first line, behind the one that says what it is.
        texts = [file.decode().splitlines()[file.startswith(b"-----BEGIN")] for file in hidden]
        return [text for text in texts if any(text in log for log in logs)]

    def close(self) -> None:
        """Ends everything."""
        self._stack.close()


@pytest.fixture
def make_fleet(short_folder: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets of values and secrets, and ends them."""
    made: list[Fleet] = []

    def make(values: dict[str, Any], secrets: Secrets | None = None) -> Fleet:
        made.append(Fleet(values, short_folder, free_port, secrets or {}))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


def secret(certificates: Certificates) -> dict[str, bytes]:
    """A secret as cert-manager makes it."""
    files = {"ca.crt": certificates.ca, "tls.crt": certificates.cert, "tls.key": certificates.key}
    return {name: Path(file).read_bytes() for name, file in files.items()}


SECURITY: dict[str, dict[str, Any]] = {
    "none": {},
    "tls": {"tls": {"enabled": True, "serverSecret": "server-tls"}},
    "mutual-tls": {
        "tls": {
            "enabled": True,
            "mutual": True,
            "serverSecret": "server-tls",
            "clientSecret": "client-tls",
            "peerName": "demo-node",
        }
    },
    "tokens": {"auth": {"tokensSecret": "tokens", "engineSecret": "engine", "readerSecret": "reader"}},
}


def tokens_file(**tokens: str) -> bytes:
    known = [
        {"name": role, "role": role, "sha256": hashlib.sha256(token.encode()).hexdigest()}
        for role, token in tokens.items()
    ]
    return yaml.safe_dump({"tokens": known}).encode()


TOKENS = {"engine": "token-of-nodes", "reader": "token-of-Prometheus", "operator": "token-of-the-drain-hook"}


def all_secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Every secret that `SECURITY` names."""
    certificates = issue(folder, "127.0.0.1", "demo-node")
    return {
        "server-tls": secret(certificates),
        "client-tls": secret(certificates),
        "tokens": {"tokens.yaml": tokens_file(**TOKENS)},
        **{role: {"token": token.encode()} for role, token in TOKENS.items()},
    }


@pytest.mark.parametrize("security", SECURITY)
def test_coordinator_node_and_test_run_as_they_are_rendered(
    make_fleet: Callable[..., Fleet], tmp_path: Path, security: str
) -> None:
    secrets = all_secrets(tmp_path / "tls")
    fleet = make_fleet({"monitoring": {"serviceMonitor": {"enabled": True}}, **SECURITY[security]}, secrets)
    coordinator = fleet.started("StatefulSet/demo-lmkv-coordinator", "coordinator", name="coordinator-0")
    node = fleet.started("DaemonSet/demo-lmkv-node", "node", name="node-0")

    (instance,) = fleet.ask("--json")["instances"]
    assert instance["instance_id"] == "host-1"
    p2p = node.port(node.container("node"), "p2p")
    assert instance["peer_address"] == f"127.0.0.1:{p2p}"

    def scraped(pod: LocalPod, container: str, monitored: Manifest) -> bytes:
        """What Prometheus is answered where a monitor sends it, with what it has it show."""
        context = ssl.create_default_context(cadata=secrets["server-tls"]["ca.crt"].decode())
        context.check_hostname = False  # the certificate has another name than the address: `serverName`
        if "cert" in monitored.get("tlsConfig", {}):
            context.load_cert_chain(tmp_path / "tls" / "cert.pem", tmp_path / "tls" / "key.pem")
        shown = monitored.get("authorization", {}).get("credentials")
        port = pod.port(pod.container(container), monitored["port"])
        url = f"{monitored.get('scheme', 'http')}://127.0.0.1:{port}{monitored['path']}"
        return fetch(url, context, secrets[shown["name"]][shown["key"]].decode() if shown else "")

    monitored = find(fleet.manifests, "ServiceMonitor/demo-lmkv-coordinator")["spec"]["endpoints"][0]
    assert b"lmkv_coordinator_instances" in scraped(coordinator, "coordinator", monitored)
    monitored = find(fleet.manifests, "PodMonitor/demo-lmkv-node")["spec"]["podMetricsEndpoints"][0]
    assert re.search(rb"\nlmkv_node_coordinators_connected{[^}]*} 1.0\n", scraped(node, "node", monitored))

    for pod, container in ((node, "node"), (coordinator, "coordinator")):
        assert not pod.written_elsewhere(container)
        pod.stop()
        assert "Traceback" not in pod.processes[container].log()
        warnings = [line for line in pod.processes[container].log().splitlines() if "WARNING" in line]
        assert all("stopping: SIGTERM" in line for line in warnings), warnings
    assert fleet.announced_secrets() == []


@pytest.mark.parametrize("security", ["none", "mutual-tls", "tokens"])
async def test_engines_find_their_hosts_node_and_the_proxy_its_engines(
    make_fleet: Callable[..., Fleet], tmp_path: Path, security: str
) -> None:
    engine = ScriptedEngine()
    await engine.start()
    groups = [{"name": "llama", "model": MODEL}]
    fleet = make_fleet(
        {
            "engines": {"groups": groups, "port": engine.port, "config": {"chunk_size": 64}},
            "proxy": {"enabled": True, "policy": "kv_aware", "engineApiKey": {"existingSecret": "engines"}},
            **SECURITY[security],
        },
        all_secrets(tmp_path / "tls"),
    )
    try:
        coordinator = await asyncio.to_thread(
            fleet.started, "StatefulSet/demo-lmkv-coordinator", "coordinator", name="coordinator-0"
        )
        await asyncio.to_thread(fleet.started, "DaemonSet/demo-lmkv-node", "node", name="node-0")

        pod = fleet.pod("StatefulSet/demo-lmkv-engine-llama", name="demo-lmkv-engine-llama-0")
        config = load(ConnectorConfig, env=pod.environment("engine"))
        assert not config.notices
        assert (config.chunk_size, config.cluster_secret) == (64, "one for all")
        async with EngineClient(Path(config.node_address)) as attached:
            assert attached.welcomed.instance_id == "host-1"

        name = "demo-lmkv-engine-llama-0.demo-lmkv-engine-llama-headless.prod.svc"
        proxy = await asyncio.to_thread(
            fleet.started, "Deployment/demo-lmkv-proxy", "proxy", name="proxy-0", **{name: "127.0.0.1"}
        )
        port = proxy.port(proxy.container("proxy"), "http")
        scheme = "https" if security == "mutual-tls" else "http"
        served = json.loads(await asyncio.to_thread(fetch, f"{scheme}://127.0.0.1:{port}/v1/models"))
        assert MODEL in [model["id"] for model in served["data"]]
        assert not proxy.written_elsewhere("proxy")

        if security == "tokens":
            port = coordinator.port(coordinator.container("coordinator"), "http")
            for token, code in (("token-of-a-stranger", 401), (TOKENS["reader"], 403)):
                with pytest.raises(urllib.error.HTTPError, match=str(code)):
                    await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/move", None, token)
            assert "token-of-a-stranger" not in coordinator.processes["coordinator"].log()
        assert fleet.announced_secrets() == []
    finally:
        await engine.stop()


def test_sidecars_are_instances_of_their_pods_names_with_volumes_and_roles(make_fleet: Callable[..., Fleet]) -> None:
    groups = [{"name": role, "role": role, "model": MODEL} for role in ("prefill", "decode")]
    node = {
        "mode": "sidecar",
        "maxLocalDiskSize": 0.125,
        "diskVolume": {"emptyDir": {}},
    }
    fleet = make_fleet({"node": node, "engines": {"groups": groups}})
    fleet.started("StatefulSet/demo-lmkv-coordinator", "coordinator", name="coordinator-0")
    for number, role in enumerate(("prefill", "decode")):
        name = f"demo-lmkv-engine-{role}"
        pod = fleet.started(f"StatefulSet/{name}", "node", name=f"{name}-0", ip=f"127.0.0.{2 + number}")
        assert not pod.written_elsewhere("node")
        config = load(ConnectorConfig, env=pod.environment("engine"))
        assert Path(config.node_address).is_socket()
    instances = fleet.ask("--json")["instances"]
    assert {instance["instance_id"]: instance["peer_address"].partition(":")[0] for instance in instances} == {
        "demo-lmkv-engine-prefill-0": "127.0.0.2",
        "demo-lmkv-engine-decode-0": "127.0.0.3",
    }
    assert all(len(instance["tiers"]) == 2 for instance in instances)


DRAINED = "demo-lmkv-engine-llama-0"
GROUPS = [{"name": "llama", "model": MODEL, "replicas": 2}]


@pytest.mark.parametrize("security", [["none"], ["mutual-tls", "tokens"]], ids="-".join)
async def test_a_pod_that_stops_first_copies_what_only_its_node_holds(
    make_fleet: Callable[..., Fleet], tmp_path: Path, security: list[str]
) -> None:
    values = {key: value for name in security for key, value in SECURITY[name].items()}
    if "auth" in values:
        values["auth"] = {**values["auth"], "operatorSecret": "operator"}
    node = {"mode": "sidecar", "drain": {"enabled": True, "evict": True}}
    fleet = make_fleet({"node": node, "engines": {"groups": GROUPS}, **values}, all_secrets(tmp_path / "tls"))
    await asyncio.to_thread(fleet.started, "StatefulSet/demo-lmkv-coordinator", "coordinator", name="coordinator-0")
    names = (DRAINED, "demo-lmkv-engine-llama-1")
    owner = "StatefulSet/demo-lmkv-engine-llama"
    drained, other = [
        await asyncio.to_thread(fleet.started, owner, "node", name=name, ip=f"127.0.0.{2 + number}")
        for number, name in enumerate(names)
    ]
    addresses = [Path(load(ConnectorConfig, env=pod.environment("engine")).node_address) for pod in (drained, other)]
    async with EngineClient(addresses[0], spec=SPEC) as engine, EngineClient(addresses[1], spec=SPEC) as elsewhere:
        with mapped(engine) as worker:
            await store(engine, worker.pool, 0, 1)
        await asyncio.to_thread(wait_until, lambda: fleet.chunk_counts() == {DRAINED: 2, names[1]: 0})
        done = await asyncio.to_thread(drained.run_pre_stop, "node")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 chunks" in done.stdout
        assert f"safe to stop: all chunks of {DRAINED} are held elsewhere" in done.stdout
        await asyncio.to_thread(drained.stop)
        found = await elsewhere.lookup("1", chunk_keys(0, 1))
        assert len(found.own) == 2
    assert fleet.announced_secrets() == []


def test_a_coordinator_that_does_not_respond_delays_no_stop(make_fleet: Callable[..., Fleet]) -> None:
    node = {"mode": "sidecar", "drain": {"enabled": True, "timeoutSeconds": 1}}
    fleet = make_fleet({"node": node, "engines": {"groups": GROUPS}})
    pod = fleet.pod("StatefulSet/demo-lmkv-engine-llama", name=DRAINED)
    with socket.create_server(("127.0.0.1", fleet.coordinator_port)):  # accepts connections and nothing else
        pod.command("node")  # moves the paths in its configuration
        done = pod.run_pre_stop("node")
    assert done.returncode == 124, done.stdout + done.stderr  # of `timeout`


OWN: Manifest = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "own-0", "namespace": "models", "labels": {"lmkv/inject": "prefill"}},
    "spec": {
        "containers": [{"name": "main", "image": "vllm:1", "command": ["vllm", "serve", MODEL]}],
        "terminationGracePeriodSeconds": 30,
    },
}


@pytest.mark.parametrize("mode", ["daemonSet", "sidecar"])
def test_a_pod_that_the_webhook_changes_finds_a_node(
    make_fleet: Callable[..., Fleet], free_port: Callable[[], int], mode: str
) -> None:
    """From the AdmissionReview over HTTPS, with the certificate that Helm made, to the engine's socket."""
    role = {"daemonSet": "both", "sidecar": "prefill"}[mode]
    node = {"mode": mode, "config": {"nixl_backends": ["UCX", "POSIX"], "verify_transfers": False}}
    engines = {"config": {"chunk_size": 64, "min_retrieve_tokens": 128}}
    fleet = make_fleet({"node": node, "engines": engines, "webhook": {"enabled": True, "port": free_port()}})
    made = find(fleet.manifests, "Secret/demo-lmkv-webhook-tls")["data"]
    fleet.know({"demo-lmkv-webhook-tls": {name: base64.b64decode(text) for name, text in made.items()}})
    webhook = fleet.started("Deployment/demo-lmkv-webhook", "webhook", name="webhook-0")
    assert not webhook.written_elsewhere("webhook")

    (configured,) = find(fleet.manifests, "MutatingWebhookConfiguration/demo-lmkv-webhook-prod")["webhooks"]
    assert configured["failurePolicy"] == "Ignore"
    called = configured["clientConfig"]["service"]
    service = find(fleet.manifests, f"Service/{called['name']}")["spec"]
    (port,) = (each["targetPort"] for each in service["ports"] if each["port"] == called["port"])
    created = deepcopy(OWN)
    created["metadata"]["labels"]["lmkv/inject"] = role
    context = ssl.create_default_context(cadata=base64.b64decode(configured["clientConfig"]["caBundle"]).decode())
    with (
        socket.create_connection(("127.0.0.1", webhook.port(webhook.container("webhook"), port)), 10) as plain,
        context.wrap_socket(plain, server_hostname=f"{called['name']}.{called['namespace']}.svc") as connection,
    ):
        client = http.client.HTTPConnection("webhook")
        client.sock = connection
        client.request("POST", called["path"], json.dumps(review_of(created)))
        response = json.loads(client.getresponse().read())["response"]
    assert response["allowed"]
    assert "warnings" not in response
    changed = applied(created, response)
    words = [*changed["spec"]["containers"][0]["command"], *changed["spec"]["containers"][0]["args"]]
    assert words[:3] == ["vllm", "serve", MODEL]
    assert json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector"] == "LMKVConnector"

    fleet.started("StatefulSet/demo-lmkv-coordinator", "coordinator", name="coordinator-0")
    fleet.adopt("Pod/own-0", changed)
    if mode == "sidecar":
        pod = fleet.started("Pod/own-0", "lmkv-node", name="own-0")
        assert not pod.written_elsewhere("lmkv-node")
        file = yaml.safe_load(find(fleet.manifests, "ConfigMap/demo-lmkv-node")["data"]["lmkv.yaml"])
        variables = {name: text for name, text in pod.environment("lmkv-node").items() if name.startswith("LMKV_")}
        config = load(NodeConfig, env=variables)
        kept = {"local_disk", "pool_path", "runtime_dir", "coordinator_address"}  # paths and names of this host
        for name in file.keys() - kept:
            assert getattr(config, name) == getattr(NodeConfig(**{name: file[name]}), name), name
        assert config.pd_role == "sender"
    else:
        fleet.started("DaemonSet/demo-lmkv-node", "node", name="node-0")
        pod = fleet.pod("Pod/own-0", name="own-0")
    config_of_engine = load(ConnectorConfig, env=pod.environment("main"))
    assert not config_of_engine.notices
    assert (config_of_engine.chunk_size, config_of_engine.cluster_secret) == (64, "one for all")
    assert Path(config_of_engine.node_address).is_socket()
    (instance,) = fleet.ask("--json")["instances"]
    assert instance["instance_id"] == {"daemonSet": "host-1", "sidecar": "own-0"}[mode]
    assert fleet.announced_secrets() == []
