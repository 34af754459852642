"""Every key of LMCache has an answer, and what is made of its files loads without a notice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.config import ConnectorConfig, CoordinatorConfig, load
from lmkv.config.lmcache import ABSENT, RENAMED, as_yaml, render, translate
from lmkv.config.sources import REPLACED, SourceEntry, known_spellings, read_file
from lmkv.errors import ConfigError
from tests.lmkv.config.files import EMPTY, LMCACHE_DECODE, LMCACHE_LOOKUP, LMCACHE_P2P, LMCACHE_PREFILL

SEEDS = {"p2p": LMCACHE_P2P, "prefill": LMCACHE_PREFILL, "decode": LMCACHE_DECODE, "lookup": LMCACHE_LOOKUP}
LMCACHE_DEFAULTS: Mapping[str, Any] = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_cpu_use_hugepages": False,
    "reserve_local_cpu_size": 0.0,
    "local_disk": "file:///mnt/nvme/",
    "max_local_disk_size": 10,
    "remote_url": "lm://localhost:65432",
    "remote_serde": "naive",
    "use_layerwise": False,
    "save_decode_cache": False,
    "pre_caching_hash_algorithm": "builtin",
    "enable_blending": False,
    "blend_special_str": " # # ",
    "enable_p2p": False,
    "p2p_host": "localhost",
    "p2p_init_ports": [8200, 8201],
    "p2p_lookup_ports": [8300, 8301],
    "enable_controller": False,
    "lmcache_instance_id": "one",
    "controller_pull_url": "localhost:8400",
    "controller_reply_url": "localhost:8500",
    "lmcache_worker_ports": [8600],
    "lmcache_worker_ids": [0],
    "lmcache_worker_heartbeat_delay_time": 10,
    "lmcache_worker_heartbeat_time": 5,
    "enable_xpyd": False,
    "nixl_role": "both",
    "nixl_buffer_size": 1 << 30,
    "nixl_buffer_device": "cuda",
    "transfer_channel": "nixl",
    "nixl_backends": ["UCX"],
    "gds_path": "/mnt/gds",
    "internal_api_server_enabled": False,
    "internal_api_server_port_start": 6999,
    "save_unfull_chunk": False,
    "blocking_timeout_secs": 10,
    "py_enable_gc": True,
    "cache_policy": "LRU",
    "numa_mode": "auto",
    "enable_async_loading": False,
    "lookup_timeout_ms": 3000,
    "min_retrieve_tokens": 0,
    "pin_timeout_sec": 300,
    "extra_config": {"lookup_backoff_time": 0.001, "p2p_max_retry_count": 3},
}


def imported(folder: Path, text: str) -> Path:
    """The file that is made of LMCache's."""
    source = folder / "lmcache.yaml"
    source.write_text(text, encoding="utf-8")
    target = folder / "lmkv.yaml"
    target.write_text(render(translate(read_file(source, "a test")), source.name), encoding="utf-8")
    return target


def entries(**raw: Any) -> list[SourceEntry]:
    return [SourceEntry(name, value, "in a test") for name, value in raw.items()]


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_an_imported_file_says_the_same_without_notices(tmp_path: Path, seed: str) -> None:
    config = load(ConnectorConfig, file=imported(tmp_path, seed), env=EMPTY)
    assert config.notices == ()
    before = load(ConnectorConfig, file=tmp_path / "lmcache.yaml", env=EMPTY)
    assert before.notices
    assert config == before


def test_every_default_of_lmcache_can_be_imported(tmp_path: Path) -> None:
    config = load(ConnectorConfig, file=imported(tmp_path, yaml.safe_dump(dict(LMCACHE_DEFAULTS))), env=EMPTY)
    assert config.notices == ()
    assert (config.p2p_port, config.lookup_timeout, config.pool_huge_pages) == (8200, 3.0, "never")
    assert (config.enable_pd, config.pd_role, config.pd_buffer_size) == (False, "both", 1 << 30)
    assert (config.save_partial_chunks, config.eviction_policy) == (False, "lru")
    assert (config.local_disk, config.max_local_disk_size) == (("/mnt/nvme/",), 10.0)


def test_the_configuration_of_a_controller_becomes_a_coordinators(tmp_path: Path) -> None:
    text = "controller_host: 0.0.0.0\ncontroller_port: 9000\ncontroller_monitor_ports: {pull: 8300, reply: 8400}\n"
    config = load(CoordinatorConfig, file=imported(tmp_path, text), env=EMPTY)
    assert (config.host, config.port, config.monitor_ports) == ("0.0.0.0", 9000, {"pull": 8300, "reply": 8400})


