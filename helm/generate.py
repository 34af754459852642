"""Generates the README, the schema, the list of keys and the Prometheus rules of the chart from values.yaml and code.

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
from lmkv.config.kinds import BUILT_IN_CHANNELS
from lmkv.config.schema import Config
from lmkv.config.sources import REPLACED, known_spellings, spellings

CHART = Path(__file__).parent / "lmkv"
RULES = Path(__file__).parents[1] / "docs" / "prometheus" / "rules.yaml"

PROCESSES: Mapping[str, type[Config]] = {
    "coordinator.config": CoordinatorConfig,
    "node.config": NodeConfig,
    "engines.config": ConnectorConfig,
    "proxy.config": ProxyConfig,
}
"""Values that are additional configuration keys of a process."""
DECIDED: Mapping[str, Mapping[str, str]] = {
    "coordinator.config": {
        "host": "bindAddress",
        "port": "coordinator.port",
        "http_port": "coordinator.httpPort",
        "monitor_ports": "coordinator.port",
        "layout_map_url": "coordinator.layoutMap.existingSecret",
    },
    "node.config": {
        "instance_id": "node.mode",
        "coordinator_address": "coordinator.port",
        "enable_p2p": "node.p2pPort",
        "runtime_dir": "node.hostRuntimeDir",
        "node_linger": "node.mode",
        "pd_role": "the role of a group in engines.groups",
        "p2p_host": "bindAddress",
        "p2p_port": "node.p2pPort",
        "transfer_channel": "node.transferChannel",
        "transfer_port": "node.transferPort",
        "metrics_port": "node.metricsPort",
        "max_local_cpu_size": "node.maxLocalCpuSize",
        "pool_path": "node.poolVolume",
        "persist_pool": "node.persistPool",
        "local_disk": "node.diskVolume",
        "max_local_disk_size": "node.maxLocalDiskSize",
        "encryption_key_file": "node.encryptionKeysSecret",
        "remote_url": "node.remote",
        "max_remote_size": "node.maxRemoteSize",
    },
    "engines.config": {"node_address": "node.mode"},
    "proxy.config": {
        "host": "bindAddress",
        "port": "proxy.port",
        "mode": "the roles of engines.groups",
        "policy": "proxy.policy",
        "coordinator_address": "coordinator.port",
        "engine_api_key": "proxy.engineApiKey.existingSecret",
        **dict.fromkeys(
            ("engines", "prefiller_host", "num_prefillers", "decoder_host", "num_decoders"), "engines.groups"
        ),
        **dict.fromkeys(("prefiller_port", "decoder_port"), "engines.port"),
    },
}
"""Keys that other values decide, with these values."""
DECIDED_EVERYWHERE = {
    "tls_ca": "tls.enabled",
    "tls_cert": "tls.enabled",
    "tls_key": "tls.enabled",
    "tls_client_ca": "tls.mutual",
    "tls_peer_name": "tls.peerName",
    "auth_token": "auth.engineSecret",
    "auth_token_file": "auth.engineSecret",
    "auth_tokens": "auth.tokensSecret",
    "log_level": "logLevel",
    "log_format": "logFormat",
    "cluster_secret": "clusterSecret.existingSecret",
}
SAME_AS_KEY: Mapping[str, tuple[type[Config], str]] = {
    "bindAddress": (CoordinatorConfig, "host"),
    "logLevel": (CoordinatorConfig, "log_level"),
    "logFormat": (CoordinatorConfig, "log_format"),
    "node.maxLocalCpuSize": (NodeConfig, "max_local_cpu_size"),
    "node.maxLocalDiskSize": (NodeConfig, "max_local_disk_size"),
    "node.remote.url": (NodeConfig, "remote_url"),
    "node.maxRemoteSize": (NodeConfig, "max_remote_size"),
    "proxy.policy": (ProxyConfig, "policy"),
}
"""Values that a process gets as a key, by whose schema they are checked."""

PORT = {"minimum": 1, "maximum": 65535}
SIZE = {"type": "number", "exclusiveMinimum": 0}
DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_NAME = rf"{DNS_LABEL}(\.{DNS_LABEL})*"
NAME = {"pattern": f"^({DNS_NAME})?$", "maxLength": 253}
"""Name of a resource of Kubernetes, if any."""
TEXTS = {"additionalProperties": {"type": "string"}}
LABELS = {
    "propertyNames": {"pattern": rf"^({DNS_NAME}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"},
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
    },
}
SELECTOR = {"type": "object"}
PEERS = {
    "items": {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": {"podSelector": SELECTOR, "namespaceSelector": SELECTOR, "ipBlock": SELECTOR},
    }
}
EGRESS_RULES = {
    "items": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"to": {"type": "array", **PEERS}, "ports": {"type": "array", "items": {"type": "object"}}},
    }
}
"""Kubernetes ignores a peer in the place of a rule, which then admits all traffic."""
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
        "name": {"type": "string", "pattern": f"^{DNS_LABEL}$"},
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
    r"common[lL]abels|.*[lL]abels": LABELS,
    r".*[aA]nnotations|.*nodeSelector": TEXTS,
    r"nameOverride|fullnameOverride|serviceAccount\.name": NAME,
    r".*(Secret|authenticationRef|className|priorityClassName|issuerRef\.name)": NAME,
    r".*Secret\.key|.*\.(layoutMap|engineApiKey|remote)\.key": {"pattern": "^[-._A-Za-z0-9]+$", "maxLength": 253},
    r"image\.registry": {"pattern": r"^([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])?(:[0-9]+)?(/[a-z0-9._-]+)*/?$"},
    r".*\.image\.repository": {"pattern": "^[a-z0-9]+([._/-]+[a-z0-9]+)*$"},
    r"(.*\.)?image\.tag": {"pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(@sha256:[0-9a-f]{64})?)?$"},
    r"image\.pullSecrets": {"items": NAMED},
    r"webhook\.caBundle": {"pattern": "^[A-Za-z0-9+/=]*$"},
    r"networkPolicy\.(.*From|egress\.dns)": PEERS,
    r"networkPolicy\.egress\.(all|coordinator|node|engine|proxy)": EGRESS_RULES,
    r"node\.rdma\.resource": {"pattern": f"^({DNS_NAME}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"},
    r"extraObjects": {"items": {"type": ["object", "string"]}},
    r".*\.service\.type": {"enum": ["ClusterIP", "LoadBalancer", "NodePort"]},
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
    r"node\.memoryOverhead": {"type": "number", "exclusiveMinimum": 0.25},  # which the node leaves free
    r"node\.transferChannel": {"enum": list(BUILT_IN_CHANNELS)},
    r"node\.nixlPorts": {"items": {"type": "integer", **PORT}, "minItems": 2, "maxItems": 2},
    r"node\.host(Runtime|Pool)Dir": {"pattern": "^/[^ ]+$"},
    r"node\.rdma\.count": {"minimum": 1},
    r"webhook\.timeoutSeconds": {"minimum": 1, "maximum": 30},
    r"node\.drain\.timeoutSeconds": {"minimum": 1, "maximum": 600},  # the coordinator accepts no longer drain
    r"engines\.groups": {"items": GROUP},
    r"engines\.args": {"items": {"type": "string"}},
    r"engines\.sharedMemory": SIZE,
    r"engines\.(startTimeout|stopTimeout)": {"minimum": 5, "maximum": 604_800},
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
    if value.path in PROCESSES:  # _refusals.tpl refuses other keys, and names the one or the value that is meant
        return {"type": "object", "properties": _keys(value.path)}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    narrowed: dict[str, Any] = {}
    if value.path in SAME_AS_KEY:
        process, name = SAME_AS_KEY[value.path]
        narrowed |= keys(process)[name].kind.schema
    narrowed |= {"type": "number" if "maximum" in narrowed else kinds[type(value.default)]}
    if narrowed["type"] != "string":
        narrowed.pop("pattern", None)
    elif value.default and not {"enum", "pattern"} & narrowed.keys():
        narrowed["minLength"] = 1
    for pattern, narrower in NARROWER.items():
        if re.fullmatch(pattern, value.path):
            narrowed |= narrower
    return narrowed


def _keys(path: str) -> dict[str, Any]:
    """Schemas of the keys of values such as `coordinator.config`."""
    process = PROCESSES[path]
    defaults = process()
    schemas: dict[str, Any] = {}
    for name in allowed_keys(path):
        declared = keys(process)[name]
        default = getattr(defaults, name)
        # A default that is described, such as "as many as there are", is no value.
        shown = {} if declared.kind.write(default) != declared.default else {"default": default}
        schemas[name] = {"description": declared.doc, **shown, **declared.kind.schema}
    return schemas


def allowed_keys(path: str) -> list[str]:
    """The keys that values such as `coordinator.config` may set."""
    elsewhere = {**DECIDED_EVERYWHERE, **DECIDED[path]}
    if path == "engines.config":
        elsewhere |= dict.fromkeys(keys(NodeConfig), "node.config")
    return [name for name in keys(PROCESSES[path]) if name not in elsewhere]


def refused_keys() -> dict[str, Any]:
    """For each process: the keys that its `config` may set, and of others that are known why it may not."""
    allowed = {path: allowed_keys(path) for path in PROCESSES}
    found: dict[str, Any] = {}
    for path, process in PROCESSES.items():
        decided = {**DECIDED_EVERYWHERE, **DECIDED[path]}
        unknown = DECIDED[path].keys() - keys(process).keys()
        assert not unknown, f"{path}: no process has {unknown}"
        why: dict[str, str] = {}
        for word in sorted(known_spellings() - set(allowed[path])):
            name = spellings(process)[word][0] if word in spellings(process) else word
            homes = [other for other in PROCESSES if word in allowed[other]]
            if name in decided:
                why[word] = f"follows from {decided[name]}: set that"
            elif name in allowed[path]:
                why[word] = f"is another spelling of {name}: write that"
            elif homes:
                why[word] = f"is a key of {homes[0]}: set it there"
            elif word in REPLACED:
                why[word] = f"has no counterpart in lmkv, because {REPLACED[word]}: remove it"
            elif home := next((other for other in PROCESSES if word in DECIDED[other]), ""):
                why[word] = f"follows from {DECIDED[home][word]}: set that"
            else:
                why[word] = "is a key of another process: remove it"
        found[path.removesuffix(".config")] = {"keys": allowed[path], "refused": why}
    return {"components": found, "known": sorted(known_spellings())}


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
        CHART / "values.schema.json": json.dumps(schema(found), indent=2, default=dict) + "\n",
        CHART / "files" / "keys.json": json.dumps(refused_keys(), indent=1, sort_keys=True) + "\n",
        CHART / "files" / "rules.yaml": RULES.read_text(encoding="utf-8"),
    }


if __name__ == "__main__":
    for file, content in made().items():
        file.write_text(content, encoding="utf-8")
