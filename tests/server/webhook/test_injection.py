"""What is added to pods of engines that others create, and which pods are refused with the fix."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from lmkv_server.webhook.injection import Additions, Refusal, inject, refuse
from tests.server.webhook.pods import (
    CONFIG,
    HOST,
    KSERVE,
    LLM_D,
    NODE,
    PRODUCTION_STACK,
    SIDECAR,
    SOCKETS,
    Pod,
    patched,
    pod,
)


@pytest.mark.parametrize("additions", [HOST, SIDECAR], ids=["host", "sidecar"])
@pytest.mark.parametrize("created", [pod(), KSERVE, PRODUCTION_STACK, LLM_D], ids=["vllm", "kserve", "stack", "llm-d"])
def test_an_engine_gets_connector_socket_and_node_and_keeps_what_it_has(created: Pod, additions: Additions) -> None:
    changed = patched(created, inject(created, {"both": additions}))
    before, after = created["spec"], changed["spec"]
    engine, own = after["containers"][0], before["containers"][0]
    words = " ".join([*engine.get("command", ()), *engine.get("args", ())])
    assert words.count("--kv-transfer-config") == 1
    assert words.count("LMKVConnector") == 1
    assert words.startswith(" ".join([*own.get("command", ()), *own.get("args", ())]))
    assert engine["env"] == [*own.get("env", ()), *additions.env]
    assert engine["volumeMounts"] == [*own.get("volumeMounts", ()), SOCKETS]
    assert after["volumes"] == [*before.get("volumes", ()), *additions.volumes]
    assert after.get("initContainers", []) == [*before.get("initContainers", ()), *additions.init_containers]
    assert after["containers"][1:] == before["containers"][1:]
    assert changed["metadata"]["annotations"] == {"lmkv/injected": "both"}
    assert changed["metadata"]["labels"] == created["metadata"]["labels"]
    if "generateName" in changed["metadata"]:
        assert kubernetes_validate.validate(changed, "1.33", strict=True) == "1.33"


@pytest.mark.parametrize("additions", [HOST, SIDECAR], ids=["host", "sidecar"])
@pytest.mark.parametrize("created", [pod(), KSERVE, PRODUCTION_STACK, LLM_D], ids=["vllm", "kserve", "stack", "llm-d"])
def test_a_pod_that_was_changed_before_is_not_changed_again(created: Pod, additions: Additions) -> None:
    original = deepcopy(created)
    operations = inject(created, {"both": additions})
    assert operations
    assert created == original, "the pod itself must not be changed"
    assert inject(patched(created, operations), {"both": additions}) == []


def test_a_pod_without_the_label_is_not_changed() -> None:
    created = pod()
    del created["metadata"]["labels"]["lmkv/inject"]
    assert inject(created, {"both": HOST}) == []
    del created["metadata"]["labels"]
    assert inject(created, {"both": HOST}) == []


def test_the_role_selects_what_is_added() -> None:
    created = pod()
    created["metadata"]["labels"]["lmkv/inject"] = "decode"
    changed = patched(created, inject(created, {"both": HOST, "decode": SIDECAR}))
    assert [each["name"] for each in changed["spec"]["initContainers"]] == ["lmkv-node"]
    assert changed["metadata"]["annotations"]["lmkv/injected"] == "decode"


def test_the_annotation_selects_the_container() -> None:
    created = pod({"name": "a", "image": "vllm:1", "args": ["m"]}, {"name": "b", "image": "vllm:1", "args": ["m"]})
    created["metadata"]["annotations"] = {"lmkv/container": "b"}
    a, b = patched(created, inject(created, {"both": HOST}))["spec"]["containers"]
    assert a == created["spec"]["containers"][0]
    assert b["args"] == ["m", "--kv-transfer-config", CONFIG]


def test_what_a_pod_sets_itself_stays() -> None:
    created = pod()
    engine = created["spec"]["containers"][0]
    engine["env"] = [{"name": "LMKV_NODE_ADDRESS", "value": "/elsewhere"}]
    engine["args"] += ["--kv_transfer_config=" + CONFIG.replace("kv_both", "kv_consumer")]
    changed = patched(created, inject(created, {"both": HOST}))["spec"]["containers"][0]
    assert (changed["env"], changed["args"]) == (engine["env"], engine["args"])


@pytest.mark.parametrize(
    ("user", "node_user"),
    [(None, 10001), (0, 10001), (10001, 10001), (1000, 1000)],
    ids=["image", "root", "same", "own"],
)
def test_a_sidecar_runs_as_the_user_of_its_engine_unless_that_is_root(user: int | None, node_user: int) -> None:
    created = pod(securityContext={} if user is None else {"runAsUser": user})
    (node,) = patched(created, inject(created, {"both": SIDECAR}))["spec"]["initContainers"]
    assert node == {**NODE, "securityContext": {"runAsUser": node_user}}
    assert NODE["securityContext"] == {"runAsUser": 10001}


def test_the_user_of_a_container_counts_before_that_of_its_pod() -> None:
    created = pod(securityContext={"runAsUser": 1000})
    created["spec"]["containers"][0]["securityContext"] = {"runAsUser": 2000}
    (node,) = patched(created, inject(created, {"both": SIDECAR}))["spec"]["initContainers"]
    assert node["securityContext"] == {"runAsUser": 2000}
    with pytest.raises(Refusal, match="runs as user 2000"):
        inject(created, {"both": HOST})
    created["spec"]["containers"][0]["securityContext"] = {"runAsUser": 10001}
    assert inject(created, {"both": HOST})
    created["spec"]["containers"][0]["securityContext"] = {"runAsNonRoot": True}
    with pytest.raises(Refusal, match="runs as user 1000"):
        inject(created, {"both": HOST})


def test_a_sidecar_keeps_the_other_settings_of_its_security_context() -> None:
    node = {**NODE, "securityContext": {"readOnlyRootFilesystem": True, "runAsUser": 10001}}
    created = pod(securityContext={"runAsUser": 1000})
    (made,) = patched(created, inject(created, {"both": replace(SIDECAR, init_containers=(node,))}))["spec"][
        "initContainers"
    ]
    assert made["securityContext"] == {"readOnlyRootFilesystem": True, "runAsUser": 1000}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"args": ["m", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}']},
            "container vllm sets --kv-transfer-config without LMKVConnector: remove it, or add LMKVConnector to the "
            "connectors of a MultiConnector",
        ),
        (
            {"args": ["m", "--kv-transfer-config.kv_connector=NixlConnector"]},
            "container vllm sets --kv-transfer-config without LMKVConnector: remove it",
        ),
        (
            {"command": ["bash", "-lc", "exec vllm serve m"], "args": None},
            f"add to vLLM's in the script: --kv-transfer-config '{CONFIG}'",
        ),
        ({"command": ["/bin/sh", "/start.sh"], "args": ["m"]}, "runs a shell, whose script gets no arguments"),
        ({"args": None}, "container vllm has neither command nor args"),
        (
            {"volumeMounts": [{"name": "own", "mountPath": "/run/lmkv"}]},
            "container vllm mounts the volume own at /run/lmkv, where lmkv's belongs: mount it elsewhere",
        ),
        (
            {"securityContext": {"runAsUser": 1000}},
            "runs as user 1000, which cannot open the sockets of nodes of user 10001: set its "
            "securityContext.runAsUser to 10001, or podSecurityContext.runAsUser of lmkv's chart to 1000",
        ),
    ],
    ids=["connector", "dotted", "script", "file", "words", "mount", "user"],
)
def test_a_pod_that_would_not_use_lmkv_is_refused_with_the_fix(changes: dict[str, Any], sentence: str) -> None:
    created = pod()
    created["spec"]["containers"][0] |= changes
    with pytest.raises(Refusal) as refusal:
        inject(created, {"both": HOST})
    assert sentence in str(refusal.value)


def test_a_container_that_is_not_clear_or_not_there_is_refused_with_the_names() -> None:
    created = pod({"name": "a", "image": "x"}, {"name": "b", "image": "y"})
    with pytest.raises(Refusal, match="set the annotation lmkv/container to one of: a, b"):
        inject(created, {"both": HOST})
    created["metadata"]["annotations"] = {"lmkv/container": "c"}
    with pytest.raises(Refusal, match="the annotation lmkv/container names no container: set it to one of: a, b"):
        inject(created, {"both": HOST})


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    created = pod()
    created["metadata"]["labels"]["lmkv/inject"] = "true"
    with pytest.raises(Refusal, match="the label lmkv/inject is 'true': set it to one of: both, decode"):
        inject(created, {"decode": HOST, "both": HOST})


def test_a_refused_pod_is_only_marked_and_that_once() -> None:
    created = pod()
    changed = patched(created, refuse(created, "because"))
    assert changed["metadata"].pop("annotations") == {"lmkv/refused": "because"}
    assert changed == created
    changed["metadata"]["annotations"] = {"other": "kept"}
    marked = patched(changed, refuse(changed, "because"))
    assert marked["metadata"]["annotations"] == {"other": "kept", "lmkv/refused": "because"}
    assert refuse(marked, "because") == []
