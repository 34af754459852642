"""A node whose memory ends during allocation: it uses what it got, or exits with the reason."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.small_tmpfs import on_small_tmpfs

STEP = 16 << 20

SCRIPT = """
import asyncio, sys
import re
from pathlib import Path
from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv.pool.pool import Pool
from lmkv_server.node.node import Node

folder = Path(sys.argv[1])
STEP, THEIRS = {step}, {theirs}
other = Pool.create(3 * STEP, folder / "other")

class Late(Node):
    async def _populate(self):
        other.populate(0, THEIRS * STEP)  # between the promise and the taking
        await super()._populate()

async def main():
    config = NodeConfig(
        instance_id="n", enable_p2p=False, runtime_dir=str(folder), pool_path=str(folder / "pool"),
        max_local_cpu_size=3 * STEP / 2**30,
    )
    async with Late(config) as node:
        waiting = asyncio.create_task(node.wait())
        await asyncio.wait([waiting, node._populating], return_when=asyncio.FIRST_COMPLETED)
        node.tier.check()
        print(node.tier.size_bytes, node.pool.size_bytes, node.describe().tiers[0].capacity_bytes)
        held = [node.tier.reserve(STEP // 2) for _ in range(10)]
        print(sum(one is not None for one in held), max(one.offset for one in held if one))
        if node._populating.done() and node._populating.exception():
            try:
                await waiting
            except ConfigError as error:
                print(error)
        waiting.cancel()

asyncio.run(main())
"""


def test_a_node_uses_the_memory_that_it_got(tmp_path: Path) -> None:
    printed = on_small_tmpfs(tmp_path, 4 * STEP + (1 << 20), SCRIPT.format(step=STEP, theirs=2)).splitlines()
    assert printed == [f"{2 * STEP} {3 * STEP} {2 * STEP}", f"4 {3 * STEP // 2}"]


def test_a_node_that_got_too_little_memory_exits(tmp_path: Path) -> None:
    printed = on_small_tmpfs(tmp_path, 3 * STEP + (1 << 20), SCRIPT.format(step=STEP, theirs=3)).splitlines()
    assert re.match(r"max_local_cpu_size: memory for a pool of [\d.]+ MiB ended at \S+ \S+: ", printed[-1])
