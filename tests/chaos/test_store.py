"""The store: what each fault that it has as a process does to what coordinators keep there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import valkey

from tests.chaos.clock import Clock, compiled
from tests.chaos.store import Store

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    library = compiled(tmp_path)
    assert library is not None, "cc is missing: install gcc"
    store = Store("store", tmp_path, Clock(library, tmp_path / "clock"))
    try:
        store.start()
        store.wait_ready()
        yield store
    finally:
        store.process.kill()


def test_a_store_that_is_killed_comes_back_empty(store: Store) -> None:
    with valkey.Valkey(port=store.port) as client:
        client.set("name", "value")
        store.kill()
        store.start()
        store.wait_ready()
        assert client.dbsize() == 0


def test_when_the_clock_of_a_store_jumps_what_was_to_expire_is_gone(store: Store) -> None:
    with valkey.Valkey(port=store.port) as client:
        client.set("stays", "value")
        client.set("goes", "value", px=round(1000 * HOUR / 2))
        store.clock.jump(HOUR)
        seconds, _ = client.time()
        assert seconds > time.time() + HOUR / 2
        assert (client.get("stays"), client.get("goes")) == (b"value", None)
