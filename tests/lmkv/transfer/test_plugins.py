"""Channels of other packages: found by their entry point, loaded only when the configuration names them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv.config import NodeConfig
from lmkv.config.kinds import BUILT_IN_CHANNELS
from lmkv.errors import ConfigError
from lmkv.plugins import CHANNELS, plugin_names
from lmkv.transfer import Channels, open_channel
from lmkv.transfer.channels import AUTO, BUILT_IN
from tests.lmkv.transfer.ends import MIB, Memory, environment

MODULE = """
class SmokeChannel:
    name = "smoke"

    def __init__(self, end):
        self.options = dict(end.options)

    @classmethod
    async def open(cls, end):
        return cls(end)

    def metadata_for(self, reader):
        return b"smoke"

    def serve(self, needed):
        pass

    async def aclose(self):
        pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed distribution with the channel `smoke`, and one that cannot be imported."""
    info = tmp_path / "smoke_channel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smoke-channel\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lmkv.channels]\nsmoke = smoke_channel:SmokeChannel\nbroken = no_such_module:Channel\n"
    )
    (tmp_path / "smoke_channel.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("smoke_channel", None)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(MIB)
    yield memory
    memory.close()


async def test_a_channel_of_another_package_is_configured_opened_and_offered(package: Path, memory: Memory) -> None:
    config = NodeConfig(transfer_channel="smoke", transfer_options={"colour": "grey"})
    channels = Channels(config.transfer_channel, memory.end("node:1", options=config.transfer_options))
    await channels.start()
    channel = await channels.offer(["tcp", "smoke"])
    assert channel.name == "smoke"
    assert channel.options == {"colour": "grey"}  # type: ignore[attr-defined]
    await channels.aclose()


@pytest.mark.parametrize("transfer_channel", ["auto", "tcp"])
def test_no_plugin_is_imported_unless_it_is_named(package: Path, transfer_channel: str) -> None:
    program = f"""
import asyncio, sys
from lmkv.config import NodeConfig
from lmkv.transfer import Channels
from tests.lmkv.transfer.ends import Memory

async def main():
    channels = Channels(NodeConfig(transfer_channel={transfer_channel!r}).transfer_channel, Memory().end("node:1"))
    await channels.start()
    await channels.offer(["tcp"])
    await channels.aclose()

asyncio.run(main())
print([name for name in sys.modules if name in ("smoke_channel", "ucxx", "mooncake") or
       name.startswith(("lmkv.transfer.ucx", "lmkv.transfer.mooncake"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=environment()
    )
    assert done.stdout.strip() == "[]"


async def test_a_plugin_that_cannot_be_imported_is_refused_by_key(package: Path, memory: Memory) -> None:
    with pytest.raises(ConfigError, match=r"transfer_channel: the plug-in 'broken' .no_such_module:Channel. cannot be"):
        await open_channel("broken", memory.end("node:1"))


async def test_options_that_no_channel_would_read_are_refused(memory: Memory) -> None:
    options = {"protocol": "rdma"}
    with pytest.raises(ConfigError, match="transfer_options: the channel tcp has none"):
        await open_channel("tcp", memory.end("node:1", options=options))
    with pytest.raises(ConfigError, match="transfer_options must be protocol with one of tcp, rdma, not"):
        await open_channel("mooncake", memory.end("node:1", options={"protocol": "pigeon"}))


def test_the_built_in_channels_are_the_same_everywhere() -> None:
    assert (AUTO, *BUILT_IN) == BUILT_IN_CHANNELS


def test_the_channels_that_lmkv_ships_as_plugins_are_installed() -> None:
    assert {"ucx", "mooncake"} <= set(plugin_names(CHANNELS))
