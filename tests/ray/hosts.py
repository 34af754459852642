"""Machines of a Ray cluster, each a raylet of its own on this host, and what Serve runs on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.process import (
    POLL_SECONDS,
    ServerProcess,
    end_processes,
    free_port,
    pids_with_environment,
    session_pids,
)
from tests.support.plain_nixl import plain_nixl

BIN = Path(sys.executable).parent
NAMES = ("host-1", "host-2")
PROCESSORS = 3
"""Two for an engine, one for the ingress."""
NODE_LINGER_SECONDS = 5.0
START_TIMEOUT_SECONDS = 150.0
SERVE_TIMEOUT_SECONDS = 600.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",  # a token would be left in the user's home
    "RAY_health_check_timeout_ms": "60000",
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "LMKV_NODE_LINGER": str(NODE_LINGER_SECONDS),
    "LMKV_PD_BUFFER_DEVICE": "cpu",
    "LMKV_SAVE_PARTIAL_CHUNKS": "false",  # what tests count is whole chunks
    # A busy machine makes tests slow, not wrong.
    "LMKV_NODE_START_TIMEOUT": "60",
    "LMKV_LOOKUP_TIMEOUT": "5",
    "LMKV_COORDINATOR_TIMEOUT": "2",
    "LMKV_LOAD_TIMEOUT": "10",
    "LMKV_REFUSE_SLOW_FETCHES": "false",
}


class Host:
    """One machine of the cluster: `ray start`, with everything that Ray starts below it but a node of lmkv."""

    def __init__(self, name: str, head_port: int, is_head: bool, folder: Path, logs: Path, lmkv: dict[str, str]):
        """`folder` gets Ray's sockets and logs, if this is the head; `lmkv` is configuration of this machine."""
        self.name = name
        self.metrics = Endpoint(name, free_port(), "")
        """What Ray exports of everything that runs here."""
        head = ["--head", "--include-dashboard", "false", "--temp-dir", str(folder / "ray")]
        head += ["--port", str(head_port), "--ray-client-server-port", str(free_port())]
        where = head if is_head else ["--address", f"127.0.0.1:{head_port}"]
        ports = {
            "--metrics-export-port": self.metrics.port,
            "--dashboard-agent-listen-port": free_port(),
            "--dashboard-agent-grpc-port": free_port(),
            "--runtime-env-agent-port": free_port(),
            "--min-worker-port": 0,  # any free ones
            "--max-worker-port": 0,
        }
        command = [str(BIN / "ray"), "start", *where, "--node-ip-address", "127.0.0.1", "--node-name", name]
        command += ["--num-cpus", str(PROCESSORS), "--object-store-memory", str(100 << 20), "--block"]
        command += [str(word) for pair in ports.items() for word in pair]
        path = os.pathsep.join([str(plain_nixl(folder)), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        scratch = folder / "tmp"  # vLLM never removes its sockets
        scratch.mkdir(exist_ok=True)
        environment = ENVIRONMENT | {"PYTHONPATH": path, "TMPDIR": str(scratch)} | lmkv
        self.process = ServerProcess(name, command, logs / f"{name}.log", environment)

    def is_ready(self) -> bool:
        return "Ray runtime started" in self.process.log()

    def pids(self, word: str) -> list[int]:
        """Processes that Ray runs here and that have `word` in their title."""
        found = []
        for pid in session_pids(self.process.pid):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended
                continue
            if word in title:
                found.append(pid)
        return found


class Hosts:
    """A cluster of machines with a coordinator. A context manager that leaves no process and no file behind."""

    def __init__(self, folder: Path, logs: Path, coordinator: CoordinatorProcess) -> None:
        """`folder` gets sockets; its path must be short. `logs` gets what is logged."""
        self.logs = logs
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self._port = free_port()
        self.hosts = {
            name: Host(
                name,
                self._port,
                name == NAMES[0],
                folder,
                logs,
                {
                    "LMKV_INSTANCE_ID": name,
                    "LMKV_RUNTIME_DIR": str(self.runtime_dir),
                    "LMKV_COORDINATOR_ADDRESS": coordinator.address,
                },
            )
            for name in NAMES
        }
        self._folder = folder
        self._environment = ENVIRONMENT | {"RAY_ADDRESS": f"127.0.0.1:{self._port}", "PYTHONUNBUFFERED": "1"}

    def serve_run(self, config: str) -> ServerProcess:
        """`serve run` of a configuration, on its way."""
        file = self._folder / "config.yaml"
        file.write_text(config)
        process = ServerProcess("serve", [str(BIN / "serve"), "run", str(file)], self.logs / "serve.log")
        process.environment = self._environment
        process.start()
        return process

    def run_program(self, program: str) -> None:
        """Runs a program on the cluster to its end."""
        file = self._folder / "program.py"
        file.write_text(program)
        log = self.logs / "program.log"
        with log.open("ab") as output:
            done = subprocess.run(
                [sys.executable, str(file)],
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SERVE_TIMEOUT_SECONDS,
                check=False,
            )
        assert done.returncode == 0, log.read_text(errors="replace")[-4000:]

    def shut_down(self) -> None:
        """Ends what Serve runs, as an operator would."""
        self.run_program("import ray\nfrom ray import serve\n\nray.init()\nserve.shutdown()\n")

    def engine_pids(self, name: str = "") -> list[int]:
        """Replicas with an engine, and the processes of these engines: of one machine, or all."""
        hosts = [self.hosts[name]] if name else self.hosts.values()
        words = ("LLMServer", "Prefill:", "Decode:", "VLLM::")
        return [pid for host in hosts for word in words for pid in host.pids(word)]

    def node_pids(self, name: str = "") -> list[int]:
        """Nodes of lmkv: of one machine, or all."""
        variables = {"LMKV_RUNTIME_DIR": str(self.runtime_dir)}
        return pids_with_environment(variables | ({"LMKV_INSTANCE_ID": name} if name else {}), "node")

    def __enter__(self) -> Self:
        try:
            for host in self.hosts.values():  # the head first
                host.process.start()
                host.process.wait_until(host.is_ready, "ready", START_TIMEOUT_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as last_first:
            last_first.callback(lambda: end_processes(self.node_pids()))
            for host in self.hosts.values():
                host.process.request_stop()  # all at once: each takes its time
                last_first.callback(host.process.stop)


def interrupt(process: ServerProcess) -> None:
    """Ctrl-C."""
    os.kill(process.pid, signal.SIGINT)


def until(happened: Callable[[], bool], what: str, timeout_seconds: float = 60.0) -> None:
    """Waits for something. Fails with what it was when time is up."""
    deadline = time.monotonic() + timeout_seconds
    while not happened():
        assert time.monotonic() < deadline, f"{timeout_seconds:.0f} s passed, and not {what}"
        time.sleep(POLL_SECONDS)
