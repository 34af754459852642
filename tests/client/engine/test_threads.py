"""One engine, many threads: every chunk that is loaded is whole and right, and nothing is kept in the end."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.client.engine.engines import Attach, all_extents, load, prompt, store
from tests.client.engine.nodes import until
from tests.waiting import WAIT_SECONDS

THREADS = 16
ROUNDS = 40


def test_sixteen_threads_store_and_load_at_once(attach: Attach) -> None:
    engine = attach(max_local_cpu_size="4MiB")  # 512 chunks: threads evict each other's

    def work(number: int) -> int:
        order = random.Random(number)
        loaded = 0
        for _ in range(ROUNDS):
            keys = engine.keys(prompt(order.randint(1, 40), first=order.randint(0, 3)), salt=str(order.randint(0, 4)))
            loaded += load(engine, keys)
            new = engine.missing(keys, timeout=WAIT_SECONDS)
            if order.random() < 0.2:
                engine.put_back(engine.reserve(len(new), timeout=1.0))
            else:
                store(engine, new, parent=keys[-len(new) - 1] if len(new) < len(keys) else b"")
        return loaded

    with ThreadPoolExecutor(THREADS) as threads:
        assert sum(threads.map(work, range(THREADS))) > 0
    counters = engine.counters
    assert counters.node_losses == counters.lookup_timeouts == counters.rejected_commits == 0
    assert counters.lookups == THREADS * ROUNDS
    until(lambda: all_extents(engine) == 512 // 3)


def test_threads_stop_when_the_engine_is_closed(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(3))
    started = threading.Barrier(THREADS + 1)

    def work(_: int) -> None:
        started.wait(WAIT_SECONDS)
        while engine.is_attached:
            store(engine, engine.missing(keys, timeout=WAIT_SECONDS)[:1])
            with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
                list(held.load(timeout=WAIT_SECONDS))

    with ThreadPoolExecutor(THREADS) as threads:
        running = [threads.submit(work, number) for number in range(THREADS)]
        started.wait(WAIT_SECONDS)
        engine.close()
        for one in running:
            one.result(WAIT_SECONDS)
