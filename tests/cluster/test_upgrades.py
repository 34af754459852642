"""Pods of another version, and the lines of logs that explain why its chunks miss."""

from __future__ import annotations

import pytest

from tests.cluster.__main__ import manifests_of
from tests.cluster.cases import CASES
from tests.cluster.fleet import Fleet
from tests.cluster.kubelet import Stop
from tests.cluster.nodes import Missed
from tests.cluster.restarts import assert_in_time, of_manifests
from tests.cluster.translation import pods
from tests.cluster.upgrades import outcome, refused
from tests.cluster.versions import Version

OLD = Version(registry="localhost/previous", tag="0.0.9")
LINE = '{"time": "2026-01-01T00:00:00Z", "level": "warning", "logger": "lmkv", "message": "another version of lmkv"}'


class LoggedPod:
    """A pod of which only its output is there."""

    def __init__(self, log: str) -> None:
        self.pod = pods(manifests_of(CASES["nodes"], "r"), ["host-1"])[0]
        self._log = log

    async def logs(self) -> dict[str, str]:
        return {"node": self._log}


class LoggedFleet:
    """The output of one pod."""

    def __init__(self, log: str = "") -> None:
        self.cluster = self
        self.manifests = manifests_of(CASES["upgrade"], "localhost/lmkv")
        self.hosts = CASES["upgrade"].hosts
        self.running = {"demo-lmkv-node-host-1": LoggedPod(log)}


def fleet(log: str = "") -> Fleet:
    return LoggedFleet(log)  # type: ignore[return-value]


@pytest.mark.parametrize("text", ["", "previous", "localhost:5000/previous", ":1", "a:"])
def test_a_version_has_a_registry_and_a_tag(text: str) -> None:
    with pytest.raises(ValueError, match="is not REGISTRY:TAG"):
        Version.parse(text)


def test_a_version_is_printed_as_it_is_named() -> None:
    assert str(Version.parse("localhost:5000/previous:0.0.9")) == "localhost:5000/previous:0.0.9"


def test_a_pod_gets_all_images_of_another_version_and_the_manifests_back() -> None:
    made = pods(manifests_of(CASES["upgrade"], "localhost/lmkv"), CASES["upgrade"].hosts)
    images = {each["image"] for pod in map(OLD.pod, made) for each in (*pod.initial, *pod.containers)}
    assert images == {f"localhost/previous/{name}:0.0.9" for name in ("lmkv", "lmkv-node", "lmkv-vllm-cpu")}
    assert [of_manifests(fleet())(OLD.pod(pod)) for pod in made] == made


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE, "another version of lmkv"),
        (LINE.replace("warning", "info"), ""),
        (LINE.replace("another version of lmkv", "the coordinator left"), ""),
        ("2026-01-01 WARNING [lmkv] host-1 and host-2 cannot share tiny", "host-1 and host-2 cannot share tiny"),
        ("a version", ""),
    ],
)
def test_lines_that_explain_a_miss(line: str, message: str) -> None:
    assert refused(line) == message


async def test_a_miss_needs_one_line_that_explains_it() -> None:
    async def misses() -> None:
        raise Missed("0 of 8")

    async def hits() -> None:
        pass

    assert await outcome(fleet(), hits) == "hits"
    assert await outcome(fleet(f"start\n{LINE}\nend"), misses) == "misses (another version of lmkv)"
    with pytest.raises(Missed):
        await outcome(fleet("start"), misses)
    with pytest.raises(AssertionError, match="repeats 2 times"):
        await outcome(fleet(f"{LINE}\n{LINE}"), misses)


async def test_a_wrong_answer_is_no_miss() -> None:
    async def wrong() -> None:
        raise AssertionError("says 'b', not 'a'")

    with pytest.raises(AssertionError, match="not 'a'"):
        await outcome(fleet(LINE), wrong)


def test_pods_must_stop_in_time_and_their_hooks_must_end() -> None:
    assert_in_time(Stop(hooks={"node": (3, "some are not copied")}, killed=["engine"]), "StatefulSet/a")
    with pytest.raises(AssertionError, match=r"StatefulSet/a: \['node'\] ran until the end of the grace period"):
        assert_in_time(Stop(killed=["node"]), "StatefulSet/a")
    with pytest.raises(AssertionError, match="exit code 124"):
        assert_in_time(Stop(hooks={"node": (124, "")}), "StatefulSet/a")


def test_only_cases_of_upgrades_start_with_another_version() -> None:
    assert {name for name, case in CASES.items() if case.from_previous} == {"upgrade", "upgrade-nodes"}
