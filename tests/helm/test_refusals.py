"""Values that would be rendered and with which nothing could work: each is refused with the value that is meant.

`test_chart` has those that the schema refuses, and older ones; `test_config_values` those of configuration keys.
"""

from __future__ import annotations

import re
from typing import Any

import helm_python
import pytest

from tests.helm.chart import CHART, find, name_of, pods, render, rendered_or_refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {
            "node": {"mode": "sidecar"},
            "proxy": {"enabled": True},
            "engines": {
                "groups": [
                    {"name": "p", "model": "m", "role": "prefill", "replicas": 0},
                    {"name": "d", "model": "m", "role": "decode"},
                ]
            },
        },
        "the proxy has no prefill engines: set replicas of a group with role prefill in engines.groups to 1 or more",
    ),
    (
        {
            "node": {"mode": "sidecar"},
            "proxy": {"enabled": True},
            "engines": {
                "groups": [
                    {"name": "p", "model": "m", "role": "prefill"},
                    {"name": "d", "model": "m", "role": "decode", "replicas": 0},
                ]
            },
        },
        "the proxy has no decode engines: set replicas of a group with role decode in engines.groups to 1 or more",
    ),
    (
        {
            "node": {"mode": "sidecar"},
            "proxy": {"enabled": True},
            "engines": {
                "groups": [
                    {"name": "p", "model": "m", "role": "prefill"},
                    {"name": "d", "model": "n", "role": "decode"},
                ]
            },
        },
        "off, and have the models m and n: set the same model in both, or install them as two releases",
    ),
    (
        {"engines": {"groups": [{"name": "a", "model": "m", "replicas": 0}]}, "proxy": {"enabled": True}},
        "the proxy has no engines: set replicas of a group in engines.groups to 1 or more",
    ),
    (
        {
            "coordinator": {
                "layoutMap": {"existingSecret": "x"},
                "autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 3},
            }
        },
        "coordinator.autoscaling.minReplicas is 9, above coordinator.autoscaling.maxReplicas 3: swap them",
    ),
    (
        {
            "engines": {"groups": [{"name": "a", "model": "m"}]},
            "proxy": {"enabled": True, "autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 3}},
        },
        "proxy.autoscaling.minReplicas is 9, above proxy.autoscaling.maxReplicas 3: swap them",
    ),
    (
        {
            "engines": {"groups": [{"name": "a", "model": "m"}]},
            "proxy": {"enabled": True, "resources": None, "autoscaling": {"enabled": True}},
        },
        "measures the share of the requested CPU, and none is requested: set proxy.resources.requests.cpu",
    ),
    (
        {"proxy": {"autoscaling": {"enabled": True}}},
        "proxy.autoscaling.enabled needs a proxy: set proxy.enabled to true",
    ),
    (
        {
            "engines": {
                "groups": [
                    {
                        "name": "a",
                        "model": "m",
                        "autoscaling": {"minReplicas": 5, "maxReplicas": 2, "requestsPerReplica": 3},
                    }
                ]
            },
            "proxy": {"enabled": True},
            "keda": {"serverAddress": "http://p"},
        },
        "autoscaling of group a has minReplicas 5 above maxReplicas 2: swap them",
    ),
    (
        {"coordinator": {"port": 9000, "httpPort": 9000}},
        "and coordinator.port are both 9000, and are ports of one pod: set one of them to another port",
    ),
    (
        {"node": {"p2pPort": 9202}},
        "node.metricsPort and node.p2pPort are both 9202, and are ports of one pod: set one of them to another port",
    ),
    (
        {"node": {"metricsPort": 9215}},
        "node.metricsPort is 9215, one of the ports 9210 to 9229 of node.nixlPorts: set it to another port",
    ),
    (
        {"node": {"mode": "sidecar"}, "engines": {"port": 9200, "groups": [{"name": "a", "model": "m"}]}},
        "engines.port and node.p2pPort are both 9200, and are ports of one pod: set one of them to another port",
    ),
    (
        {"engines": {"args": ["--kv-transfer-config={}"], "groups": [{"name": "a", "model": "m"}]}},
        "chart sets itself, to lmkv's connector: remove it, and set keys of the connector in engines.config",
    ),
    (
        {"engines": {"groups": [{"name": "a", "model": "m", "args": ["--kv_transfer_config", "{}"]}]}},
        "chart sets itself, to lmkv's connector: remove it, and set keys of the connector in engines.config",
    ),
    (
        {"engines": {"groups": [{"name": "a", "model": "m", "args": ["--kv-transfer-config.kv_role", "kv_both"]}]}},
        "chart sets itself, to lmkv's connector: remove it, and set keys of the connector in engines.config",
    ),
    (
        {"engines": {"groups": [{"name": "a", "model": "m", "args": ["--max-model-len 4096"]}]}},
        "which vLLM does not understand: write --max-model-len as one item and its value as the next",
    ),
    (
        {"engines": {"groups": [{"name": "a", "model": "m", "args": ["--port=1"]}]}},
        "args of group a has --port=1, which follows from engines.port: set that",
    ),
    (
        {
            "node": {"mode": "sidecar"},
            "engines": {"args": ["-dp", "8"], "groups": [{"name": "a", "model": "m", "hosts": 2}]},
        },
        "engines.args has -dp, which follows from hosts and ranksPerHost of the group: set those",
    ),
    (
        {
            "engines": {"args": ["--ssl-keyfile", "x"], "groups": [{"name": "a", "model": "m"}]},
            "proxy": {"enabled": True},
        },
        "--ssl-keyfile, which would have engines serve HTTPS, and the proxy calls them by HTTP: remove it",
    ),
    (
        {"coordinator": {"ingress": {"enabled": True, "hosts": ["http://lmkv.acme.example/x"]}}},
        "and takes names of hosts alone, without scheme, port or path: write lmkv.acme.example",
    ),
    (
        {"coordinator": {"ingress": {"enabled": True, "hosts": ["lmkv:80"]}}},
        'has "lmkv:80", and takes names of hosts alone, without scheme, port or path: write lmkv',
    ),
    (
        {"coordinator": {"ingress": {"enabled": True, "hosts": ["10.0.0.1"]}}},
        "has 10.0.0.1, which is an address, and takes names of hosts alone: leave it empty to admit all",
    ),
    (
        {"coordinator": {"ingress": {"enabled": True, "hosts": ["LMKV.example"]}}},
        "and takes names of hosts alone, without scheme, port or path: write lmkv.example",
    ),
    (
        {"coordinator": {"ingress": {"enabled": True, "hosts": ["a.b", "a.b"]}}},
        "coordinator.ingress.hosts has a.b twice: keep one",
    ),
    (
        {"coordinator": {"ingress": {"enabled": True, "hosts": ["//"]}}},
        'coordinator.ingress.hosts has "//", and takes names of hosts alone, without scheme, port or path',
    ),
    (
        {"coordinator": {"config": {"allowed_hosts": ["x.y"]}, "ingress": {"enabled": True, "hosts": ["a.b"]}}},
        "coordinator.ingress.hosts has a.b, which coordinator.config.allowed_hosts does not admit: add it there",
    ),
    (
        {"networkPolicy": {"enabled": True, "egress": {"enabled": True}}, "node": {"remote": {"url": "redis://v"}}},
        "networkPolicy.egress.enabled blocks node.remote: admit the store in networkPolicy.egress.node",
    ),
    (
        {
            "networkPolicy": {"enabled": True, "egress": {"enabled": True}},
            "node": {
                "extraEnv": [{"name": "LMKV_REMOTE_URL", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]
            },
        },
        "networkPolicy.egress.enabled blocks node.remote: admit the store in networkPolicy.egress.node",
    ),
    (
        {
            "networkPolicy": {"enabled": True, "egress": {"enabled": True}},
            "engines": {"groups": [{"name": "a", "model": "m"}]},
        },
        "admit its registry in networkPolicy.egress.engine, or set engines.modelVolume to a volume with it",
    ),
    (
        {"networkPolicy": {"egress": {"enabled": True}}},
        "networkPolicy.egress.enabled restricts nothing without policies: set networkPolicy.enabled to true",
    ),
    (
        {"networkPolicy": {"enabled": True, "egress": {"enabled": True, "node": [{"podSelector": {}}]}}},
        "at '/networkPolicy/egress/node/0': additional properties 'podSelector' not allowed",
    ),
    (
        {"networkPolicy": {"enabled": True, "coordinatorFrom": [{"to": []}]}},
        "at '/networkPolicy/coordinatorFrom/0': additional properties 'to' not allowed",
    ),
    (
        {"networkPolicy": {"enabled": True, "monitoringFrom": []}, "monitoring": {"serviceMonitor": {"enabled": True}}},
        "from the metrics of monitoring.serviceMonitor: name its pods in networkPolicy.monitoringFrom",
    ),
    (
        {"node": {"remote": {"url": "redis://u:p@v"}}},
        "of the node's ConfigMap could see: put the URL into a secret and set node.remote.existingSecret",
    ),
    (
        {"node": {"remote": {"url": "redis://v", "existingSecret": "s"}}},
        "node.remote.url and node.remote.existingSecret both name the store: keep one",
    ),
    ({"node": {"remote": {"url": "http://v"}}}, "at '/node/remote/url': 'http://v' does not match"),
    (
        {"tls": {"serverSecret": "s"}},
        "tls.serverSecret is a certificate that nothing uses without TLS: set tls.enabled to true",
    ),
    (
        {"tls": {"clientSecret": "s", "enabled": True, "serverSecret": "s"}},
        "tls.clientSecret is a certificate that nothing uses unless TLS is mutual: set tls.mutual to true",
    ),
    (
        {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "a"}}}},
        "tls.certManager.enabled issues certificates that nothing uses without TLS: set tls.enabled to true",
    ),
    (
        {"webhook": {"enabled": True}, "tls": {"certManager": {"enabled": True}}},
        "tls.certManager needs an issuer: set tls.certManager.issuerRef.name",
    ),
    (
        {
            "tls": {
                "enabled": True,
                "certManager": {"enabled": True, "duration": "1h", "renewBefore": "90m", "issuerRef": {"name": "a"}},
            }
        },
        "is 90m, and certificates are valid for tls.certManager.duration 1h: set it to less",
    ),
    (
        {"auth": {"engineSecret": "e"}},
        "auth.engineSecret is a token that nothing checks: set auth.tokensSecret, the tokens that are accepted",
    ),
    (
        {"node": {"resources": {"limits": {"memory": "1Gi"}}}},
        "node.resources.limits has memory, which follows from node.maxLocalCpuSize and node.memoryOverhead: remove it",
    ),
    (
        {"node": {"poolVolume": {"emptyDir": {"medium": "Memory", "sizeLimit": "5Gi"}}}},
        "is 5Gi, which does not hold the 5 GiB of node.maxLocalCpuSize and the list of its chunks: raise it",
    ),
    (
        {"node": {"mode": "sidecar", "poolClaim": {"resources": {"requests": {"storage": "4Gi"}}}}},
        "is 4Gi, which does not hold the 5 GiB of node.maxLocalCpuSize and the list of its chunks: raise it",
    ),
    (
        {"node": {"maxRemoteSize": 20, "remote": {"volume": {"nfs": {}}, "url": "s3://bucket"}}},
        "node.remote.volume is a store, and node.remote.url or node.remote.existingSecret names another: keep one",
    ),
    (
        {"node": {"maxRemoteSize": 20, "remote": {"volume": {"emptyDir": {}}}}},
        "node.remote.volume is an emptyDir, which each pod has for itself: name a volume that pods share",
    ),
    (
        {"node": {"remote": {"volume": {"persistentVolumeClaim": {"claimName": "kv"}}}}},
        "evicts nothing: set node.maxRemoteSize to the GiB that the chunks of all nodes may take",
    ),
    (
        {"node": {"maxRemoteSize": 20}},
        "node.maxRemoteSize needs a folder that nodes share: set node.remote.volume",
    ),
    (
        {"node": {"maxRemoteSize": 20, "remote": {"url": "s3://bucket"}}},
        "node.maxRemoteSize is for the folder of node.remote.volume, and node.remote.url names another store",
    ),
    (
        {"node": {"maxLocalDiskSize": 20, "diskVolume": {"emptyDir": {"sizeLimit": "10Gi"}}}},
        "10Gi, which does not hold the 20 GiB of node.maxLocalDiskSize and the list of its chunks: raise it",
    ),
    (
        {"node": {"mode": "sidecar", "nodeSelector": {"a": "b"}}},
        "is for node.mode daemonSet, and sidecars are in the pods of engines: set engines.nodeSelector",
    ),
    (
        {"node": {"mode": "sidecar", "gpuAffinity": {"enabled": True}}},
        "node.gpuAffinity is for node.mode daemonSet: sidecars are where their engines' resources are",
    ),
    (
        {"node": {"rdma": {"resource": "a/b"}, "transferChannel": "tcp"}},
        "tcp does not use: set node.transferChannel to auto or nixl, or remove node.rdma.resource",
    ),
    (
        {"podSecurityContext": {"runAsUser": 0}},
        "is 0, which is root, and podSecurityContext.runAsNonRoot refuses root: set one of them",
    ),
    (
        {"coordinator": {"podLabels": {"app.kubernetes.io/name": "x"}}},
        "coordinator.podLabels sets app.kubernetes.io/name, which the chart sets itself: remove it",
    ),
    ({"coordinator": {"podLabels": {"a": "x y"}}}, "at '/coordinator/podLabels/a': 'x y' does not match"),
    ({"coordinator": {"podAnnotations": {"a": True}}}, "at '/coordinator/podAnnotations/a': got boolean, want string"),
    (
        {"coordinator": {"extraVolumes": [{"name": "config", "emptyDir": {}}]}},
        "coordinator.extraVolumes has a volume called config, and the pods have one of that name: rename it",
    ),
    (
        {"coordinator": {"extraVolumeMounts": [{"name": "nope", "mountPath": "/x"}]}},
        "the container coordinator mounts nope, which is no volume of its pods: add it to coordinator.extraVolumes",
    ),
    (
        {
            "coordinator": {
                "extraVolumes": [{"name": "x", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "x", "mountPath": "/etc/lmkv"}],
            }
        },
        "the container coordinator mounts two volumes at /etc/lmkv: mount that of coordinator.extraVolumes elsewhere",
    ),
    (
        {"coordinator": {"config": {"audit_log": "/var/log/a"}}},
        "no volume holds it: mount one there by coordinator.extraVolumes and coordinator.extraVolumeMounts",
    ),
    ({"image": {"registry": "https://ghcr.io"}}, "at '/image/registry': 'https://ghcr.io' does not match"),
    ({"image": {"tag": "a b"}}, "at '/image/tag': 'a b' does not match"),
    ({"node": {"image": {"repository": "x:1"}}}, "at '/node/image/repository': 'x:1' does not match"),
    ({"image": {"pullSecrets": ["a"]}}, "at '/image/pullSecrets/0': got string, want object"),
    ({"clusterSecret": {"existingSecret": "a", "key": ""}}, "at '/clusterSecret/key': minLength: got 0, want 1"),
    ({"fullnameOverride": "My_Name"}, "at '/fullnameOverride': 'My_Name' does not match"),
    (
        {"webhook": {"enabled": True, "tlsSecret": "t", "caBundle": "-----BEGIN"}},
        "at '/webhook/caBundle': '-----BEGIN' does not match",
    ),
    (
        {"engines": {"groups": [{"name": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "model": "m"}]}},
        "and Kubernetes takes 52: shorten the name of the group in engines.groups, or set fullnameOverride",
    ),
    (
        {"engines": {"groups": [{"name": "a", "model": "m"}, {"name": "a-headless", "model": "m"}]}},
        "groups a and a-headless of engines.groups would both have a resource called",
    ),
    (
        {
            "node": {"mode": "sidecar"},
            "engines": {"groups": [{"name": "a", "model": "m", "hosts": 2}, {"name": "a-hosts", "model": "m"}]},
        },
        "groups a and a-hosts of engines.groups would both have a resource called",
    ),
    (
        {
            "proxy": {"enabled": True, "config": {"cache_salt_policy": "user"}},
            "engines": {"groups": [{"name": "a", "model": "m"}]},
        },
        "proxy.config.cache_salt_policy is user, which needs tokens: set auth.tokensSecret",
    ),
    (
        {
            "node": {"mode": "sidecar", "config": {"enable_pd": False}},
            "proxy": {"enabled": True},
            "engines": {
                "groups": [
                    {"name": "p", "model": "m", "role": "prefill"},
                    {"name": "d", "model": "m", "role": "decode"},
                ]
            },
        },
        "the role prefill, and node.config.enable_pd is false, so that no prompt is handed off: remove it",
    ),
    ({"node": {"memoryOverhead": 0.2}}, "at '/node/memoryOverhead': exclusiveMinimum: got 0.2, want 0.25"),
]


