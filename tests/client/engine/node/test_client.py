"""The engine's line to real nodes: attaching, losing them, finding them again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmkv import config as configuration
from lmkv import rpc
from lmkv.config import ConnectorConfig, load
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey, join_keys
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import Attachment
from lmkv_client.engine.node import connection
from lmkv_client.engine.node.client import Identified, NodeClient, NodeLost
from lmkv_client.engine.node.connection import next_message
from tests.attach import Heard, acts
from tests.client.engine.nodes import connector_config, is_running, kill, kill_all, node_pid, until
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS

SPEC = small_spec(model_id="small", vocab_size=0)

MakeLink = Callable[..., NodeClient]


def node_log(runtime_dir: Path) -> str:
    return (connector_config(runtime_dir).instance_dir / "node.log").read_text()


@pytest.fixture
def make_link(runtime_dir: Path) -> Iterator[MakeLink]:
    """Makes links that have been started, closes them, and ends the nodes that they started."""
    made: list[NodeClient] = []

    def make(
        config: ConnectorConfig | None = None,
        *,
        spec: KvSpec = SPEC,
        identify: Callable[[], str] | None = None,
        waits: bool = True,
        **options: object,
    ) -> NodeClient:
        link = NodeClient(config or connector_config(runtime_dir, **options), spec, 1)
        made.append(link)
        link.start(identify, WAIT_SECONDS if waits else 0.0)
        return link

    yield make
    for link in made:
        link.close()
    kill_all(runtime_dir)
    for link in made:
        if (node := link._launcher._node) and node.running:
            kill(node.pid)


def next_event(link: NodeClient) -> object:
    until(lambda: bool(link.inbox))
    return link.inbox.popleft()


def attachment(link: NodeClient) -> Attachment:
    """The next attachment, with the welcome behind it."""
    event = next_event(link)
    assert isinstance(event, Attachment)
    welcome = next_event(link)
    assert isinstance(welcome, pb.AttachResponse)
    assert welcome.events[0].welcome.epoch == event.epoch
    return event


def answer(link: NodeClient) -> Heard:
    event = next_event(link)
    assert isinstance(event, pb.AttachResponse), event
    heard = Heard()
    heard.add(event)
    return heard


def test_a_link_starts_a_node_and_talks_to_it(make_link: MakeLink, runtime_dir: Path) -> None:
    link = make_link()
    line = attachment(link)
    assert line.pool_socket == str(connector_config(runtime_dir).pool_socket)
    lookup = pb.LookupChunks(lookup_id="1", chunk_keys=bytes(32), reserve_count=2)
    link.send(line, *acts(lookup=[lookup]))
    said = answer(link)
    assert [found.lookup_id for found in said["found"]] == ["1"]
    while "settled" not in said:
        said = answer(link)
    assert (len(said["credits"]), said["settled"]) == (2, [2])


@pytest.fixture
def attached_specs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The identity and the version of the weights in each greeting of a node."""
    specs: list[tuple[str, str]] = []
    welcome = connection.AttachConnection.welcome

    def note(self: connection.AttachConnection, hello: pb.Hello, timeout: float) -> list[pb.AttachResponse]:
        specs.append((hello.spec.model_id, hello.spec.weight_version))
        return welcome(self, hello, timeout)

    monkeypatch.setattr(connection.AttachConnection, "welcome", note)
    return specs


def test_the_engine_attaches_with_the_identity_that_was_found(
    make_link: MakeLink, runtime_dir: Path, attached_specs: list[tuple[str, str]]
) -> None:
    link = make_link(identify=lambda: "weights-1")
    assert next_event(link) == Identified(model_id="weights-1")
    attachment(link)
    link.change_spec(replace(SPEC, weight_version="2"))
    kill(node_pid(connector_config(runtime_dir)))
    assert isinstance(next_event(link), NodeLost)
    attachment(link)
    assert attached_specs[0] == ("weights-1", "")
    assert set(attached_specs[1:]) == {("weights-1", "2")}


