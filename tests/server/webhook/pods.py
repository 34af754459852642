"""Pods of engines as others create them, and what lmkv adds to them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lmkv_server.webhook.injection import Additions, Operation

Pod = dict[str, Any]

CONFIG = '{"kv_connector": "LMKVConnector", "kv_role": "kv_both"}'
NODE = {
    "name": "lmkv-node",
    "image": "lmkv-node:0.1.0",
    "restartPolicy": "Always",
    "securityContext": {"runAsUser": 10001},
}
SOCKETS = {"name": "lmkv-runtime", "mountPath": "/run/lmkv"}
ENGINE: dict[str, Any] = {
    "user": 10001,
    "args": ("--kv-transfer-config", CONFIG),
    "env": ({"name": "LMKV_NODE_ADDRESS", "value": "/run/lmkv/engine.sock"},),
    "volume_mounts": (SOCKETS,),
}
HOST = Additions(**ENGINE, volumes=({"name": "lmkv-runtime", "hostPath": {"path": "/run/lmkv/prod-lmkv"}},))
"""What is added where a host has one node."""
SIDECAR = Additions(**ENGINE, volumes=({"name": "lmkv-runtime", "emptyDir": {}},), init_containers=(NODE,))
"""What is added where each pod has a node."""


def pod(*containers: Pod, **spec: Any) -> Pod:
    """A pod with the label; without containers one with vLLM's own image."""
    own = {"name": "vllm", "image": "vllm/vllm-openai:v0.11", "args": ["--model", "m"]}
    metadata = {"generateName": "llama-", "labels": {"app": "llama", "lmkv/inject": "both"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(deepcopy(containers)) or [own], **spec},
    }


KSERVE = pod(
    {
        "name": "kserve-container",
        "image": "vllm/vllm-openai:v0.11",
        "command": ["python", "-m", "vllm.entrypoints.openai.api_server"],
        "args": ["--model=/mnt/models", "--port=8080"],
        "env": [{"name": "HF_HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "models", "mountPath": "/mnt/models"}],
    },
    {"name": "queue-proxy", "image": "knative/queue:1", "args": ["--verbose"]},
    initContainers=[{"name": "storage-initializer", "image": "kserve/storage-initializer:1"}],
    volumes=[{"name": "models", "emptyDir": {}}],
)
"""As KServe creates it: the server's words in command and args, a proxy beside it."""
PRODUCTION_STACK = pod(
    {"name": "vllm", "image": "vllm/vllm-openai:v0.11", "command": ["vllm", "serve", "m", "--port", "8000"]},
    securityContext={"runAsUser": 0},
)
"""As the production stack's chart creates it: everything in command."""
LLM_D = pod(
    {
        "name": "vllm",
        "image": "llm-d/llm-d:v0.3",
        "command": ["/bin/sh", "-c"],
        "args": [f"vllm serve m --port 8000 --kv-transfer-config '{CONFIG}'"],
    },
    {"name": "routing-proxy", "image": "llm-d/routing-sidecar:1"},
)
"""As llm-d's charts create it: a script, to which the user has added the connector."""


def patched(changed: Pod, operations: list[Operation]) -> Pod:
    """The pod after the operations, which are all additions (RFC 6902)."""
    result = deepcopy(changed)
    for operation in operations:
        assert operation["op"] == "add"
        *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in operation["path"].split("/")[1:]]
        holder: Any = result
        for step in steps:
            holder = holder[int(step)] if isinstance(holder, list) else holder[step]
        if isinstance(holder, list):
            assert last == "-"
            holder.append(deepcopy(operation["value"]))
        else:
            holder[last] = deepcopy(operation["value"])
    return result
