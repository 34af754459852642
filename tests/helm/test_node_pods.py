"""Where nodes' pods run, the huge pages that they request, and their variables."""

from __future__ import annotations

from typing import Any

import helm_python
import kubernetes_validate
import pytest

from tests.helm.chart import Manifest, find, render

GPU = {"key": "nvidia.com/gpu.present", "operator": "Exists"}
ZONE = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}
POOL = {"key": "pool", "operator": "In", "values": ["big"]}
FIELD = {"key": "metadata.name", "operator": "NotIn", "values": ["host-9"]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = [{"weight": 1, "preference": {"matchExpressions": [POOL]}}]


def node_of(values: dict[str, Any]) -> Manifest:
    """The pod of the DaemonSet's nodes, which Kubernetes takes."""
    manifest = find(render({"node": values}), "DaemonSet/demo-lmkv-node")
    assert kubernetes_validate.validate(manifest, "1.30", strict=True)
    spec: Manifest = manifest["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([], [{"matchExpressions": [GPU]}]),
        ([{"matchExpressions": [ZONE]}], [{"matchExpressions": [ZONE, GPU]}]),
        (
            [{"matchExpressions": [ZONE]}, {"matchFields": [FIELD]}],
            [{"matchExpressions": [ZONE, GPU]}, {"matchFields": [FIELD], "matchExpressions": [GPU]}],
        ),
    ],
    ids=["none", "one", "two"],
)
def test_gpu_affinity_is_required_besides_what_the_user_requires(
    terms: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    anti = {"podAntiAffinity": {REQUIRED: [{"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}]}}
    own = {"preferredDuringSchedulingIgnoredDuringExecution": PREFERRED}
    if terms:
        own[REQUIRED] = {"nodeSelectorTerms": terms}  # type: ignore[assignment]
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    spec = node_of(
        {"gpuAffinity": {"enabled": True}, "affinity": {"nodeAffinity": own, **anti}, "tolerations": tolerations}
    )
    assert spec["affinity"] == {"nodeAffinity": {**own, REQUIRED: {"nodeSelectorTerms": expected}}, **anti}
    assert spec["tolerations"] == [*tolerations, {"key": "nvidia.com/gpu", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("medium", "size_gb", "resource", "pages"),
    [
        ("HugePages-2Mi", 5, "hugepages-2Mi", 2560),
        ("HugePages-2Mi", 5.0009765625, "hugepages-2Mi", 2560),  # 5121 MiB: the node rounds down, too
        ("HugePages", 5, "hugepages-2Mi", 2560),
        ("HugePages-1Gi", 5.5, "hugepages-1Gi", 5),
        ("HugePages-64Ki", 0.1, "hugepages-64Ki", 1638),
    ],
)
def test_huge_pages_are_requested_in_whole_ones_of_their_medium(
    medium: str, size_gb: float, resource: str, pages: int
) -> None:
    spec = node_of({"maxLocalCpuSize": size_gb, "poolVolume": {"emptyDir": {"medium": medium}}})
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "pool")
    assert volume["emptyDir"]["medium"] in ("HugePages", f"HugePages-{resource.removeprefix('hugepages-')}")
    resources = spec["containers"][0]["resources"]
    page_bytes, requested_bytes = bytes_of(resource.removeprefix("hugepages-")), bytes_of(resources["limits"][resource])
    assert requested_bytes % page_bytes == 0
    assert requested_bytes // page_bytes == pages
    assert resources["requests"][resource] == resources["limits"][resource], "Kubernetes overcommits no huge pages"
    assert [each for each in resources["limits"] if each.startswith("hugepages-")] == [resource]
    assert resources["limits"]["memory"] == "1024Mi", "without the pool"


def bytes_of(quantity: str) -> int:
    """A quantity of Kubernetes's with a binary suffix."""
    return int(quantity[:-2]) * {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}[quantity[-2:]]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"node": {"poolVolume": {"emptyDir": {"medium": "HugePages-big"}}}},
            "node.poolVolume.emptyDir.medium is HugePages-big, which names no page size: use HugePages-2Mi",
        ),
        (
            {"node": {"maxLocalCpuSize": 0.5, "poolVolume": {"emptyDir": {"medium": "HugePages-1Gi"}}}},
            "node.maxLocalCpuSize is 0.5, less than one huge page of 1Gi: raise it",
        ),
        (
            {
                "node": {
                    "poolVolume": {"emptyDir": {"medium": "HugePages-2Mi"}},
                    "resources": {"limits": {"hugepages-1Gi": "1Gi"}},
                }
            },
            "node.resources.limits has hugepages-1Gi, which follows from node.maxLocalCpuSize",
        ),
        (
            {"node": {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
            "node.extraEnv has the variable A twice: keep one",
        ),
        (
            {"node": {"extraEnv": [{"name": "LMKV_INSTANCE_ID", "value": "n"}]}},
            "node.extraEnv has the variable LMKV_INSTANCE_ID, which the chart sets itself: remove it",
        ),
        (
            {"coordinator": {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "1"}]}},
            "coordinator.extraEnv has the variable A twice: keep one",
        ),
        (
            {
                "engines": {
                    "groups": [{"name": "a", "model": "m"}],
                    "extraEnv": [{"name": "LMKV_NODE_ADDRESS", "value": "x"}],
                }
            },
            "engines.extraEnv has the variable LMKV_NODE_ADDRESS, which the chart sets itself: remove it",
        ),
        (
            {
                "engines": {"groups": [{"name": "a", "model": "m"}]},
                "proxy": {
                    "enabled": True,
                    "engineApiKey": {"existingSecret": "k"},
                    "extraEnv": [{"name": "LMKV_ENGINE_API_KEY", "value": "x"}],
                },
            },
            "proxy.extraEnv has the variable LMKV_ENGINE_API_KEY, which the chart sets itself: remove it",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_pages_and_variables_that_kubernetes_would_not_take_are_refused_with_the_fix(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(values)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ({"name": "A", "value": 1}, "at '/node/extraEnv/0/value': got number, want string"),
        ({"value": "1"}, "at '/node/extraEnv/0': missing property 'name'"),
    ],
)
def test_a_variable_that_is_none_is_refused_by_its_path(variable: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render({"node": {"extraEnv": [variable]}})
    assert sentence in str(refusal.value)


def test_a_pod_security_context_that_is_null_is_refused_by_its_path() -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render({"podSecurityContext": None})
    assert "at '': missing property 'podSecurityContext'" in str(refusal.value)
