"""Properties of the manifests of every case: names match, privileges are minimal, configurations are valid."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig, ProxyConfig, WebhookConfig, keys
from lmkv.config.schema import Config
from lmkv.config.sources import spellings
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.metrics import ProxyMetrics
from tests.helm.chart import NAMES, Manifest, containers, find, manifests_of, name_of, pods, render, values_of, variable

PROCESSES: Mapping[str, type[Config]] = {
    "coordinator": CoordinatorConfig,
    "node": NodeConfig,
    "engine": ConnectorConfig,
    "proxy": ProxyConfig,
    "webhook": WebhookConfig,
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
def test_a_container_that_starts_slowly_is_not_restarted_for_it(case: str) -> None:
    alive = [each for _, pod in pods(manifests_of(case)) for each in containers(pod) if "livenessProbe" in each]
    assert alive
    for container in alive:
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 60, container["name"]


@pytest.mark.parametrize("case", NAMES)
def test_selectors_find_pods_and_services_find_ports(case: str) -> None:
    manifests = manifests_of(case)
    # Kubernetes itself labels pods of a StatefulSet by their number.
    labelled = [
        ({"apps.kubernetes.io/pod-index": str(number), **pod["metadata"]["labels"]}, ports_of(pod))
        for _, pod in pods(manifests)
        if serves(pod)
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


def serves(pod: Manifest) -> bool:
    """Whether it has ports. Of an engine with several hosts only the leader has an API."""
    return bool(pod["metadata"]["labels"].get("lmkv/place") != "worker")


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
            named = {
                port["port"] for rule in spec["ingress"] for port in rule.get("ports", ()) if "endPort" not in port
            }
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
        data = [find(manifests, f"ConfigMap/{config}")["data"] for config in configs]
        settings = [re.sub("\nlog_level: .*\nlog_format: .*$", "", each["lmkv.yaml"].rstrip("\n")) for each in data]
        settings += [each["pods.yaml"].rstrip("\n") for each in data if "pods.yaml" in each]
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


@pytest.mark.parametrize("case", [name for name in NAMES if values_of(name).get("engines", {}).get("groups")])
def test_the_proxy_names_every_engine_and_no_other(case: str) -> None:
    manifests = manifests_of(case)
    dialled: set[str] = set()
    for manifest in manifests:
        if name_of(manifest) == "ConfigMap/demo-lmkv-proxy":
            config = ProxyConfig(**yaml.safe_load(manifest["data"]["lmkv.yaml"]))
            routed = {engine.removeprefix("http://") for engine in config.engines}
            dialled = routed or {*config.prefillers, *config.decoders}
    there = {
        f"{manifest['metadata']['name']}-{index}.{service_of(manifest)}.prod.svc:8000"
        for manifest in manifests
        if name_of(manifest).startswith(("StatefulSet/demo-lmkv-engine-", "LeaderWorkerSet/demo-lmkv-engine-"))
        for index in range(most_replicas(manifest, manifests))
    }
    assert there
    assert dialled == (there if values_of(case).get("proxy") else set())


def service_of(workload: Manifest) -> str:
    """The headless Service of a workload. The controller of LeaderWorkerSets makes one of the same name."""
    return str(workload["spec"].get("serviceName", workload["metadata"]["name"]))


def most_replicas(workload: Manifest, manifests: Sequence[Manifest]) -> int:
    """The largest number of replicas that a workload may have."""
    for manifest in manifests:
        if (
            manifest["kind"] == "ScaledObject"
            and manifest["spec"]["scaleTargetRef"]["name"] == workload["metadata"]["name"]
        ):
            assert "replicas" not in workload["spec"], "each upgrade would undo what the autoscaler did"
            return int(manifest["spec"]["maxReplicaCount"])
    return int(workload["spec"]["replicas"])


def test_a_nodes_memory_is_that_of_its_pool_and_some_more() -> None:
    def limits(case: str) -> dict[str, Any]:
        (node,) = dict(pods(manifests_of(case)))["DaemonSet/demo-lmkv-node"]["spec"]["containers"]
        assert node["resources"]["requests"].items() >= node["resources"]["limits"].items()
        held: dict[str, Any] = node["resources"]["limits"]
        return held

    assert limits("default") == {"memory": "6144Mi"}
    assert limits("rdma") == {"memory": "1024Mi", "hugepages-1Gi": "65536Mi", "rdma/hca_shared_devices_a": 1}


def test_routes_lead_to_ports_of_services() -> None:
    manifests = manifests_of("routes")
    services = {
        manifest["metadata"]["name"]: {port["name"]: port["port"] for port in manifest["spec"]["ports"]}
        for manifest in manifests
        if manifest["kind"] == "Service"
    }
    ways = {}
    for manifest in manifests:
        if manifest["kind"] in ("HTTPRoute", "GRPCRoute"):
            (rule,) = manifest["spec"]["rules"]
            (backend,) = rule["backendRefs"]
            (port,) = (name for name, number in services[backend["name"]].items() if number == backend["port"])
            ways[name_of(manifest)] = f"{backend['name']}:{port}"
            assert manifest["spec"]["parentRefs"]
        elif manifest["kind"] == "Ingress":
            backends = {
                f"{path['backend']['service']['name']}:{path['backend']['service']['port']['name']}"
                for rule in manifest["spec"]["rules"]
                for path in rule["http"]["paths"]
            }
            (ways[name_of(manifest)],) = backends
    assert ways == {
        "GRPCRoute/demo-lmkv-coordinator": "demo-lmkv-coordinator:grpc",
        "HTTPRoute/demo-lmkv-coordinator": "demo-lmkv-coordinator:http",
        "HTTPRoute/demo-lmkv-proxy": "demo-lmkv-proxy:http",
        "Ingress/demo-lmkv-coordinator": "demo-lmkv-coordinator:http",
        "Ingress/demo-lmkv-proxy": "demo-lmkv-proxy:http",
    }
    hosts = [rule.get("host") for rule in find(manifests, "Ingress/demo-lmkv-proxy")["spec"]["rules"]]
    assert hosts == ["api.acme.example", "*.models.acme.example"]


def test_scalers_count_the_requests_of_their_engines_by_a_metric_of_the_proxy() -> None:
    manifests = manifests_of("scaling")
    config = ProxyConfig(**yaml.safe_load(find(manifests, "ConfigMap/demo-lmkv-proxy")["data"]["lmkv.yaml"]))
    engines = [Engine(f"http://{address}", "prefill") for address in config.prefillers]
    engines += [Engine(f"http://{address}", "decode") for address in config.decoders]
    stranger = Engine("http://demo-lmkv-engine-prefill-0.demo-lmkv-engine-prefill-headless.test.svc:8000", "prefill")
    exposed = {
        sample.labels["engine"]
        for metric in ProxyMetrics([*engines, stranger]).collect()
        for sample in metric.samples
        if sample.name == "lmkv_proxy_engine_requests_in_flight"
    }
    assert len(exposed) == 4 + 3 + 1
    counted = {}
    for scaler in (manifest for manifest in manifests if manifest["kind"] == "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        find(manifests, f"{target['kind']}/{target['name']}")
        (trigger,) = scaler["spec"]["triggers"]
        query = trigger["metadata"]["query"]
        pattern = re.search(r'^sum\(lmkv_proxy_engine_requests_in_flight\{engine=~"(.+)"\}\) or vector\(0\)$', query)
        assert pattern is not None, query
        counted[target["name"]] = {engine for engine in exposed if re.fullmatch(pattern[1], engine)}
    assert counted["demo-lmkv-engine-prefill"] == {engine.url for engine in engines if engine.role == "prefill"}
    assert counted["demo-lmkv-engine-decode"] == {engine.url for engine in engines if engine.role == "decode"}
    assert counted["demo-lmkv-proxy"] == {engine.url for engine in engines}


def test_an_engine_with_several_hosts_has_one_api_and_a_node_on_each_host() -> None:
    manifests = manifests_of("hosts")
    engines = find(manifests, "LeaderWorkerSet/demo-lmkv-engine-deepseek-hosts")["spec"]
    both = engines["leaderWorkerTemplate"]
    leader, worker = (both[f"{place}Template"] for place in ("leader", "worker"))
    assert (both["size"], engines["replicas"], engines["startupPolicy"]) == (2, 2, "LeaderCreated")
    service = find(manifests, "Service/demo-lmkv-engine-deepseek")["spec"]["selector"]
    assert [service.items() <= pod["metadata"]["labels"].items() for pod in (leader, worker)] == [True, False]
    assert [[each["name"] for each in pod["spec"]["initContainers"]] for pod in (leader, worker)] == [["node"]] * 2
    (serving,), (headless,) = (pod["spec"]["containers"] for pod in (leader, worker))
    assert variable(serving, "POD_IP")["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert not {"ports", "livenessProbe", "readinessProbe", "startupProbe"} & headless.keys()
    policy = find(manifests, "NetworkPolicy/demo-lmkv-engine")["spec"]
    assert {"lmkv/engine": "true"}.items() <= policy["ingress"][1]["from"][0]["podSelector"]["matchLabels"].items()
    assert "ports" not in policy["ingress"][1], "the ports of ranks are vLLM's choice"
    assert policy["egress"][1] == {"to": policy["ingress"][1]["from"]}


def test_fields_of_the_operators_own_win_and_lists_are_merged_by_name() -> None:
    manifests = manifests_of("customized")
    coordinator = find(manifests, "StatefulSet/demo-lmkv-coordinator")["spec"]
    pod = coordinator["template"]["spec"]
    assert coordinator["updateStrategy"] == {"type": "OnDelete"}
    assert pod["runtimeClassName"] == "gvisor"
    assert pod["topologySpreadConstraints"] == []
    (container,) = pod["containers"]
    usual = find(manifests_of("default"), "StatefulSet/demo-lmkv-coordinator")["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert container["livenessProbe"] == {"tcpSocket": {"port": "grpc"}, "periodSeconds": 30, "timeoutSeconds": 5}
    assert container["resources"] == {**usual["resources"], "limits": {"memory": "4Gi"}}
    assert container["volumeMounts"] == [*usual["volumeMounts"], {"name": "audit", "mountPath": "/var/log/lmkv"}]
    changed = {"livenessProbe", "resources", "volumeMounts"}
    assert {name for name in container if container[name] != usual.get(name)} == changed
    ports = find(manifests, "Service/demo-lmkv-coordinator")["spec"]["ports"]
    assert [(port["name"], port["port"], port.get("nodePort")) for port in ports] == [
        ("grpc", 9000, 30900),
        ("http", 9001, None),
    ]


def test_a_group_of_engines_overrides_what_all_engines_have() -> None:
    of = {name.rpartition("-")[2]: pod["spec"] for name, pod in pods(manifests_of("customized")) if "engine" in name}
    assert [spec["runtimeClassName"] for spec in of.values()] == ["nvidia", "nvidia"]
    assert {name: spec["nodeSelector"] for name, spec in of.items()} == {
        "llama": {"gpu": "l4"},
        "qwen": {"gpu": "h100"},
    }
    nodes = {name: spec["initContainers"][-1] for name, spec in of.items()}
    assert nodes["llama"]["livenessProbe"] == {**nodes["qwen"]["livenessProbe"], "failureThreshold": 6}
    workloads = [find(manifests_of("customized"), f"StatefulSet/demo-lmkv-engine-{name}")["spec"] for name in of]
    claims = [[claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]] for spec in workloads]
    assert claims == [["disk", "models"], ["disk"]]
    assert [spec.get("minReadySeconds") for spec in workloads] == [None, 5]


def test_labels_of_the_operators_own_are_on_all_resources_and_pods_but_in_no_selector() -> None:
    manifests = manifests_of("customized")
    chosen = {"ConfigMap/demo-own", "PriorityClass/demo"}
    own = [manifest for manifest in manifests if name_of(manifest) not in chosen]
    assert len(own) == len(manifests) - len(chosen)
    assert all(manifest["metadata"]["labels"]["team"] == "inference" for manifest in own)
    assert all(manifest["metadata"]["annotations"]["owner"] == "kv@acme.example" for manifest in own)
    assert all(pod["metadata"]["labels"]["team"] == "inference" for _, pod in pods(own))
    assert not any("team" in selector for manifest in own for selector, _ in selections(manifest))


def test_images_are_those_that_the_dockerfile_makes() -> None:
    images = {
        container["image"] for case in NAMES for _, pod in pods(manifests_of(case)) for container in containers(pod)
    }
    names = {re.sub(r":.*", "", image.rpartition("/")[2]) for image in images}
    assert names == {"lmkv", "lmkv-node", "lmkv-vllm"}
    assert "ghcr.io/acme/lmkv:2.0" in images