def test_until_the_weights_are_identified_the_engine_runs_without_a_node(
    make_link: MakeLink, attached_specs: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    known = threading.Event()

    def identify() -> str:
        assert known.wait(WAIT_SECONDS)
        return "weights-1"

    link = make_link(identify=identify, waits=False)
    assert not link.is_attached
    assert not link.inbox
    assert "the digest of the weights is not known yet: nothing is looked up or stored until it is" in caplog.text
    known.set()
    assert next_event(link) == Identified(model_id="weights-1")
    attachment(link)
    assert set(attached_specs) == {("weights-1", "")}


@pytest.mark.parametrize("error", [ConfigError("the weights are elsewhere"), OSError("the weights are gone")])
def test_weights_that_cannot_be_identified_are_an_error_at_the_start(make_link: MakeLink, error: Exception) -> None:
    with pytest.raises(ConfigError, match="the weights are"):
        make_link(identify=lambda: fail(error))


def test_weights_that_turn_out_later_not_to_be_identified_are_logged(
    make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    known = threading.Event()

    def identify() -> str:
        assert known.wait(WAIT_SECONDS)
        raise ConfigError("the weights have changed")

    link = make_link(identify=identify, waits=False)
    known.set()
    until(lambda: "nothing is looked up or stored: the weights have changed" in caplog.text)
    link._thread.join(WAIT_SECONDS)
    assert not link.is_attached
    assert not link.inbox


def fail(error: Exception) -> str:
    raise error


def test_many_messages_sent_at_once_are_carried_out_in_order(make_link: MakeLink) -> None:
    link = make_link()
    line = attachment(link)
    for number in range(500):
        link.send(line, *acts(lookup=[pb.LookupChunks(lookup_id=str(number), chunk_keys=bytes(16))]))
        link.send(line, *acts(release=[pb.ReleaseChunks(lookup_id=str(number))]))
    found: list[str] = []
    while len(found) < 500:
        found += [one.lookup_id for one in answer(link)["found"]]
    assert found == [str(number) for number in range(500)]


def test_a_killed_node_is_replaced_and_the_engine_reattached(make_link: MakeLink, runtime_dir: Path) -> None:
    link = make_link()
    first = attachment(link)
    link.send(first, *acts(reserve=1))
    assert answer(link)["credits"]
    kill(node_pid(connector_config(runtime_dir)))
    assert isinstance(next_event(link), NodeLost)
    second = attachment(link)
    assert second.epoch > first.epoch
    assert second.engine_id != first.engine_id
    link.send(second, *acts(reserve=1))
    assert answer(link)["credits"]


def test_what_was_said_to_a_lost_node_is_not_said_to_the_next(make_link: MakeLink, runtime_dir: Path) -> None:
    link = make_link()
    first = attachment(link)
    kill(node_pid(connector_config(runtime_dir)))
    assert isinstance(next_event(link), NodeLost)
    link.send(first, *acts(reserve=3))
    second = attachment(link)
    link.send(first, *acts(reserve=4))
    link.send(second, *acts(reserve=2))
    assert answer(link)["settled"] == [2]


def test_losing_a_node_again_and_again_does_not_make_the_next_attach_slower(
    make_link: MakeLink, runtime_dir: Path
) -> None:
    link = make_link()
    epochs = [attachment(link).epoch]
    for _ in range(2):
        kill(node_pid(connector_config(runtime_dir)))
        assert isinstance(next_event(link), NodeLost)
        epochs.append(attachment(link).epoch)
    assert epochs == sorted(set(epochs))


def test_two_engines_of_one_configuration_share_a_node(make_link: MakeLink) -> None:
    first, second = attachment(make_link()), attachment(make_link())
    assert first.epoch == second.epoch
    assert first.engine_id != second.engine_id


def test_an_idle_node_of_another_configuration_is_replaced(make_link: MakeLink, runtime_dir: Path) -> None:
    first = make_link(node_linger=60.0)
    attachment(first)
    first.close()
    pid = node_pid(connector_config(runtime_dir))
    second = make_link(max_local_cpu_size="32MB")
    assert isinstance(next_event(second), Attachment)
    (welcome,) = answer(second)["welcome"]
    assert welcome.pool_size_bytes == 32 << 20
    assert not is_running(pid)
    (line,) = [line for line in node_log(runtime_dir).splitlines() if "ending:" in line]
    assert re.search(r"ending: engine \S+ replaces this node \(\S*MAX_LOCAL_CPU_SIZE: ", line, re.IGNORECASE)
    assert "stopping: " not in node_log(runtime_dir), "no signal was sent"


@pytest.mark.parametrize("flags", [(), ("--linger",)], ids=["a supervisor's", "a person's"])
def test_a_node_that_no_connector_started_is_never_ended_by_an_engine(
    make_link: MakeLink, runtime_dir: Path, flags: tuple[str, ...]
) -> None:
    config = connector_config(runtime_dir, node_linger=60.0)
    environment = configuration.to_environment(config.node_config(), os.environ)
    command = [sys.executable, "-m", "lmkv", "node", *flags]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as node:
        try:
            until(lambda: config.engine_socket.exists() or node.poll() is not None)
            with pytest.raises(ConfigError) as refused:
                make_link(max_local_cpu_size="32MB")
            for part in ("MAX_LOCAL_CPU_SIZE", "instance_id", "no engine started that node", f"process is {node.pid}"):
                assert part.lower() in str(refused.value).lower()
            assert isinstance(next_event(make_link(node_linger=60.0)), Attachment), "it serves engines as before"
            assert node.poll() is None
        finally:
            node.terminate()
            assert node.stderr is not None
            log = node.stderr.read()
    assert "ending:" not in log
    assert f"stopping: SIGTERM from process {os.getpid()} (" in log


def test_a_busy_node_of_another_configuration_is_a_mistake_that_names_the_key(make_link: MakeLink) -> None:
    busy = make_link()
    line = attachment(busy)
    with pytest.raises(ConfigError, match=r"max_local_cpu_size: .* instance_id"):
        make_link(max_local_cpu_size="32MB")
    busy.send(line, *acts(reserve=1))
    assert answer(busy)["credits"]


def test_a_spec_that_does_not_fit_the_pool_is_a_mistake(make_link: MakeLink) -> None:
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        make_link(spec=replace(SPEC, layer_count=10_000))


def test_a_node_that_cannot_start_as_configured_is_a_mistake(make_link: MakeLink) -> None:
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        make_link(max_local_cpu_size=500_000.0)


def test_without_a_node_the_engine_starts_all_the_same_and_attaches_once_it_is_there(
    make_link: MakeLink, runtime_dir: Path
) -> None:
    own = connector_config(runtime_dir)
    link = make_link(node_address=str(own.engine_socket), node_start_timeout=0.3)
    assert not link.inbox
    attachment(make_link())
    line = attachment(link)
    link.send(line, *acts(reserve=2))
    assert answer(link)["settled"] == [2]


def test_a_mistake_that_shows_later_is_logged_and_the_line_tries_on(make_link: MakeLink, runtime_dir: Path) -> None:
    own = connector_config(runtime_dir)
    large = replace(SPEC, layer_count=10_000)
    link = make_link(node_address=str(own.engine_socket), node_start_timeout=0.2, spec=large)
    attachment(make_link())
    time.sleep(2.0)
    assert link._thread.is_alive()
    assert not link.inbox


def test_closing_ends_the_line_and_leaves_the_node_to_linger(make_link: MakeLink, runtime_dir: Path) -> None:
    link = make_link()
    line = attachment(link)
    pid = node_pid(connector_config(runtime_dir))
    link.close()
    assert not link._thread.is_alive()
    assert is_running(pid)
    link.send(line, *acts(reserve=1))
    link.close()
    until(lambda: not is_running(pid))  # by itself


def test_closing_is_quick_whatever_the_line_is_doing(make_link: MakeLink, runtime_dir: Path) -> None:
    link = make_link(node_address=str(runtime_dir / "none.sock"), node_start_timeout=0.1)
    link.close()
    assert not link._thread.is_alive()


def test_a_node_that_does_not_read_is_given_up(
    make_link: MakeLink, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT", 20)
    link = make_link()
    line = attachment(link)
    pid = node_pid(connector_config(runtime_dir))
    os.kill(pid, signal.SIGSTOP)
    large = acts(drop_damaged=[bytes(16)] * 20_000)
    while not link.inbox:
        link.send(line, *large)
        time.sleep(0.002)
    assert isinstance(next_event(link), NodeLost)
    os.kill(pid, signal.SIGCONT)
    attachment(link)
    assert link._thread.is_alive()


# ---- merging


def merging(sent: list[pb.Act]) -> Iterator[pb.AttachRequest]:
    """What goes over the wire when all of these wait."""
    outbox = deque(sent)
    while outbox:
        yield next_message(outbox)


@pytest.mark.parametrize("key_count", [1, 10_000, 30_000])
def test_acts_that_wait_are_sent_in_their_order_in_messages_up_to_the_limit(key_count: int) -> None:
    keys = [ChunkKey(bytes(16))] * key_count
    sent = [
        act
        for number in range(20)
        for act in acts(
            reserve=number,
            lookup=pb.LookupChunks(lookup_id=str(number), chunk_keys=join_keys(keys)),
            drop_damaged=keys,
            release=pb.ReleaseChunks(lookup_id=str(number)),
            reset=True,
        )
    ]
    merged = list(merging(sent))
    assert [act for message in merged for act in message.acts] == sent
    assert all(message.ByteSize() < rpc.MAX_MESSAGE_BYTES for message in merged)
    assert (len(merged) == 1) == (key_count == 1)


@pytest.mark.parametrize(
    ("written", "flags"),
    [
        ("LMKV_MAX_LOCAL_CPU_SIZE", {}),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", {}),
        ("max_local_cpu_size", {"max_local_cpu_size": "32MB"}),
    ],
)
def test_a_conflict_with_a_node_in_use_names_the_key_as_it_was_written(
    make_link: MakeLink, runtime_dir: Path, written: str, flags: dict[str, str]
) -> None:
    make_link()
    settings = {"instance_id": "n", "runtime_dir": str(runtime_dir), "enable_p2p": "false", "chunk_size": 32}
    env = {} if flags else {written: "0.032"}
    config = load(ConnectorConfig, env=env, flags=settings | flags, flags_place="kv_connector_extra_config")
    with pytest.raises(ConfigError, match=rf"^{written}: the engine expects '[0-9.]+', the running node .* has "):
        make_link(config)


def test_a_conflict_over_a_default_names_the_key(make_link: MakeLink, runtime_dir: Path) -> None:
    make_link(eviction_policy="arc")
    settings = {"instance_id": "n", "runtime_dir": str(runtime_dir), "enable_p2p": "false", "chunk_size": 32}
    settings |= {"max_local_cpu_size": "16MB"}
    config = load(ConnectorConfig, env={}, flags=settings, flags_place="kv_connector_extra_config")
    with pytest.raises(ConfigError, match=r"^eviction_policy: the engine expects 'learned'"):
        make_link(config)


def test_a_client_that_is_closed_after_a_mistake_ends_quietly(make_link: MakeLink, runtime_dir: Path) -> None:
    make_link(eviction_policy="arc")
    settings = {"instance_id": "n", "runtime_dir": str(runtime_dir), "enable_p2p": "false", "chunk_size": 32}
    client = NodeClient(load(ConnectorConfig, env={}, flags=settings, flags_place="kv_connector_extra_config"), SPEC, 1)
    with pytest.raises(ConfigError):
        client.start()
    client.close()
    assert not client._thread.is_alive()


def test_a_wait_delivers_on_the_thread_that_waits(make_link: MakeLink) -> None:
    link = make_link()
    line = attachment(link)
    for number in range(50):
        link.send(line, *acts(lookup=[pb.LookupChunks(lookup_id=str(number), chunk_keys=bytes(16))]))
        while not link.inbox:
            link.wait(10.0)
        assert [found.lookup_id for found in answer(link)["found"]] == [str(number)]


def test_a_wait_ends_when_the_node_is_killed(make_link: MakeLink, runtime_dir: Path) -> None:
    link = make_link()
    attachment(link)
    kill(node_pid(connector_config(runtime_dir)))
    while not link.inbox:
        link.wait(10.0)
    assert isinstance(next_event(link), NodeLost)
    while not link.inbox:
        link.wait(10.0)
    attachment(link)
