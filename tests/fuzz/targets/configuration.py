"""Configuration files, variables and LMCache's configuration: refused as `ConfigError`, or loaded to a fixed point."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import yaml

from lmkv.config import (
    ClientConfig,
    Config,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    PickerConfig,
    ProxyConfig,
    kinds,
    load,
    to_comparison,
    to_environment,
)
from lmkv.config.lmcache import render, translate
from lmkv.config.sources import read_file
from lmkv.errors import ConfigError
from tests.fuzz.inputs import Input

COVERS = ("lmkv.config", "lmkv.units")
PROCESSES: tuple[type[Config], ...] = (
    ClientConfig,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    PickerConfig,
    ProxyConfig,
)
MAX_MESSAGE = 64 << 10
_FOLDER = tempfile.TemporaryDirectory(prefix="lmkv-fuzz-")
_FILE = Path(_FOLDER.name, "config.yaml")

NODE = b"""\
instance_id: node-1
max_local_cpu_size: 1.5 GiB
chunk_size: 256
coordinator_address: [10.0.0.1:9000, "coordinator:9000"]
p2p_port: 8001
enable_p2p: true
local_disk: /data/kv
max_local_disk_size: 100GB
remote_url: redis://:secret@host:6379
lookup_timeout: 500ms
"""
SEEDS = [
    b"\3enable_p2p: redis://:secret@host:6379\n",
    b"\x03" + NODE,
    b"\x02port: 9000\nlease_ttl: 30s\ntokenizers: {llama: /models/llama}\n",
    b"\x05engines: [http://10.0.0.1:8000]\npolicy: kv_aware\n",
    b"\x04pool: {}\nengines: http://a:1, http://b:2\n",
    b"\x13LMKV_CHUNK_SIZE=16\nLMKV_MAX_LOCAL_CPU_SIZE=5\nLMCACHE_LOCAL_CPU=True\nLMKV_PORT=tcp://10.0.0.1:1\n",
    b"\x23chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5.0\nremote_url: lm://host:65432\n"
    b"enable_controller: true\nextra_config: {save_decode_cache: true}\np2p_init_ports: [1, 2]\n",
    b"\x23extra_config: '{\"use_odirect\": true}'\nnixl_buffer_device: cuda\npd_role: sender\n",
    b"\x03? [a, b]\n: 1\n",
    b"\x03a: &a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\nchunk_size: [*d,*d,*d,*d,*d,*d,*d,*d]\n",
    b"\x03chunk_size: &a [*a]\n",
    b"\x03" + b"[" * 400,
    b"\x12LMKV_TOKENIZERS=" + b'{"a":' * 700,
    b"\x23extra_config: '" + b"[" * 3000 + b"'\n",
    b"\x03a: &a [1, 2]\nb: *a\n<<: {c: 1}\n",
]


def run(data: bytes) -> None:
    """The first byte selects process and source."""
    source = Input(data)
    selected = source.byte()
    cls = PROCESSES[(selected & 0xF) % len(PROCESSES)]
    with patch.object(kinds, "plugin_names", lambda _: ("ucx",)):  # it reads the metadata of all installed packages
        (_file, _variables, _lmcache)[(selected >> 4) % 3](cls, source.rest())


def _file(cls: type[Config], content: bytes) -> None:
    _FILE.write_bytes(content)
    _load(cls, {"LMKV_CONFIG_FILE": str(_FILE)})


def _variables(cls: type[Config], content: bytes) -> None:
    lines = [line.partition("=") for line in content.decode(errors="replace").replace("\0", "").splitlines()]
    env = {name: value for name, _, value in lines if name.startswith(("LMKV_", "LMCACHE_"))}
    _load(cls, {name: value for name, value in env.items() if not name.endswith("_CONFIG_FILE")})


def _lmcache(cls: type[Config], content: bytes) -> None:
    """What is imported is a configuration of lmkv that loads, and the same for every process that reads the file."""
    _FILE.write_bytes(content)
    _load(cls, {"LMCACHE_CONFIG_FILE": str(_FILE)})
    try:
        imported = translate(read_file(_FILE, "fuzz"))
    except ConfigError as error:
        assert len(str(error)) <= MAX_MESSAGE
        return
    text = render(imported, str(_FILE))
    assert all(len(one.notice) <= MAX_MESSAGE for one in imported)
    written = yaml.safe_load(text) or {}
    assert set(written) == {one.name for one in imported if one.name}
    _FILE.write_text(text)
    loaded = load(cls, env={"LMKV_CONFIG_FILE": str(_FILE)})
    assert not [notice for notice in loaded.notices if "LMCache" in notice]


def _load(cls: type[Config], env: Mapping[str, str]) -> None:
    try:
        config = load(cls, env=env)
    except ConfigError as error:
        assert 0 < len(str(error)) <= MAX_MESSAGE
        assert "secret@" not in str(error)
        return
    environment = to_environment(config)
    again = load(cls, env=environment)
    assert again == config, "a child process would have another configuration"
    assert to_environment(again) == environment
    assert "secret@" not in repr(config)
    assert to_comparison(config).keys() == environment.keys()
