"""The layout map as vLLM's KV events: an index built from events alone equals the map, whatever a consumer missed."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey
from lmkv.tiers import DISK, HOST
from lmkv.v1.cache_service_pb2 import LayoutChange
from lmkv_client import Coordinator as Client
from lmkv_client import kv_event_publisher
from lmkv_client.commands import flags
from lmkv_client.commands.layout import read_token
from lmkv_client.coordinator import LayoutUpdate
from lmkv_client.kv_event_publisher import USER, EventPublisher, is_bound, read_replay
from lmkv_client.kv_events import BATCH_EVENTS, HEARTBEAT_SECONDS, MEDIA, LayoutEvents, Model, PublishedBatch
from tests.client.conftest import RunCommand
from tests.client.event_consumers import Consumer, Index, Subscriber, batch_decoder
from tests.client.layout_fleet import CAPACITY, SPEC, Fleet, drift, has
from tests.server.node.cases import chunk_key
from tests.waiting import WAIT_SECONDS, eventually, until

FINGERPRINT = SPEC.fingerprint


# ---- the batches


def layout_events(buffer_batches: int = 10_000, **options: object) -> LayoutEvents:
    """Events of one known model."""
    events = LayoutEvents(topic="kv@{instance}@{model}", first_sequence=1000, buffer_batches=buffer_batches, **options)  # type: ignore[arg-type]
    events.models[FINGERPRINT] = Model("small", SPEC.chunk_size)
    return events


def change(
    instance_id: str, admitted: list[ChunkKey], evicted: list[ChunkKey] | None = None, tier: str = HOST
) -> LayoutChange:
    """A change as the coordinator sends it."""
    return LayoutChange(
        instance_id=instance_id,
        tier=tier,
        fingerprint=FINGERPRINT,
        admitted_keys=admitted,
        evicted_keys=evicted or [],
    )


def test_chunks_that_are_no_tokens_of_prompts_have_no_events() -> None:
    """Outputs of encoders: a router would count them as beginnings of prompts."""
    events, consumer = layout_events(), Consumer()
    medium = b"m" * 16
    events.models[medium] = Model("small encoder", 128, has_tokens=False)
    key = chunk_key(0)
    ours = LayoutChange(instance_id="n1", tier=HOST, fingerprint=medium, admitted_keys=[chunk_key(1)])
    for reset in (True, False):
        for batch in events.apply(update(change("n1", [key]), ours, reset=reset), 1.0):
            consumer.apply(batch)
    assert list(events.streams) == ["kv@n1@small"]
    assert consumer.index == {("kv@n1@small", MEDIA[HOST], key)}


def update(*changes: LayoutChange, reset: bool = False, snapshot: bool = False) -> LayoutUpdate:
    """An update of a watch."""
    return LayoutUpdate(revision=1, reset=reset, snapshot=snapshot, changes=changes)


def test_consumers_that_miss_batches_have_the_same_index_after_a_replay() -> None:
    """The model is a set of what each instance holds; snapshots come in between, as after a coordinator's restart."""
    draw = random.Random(7)
    for buffer_batches in (1, 3, 10_000):
        events, steady, lossy = layout_events(buffer_batches), Consumer(), Consumer()
        held: dict[str, dict[str, set[ChunkKey]]] = {}
        published: list[PublishedBatch] = []
        batches = list(events.apply(update(reset=True), 0.0))
        for now in range(400):
            name, tier = draw.choice("abc"), draw.choice((HOST, DISK))
            keys = held.setdefault(name, {}).setdefault(tier, set())
            act = draw.random()
            if act < 0.05:
                del held[name]
                batches = list(events.apply(update(LayoutChange(instance_id=name, instance_gone=True)), now))
            elif act < 0.1:
                keys ^= {chunk_key(draw.randrange(50))}  # missed: only the snapshot has it
                parts = [change(*(one, list(some)), tier=at) for one, all_ in held.items() for at, some in all_.items()]
                batches = []
                for first in range(0, len(parts), 2):
                    batches += events.apply(update(*parts[first : first + 2], reset=not first, snapshot=True), now)
                assert not batches, "an incomplete snapshot is published"
                batches = list(events.apply(update(), now))
            else:
                some = {chunk_key(draw.randrange(50)) for _ in range(5)}
                gone = set(list(keys)[: draw.randrange(4)]) - some
                keys |= some
                keys -= gone
                batches = list(events.apply(update(change(name, list(some), list(gone), tier)), now))
            published += batches
            for batch in batches:
                steady.apply(batch)
                if draw.random() < 0.3:
                    continue
                if lossy.lacks(batch):
                    for one in events.replay(lossy.last.get(batch.topic, -1) + 1, now, batch.topic):
                        lossy.apply(one)
                lossy.apply(batch)
            expected = {
                (f"kv@{one}@small", MEDIA[at], key)
                for one, all_ in held.items()
                for at, some in all_.items()
                for key in some
            }
            assert steady.index == expected
        for topic, stream in events.streams.items():
            for one in stream.replay(lossy.last[topic] + 1, 0.0):
                lossy.apply(one)
        assert lossy.index == steady.index
        for topic in events.streams:
            numbers = [batch.sequence for batch in published if batch.topic == topic]
            assert numbers == list(range(1000, 1000 + len(numbers)))


