"""Parts that freeze, come late, or come and go for a while: engines answer all along, and share again afterwards."""

from __future__ import annotations

import json
import random
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from lmkv import cli
from lmkv.errors import LmkvError
from lmkv.rpc.frames import KEEPALIVE_SECONDS
from lmkv_client.demo.engine import EngineProcess
from tests.engines.faults import (
    HELD_TOKENS,
    REQUEST_TIMEOUT_SECONDS,
    FaultPrompt,
    FaultyPair,
    check,
    counting,
    eventually,
    thaw,
)

pytestmark = pytest.mark.in_order  # the last tests look at what all have left

LEASE_SECONDS = 3.0
CHAOS_SECONDS = 40.0


def test_engines_do_without_a_coordinator_until_it_appears(pair: FaultyPair) -> None:
    assert pair.early_tokens == {"from peer": 0, "from own pool": HELD_TOKENS, "known afterwards": HELD_TOKENS}


def test_the_bench_shows_what_the_second_engine_gets_from_the_first(
    pair: FaultyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [word for engine in pair.engines for word in ("--url", f"http://127.0.0.1:{engine.port}")]
    sizes = ["--documents", "2", "--document-tokens", "1000", "--chats", "2", "--turns", "2", "--output-tokens", "2"]
    assert cli.main(["bench", *urls, *sizes, "--json"]) == 0
    rounds = {one["name"]: one for one in json.loads(capsys.readouterr().out)["rounds"]}
    assert list(rounds) == ["documents, first time", "documents, again", "chats, first turn", "chats, later turns"]
    assert {one["requests"] for one in rounds.values()} == {2}
    assert rounds["documents, first time"]["cached_tokens"] == 0
    assert rounds["documents, again"]["loaded_tokens"] >= 2 * 768, "the whole chunks of both"
    assert cli.main(["bench", *urls, *sizes, "--chats", "0"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^documents, again +2 +[\d,]+ +[7-9]\d% +[7-9]\d% ", shown, re.MULTILINE), shown
    assert "documents: median TTFT " in shown


def test_a_frozen_coordinator_costs_lookups_only(pair: FaultyPair) -> None:
    held = pair.stored()
    prompts = [pair.prompt() for _ in range(2)]
    with pair.frozen("coordinator"), counting(pair.second) as grown:
        check(held, pair.second.complete(held.tokens))
        assert grown("tier_tokens", "peers") == grown("load_failures") == 0
        time.sleep(LEASE_SECONDS)  # the nodes notice, and register again when it continues
        for prompt in prompts:
            check(prompt, pair.second.complete(prompt.tokens))
        assert grown("node_losses") == 0
    pair.heal()


def test_a_frozen_peer_costs_one_load(pair: FaultyPair) -> None:
    held = pair.stored()
    with pair.frozen("node-1"), counting(pair.second) as grown:
        check(held, pair.fetching(held).result(REQUEST_TIMEOUT_SECONDS))
        assert (grown("lookups"), grown("load_failures")) == (1, 1)
    pair.heal()


def test_a_frozen_node_costs_its_engine_lookups_only(pair: FaultyPair) -> None:
    held, fresh = pair.stored(), pair.prompt()
    began = time.monotonic()
    with pair.frozen("node-2"), counting(pair.second) as grown:
        check(held, pair.second.complete(held.tokens))
        check(fresh, pair.second.complete(fresh.tokens))
        assert grown("tier_tokens", "peers") == 0
        assert grown("lookup_timeouts") == grown("lookups") > 0
        if time.monotonic() - began < KEEPALIVE_SECONDS:  # later the engine takes its node for lost
            assert (grown("lookups"), grown("node_losses")) == (2, 0)
    pair.heal()


def test_a_node_that_freezes_while_it_fetches_costs_one_load(pair: FaultyPair) -> None:
    held = pair.stored()
    with counting(pair.second) as grown:
        with pair.frozen("node-1"):
            asked = pair.fetching(held)
            with pair.frozen("node-2"):
                thaw([pair.pid("node-1")])
                check(held, asked.result(REQUEST_TIMEOUT_SECONDS))
        assert grown("load_failures") == 1
    pair.heal()


def test_whatever_comes_and_goes_every_answer_is_right(pair: FaultyPair) -> None:
    prompts = [pair.prompt(count) for count in (700, 1500, 2300, 3000, 3000)]
    answered: list[str] = []
    over = threading.Event()
    with ThreadPoolExecutor() as clients, counting(*pair.engines) as grown:
        asking = [clients.submit(keep_asking, engine, prompts, answered, over) for engine in pair.engines]
        try:
            chance = random.Random(3)
            break_things(pair, chance, answered)
            deadline = time.monotonic() + 2 * CHAOS_SECONDS  # a slow machine breaks few things in that time
            while not (grown("node_losses") and grown("tier_tokens", "peers")) and time.monotonic() < deadline:
                break_things(pair, chance, answered, CHAOS_SECONDS / 4)
        finally:
            over.set()
        for client in asking:
            client.result(REQUEST_TIMEOUT_SECONDS)
        assert grown("node_losses") > 0
        assert grown("tier_tokens", "peers") > 0
    pair.heal()


def keep_asking(engine: EngineProcess, prompts: list[FaultPrompt], answered: list[str], over: threading.Event) -> None:
    """Asks an engine for one prompt after the other, each without its own prefix cache, and compares."""
    random_ = random.Random(engine.name)
    while not over.is_set():
        prompt = random_.choice(prompts)
        engine.reset_prefix_cache()
        assert engine.complete(prompt.tokens).token_ids == prompt.answer
        answered.append(engine.name)


def break_things(pair: FaultyPair, random_: random.Random, answered: list[str], seconds: float = CHAOS_SECONDS) -> None:
    """Kills and freezes nodes and the coordinator, at random moments, now and then while others are still down."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if random_.random() < 0.7:
            eventually(pair.complete, "all processes are back")
            begin = len(answered)
            eventually(lambda: set(answered[begin:]) == {"engine-1", "engine-2"}, "both engines answer")  # noqa: B023
        time.sleep(random_.uniform(0.1, 2.0))
        victim = random_.choice(("coordinator", "node-1", "node-2"))
        with suppress(ValueError):  # the node is still down
            if random_.random() < 0.25:
                with pair.frozen(victim):
                    time.sleep(random_.uniform(0.05, 1.5))
            else:
                pair.kill(victim)
        pair.restart()


def test_after_all_that_nothing_has_crashed_or_leaks(pair: FaultyPair) -> None:
    pair.check_nothing_leaks()
    pair.check_no_crash()


def test_a_node_outlives_its_engine_and_serves_the_next_one(pair: FaultyPair) -> None:
    held = pair.prompt()
    check(held, pair.second.complete(held.tokens))
    node = pair.pid("node-2")
    pair.second.stop()
    assert pair.pid("node-2") == node
    pair.restart()
    assert pair.pid("node-2") == node
    with counting(pair.second) as grown:
        check(held, pair.second.complete(held.tokens))
        assert (grown("loaded_tokens"), grown("tier_tokens", "peers")) == (HELD_TOKENS, 0)


def test_a_second_node_of_one_instance_id_is_refused_and_its_engine_says_so(pair: FaultyPair) -> None:
    pair.second.stop()
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder:
        settings = {"LMKV_INSTANCE_ID": "engine-1", "LMKV_RUNTIME_DIR": folder}
        twin = pair.cluster.add_engine("twin", settings)
        twin.start()
        try:
            with suppress(LmkvError):  # a node that starts very slowly is reported once it is ready
                twin.wait_ready()
            eventually(lambda: "LMKV_INSTANCE_ID 'engine-1' is in use" in twin.log(), "the engine has said why")
        finally:
            twin.stop()
            del pair.cluster.engines["twin"]
        eventually(lambda: not list(Path(folder).glob("*/*.sock")), "its node has left nothing")
    fresh = pair.prompt(oracle=pair.first)
    check(fresh, pair.first.complete(fresh.tokens))
