"""The engine API when its node ends, stops or has never been: empty answers and counters, and no exception."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest

from lmkv.runtime import patience
from lmkv_client.engine import Written
from tests.client.engine.engines import Attach, all_extents, content, load, prompt, store, words
from tests.client.engine.nodes import connector_config, kill, node_pid, until
from tests.waiting import WAIT_SECONDS

WAY_LONGER = 30.0


def test_a_killed_node_costs_its_chunks_and_a_new_one_is_used(attach: Attach, runtime_dir: Path) -> None:
    engine = attach()
    keys = engine.keys(prompt(4))
    store(engine, keys)
    held = engine.lookup(keys, timeout=WAIT_SECONDS)
    (extent,) = engine.reserve(1, timeout=WAIT_SECONDS)
    kill(node_pid(connector_config(runtime_dir)))
    until(lambda: engine.counters.node_losses == 1)
    loaded = list(held.load())  # in memory that is still mapped
    assert [words(one)[0] for one in loaded] == [content(key)[0] for key in keys]
    held.release()
    engine.commit([Written(key=keys[0], extent=extent)])
    engine.put_back([extent])
    until(lambda: engine.is_attached)
    assert engine.counters.dropped_commits == 1
    assert load(engine, keys) == 0
    assert store(engine, keys) == 4
    assert load(engine, keys) == 4
    assert engine.counters.node_losses == 1


def test_calls_end_empty_when_the_node_is_killed_while_they_wait(attach: Attach, runtime_dir: Path) -> None:
    engine = attach()
    keys = engine.keys(prompt(2))
    pid = node_pid(connector_config(runtime_dir))
    engine.put_back(engine.reserve(2, timeout=WAIT_SECONDS))
    os.kill(pid, signal.SIGSTOP)
    lookup = engine.begin_lookup(keys, timeout=WAY_LONGER)
    reservation = engine.begin_reserve(5, timeout=WAY_LONGER)  # has two, and waits for three
    blocked: list[object] = []
    thread = threading.Thread(target=lambda: blocked.append(engine.lookup(keys, timeout=WAY_LONGER).hit_count))
    thread.start()
    kill(pid)
    assert lookup.result(WAIT_SECONDS).hit_count == 0
    assert reservation.result(WAIT_SECONDS) == []
    thread.join(WAIT_SECONDS)
    assert blocked == [0]


def test_a_node_that_hangs_costs_timeouts_and_is_left_alone_for_a_while(
    attach: Attach, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SUSPECT_SECONDS", 3600.0)  # until it answers
    engine = attach()
    keys = engine.keys(prompt(2))
    store(engine, keys)
    pid = node_pid(connector_config(runtime_dir))
    os.kill(pid, signal.SIGSTOP)
    for _ in range(3):
        assert engine.lookup(keys, timeout=0.01).hit_count == 0
    assert engine.counters.lookup_timeouts == 3
    assert engine.begin_lookup(keys, timeout=WAY_LONGER).result(WAIT_SECONDS).hit_count == 0
    assert engine.counters.lookup_timeouts == 3  # not asked
    assert engine.missing(keys, timeout=0.01) == keys
    assert engine.reserve(1, timeout=0.01) == []
    os.kill(pid, signal.SIGCONT)
    until(lambda: load(engine, keys) == 2)  # the late answers were released
    assert engine.counters.node_losses == 0


def test_a_lookup_waits_as_long_as_its_answer_is_worth(attach: Attach, runtime_dir: Path) -> None:
    engine = attach(lookup_timeout=0.01, max_lookup_timeout=WAIT_SECONDS)
    keys = engine.keys(prompt(2))
    store(engine, keys)
    pid = node_pid(connector_config(runtime_dir))
    os.kill(pid, signal.SIGSTOP)
    assert engine.lookup(keys).hit_count == 0, "what it may save is not known"
    engine.prefilled(10**6, 10**6.0)
    patient = engine.begin_lookup(keys)
    assert engine.lookup(keys, timeout=0.01).hit_count == 0, "the caller's timeout holds"
    assert not patient.done()
    os.kill(pid, signal.SIGCONT)
    with patient.result(WAIT_SECONDS) as held:
        assert held.hit_count == 2
    assert engine.counters.lookup_timeouts == 2


def test_a_reservation_that_is_cancelled_while_it_waits_takes_no_extents(attach: Attach, runtime_dir: Path) -> None:
    expected = all_extents(attach(instance_id="one", max_local_cpu_size="512KiB"))
    engine = attach(instance_id="two", max_local_cpu_size="512KiB")
    pid = node_pid(connector_config(runtime_dir, instance_id="two"))
    os.kill(pid, signal.SIGSTOP)
    reservation = engine.begin_reserve(expected // 2, timeout=WAY_LONGER)
    assert reservation.cancel()
    os.kill(pid, signal.SIGCONT)
    until(lambda: all_extents(engine) == expected)


def test_only_timeouts_in_a_row_make_a_node_suspect(
    attach: Attach, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SUSPECT_SECONDS", 3600.0)
    engine = attach()
    keys = engine.keys(prompt(2))
    store(engine, keys)
    pid = node_pid(connector_config(runtime_dir))
    in_a_row = patience.TIMEOUTS_UNTIL_SUSPECT - 1
    for number in range(3):
        os.kill(pid, signal.SIGSTOP)
        for _ in range(in_a_row):
            assert engine.lookup(keys, timeout=0.01).hit_count == 0
        os.kill(pid, signal.SIGCONT)
        assert engine.counters.lookup_timeouts == in_a_row * (number + 1), "one was not sent"
        assert load(engine, keys) == 2


def test_answers_that_arrive_too_late_hold_no_chunks(attach: Attach, runtime_dir: Path) -> None:
    engine = attach(max_local_cpu_size="512KiB", eviction_policy="lru")  # 64 chunks
    keys = engine.keys(prompt(8))
    store(engine, keys)
    pid = node_pid(connector_config(runtime_dir))
    os.kill(pid, signal.SIGSTOP)
    assert engine.lookup(keys, timeout=0.01).hit_count == 0
    os.kill(pid, signal.SIGCONT)
    for number in range(5):
        assert store(engine, engine.keys(prompt(20), salt=str(number))) == 20
    assert load(engine, keys) == 0  # evicted


def test_an_engine_without_a_node_computes_and_attaches_later(runtime_dir: Path, attach: Attach) -> None:
    config = connector_config(runtime_dir, instance_id="later", node_start_timeout=0.1)
    address = config.engine_socket
    engine = attach(node_address=str(address), node_start_timeout=0.1)
    assert not engine.is_attached
    keys = engine.keys(prompt(1))
    assert engine.lookup(keys).hit_count == 0
    assert engine.reserve(1) == []
    assert engine.missing(keys) == keys
    engine.commit([])
    attach(instance_id="later")  # starts the node that the first one waits for
    until(lambda: engine.is_attached)
    store(engine, keys)
    assert load(engine, keys) == 1


def test_the_connection_that_vouches_for_the_memory_lasts_as_long_as_a_view_of_it(attach: Attach) -> None:
    engine = attach()
    (extent,) = engine.reserve(1, timeout=WAIT_SECONDS)
    array = words(extent)
    engine.close()
    del extent
    kept = open_sockets()
    array[:] = 7
    gc.collect()
    assert open_sockets() == kept
    del array
    until(lambda: open_sockets() == kept - 1)


def open_sockets() -> int:
    """Descriptors of this process that are sockets."""
    links = list(Path("/proc/self/fd").iterdir())
    return sum(str(link.readlink()).startswith("socket:") for link in links if link.is_symlink())
