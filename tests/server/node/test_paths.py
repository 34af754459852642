"""`docs/contribute/paths.md` lists the files that a chunk passes when it is loaded from a peer: just those, and few."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path
from types import FrameType

from tests.server.node.cases import chunk_keys
from tests.server.node.test_node_fleet import TwoNodes

ROOT = Path(__file__).parents[3]
NODE = ROOT / "server/lmkv_server/node"
MAX_FILES = 24
TRACED = ("stack.py", "fetch", "peers", "serving")
"""What runs only for loads from peers. Other packages of the node also run in the background."""


def listed() -> set[str]:
    """The files of the section, with names in braces spelled out."""
    page = (ROOT / "docs" / "contribute" / "paths.md").read_text()
    section = page.partition("## Load from a peer\n")[2].partition("\n## ")[0]
    found = set()
    for span in re.findall(r"`([\w./{},]+\.py)`", section):
        choices = [part.split(",") for part in re.split(r"[{}]", span)]
        found |= {"".join(parts) for parts in product(*choices)}
    return found


def test_a_chunk_from_a_peer_passes_few_files() -> None:
    assert len(listed()) <= MAX_FILES


async def test_the_files_of_a_load_from_a_peer_are_listed(runtime_dir: Path) -> None:
    passed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(NODE):
            passed.add(str(file.relative_to(NODE)))

    async with TwoNodes(runtime_dir) as nodes:
        await nodes.store([0, 1, 2, 3])
        await nodes.asking.lookup("1", chunk_keys(0, 1, 2, 3))
        sys.setprofile(note)
        try:
            await nodes.load("1", 0, 4)
            await nodes.asking.release("1")
        finally:
            sys.setprofile(None)
    expected = {name.removeprefix("node/") for name in listed() if name.startswith("node/")}
    assert {name for name in passed if name.startswith(TRACED)} == {one for one in expected if one.startswith(TRACED)}
    assert expected <= passed
