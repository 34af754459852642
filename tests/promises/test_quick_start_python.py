"""The Python in the CPU quick start runs as it stands there, against a real coordinator."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path

import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.support.specs import LLAMA

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROMPT = [128000, 849, 21435]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Where the coordinator of `engine-1`, which holds the prompt, and `engine-2` is."""
    held = dict.fromkeys(keys_of(PROMPT, secret=b""), len(PROMPT))
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=30.0))
        )
        channel = await stack.enter_async_context(rpc.open_channel(coordinator.address))
        fleet: dict[str, ScriptedInstance] = {}
        for name in ("engine-1", "engine-2"):
            chunks = held if name == "engine-1" else {}
            await stack.enter_async_context(ScriptedInstance(channel, fleet, name, LLAMA, chunks))
        yield coordinator.address


async def test_the_python_of_the_quick_start_runs(root: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = BLOCK.findall((root / "docs/get-started/cpu.md").read_text())
    assert len(blocks) == 2
    for block in blocks:
        assert '"localhost:9000"' in block
        program = compile(block.replace("localhost:9000", address), "cpu.md", "exec")
        await asyncio.to_thread(exec, program, {"__name__": "__main__"})
    shown = capsys.readouterr().out.splitlines()
    # Progress is reported whenever it changes: none, some or all of it may come before the end.
    shown = [line for line, _ in groupby(shown) if line != "0 of 1 chunks"]
    assert shown == [
        "engine-1 holds 3 tokens",
        "1 of 1 chunks",
        "1000 bytes",
        "3 tokens pinned",
        "INSTANCE_NOT_FOUND engine-3",
    ]
