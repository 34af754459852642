"""Runs the `bash` blocks of a page as they stand, one after the other in one shell, from a folder of the test's own.

Only this is changed: ports are free ones, hosts are this one, and what runs until it is stopped (servers) runs in the
background; the next line waits until it is ready. The environment keeps engines small and nodes in the folder. With a
nursery, `vllm` is not vLLM's own script but `forked_vllm.py`.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lmkv_client.demo.process import end_processes, free_port, pids_with_environment
from tests.engines.llm import CALM, ENVIRONMENT, Nursery

SERVER = re.compile(r"^(?:[A-Z_0-9]+=\S+ )*(vllm serve|lmkv coordinator|lmkv proxy) ")
PORTS = ("7100", "7200", "8000", "8001", "8002", "9100")
GRPC_PORT, HTTP_PORT = "9000", "9001"
HOSTS = {"head:": "localhost:", "10.0.0.11": "127.0.0.1"}
SETTINGS = CALM | {"max_local_cpu_size": "64MiB", "node_linger": "5"}
HEALTH = {"vllm serve": "health", "lmkv coordinator": "readyz", "lmkv proxy": "health"}
TIMEOUT_SECONDS = 850
FORKED_VLLM = Path(__file__).with_name("forked_vllm.py")

READY = """
set -eo pipefail
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT
ready() {  # the process, the path that answers when it is ready, its log
  until curl -sf -o /dev/null "$2"; do
    kill -0 "$1" || { cat "$3" >&2; exit 1; }
    sleep 0.2
  done
}
joined() {  # the instance is known to the coordinator
  until lmkv instances | grep -q "$1"; do sleep 0.2; done
}
"""


class Shell:
    """One shell in `folder`."""

    def __init__(self, folder: Path, nursery: Nursery | None = None) -> None:
        """With a nursery, it forks what `vllm` is."""
        self._folder = folder
        self._programs = [str(Path(sys.executable).parent)]
        if nursery:
            programs = folder / "programs"
            programs.mkdir()
            launcher = f'exec {sys.executable} {FORKED_VLLM} {nursery.server.path} "$@"'
            (programs / "vllm").write_text(f"#!/bin/sh\n{launcher}\n")
            (programs / "vllm").chmod(0o755)
            self._programs.insert(0, str(programs))
        self._ports = {port: str(free_port()) for port in PORTS}
        grpc = free_pair()
        self._ports |= {GRPC_PORT: str(grpc), HTTP_PORT: str(grpc + 1)}

    def port(self, port: str) -> str:
        """The port that is used instead of the page's."""
        return self._ports[port]

    def run(self, blocks: Sequence[list[str]], *more: str) -> str:
        """What the blocks, and then these lines with the page's ports, write to standard output."""
        lines = [line for block in blocks for line in block] + list(more)
        script = self._folder / "typed.sh"
        script.write_text("\n".join([READY, *(self._runnable(line) for line in lines), ""]))
        own = {f"LMKV_{key.upper()}": value for key, value in SETTINGS.items()}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LMKV_")}
        environment |= ENVIRONMENT | own
        environment |= {
            "LMKV_RUNTIME_DIR": str(self._folder),
            "NO_PROXY": "*",
            "PATH": os.pathsep.join([*self._programs, os.environ["PATH"]]),
            "TMPDIR": str(self._folder),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_USE_AOT_COMPILE": "0",  # without --enforce-eager vLLM would compile the model for a minute
        }
        try:
            done = subprocess.run(
                ["bash", str(script)],
                cwd=self._folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        finally:
            for word in ("serve", "coordinator", "proxy", "node"):
                end_processes(pids_with_environment({"LMKV_RUNTIME_DIR": str(self._folder)}, word))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stdout

    def _runnable(self, line: str) -> str:
        for port, own in self._ports.items():
            line = re.sub(rf"\b{port}\b", own, line)
        for host, own in HOSTS.items():
            line = line.replace(host, own)
        server = SERVER.match(line)
        if server or line.startswith("vllm "):
            line = line.split("    #")[0]
        if line.startswith("vllm ") and "--port" not in line:  # the default is 8000
            line += f" --port {self._ports['8000']}"
        if server is None:
            return line
        port = re.findall(r"--port (\d+)", line)[0]
        if server[1] == "lmkv coordinator":
            port = self._ports[HTTP_PORT]
        log = self._folder / f"{port}.log"
        known = re.search(r"LMKV_INSTANCE_ID=(\S+)", line)
        instance = known[1] if known else "${LMKV_INSTANCE_ID:-}"
        start = f"{line} > {log} 2>&1 &\nready $! http://127.0.0.1:{port}/{HEALTH[server[1]]} {log}"
        if server[1] != "vllm serve":
            return start
        return f'{start}\n[ -z "${{LMKV_COORDINATOR_ADDRESS:-}}" ] || joined "{instance}"'


def free_pair() -> int:
    """A free port whose next one is free, too."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port
