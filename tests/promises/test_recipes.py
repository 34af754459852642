"""Every `grpcurl`, `buf curl` and `curl` in our pages works as it stands, and answers what the page says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.services.services import SERVICE_NAMES
from lmkv_server.node.node import Node
from tests.promises.recipes import Names, Place, Recipe, messages, recipes_of
from tests.sdk.buf import find_buf
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.support.certificates import issue
from tests.support.specs import LLAMA
from tests.tokenizers import save_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT = [128000, 849, 21435, 279]
HEARTBEAT_SECONDS = 0.2
TIMEOUT_SECONDS = 60
OF_NODES = {"lmkv.v1.RegistryService/Register", "lmkv.v1.RegistryService/Deregister"}
"""RPCs that only nodes call, as those of `lmkv.internal`: no page shows them."""
PAGES = sorted(page for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")) if recipes_of(page))


@asynccontextmanager
async def fleet(
    credentials: Credentials, ca: str, folder: Path, runtime_dir: Path
) -> AsyncIterator[tuple[Place, list[ScriptedInstance]]]:
    """A coordinator and the instances that the pages speak of: `lmkv-1` with the prompt and `lmkv-2` with nothing.

    A node serves engines.
    """
    keys = chunk_keys(as_tokens(PROMPT), root_key(LLAMA.fingerprint), LLAMA.chunk_size, partial=True)
    async with AsyncExitStack() as stack:
        # A short lease, so that the map counts as whole soon; the instances report often enough.
        tokenizers = {"llama": str(save_tokenizer(folder / "llama", {"Hello": 9906, "world": 1917}))}
        coordinator = Coordinator(
            CoordinatorConfig(
                port=0,
                http_port=0,
                lease_ttl=5.0,
                tokenizers=tokenizers,
                tls_cert=credentials.cert,
                tls_key=credentials.key,
                tls_client_ca=credentials.client_ca,
            )
        )
        await stack.enter_async_context(coordinator)
        channel = rpc.open_channel(f"localhost:{coordinator.port}", Credentials(ca=ca))
        await stack.enter_async_context(channel)
        others: dict[str, ScriptedInstance] = {}
        held = {"lmkv-1": {keys[0]: len(PROMPT)}, "lmkv-2": {}}
        instances = [ScriptedInstance(channel, others, name, LLAMA, chunks) for name, chunks in held.items()]
        for instance in instances:
            await stack.enter_async_context(instance)
        beating = asyncio.create_task(beat(instances))
        stack.callback(beating.cancel)
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        while not (await cache.Lookup(cache_service_pb2.LookupRequest(), timeout=60)).is_complete:
            pass
        config = NodeConfig(instance_id="lmkv-1", runtime_dir=str(runtime_dir), max_local_cpu_size=1 / 64)
        node = await stack.enter_async_context(Node(config))
        http_port = next(iter(coordinator.http_ports.values()))
        yield Place(find_buf(), coordinator.port, http_port, ca, str(node.config.engine_socket)), instances


async def beat(instances: list[ScriptedInstance]) -> None:
    """Keeps the instances' leases."""
    while True:
        for instance in instances:
            await instance.evict([])
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def run(command: list[str]) -> list[Any]:
    """The JSON values that a command says, on either of its outputs; of a watch, which has no end, the first."""
    is_endless = any("/Watch" in word for word in command)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"NO_PROXY": "*"},
        start_new_session=True,  # npm's buf is a script around a program: they end together
    )
    assert process.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while chunk := await process.stdout.read(65536):
                said += chunk
                if is_endless:
                    with suppress(json.JSONDecodeError):
                        return messages(said.decode())[:1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    try:
        return messages(said.decode())
    except json.JSONDecodeError:
        pytest.fail(f"{command} answered no JSON: {said.decode()}")


async def check(recipe: Recipe, place: Place, names: Names) -> None:
    """Runs a recipe and compares what it answers with what the page says."""
    answers = await run([names.translate(word) for word in place.command(recipe)])
    if not recipe.answers:  # the page leaves them out; then it must be no refusal
        assert answers, f"{recipe}: no answer"
        assert not any("code" in answer for answer in answers), f"{recipe}: {answers}"
        return
    if any(word.endswith("/Drain") for word in recipe.words):  # with nothing to copy it may end before it is answered
        for answer in answers:
            for field in ("done", "response"):
                answer.pop(field, None)
            answer["metadata"].pop("endTime", None)
    difference = names.difference(list(recipe.answers), answers)
    assert not difference, f"{recipe}: {difference}; all of it:\n{json.dumps(answers, indent=1)}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_tls", [False, True], ids=["plaintext", "tls"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_every_recipe_answers_what_the_page_says(
    page: Path, is_tls: bool, tmp_path: Path, runtime_dir: Path
) -> None:
    certificates = issue(tmp_path / "tls")
    credentials, ca = (certificates.server, certificates.ca) if is_tls else (Credentials(), "")
    async with fleet(credentials, ca, tmp_path, runtime_dir) as (place, instances):
        names = Names()
        for recipe in recipes_of(page):
            begins = any("done" not in answer for answer in recipe.answers if "metadata" in answer)
            for instance in instances:  # an operation that the page shows at its beginning must not be faster
                instance.going.clear() if begins else instance.going.set()
            await check(recipe, place, names)


def test_the_pages_have_a_recipe_for_every_rpc() -> None:
    words = {word for page in PAGES for recipe in recipes_of(page) for word in recipe.words}
    rpcs = [f"{name}/{method.name}" for name in SERVICE_NAMES for method in Default().FindServiceByName(name).methods]
    rpcs = [name for name in rpcs if not name.startswith("lmkv.internal.") and name not in OF_NODES]
    rpcs.append("lmkv.v1.EngineService/Attach")
    assert len(rpcs) >= 17
    assert [rpc_ for rpc_ in rpcs if not any(rpc_ in word for word in words)] == []


def test_differences_are_found() -> None:
    names = Names()
    same = {"name": "move-0123456789abcdef", "tokens": 12, "epoch": "...", "at": "127.0.0.1:..."}
    actual = {"name": "move-fedcba9876543210", "tokens": 12, "epoch": "17", "at": "127.0.0.1:9"}
    assert names.difference(same, actual) == ""
    assert names.translate("of move-0123456789abcdef") == "of move-fedcba9876543210"
    for change in ({"tokens": 13}, {"name": "move-0000000000000000"}, {"at": "10.0.0.1:9"}, {"more": 1}):
        assert names.difference(same, actual | change)
    assert names.difference({"name": "..."}, {}) != ""
    assert names.difference({"...": "..."}, actual) == ""
    assert names.difference([1], [1, 2]) != ""
