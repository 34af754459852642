"""Finding an engine's node, and starting it: real `lmkv node` processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError, Unreachable
from lmkv_client.engine.node.launcher import ALREADY_RUN, NodeLauncher, child_environment, last_error, listens
from tests import waiting
from tests.client.engine.nodes import connector_config, kill, kill_all, node_pid

MakeLauncher = Callable[..., NodeLauncher]


@pytest.fixture
def make_launcher(runtime_dir: Path) -> Iterator[MakeLauncher]:
    """Makes launchers, and ends the nodes that they started."""
    made: list[NodeLauncher] = []

    def make(config: ConnectorConfig | None = None, **settings: object) -> NodeLauncher:
        made.append(NodeLauncher(config or connector_config(runtime_dir, **settings), threading.Event()))
        return made[-1]

    yield make
    kill_all(runtime_dir)
    for launcher in made:
        if launcher._node and launcher._node.running:
            kill(launcher._node.pid)


def test_a_shared_node_is_neither_started_nor_expected_to_be_like_anything(make_launcher: MakeLauncher) -> None:
    launcher = make_launcher(node_address="/run/lmkv/engine.sock")
    assert launcher.address() == "unix:/run/lmkv/engine.sock"
    assert launcher.expected_config == {}
    assert launcher._node is None


def test_an_own_node_is_started_once(make_launcher: MakeLauncher, runtime_dir: Path) -> None:
    launcher = make_launcher()
    config = connector_config(runtime_dir)
    address = launcher.address()
    assert address == f"unix:{config.engine_socket}"
    pid = node_pid(config)
    assert launcher.address() == address
    assert make_launcher().address() == address
    assert node_pid(config) == pid
    assert os.getsid(pid) != os.getsid(0), "what ends the engine's terminal must not end the cache"
    assert parent(pid) != os.getpid(), "what ends the engine's descendants must not end the cache"


def test_two_engines_that_start_at_once_share_one_node(make_launcher: MakeLauncher, runtime_dir: Path) -> None:
    first, second = make_launcher(), make_launcher()
    with ThreadPoolExecutor(2) as threads:
        addresses = list(threads.map(NodeLauncher.address, (first, second)))
    assert len(set(addresses)) == 1
    assert listens(connector_config(runtime_dir).engine_socket)


def test_a_node_that_was_killed_is_started_again(make_launcher: MakeLauncher, runtime_dir: Path) -> None:
    launcher, config = make_launcher(), connector_config(runtime_dir)
    launcher.address()
    pid = node_pid(config)
    kill(pid)
    waiting.wait_until(lambda: not listens(config.engine_socket))  # its last threads are still letting go
    launcher.address()
    assert node_pid(config) != pid


def test_what_is_wrong_with_the_configuration_is_said_in_the_nodes_own_words(
    make_launcher: MakeLauncher,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launcher = make_launcher(enable_p2p=True, p2p_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"^p2p_port: cannot listen on"):
            launcher.address()


@pytest.mark.parametrize("key", ["p2p_port", "metrics_port"])
def test_a_port_that_a_lingering_node_holds_is_refused_with_that_nodes_instance_id(
    make_launcher: MakeLauncher, runtime_dir: Path, free_port: Callable[[], int], key: str
) -> None:
    settings = {"enable_p2p": True, "p2p_port": free_port(), "metrics_port": free_port(), "node_linger": 60.0}
    make_launcher(**settings, instance_id="lmvk-1").address()
    pid = node_pid(connector_config(runtime_dir, instance_id="lmvk-1"))
    corrected = settings | {"instance_id": "lmkv-1", ("metrics_port" if key == "p2p_port" else "p2p_port"): 0}
    with pytest.raises(ConfigError, match=rf"^{key}: cannot listen on .* of instance 'lmvk-1' \(process {pid}\)"):
        make_launcher(**corrected).address()


def test_a_node_that_takes_too_long_is_waited_for_next_time(make_launcher: MakeLauncher) -> None:
    launcher = make_launcher(node_start_timeout=0.05)
    with pytest.raises(Unreachable, match="not ready after"):
        launcher.address()
    node = launcher._node
    launcher._config = connector_config(Path(launcher._config.runtime_dir))
    launcher.address()
    assert launcher._node is node, "it was on its way"


def test_a_node_that_cannot_run_says_where_its_log_is(
    make_launcher: MakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(Unreachable, match=r"ended without an error message; see .*node\.log"):
        make_launcher().address()


def test_a_node_that_is_about_to_end_is_waited_for(make_launcher: MakeLauncher, runtime_dir: Path) -> None:
    launcher, config = make_launcher(), connector_config(runtime_dir)
    launcher.address()
    pid = node_pid(config)
    config.engine_socket.unlink()  # as in the moment between its last words and its end
    next_one = make_launcher()
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(next_one.address)
        log = config.instance_dir / "node.log"
        waiting.wait_until(lambda: ALREADY_RUN in log.read_text())
        os.kill(pid, signal.SIGTERM)
        starting.result()
    assert node_pid(config) != pid


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_what_does_not_make_another_node_is_not_expected(make_launcher: MakeLauncher) -> None:
    expected = make_launcher().expected_config
    assert expected["LMKV_MAX_LOCAL_CPU_SIZE"]
    assert expected == make_launcher(log_level="debug", node_linger=7.0).expected_config
    assert expected == make_launcher(chunk_size=64, lookup_timeout=3.0).expected_config, "the node has no such keys"
    assert expected != make_launcher(max_local_cpu_size="32MB").expected_config


def test_a_node_inherits_everything_but_what_vllm_preloads_and_the_engines_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines_own = {"LD_PRELOAD": "libgomp.so", "OTEL_SERVICE_NAME": "engine"}
    inherited = {"HOME": "/somewhere", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    for name, value in (engines_own | inherited).items():
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert not engines_own.keys() & environment.keys()
    assert inherited.items() <= environment.items()


def test_how_a_node_logs_and_where_it_shows_its_metrics_makes_no_other_node_of_it(make_launcher: MakeLauncher) -> None:
    expected = make_launcher().expected_config
    assert expected == make_launcher(log_format="json", metrics_port=9400).expected_config


def test_the_last_error_since_the_start_counts_despite_other_writers(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("lmkv: error: of yesterday\n")
    mark = log.stat().st_size
    assert last_error(log, mark) == ""
    with log.open("a") as file:
        file.write("12:00 lmkv node INFO hello\nlmkv: error: p2p_port: taken\n12:00 lmkv node INFO another's\n")
    assert last_error(log, mark) == "p2p_port: taken"


def test_a_socket_of_a_dead_node_does_not_listen(runtime_dir: Path) -> None:
    path = runtime_dir / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    assert not listens(path)
    assert not listens(runtime_dir / "none.sock")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_node_in_a_folder_of_another_user_is_not_connected_to(make_launcher: MakeLauncher, runtime_dir: Path) -> None:
    launcher = make_launcher()
    path = launcher._config.engine_socket
    path.parent.mkdir()
    os.chown(path.parent, 12345, -1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert listens(path)
        with pytest.raises(ConfigError, match="belongs to user 12345"):
            launcher.address()


def test_a_wait_for_the_node_ends_when_the_engine_does(make_launcher: MakeLauncher) -> None:
    launcher = make_launcher()
    launcher._closing.set()
    with pytest.raises(Unreachable):
        launcher.address()
