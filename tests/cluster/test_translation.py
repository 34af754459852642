"""The translation of rendered manifests to pods, folders, files and arguments."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleet import engine_values
from tests.cluster.probes import Probe, probe
from tests.cluster.translation import (
    File,
    Manifest,
    Places,
    Pod,
    Unsupported,
    bytes_of,
    container_arguments,
    cpus_of,
    environment,
    expand,
    find,
    folders,
    pods,
    security_arguments,
)
from tests.helm.chart import NAMES, manifests_of, render

HOSTS = ("host-1", "host-2")
PLACES = Places(disk=Path("/disk"), memory=Path("/memory"))
REFUSED = {
    "anonymous-pool": "",
    "customized": r"demo-lmkv-(coordinator|engine-llama|engine-qwen)-0: runtimeClassName",
    "default": "",
    "encryption": "",
    "tls": "",
    "webhook": "",
    "webhook-sidecar": "",
    "engines": r"demo-lmkv-engine-(llama|qwen)-0: volume models: persistentVolumeClaim: .*",
    "shared-folder": r"demo-lmkv-node-host-1: volume remote: persistentVolumeClaim: .*",
    "names": r"kv-coordinator-0: volume models: persistentVolumeClaim: .*",
    "hosts": r"demo-lmkv-engine-llama-0: runtimeClassName|demo-lmkv-engine-[a-z-]+: LeaderWorkerSet",
    "rdma": "demo-lmkv-node-host-1: dnsPolicy, hostNetwork",
    "warm-restart": "demo-lmkv-engine-llama-0: no volume pool: claims of templates are not made",
}
"""What Podman cannot run of the chart's cases; of all others only engines, which have GPUs."""
KEYS = ("token", "tokens.yaml", "ca.crt", "tls.crt", "tls.key", "api-key", "url", "cluster-secret")


def secret(name: str, **content: str) -> Manifest:
    data = {key: base64.b64encode(text.encode()).decode() for key, text in content.items()}
    return {"kind": "Secret", "metadata": {"name": name}, "data": data}


def fleet(**values: Any) -> list[Manifest]:
    """What the chart renders with small engines."""
    return render(engine_values("registry") | values)


def translated(manifests: list[Manifest], name: str) -> tuple[Pod, list[str]]:
    """A pod and the arguments of its last container."""
    (pod,) = (each for each in pods(manifests, HOSTS) if each.name == name)
    arguments = container_arguments(
        pod,
        pod.containers[-1],
        podman_pod="p",
        address="10.0.0.9",
        volumes=folders(pod, manifests, PLACES),
        manifests=manifests,
    )
    return pod, arguments


def values_after(words: list[str], flag: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == flag]


def test_each_kind_of_workload_makes_its_pods_on_its_hosts() -> None:
    engines = {"groups": [{"name": "tiny", "model": "m", "replicas": 3}]}
    made = pods(fleet(coordinator={"replicas": 2}, engines=engines, proxy={"enabled": True}), HOSTS)
    assert [(each.name, each.host) for each in made] == [
        ("demo-lmkv-coordinator-0", "host-1"),
        ("demo-lmkv-coordinator-1", "host-2"),
        ("demo-lmkv-engine-tiny-0", "host-1"),
        ("demo-lmkv-engine-tiny-1", "host-2"),
        ("demo-lmkv-engine-tiny-2", "host-1"),
        ("demo-lmkv-node-host-1", "host-1"),
        ("demo-lmkv-node-host-2", "host-2"),
        ("demo-lmkv-proxy-0", "host-1"),
        ("demo-lmkv-test", "host-1"),
    ]
    assert made[0].subdomain == "demo-lmkv-coordinator-headless"
    assert {each.grace_seconds for each in made if each.name.startswith("demo-lmkv-proxy")} == {30}


