"""Pairs of SGLang servers that keep their pages in lmkv or in another storage backend, for measurements."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from benchmarks.systems.pairs import ROOT
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.process import ServerProcess, end_processes, free_port, pids_with_environment
from tests.sglang.engine import SHIM, SglangProcess, linker_flags, storage_flags

PAGE_TOKENS = 64
STORE_SECONDS = 60.0
POLL_SECONDS = 0.1
READY_SECONDS = 30.0
KEYS_PER_PAGE = 2
"""Of Mooncake: one of keys, one of values."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPlan:
    """What all servers have in common."""

    run: BenchmarkRun
    model: Path
    prompt_count: int
    prompt_tokens: int
    warm_up_tokens: int
    """Of one prompt more, which each server answers first."""

    @property
    def page_count(self) -> int:
        """Pages that are stored of all prompts, and of the one that warms up."""
        return self.prompt_count * (self.prompt_tokens // PAGE_TOKENS) + self.warm_up_tokens // PAGE_TOKENS

    @property
    def storage_bytes(self) -> int:
        """Memory for what is stored, twice: also the prompt that warms up, and answers."""
        return 2 * (self.prompt_count + 1) * self.prompt_tokens * engines.token_bytes(engines.EXACT_DTYPE)

    def server(
        self, name: str, flags: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> SglangProcess:
        """A server, not started, whose KV cache holds all prompts."""
        tokens = -(-(self.prompt_count + 2) * (self.prompt_tokens + PAGE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS
        own = {
            "--page-size": str(PAGE_TOKENS),
            "--max-total-tokens": str(tokens),
            "--chunked-prefill-size": str(-(-2 * self.prompt_tokens // PAGE_TOKENS) * PAGE_TOKENS),
            "--context-length": str(2 * self.prompt_tokens),
        }
        paths = {"PYTHONPATH": f"{SHIM}:{ROOT}"}
        return SglangProcess(
            name, self.model, self.run.logs, flags=own | dict(flags), environment=paths | dict(environment or {})
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPair:
    """Two servers, not started. What the first has stored, the second can load."""

    first: SglangProcess
    second: SglangProcess | None = None
    wait_until_stored: Callable[[Prompts], None] = lambda _prompts: None
    """Returns when the second can have what the first has answered."""
    first_serves_second: bool = False
    """Whether the first must run as long as the second: it has what is stored."""
    others: Mapping[str, SglangProcess] = field(default_factory=dict)
    """Servers that load what the first has stored in another way, by the name of their rows."""


@contextmanager
def lmkv_servers(plan: ServerPlan) -> Iterator[ServerPair]:
    """Servers with a node each: the second loads from the first one's node, which stays when its server has ended."""
    sockets = plan.run.folder / "run"
    sockets.mkdir(mode=0o700)
    with CoordinatorProcess(plan.run.logs) as coordinator:

        def settings(instance_id: str) -> dict[str, str]:
            return {
                "LMKV_INSTANCE_ID": instance_id,
                "LMKV_RUNTIME_DIR": str(sockets),
                "LMKV_COORDINATOR_ADDRESS": coordinator.address,
                **engines.pool_setting(plan.storage_bytes),
            }

        def wait(prompts: Prompts) -> None:
            for prompt in prompts:
                coordinator.wait_for_holder(prompt, "one", len(prompt) // PAGE_TOKENS * PAGE_TOKENS, STORE_SECONDS)

        flags = storage_flags(prefetch_threshold=PAGE_TOKENS)
        try:
            yield ServerPair(
                first=plan.server("lmkv-one", flags, settings("one")),
                second=plan.server("lmkv-two", flags, settings("two")),
                wait_until_stored=wait,
                others={"linker": plan.server("linker", linker_flags(), settings("one"))},
            )
        finally:
            end_processes(pids_with_environment({"LMKV_RUNTIME_DIR": str(sockets)}, "node"))


@contextmanager
def file_servers(plan: ServerPlan) -> Iterator[ServerPair]:
    """Servers with SGLang's file backend and one folder, as on a shared file system. It is in the page cache."""
    folder = plan.run.folder / "files"
    flags = storage_flags() | {
        "--hicache-storage-backend": "file",
        "--hicache-storage-backend-extra-config": json.dumps({"prefetch_threshold": PAGE_TOKENS}),
    }
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}

    def stored_count() -> int:
        return sum(file.suffix == ".bin" for file in folder.iterdir()) if folder.is_dir() else 0

    try:
        yield ServerPair(
            first=plan.server("file-one", flags, environment),
            second=plan.server("file-two", flags, environment),
            wait_until_stored=lambda _: wait_for_count(stored_count, plan.page_count, "files"),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def mooncake_servers(plan: ServerPlan) -> Iterator[ServerPair]:
    """Servers that give memory to a Mooncake store with a master, by TCP: the second reads the first one's memory."""
    package = mooncake_folder()
    if package is None:
        raise LmkvError("Mooncake is not installed: run `make setup-sglang`")
    port, metrics_port = free_port(), free_port()
    master = ServerProcess(
        "mooncake-master",
        [
            str(package / "mooncake_master"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={metrics_port}"),
        ],
        plan.run.logs / "mooncake-master.log",
    )
    store = {
        "master_server_address": f"127.0.0.1:{port}",
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": -(-plan.storage_bytes >> 26) << 26,
        "prefetch_threshold": PAGE_TOKENS,
    }
    flags = storage_flags() | {
        "--hicache-storage-backend": "mooncake",
        "--hicache-storage-backend-extra-config": json.dumps(store),
        "--sleep-on-idle": "",
    }

    def key_count() -> int:
        return int(metric(f"http://127.0.0.1:{metrics_port}/metrics", "master_key_count"))

    with master:
        master.start()
        master.wait_until(lambda: key_count() >= 0, "ready", READY_SECONDS)
        yield ServerPair(
            first=plan.server("mooncake-one", flags),
            second=plan.server("mooncake-two", flags),
            wait_until_stored=lambda _: wait_for_count(key_count, KEYS_PER_PAGE * plan.page_count, "keys"),
            first_serves_second=True,
        )


@contextmanager
def plain_servers(plan: ServerPlan) -> Iterator[ServerPair]:
    """A server without a host pool or a storage backend."""
    yield ServerPair(first=plan.server("plain", {}))


def mooncake_folder() -> Path | None:
    """The folder of Mooncake's package, if it is installed with a master."""
    found = importlib.util.find_spec("mooncake")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    return next((folder for folder in folders if (folder / "mooncake_master").exists()), None)


def metric(url: str, name: str) -> float:
    """A number among the metrics at `url`; -1 if they cannot be had, or do not have it."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return -1
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else -1


def wait_for_count(count: Callable[[], int], wanted: int, what: str) -> None:
    """Waits until a system has stored this much. Raises `LmkvError` if it does not."""
    deadline = time.monotonic() + STORE_SECONDS
    while (found := count()) < wanted:
        if time.monotonic() > deadline:
            raise LmkvError(f"{found} of {wanted} {what} were stored within {STORE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
