"""What the checks ask of a fleet; nothing of it runs here."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from lmkv.errors import LmkvError
from tests.cluster.__main__ import manifests_of
from tests.cluster.cases import CASES
from tests.cluster.fleet import Fleet
from tests.cluster.kubelet import RunningPod
from tests.cluster.translation import Places, Pod, pods


class StoppedPod(RunningPod):
    """A pod of which only its description is there."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.containers = {each["name"]: Any for each in (*pod.containers, *pod.sidecars)}  # type: ignore[misc]


class StoppedCluster:
    """The pods of a case, and what is run to its end, which gets the answer."""

    def __init__(self, case: str, folder: Path, code: int = 0, answer: str = "") -> None:
        self.manifests = manifests_of(CASES[case], "registry")
        self.hosts = CASES[case].hosts
        self.places = Places(disk=folder, memory=folder)
        self.running = {pod.name: StoppedPod(pod) for pod in pods(self.manifests, self.hosts)}
        self.ran: list[Pod] = []
        self._answer = code, answer

    def of(self, owner: str) -> list[StoppedPod]:
        return [each for each in self.running.values() if each.pod.owner == owner]

    async def run_to_end(self, pod: Pod) -> tuple[int, str]:
        self.ran.append(pod)
        return self._answer


def fleet(cluster: StoppedCluster) -> Fleet:
    return Fleet(cluster)  # type: ignore[arg-type]


def secrets(pod: Pod) -> dict[str, str]:
    return {each["name"]: each["secret"]["secretName"] for each in pod.spec["volumes"] if "secret" in each}


async def test_orders_are_given_by_a_pod_like_that_of_helm_test_with_an_operators_token(tmp_path: Path) -> None:
    cluster = StoppedCluster("tls-tokens", tmp_path, answer="moved")
    await fleet(cluster).order("move", "--from", "a", "--to", "b")
    ((container,),) = (each.containers for each in cluster.ran)
    assert container["command"] == ["lmkv", "move", "--config", "/etc/lmkv/lmkv.yaml"]
    assert container["args"] == ["--from", "a", "--to", "b"]
    assert secrets(cluster.ran[0]) == {"tls": "demo-lmkv-client-tls", "tokens": "tokens", "token": "operator"}


async def test_reading_needs_no_more_than_a_readers_token(tmp_path: Path) -> None:
    found = {"holders": [{"instance_id": "host-1", "matched_chunk_count": 7}]}
    cluster = StoppedCluster("tls-tokens", tmp_path, answer=f"a warning\n{json.dumps(found)}")
    assert await fleet(cluster).holders(["--keys", "00"]) == {"host-1": 7}
    assert secrets(cluster.ran[0])["token"] == "reader"
    assert cluster.ran[0].containers[0]["args"] == ["--json", "--keys", "00"]


async def test_an_order_that_is_not_done_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(LmkvError, match="lmkv drain ended with exit code 3: held by this instance only"):
        await fleet(StoppedCluster("nodes", tmp_path, 3, "held by this instance only")).order("drain", "host-1")


def test_only_a_fleet_with_tls_and_tokens_is_asked_with_them(tmp_path: Path) -> None:
    for case, expected in (("tls-tokens", True), ("default", False)):
        asked = fleet(StoppedCluster(case, tmp_path))
        assert isinstance(asked._tls, ssl.SSLContext) == bool(asked._token) == expected


def test_of_prefill_and_decode_engines_the_first_store_and_the_second_load(tmp_path: Path) -> None:
    split, both = (fleet(StoppedCluster(case, tmp_path)) for case in ("prefill-decode", "default"))
    assert [each.pod.name for each in split.producers()] == ["demo-lmkv-engine-prefill-0"]
    assert [each.pod.name for each in split.consumers()] == ["demo-lmkv-engine-decode-0"]
    assert both.producers() == both.consumers() == both.engines()


def test_an_engines_instance_is_named_by_its_own_pod_or_by_its_host(tmp_path: Path) -> None:
    for case, instance, node in (
        ("sidecar", "demo-lmkv-engine-tiny-1", "demo-lmkv-engine-tiny-1"),
        ("default", "host-2", "demo-lmkv-node-host-2"),
    ):
        asked = fleet(StoppedCluster(case, tmp_path))
        engine = asked.engines()[1]
        assert (asked.instance_of(engine), asked.node_of(engine).pod.name) == (instance, node)


@pytest.mark.parametrize(("case", "channel"), [("default", "auto"), ("policies", "tcp"), ("tls-tokens", "nixl")])
def test_the_cases_cover_the_channels_between_pods(case: str, channel: str, tmp_path: Path) -> None:
    assert fleet(StoppedCluster(case, tmp_path)).transfer_channel == channel
