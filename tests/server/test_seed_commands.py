"""LMCache's manual pages on lookup and move, followed with lmkv's processes: command lines, YAML files and curl."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv.spec import KvSpec
from lmkv_client.demo.process import ServerProcess, free_port
from lmkv_kernels import checksum
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS

TOKENS = [128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13]
SPEC: KvSpec = small_spec(chunk_size=256, vocab_size=128_256)
INSTANCE = """\
chunk_size: 256
local_cpu: True
max_local_cpu_size: 1

# cache controller configurations
enable_controller: True
lmcache_instance_id: "lmcache_instance_{number}"
controller_pull_url: "localhost:{pull}"
controller_reply_url: "localhost:{reply}"
lmcache_worker_ports: {worker}

# P2P configurations
enable_p2p: True
p2p_host: "localhost"
p2p_init_ports: {init}
p2p_lookup_ports: {lookup}
transfer_channel: "nixl"
"""
"""The manual's, but for the size of the pool."""


class Manual:
    """What the manual has running: a controller, and two instances."""

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        self.port = free_port()
        self.runtime_dir = runtime_dir
        pull, reply = free_port(), free_port()
        ports = json.dumps({"pull": pull, "reply": reply})
        arguments = ["--host", "localhost", "--port", str(self.port), "--monitor-ports", ports]
        self.coordinator = ServerProcess(
            "coordinator", [sys.executable, "-m", "lmkv", "coordinator", *arguments], folder / "coordinator.log"
        )
        self.nodes = []
        for number in (1, 2):
            file = folder / f"instance{number}.yaml"
            free = {name: free_port() for name in ("worker", "init", "lookup")}
            file.write_text(INSTANCE.format(number=number, pull=pull, reply=reply, **free))
            self.nodes.append(
                ServerProcess(
                    f"lmcache_instance_{number}",
                    [sys.executable, "-m", "lmkv", "node"],
                    folder / f"node-{number}.log",
                    {"LMKV_CONFIG_FILE": str(file), "LMKV_RUNTIME_DIR": str(runtime_dir)},
                )
            )

    def socket(self, number: int) -> Path:
        """Where engines reach an instance."""
        return self.runtime_dir / f"lmcache_instance_{number}" / "engine.sock"

    def curl(self, path: str, body: dict[str, Any]) -> Any:
        """What the manual's curl command prints."""
        command = ["curl", "-s", "-X", "POST", f"http://localhost:{self.port}{path}"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=WAIT_SECONDS).stdout)

    def answers(self) -> bool:
        """Whether the coordinator is there, and knows both instances."""
        try:
            return len(self.curl("/query_worker_info", {"instance_id": "all"})["worker_infos"]) == 2
        except subprocess.CalledProcessError:
            return False

    def move(self, **fields: Any) -> Any:
        """Moves the tokens from the first instance to the second; what the call answered."""
        old, new = (["lmcache_instance_1", "LocalCPUBackend"], ["lmcache_instance_2", "LocalCPUBackend"])
        answer = self.curl("/move", {"old_position": old, "new_position": new, "tokens": TOKENS} | fields)
        deadline = time.monotonic() + WAIT_SECONDS
        while self.curl("/check_finish", {"event_id": answer["event_id"]})["status"] == "running":
            assert time.monotonic() < deadline
        return answer


@pytest.fixture
def manual(tmp_path: Path, short_folder: Path) -> Iterator[Manual]:
    manual = Manual(tmp_path, short_folder)
    with ExitStack() as stack:
        for process in (manual.coordinator, *manual.nodes):
            stack.callback(process.stop)
            process.start()
        for process in manual.nodes:
            stack.callback(process.request_stop)
        manual.coordinator.wait_until(manual.answers, "ready, with both instances", 120.0)
        for number, process in enumerate(manual.nodes, 1):  # which serve engines once they are registered
            process.wait_until(manual.socket(number).exists, "ready for engines", 120.0)
        yield manual


@pytest.fixture
async def stored(manual: Manual) -> AsyncIterator[Manual]:
    """The same, after the first instance's engine has answered the prompt."""
    (key,) = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size, partial=True)
    size_bytes = SPEC.size_bytes(len(TOKENS))
    async with AsyncExitStack() as stack:
        first, _ = [
            await stack.enter_async_context(EngineClient(manual.socket(number), f"engine-{number}", SPEC))
            for number in (1, 2)
        ]
        (credit,) = await first.reserve(1)
        of_zeros = checksum(bytearray(size_bytes), 0, size_bytes)  # as fresh memory is
        commit = first.commit(key, credit, checksum=of_zeros)
        commit.size_bytes, commit.token_count = size_bytes, len(TOKENS)
        await first.say(commit=[commit])
        deadline = time.monotonic() + WAIT_SECONDS
        while not manual.curl("/lookup", {"tokens": TOKENS}).get("lmcache_instance_1"):
            assert time.monotonic() < deadline
        yield manual


async def test_a_lookup_answers_in_both_forms_of_the_manual(stored: Manual) -> None:
    answer = stored.curl("/lookup", {"tokens": TOKENS})
    assert answer["event_id"]
    assert answer["lmcache_instance_1"] == ["LocalCPUBackend", 12]
    assert answer["layout_info"] == {"lmcache_instance_1": ["LocalCPUBackend", 12]}


async def test_a_move_answers_as_in_the_manual_and_moves(stored: Manual) -> None:
    answer = stored.move()
    assert set(answer) >= {"num_tokens", "event_id"}
    assert answer["num_tokens"] == 12
    found = stored.curl("/lookup", {"tokens": TOKENS})
    assert found["layout_info"] == {"lmcache_instance_2": ["LocalCPUBackend", 12]}


async def test_the_manuals_copy_and_the_codes_should_copy_both_copy(stored: Manual) -> None:
    for field in ("copy", "should_copy"):
        assert stored.move(**{field: True})["num_tokens"] == 12
        assert len(stored.curl("/lookup", {"tokens": TOKENS})["layout_info"]) == 2


def test_the_manuals_second_file_has_the_first_ones_id_and_is_refused(manual: Manual, tmp_path: Path) -> None:
    elsewhere = manual.runtime_dir / "elsewhere"
    impostor = ServerProcess(
        "impostor",
        [sys.executable, "-m", "lmkv", "node"],
        tmp_path / "impostor.log",
        manual.nodes[0].environment | {"LMKV_RUNTIME_DIR": str(elsewhere), "LMKV_P2P_PORT": "0"},
    )
    done = subprocess.run(
        impostor.command,
        env=impostor.environment | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "lmcache_instance_1" in done.stderr
    assert "give this one another instance_id" in done.stderr
