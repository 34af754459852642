"""Operators name SGLang's pages by the tokens and the cache salt of a prompt, as they do with other engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lmkv import cli
from lmkv.keys import page_seed
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.sglang import LmkvStorage
from tests.client.sglang.conftest import NodeOfTests
from tests.client.sglang.contract import PAGE_SIZE, StorageConfigFields, host_pool, page_hashes, slots
from tests.waiting import wait_until

TOKENS = list(range(1000, 1000 + 6 * PAGE_SIZE + 3))
PAGES = [3, 9, 1, 0, 17, 4]

Run = Callable[..., str]


@pytest.fixture
def nodes(tmp_path: Path, short_folder: Path, coordinator: CoordinatorProcess) -> Iterator[list[NodeOfTests]]:
    """Two nodes of one fleet."""
    with ExitStack() as running:
        found = [NodeOfTests(short_folder, tmp_path, coordinator, name=name) for name in ("one", "two")]
        for node in found:
            running.enter_context(node)
            node.start_and_wait()
        yield found


@pytest.fixture
def run(coordinator: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns what it has printed."""
    monkeypatch.setenv("LMKV_COORDINATOR_ADDRESS", coordinator.address)

    def run(*argv: str) -> str:
        assert cli.main(argv) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("salt", ["", "tenant-a"])
def test_pages_are_looked_up_pinned_moved_and_cleared_by_tokens(nodes: list[NodeOfTests], run: Run, salt: str) -> None:
    prompt = ["--tokens", ",".join(map(str, TOKENS)), "--cache-salt", salt]
    names = page_hashes(TOKENS, page_seed(salt))
    pools = [host_pool("page_first_direct"), host_pool("page_first_direct", seed=-1)]

    count = len(names) * PAGE_SIZE

    def held(*changes: str) -> dict[str, int]:
        answer = json.loads(run("lookup", *prompt, *changes, "--json"))
        return {holder["instance_id"]: holder["matched_token_count"] for holder in answer["holders"]}

    with ExitStack() as storages:
        made = []
        for node, pool in zip(nodes, pools, strict=True):
            settings = {"node_address": str(node.socket), "lookup_timeout": 20, "load_timeout": 60, "model_id": "tiny"}
            made.append(LmkvStorage(StorageConfigFields(extra_config={"interface_v1": 1, "lmkv": settings}), {}))
            storages.callback(made[-1].close)
            made[-1].register_mem_pool_host(pool)
        assert all(made[0].batch_set_v1(names, slots(PAGES)))
        wait_until(lambda: held() == {"one": count}, "the coordinator knows the pages")
        assert held("--cache-salt", "other") == {}

        pin = json.loads(run("pin", "--at", "one", *prompt, "--json"))["pin"]
        assert (pin["chunk_count"], pin["token_count"]) == (len(names), count)
        run("unpin", pin["pin_id"])

        run("move", "--from", "one", "--to", "two", *prompt)
        wait_until(lambda: held() == {"two": count}, "the pages have moved")
        assert made[1].batch_get_v1(names, slots(PAGES)) == [True] * len(names)
        assert all(torch.equal(pools[0].kv_buffer[:, page], pools[1].kv_buffer[:, page]) for page in PAGES)

        run("clear", *prompt)
        wait_until(lambda: held() == {}, "the pages are cleared")
        assert made[1].batch_exists(names) == 0
