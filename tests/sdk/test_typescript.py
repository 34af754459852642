"""The TypeScript package: generated from the protos, clean, and at work with real coordinators, on Node.js."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from lmkv import rpc
from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_client.demo.nodes import Nodes
from lmkv_kernels import checksum
from lmkv_server.coordinator import coordinator as server
from tests.lmkv.certificates import issue
from tests.sdk.buf import buf
from tests.sdk.node import PACKAGE, compile_package, run_node, tool
from tests.server.coordinator.cases import CHUNKS, KEYS, LLAMA, PROMPT, keys_of
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.server.node.cases import small_spec
from tests.server.node.engine_client import EngineClient

SPEC = small_spec()
CHUNK_COUNT = 5
TOKENS = list(range(CHUNK_COUNT * SPEC.chunk_size))
NODES = ("node-1", "node-2")
README_PROMPT = [128000, 849, 21435]

pytestmark = pytest.mark.timeout(180)  # with the compiler, on a busy host


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package's tests are, compiled, and what the README shows, as if it stood in somebody's project."""
    (block,) = re.findall(r"^```ts\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert '"localhost:9000"' in block
    example = block.replace('"localhost:9000"', 'JSON.parse(process.env.SETTING ?? "").address')
    return compile_package(tmp_path_factory.mktemp("compiled"), readme=example)


def test_the_generated_code_is_what_the_protos_make_now(tmp_path: Path) -> None:
    buf("generate", "--template", "client/typescript/buf.gen.yaml", "-o", tmp_path)
    made = _texts(tmp_path / "client/typescript/src/gen")
    committed = _texts(PACKAGE / "src/gen")
    assert made.keys() == committed.keys(), "run `make protos`"
    stale = [name for name in made if made[name] != committed[name]]
    assert not stale, f"run `make protos`; these are stale: {stale}"


def _texts(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.ts")}


def test_the_code_is_formatted_and_the_linter_finds_nothing() -> None:
    tool("prettier", "--check", ".")
    tool("eslint", ".")


def test_the_lock_file_names_no_place_to_download_from_but_npms() -> None:
    resolved = re.findall(r'"resolved": "(.*)"', (PACKAGE / "package-lock.json").read_text())
    assert [url for url in resolved if not url.startswith("https://registry.npmjs.org/")] == []


async def test_a_coordinator_and_nodes_are_asked_ordered_and_watched(
    compiled: Path, tmp_path: Path, short_folder: Path
) -> None:
    keys = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size)
    with (
        cluster.Coordinator(tmp_path) as coordinator,
        Nodes(
            NODES, coordinator_address=coordinator.address, runtime_dir=short_folder, logs=tmp_path, pool_size="16MiB"
        ) as nodes,
    ):
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(EngineClient(nodes.socket(name), spec=SPEC)) for name in NODES]
            credits_ = await engines[0].reserve(CHUNK_COUNT)
            of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
            commits = [engines[0].commit(key, one, checksum=of_zeros) for key, one in zip(keys, credits_, strict=True)]
            await engines[0].say(commits=commits)
            await _until_known(coordinator.address, len(keys))

            def kill() -> None:
                coordinator.process.kill()
                coordinator.process.start()

            setting = {
                "address": coordinator.address,
                "tokens": TOKENS,
                "keys": [key.hex() for key in keys],
                "instances": NODES,
            }
            await run_node(compiled / "fleet.test.js", setting, {"kill": kill})


async def _until_known(address: str, chunk_count: int) -> None:
    """Waits until the coordinator knows of two nodes, one of which holds so many chunks."""
    async with asyncio.timeout(20), Coordinator(address) as coordinator:
        async for update in coordinator.watch():
            if any(len(change.admitted_keys) == 16 * chunk_count for change in update.changes):
                return


class PausedFleet:
    """A coordinator, and two instances that hold back orders until `resume`; `a` holds the prompt of the cases."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Starts all of it, as it was at first."""
        enter = self._stack.enter_async_context
        self.coordinator = await enter(server.Coordinator(port=self._port, lease_ttl=60.0, cluster_secret="hush"))
        channel = await enter(rpc.open_channel(self.coordinator.address))
        known: dict[str, ScriptedInstance] = {}
        self._instances = [
            await enter(ScriptedInstance(channel, known, name, LLAMA, chunks))
            for name, chunks in (("a", CHUNKS), ("b", {}))
        ]
        self.pause()

    async def stop(self) -> None:
        """Stops all of it."""
        await self._stack.aclose()

    async def restart(self) -> None:
        """Another coordinator, at the same place."""
        await self.stop()
        await self.start()

    def pause(self) -> None:
        """Has the instances hold back orders."""
        for instance in self._instances:
            instance.going.clear()

    def resume(self) -> None:
        """Has the instances go on."""
        for instance in self._instances:
            instance.going.set()


@pytest.fixture
async def paused(free_port: Any) -> AsyncIterator[PausedFleet]:
    fleet = PausedFleet(free_port())
    await fleet.start()
    yield fleet
    await fleet.stop()


async def test_operations_are_waited_for_followed_and_cancelled(compiled: Path, paused: PausedFleet) -> None:
    setting = {
        "address": paused.coordinator.address,
        "tokens": PROMPT,
        "keys": [key.hex() for key in KEYS],
        "instances": ["a", "b"],
    }
    acts = {"pause": paused.pause, "resume": paused.resume, "restart": paused.restart}
    await run_node(compiled / "paused.test.js", setting, acts)


async def test_tls_lets_in_and_keeps_out(compiled: Path, tmp_path: Path) -> None:
    certificates = issue(tmp_path / "ours")
    files = {"ca": certificates.ca, "cert": certificates.cert, "key": certificates.key}
    stranger = issue(tmp_path / "another's")
    async with server.Coordinator(port=0, tls=certificates.strict_server) as coordinator:
        setting = {"address": coordinator.address, "tls": {**files, "otherCa": stranger.ca}}
        await run_node(compiled / "tls.test.js", setting)


async def test_the_readme_runs_as_it_stands(compiled: Path) -> None:
    held = dict.fromkeys(keys_of(README_PROMPT, secret=b""), len(README_PROMPT))
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(server.Coordinator(port=0, lease_ttl=60.0))
        channel = await stack.enter_async_context(rpc.open_channel(coordinator.address))
        fleet: dict[str, ScriptedInstance] = {}
        for name, chunks in (("engine-1", held), ("engine-2", {})):
            await stack.enter_async_context(ScriptedInstance(channel, fleet, name, LLAMA, chunks))
        said = await run_node(compiled / "readme.js", {"address": coordinator.address})
    lines = said.splitlines()
    assert lines[0] == "engine-1 holds 3 tokens"
    assert lines[-4:] == [
        "1 of 1 chunks",
        "1000 bytes",
        "INSTANCE_NOT_FOUND engine-3",
        "engine-2 holds 1 chunks",
    ]
