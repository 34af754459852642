"""The engine in NumPy of docs/examples, and the page that shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.process import ServerProcess
from tests.waiting import is_listening

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/numpy_engine.py"
PAGE = ROOT / "docs/guides/attach-your-own-engine.md"
PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps."
OTHER = "the quick brown fox jumps over the lazy dog, and then it sleeps."
CHUNK = 16
MAX_LINES = 150
RUN_SECONDS = 200.0
READY_SECONDS = 120.0


@pytest.fixture
def node(tmp_path: Path, short_folder: Path) -> Iterator[ServerProcess]:
    """A node as people start it; its socket is `short_folder/node/engine.sock`."""
    settings = {
        "LMKV_INSTANCE_ID": "node",
        "LMKV_RUNTIME_DIR": str(short_folder),
        "LMKV_MAX_LOCAL_CPU_SIZE": "16MiB",
        "LMKV_ENABLE_P2P": "false",
    }
    process = ServerProcess("node", [sys.executable, "-m", "lmkv", "node"], tmp_path / "node.log", settings)
    process.start()
    try:
        process.wait_until(lambda: is_listening(short_folder / "node/engine.sock"), "ready", READY_SECONDS)
        yield process
    finally:
        process.stop()


def generate(prompt: str, socket: Path) -> tuple[int, list[int]]:
    """Runs the example in a process of its own; the tokens that it loaded, and the answer."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), prompt, str(socket)],
        env=os.environ | {"LMKV_NODE_START_TIMEOUT": "5", "LMKV_LOOKUP_TIMEOUT": "20"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"loaded (\d+) of (\d+) tokens\nanswer: ([\d ]+)\n", done.stdout)
    assert found is not None, done.stdout
    assert int(found[2]) == len(prompt)
    return int(found[1]), [int(token) for token in found[3].split()]


def test_a_second_run_loads_the_prompt_and_gives_the_same_answer(node: ServerProcess, short_folder: Path) -> None:
    socket = short_folder / "node/engine.sock"
    loaded, answer = generate(PROMPT, socket)
    assert (loaded, len(answer)) == (0, 20)
    assert generate(PROMPT, socket) == (len(PROMPT) // CHUNK * CHUNK, answer)
    assert generate(PROMPT[:-1] + "!", socket)[0] == len(PROMPT) // CHUNK * CHUNK - CHUNK
    loaded, other = generate(OTHER, socket)
    assert loaded == 0
    assert other != answer, "the answer must depend on the whole prompt, else a wrong load would not show"
    node.kill()
    assert generate(PROMPT, socket) == (0, answer)


def test_the_page_shows_a_part_of_the_example_and_it_is_short() -> None:
    code = EXAMPLE.read_text()
    assert len(code.splitlines()) <= MAX_LINES
    (shown,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown in code, "copy the two functions of docs/examples/numpy_engine.py into the page"
