"""Properties of the manifests of every case: names match, privileges are minimal, configurations are valid."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig, ProxyConfig, keys
from lmkv.config.schema import Config
from lmkv.config.spellings import spellings
from tests.helm.chart import NAMES, Manifest, containers, find, manifests_of, name_of, pods, render, values_of

PROCESSES: Mapping[str, type[Config]] = {
    "coordinator": CoordinatorConfig,
    "node": NodeConfig,
    "engine": ConnectorConfig,
    "proxy": ProxyConfig,
}


@pytest.mark.parametrize("case", NAMES)
def test_every_key_that_is_rendered_is_one_of_its_process(case: str) -> None:
    seen = set()
    for manifest in manifests_of(case):
        if "lmkv.yaml" in manifest.get("data", {}):
            process = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
            config = yaml.safe_load(manifest["data"]["lmkv.yaml"]) or {}
            PROCESSES[process](**{name: raw for name, raw in config.items() if name in keys(PROCESSES[process])})
            assert config.keys() <= keys(PROCESSES[process]).keys()
            seen.add(process)
    assert {"coordinator", "node"} <= seen
    for _, pod in pods(manifests_of(case)):
        for container in containers(pod):
            variables = {each["name"] for each in container.get("env", ()) if each["name"].startswith("LMKV_")}
            if variables:
                known = {f"LMKV_{name.upper()}" for name in spellings(PROCESSES[container["name"]])}
                assert variables <= known | {"LMKV_CONFIG_FILE"}


@pytest.mark.parametrize("case", NAMES)
def test_selectors_find_pods_and_services_find_ports(case: str) -> None:
    manifests = manifests_of(case)
    # Kubernetes itself labels pods of a StatefulSet by their number.
    labelled = [
        ({"apps.kubernetes.io/pod-index": str(number), **pod["metadata"]["labels"]}, ports_of(pod))
        for _, pod in pods(manifests)
        for number in range(2)
    ]
    checked = 0
    for manifest in manifests:
        for selector, ports in selections(manifest):
            found = [held for labels, held in labelled if selector.items() <= labels.items()]
            if name_of(manifest).startswith("NetworkPolicy") and not found:
                continue  # admitted peers may be elsewhere
            assert found, f"{name_of(manifest)} selects no pod by {selector}"
            for held in found:
                assert ports <= held, f"{name_of(manifest)}: {ports - held}"
            checked += 1
    assert checked >= 4


def ports_of(pod: Manifest) -> set[str | int]:
    """Ports of a pod by number and by name."""
    declared = [port for container in containers(pod) for port in container.get("ports", ())]
    return {port["name"] for port in declared} | {port["containerPort"] for port in declared}


def selections(manifest: Manifest) -> list[tuple[dict[str, str], set[str | int]]]:
    """Whom a manifest selects, and the ports that these must have."""
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "Deployment" | "StatefulSet" | "DaemonSet" | "PodDisruptionBudget":
            return [(spec["selector"]["matchLabels"], set())]
        case "Service":
            return [(spec["selector"], {port["targetPort"] for port in spec["ports"]})]
        case "PodMonitor":
            return [(spec["selector"]["matchLabels"], {each["port"] for each in spec["podMetricsEndpoints"]})]
        case "NetworkPolicy":
            named = {port["port"] for rule in spec["ingress"] for port in rule["ports"] if "endPort" not in port}
            return [(spec["podSelector"]["matchLabels"], named)]
        case _:
            return []


@pytest.mark.parametrize("case", ["tls", "mutual-tls", "monitoring"])
def test_service_monitors_find_one_service_with_their_port(case: str) -> None:
    manifests = manifests_of(case)
    monitors = [manifest for manifest in manifests if manifest["kind"] == "ServiceMonitor"]
    assert monitors
    for monitor in monitors:
        selector = monitor["spec"]["selector"]["matchLabels"]
        services = [
            manifest
            for manifest in manifests
            if manifest["kind"] == "Service" and selector.items() <= manifest["metadata"]["labels"].items()
        ]
        assert len(services) == 1, "metrics would be read twice"
        ports = {port["name"] for port in services[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


@pytest.mark.parametrize("case", NAMES)
def test_processes_have_no_rights_that_they_do_not_need(case: str) -> None:
    for _, pod in pods(manifests_of(case)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        for container in containers(pod):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            added = set(context["capabilities"].get("add", ()))
            if container["name"] == "own-folders":  # the only one that is root
                assert added == {"CHOWN"}
                folders = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
                assert folders == {mount["name"] for mount in container["volumeMounts"]}, "fsGroup is not for these"
            else:
                assert "runAsUser" not in context
                assert added == ({"IPC_LOCK", "SYS_NICE"} if case == "rdma" and container["name"] == "node" else set())
                assert container["resources"]["limits"]


@pytest.mark.parametrize("case", NAMES)
def test_mounts_are_of_volumes_and_no_mount_is_within_a_read_only_one(case: str) -> None:
    for name, pod in pods(manifests_of(case)):
        claims = find(manifests_of(case), name)["spec"].get("volumeClaimTemplates", [])
        sources = [set(volume) - {"name"} for volume in pod["spec"]["volumes"]]
        assert all(len(source) == 1 for source in sources), "Kubernetes refuses a volume of two types"
        names = [each["name"] for each in pod["spec"]["volumes"]] + [each["metadata"]["name"] for each in claims]
        volumes = set(names)
        assert len(volumes) == len(names)
        used = set()
        for container in containers(pod):
            mounts = container["volumeMounts"]
            paths = {mount["mountPath"] for mount in mounts}
            assert len(paths) == len(mounts)
            assert not any("subPath" in mount for mount in mounts), "certificates and tokens would never be renewed"
            assert not any(other.startswith(f"{path}/") for path in paths for other in paths)
            used |= {mount["name"] for mount in mounts}
        assert used == volumes


@pytest.mark.parametrize("case", NAMES)
def test_pods_restart_when_their_settings_change(case: str) -> None:
    manifests = manifests_of(case)
    for name, pod in pods(manifests):
        if name.startswith("Pod/"):
            continue
        checksum = pod["metadata"]["annotations"]["checksum/config"]
        configs = [volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume]
        texts = [find(manifests, f"ConfigMap/{config}")["data"]["lmkv.yaml"].rstrip("\n") for config in configs]
        settings = [re.sub("\nlog_level: .*\nlog_format: .*$", "", text) for text in texts]
        assert checksum == hashlib.sha256("".join(settings).encode()).hexdigest()


def test_engines_and_their_node_meet_at_one_socket() -> None:
    for case, owner in (("engines", "DaemonSet/demo-lmkv-node"), ("sidecar", "StatefulSet/demo-lmkv-engine-llama")):
        of = dict(pods(manifests_of(case)))
        (node,) = (each for each in containers(of[owner]) if each["name"] == "node")
        (engine,) = of["StatefulSet/demo-lmkv-engine-llama"]["spec"]["containers"]
        assert variable(node, "LMKV_INSTANCE_ID") == variable(engine, "NODE_INSTANCE_ID")
        config = yaml.safe_load(find(manifests_of(case), "ConfigMap/demo-lmkv-node")["data"]["lmkv.yaml"])
        address = variable(engine, "LMKV_NODE_ADDRESS")["value"].replace("$(NODE_INSTANCE_ID)", "host-1")
        assert address == str(NodeConfig(instance_id="host-1", **config).engine_socket)
        ends = [
            {volume["name"]: volume for volume in of[name]["spec"]["volumes"]}["runtime"]
            for name in (owner, "StatefulSet/demo-lmkv-engine-llama")
        ]
        assert ends[0] == ends[1]


@pytest.mark.parametrize("mode", ["daemonSet", "sidecar"])
@pytest.mark.parametrize("seconds", [None, 30, 600])
def test_a_node_has_time_to_stop_after_its_drain(mode: str, seconds: int | None) -> None:
    drain = {} if seconds is None else {"drain": {"enabled": True, "timeoutSeconds": seconds}}
    engines: dict[str, Any] = {"groups": [{"name": "llama", "model": "m"}], "stopTimeout": 45}
    of = dict(pods(render({"node": {"mode": mode, **drain}, "engines": engines})))
    hooks = {
        f"{name}/{container['name']}": container["lifecycle"]["preStop"]["exec"]["command"]
        for name, pod in of.items()
        for container in containers(pod)
        if "lifecycle" in container
    }
    engine = "StatefulSet/demo-lmkv-engine-llama"
    owner = {"daemonSet": "DaemonSet/demo-lmkv-node", "sidecar": engine}[mode]
    command = f'timeout {seconds} lmkv drain "$LMKV_INSTANCE_ID" --config /etc/lmkv/lmkv.yaml --timeout {seconds}'
    assert hooks == ({f"{owner}/node": ["sh", "-c", command]} if seconds else {})
    stops = {name: of[name]["spec"]["terminationGracePeriodSeconds"] for name in (engine, owner)}
    stop_seconds = {"daemonSet": 0, "sidecar": engines["stopTimeout"]}[mode]
    assert stops == {engine: 45 + 15, owner: max(seconds or 0, stop_seconds) + 15}


def test_only_nodes_that_drain_are_given_the_token_of_an_operator() -> None:
    values: dict[str, Any] = dict(values_of("drain"))
    for enabled in (True, False):
        values["node"] = {**values["node"], "drain": {"enabled": enabled}}
        mounted = {
            container["name"]
            for _, pod in pods(render(values))
            for container in containers(pod)
            if "operator-token" in {mount["name"] for mount in container["volumeMounts"]}
        }
        assert mounted == ({"node"} if enabled else set())


def variable(container: Manifest, name: str) -> dict[str, Any]:
    """A variable of a container, without its name."""
    (found,) = (each for each in container["env"] if each["name"] == name)
    return {key: value for key, value in found.items() if key != "name"}


def test_the_coordinators_certificate_is_for_the_name_that_its_clients_dial() -> None:
    manifests = manifests_of("mutual-tls")
    names = find(manifests, "Certificate/demo-lmkv-server-tls")["spec"]["dnsNames"]
    for process in ("node", "proxy"):
        config = yaml.safe_load(find(manifests, f"ConfigMap/demo-lmkv-{process}")["data"]["lmkv.yaml"])
        assert config["coordinator_address"].partition(":")[0] in names
    monitor = find(manifests, "ServiceMonitor/demo-lmkv-coordinator")["spec"]["endpoints"][0]
    assert monitor["tlsConfig"]["serverName"] in names


def test_coordinators_whose_number_follows_their_load_are_found_by_one_name() -> None:
    manifests = manifests_of("autoscaling")
    scaler = find(manifests, "HorizontalPodAutoscaler/demo-lmkv-coordinator")["spec"]
    coordinators = find(manifests, f"{scaler['scaleTargetRef']['kind']}/{scaler['scaleTargetRef']['name']}")["spec"]
    assert "replicas" not in coordinators, "each upgrade would undo what the autoscaler did"
    assert all("cpu" in each["resources"]["requests"] for each in containers(coordinators["template"]))
    service = find(manifests, "Service/demo-lmkv-coordinator-headless")["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= coordinators["template"]["metadata"]["labels"].items()
    names = find(manifests, "Certificate/demo-lmkv-server-tls")["spec"]["dnsNames"]
    for process in ("node", "proxy"):
        config = yaml.safe_load(find(manifests, f"ConfigMap/demo-lmkv-{process}")["data"]["lmkv.yaml"])
        assert config["coordinator_address"] == "demo-lmkv-coordinator-headless.prod.svc:9000"
        assert config["coordinator_address"].partition(":")[0] in names


def test_clients_are_not_given_the_coordinators_key() -> None:
    volumes = dict(pods(manifests_of("tls")))["DaemonSet/demo-lmkv-node"]["spec"]["volumes"]
    (secret,) = (volume["secret"] for volume in volumes if "secret" in volume)
    assert [item["key"] for item in secret["items"]] == ["ca.crt"]


@pytest.mark.parametrize("case", [name for name in NAMES if values_of(name).get("engines")])
def test_the_proxy_names_every_engine_and_no_other(case: str) -> None:
    manifests = manifests_of(case)
    dialled: set[str] = set()
    for manifest in manifests:
        if name_of(manifest) == "ConfigMap/demo-lmkv-proxy":
            config = ProxyConfig(**yaml.safe_load(manifest["data"]["lmkv.yaml"]))
            routed = {engine.removeprefix("http://") for engine in config.engines}
            dialled = routed or {*config.prefillers, *config.decoders}
    there = {
        f"{manifest['metadata']['name']}-{index}.{manifest['spec']['serviceName']}.prod.svc:8000"
        for manifest in manifests
        if name_of(manifest).startswith("StatefulSet/demo-lmkv-engine-")
        for index in range(manifest["spec"]["replicas"])
    }
    assert there
    assert dialled == (there if values_of(case).get("proxy") else set())


def test_a_nodes_memory_is_that_of_its_pool_and_some_more() -> None:
    def limits(case: str) -> dict[str, Any]:
        (node,) = dict(pods(manifests_of(case)))["DaemonSet/demo-lmkv-node"]["spec"]["containers"]
        assert node["resources"]["requests"].items() >= node["resources"]["limits"].items()
        held: dict[str, Any] = node["resources"]["limits"]
        return held

    assert limits("default") == {"memory": "6144Mi"}
    assert limits("rdma") == {"memory": "1024Mi", "hugepages-1Gi": "65536Mi", "rdma/hca_shared_devices_a": 1}


def test_network_policies_let_nodes_use_exactly_the_ports_of_their_channels() -> None:
    def ports(case: str) -> list[dict[str, int]]:
        policy = find(manifests_of(case), "NetworkPolicy/demo-lmkv-node")
        admitted_ports: list[dict[str, int]] = policy["spec"]["ingress"][0]["ports"]
        return admitted_ports

    assert ports("network-policy") == [{"port": 9200}, {"port": 9201}, {"port": 9210, "endPort": 9229}]
    assert ports("network-policy-sidecar") == [{"port": 9200}, {"port": 9201}]
    (node,) = dict(pods(manifests_of("network-policy")))["DaemonSet/demo-lmkv-node"]["spec"]["containers"]
    assert variable(node, "UCX_TCP_PORT_RANGE") == {"value": "9210-9229"}


WAYS = {
    "coordinator": {
        *("node:grpc", "proxy:grpc", "test:grpc"),
        *("operator:grpc", "operator:http", "monitoring:http"),
    },
    "node": {"node:9200", "node:9201", "node:9210", "monitoring:9202"},
    "engine": {"proxy:http", "monitoring:http"},
    "proxy": {"apps:http", "monitoring:http"},
}
"""Who reaches which ports of which component, where network policies are on."""


def test_network_policies_admit_only_required_traffic() -> None:
    manifests = manifests_of("network-policy")
    ways: dict[str, set[str]] = {}
    for policy in (manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        ways[policy["metadata"]["labels"]["app.kubernetes.io/component"]] = {
            f"{who_of(peer)}:{port['port']}"
            for rule in policy["spec"]["ingress"]
            for peer in rule["from"]
            for port in rule["ports"]
        }
    assert ways == WAYS
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for _, pod in pods(manifests)}
    assert {component.partition("-")[0] for component in components} == {*WAYS, "test"}, "a component has no policy"


def who_of(peer: Manifest) -> str:
    """The peers that a policy admits: components of this release, or the one label of others."""
    (selector,) = peer.values()
    labels = selector["matchLabels"]
    if "app.kubernetes.io/component" not in labels:
        (name,) = labels.values()
        return str(name)
    assert labels["app.kubernetes.io/instance"] == "demo", "other releases are strangers"
    return str(labels["app.kubernetes.io/component"])


def test_images_are_those_that_the_dockerfile_makes() -> None:
    images = {
        container["image"] for case in NAMES for _, pod in pods(manifests_of(case)) for container in containers(pod)
    }
    names = {re.sub(r":.*", "", image.rpartition("/")[2]) for image in images}
    assert names == {"lmkv", "lmkv-node", "lmkv-vllm"}
    assert "ghcr.io/acme/lmkv:2.0" in images
