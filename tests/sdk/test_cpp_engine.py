"""The engine in C++ of docs/examples/engine-cpp, compiled with Debian's protobuf: against nodes as people run them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmkv.config.node import attach_socket_beside
from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv_client.demo import cluster
from tests.sdk.buf import ROOT
from tests.server.node.engine_client import EngineClient, runs
from tests.support.nodes import NodeProcesses
from tests.support.specs import make_spec
from tests.waiting import eventually

SOURCE = ROOT / "docs/examples/engine-cpp"
BUILD_SECONDS = 500.0
RUN_SECONDS = 180.0
PROGRAMS = ("c++", "cmake", "pkg-config", "protoc")
LIBRARIES = ("protobuf", "libcrypto")
NAMES = ("node-1", "node-2")
SPEC = make_spec(model_name="toy", model_id="toy", chunk_size=16)
"""That of the example."""
KEYS = chunk_keys(as_tokens(range(16)), root_key(SPEC.fingerprint), 16)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled example."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"not on this machine: {', '.join(missing)}; `make test-cpp-engine` installs them")
    if subprocess.run(["pkg-config", "--exists", *LIBRARIES], check=False).returncode:
        pytest.skip(f"not all of {', '.join(LIBRARIES)} are on this machine; `make test-cpp-engine` installs them")
    folder = tmp_path_factory.mktemp("engine-cpp")
    for command in (f"cmake -S {SOURCE} -B {folder}".split(), f"cmake --build {folder} --parallel 2".split()):
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-5000:]}"
    return folder / "engine"


@pytest.fixture
def nodes(tmp_path: Path, short_folder: Path) -> Iterator[NodeProcesses]:
    """Two nodes, registered with one coordinator."""
    with (
        cluster.CoordinatorProcess(tmp_path) as coordinator,
        NodeProcesses(
            NAMES,
            coordinator_address=coordinator.address,
            runtime_dir=short_folder,
            logs=tmp_path,
            pool_size="16MiB",
        ) as running,
    ):
        yield running


async def run(program: Path, engine_socket: Path) -> tuple[int, str]:
    """Runs the example at a node; its exit status, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        program,
        attach_socket_beside(engine_socket),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_it_stores_a_chunk_and_loads_it_from_its_node_and_from_another_one(
    program: Path, nodes: NodeProcesses
) -> None:
    first, second = (nodes.socket(name) for name in NAMES)
    assert await run(program, first) == (0, "stored\nloaded from own\n")
    assert await run(program, first) == (0, "loaded from own\n")
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(EngineClient(second, "python", SPEC))
        numbers = iter(range(1_000_000))

        async def behind() -> dict[str, int]:
            ticket = str(next(numbers))
            found = await other.lookup(ticket, KEYS)
            await other.release(ticket)
            return runs(found)

        await eventually(behind, {"peers": 1})
        assert await run(program, second) == (0, "loaded from peers\n")
        assert len((await other.lookup("own", KEYS)).own) == 1


async def test_without_a_node_it_says_so(program: Path, short_folder: Path) -> None:
    code, output = await run(program, short_folder / "engine.sock")
    assert (code, output.partition(": ")[0]) == (1, "engine")
    assert "error: " in output
