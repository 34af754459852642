"""DNS of the cluster: which addresses a name has, and the answers to queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from tests.cluster.translation import Manifest, Pod, Unsupported

TTL_SECONDS = 5
"""As in clusters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A pod that runs, as services see it."""

    pod: Pod
    address: str
    is_ready: bool


def names(manifests: Sequence[Manifest], endpoints: Sequence[Endpoint], domain: str) -> dict[str, list[str]]:
    """The addresses of each DNS name of the cluster. The name of a service is that of its pods: it has no own address.

    Raises `Unsupported` for services whose port differs from their pods'.
    """
    found: dict[str, list[str]] = {}
    for service in (manifest for manifest in manifests if manifest["kind"] == "Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        suffix = f"{service['metadata']['namespace']}.svc.{domain}"
        chosen = [each for each in endpoints if spec["selector"].items() <= each.pod.labels.items()]
        for each in chosen:
            check_ports(service, each.pod)
        published = [each for each in chosen if each.is_ready or spec.get("publishNotReadyAddresses")]
        found[f"{name}.{suffix}"] = [each.address for each in published]
        for each in published:
            if each.pod.subdomain == name:
                found[f"{each.pod.name}.{name}.{suffix}"] = [each.address]
    return found


def check_ports(service: Manifest, pod: Pod) -> None:
    """Raises `Unsupported` if a port of the service is not that of the pod: there is no load balancer here."""
    for port in service["spec"]["ports"]:
        target = port.get("targetPort", port["port"])
        if pod.ports.get(target, target) != port["port"]:
            raise Unsupported(f"service {service['metadata']['name']}: port {port['port']} is not that of its pods")


def search_domains(namespace: str, domain: str) -> list[str]:
    """The domains in which pods of a namespace look up names."""
    return [f"{namespace}.svc.{domain}", f"svc.{domain}", domain]


def answer(query: bytes, known: Mapping[str, Sequence[str]]) -> bytes:
    """The answer to a DNS query: addresses, nothing for IPv6, or NXDOMAIN. Raises `dns.exception.DNSException`."""
    asked = dns.message.from_wire(query)
    reply = dns.message.make_response(asked, recursion_available=True)
    reply.flags |= dns.flags.AA
    for question in asked.question:
        addresses = known.get(question.name.to_text(omit_final_dot=True).lower())
        if not addresses:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype == dns.rdatatype.A:
            reply.answer.append(
                dns.rrset.from_text(question.name, TTL_SECONDS, dns.rdataclass.IN, dns.rdatatype.A, *addresses)
            )
    return reply.to_wire()
