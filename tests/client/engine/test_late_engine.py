"""An engine that attaches on a thread: however it ends, nothing of it stays attached."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lmkv.errors import ConfigError
from lmkv_client.engine.late_engine import LateEngine
from tests.waiting import WAIT_SECONDS, wait_until


class Attaching:
    """An attachment that ends when a test says so, and counts what is closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.going = threading.Event()
        self.closed_count = 0
        self._error = error

    def attach(self) -> Any:
        assert self.going.wait(WAIT_SECONDS)
        if self._error:
            raise self._error
        return self

    def close(self) -> None:
        self.closed_count += 1


def test_an_engine_is_there_once_it_is_attached_until_it_is_closed() -> None:
    attaching = Attaching()
    late = LateEngine(attaching.attach, without="it computes")
    assert late.engine is None
    attaching.going.set()
    late.wait()
    assert late.engine is attaching
    assert attaching.closed_count == 0
    late.close()
    late.close()
    assert (late.engine, attaching.closed_count) == (None, 1)


def test_an_engine_that_is_closed_before_it_is_attached_is_closed_when_it_is() -> None:
    attaching = Attaching()
    late = LateEngine(attaching.attach, without="it computes")
    late.close()
    attaching.going.set()
    wait_until(lambda: attaching.closed_count == 1)
    late.wait()
    assert late.engine is None


def test_an_error_is_raised_to_who_waits_and_logged_later(caplog: pytest.LogCaptureFixture) -> None:
    failing = Attaching(ConfigError("node_address: it is wrong"))
    failing.going.set()
    late = LateEngine(failing.attach, without="it computes")
    with pytest.raises(ConfigError, match="it is wrong"):
        late.wait()
    unwatched = Attaching(ConfigError("node_address: it is wrong"))
    late = LateEngine(unwatched.attach, without="it computes")
    late.wait(0.0)
    assert late.engine is None
    unwatched.going.set()
    wait_until(lambda: not late._thread.is_alive())
    assert late.engine is None