def linted(values: dict[str, Any]) -> str:
    """What `helm lint` finds."""
    found = helm_python.lint(CHART, values, strict=True)["messages"]
    return "\n".join(each["error"].replace("\\", "") for each in found)


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_with_the_value_that_is_meant(values: dict[str, Any], sentence: str) -> None:
    _, refusal = rendered_or_refused(values)
    assert sentence in refusal
    if "None" not in str(values):  # which the linter does not take as the removal of a default
        assert sentence in linted(values)


GROUP = {"name": "a", "model": "m"}


@pytest.mark.parametrize(
    "values",
    [
        {"engines": {"groups": [{"name": "x" * 34, "model": "m"}, {"name": "7b", "model": "m"}]}},
        {"fullnameOverride": "kv", "engines": {"groups": [{"name": "x" * 42, "model": "m"}]}},
        {"engines": {"groups": [{**GROUP, "args": ["--speculative-config", '{"a": 1}', "--max-model-len", "4"]}]}},
        {"engines": {"groups": [{**GROUP, "replicas": 0}, {"name": "b", "model": "m"}]}, "proxy": {"enabled": True}},
        {"engines": {"groups": [GROUP, {"name": "b", "model": "n"}]}, "proxy": {"enabled": True}},
        {"coordinator": {"ingress": {"enabled": True, "hosts": ["*.a.b"]}, "config": {"allowed_hosts": ["*.a.b"]}}},
        {"coordinator": {"httpRoute": {"hostnames": ["x.a.b"]}, "config": {"allowed_hosts": "*.a.b"}}},
        {"node": {"transferChannel": "tcp", "metricsPort": 9215}},
        {"podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False}},
        {"podSecurityContext": {"runAsUser": 1000650000, "runAsGroup": 1000650000}},
        {"image": {"registry": "registry.acme.example:5000/kv", "tag": "0.1.0@sha256:" + "a" * 64}},
        {
            "coordinator": {
                "config": {"audit_log": "/var/log/lmkv/audit"},
                "extraVolumes": [{"name": "audit", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "audit", "mountPath": "/var/log/lmkv"}],
            }
        },
        {
            "networkPolicy": {"enabled": True, "egress": {"enabled": True, "node": [{"ports": [{"port": 6379}]}]}},
            "node": {"remote": {"url": "rediss://valkey.acme.example:6379/0"}},
        },
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_works_is_rendered(values: dict[str, Any]) -> None:
    assert rendered_or_refused(values)[1] == ""


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("team.a", "team-a-lmkv"),
        ("7b", "lmkv-7b-lmkv"),
        ("v1.lmkv", "v1-lmkv"),
        ("x" * 39 + ".y", "x" * 39),
        ("lmkv", "lmkv"),
    ],
)
def test_names_of_resources_are_names_of_services_whatever_the_release_is_called(release: str, name: str) -> None:
    engines = {"groups": [{"name": "7b", "model": "m"}]}
    values = {"engines": engines, "proxy": {"enabled": True}, "webhook": {"enabled": True}}
    manifests = render(values, release)
    assert find(manifests, f"Service/{name}-coordinator-headless")
    for manifest in manifests:
        limit = 52 if manifest["kind"] == "StatefulSet" else 63
        label = re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
        assert label, name_of(manifest)
        assert len(manifest["metadata"]["name"]) <= limit or manifest["kind"] not in ("StatefulSet", "Service")
    assert all(pod["metadata"]["labels"]["app.kubernetes.io/instance"] == release for _, pod in pods(manifests))
