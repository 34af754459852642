"""The command line against processes as people run them: a coordinator, and two nodes that move bytes by NIXL."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_kernels import checksum
from tests.client.conftest import RunCommand
from tests.server.node.engine_client import EngineClient
from tests.support.nodes import NodeProcesses
from tests.support.specs import small_spec

SPEC = small_spec()
CHUNK_COUNT = 5
TOKENS = list(range(CHUNK_COUNT * SPEC.chunk_size))
KEYS = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size)
NAMES = ("node-1", "node-2")


@pytest.fixture
def address(tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the coordinator of two nodes is."""
    with cluster.CoordinatorProcess(tmp_path) as coordinator:
        monkeypatch.setenv("LMKV_COORDINATOR_ADDRESS", coordinator.address)
        with NodeProcesses(
            NAMES,
            coordinator_address=coordinator.address,
            runtime_dir=short_folder,
            logs=tmp_path,
            pool_size="16MiB",
        ):
            yield coordinator.address


@pytest.fixture
async def stored(address: str, short_folder: Path) -> AsyncIterator[str]:
    """The same, with a prompt on the first node; an engine is attached to each."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(EngineClient(short_folder / name / "engine.sock", spec=SPEC))
            for name in NAMES
        ]
        credits_ = await engines[0].reserve(CHUNK_COUNT)
        of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
        commits = [engines[0].commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, credits_, strict=True)]
        await engines[0].say(commit=commits)
        async with Coordinator(address) as coordinator:
            async for update in coordinator.watch():
                if any(len(change.admitted_keys) == CHUNK_COUNT for change in update.changes):
                    break
        yield address


@pytest.mark.usefixtures("stored")
async def test_chunks_are_looked_up_copied_pinned_moved_and_cleared_by_the_command_line(
    run_command: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ",".join(map(str, TOKENS))

    async def run(*argv: str, code: int = 0) -> str:
        assert await run_command(*argv) == code
        return capsys.readouterr().out

    async def held() -> dict[str, int]:
        answer = json.loads(await run("lookup", "--tokens", tokens, "--json"))
        return {holder["instance_id"]: holder["matched_chunk_count"] for holder in answer["holders"]}

    assert await held() == {"node-1": 5}
    copied = await run("copy", "--from", "node-1", "--to", "node-2/host", "--keys", KEYS[0].hex())
    assert re.search(rf": 1 chunk \({SPEC.chunk_size} tokens\) arrived, \S+ \S+ transferred\n", copied)
    assert await held() == {"node-1": 5, "node-2": 1}

    pin_id = json.loads(await run("pin", "--at", "node-1", "--keys", KEYS[0].hex(), "--json"))["pin"]["pin_id"]
    moved = await run("move", "--from", "node-1", "--to", "node-2", "--tokens", tokens, code=3)
    assert ": 5 chunks " in moved
    assert "; the source dropped 4\n" in moved
    assert f"failed for 1 chunk from {KEYS[0].hex()} on: " in moved
    assert await held() == {"node-1": 1, "node-2": 5}

    await run("unpin", pin_id)
    assert await run("pins") == "nothing is pinned\n"
    assert ": 1 chunk " in await run("clear", "--instance", "node-1", "--all", "--yes")
    assert await held() == {"node-2": 5}
    instances = json.loads(await run("top", "--json"))["instances"]
    assert [(instance["instance_id"], instance["engine_count"]) for instance in instances] == [
        (name, 1) for name in NAMES
    ]
    operations = (await run("ops")).splitlines()[1:]
    assert [line.split()[0].partition("-")[0] for line in operations] == ["clear", "move", "copy"]


@pytest.mark.usefixtures("stored")
async def test_the_command_line_explains_where_a_prompt_is_and_why_it_is_gone(
    run_command: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ",".join(map(str, [*TOKENS, 1, 2, 3]))

    async def explained() -> dict[str, list[tuple[str, str, int]]]:
        assert await run_command("explain", "--tokens", tokens, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        return {
            one["instance_id"]: [
                (span["tier"], span["reason"].removeprefix("MISS_REASON_"), span["token_count"])
                for span in one["explanation"]["spans"]
            ]
            for one in answer["explanations"]
        }

    before = await explained()
    assert before["node-1"] == [("host", "UNSPECIFIED", len(TOKENS)), ("", "NEVER_STORED", 3)]
    assert before["node-2"] == [("peers", "UNSPECIFIED", len(TOKENS)), ("", "NEVER_STORED", 3)]
    assert await run_command("clear", "--instance", "node-1", "--tokens", tokens) == 0
    capsys.readouterr()
    after = await explained()
    assert after["node-1"] == [("host", "DROPPED", len(TOKENS) + 3)]
    assert after["node-2"] == [("", "NEVER_STORED", len(TOKENS) + 3)]
    assert await run_command("explain", "--tokens", tokens, "--instance", "node-1") == 0
    shown = capsys.readouterr().out
    assert "dropped (host)" in shown
    assert " ago " in shown


async def test_the_command_line_finds_grpc_behind_the_http_port(
    tmp_path: Path, run_command: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster.CoordinatorProcess(tmp_path) as coordinator:
        assert await run_command("instances", "--coordinator", coordinator.http_address) == 0
        out, err = capsys.readouterr()
        assert "no instance is registered" in out
        assert f"{coordinator.http_address} is an HTTP port" in err
        assert coordinator.address in err


async def test_orders_and_lookups_name_the_reason_while_no_engine_has_registered(
    address: str, run_command: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Coordinator(address) as coordinator:  # two nodes join it
        while not (await coordinator.lookup(keys=KEYS[:1])).is_complete:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    commands = (
        ["lookup", "--tokens", "1,2", "--model", "llama"],
        ["pin", "--at", "node-1", "--tokens", "1,2"],
        ["clear", "--tokens", "1,2"],
        ["move", "--from", "node-1", "--to", "node-2", "--tokens", "1,2"],
    )
    for command in commands:
        assert await run_command(*command) == 1
        assert "no engine has registered yet" in capsys.readouterr().err, command
    assert await run_command("lookup", "--tokens", "1,2") == 0
    assert "no engine has registered yet" in capsys.readouterr().out


async def test_a_model_that_is_missing_is_asked_for_by_the_flag(
    address: str, short_folder: Path, run_command: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(SPEC, model_name="other", model_id="other")
    async with (
        EngineClient(short_folder / "node-1" / "engine.sock", spec=SPEC),
        EngineClient(short_folder / "node-2" / "engine.sock", spec=other),
        Coordinator(address) as coordinator,
    ):
        while sum(len(instance.specs) for instance in await coordinator.instances()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await run_command("lookup", "--tokens", "1,2") == 1
        said = capsys.readouterr().err
        assert f"select one by --model, one of: other, {SPEC.model_name}" in said
        assert "model_name" not in said
