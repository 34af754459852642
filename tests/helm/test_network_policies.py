"""Network policies: each component is reached, and reaches, only what it needs."""

from __future__ import annotations

from collections.abc import Mapping

from tests.helm.chart import Manifest, find, manifests_of, pods, variable


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
    "webhook": {"10.0.0.0/28:https"},
}
"""Who reaches which ports of which component, where network policies are on."""


def test_network_policies_admit_only_required_traffic() -> None:
    manifests = manifests_of("network-policy")
    ways: dict[str, set[str]] = {}
    for policy in (manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        ways[policy["metadata"]["labels"]["app.kubernetes.io/component"]] = {
            f"{name_of_peer(peer)}:{port['port']}"
            for rule in policy["spec"]["ingress"]
            for peer in rule["from"]
            for port in rule["ports"]
        }
    assert ways == WAYS
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for _, pod in pods(manifests)}
    assert {component.partition("-")[0] for component in components} == {*WAYS, "test"}, "a component has no policy"


def name_of_peer(peer: Manifest) -> str:
    """The addresses of a peer, or the component of this release, or the one label of others."""
    if "ipBlock" in peer:
        return str(peer["ipBlock"]["cidr"])
    if peer.get("podSelector", {}).get("matchLabels", {}).get("lmkv/engine"):
        return "engine"
    (selector,) = peer.values()
    labels = selector["matchLabels"]
    if "app.kubernetes.io/component" not in labels:
        (name,) = labels.values()
        return str(name)
    assert labels["app.kubernetes.io/instance"] == "demo", "other releases are strangers"
    return str(labels["app.kubernetes.io/component"])


TO_DNS = {"kube-system:53/UDP", "kube-system:53/TCP"}
EGRESS: Mapping[str, set[str]] = {
    "coordinator": {"valkey:6379"},
    "node": {"coordinator:9000", "node:9200", "node:9201", "node:9210"},
    "engine": {"0.0.0.0/0:443"},
    "proxy": {"coordinator:9000", "engine:8000"},
    "webhook": set(),
}
"""What components dial besides DNS and the OTLP collector, where outgoing traffic is restricted."""


def test_outgoing_traffic_is_restricted_to_what_is_required() -> None:
    ways: dict[str, set[str]] = {}
    for policy in (
        manifest for manifest in manifests_of("network-policy-egress") if "egress" in manifest.get("spec", {})
    ):
        assert policy["kind"] == "NetworkPolicy"
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        ways[policy["metadata"]["labels"]["app.kubernetes.io/component"]] = {
            f"{name_of_peer(peer)}:{port['port']}" + (f"/{port['protocol']}" if "protocol" in port else "")
            for rule in policy["spec"]["egress"]
            for peer in rule["to"]
            for port in rule["ports"]
        }
    assert ways == {name: {*listed, *TO_DNS, "monitoring:4317"} for name, listed in EGRESS.items()}
