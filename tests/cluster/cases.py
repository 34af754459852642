"""The cases of `make cluster`: values of the chart, and what is checked of the fleet that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.checks import (
    Check,
    chunks_across_pods,
    drain,
    handoff,
    helm_test,
    hit_across_pods,
    hit_through_proxy,
    move,
    strangers_are_refused,
)
from tests.cluster.reach import only_required_traffic
from tests.cluster.restarts import (
    disk_outlives_memory,
    drain_before_change,
    drain_before_stop,
    folder_outlives_memory,
    kill_each_kind,
    replace_nodes,
    restart_alone,
    rolling_restart,
)
from tests.cluster.secrets import secret, tokens
from tests.cluster.translation import Manifest
from tests.cluster.upgrades import upgrade


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Values, and the checks in their order."""

    values: Mapping[str, Any]
    checks: Sequence[Check]
    channels: tuple[str, str] = ("auto", "nixl")
    """The chart's `node.transferChannel` at the start and after the nodes are replaced: `tcp` and NIXL between pods."""
    secrets: Callable[[], Sequence[Manifest]] = field(default=lambda: ())
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Programs of this machine that the fleet uses, by their DNS names."""
    hosts: Sequence[str] = ("host-1", "host-2")
    from_previous: bool = False
    """Whether it starts with the images of `--previous-image`, if there are any."""


TWO = [{"name": "tiny", "model": "/models/tiny", "replicas": 2}]
STORE, PASSWORD = "valkey.example", "of-the-layout-map"
ALWAYS: Sequence[Check] = (move, drain, kill_each_kind, rolling_restart)
"""What most cases check in the end."""
POLICIES = {"enabled": True, "egress": {"enabled": True}}
ON_DISK = {"maxLocalDiskSize": 0.125, "diskVolume": {"hostPath": {"path": "/mnt/lmkv", "type": "DirectoryOrCreate"}}}

IN_FOLDER = {"maxRemoteSize": 0.125, "remote": {"volume": {"persistentVolumeClaim": {"claimName": "kv"}}}}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "kv"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}

CASES: Mapping[str, Case] = {
    "nodes": Case(
        values={"coordinator": {"replicas": 2}},
        checks=(helm_test, chunks_across_pods, *ALWAYS, chunks_across_pods),
    ),
    "policies": Case(
        values={"coordinator": {"replicas": 2}, "networkPolicy": POLICIES},
        checks=(
            helm_test,
            chunks_across_pods,
            only_required_traffic,
            move,
            drain,
            rolling_restart,
            only_required_traffic,
            chunks_across_pods,
        ),
        channels=("tcp", "nixl"),
    ),
    "drain": Case(
        values={
            "coordinator": {"replicas": 2},
            "node": {"persistPool": False, "drain": {"enabled": True, "evict": True}},
        },
        # The check before `drain_before_change`: nodes take chunks that engines use.
        checks=(helm_test, chunks_across_pods, drain_before_change, chunks_across_pods),
    ),
    "upgrade-nodes": Case(
        values={"coordinator": {"replicas": 2}, "node": ON_DISK},
        checks=(helm_test, chunks_across_pods, upgrade, replace_nodes, chunks_across_pods, disk_outlives_memory),
        from_previous=True,
    ),
    "shared-folder": Case(
        values={"coordinator": {"replicas": 2}, "node": IN_FOLDER, "extraObjects": [CLAIM]},
        checks=(helm_test, chunks_across_pods, folder_outlives_memory, rolling_restart, chunks_across_pods),
    ),
    "valkey": Case(
        values={"coordinator": {"replicas": 2, "layoutMap": {"existingSecret": "layout-map"}}},
        checks=(helm_test, chunks_across_pods, *ALWAYS, chunks_across_pods),
        channels=("tcp", "nixl"),
        secrets=lambda: (secret("layout-map", {"url": f"redis://:{PASSWORD}@{STORE}:6379/0".encode()}),),
        beside={STORE: ("redis-server", "--bind", "0.0.0.0", "--requirepass", PASSWORD, "--save", "")},
    ),
    "default": Case(
        values={
            "coordinator": {"replicas": 2},
            "engines": {"groups": TWO},
            "proxy": {"enabled": True, "policy": "kv_aware"},
        },
        checks=(helm_test, hit_across_pods, hit_through_proxy, *ALWAYS, hit_across_pods),
    ),
    "upgrade": Case(
        values={
            "coordinator": {"replicas": 2},
            "node": ON_DISK,
            "engines": {"groups": TWO},
            "proxy": {"enabled": True, "policy": "kv_aware"},
        },
        checks=(helm_test, hit_across_pods, upgrade, replace_nodes, hit_across_pods, hit_through_proxy),
        from_previous=True,
    ),
    "prefill-decode": Case(
        values={
            "node": {
                "mode": "sidecar",
                "config": {"pd_buffer_size": 64 << 20},
                "drain": {"enabled": True, "evict": True},
            },
            "engines": {
                "groups": [
                    {"name": role, "role": role, "model": "/models/tiny", "replicas": 1}
                    for role in ("prefill", "decode")
                ]
            },
            "proxy": {"enabled": True},
            "networkPolicy": POLICIES,
        },
        checks=(
            *(helm_test, handoff, hit_across_pods, only_required_traffic, drain_before_stop, *ALWAYS),
            *(handoff, hit_across_pods, only_required_traffic),
        ),
        channels=("nixl", "auto"),
    ),
    "tls-tokens": Case(
        values={
            "coordinator": {"replicas": 2},
            "tls": {"enabled": True, "mutual": True, "certManager": {"enabled": True, "issuerRef": {"name": "fleet"}}},
            "auth": {"tokensSecret": "tokens", "engineSecret": "engine", "readerSecret": "reader"},
            "clusterSecret": {"existingSecret": "fleet"},
            "engines": {"groups": TWO},
            "proxy": {"enabled": True, "policy": "kv_aware"},
            "networkPolicy": POLICIES,
        },
        checks=(
            helm_test,
            hit_across_pods,
            hit_through_proxy,
            strangers_are_refused,
            only_required_traffic,
            *ALWAYS,
            hit_across_pods,
        ),
        channels=("nixl", "auto"),
        secrets=lambda: (*tokens("team-a"), secret("fleet", {"cluster-secret": b"one for all"})),
    ),
    "sidecar": Case(
        values={
            "coordinator": {"replicas": 2},
            "node": {
                "mode": "sidecar",
                "drain": {"enabled": True, "evict": True},
            },
            "engines": {"groups": TWO},
        },
        checks=(helm_test, hit_across_pods, restart_alone, drain_before_stop, *ALWAYS, hit_across_pods),
    ),
}