@pytest.mark.parametrize(
    ("name", "value", "notice"),
    [
        ("chunk_size", 256, "chunk_size: 256 stays"),
        ("max_local_cpu_size", "512MB", "max_local_cpu_size: 512MB stays"),
        ("p2p_init_ports", [8200], "p2p_init_ports: [8200] is now p2p_port: 8200"),
        (
            "p2p_init_ports",
            [1, 2],
            "p2p_init_ports: [1, 2] is now p2p_port: 1; one node serves all ranks, with one port",
        ),
        ("pd_buffer_device", "cuda:0", "pd_buffer_device: 'cuda:0' is now pd_buffer_device: cuda"),
        ("nixl_buffer_device", "cuda:1", "nixl_buffer_device: 'cuda:1' is now pd_buffer_device: cuda"),
        ("lookup_timeout_ms", 250, "lookup_timeout_ms: 250 is now lookup_timeout: 0.25"),
        ("discard_partial_chunks", True, "discard_partial_chunks: true is now save_partial_chunks: false"),
        ("nixl_role", "sender", "nixl_role: sender is now pd_role: sender"),
        ("local_cpu_use_hugepages", "yes", "local_cpu_use_hugepages: 'yes' is now pool_huge_pages: always"),
        ("p2p_lookup_ports", 8201, "p2p_lookup_ports: ignored; p2p_port serves lookups too"),
        ("nixl_buffer_device", "cuda", "nixl_buffer_device: cuda is now pd_buffer_device: cuda"),
        ("nixl_proxy_port", 7500, f"nixl_proxy_port: ignored; {REPLACED['pd_proxy_port']}"),
        ("pin_timeout_sec", 300, "pin_timeout_sec: ignored; each pin has its own TTL"),
        ("cache_policy", "LFU", "cache_policy: ignored; must be LRU or ARC, not 'LFU': lmkv has no such policy"),
        ("chunk_size", 0, "chunk_size: ignored; must be a number of tokens above 0, not 0"),
        ("no_such_key", 1, "no_such_key: ignored; lmkv has no such key"),
    ],
)
def test_the_notice_says_what_became_of_a_key(name: str, value: object, notice: str) -> None:
    (one,) = translate(entries(**{name: value}))
    assert one.notice == notice


def test_what_no_process_could_start_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_local_disk_size is required with local_disk"):
        translate(entries(local_disk="/mnt/nvme"))


def test_what_has_no_counterpart_stays_as_a_comment() -> None:
    text = render(translate(entries(enable_controller=True, gds_path="/x\n# y")), "a\nb.yaml")
    assert text == (
        "# Made of a\\nb.yaml by `lmkv config import`.\n"
        f"# enable_controller: true  # {REPLACED['enable_controller']}\n"
        '# gds_path: "/x\\n# y"  # lmkv has no such key\n'
    )


def test_of_two_keys_that_mean_the_same_the_first_counts() -> None:
    first, second, third = translate(entries(p2p_init_ports=1, p2p_port=1, pd_peer_init_port=2))
    assert (first.name, second.name, third.name) == ("p2p_port", "", "")
    assert second.notice == "p2p_port: ignored; p2p_port already has this value"
    assert third.notice == "pd_peer_init_port: ignored; p2p_port is already 1, by another key of this file"


def test_a_key_without_a_value_is_not_there() -> None:
    assert translate(entries(chunk_size=None, extra_config=None)) == []


def test_what_the_importer_explains_is_nothing_that_lmkv_reads() -> None:
    assert not ABSENT.keys() & known_spellings()
    assert not RENAMED.keys() & known_spellings()
    assert {alias.name for alias in RENAMED.values()} <= known_spellings()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(anything)
def test_a_value_is_written_on_one_line_that_means_the_same(value: object) -> None:
    text = as_yaml(value)
    assert len(text.splitlines()) == 1
    assert yaml.safe_load(f"[{text}]") == [value]


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1) | st.sampled_from(sorted(known_spellings())), anything, max_size=5))
def test_whatever_a_file_says_the_result_is_valid_or_refused(content: dict[str, Any]) -> None:
    try:
        text = render(translate(entries(**content)), "x.yaml")
    except ConfigError:
        return
    made = yaml.safe_load(text) or {}
    assert made.keys() <= known_spellings() - REPLACED.keys()