def test_a_container_gets_the_security_limits_and_mounts_of_the_chart() -> None:
    _, words = translated(fleet(), "demo-lmkv-node-host-2")
    assert values_after(words, "--user") == ["10001:10001"]
    assert values_after(words, "--group-add") == ["10001"]
    assert values_after(words, "--cap-drop") == ["ALL"]
    assert "--cap-add" not in words
    assert {"--read-only", "--read-only-tmpfs=false"} <= set(words)
    assert values_after(words, "--security-opt") == ["no-new-privileges"]
    assert values_after(words, "--memory") == values_after(words, "--memory-swap") == [str(640 << 20)]
    assert values_after(words, "--volume") == [
        "/disk/pods/demo-lmkv-node-host-2/node-config:/etc/lmkv:ro",
        "/disk/hosts/host-2/run/lmkv/prod-demo-lmkv:/run/lmkv",
        "/disk/pods/demo-lmkv-node-host-2/node-tmp:/tmp",
        "/memory/hosts/host-2/dev/shm/lmkv-prod-demo-lmkv:/pool",
    ]
    assert values_after(words, "--entrypoint") == ['["lmkv", "node", "--config", "/etc/lmkv/lmkv.yaml"]']
    assert words[-1] == "registry/lmkv-node:0.1.0"


def test_init_containers_keep_their_own_user_and_capabilities() -> None:
    (pod,) = (each for each in pods(fleet(), HOSTS) if each.name == "demo-lmkv-node-host-1")
    words = security_arguments(pod.spec["securityContext"], pod.initial[0]["securityContext"])
    assert values_after(words, "--user") == ["0:10001"]
    assert values_after(words, "--cap-add") == ["CHOWN"]
    assert pod.sidecars == []


