"""The SDK without an event loop, from threads and beside running loops, against a real coordinator."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lmkv_client
from lmkv import errors
from lmkv_client import sync
from tests.client.conftest import Fleet
from tests.server.coordinator.cases import KEYS, PROMPT


def work(address: str) -> dict[str, int]:
    """Everything once."""
    with sync.Coordinator(address, timeout_seconds=10) as coordinator:
        assert coordinator.address == address
        assert [instance.instance_id for instance in coordinator.instances()] == ["a", "b"]
        pin = coordinator.pin(keys=KEYS[:1], position="a", ttl_seconds=60)
        assert [one.pin_id for one in coordinator.pins()] == [pin.pin_id]
        coordinator.unpin(pin.pin_id)
        copy = coordinator.copy(PROMPT, source="a", destination="b")
        assert [progress.chunk_count for progress in copy][-1] == 3
        assert (copy.state, copy.wait(60).chunk_count) == ("done", 3)
        found = coordinator.operation(copy.name)
        found.refresh()
        assert repr(found) == f"<Operation {copy.name}, done>"
        assert [operation.name for operation in coordinator.operations()] == [copy.name]
        assert coordinator.clear(PROMPT, instance_id="a").wait(60).chunk_count == 3
        move = coordinator.move(PROMPT, source="b", destination="a")
        move.cancel()
        with coordinator.lookup_stream() as stream:
            answer = stream.lookup(PROMPT)
        for update in coordinator.watch():
            assert update.reset
            break
        return {holder.instance_id: holder.matched_token_count for holder in answer.holders}


async def test_the_twin_does_what_its_namesake_does(fleet: Fleet) -> None:
    held = await asyncio.to_thread(work, fleet.address)
    assert set(held.values()) == {40}


def test_the_twin_has_the_methods_of_its_namesake_and_their_words() -> None:
    for name in ("Coordinator", "Operation", "LookupStream"):
        namesake, twin = getattr(lmkv_client, name), getattr(sync, name)
        renamed = {"aclose": "close", "__aiter__": "__iter__"}
        for method, function in inspect.getmembers(namesake, inspect.isfunction):
            if not method.startswith("_"):
                own = getattr(twin, renamed.get(method, method))
                assert own.__doc__ or method == "aclose", f"{name}.{method}"
                if method not in renamed and method != "lookup_stream":
                    assert own.__doc__ == function.__doc__


async def test_it_may_be_called_where_another_loop_runs(fleet: Fleet) -> None:
    """Called from a coroutine it blocks its loop, which is the caller's business; so the server has another."""

    async def from_a_coroutine() -> int:
        with sync.Coordinator(fleet.address) as coordinator:
            return coordinator.lookup(PROMPT).holders[0].matched_token_count

    assert await asyncio.to_thread(lambda: asyncio.run(from_a_coroutine())) == 40


async def test_several_threads_share_one_coordinator(fleet: Fleet) -> None:
    def ask_from_threads() -> list[int]:
        with sync.Coordinator(fleet.address) as coordinator, ThreadPoolExecutor(4) as threads:
            answers = threads.map(lambda _: coordinator.lookup(PROMPT), range(40))
            return [answer.holders[0].matched_token_count for answer in answers]

    assert await asyncio.to_thread(ask_from_threads) == [40] * 40


def test_errors_are_the_coordinators_own() -> None:
    with (
        sync.Coordinator("127.0.0.1:1") as coordinator,
        pytest.raises(errors.Unreachable, match=r"no coordinator responds at 127\.0\.0\.1:1"),
    ):
        coordinator.lookup(PROMPT)


def test_closing_is_final_and_leaves_no_thread() -> None:
    before = threading.active_count()
    coordinator = sync.Coordinator("127.0.0.1:1")
    coordinator.close()
    coordinator.close()
    assert threading.active_count() <= before + 1  # gRPC keeps one of its own
    assert "lmkv-client" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="was closed"):
        coordinator.lookup(PROMPT)


async def test_closing_ends_what_other_threads_wait_for(fleet: Fleet) -> None:
    def close_while_watching() -> None:
        coordinator = sync.Coordinator(fleet.address)
        received = threading.Event()

        def watch() -> None:
            for update in coordinator.watch():
                if not update.snapshot:
                    received.set()

        with ThreadPoolExecutor(1) as threads:
            watching = threads.submit(watch)
            assert received.wait(60)
            coordinator.close()
            with pytest.raises(RuntimeError, match="was closed"):
                watching.result(10)

    await asyncio.to_thread(close_while_watching)


def test_an_interrupted_wait_cancels_the_call() -> None:
    """Ctrl-C arrives in the main thread, while it waits for the loop's."""
    with sync.Coordinator("127.0.0.1:1") as coordinator:
        begun, ended = threading.Event(), threading.Event()

        async def wait_for_ever() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        def interrupt() -> None:
            begun.wait(60)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            coordinator._thread.run(wait_for_ever())
        interrupter.join(60)
        assert ended.wait(60)


def test_an_interrupt_while_the_call_is_submitted_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop has the work, and the caller does not know it yet."""
    with sync.Coordinator("127.0.0.1:1") as coordinator:
        loop = coordinator._thread._loop
        submit = loop.call_soon_threadsafe
        begun, ended = threading.Event(), threading.Event()

        async def wait_for_ever() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        def submit_and_interrupt(*args: Any) -> None:
            monkeypatch.undo()
            submit(*args)
            assert begun.wait(60)
            raise KeyboardInterrupt

        monkeypatch.setattr(loop, "call_soon_threadsafe", submit_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            coordinator._thread.run(wait_for_ever())
        assert ended.wait(60)


def test_one_that_is_not_closed_warns() -> None:
    coordinators = [sync.Coordinator("127.0.0.1:1")]
    thread = coordinators[0]._thread
    with pytest.warns(ResourceWarning, match="Coordinator was not closed"):
        coordinators.clear()
    thread.close()
