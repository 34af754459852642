"""`helm/lmkv`: every case renders what it must, as Kubernetes wants it, and what is wrong is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from helm.generate import made, sections
from tests.helm.chart import (
    CASES,
    CHART,
    NAMES,
    expected,
    manifests_of,
    name_of,
    notes,
    render,
    rendered_or_refused,
    values_of,
)

KUBERNETES = ("1.30", "1.33", "1.37")
"""The oldest version that Chart.yaml asks for, the newest that there is, and one between."""
ELSEWHERE = (
    "cert-manager.io/v1",
    "gateway.networking.k8s.io/v1",
    "keda.sh/v1alpha1",
    "leaderworkerset.x-k8s.io/v1",
    "monitoring.coreos.com/v1",
)
"""What is no part of Kubernetes itself."""


@pytest.mark.parametrize("case", NAMES)
def test_helm_finds_nothing_to_complain_about(case: str) -> None:
    found = helm_python.lint(CHART, dict(values_of(case)), strict=True, kube_version=f"v{KUBERNETES[0]}.0")
    assert found["errors"] == []
    assert found["messages"] == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_manifest(version: str) -> None:
    every = {json.dumps(manifest): manifest for case in NAMES for manifest in manifests_of(case)}
    checked = [manifest for manifest in every.values() if manifest["apiVersion"] not in ELSEWHERE]
    assert len(checked) > 50
    for manifest in checked:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("case", NAMES)
def test_a_case_renders_what_it_must(case: str) -> None:
    assert (CASES / case / "expected.yaml").read_text() == expected(case), (
        "if this is as you meant it: python -m tests.helm.chart"
    )


@pytest.mark.parametrize("case", NAMES)
def test_no_two_manifests_have_one_name(case: str) -> None:
    names = [name_of(manifest) for manifest in manifests_of(case)]
    assert len(names) == len(set(names))


def test_readme_schema_keys_and_rules_are_what_follows_from_values_and_code() -> None:
    files = made()
    assert len(files) == 4
    for file, content in files.items():
        assert file.read_text() == content, f"{file.name} is out of date: python helm/generate.py"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"coordinatr": {}}, "at '': additional properties 'coordinatr' not allowed"),
        ({"coordinator": {"prot": 9000}}, "at '/coordinator': additional properties 'prot' not allowed"),
        ({"coordinator": {"port": "9000"}}, "at '/coordinator/port': got string, want integer"),
        ({"coordinator": {"port": 70000}}, "at '/coordinator/port': maximum: got 70,000, want 65,535"),
        ({"node": {"mode": "deployment"}}, "at '/node/mode': value must be one of 'daemonSet', 'sidecar'"),
        ({"node": {"maxLocalCpuSize": 0}}, "at '/node/maxLocalCpuSize': minimum: got 0, want 0.001"),
        ({"node": {"maxLocalCpuSize": "5GB"}}, "at '/node/maxLocalCpuSize': got string, want number"),
        ({"node": {"capabilities": ["cap_sys_nice"]}}, "at '/node/capabilities/0': 'cap_sys_nice' does not match"),
        ({"podSecurityContext": {"runAsUser": None}}, "at '/podSecurityContext': missing property 'runAsUser'"),
        ({"node": {"drain": {"timeoutSeconds": 0}}}, "at '/node/drain/timeoutSeconds': minimum: got 0, want 1"),
        ({"node": {"drain": {"timeoutSeconds": 601}}}, "at '/node/drain/timeoutSeconds': maximum: got 601, want 600"),
        ({"node": {"nixlPorts": [1]}}, "at '/node/nixlPorts': minItems: got 1, want 2"),
        ({"engines": {"groups": [{"name": "a"}]}}, "at '/engines/groups/0': missing property 'model'"),
        ({"engines": {"groups": [{"name": "A", "model": "m"}]}}, "at '/engines/groups/0/name': 'A' does not match"),
        (
            {"coordinator": {"autoscaling": {"minReplicas": 0}}},
            "at '/coordinator/autoscaling/minReplicas': minimum: got 0, want 1",
        ),
        ({"proxy": {"policy": "kv-aware"}}, "at '/proxy/policy': value must be one of 'round_robin'"),
        ({"commonLabels": {"team": 7}}, "at '/commonLabels/team': got number, want string"),
        ({"extraObjects": [7]}, "at '/extraObjects/0': got number, want"),
        ({"node": {"extraVolumes": [{"emptyDir": {}}]}}, "at '/node/extraVolumes/0': missing property 'name'"),
        ({"proxy": {"podSpec": []}}, "at '/proxy/podSpec': got array, want object"),
        (
            {"engines": {"groups": [{"name": "a", "model": "m", "autoscaling": {"maxReplicas": 4}}]}},
            "at '/engines/groups/0/autoscaling': missing property 'requestsPerReplica'",
        ),
        ({"engines": {"groups": [{"name": "a", "model": "m", "hosts": 0}]}}, "at '/engines/groups/0/hosts': minimum"),
        ({"proxy": {"httpRoute": {"parentRefs": [{}]}}}, "at '/proxy/httpRoute/parentRefs/0': missing property 'name'"),
        ({"webhook": {"timeoutSeconds": 31}}, "at '/webhook/timeoutSeconds': maximum: got 31, want 30"),
        ({"keda": {"serverAddress": "prometheus:9090"}}, "at '/keda/serverAddress': 'prometheus:9090' does not match"),
        ({"logLevel": "verbose"}, "at '/logLevel': value must be one of 'debug', 'info', 'warning', 'error'"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_schema_refuses_what_is_wrong_by_its_path(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render(values)
    assert sentence in str(refusal.value)


def places_of_values() -> list[str]:
    """The path of each documented value, and of each map that holds some."""
    documented = [value.path for section in sections((CHART / "values.yaml").read_text()) for value in section.values]
    above = {path.rsplit(".", count)[0] for path in documented for count in range(1, path.count(".") + 1)}
    return sorted({*documented, *above})


def is_required(path: str) -> bool:
    """Whether the schema requires it, whatever the other values are."""
    *folders, name = path.split(".")
    schema = json.loads((CHART / "values.schema.json").read_text())
    for folder in folders:
        schema = schema["properties"][folder]
    return name in schema.get("required", ())


def with_null(values: dict[str, Any], path: str) -> dict[str, Any]:
    *folders, name = path.split(".")
    place = values
    for folder in folders:
        place = place.setdefault(folder, {})
    place[name] = None
    return values


def test_null_of_what_the_schema_requires_is_refused_by_its_path() -> None:
    required = [path for path in places_of_values() if is_required(path)]
    assert {"podSecurityContext", "node", "coordinator.port", "tls.enabled"} <= set(required)
    for path in required:
        _, refusal = rendered_or_refused(with_null({}, path))
        assert f"missing property '{path.rpartition('.')[2]}'" in refusal, f"{path}: null: {refusal}"


@pytest.mark.timeout(600)  # some 140 renders
@pytest.mark.parametrize(
    "cases",
    [
        ("rdma", "mutual-tls", "network-policy"),
        ("sidecar", "hosts"),
        ("drain", "routes"),
        ("network-policy-egress", "scaling"),
        ("customized",),
        ("webhook",),  # whose certificate is not made in each rendering
    ],
)
def test_null_of_other_values_renders_what_kubernetes_takes_or_is_refused_by_the_chart(cases: Sequence[str]) -> None:
    """Helm removes a value that is null: a template that needs it would fail as a Go program does."""
    together = json.dumps({key: value for case in cases for key, value in values_of(case).items()})
    checked = {json.dumps(manifest) for manifest in render(json.loads(together))}
    optional = [path for path in places_of_values() if not is_required(path)]
    assert {"securityContext", "otlpEndpoint", "node.poolVolume", "coordinator.resources"} <= set(optional)
    for path in optional:
        manifests, refusal = rendered_or_refused(with_null(json.loads(together), path))
        assert not refusal or "execution error at" in refusal, f"{path}: null: {refusal}"  # a sentence of the chart's
        for manifest in manifests:
            text = json.dumps(manifest)
            if text not in checked and manifest["apiVersion"] not in ELSEWHERE:
                kubernetes_validate.validate(manifest, KUBERNETES[0], strict=True)
            checked.add(text)


GROUP = {"name": "a", "model": "m"}
SCALING = {"maxReplicas": 4, "requestsPerReplica": 8}
ISSUER = {"enabled": True, "issuerRef": {"name": "ca"}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tls": {"mutual": True}}, "tls.mutual needs tls.enabled"),
        ({"tls": {"enabled": True}}, "set tls.serverSecret to a secret, or tls.certManager.enabled to true"),
        (
            {"tls": {"enabled": True, "mutual": True, "serverSecret": "s"}},
            "set tls.clientSecret to a secret, or tls.certManager.enabled to true",
        ),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "set tls.certManager.issuerRef.name"),
        ({"auth": {"tokensSecret": "t"}}, "set auth.engineSecret, the token of nodes and proxies"),
        (
            {
                "auth": {"tokensSecret": "t", "engineSecret": "e"},
                "monitoring": {"serviceMonitor": {"enabled": True}},
            },
            "set auth.readerSecret, the token of Prometheus",
        ),
        (
            {"auth": {"tokensSecret": "t", "engineSecret": "e"}, "node": {"drain": {"enabled": True}}},
            "node.drain.enabled needs the token of an operator, because with auth.tokensSecret the token of nodes has "
            "role engine, which may not drain: set auth.operatorSecret",
        ),
        (
            {"coordinator": {"autoscaling": {"enabled": True}}},
            "more replicas add no capacity: set coordinator.layoutMap.existingSecret",
        ),
        ({"node": {"mode": "sidecar", "hostNetwork": True}}, "node.hostNetwork is for node.mode daemonSet"),
        (
            {"node": {"hostNetwork": True}, "networkPolicy": {"enabled": True}},
            "admit their hosts by networkPolicy.coordinatorFrom",
        ),
        ({"node": {"maxLocalDiskSize": 1}}, "set node.diskVolume to a volume"),
        ({"node": {"poolClaim": {"storageClassName": "s"}}}, "node.poolClaim is for node.mode sidecar"),
        (
            {"node": {"mode": "sidecar", "poolClaim": {"storageClassName": "s"}, "persistPool": False}},
            "set node.persistPool to true, or remove node.poolClaim",
        ),
        (
            {"node": {"mode": "sidecar", "poolClaim": {"storageClassName": "s"}, "poolVolume": {"emptyDir": {}}}},
            "node.poolClaim and node.poolVolume are both set: keep one",
        ),
        ({"node": {"diskVolume": {"emptyDir": {}}}}, "set node.maxLocalDiskSize to the GiB"),
        ({"node": {"mode": "sidecar", "diskClaim": {"volumeName": "v"}}}, "set node.maxLocalDiskSize to the GiB"),
        (
            {"node": {"maxLocalDiskSize": 1, "diskClaim": {"volumeName": "v"}}},
            "node.diskClaim is for node.mode sidecar",
        ),
        (
            {
                "node": {
                    "mode": "sidecar",
                    "maxLocalDiskSize": 1,
                    "diskClaim": {"volumeName": "v"},
                    "diskVolume": {"emptyDir": {}},
                }
            },
            "node.diskClaim and node.diskVolume are both set: keep one",
        ),
        (
            {"commonLabels": {"app.kubernetes.io/name": "kv"}},
            "commonLabels sets app.kubernetes.io/name, which the chart sets itself: remove it",
        ),
        (
            {"webhook": {"enabled": True}, "node": {"mode": "sidecar", "poolClaim": {"volumeName": "v"}}},
            "pods of others, which have no claims: set node.poolVolume and node.diskVolume instead of claims",
        ),
        (
            {"webhook": {"enabled": True}, "node": {"mode": "sidecar", "poolVolume": {"hostPath": {"path": "/pool"}}}},
            "set node.poolVolume and node.diskVolume to another type than hostPath",
        ),
        (
            {"webhook": {"enabled": True}, "node": {"mode": "sidecar", "encryptionKeysSecret": "keys"}},
            "where all users could read the keys of node.encryptionKeysSecret: set node.mode to daemonSet",
        ),
        (
            {"webhook": {"enabled": True}, "node": {"mode": "sidecar"}, "networkPolicy": {"enabled": True}},
            "admit them by networkPolicy.coordinatorFrom",
        ),
        ({"proxy": {"ingress": {"enabled": True}}}, "proxy.ingress.enabled needs a proxy: set proxy.enabled to true"),
        (
            {"coordinator": {"grpcRoute": {"enabled": True}}},
            "coordinator.grpcRoute.enabled needs a gateway: set coordinator.grpcRoute.parentRefs",
        ),
        (
            {"coordinator": {"ingress": {"enabled": True}}, "networkPolicy": {"enabled": True}},
            "name the pods of the gateway in networkPolicy.coordinatorFrom",
        ),
        (
            {"networkPolicy": {"enabled": True, "egress": {"enabled": True}}, "otlpEndpoint": "http://otel:4317"},
            "admit the collector in networkPolicy.egress.all",
        ),
        (
            {
                "networkPolicy": {"enabled": True, "egress": {"enabled": True}},
                "coordinator": {"layoutMap": {"existingSecret": "map"}},
            },
            "admit Valkey in networkPolicy.egress.coordinator",
        ),
        (
            {
                "engines": {"groups": [GROUP]},
                "proxy": {"enabled": True, "autoscaling": {"enabled": True, "requestsPerReplica": 9}},
            },
            "proxy.autoscaling.requestsPerReplica is measured by Prometheus: set keda.serverAddress",
        ),
        (
            {"engines": {"groups": [GROUP | {"autoscaling": SCALING}]}, "keda": {"serverAddress": "http://prometheus"}},
            "the autoscaling of group a counts requests at the proxy: set proxy.enabled to true",
        ),
        (
            {"engines": {"groups": [GROUP | {"autoscaling": SCALING}]}, "proxy": {"enabled": True}},
            "the autoscaling of group a is measured by Prometheus: set keda.serverAddress",
        ),
        (
            {"node": {"mode": "sidecar"}, "engines": {"groups": [GROUP | {"role": "prefill", "hosts": 2}]}},
            "the engines of group a have several hosts and the role prefill: only role both may have several hosts",
        ),
        (
            {
                "node": {"mode": "sidecar", "poolClaim": {"volumeName": "v"}},
                "engines": {"groups": [GROUP | {"hosts": 2}]},
            },
            "whose sidecars cannot have claims: set node.poolVolume and node.diskVolume",
        ),
        ({"engines": {"groups": [GROUP | {"ranksPerHost": 2}]}}, "ranksPerHost of group a is for engines with several"),
        (
            {"coordinator": {"service": {"loadBalancerClass": "internal"}}},
            "coordinator.service.loadBalancerClass is for load balancers: set coordinator.service.type to LoadBalancer",
        ),
        ({"node": {"nixlPorts": [9300, 9200]}}, "node.nixlPorts names the last port before the first"),
        ({"engines": {"groups": [GROUP, GROUP]}}, "engines.groups has two groups called a"),
        ({"engines": {"groups": [GROUP | {"role": "decode"}]}}, "set node.mode to sidecar"),
        ({"proxy": {"enabled": True}}, "the proxy has no engines: add a group to engines.groups"),
        (
            {
                "node": {"mode": "sidecar"},
                "proxy": {"enabled": True},
                "engines": {"groups": [GROUP | {"role": "prefill"}]},
            },
            "add a group with role decode to engines.groups",
        ),
        (
            {
                "node": {"mode": "sidecar"},
                "proxy": {"enabled": True},
                "engines": {"groups": [GROUP | {"role": "decode"}]},
            },
            "add a group with role prefill to engines.groups",
        ),
        (
            {
                "node": {"mode": "sidecar"},
                "proxy": {"enabled": True},
                "engines": {
                    "groups": [
                        GROUP,
                        {**GROUP, "name": "p", "role": "prefill"},
                        {**GROUP, "name": "d", "role": "decode"},
                    ]
                },
            },
            "the proxy cannot mix engines of role both with prefill and decode engines",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_that_contradict_each_other_are_refused_with_the_fix(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(values)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("case", "command"),
    [
        ("default", "LMKV_NODE_ADDRESS=/run/lmkv/$(NODE_INSTANCE_ID)/engine.sock"),
        ("engines", "kubectl --namespace prod port-forward service/demo-lmkv-engine-llama 8000 &"),
        ("prefill-decode", "kubectl --namespace prod port-forward service/demo-lmkv-proxy 9100 &"),
        ("tls", "https://localhost:9001"),
        ("autoscaling", "kubectl --namespace prod get hpa demo-lmkv-coordinator"),
    ],
)
def test_the_notes_say_what_to_type_next(case: str, command: str) -> None:
    printed = notes(values_of(case))
    assert "helm test demo --namespace prod --logs" in printed
    assert command in printed


@pytest.mark.parametrize("case", ["default", "tls", "tokens", "mutual-tls", "network-policy"])
def test_the_notes_warn_of_a_fleet_without_authentication(case: str) -> None:
    warned = "All clients that reach a port of the fleet may call it." in notes(values_of(case))
    assert warned == (case in ("default", "tls"))  # TLS alone authenticates no client


def test_values_in_our_pages_are_values_of_the_chart() -> None:
    page = (CHART.parents[1] / "docs" / "operate" / "kubernetes.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        assert any(manifest["kind"] == "StatefulSet" for manifest in render(yaml.safe_load(block)))
    known = json.loads((CHART / "values.schema.json").read_text())
    for path in re.findall(
        r"`((?:node|coordinator|engines|proxy|tls|auth|networkPolicy|keda|monitoring)\.[A-Za-z._]+)", page
    ):
        place = known
        for name in path.split("."):
            assert name in place.get("properties", {}), f"docs/operate/kubernetes.md names {path}, which is no value"
            place = place["properties"][name]
            if "properties" not in place:
                break
