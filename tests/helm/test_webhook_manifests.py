"""The webhook's configuration, its certificate, and what it adds to pods."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from lmkv_server.webhook.app import PATH
from lmkv_server.webhook.injection import ROLE_LABEL, Additions
from tests.helm.chart import find, manifests_of, name_of, pods, render, values_of


@pytest.mark.parametrize("case", ["webhook", "webhook-sidecar"])
def test_the_webhook_never_keeps_a_pod_from_starting_and_sees_only_labelled_ones(case: str) -> None:
    manifests = manifests_of(case)
    configuration = find(manifests, "MutatingWebhookConfiguration/demo-lmkv-webhook-prod")
    assert "namespace" not in configuration["metadata"]
    (webhook,) = configuration["webhooks"]
    assert (webhook["failurePolicy"], webhook["sideEffects"], webhook["timeoutSeconds"]) == ("Ignore", "None", 5)
    assert webhook["objectSelector"] == {"matchExpressions": [{"key": ROLE_LABEL, "operator": "Exists"}]}
    assert webhook["clientConfig"]["service"]["path"] == PATH
    assert [(rule["operations"], rule["resources"]) for rule in webhook["rules"]] == [(["CREATE"], ["pods"])]
    if case == "webhook":
        assert "caBundle" not in webhook["clientConfig"]
        secret = configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"].partition("/")
        certificate = find(manifests, f"Certificate/{secret[2]}")
        assert (secret[0], certificate["spec"]["secretName"]) == ("prod", secret[2])
        assert "demo-lmkv-webhook.prod.svc" in certificate["spec"]["dnsNames"]


@pytest.mark.parametrize("case", ["webhook", "webhook-sidecar"])
def test_additions_are_what_the_charts_own_engines_have(case: str) -> None:
    engines = {**values_of(case).get("engines", {}), "groups": [{"name": "own", "model": "m"}]}
    manifests = render({**values_of(case), "engines": engines})
    (own,) = (pod["spec"] for name, pod in pods(manifests) if name == "StatefulSet/demo-lmkv-engine-own")
    text = find(manifests, "ConfigMap/demo-lmkv-webhook")["data"]["pods.yaml"]
    added = msgspec.yaml.decode(text, type=dict[str, Additions])["both"]
    settings = yaml.safe_load(find(manifests, "ConfigMap/demo-lmkv-engine")["data"]["lmkv.yaml"]) or {}
    (engine,) = own["containers"]
    variables = [each for each in engine["env"] if each["name"] not in NOT_ADDED]
    assert list(added.env)[: len(variables)] == variables
    assert [each["name"] for each in added.env][len(variables) :] == [f"LMKV_{key.upper()}" for key in sorted(settings)]
    at = engine["command"].index("--kv-transfer-config")
    assert list(added.args) == engine["command"][at : at + 2]
    volumes = {volume["name"]: volume for volume in own["volumes"]}
    for volume in added.volumes:
        name = volume["name"].removeprefix("lmkv-")
        wanted = {**volumes[name], "name": volume["name"]}
        if "secret" in wanted:
            wanted["secret"] = {**wanted["secret"], "defaultMode": 0o444}
        assert volume == wanted
    for node, wanted in zip(added.init_containers, own.get("initContainers", ()), strict=True):
        for key in wanted.keys() - {"name", "command", "env", "volumeMounts", "securityContext"}:
            assert node[key] == wanted[key], key
        mounts = [{**mount, "name": f"lmkv-{mount['name']}"} for mount in wanted["volumeMounts"]]
        assert node["volumeMounts"] == [mount for mount in mounts if mount["name"] != "lmkv-node-config"]
        assert node["securityContext"].items() >= {**wanted["securityContext"], "runAsUser": added.user}.items()
    used = {mount["name"] for mount in added.volume_mounts}
    used |= {mount["name"] for node in added.init_containers for mount in node["volumeMounts"]}
    assert used == {volume["name"] for volume in added.volumes}


NOT_ADDED = {"LMKV_CONFIG_FILE", "HOME", "HF_HOME", "OTEL_EXPORTER_OTLP_ENDPOINT"}
"""Variables of the chart's own engines that pods of others set themselves, or that need this release's ConfigMaps."""


def test_a_certificate_of_the_operators_own_is_used_and_none_is_made() -> None:
    manifests = render({"webhook": {"enabled": True, "tlsSecret": "own", "caBundle": "Q0E="}})
    assert not [name_of(manifest) for manifest in manifests if manifest["kind"] in {"Certificate", "Secret"}]
    (webhook,) = find(manifests, "MutatingWebhookConfiguration/demo-lmkv-webhook-prod")["webhooks"]
    assert webhook["clientConfig"]["caBundle"] == "Q0E="
    volumes = dict(pods(manifests))["Deployment/demo-lmkv-webhook"]["spec"]["volumes"]
    assert [volume["secret"]["secretName"] for volume in volumes if volume["name"] == "tls"] == ["own"]
