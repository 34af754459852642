"""Names of services and pods, and the answers to DNS queries."""

from __future__ import annotations

from typing import Any

import dns.message
import dns.rcode
import pytest

from tests.cluster.fleet import engine_values
from tests.cluster.names import Endpoint, answer, names, search_domains
from tests.cluster.translation import Manifest, Unsupported, find, pods
from tests.helm.chart import render

DOMAIN = "cluster.local"
HEADLESS = "demo-lmkv-coordinator-headless.prod.svc.cluster.local"


def fleet() -> tuple[list[Manifest], list[Endpoint]]:
    """Two coordinators, of which the second is not ready, and an engine that is not."""
    values: dict[str, Any] = engine_values("r")
    values["engines"] = {**values["engines"], "groups": [{"name": "tiny", "model": "m"}]}
    manifests = render({**values, "coordinator": {"replicas": 2}, "proxy": {"enabled": True}})
    ready = {"demo-lmkv-coordinator-0", "demo-lmkv-proxy-0"}
    made = [each for each in pods(manifests, ["host-1"]) if not each.name.endswith("-test")]
    endpoints = [
        Endpoint(pod=pod, address=f"10.0.0.{number}", is_ready=pod.name in ready) for number, pod in enumerate(made)
    ]
    return manifests, endpoints


def test_a_service_is_its_ready_pods() -> None:
    manifests, endpoints = fleet()
    assert names(manifests, endpoints, DOMAIN)[HEADLESS] == ["10.0.0.0"]
    both = [Endpoint(pod=each.pod, address=each.address, is_ready=True) for each in endpoints]
    assert names(manifests, both, DOMAIN)[HEADLESS] == ["10.0.0.0", "10.0.0.1"]


def test_pods_of_a_stateful_set_have_names_and_may_have_them_before_they_are_ready() -> None:
    manifests, endpoints = fleet()
    known = names(manifests, endpoints, DOMAIN)
    assert known[f"demo-lmkv-coordinator-0.{HEADLESS}"] == ["10.0.0.0"]
    assert f"demo-lmkv-coordinator-1.{HEADLESS}" not in known
    assert known["demo-lmkv-engine-tiny-0.demo-lmkv-engine-tiny-headless.prod.svc.cluster.local"] == ["10.0.0.2"]
    assert known["demo-lmkv-engine-tiny.prod.svc.cluster.local"] == []


def test_the_names_that_the_chart_configures_are_found_in_the_search_domains() -> None:
    manifests, endpoints = fleet()
    known = names(manifests, endpoints, DOMAIN)
    configured = "demo-lmkv-coordinator-headless.prod.svc"
    assert any(f"{configured}.{domain}" in known for domain in search_domains("prod", DOMAIN))


def test_a_service_that_changes_the_port_is_refused() -> None:
    manifests, endpoints = fleet()
    find(manifests, "Service", "demo-lmkv-proxy")["spec"]["ports"][0]["port"] = 80
    with pytest.raises(Unsupported, match="port 80"):
        names(manifests, endpoints, DOMAIN)


def asked(name: str, kind: str, known: dict[str, list[str]]) -> dns.message.Message:
    return dns.message.from_wire(answer(dns.message.make_query(name, kind).to_wire(), known))


def test_queries_are_answered_with_all_addresses_regardless_of_case() -> None:
    reply = asked("A.svc.Cluster.local.", "A", {"a.svc.cluster.local": ["10.0.0.1", "10.0.0.2"]})
    assert reply.rcode() == dns.rcode.NOERROR
    assert sorted(item.to_text() for item in reply.answer[0]) == ["10.0.0.1", "10.0.0.2"]
    assert reply.answer[0].ttl == 5


def test_a_name_without_an_address_of_that_kind_has_an_empty_answer_and_an_unknown_one_does_not_exist() -> None:
    known = {"a.svc.cluster.local": ["10.0.0.1"], "empty.svc.cluster.local": []}
    reply = asked("a.svc.cluster.local", "AAAA", known)
    assert (reply.rcode(), reply.answer) == (dns.rcode.NOERROR, [])
    for name in ("b.svc.cluster.local", "empty.svc.cluster.local", "example.org"):
        assert asked(name, "A", known).rcode() == dns.rcode.NXDOMAIN