def test_what_is_held_already_is_not_published_again() -> None:
    events = layout_events()
    list(events.apply(update(reset=True), 0.0))
    assert len(list(events.apply(update(change("a", [chunk_key(1)])), 0.0))) == 1
    assert not list(events.apply(update(change("a", [chunk_key(1)], [chunk_key(2)])), 0.0))


def test_an_idle_topic_has_empty_batches_so_that_consumers_notice_the_last_one() -> None:
    events, consumer = layout_events(), Consumer()
    (first,) = events.apply(update(change("a", [chunk_key(1)]), reset=True), 0.0)
    assert not list(events.apply(update(), HEARTBEAT_SECONDS / 2))
    (second,) = events.apply(update(), HEARTBEAT_SECONDS)
    assert consumer.lacks(first)
    consumer.apply(first)
    assert not consumer.lacks(second)
    consumer.apply(second)
    assert consumer.index == {("kv@a@small", "CPU", chunk_key(1))}


def test_large_snapshots_are_split_into_batches_and_replays_never_pass_the_last_number() -> None:
    count = 3 * BATCH_EVENTS
    for buffer_batches in (2, 100):
        events, consumer = layout_events(buffer_batches), Consumer()
        batches = list(events.apply(update(change("a", [chunk_key(one) for one in range(count)]), reset=True), 0.0))
        assert len(batches) == 4
        replayed = list(events.replay(0, 0.0))
        assert replayed[-1].sequence == batches[-1].sequence
        for batch in replayed:
            consumer.apply(batch)
        assert len(consumer.index) == count
        assert not list(events.replay(batches[-1].sequence + 1, 0.0)), "nothing is missed"


def test_one_instance_can_be_selected_and_hashes_can_be_numbers() -> None:
    events = layout_events(instance_id="a", integers=True)
    changes = [change(name, [chunk_key(7)]) for name in "ab"]
    (batch,) = events.apply(update(*changes, LayoutChange(instance_id="b", instance_gone=True), reset=True), 0.0)
    assert batch.topic == "kv@a@small"
    _, stored = batch_decoder.decode(batch.payload).events
    assert (stored.block_hashes, stored.block_size) == ([7], SPEC.chunk_size)


def test_malformed_replay_requests_are_refused() -> None:
    assert read_replay([b"peer", b"", (5).to_bytes(8, "big")]) == (b"peer", 5, None)
    assert read_replay([b"peer", b"", (5).to_bytes(8, "big"), b"kv"]) == (b"peer", 5, "kv")
    for request in ([b"peer"], [b"peer", b"", b"5"], [b"peer", b"x", bytes(8)], [b"peer", b"", bytes(8), b"a", b"b"]):
        with pytest.raises(ValueError, match="frames"):
            read_replay(request)


