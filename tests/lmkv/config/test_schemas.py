"""JSON schemas of configuration values: the process reads whatever its schema accepts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from lmkv.config import (
    ClientConfig,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    PickerConfig,
    ProxyConfig,
    WebhookConfig,
    keys,
)
from lmkv.config.kinds import TIER_PLUGINS, TRANSFER_CHANNEL
from lmkv.config.schema import Key

PROCESSES = (NodeConfig, ConnectorConfig, CoordinatorConfig, ProxyConfig, PickerConfig, WebhookConfig, ClientConfig)
KEYS = {name: declared for process in PROCESSES for name, declared in keys(process).items()}
INSTALLED = (TIER_PLUGINS, TRANSFER_CHANNEL)
"""Kinds whose values are names of installed packages' plug-ins, which no schema knows."""
NUMBERS = [0, 1, -1, 2, 0.5, 1e-9, 1e-10, 1.5, 8, 99, 1023, 1024, 1025, 7100, 65535, 65536, 1 << 20, (1 << 20) + 1]
NUMBERS += [31_536_000, 31_536_001, 31_536_000_000, 1 << 50, (1 << 50) + 1, 1e18]
AMOUNTS = [
    "5",
    "0",
    "0.0",
    "0.5",
    "0.05",
    "1.25",
    "007",
    "-1",
    "1e3",
    "5GiB",
    "5 GiB",
    "5GB",
    "5g",
    "1024TiB",
    "1025TiB",
]
AMOUNTS += [
    "1025TiB",
    "999999G",
    "9999999G",
    "512MiB",
    "64Ki",
    "1B",
    "0.5B",
    "5X",
    "1.5s",
    "500ms",
    "0ms",
    "2m",
    "1h",
    "99d",
]
AMOUNTS += ["366d", "9999999s", "99999999", "12:30", "1y", "s", "."]
TEXTS = [
    "",
    " ",
    "off",
    "on",
    "true",
    "auto",
    "none",
    "None",
    "1023",
    "1024",
    "a",
    "A",
    "é",
    "a b",
    "a\0b",
    "x-session-id",
]
TEXTS += ["fifo", "lru", "LRU", "arc", "learned", "kv-aware", "kv_aware", "sha256-16", "native", "debug", "json", "."]
TEXTS += ["10.0.0.5:9000", "[::1]:9000", "lmkv:0", "lmkv:65535", "lmkv:65536", "a:1,b:2", "http://a:80", "https://a"]
TEXTS += ["http://a b", "http://u@a", "::", "0.0.0.0", "[::]", "::1", "[::1]", "a.example", "*.a.example", "*", "a,b"]
TEXTS += ["/a", "/a/", "/a,/b", "/a/../b", "a/b", "~/a", "file:///a", "unix:/a", "unix:", "valkey://v", "s3://bucket/p"]
TEXTS += ["valkey://u:p@v:6379/0", "redis://v/x", "rediss://v:70000", "valkey://", "s3://b", "s3://bucket?x", "ftp:a"]
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    ["a"],
    ["a", "a"],
    ["a", "b"],
    ["UCX", ""],
    [1],
    ["/a", "/b"],
    ["/a", "/a"],
]
OTHERS += [
    ["a:1", "b:2"],
    ["a:1", "a:1"],
    ["A.example"],
    [7100, 7101],
    [0],
    {"a": "b"},
    {"a": 1},
    {"a": 0},
    {"a": None},
]
OTHERS += [["/a", "/a"], {"a": None}, [{"name": "t"}], [{"folder": "/a"}], [["a"]], {"a": {"b": 1}}]


@pytest.mark.parametrize("name", KEYS)
def test_a_process_reads_what_its_schema_accepts(name: str) -> None:
    declared = KEYS[name]
    tried = (*NUMBERS, *AMOUNTS, *TEXTS, *OTHERS, *declared.kind.schema.get("enum", ()))
    accepted = [raw for raw in tried if accepts(declared, raw)]
    assert accepted, f"the schema of {name} accepts nothing"
    for raw in accepted if declared.kind not in INSTALLED else ():
        text = yaml.safe_dump(raw)  # as a file holds it
        assert declared.kind.read(yaml.safe_load(text)) is not None, f"{name}: {raw!r}"


@pytest.mark.parametrize("process", PROCESSES)
def test_a_schema_accepts_the_default_and_every_spelling_in_the_docs(process: type[Any]) -> None:
    defaults = process()
    for name, declared in keys(process).items():
        default = getattr(defaults, name)
        written = json.loads(json.dumps(default, default=dict))  # tuples are lists, and mappings are objects
        if default is not None and default != -1:  # an optional port, or one that is off
            assert accepts(declared, written), f"{name}: {default!r}"
    for name, raw in {
        "node_linger": ("15m", "1.5h", "250 ms", 60),
        "remote_timeout": ("500ms", "2s", 0.5),
        "max_local_cpu_size": (5, 0.0625, "512MiB", "1.5 GiB", "1TB"),
        "max_local_disk_size": (0, "0", "800GB"),
        "pd_buffer_size": (1 << 30, "1GiB"),
        "numa_node": ("auto", "none", 0, "1"),
        "nixl_backends": (["UCX", "POSIX"], "UCX"),
        "remote_url": ("valkey://user:pw@valkey.cache.svc:6379/0", "rediss://[::1]", "s3://bucket/prefix"),
        "layout_map_url": ("valkeys://valkey.cache.svc",),
        "allowed_hosts": (["lmkv.example.com", "*.svc.cluster.local"], "lmkv.example.com"),
        "tokenizers": ({"llama": "/models/llama"},),
        "tiers": ([{"name": "example", "folder": "/mnt/example", "count": 3}],),
        "eviction_policy": ("learned", "lru", "arc"),
        "verify_transfers": (True, False),
    }.items():
        assert all(accepts(KEYS[name], value) for value in raw), name


def test_a_schema_refuses_a_word_a_number_and_a_type_that_the_process_does() -> None:
    for name, raw in {
        "eviction_policy": "fifo",
        "lease_ttl": 0,
        "chunk_size": 0,
        "local_cpu": "maybe",
        "tiers": {},
    }.items():
        assert not accepts(KEYS[name], raw), name


def accepts(declared: Key, raw: object) -> bool:
    """Whether the key's schema accepts a value."""
    return bool(jsonschema.Draft202012Validator(declared.kind.schema).is_valid(raw))
