"""The TypeScript package: generated from the protos, clean, and at work with real coordinators, on Node.js."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmkv import __version__, rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator import coordinator as server
from lmkv_server.coordinator.operations import clears, drains
from tests.sdk.buf import buf
from tests.sdk.fleets import Fleet, processes
from tests.sdk.node import PACKAGE, compile_package, run_node, tool
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.guarded import guarded
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.support.certificates import issue
from tests.support.specs import LLAMA

README_PROMPT = [128000, 849, 21435]

pytestmark = pytest.mark.timeout(600)  # with the compiler, on a busy host


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled tests of the package and the code of the README, as in a user's project."""
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


def test_its_version_is_lmkvs() -> None:
    for name in ("package.json", "package-lock.json"):
        assert json.loads((PACKAGE / name).read_text())["version"] == __version__


def test_the_lock_file_names_no_place_to_download_from_but_npms() -> None:
    resolved = re.findall(r'"resolved": "(.*)"', (PACKAGE / "package-lock.json").read_text())
    assert [url for url in resolved if not url.startswith("https://registry.npmjs.org/")] == []


async def test_a_coordinator_and_nodes_are_asked_ordered_and_watched(
    compiled: Path, tmp_path: Path, short_folder: Path
) -> None:
    async with processes(tmp_path, short_folder) as (coordinator, setting):

        def kill() -> None:
            coordinator.kill()
            coordinator.start()

        await run_node(compiled / "fleet.test.js", setting, {"kill": kill})


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (clears, drains):
        monkeypatch.setattr(module, "SETTLE_SECONDS", 0.05)  # instances report all they hold when they join


@pytest.fixture
async def fleet(free_port: Callable[[], int]) -> AsyncIterator[Fleet]:
    made = Fleet(free_port())
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def other_fleet(free_port: Callable[[], int]) -> AsyncIterator[Fleet]:
    made = Fleet(free_port())
    await made.start()
    yield made
    await made.stop()


async def test_operations_are_waited_for_followed_and_cancelled(compiled: Path, fleet: Fleet) -> None:
    fleet.pause()
    acts = {"pause": fleet.pause, "resume": fleet.resume, "restart": fleet.restart}
    await run_node(compiled / "paused.test.js", fleet.setting, acts)


async def test_of_two_coordinators_the_second_takes_over(compiled: Path, fleet: Fleet, other_fleet: Fleet) -> None:
    fleet.pause()
    setting = {**fleet.setting, "otherAddress": other_fleet.coordinator.address}

    await run_node(compiled / "failover.test.js", setting, {"stop the first": fleet.stop})


async def test_a_token_says_who_calls(compiled: Path, tmp_path: Path) -> None:
    async with guarded(tmp_path) as serving:
        await run_node(compiled / "token.test.js", {"address": serving.coordinator.address})


async def test_tls_accepts_and_rejects(compiled: Path, tmp_path: Path) -> None:
    certificates = issue(tmp_path / "ours")
    files = {"ca": certificates.ca, "cert": certificates.cert, "key": certificates.key}
    stranger = issue(tmp_path / "another's")
    async with server.Coordinator(
        CoordinatorConfig(
            port=0,
            http_port=OFF,
            tls_cert=certificates.cert,
            tls_key=certificates.key,
            tls_client_ca=certificates.ca,
        )
    ) as coordinator:
        setting = {"address": coordinator.address, "tls": {**files, "otherCa": stranger.ca}}
        await run_node(compiled / "tls.test.js", setting)


async def test_the_readme_runs_as_it_stands(compiled: Path) -> None:
    held = dict.fromkeys(keys_of(README_PROMPT, secret=b""), len(README_PROMPT))
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            server.Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=60.0))
        )
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