# ---- the command


async def test_without_pyzmq_or_a_usable_endpoint_the_command_says_what_to_do(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_folder: Path
) -> None:
    endpoint = f"ipc://{short_folder}/none/kv"
    assert await run_command("events", "--endpoint", endpoint) == 2
    assert f"{endpoint}: No such file or directory" in capsys.readouterr().err
    monkeypatch.setattr(kv_event_publisher, "MISSING", True)
    assert await run_command("events") == 2
    assert "pip install '.[events]'" in capsys.readouterr().err


async def connect(context: zmq.asyncio.Context, endpoint: str, token: str = "") -> zmq.asyncio.Socket:
    """A DEALER at a replay endpoint, which gives the token."""
    socket = context.socket(zmq.DEALER)
    if token:
        socket.plain_username, socket.plain_password = USER.encode(), token.encode()
    socket.connect(endpoint)
    return socket


async def test_only_this_host_is_served_by_default_and_with_a_token_only_those_who_have_it(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    arguments = argparse.ArgumentParser()
    flags.events.add_arguments(arguments)
    defaults = arguments.parse_args([])
    assert {defaults.endpoint, defaults.replay_endpoint} == {"tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"}
    assert [is_bound(one) for one in (defaults.endpoint, "tcp://localhost:1", "tcp://[::1]:1", "tcp://*:1")] == [
        True
    ] * 4
    assert not is_bound("tcp://router:5557")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "empty").write_text("\n")
    token = read_token(tmp_path / "token")
    for name in ("none", "empty"):
        with pytest.raises(ConfigError, match="--token-file"):
            read_token(tmp_path / name)
    ends = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    async with EventPublisher(layout_events(), *ends, token):
        context = zmq.asyncio.Context()
        try:
            served = {}
            for given in (token, "wrong", ""):
                socket = await connect(context, ends[1], given)
                await socket.send_multipart([b"", (0).to_bytes(8, "big")])
                served[given] = bool(await socket.poll(WAIT_SECONDS * 1000 if given == token else 1000))
        finally:
            context.destroy(linger=0)
    assert served == {token: True, "wrong": False, "": False}


async def test_batches_for_a_consumer_that_does_not_read_are_bounded(
    monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    monkeypatch.setattr(kv_event_publisher, "MAX_QUEUED", 8)
    end, sent_count, content = f"tcp://127.0.0.1:{free_port()}", 400, bytes(1 << 18)
    async with EventPublisher(layout_events(), end, "") as publisher:
        context = zmq.asyncio.Context()
        try:
            consumer = context.socket(zmq.SUB)
            consumer.set_hwm(1)
            consumer.connect(end)
            consumer.subscribe(b"")
            while not await consumer.poll(10):  # until it is subscribed
                await publisher._publisher.send(b"first")
            for number in range(sent_count):
                await publisher._publisher.send(number.to_bytes(4, "big") + content)
            received: list[bytes] = []
            while not received or received[-1] != b"last":
                await publisher._publisher.send(b"last")
                received.append(await consumer.recv())
            batches = [int.from_bytes(one[:4], "big") for one in received if len(one) > 5]
        finally:
            context.destroy(linger=0)
    assert 0 < len(batches) < sent_count / 2
    assert batches == sorted(set(batches)), "others are dropped, and their numbers show it"


async def test_a_flood_of_malformed_replay_requests_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, free_port: Callable[[], int]
) -> None:
    ends = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    async with EventPublisher(layout_events(), *ends):
        context = zmq.asyncio.Context()
        try:
            socket = await connect(context, ends[1])
            for _ in range(1000):
                await socket.send_multipart([b"", b"bad"])
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            assert await socket.poll(WAIT_SECONDS * 1000)
        finally:
            context.destroy(linger=0)
    assert 0 < caplog.text.count("bad replay request") <= 10


