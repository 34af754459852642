"""Enforces network policies with nftables in the network namespaces of pods.

Refused connections fail at once with `EHOSTUNREACH`, unlike connections to a port on which no process listens, so that
checks see the difference without a time limit. The host may always connect, because probes come from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.cluster.policies import EVERYWHERE, MAX_PORT, Party, Rule, rules
from tests.cluster.translation import Manifest

TABLE = "lmkv_policy"
ENFORCE = "echo 0 >/proc/sys/net/ipv4/icmp_ratelimit && exec nft -f -"
"""Each refused connection is answered: by default the kernel answers about one per second."""


class FirewallError(RuntimeError):
    """Rules that nftables did not take, with its output."""


class Firewall:
    """The rules of all pods, which change when a pod comes or ends."""

    def __init__(self, policies: Sequence[Manifest], host: str, others: Sequence[Party] = ()) -> None:
        """`host` is the address from which probes come; `others` are parties that are no pods, such as DNS."""
        self._policies = policies
        self._host = host
        self._others = others
        self._pods: dict[str, tuple[Party, int]] = {}
        self._applied: dict[str, str] = {}
        self._lock = asyncio.Lock()

    async def add(self, name: str, party: Party, pid: int) -> None:
        """Adds a pod, by a process in its network namespace: its rules are in effect, and those of others that name it.

        Raises `FirewallError`.
        """
        async with self._lock:
            self._pods[name] = party, pid
            await self._update()

    async def replace(self, policies: Sequence[Manifest]) -> None:
        """Enforces other policies. Raises `FirewallError`."""
        async with self._lock:
            self._policies = policies
            await self._update()

    async def remove(self, name: str) -> None:
        """Removes a pod from the rules of all others. Raises `FirewallError`."""
        async with self._lock:
            if self._pods.pop(name, None):
                self._applied.pop(name, None)
                await self._update()

    async def _update(self) -> None:
        parties = [*self._others, *(party for party, _ in self._pods.values())]
        for name, (party, pid) in self._pods.items():
            text = ruleset(
                rules(party, "Ingress", self._policies, parties),
                rules(party, "Egress", self._policies, parties),
                self._host,
            )
            if self._applied.get(name) != text:
                await apply(text, pid)
                self._applied[name] = text


async def apply(text: str, pid: int) -> None:
    """Gives commands to nftables in the network namespace of a process. Raises `FirewallError`."""
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--net=/proc/{pid}/ns/net", "sh", "-c", ENFORCE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us alone
    )
    output, _ = await process.communicate(text.encode())
    if process.returncode:
        raise FirewallError(f"nft: {output.decode().strip()}\n{text}")


def ruleset(ingress: Sequence[Rule] | None, egress: Sequence[Rule] | None, host: str) -> str:
    """nftables' commands that replace the rules of a pod; None: this direction is not restricted."""
    chains = []
    if ingress is not None:
        chains += chain("input", [f"ip saddr {host} accept", *(statement(rule, "saddr") for rule in ingress)])
    if egress is not None:
        chains += chain("output", [statement(rule, "daddr") for rule in egress])
    table = [f"table inet {TABLE} {{", *chains, "}"] if chains else []
    return "\n".join([f"add table inet {TABLE}", f"delete table inet {TABLE}", *table, ""])


def chain(hook: str, admitted: Sequence[str]) -> list[str]:
    """A chain that admits the pod's own connections to itself, answers, and what is listed."""
    own = f"{'iif' if hook == 'input' else 'oif'} lo accept"
    words = [own, "ct state established,related accept", *admitted, "reject with icmpx type admin-prohibited"]
    lines = [f"type filter hook {hook} priority 0; policy accept;", *words]
    return [f"  chain {hook} {{", *(f"    {line}" for line in lines), "  }"]


def statement(rule: Rule, side: str) -> str:
    """A rule in nftables' language; `side` is the field with the other side's address."""
    words = [] if rule.network == EVERYWHERE else [f"ip {side} {rule.network}"]
    if rule.excluded:
        words += [f"ip {side} != {{ {', '.join(rule.excluded)} }}"]
    if rule.protocol and (rule.first_port, rule.last_port) == (0, MAX_PORT):
        words += [f"meta l4proto {rule.protocol}"]
    elif rule.protocol:
        ports = f"{rule.first_port}-{rule.last_port}" if rule.last_port > rule.first_port else str(rule.first_port)
        words += [f"{rule.protocol} dport {ports}"]
    return " ".join([*words, "accept"])
