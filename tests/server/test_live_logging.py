"""Running processes apply `log_level` and `log_format` of their file: Kubernetes replaces mounted ConfigMaps."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmkv_client.demo.process import ServerProcess


@pytest.mark.parametrize("command", ["coordinator", "node", "proxy"])
@pytest.mark.timeout(600)
def test_a_process_applies_changed_logging_keys_of_its_file_without_a_restart(
    command: str, runtime_dir: Path, free_port: Callable[[], int]
) -> None:
    of_commands: dict[str, dict[str, Any]] = {
        "coordinator": {"port": free_port(), "http_port": free_port()},
        "node": {"instance_id": "n", "runtime_dir": str(runtime_dir), "max_local_cpu_size": "64MB", "p2p_port": 0},
        "proxy": {"port": free_port(), "prefiller_port": free_port(), "decoder_port": free_port()},
    }
    values = of_commands[command]
    file = runtime_dir / "lmkv.yaml"

    def write(**keys: str) -> None:
        """Replaces the file at once, as kubelet does."""
        new = file.with_suffix(".new")
        new.write_text(yaml.safe_dump({**values, **keys}))
        new.replace(file)

    write(log_level="warning", log_format="text")
    arguments = [sys.executable, "-m", "lmkv", command, "--config", str(file)]
    with ServerProcess(command, arguments, runtime_dir / "log") as process:
        process.start()
        pid = process.pid
        process.wait_until(lambda: serves(values, runtime_dir), "serving", 120.0)

        def logs_json() -> bool:
            write(
                log_level="info", log_format="json"
            )  # again: it may have read the first one before it follows the file
            return any(line["level"] == "info" for line in json_lines(process))

        process.wait_until(logs_json, "logging JSON", 120.0)
        write(log_level="loud")
        process.wait_until(lambda: "log_level must be one of" in process.log(), "refusing the new file", 120.0)
        (refusal, *_) = [line for line in json_lines(process) if "log_level must be one of" in str(line)]
        assert refusal["level"] == "warning", "an invalid file changes nothing"
        assert process.alive
        assert process.pid == pid


def serves(values: dict[str, Any], runtime_dir: Path) -> bool:
    """Whether the process serves, so that it has read the first content of its file."""
    if "port" not in values:
        return (runtime_dir / "n" / "engine.sock").exists()
    try:
        socket.create_connection(("127.0.0.1", values["port"]), 5.0).close()
    except OSError:
        return False
    return True


def json_lines(process: ServerProcess) -> list[dict[str, str]]:
    """What was logged as JSON."""
    return [json.loads(line) for line in process.log().splitlines() if line.startswith("{") and line.endswith("}")]
