"""Generates the README, the schema and the copy of the Prometheus rules of the chart from values.yaml and the code.

python helm/generate.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig, ProxyConfig, keys
from lmkv.config.schema import Config

CHART = Path(__file__).parent / "lmkv"
RULES = Path(__file__).parents[1] / "docs" / "prometheus" / "rules.yaml"

PROCESSES: Mapping[str, type[Config]] = {
    "coordinator.config": CoordinatorConfig,
    "node.config": NodeConfig,
    "engines.config": ConnectorConfig,
    "proxy.config": ProxyConfig,
}
"""Values that are additional configuration keys of a process."""
DECIDED = {
    "coordinator.config": {"host", "port", "http_port", "monitor_ports"},
    "node.config": {
        *("instance_id", "coordinator_address", "enable_p2p", "runtime_dir", "node_linger", "pd_role"),
        *("p2p_host", "p2p_port", "transfer_channel", "transfer_port", "metrics_port"),
        *("max_local_cpu_size", "pool_path", "persist_pool", "local_disk", "max_local_disk_size"),
        "encryption_key_file",
    },
    "engines.config": {"node_address", *keys(NodeConfig)},
    "proxy.config": {
        *("host", "port", "mode", "policy", "coordinator_address", "engines"),
        *("prefiller_host", "prefiller_port", "num_prefillers", "decoder_host", "decoder_port", "num_decoders"),
    },
}
"""Keys that other values decide."""
DECIDED_EVERYWHERE = re.compile(
    r"tls_.*|auth_.*|log_(level|format)|cluster_secret|engine_api_key|remote_url|layout_map_url"
)

PORT = {"minimum": 1, "maximum": 65535}
SIZE = {"type": "number", "exclusiveMinimum": 0}
SIZE_OR_ZERO = {"type": "number", "minimum": 0}
ID = {"type": "integer", "minimum": 0}
TIME = {"pattern": r"^([0-9]+(h|m|s|ms))+$"}
VARIABLE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "value": {"type": "string"},
        "valueFrom": {"type": "object"},
    },
}
NAMED = {"type": "object", "required": ["name"]}
GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "model"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,10}[a-z0-9])?$"},
        "model": {"type": "string", "minLength": 1},
        "role": {"enum": ["both", "prefill", "decode"]},
        "replicas": {"type": "integer", "minimum": 0, "maximum": 1024},
        "args": {"type": "array", "items": {"type": "string"}},
        "resources": {"type": "object"},
        "hosts": {"type": "integer", "minimum": 1, "maximum": 1024},
        "ranksPerHost": {"type": "integer", "minimum": 1, "maximum": 64},
        "autoscaling": {
            "type": "object",
            "additionalProperties": False,
            "required": ["maxReplicas", "requestsPerReplica"],
            "properties": {
                "minReplicas": {"type": "integer", "minimum": 1},
                "maxReplicas": {"type": "integer", "minimum": 1, "maximum": 1024},
                "requestsPerReplica": {"type": "integer", "minimum": 1},
            },
        },
        "podSpec": {"type": "object"},
        "workloadSpec": {"type": "object"},
    },
}
NARROWER: Mapping[str, Mapping[str, Any]] = {
    r".*\.(port|httpPort|p2pPort|transferPort|metricsPort)": PORT,
    r".*[rR]eplicas": {"minimum": 0, "maximum": 1024},
    r".*\.maxUnavailable": {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"},
    r".*\.extraEnv": {"items": VARIABLE},
    r".*\.extraVolume(s|Mounts)": {"items": NAMED},
    r"common(Labels|Annotations)": {"additionalProperties": {"type": "string"}},
    r"extraObjects": {"items": {"type": ["object", "string"]}},
    r".*\.service\.type": {"enum": ["ClusterIP", "LoadBalancer", "NodePort"]},
    r"logLevel": {"enum": ["debug", "info", "warning", "error"]},
    r"logFormat": {"enum": ["text", "json"]},
    # Fixed: the node's folder belongs to this user, and engines share its sockets.
    r"podSecurityContext": {
        "required": ["runAsUser", "runAsGroup"],
        "properties": {"runAsUser": ID, "runAsGroup": ID},
    },
    r"node\.capabilities": {"items": {"type": "string", "pattern": "^[A-Z_]+$"}},
    r"image\.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    r"otlpEndpoint|keda\.serverAddress|monitoring\.prometheusRule\.docsUrl": {"pattern": "^(https?://.+)?$"},
    r"tls\.certManager\.(duration|renewBefore)": TIME,
    r"monitoring\.serviceMonitor\.interval": TIME,
    r"node\.mode": {"enum": ["daemonSet", "sidecar"]},
    r"node\.(maxLocalCpuSize|memoryOverhead)": SIZE,
    r"node\.maxLocalDiskSize": SIZE_OR_ZERO,
    r"node\.transferChannel": {"enum": ["auto", "shm", "nixl", "tcp"]},
    r"node\.nixlPorts": {"items": {"type": "integer", **PORT}, "minItems": 2, "maxItems": 2},
    r"node\.host(Runtime|Pool)Dir": {"pattern": "^/[^ ]+$"},
    r"node\.rdma\.count": {"minimum": 1},
    r"webhook\.timeoutSeconds": {"minimum": 1, "maximum": 30},
    r"node\.drain\.timeoutSeconds": {"minimum": 1, "maximum": 600},  # the coordinator accepts no longer drain
    r"engines\.groups": {"items": GROUP},
    r"engines\.args": {"items": {"type": "string"}},
    r"engines\.sharedMemory": SIZE,
    r"engines\.(startTimeout|stopTimeout)": {"minimum": 5},
    r"proxy\.policy": {"enum": ["round_robin", "least_loaded", "kv_aware"]},
    r".*\.autoscaling\.(min|max)Replicas": {"minimum": 1},
    r".*\.autoscaling\.target.*": {"minimum": 1, "maximum": 100},
    r".*\.requestsPerReplica": {"minimum": 0},
    r".*\.parentRefs": {"items": NAMED},
    r".*\.(hosts|hostnames)": {"items": {"type": "string", "minLength": 1}},
    r"keda\..*(Interval|Seconds)": {"minimum": 0},
}
"""What a value may be beyond being of its default's type."""
MAY_BE_NULL = re.compile(r"securityContext|.*\.resources|.*\.labels")
"""Values whose default is not empty and that `null` removes. Others have no meaning without a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One value, which a comment `# --` describes."""

    path: str
    doc: str
    default: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The values of one top-level key, or several without a heading."""

    title: str
    doc: str
    values: tuple[Value, ...]


def sections(text: str) -> list[Section]:
    """The sections of values.yaml. Raises `ValueError` for a value without a comment."""
    defaults = yaml.safe_load(text)
    found: list[Section] = []
    for title, doc, path, doc_text in _comments(text):
        if doc_text is None:
            found.append(Section(title=title, doc=doc, values=()))
            continue
        value = Value(path=path, doc=doc_text, default=_at(defaults, path))
        last = found.pop() if found else Section(title="Everywhere", doc="", values=())
        found.append(Section(title=last.title, doc=last.doc, values=(*last.values, value)))
    documented = [value.path for section in found for value in section.values]
    for leaf in _leaves(defaults):
        if not any(leaf == path or leaf.startswith(f"{path}.") for path in documented):
            raise ValueError(f"values.yaml: no comment `# --` describes {leaf}")
    return found


def _comments(text: str) -> Iterator[tuple[str, str, str, str | None]]:
    """Headings (title, doc, "", None) and values ("", "", path, doc), in order."""
    lines: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        comment = re.fullmatch(r" *# ?(.*)", line)
        name = re.fullmatch(r"( *)([A-Za-z0-9]+):.*", line)
        if comment:
            lines.append(comment[1])
        elif name and len(name[1]) // 2 <= len(above):
            above = [*above[: len(name[1]) // 2], name[2]]
            heading = [part for part in lines if part]
            doc_text = " ".join(heading)
            if doc_text.startswith("-- "):
                yield "", "", ".".join(above), doc_text.removeprefix("-- ")
            elif doc_text and not name[1]:
                before, _, value = doc_text.partition(" -- ")
                title, _, doc = before.partition(": ")
                yield title, doc[:1].upper() + doc[1:], "", None
                if value:
                    yield "", "", ".".join(above), value
            lines = []
        else:
            lines = []


def _at(defaults: Any, path: str) -> Any:
    for name in path.split("."):
        defaults = defaults[name]
    return defaults


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def readme(found: list[Section]) -> str:
    """The chart's README."""
    parts = [INTRODUCTION]
    for section in found:
        parts.append(f"## {section.title}\n")
        if section.doc:
            parts.append(f"{section.doc}\n")
        rows = [f"| `{value.path}` | {_shown(value.default)} | {value.doc} |" for value in section.values]
        parts.append("\n".join(["| Value | Default | Meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _shown(default: Any) -> str:
    if default == "":
        return "empty"
    text = default if isinstance(default, str) else json.dumps(default)
    return f"`{text}`"


def schema(found: list[Section]) -> dict[str, Any]:
    """The schema: every value is of its default's type, and no others are known.

    Helm removes a value that is null, so those that the templates need are required.
    """
    root = _object()
    for value in (value for section in found for value in section.values):
        place = root
        *above, name = value.path.split(".")
        for step in above:
            place["required"] = sorted({*place["required"], step})
            place = place["properties"].setdefault(step, _object())
        if value.default not in ("", [], {}) and not MAY_BE_NULL.fullmatch(value.path):
            place["required"] = sorted({*place["required"], name})
        place["properties"][name] = {"description": value.doc} | _type(value)
    root["properties"]["global"] = {"type": "object", "description": "What Helm gives to all charts of a release."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Values of the chart lmkv", **root}


def _object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": [], "properties": {}}


def _type(value: Value) -> dict[str, Any]:
    if value.path in PROCESSES:
        names = allowed_keys(value.path)
        return _object() | {"properties": {name: {"description": doc} for name, doc in names.items()}}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    narrowed: dict[str, Any] = {"type": kinds[type(value.default)]}
    for pattern, narrower in NARROWER.items():
        if re.fullmatch(pattern, value.path):
            narrowed |= narrower
    return narrowed


def allowed_keys(path: str) -> dict[str, str]:
    """Descriptions of the keys that values such as `coordinator.config` may set, by name."""
    decided = DECIDED[path]
    unknown = decided - keys(PROCESSES[path]).keys()
    assert not unknown, f"{path}: no process has {unknown}"
    return {
        name: declared.doc
        for name, declared in keys(PROCESSES[path]).items()
        if name not in decided and not DECIDED_EVERYWHERE.fullmatch(name)
    }


INTRODUCTION = """\
# The chart lmkv

Installs a fleet: a coordinator, a node on each host or in each engine's pod, and optionally engines with a proxy.
[docs/operate/kubernetes.md](../../docs/operate/kubernetes.md) explains how they work together.

```
make images images-publish IMAGES=REGISTRY TARGETS="lmkv lmkv-node lmkv-vllm"
helm install lmkv helm/lmkv --namespace lmkv --create-namespace --set image.registry=REGISTRY
helm test lmkv --namespace lmkv --logs
```

This page is generated from `values.yaml` by `python helm/generate.py`.
"""


def made() -> dict[Path, str]:
    """All generated files, with their content."""
    found = sections((CHART / "values.yaml").read_text(encoding="utf-8"))
    return {
        CHART / "README.md": readme(found),
        CHART / "values.schema.json": json.dumps(schema(found), indent=2) + "\n",
        CHART / "files" / "rules.yaml": RULES.read_text(encoding="utf-8"),
    }


if __name__ == "__main__":
    for file, content in made().items():
        file.write_text(content, encoding="utf-8")