def test_variables_come_from_fields_and_maps_and_refer_to_earlier_ones() -> None:
    manifests = fleet(otlpEndpoint="http://collector:4317")
    _, words = translated(manifests, "demo-lmkv-node-host-1")
    assert values_after(words, "--env") == [
        "LMKV_INSTANCE_ID=host-1",
        "LMKV_P2P_HOST=10.0.0.9",
        "LMKV_POOL_PATH=/pool/host-1.pool",
        "UCX_TCP_PORT_RANGE=9210-9229",
        "OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317",
    ]
    _, words = translated(fleet(), "demo-lmkv-node-host-1")
    assert not any(word.startswith("OTEL") for word in values_after(words, "--env")), "optional"


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$(A)/x", "1/x"), ("$$(A)", "$(A)"), ("$(B)", "$(B)"), ("$A", "$A"), ("$(A)$(A)", "11")],
)
def test_references_are_expanded_as_in_kubernetes(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded


@pytest.mark.parametrize("kind", ["configMapKeyRef", "secretKeyRef"])
def test_a_variable_whose_source_is_missing_stops_the_pod_unless_it_is_optional(kind: str) -> None:
    pod = pods(fleet(), HOSTS)[0]
    reference: dict[str, Any] = {"name": "missing", "key": "k"}
    container = {"name": "c", "env": [{"name": "A", "valueFrom": {kind: reference}}]}
    with pytest.raises(LookupError, match="does not exist"):
        environment(container, pod, "", [])
    reference["optional"] = True
    assert environment(container, pod, "", []) == {}
    held = (
        secret("missing", k="text")
        if kind == "secretKeyRef"
        else {
            "kind": "ConfigMap",
            "metadata": {"name": "missing"},
            "data": {"k": "text"},
        }
    )
    assert environment(container, pod, "", [held]) == {"A": "text"}


def test_secrets_are_files_that_only_their_group_reads() -> None:
    manifests = [
        *fleet(
            auth={"tokensSecret": "tokens", "engineSecret": "engine"},
            tls={"enabled": True, "serverSecret": "server"},
        ),
        secret("tokens", **{"tokens.yaml": "tokens: []"}),
        secret("engine", token="t"),
        secret("server", **{"ca.crt": "c", "tls.crt": "d", "tls.key": "k"}),
    ]
    (node,) = (each for each in pods(manifests, HOSTS) if each.name == "demo-lmkv-node-host-1")
    found = folders(node, manifests, PLACES)
    assert found["tls"].files == {"ca.crt": File(content=b"c", mode=0o440)}, "no key"
    assert found["token"].files == {"token": File(content=b"t", mode=0o440)}
    assert found["token"].group == 10001
    assert found["node-config"].files["lmkv.yaml"].mode == 0o644
    assert found["pool"].group is None, "folders of hosts are root's"
    assert found["pool"].keep
    assert not found["node-tmp"].keep


def test_a_missing_secret_stops_the_pod() -> None:
    manifests = fleet(tls={"enabled": True, "serverSecret": "server"})
    with pytest.raises(LookupError, match="no Secret server"):
        translated(manifests, "demo-lmkv-coordinator-0")


def test_sidecars_start_before_the_engine_and_share_its_volumes() -> None:
    values = engine_values("registry")
    values["node"] = {**values["node"], "mode": "sidecar"}
    values["engines"] = {**values["engines"], "groups": [{"name": "tiny", "model": "m"}]}
    manifests = render(values)
    (pod,) = (each for each in pods(manifests, HOSTS) if each.name == "demo-lmkv-engine-tiny-0")
    assert [each["name"] for each in pod.sidecars] == ["node"]
    found = folders(pod, manifests, PLACES)
    assert found["runtime"].path == Path("/disk/pods/demo-lmkv-engine-tiny-0/runtime")
    assert found["pool"].path == Path("/memory/pods/demo-lmkv-engine-tiny-0/pool")


@pytest.mark.parametrize("case", NAMES)
def test_cases_of_the_chart_are_translated_or_refused_with_the_reason(case: str) -> None:
    manifests = manifests_of(case)
    wanted = set(re.findall(r"'(?:secretName|name)': '([a-z-]+)'", str(manifests)))
    known = [*manifests, *(secret(name, **dict.fromkeys(KEYS, "content")) for name in wanted)]
    problems = set()
    for manifest in manifests:
        try:
            for pod in pods([manifest], HOSTS):
                found = folders(pod, known, PLACES)
                for container in (*pod.initial, *pod.containers):
                    container_arguments(pod, container, podman_pod="p", address="", volumes=found, manifests=known)
        except (Unsupported, LookupError) as error:
            problems.add(str(error))
    expected = REFUSED.get(case, "resource nvidia.com/gpu")
    assert bool(problems) == bool(expected)
    assert all(re.fullmatch(expected, problem) for problem in problems), problems


def test_what_is_not_known_is_refused() -> None:
    manifests = fleet()
    find(manifests, "DaemonSet", "demo-lmkv-node")["spec"]["template"]["spec"]["hostPID"] = True
    with pytest.raises(Unsupported, match="demo-lmkv-node-host-1: hostPID"):
        pods(manifests, HOSTS)


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        ({"privileged": True}, "privileged"),
        ({"runAsNonRoot": True, "runAsUser": 0}, "runAsNonRoot"),
        ({"seccompProfile": {"type": "Unconfined"}}, "seccomp"),
    ],
)
def test_security_contexts_that_would_not_hold_are_refused(context: Manifest, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        security_arguments({}, context)


def test_quantities() -> None:
    assert [bytes_of(each) for each in ("640Mi", "2Gi", "1k".upper(), 7, "1.5Gi")] == [
        *(640 << 20, 2 << 30, 1000, 7, 3 << 29),
    ]
    assert [cpus_of(each) for each in ("500m", "2", 1)] == [0.5, 2.0, 1.0]


def test_probes_have_the_ports_of_their_containers_and_kubernetes_defaults() -> None:
    made = {each.name: each for each in pods(fleet(proxy={"enabled": True}, engines=ENGINES), HOSTS)}
    (proxy,) = made["demo-lmkv-proxy-0"].containers
    assert probe(proxy, "readinessProbe") == Probe(
        kind="httpGet",
        port=9100,
        path="/readyz",
        delay_seconds=0,
        period_seconds=2,
        timeout_seconds=5,
        failure_threshold=3,
    )
    del proxy["startupProbe"]
    assert probe(proxy, "startupProbe") is None
    (node,) = made["demo-lmkv-node-host-1"].containers
    startup = probe(node, "startupProbe")
    assert startup
    assert (startup.kind, startup.port, startup.failure_threshold, startup.period_seconds) == ("grpc", 9200, 60, 1)


ENGINES = {"groups": [{"name": "tiny", "model": "m"}]}


def test_probes_of_sockets_and_commands() -> None:
    container = {
        "name": "c",
        "ports": [{"name": "p2p", "containerPort": 7}],
        "livenessProbe": {"tcpSocket": {"port": "p2p"}},
        "readinessProbe": {"exec": {"command": ["true"]}},
        "startupProbe": {"httpGet": {"port": "none"}},
    }
    liveness, readiness = probe(container, "livenessProbe"), probe(container, "readinessProbe")
    assert liveness
    assert readiness
    assert (liveness.kind, liveness.port, liveness.timeout_seconds) == ("tcpSocket", 7, 1)
    assert (readiness.kind, readiness.command) == ("exec", ("true",))
    with pytest.raises(LookupError, match="no port none"):
        probe(container, "startupProbe")
