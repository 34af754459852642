"""What `make cluster` checks of network policies: which ports of which pods each kind of pod reaches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence

from tests.cluster.fleet import PROXY, Fleet, has_node
from tests.cluster.kubelet import RunningPod
from tests.cluster.translation import find

NIXL, OTHER = 9210, 9999
"""A port of NIXL, and one that is not in any manifest."""
PROGRAM = """
import errno, json, socket, sys
answers = []
for address, port in json.load(sys.stdin):
    try:
        socket.create_connection((address, port), timeout=60).close()
        answers.append("open")
    except OSError as error:
        answers.append(errno.errorcode.get(error.errno, str(error)))
print(json.dumps(answers))
"""
ANSWERS = {"open": True, "ECONNREFUSED": True, "EHOSTUNREACH": False}
"""Whether the policies admit a connection that ends so. Without an answer, it is neither."""


async def connect(running: RunningPod, targets: Sequence[tuple[str, int]]) -> list[str]:
    """How connections from a pod's network to these addresses and ports end: `open`, or the name of the error."""
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--net=/proc/{await running.network_pid()}/ns/net", sys.executable, "-I", "-c", PROGRAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us alone
    )
    output, _ = await process.communicate(json.dumps(targets).encode())
    assert process.returncode == 0
    answers: list[str] = json.loads(output)
    return answers


def expected_ways(fleet: Fleet) -> dict[str, set[str]]:
    """The ports that each kind of pod must reach, and no others: `coordinator:grpc`."""
    channel = fleet.transfer_channel
    between = {"p2p", *(["transfer"] if channel != "nixl" else []), *(["nixl"] if channel != "tcp" else [])}
    pods = by_kind(fleet)
    ways: dict[str, set[str]] = {kind: set() for kind in pods} | {"stranger": set(), "test": {"coordinator:grpc"}}
    for kind, found in pods.items():
        if has_node(found[0]):
            ways[kind] = {"coordinator:grpc", *(f"{kind}:{port}" for port in between)}
    if fleet.cluster.of(PROXY):
        ways["proxy"] = {"coordinator:grpc", "engine:http"}
        for kind in ("stranger", "test"):  # whose outgoing traffic is not restricted
            ways[kind].add("proxy:http")
    return ways


def by_kind(fleet: Fleet) -> dict[str, list[RunningPod]]:
    """The pods that run, by component; engines of all groups are of one kind."""
    found: dict[str, list[RunningPod]] = {}
    for running in fleet.cluster.running.values():
        kind = running.pod.labels["app.kubernetes.io/component"].partition("-")[0]
        found.setdefault(kind, []).append(running)
    return found


def ports_of(running: RunningPod) -> dict[str, int]:
    """The ports that are tried of a pod: those that it names, one of NIXL, one of no process."""
    return {**running.pod.ports, "nixl": NIXL, "other": OTHER}


async def only_required_traffic(fleet: Fleet) -> str:
    """From each kind of pod, and from a stranger's, connections to each port of each kind end as policies demand."""
    pods = by_kind(fleet)
    test = find(fleet.cluster.manifests, "Pod", "demo-lmkv-test")["metadata"]["labels"]
    admitted = refused = 0
    async with contextlib.AsyncExitStack() as stack:
        sources: dict[str, RunningPod] = {kind: found[0] for kind, found in pods.items()}
        bare: Mapping[str, Mapping[str, str]] = {"stranger": {"app": "stranger"}, "test": test}
        for kind, labels in bare.items():
            sources[kind] = await stack.enter_async_context(fleet.cluster.bare_pod(kind, labels))
        ways = expected_ways(fleet)
        assert ways.keys() == sources.keys()
        for source, running in sources.items():
            wanted = {
                f"{kind}:{name}": (found[-1].address, port)
                for kind, found in pods.items()
                if found[-1] is not running
                for name, port in ports_of(found[-1]).items()
            }
            answers = await connect(running, list(wanted.values()))
            for way, answer in zip(wanted, answers, strict=True):
                assert answer in ANSWERS, f"{source} to {way}: {answer}"
                assert ANSWERS[answer] == (way in ways[source]), f"{source} to {way}: {answer}"
                if way in ways[source] and way.endswith((":grpc", ":p2p", ":http")):
                    assert answer == "open", f"{source} to {way}: {answer}"
            admitted += sum(ANSWERS[answer] for answer in answers)
            refused += sum(not ANSWERS[answer] for answer in answers)
    return f"{admitted} ways admitted, {refused} refused"