# ---- real coordinators and nodes


@pytest.fixture
async def fleet(short_folder: Path) -> AsyncIterator[Fleet]:
    async with Fleet(short_folder, ("one", "two")) as fleet:
        yield fleet


async def test_an_index_built_from_events_equals_the_map_after_evictions_and_restarts(
    fleet: Fleet, short_folder: Path
) -> None:
    draw = random.Random(3)
    ends = f"ipc://{short_folder}/kv", f"ipc://{short_folder}/kv-replay"
    events = LayoutEvents(topic="kv@{instance}@{model}", first_sequence=1000, buffer_batches=5)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(fleet.address))
        publisher = await stack.enter_async_context(EventPublisher(events, *ends))
        steady = await stack.enter_async_context(Subscriber(*ends))
        lossy = await stack.enter_async_context(Subscriber(*ends, misses=lambda: draw.random() < 0.4))
        following = asyncio.create_task(publisher.follow(client, client.watch(retry_seconds=60.0)))
        stack.callback(following.cancel)
        late: Subscriber | None = None
        for step in range(60):
            name = draw.choice(("one", "two"))
            await fleet.engines[name].store([chunk_key(draw.randrange(200)) for _ in range(3)])
            if step in (20, 40):
                await fleet.restart(name)
            if step == 30:
                await fleet.restart_coordinator()
            if step == 50:
                late = await stack.enter_async_context(Subscriber(*ends))
        assert late
        for name in ("one", "two"):  # every store is in the map once a later one is
            await fleet.engines[name].store([chunk_key(1000)])
            await eventually(partial(has, fleet, (f"kv@{name}@small", "CPU", chunk_key(1000))), True)
        for consumer in (steady, lossy, late):
            await eventually(partial(drift, fleet, consumer), Index())
        assert lossy.missed_count
        assert lossy.replay_count
        assert {medium for _, medium, _ in steady.index} == {"CPU", "STORAGE"}
        assert len([one for one in steady.index if one[1] == "CPU"]) <= 2 * CAPACITY
        assert not following.done()


async def test_a_publisher_waits_for_a_coordinator_that_is_away_when_a_model_is_new(
    fleet: Fleet, short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = LayoutEvents(topic="kv@{instance}@{model}", first_sequence=1000, buffer_batches=5)
    published = asyncio.Event()

    async def updates() -> AsyncGenerator[LayoutUpdate, None]:
        yield update(change("one", [chunk_key(1)]))
        published.set()

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(fleet.address))
        publisher = await stack.enter_async_context(EventPublisher(events, f"ipc://{short_folder}/kv", ""))

        async def follow_until_it_waits() -> None:
            stack.callback(asyncio.create_task(publisher.follow(client, updates())).cancel)
            await until(lambda: "cannot learn the models of new chunks" in caplog.text)

        await fleet.restart_coordinator(meanwhile=follow_until_it_waits)
        await asyncio.wait_for(published.wait(), WAIT_SECONDS)


async def test_the_command_publishes_what_a_coordinator_has(fleet: Fleet, short_folder: Path) -> None:
    ends = f"ipc://{short_folder}/kv", f"ipc://{short_folder}/kv-replay"
    await fleet.engines["one"].store([chunk_key(1)])
    argv = ["events", "--coordinator", fleet.address, "--endpoint", ends[0], "--replay-endpoint", ends[1]]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lmkv", *argv, "--model", "small", "--hashes", "bytes", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr
        assert b"publishing at" in await process.stderr.readline()
        async with Subscriber(*ends) as consumer:
            await until(lambda: ("kv@one@small", "CPU", chunk_key(1)) in consumer.index, "the chunk is published")
    finally:
        process.terminate()
        await process.wait()
