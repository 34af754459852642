"""Rules of network policies in nftables' language, and how the kernel enforces them between two network namespaces."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.cluster.firewall import Firewall, ruleset
from tests.cluster.policies import Party, Rule

POLICY = {
    "kind": "NetworkPolicy",
    "metadata": {"namespace": "prod"},
    "spec": {
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}], "ports": [{"port": 7001}]}],
        "egress": [{"ports": [{"port": 7003}]}],
    },
}
SERVER, CLIENT = "198.18.78.1", "198.18.78.2"
SERVE = """
import socket, sys
servers = [socket.create_server(("0.0.0.0", port)) for port in (7001, 7002)]
print("ready", flush=True)
sys.stdin.read()
"""
CONNECT = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
    print("open")
except OSError as error:
    print(errno.errorcode.get(error.errno, error))
"""


def test_what_is_not_restricted_has_no_chain() -> None:
    assert ruleset(None, None, "10.0.0.254").splitlines() == [
        "add table inet lmkv_policy",
        "delete table inet lmkv_policy",
    ]


def test_rules_in_the_language_of_nftables() -> None:
    ingress = [
        Rule(network="10.0.0.2", protocol="tcp", first_port=9200, last_port=9201),
        Rule(network="10.0.0.0/8", excluded=("10.1.0.0/16",), protocol="udp"),
        Rule(protocol="tcp", first_port=80, last_port=80),
    ]
    lines = [line.strip() for line in ruleset(ingress, [], "10.0.0.254").splitlines()]
    assert lines[2:] == [
        "table inet lmkv_policy {",
        "chain input {",
        "type filter hook input priority 0; policy accept;",
        "iif lo accept",
        "ct state established,related accept",
        "ip saddr 10.0.0.254 accept",
        "ip saddr 10.0.0.2 tcp dport 9200-9201 accept",
        "ip saddr 10.0.0.0/8 ip saddr != { 10.1.0.0/16 } meta l4proto udp accept",
        "tcp dport 80 accept",
        "reject with icmpx type admin-prohibited",
        "}",
        "chain output {",
        "type filter hook output priority 0; policy accept;",
        "oif lo accept",
        "ct state established,related accept",
        "reject with icmpx type admin-prohibited",
        "}",
        "}",
    ]


@contextmanager
def namespace() -> Iterator[subprocess.Popen[str]]:
    """A process in a network namespace of its own, which waits for its input to end."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process  # which ends when its input is closed


def run_in(pid: int, *command: str) -> str:
    """The output of a command in the network namespace of a process."""
    enter = ("nsenter", f"--net=/proc/{pid}/ns/net")
    return subprocess.run([*enter, *command], capture_output=True, text=True, check=True, timeout=100).stdout.strip()


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    """Processes of a server and a client in two network namespaces that are connected; the server listens."""
    if shutil.which("nft") is None or shutil.which("nsenter") is None or shutil.which("ip") is None:
        pytest.skip("needs nftables, iproute2 and util-linux")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root: this user may not make network namespaces")
    with ExitStack() as stack:
        server, client = (stack.enter_context(namespace()).pid for _ in range(2))
        run_in(server, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(client))
        for pid, address in ((server, SERVER), (client, CLIENT)):
            run_in(pid, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            run_in(pid, "ip", "link", "set", "eth0", "up")
        listener = stack.enter_context(
            subprocess.Popen(
                ["nsenter", f"--net=/proc/{server}/ns/net", sys.executable, "-I", "-c", SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        yield server, client


async def connected(pid: int, address: str, port: int) -> str:
    """How a connection from a namespace ends."""
    return await asyncio.to_thread(run_in, pid, sys.executable, "-I", "-c", CONNECT, address, str(port))


async def test_the_kernel_refuses_what_no_policy_admits_until_a_pod_with_the_labels_runs(pids: tuple[int, int]) -> None:
    server, client = pids
    firewall = Firewall([POLICY], "198.18.78.254")
    assert await connected(client, SERVER, 7001) == "open"
    await firewall.add("server", Party(namespace="prod", labels={"app": "server"}, address=SERVER), server)
    assert [await connected(client, SERVER, port) for port in (7001, 7002)] == ["EHOSTUNREACH"] * 2
    await firewall.add("client", Party(namespace="prod", labels={"app": "client"}, address=CLIENT), client)
    assert [await connected(client, SERVER, port) for port in (7001, 7002)] == ["open", "EHOSTUNREACH"]
    assert [await connected(server, CLIENT, port) for port in (7003, 7004)] == ["ECONNREFUSED", "EHOSTUNREACH"]
    assert [await connected(server, SERVER, port) for port in (7001, 7002)] == ["open"] * 2, "a pod reaches itself"
    await firewall.remove("client")
    assert await connected(client, SERVER, 7001) == "EHOSTUNREACH"


async def test_the_host_reaches_every_port_as_probes_do(pids: tuple[int, int]) -> None:
    server, client = pids
    firewall = Firewall([POLICY], CLIENT)
    await firewall.add("server", Party(namespace="prod", labels={"app": "server"}, address=SERVER), server)
    assert [await connected(client, SERVER, port) for port in (7001, 7002)] == ["open"] * 2
