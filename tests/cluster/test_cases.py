"""The cases of `make cluster` render and are translated; nothing of them runs here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.__main__ import manifests_of, merged, table, with_other_channel
from tests.cluster.cases import CASES
from tests.cluster.checks import BETWEEN_PODS, chunks_across_pods, hit_across_pods
from tests.cluster.fleet import COORDINATOR, NODES, PROXY, configured_channel
from tests.cluster.names import Endpoint, names
from tests.cluster.probes import probe
from tests.cluster.restarts import drain_before_change, rank, replace_nodes, rolling_restart
from tests.cluster.translation import Places, container_arguments, folders, pods

PLACES = Places(disk=Path("/disk"), memory=Path("/memory"))


@pytest.mark.parametrize("name", CASES)
def test_every_pod_of_a_case_is_translated_with_its_secrets_probes_and_names(name: str) -> None:
    case = CASES[name]
    manifests = manifests_of(case, "registry")
    made = pods(manifests, case.hosts)
    for pod in made:
        found = folders(pod, manifests, PLACES)
        for container in (*pod.initial, *pod.containers):
            container_arguments(pod, container, podman_pod="p", address="a", volumes=found, manifests=manifests)
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe(container, kind)
    assert names(manifests, [Endpoint(pod=pod, address="10.0.0.1", is_ready=True) for pod in made], "cluster.local")


@pytest.mark.parametrize("name", CASES)
def test_a_case_hits_across_pods_before_and_after_its_pods_use_the_other_channel(name: str) -> None:
    case = CASES[name]
    assert {BETWEEN_PODS[channel] for channel in case.channels} == {"nixl", "tcp"}
    changes = {rolling_restart, replace_nodes, drain_before_change}
    (change,) = (number for number, check in enumerate(case.checks) if check in changes)
    for checks in (case.checks[:change], case.checks[change:]):
        assert {hit_across_pods, chunks_across_pods} & set(checks)


def test_the_other_channel_keeps_the_secrets_of_a_case() -> None:
    case = CASES["tls-tokens"]
    first = manifests_of(case, "registry")
    second = with_other_channel(case, "registry", first)
    assert [configured_channel(each) for each in (first, second)] == ["nixl", "auto"]
    secrets, others = ([each for each in found if each["kind"] == "Secret"] for found in (first, second))
    assert secrets == others


def test_workloads_restart_in_the_order_of_upgrades() -> None:
    engines = "StatefulSet/demo-lmkv-engine-tiny"
    assert sorted([PROXY, engines, NODES, COORDINATOR], key=rank) == [COORDINATOR, NODES, engines, PROXY]


def test_values_merge_as_files_of_helm() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {"a": {"b": 3, "c": 2}, "d": [2]}


def test_the_table_has_a_row_for_each_case_and_a_dash_for_what_did_not_run() -> None:
    shown = table({("default", "start"): "9 s", ("default", "hit"): "FAILED: a\nb", ("tls", "start"): "8 s"})
    assert shown.splitlines() == [
        "| case | start | hit |",
        "| --- | --- | --- |",
        "| default | 9 s | FAILED: a b |",
        "| tls | 8 s | - |",
    ]
