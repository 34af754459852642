"""Whole nodes with `encryption_key_file`: the keys of the node's tenant, refusals at the start, metrics, logs."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from lmkv.config import ConnectorConfig, NodeConfig
from lmkv.errors import ConfigError
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import files, until
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.whole_nodes import load, store
from tests.support.encryption_keys import key_line, write_keys
from tests.support.redis_server import RedisServer
from tests.support.tokens import entry
from tests.support.tokens import write as write_tokens


def settings(folder: Path, **more: object) -> dict[str, Any]:
    return {
        "instance_id": "n",
        "runtime_dir": str(folder),
        "max_local_cpu_size": "16MB",
        "local_disk": f"{folder}/disk",
        "max_local_disk_size": "64MB",
        "enable_p2p": False,
        "encryption_key_file": write_keys(folder / "keys", "a"),
    } | more


@asynccontextmanager
async def engine_at_node(folder: Path, **more: object) -> AsyncIterator[tuple[Node, EngineClient]]:
    async with Node(NodeConfig(**settings(folder, **more))) as node, EngineClient(node) as engine:
        yield node, engine


def of_tenant(folder: Path, tenant: str) -> dict[str, object]:
    """A node whose own token belongs to this tenant."""
    tokens = write_tokens(folder / "tokens.yaml", entry("engine", "one"), entry("engine", "two"))
    return {"auth_tokens": tokens, "auth_token": f"engine-of-{tenant}-token"}


async def store_on_disk(folder: Path, **more: object) -> None:
    async with engine_at_node(folder, **more) as (node, engine):
        await store(engine, node.pool, 0, 1, 2)
        disk = node.disk
        assert disk
        await until(lambda: disk.stats().written_chunks == 3)


async def loaded(folder: Path, **more: object) -> list[int]:
    """The chunks that an engine loads at a node that was started again."""
    async with engine_at_node(folder, **more) as (node, engine):
        found = await engine.lookup("1", chunk_keys(0, 1, 2))
        return await load(engine, node.pool, "1", 0, absent_count(found)) if absent_count(found) else []


async def test_an_engine_loads_what_a_node_before_has_encrypted(runtime_dir: Path) -> None:
    await store_on_disk(runtime_dir)
    assert all("-k" in file.name for file in files(runtime_dir / "disk" / "n"))
    assert await loaded(runtime_dir) == [0, 1, 2]


async def test_the_tenant_of_the_nodes_own_token_decides_which_key_it_has(runtime_dir: Path) -> None:
    await store_on_disk(runtime_dir, **of_tenant(runtime_dir, "one"))
    assert await loaded(runtime_dir, **of_tenant(runtime_dir, "one")) == [0, 1, 2]
    assert await loaded(runtime_dir, **of_tenant(runtime_dir, "two")) == []


async def test_two_tenants_share_a_store_and_find_only_their_own(runtime_dir: Path) -> None:
    with RedisServer() as redis:
        remote = {"remote_url": redis.url, "remote_lookup_timeout": 5.0, "local_disk": ""}
        async with engine_at_node(runtime_dir, **remote, **of_tenant(runtime_dir, "one")) as (node, engine):
            await store(engine, node.pool, 0, 1, 2)
            await until(lambda: len(redis.names()) == 3)
        assert await loaded(runtime_dir, **remote, **of_tenant(runtime_dir, "two")) == []
        assert len(redis.names()) == 3
        assert await loaded(runtime_dir, **remote, **of_tenant(runtime_dir, "one")) == [0, 1, 2]


async def test_a_changed_file_is_a_miss_for_the_engine_and_a_metric(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await store_on_disk(runtime_dir)
    file = next(file for file in files(runtime_dir / "disk" / "n") if file.name.startswith(chunk_keys(1)[0].hex()))
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    with caplog.at_level(logging.DEBUG):
        async with engine_at_node(runtime_dir) as (node, engine):
            file.write_bytes(whole)
            found = await engine.lookup("1", chunk_keys(0, 1, 2))
            assert absent_count(found) == 3
            assert await load(engine, node.pool, "1", 0, 3) == [0]
            metrics = generate_latest(node.metrics.registry).decode()
    assert 'lmkv_node_tier_undecryptable_chunks_total{tier="disk"} 1.0' in metrics
    assert key_line("a").split()[1] not in caplog.text


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [("a AAAA\n", 0o600, "line 1: the key is not 32 bytes"), (key_line("a"), 0o644, "other users may access")],
)
async def test_a_node_with_a_wrong_key_file_does_not_start(
    runtime_dir: Path, content: str, mode: int, why: str
) -> None:
    values = settings(runtime_dir)
    (runtime_dir / "keys").write_text(content)
    (runtime_dir / "keys").chmod(mode)
    with pytest.raises(ConfigError, match=why):
        async with Node(NodeConfig(**values)):
            pass


async def test_without_the_extra_the_node_names_it(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lmkv_server.node.tiers.build.find_spec", lambda name: None if name == "cryptography" else object()
    )
    with pytest.raises(ConfigError, match=r"encryption_key_file: needs cryptography.*pip install '\.\[encryption\]'"):
        async with engine_at_node(runtime_dir):
            pass


def test_a_node_without_keys_does_not_import_the_extra() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import lmkv_server.node.node\n"
        "import lmkv_client.commands.doctor.command\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("io", ["nixl", "gds"])
@pytest.mark.parametrize("process", [NodeConfig, ConnectorConfig])
def test_copies_by_nixl_cannot_encrypt_and_are_refused(runtime_dir: Path, io: str, process: type[NodeConfig]) -> None:
    with pytest.raises(ConfigError, match=f"local_disk_io: {io} copies chunks as they are; set it to plain"):
        process(**settings(runtime_dir, local_disk_io=io))
    process(**settings(runtime_dir, local_disk_io=io, encryption_key_file=""))
