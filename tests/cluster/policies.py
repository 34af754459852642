"""NetworkPolicy as data: the traffic that policies admit to and from each pod. `tests.cluster.firewall` enforces it.

Policies select pods by labels; the rules here name addresses, so they change with the pods that run. What a policy asks
for and this module does not know is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.cluster.translation import Manifest, Unsupported

Direction = Literal["Ingress", "Egress"]

EVERYWHERE = "0.0.0.0/0"
MAX_PORT = 65535
KNOWN = {
    "policy": {"podSelector", "policyTypes", "ingress", "egress"},
    "rule": {"from", "to", "ports"},
    "peer": {"podSelector", "namespaceSelector", "ipBlock"},
    "selector": {"matchLabels"},
    "port": {"port", "endPort", "protocol"},
    "block": {"cidr", "except"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """What policies know of a pod."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ports: Mapping[str, int] = field(default_factory=dict)
    """Numbers of its named ports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Traffic that is admitted in one direction of one pod."""

    network: str = EVERYWHERE
    """Addresses of the other side: one, or a CIDR."""
    excluded: tuple[str, ...] = ()
    """CIDRs within the network that are not meant."""
    protocol: str = ""
    """tcp, udp or sctp; empty: all traffic."""
    first_port: int = 0
    last_port: int = MAX_PORT


def rules(
    party: Party, direction: Direction, policies: Sequence[Manifest], parties: Sequence[Party]
) -> list[Rule] | None:
    """What the policies of a pod admit in one direction; None: none of them restricts it. Raises `Unsupported`."""
    chosen = [policy for policy in policies if restricts(policy, party, direction)]
    if not chosen:
        return None
    admitted = [
        rule
        for policy in chosen
        for listed in policy["spec"].get(direction.lower()) or ()
        for rule in rules_of(listed, party, direction, policy["metadata"]["namespace"], parties)
    ]
    return list(dict.fromkeys(admitted))


def restricts(policy: Manifest, party: Party, direction: Direction) -> bool:
    """Whether a policy is about a pod in this direction. Raises `Unsupported`."""
    spec = policy["spec"]
    refuse_unknown("policy", spec)
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    same = policy["metadata"]["namespace"] == party.namespace
    return same and direction in types and selects(spec["podSelector"], party.labels)


def rules_of(
    listed: Manifest, party: Party, direction: Direction, namespace: str, parties: Sequence[Party]
) -> Iterator[Rule]:
    """The rules of one item of `ingress` or `egress`. Raises `Unsupported`."""
    refuse_unknown("rule", listed)
    peers = listed.get("from" if direction == "Ingress" else "to")
    for network, excluded, other in sides(peers or (), namespace, parties):
        named = party if direction == "Ingress" else other
        for protocol, first, last in port_ranges(listed.get("ports") or (), named.ports if named else {}):
            yield Rule(network=network, excluded=excluded, protocol=protocol, first_port=first, last_port=last)


def sides(
    peers: Sequence[Manifest], namespace: str, parties: Sequence[Party]
) -> Iterator[tuple[str, tuple[str, ...], Party | None]]:
    """The other sides of a rule: network, excluded networks, and the pod if it is one. No peers: everywhere."""
    if not peers:
        yield EVERYWHERE, (), None
    for peer in peers:
        refuse_unknown("peer", peer)
        if block := peer.get("ipBlock"):
            refuse_unknown("block", block)
            yield block["cidr"], tuple(block.get("except") or ()), None
            continue
        for party in parties:
            wanted = peer.get("namespaceSelector")
            if wanted is None:
                is_meant = party.namespace == namespace
            else:
                is_meant = selects(wanted, {"kubernetes.io/metadata.name": party.namespace})
            if is_meant and selects(peer.get("podSelector") or {}, party.labels):
                yield party.address, (), party


def port_ranges(ports: Sequence[Manifest], named: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Protocol, first and last port of each range; a name that the pod does not have is none. No ports: all traffic."""
    if not ports:
        yield "", 0, MAX_PORT
    for each in ports:
        refuse_unknown("port", each)
        protocol, port = each.get("protocol", "TCP").lower(), each.get("port")
        if port is None:
            yield protocol, 0, MAX_PORT
        elif (number := named.get(port) if isinstance(port, str) else int(port)) is not None:
            yield protocol, number, each.get("endPort", number)


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a selector means these labels; an empty one means all. Raises `Unsupported`."""
    refuse_unknown("selector", selector)
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items()


def refuse_unknown(what: str, described: Manifest) -> None:
    """Raises `Unsupported` for fields that this module does not know."""
    if unknown := described.keys() - KNOWN[what]:
        raise Unsupported(f"network policy, {what}: {', '.join(sorted(unknown))}")
