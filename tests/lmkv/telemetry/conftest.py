"""A receiver, and variables that name no other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lmkv.telemetry import spans
from tests.lmkv.telemetry.receiver import Receiver, receiving


@pytest.fixture(autouse=True)
def nothing_is_exported_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test says itself what is exported where, and ends it."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    yield
    assert not spans.tracing()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver without clients so far."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def exporting(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """A receiver that this process's variables name."""
    for name, value in receiver.environment.items():
        monkeypatch.setenv(name, value)
    return receiver
