"""Network policies as rules: what the chart's policies admit between its pods, and Kubernetes' rules for selectors."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cases import CASES
from tests.cluster.policies import Direction, Party, Rule, rules
from tests.cluster.reach import by_kind, expected_ways, ports_of
from tests.cluster.test_fleet import StoppedCluster, fleet
from tests.cluster.translation import Manifest, Unsupported, pods
from tests.helm.chart import manifests_of

ADDRESSES = {"coordinator": "10.0.0.1", "node": "10.0.0.2", "engine": "10.0.0.3", "proxy": "10.0.0.4"}
STRANGER = Party(namespace="prod", labels={"app": "stranger"}, address="10.0.0.8")
DNS = Party(namespace="kube-system", labels={}, address="10.0.0.9")


def chart_fleet(case: str) -> tuple[list[Manifest], dict[str, Party]]:
    """The policies of a case of the chart, and one pod of each component with the address above."""
    manifests = manifests_of(case)
    parties = {}
    for pod in pods([each for each in manifests if each["kind"] != "Pod"], ["host-1"]):
        kind = pod.labels["app.kubernetes.io/component"].partition("-")[0]
        if kind in ADDRESSES:
            parties[kind] = Party(namespace=pod.namespace, labels=pod.labels, address=ADDRESSES[kind], ports=pod.ports)
    return [each for each in manifests if each["kind"] == "NetworkPolicy"], parties | {"stranger": STRANGER, "dns": DNS}


def admits(found: list[Rule] | None, address: str, protocol: str, port: int) -> bool:
    """Whether rules admit a connection with the other side at this address."""
    if found is None:
        return True
    at = ipaddress.ip_address(address)
    return any(
        at in ipaddress.ip_network(rule.network)
        and not any(at in ipaddress.ip_network(each) for each in rule.excluded)
        and rule.protocol in ("", protocol)
        and rule.first_port <= port <= rule.last_port
        for rule in found
    )


def connects(case: str, source: str, destination: str, port: int, protocol: str = "tcp") -> bool:
    """Whether the policies at both ends admit a connection."""
    policies, by_kind = chart_fleet(case)
    parties = list(by_kind.values())
    client, server = by_kind[source], by_kind[destination]
    outgoing = rules(client, "Egress", policies, parties)
    incoming = rules(server, "Ingress", policies, parties)
    return admits(outgoing, server.address, protocol, port) and admits(incoming, client.address, protocol, port)


@pytest.mark.parametrize("case", ["network-policy", "network-policy-egress"])
@pytest.mark.parametrize(
    ("source", "destination", "port", "admitted"),
    [
        ("node", "coordinator", 9000, True),
        ("proxy", "coordinator", 9000, True),
        ("proxy", "engine", 8000, True),
        ("node", "dns", 53, True),
        ("node", "coordinator", 9001, False),
        ("engine", "coordinator", 9000, False),
        ("engine", "node", 9200, False),
        ("stranger", "coordinator", 9000, False),
        ("stranger", "node", 9210, False),
        ("stranger", "engine", 8000, False),
        ("coordinator", "node", 9200, False),
    ],
)
def test_the_charts_policies_as_rules(case: str, source: str, destination: str, port: int, admitted: bool) -> None:
    assert connects(case, source, destination, port) == admitted


def test_only_restricted_traffic_is_refused_at_its_source() -> None:
    policies, by_kind = chart_fleet("network-policy")
    parties = list(by_kind.values())
    assert rules(by_kind["node"], "Egress", policies, parties) is None
    assert rules(STRANGER, "Ingress", policies, parties) is None
    policies, by_kind = chart_fleet("network-policy-egress")
    outgoing = rules(by_kind["coordinator"], "Egress", policies, parties)
    assert admits(outgoing, DNS.address, "udp", 53)
    assert not admits(outgoing, DNS.address, "udp", 54)
    assert not admits(outgoing, by_kind["node"].address, "tcp", 9200)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if "networkPolicy" in case.values])
def test_the_ways_that_make_cluster_tries_are_those_of_the_policies(case: str, tmp_path: Path) -> None:
    cluster = StoppedCluster(case, tmp_path)
    stopped = fleet(cluster)
    servers = {kind: found[-1] for kind, found in by_kind(stopped).items()}
    parties = {
        kind: Party(namespace="prod", labels=each.pod.labels, address=f"10.0.1.{number}", ports=each.pod.ports)
        for number, (kind, each) in enumerate(servers.items())
    }
    clients = parties | {"stranger": STRANGER}
    everyone = [*parties.values(), STRANGER, DNS]
    policies = [each for each in cluster.manifests if each["kind"] == "NetworkPolicy"]
    found: dict[str, set[str]] = {}
    for kind, client in clients.items():
        outgoing = rules(client, "Egress", policies, everyone)
        found[kind] = {
            f"{other}:{name}"
            for other, server in servers.items()
            if other != "test"
            for name, port in ports_of(server).items()
            if admits(outgoing, parties[other].address, "tcp", port)
            and admits(rules(parties[other], "Ingress", policies, everyone), client.address, "tcp", port)
        }
    assert found == expected_ways(stopped)


def policy(**spec: Any) -> Manifest:
    return {"kind": "NetworkPolicy", "metadata": {"namespace": "prod"}, "spec": {"podSelector": {}, **spec}}


def incoming(*policies: Manifest) -> list[Rule] | None:
    """The rules of a pod with a named port, where a pod of its namespace and one of another run."""
    server = Party(namespace="prod", labels={"app": "server"}, address="10.0.0.5", ports={"http": 80})
    return rules(server, "Ingress", policies, [server, STRANGER, DNS])


@pytest.mark.parametrize(
    ("ingress", "expected"),
    [
        ([], []),
        ([{}], [Rule()]),
        ([{"ports": [{"port": "http"}, {"port": "unknown"}]}], [Rule(protocol="tcp", first_port=80, last_port=80)]),
        ([{"ports": [{"protocol": "UDP"}]}], [Rule(protocol="udp")]),
        ([{"ports": [{"port": 7, "endPort": 9}]}], [Rule(protocol="tcp", first_port=7, last_port=9)]),
        ([{"from": [{"podSelector": {"matchLabels": {"app": "stranger"}}}]}], [Rule(network="10.0.0.8")]),
        ([{"from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}]}],
         [Rule(network="10.0.0.9")]),
        ([{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "stranger"}}}]}],
         [Rule(network="10.0.0.8")]),
        ([{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]}],
         [Rule(network="10.0.0.0/8", excluded=("10.1.0.0/16",))]),
    ],
)  # fmt: skip
def test_kubernetes_rules_for_peers_and_ports(ingress: list[Any], expected: list[Rule]) -> None:
    assert incoming(policy(ingress=ingress)) == expected


def test_policies_add_up_and_concern_their_own_namespace_and_direction() -> None:
    one, two = ({"ports": [{"port": port}]} for port in (1, 2))
    assert len(incoming(policy(ingress=[one]), policy(ingress=[two]), policy(ingress=[one])) or ()) == 2
    other = {**policy(ingress=[one]), "metadata": {"namespace": "other"}}
    assert incoming(other) is None
    assert incoming(policy(policyTypes=["Egress"], egress=[])) is None
    assert incoming(policy(podSelector={"matchLabels": {"app": "other"}})) is None
    directions: tuple[Direction, ...] = ("Ingress", "Egress")
    assert [rules(STRANGER, each, [policy(egress=[{}])], []) for each in directions] == [[], [Rule()]]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"podSelector": {"matchExpressions": []}}, "selector: matchExpressions"),
        ({"ingress": [{"from": [{"serviceSelector": {}}]}]}, "peer: serviceSelector"),
        ({"ingress": [{"via": []}]}, "rule: via"),
        ({"priority": 1}, "policy: priority"),
    ],
)
def test_what_is_not_known_is_refused(spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        incoming(policy(**spec))
